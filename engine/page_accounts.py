"""How many pages each account holds: a page counts once, however many of its users are on the account.

1. `book` says on whose account an owner takes pages from now on; it has none yet.
2. `took` and `let_go` follow what the owner does with pages. Owners that are not booked count for nobody.
3. `close` ends a booking once the owner has let go of all its pages, at once or later.
4. `expect` counts pages that an account is about to get, so that nothing else takes their place in its quota.

Leases and writers are on nobody's account: they are others' business, and end by themselves.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from baton.engine.leases import Owner
from baton.errors import IntegrityError


@dataclass(slots=True, eq=False)
class Booking:
    account: str
    num_pages: int = 0
    is_closed: bool = False


class PageAccounts:
    def __init__(self) -> None:
        self.num_pages: defaultdict[str, int] = defaultdict(int)  # account -> pages; 0 or absent: none
        self._num_expected: Counter[str] = Counter()
        self._bookings: dict[Owner, Booking] = {}

    def book(self, owner: Owner, account: str) -> None:
        """Twice is once. ValueError when the owner is on another account."""
        booking = self._bookings.setdefault(owner, Booking(account))
        if booking.account != account:
            raise ValueError(f"{owner} is on the account {booking.account!r} already, not {account!r}")
        booking.is_closed = False

    def close(self, owner: Owner) -> None:
        """Nothing happens when the owner is not booked."""
        booking = self._bookings.get(owner)
        if booking is not None:
            booking.is_closed = True
            if not booking.num_pages:
                del self._bookings[owner]

    def expect(self, account: str, num_pages: int) -> None:
        """So many pages more are about to come; a negative number takes that back."""
        self._num_expected[account] += num_pages
        if not self._num_expected[account]:
            del self._num_expected[account]

    def held(self, account: str) -> int:
        """Pages that it has, or is about to get."""
        return self.num_pages.get(account, 0) + self._num_expected[account]

    @property
    def num_open(self) -> int:
        """Owners that are booked, and accounts that expect pages: 0 when nobody has or wants any."""
        return len(self._bookings) + len(self._num_expected)

    def took_fresh(self, owner: Owner, num_pages: int) -> None:
        """Pages that nobody else uses."""
        booking = self._bookings.get(owner)
        if booking is not None:
            booking.num_pages += num_pages
            self.num_pages[booking.account] += num_pages

    def took(self, owner: Owner, others: Iterable[Owner]) -> None:
        """A page that these others use."""
        booking = self._bookings.get(owner)
        if booking is not None:
            booking.num_pages += 1
            if not others or not self.num_users(others, booking.account):
                self.num_pages[booking.account] += 1

    def let_go(self, owner: Owner, others: Iterable[Owner]) -> None:
        """A page that these others go on using."""
        booking = self._bookings.get(owner)
        if booking is None:
            return
        booking.num_pages -= 1
        if booking.is_closed and not booking.num_pages:
            del self._bookings[owner]
        if not others or not self.num_users(others, booking.account):
            self._lessen(booking.account)

    def moved(self, owner: Owner, new_owner: Owner, others: Iterable[Owner]) -> None:
        """A page of `owner` is that of `new_owner` now."""
        self.let_go(owner, others)
        self.took(new_owner, others)

    def num_users(self, owners: Iterable[Owner], account: str) -> int:
        """How many of these owners are on the account."""
        bookings = [self._bookings.get(owner) for owner in owners]
        return sum(1 for booking in bookings if booking is not None and booking.account == account)

    def lose(self, gone: Iterable[Owner], owners_of: Iterable[frozenset[Owner]]) -> None:
        """These owners have nothing any more; `owners_of`: of each page, without them."""
        for owner in gone:
            self._bookings.pop(owner, None)
        for booking in self._bookings.values():
            booking.num_pages = 0
        self.num_pages = self._count(owners_of, is_lost=True)

    def check_integrity(self, owners_of: Iterable[frozenset[Owner]]) -> None:
        """Count anew and compare; raises IntegrityError."""
        counted = self._count(owners_of, is_lost=False)
        if counted != {account: num for account, num in self.num_pages.items() if num}:
            raise IntegrityError(
                f"accounts hold {dict(counted)} pages, the ledger says {dict(self.num_pages)}"
            )

    def _count(self, owners_of: Iterable[frozenset[Owner]], *, is_lost: bool) -> defaultdict[str, int]:
        num_pages: defaultdict[str, int] = defaultdict(int)
        for owners in owners_of:
            bookings = [self._bookings[owner] for owner in owners if owner in self._bookings]
            for account in {booking.account for booking in bookings}:
                num_pages[account] += 1
            for booking in bookings if is_lost else ():
                booking.num_pages += 1
        return num_pages

    def _lessen(self, account: str) -> None:
        self.num_pages[account] -= 1
        if not self.num_pages[account]:
            del self.num_pages[account]
