"""The one ledger of KV pages.

The life of a page:

1. FREE: on the free list, contents meaningless.
2. `allocate` makes a page ACTIVE for one owner (a sequence); `share` adds owners. Each owner releases once.
3. `mark_known` says that the prefix cache can find the contents. When the last owner of a known page releases
   it, the page is CACHED: kept, but taken when pages are short, oldest release first (`FairLru`).
4. `forget` makes a CACHED page FREE; `share` makes any CACHED page ACTIVE again.
5. A transfer holds pages until it ends. A page that only transfers hold is LEASED. `reserve` takes free pages
   for incoming data, and `adopt` hands them to a sequence. `hold` keeps pages with contents for a reader.
6. `add_writer` names a writer outside this process. When the last other holder has released the page, it is
   QUARANTINED until every writer has released it, and never reused before.
7. A sequence may release a page that a launched step has yet to write, or to copy to the host; the pool then
   notes the latest step mark. Sequences may have such a page at once, because their steps come later on the
   model's stream. Any other writer waits until every rank has passed the mark that `free_after` returns; the
   pool itself never waits. On a CPU every launched step has ended: there is nothing to wait for.

A page is in exactly one state, so free + active + cached + leased + quarantined == total. The generation of a
page grows each time the page leaves FREE: (page, generation) names contents that never come back.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, Protocol, TypeAlias

from baton.errors import IntegrityError
from baton.fair_queue import FairLru, Group

Owner: TypeAlias = Hashable


# Step marks: how far the steps of one rank have come on its device.
#
# Rank 0 numbers the steps, so a step has the same number on every rank. A mark names a place in a step: some
# of its layers are written, or the step has ended. The rank makes a mark when it has launched that much. On a
# CPU that much is written then; on a GPU, once the event recorded behind it on the model's stream has passed.
# Marks pass in order.
#
# Two waits use marks. A writer outside the model's stream (a receiver, a peer that has mapped the pool) may
# write a page only after the mark of its last release has passed on every rank. A page may be sent only after
# every rank has written it: each rank reads its part once the mark that the push names has passed there. Work
# on the model's own stream, including copies to and from the host, comes after earlier steps without a wait.

ALWAYS_PASSED: Final = 0  # a mark that has always passed
_LAYER_BITS: Final = 16
_WHOLE_STEP: Final = 2**_LAYER_BITS - 1


def mark_of(step: int, num_layers: int | None = None) -> int:
    """The mark in step `step` after the first `num_layers` layers; None: after the whole step."""
    return (step << _LAYER_BITS) + (_WHOLE_STEP if num_layers is None else num_layers)


class StepMarks(Protocol):
    """The progress of one rank's steps."""

    @property
    def launched(self) -> int:
        """The latest mark. Only for the thread that runs the steps."""

    def has_passed(self, mark: int) -> bool:
        """True when everything launched before the mark is written. From any thread."""


class PageState(IntEnum):
    """The state of a KV page; the module's docstring describes its life."""

    FREE = 0
    ACTIVE = 1
    CACHED = 2
    LEASED = 3
    QUARANTINED = 4


@dataclass(slots=True, eq=False)
class Booking:
    """The account of one owner, and how many pages the owner uses."""

    account: str
    num_pages: int = 0
    is_closed: bool = False


class PageAccounts:
    """The number of pages that each account uses. An account is an opaque scheduling key.

    A page counts once for an account, however many owners of that account use it.

    1. `book` sets the account of an owner before it takes pages. Owners without a booking count for no
       account.
    2. The page pool reports the pages that owners take and release.
    3. `close` ends a booking once the owner has released all its pages, now or later.
    4. `expect` counts pages that an account is about to get, so that its quota keeps room for them.

    Transfers and writers count for no account.
    """

    def __init__(self) -> None:
        self.num_pages: defaultdict[str, int] = defaultdict(int)
        self._num_expected: Counter[str] = Counter()
        self._bookings: dict[Owner, Booking] = {}

    def book(self, owner: Owner, account: str) -> None:
        """Set the account of an owner. Idempotent. ValueError when the owner has another account."""
        booking = self._bookings.setdefault(owner, Booking(account))
        if booking.account != account:
            raise ValueError(f"{owner} is on the account {booking.account!r} already, not {account!r}")
        booking.is_closed = False

    def close(self, owner: Owner) -> None:
        """End the owner's booking, if there is one, once it uses no page."""
        booking = self._bookings.get(owner)
        if booking is not None:
            booking.is_closed = True
            if not booking.num_pages:
                del self._bookings[owner]

    def expect(self, account: str, num_pages: int) -> None:
        """Count `num_pages` more pages that are about to come; a negative number takes them back."""
        self._num_expected[account] += num_pages
        if not self._num_expected[account]:
            del self._num_expected[account]

    def held(self, account: str) -> int:
        """Pages that the account uses or expects."""
        return self.num_pages.get(account, 0) + self._num_expected[account]

    @property
    def num_open(self) -> int:
        """Open bookings plus accounts that expect pages."""
        return len(self._bookings) + len(self._num_expected)

    def took_fresh(self, owner: Owner, num_pages: int) -> None:
        """The owner took pages without other users."""
        booking = self._bookings.get(owner)
        if booking is not None:
            booking.num_pages += num_pages
            self.num_pages[booking.account] += num_pages

    def took(self, owner: Owner, others: Iterable[Owner]) -> None:
        """The owner took a page that `others` use."""
        booking = self._bookings.get(owner)
        if booking is not None:
            booking.num_pages += 1
            if not others or not self.num_users(others, booking.account):
                self.num_pages[booking.account] += 1

    def let_go(self, owner: Owner, others: Iterable[Owner]) -> None:
        """The owner released a page that `others` still use."""
        booking = self._bookings.get(owner)
        if booking is None:
            return
        booking.num_pages -= 1
        if booking.is_closed and not booking.num_pages:
            del self._bookings[owner]
        if not others or not self.num_users(others, booking.account):
            self.num_pages[booking.account] -= 1
            if not self.num_pages[booking.account]:
                del self.num_pages[booking.account]

    def num_users(self, owners: Iterable[Owner], account: str) -> int:
        """The number of these owners that have this account."""
        bookings = [self._bookings.get(owner) for owner in owners]
        return sum(1 for booking in bookings if booking is not None and booking.account == account)

    def check_integrity(self, owners_of: Iterable[frozenset[Owner]]) -> None:
        """Compare with a new count; raises IntegrityError. owners_of: of each page."""
        counted = Counter[str]()
        for owners in owners_of:
            bookings = [self._bookings[owner] for owner in owners if owner in self._bookings]
            counted.update({booking.account for booking in bookings})
        if counted != {account: num for account, num in self.num_pages.items() if num}:
            raise IntegrityError(
                f"accounts hold {dict(counted)} pages, the ledger says {dict(self.num_pages)}"
            )


_FREE, _ACTIVE, _CACHED, _LEASED, _QUARANTINED = (int(state) for state in PageState)


class PagePool:
    """Owners and states of `num_pages` pages. Holds no tensor. Not thread-safe."""

    def __init__(self, num_pages: int, page_size: int, steps: StepMarks | None = None) -> None:
        """steps: of the rank that writes the pages; None: every write has ended when a page is released."""
        self._steps = steps
        self._released_at = [self.launched] * num_pages  # the latest mark when a sequence released the page
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, -1, -1))
        self.cached: FairLru[int] = FairLru()
        self.accounts = PageAccounts()
        self._state = bytearray(num_pages)
        self._known = bytearray(num_pages)
        self.groups: list[Group] = [b""] * num_pages  # of known pages, read only
        self._counts = [num_pages, 0, 0, 0, 0]
        self._users: list[frozenset[Owner]] = [frozenset()] * num_pages  # nonempty iff ACTIVE
        self._generation = [0] * num_pages
        self._transfers: dict[int, set[Owner]] = {}  # page -> transfers that hold it, never an empty set
        self._writers: dict[int, set[Owner]] = {}  # page -> writers, never an empty set

    @property
    def launched(self) -> int:
        """The mark of everything launched so far."""
        return ALWAYS_PASSED if self._steps is None else self._steps.launched

    def free_after(self, pages: Iterable[int]) -> int:
        """The mark after which no step uses these pages. No sequence may use them now."""
        return max((self._released_at[page] for page in pages), default=ALWAYS_PASSED)

    def note_copies(self, pages: Iterable[int]) -> None:
        """The step that was launched last copies these pages to the host; they may be free already."""
        launched = self.launched
        for page in pages:
            self._released_at[page] = launched

    @property
    def num_free(self) -> int:
        """Pages on the free list."""
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Pages that are free, or cached and evictable."""
        return len(self._free) + self._counts[_CACHED]

    def count(self, state: PageState) -> int:
        """The number of pages in this state."""
        return self._counts[state]

    def state(self, page: int) -> PageState:
        return PageState(self._state[page])

    def owners(self, page: int) -> frozenset[Owner]:
        """All holders that must release the page before its reuse: users, transfers and writers."""
        return self._users[page].union(self._transfers.get(page, ()), self._writers.get(page, ()))

    def generation(self, page: int) -> int:
        return self._generation[page]

    def is_known(self, page: int) -> bool:
        """True when the prefix cache can find the contents, which must not be written then."""
        return bool(self._known[page])

    def is_available(self, page: int) -> bool:
        return self._state[page] in (_FREE, _CACHED)

    def is_freed_by(self, page: int, num_releases: int) -> bool:
        """True when the page would be available if that many of its owners released it."""
        held_outside = page in self._transfers or page in self._writers
        return len(self._users[page]) == num_releases and not held_outside

    def held_outside(self) -> set[int]:
        """Pages that a transfer or a writer holds, which no sequence can make available."""
        return self._transfers.keys() | self._writers.keys()

    def is_only_held_by(self, page: int, owner: Owner) -> bool:
        """True when `owner` is the page's only holder."""
        return self.owners(page) == {owner}

    def pages_for(self, num_tokens: int) -> int:
        """The number of pages that hold so many tokens."""
        return -(-num_tokens // self.page_size)

    def num_missing(self, num_tokens: int, num_held: int) -> int:
        """The number of pages that `num_held` pages lack for so many tokens."""
        return max(0, self.pages_for(num_tokens) - num_held)

    # Pages of sequences.

    def allocate(self, num_pages: int, owner: Owner) -> list[int]:
        """Take free pages for an owner. The caller has made room; IntegrityError beyond `num_free`."""
        pages = self._take_free(num_pages, _ACTIVE)
        owners = frozenset((owner,))
        for page in pages:
            self._users[page] = owners
        self.accounts.took_fresh(owner, num_pages)
        return pages

    def share(self, pages: Iterable[int], owner: Owner) -> None:
        """Add an owner to pages that are ACTIVE, CACHED or LEASED."""
        for page in pages:
            state, owners = self._state[page], self._users[page]
            if state in (_FREE, _QUARANTINED) or owner in owners or page in self._writers:
                raise IntegrityError(f"page {page} ({self.state(page).name}) cannot be shared with {owner}")
            self._users[page] = owners | {owner}
            self.accounts.took(owner, owners)
            if state != _ACTIVE:
                self._move(page, _ACTIVE)

    def check_used_by(self, pages: Sequence[int], owner: Owner) -> None:
        """IntegrityError unless the owner uses every page and no writer has one. Transfers are no users."""
        for page in pages:
            if owner not in self._users[page] or page in self._writers:
                raise IntegrityError(f"page {page} is held by {set(self.owners(page))}, not used by {owner}")

    def hand_over(self, pages: Sequence[int], owner: Owner, new_owner: Owner) -> None:
        """Replace `owner` by `new_owner`, which uses none of these pages yet."""
        for page in pages:
            others = self._users[page] - {owner}
            self._users[page] = others | {new_owner}
            self.accounts.let_go(owner, others)
            self.accounts.took(new_owner, others)

    def release(self, pages: Sequence[int], owner: Owner) -> None:
        """End the owner's hold (as a user, a transfer or a writer) on each page, last page first.

        Pages come in the order of their tokens and eviction takes the oldest release. With this order a page
        is always evicted before the page that precedes it in its chain.
        """
        launched = self.launched
        for page in reversed(pages):
            owners = self._users[page]
            if owner in owners:
                owners = self._users[page] = owners - {owner}
                self._released_at[page] = launched
                self.accounts.let_go(owner, owners)
            else:
                self._end_outside_hold(page, owner)
            if not owners:
                self._settle(page)

    # Cached pages.

    def mark_known(self, page: int, group: Group = b"") -> None:
        """The prefix cache can find the page. group: of the page once it is cached."""
        if self._state[page] == _FREE or page in self._writers:
            raise IntegrityError(f"page {page} ({self.state(page).name}) has no settled contents to know")
        self._known[page] = 1
        self.groups[page] = group

    def forget(self, page: int) -> None:
        """The prefix cache can no longer find the page; a CACHED page becomes FREE."""
        self._known[page] = 0
        if self._state[page] == _CACHED:
            self._settle(page)

    # Pages of transfers, and quarantine.

    def reserve(self, num_pages: int, transfer: Owner) -> list[int]:
        """Take free pages for incoming data. The caller has made room."""
        pages = self._take_free(num_pages, _LEASED)
        for page in pages:
            self._transfers[page] = {transfer}
        return pages

    def hold(self, pages: Sequence[int], transfer: Owner) -> None:
        """Hold pages with contents, which no writer has, independently of their other owners."""
        for page in pages:
            is_unsettled = self._state[page] in (_FREE, _QUARANTINED) or page in self._writers
            if is_unsettled or transfer in self.owners(page):
                raise IntegrityError(f"page {page} ({self.state(page).name}) cannot be held for {transfer}")
        for page in pages:
            self._transfers.setdefault(page, set()).add(transfer)
            if self._state[page] == _CACHED:
                self._move(page, _LEASED)

    def adopt(self, pages: Sequence[int], transfer: Owner, owner: Owner) -> None:
        """Turn pages of a transfer into pages of a sequence. IntegrityError while a writer has one."""
        for page in pages:
            if page in self._writers:
                raise IntegrityError(f"page {page} still has writers {self._writers[page]}")
            if transfer not in self._transfers.get(page, ()):
                raise IntegrityError(f"page {page} is not held for {transfer}")
        self.share(pages, owner)
        for page in pages:
            _remove(self._transfers, page, transfer)

    def add_writer(self, pages: Sequence[int], owner: Owner) -> None:
        """Record that a writer outside the process may write these held pages until it releases them."""
        for page in pages:
            if self._state[page] in (_FREE, _CACHED) or self._known[page] or owner in self.owners(page):
                raise IntegrityError(f"page {page} ({self.state(page).name}) cannot be written by {owner}")
            self._writers.setdefault(page, set()).add(owner)

    # Checks.

    def check_integrity(self) -> None:
        """Derive every state from the holders and compare; raises IntegrityError."""
        free, counts = set(self._free), [0] * len(PageState)
        if len(free) != len(self._free):
            raise IntegrityError("a page is on the free list twice")
        for page in range(self.num_pages):
            state, expected = self._state[page], self._state_by_holders(page)
            counts[state] += 1
            if state != expected:
                raise IntegrityError(
                    f"page {page} is {PageState(state).name}, its holders say {PageState(expected).name}"
                )
            in_lists = page in free, self.cached.has(page, self.groups[page])
            if in_lists != (state == _FREE, state == _CACHED):
                raise IntegrityError(f"page {page} is {PageState(state).name} but its list disagrees")
        if counts != self._counts or sum(counts) != self.num_pages:
            raise IntegrityError(f"states add up to {counts}, the ledger says {self._counts}")
        self.accounts.check_integrity(self._users)

    def _state_by_holders(self, page: int) -> int:
        if self._users[page]:
            return _ACTIVE
        if page in self._transfers:
            return _LEASED
        if page in self._writers:
            return _QUARANTINED
        return _CACHED if self._known[page] else _FREE

    def _settle(self, page: int) -> None:
        state = self._state_by_holders(page)
        if state != self._state[page]:
            self._move(page, state)

    def _move(self, page: int, state: int) -> None:
        old = self._state[page]
        self._state[page] = state
        self._counts[old] -= 1
        self._counts[state] += 1
        if old == _CACHED:
            self.cached.remove(page, self.groups[page])
        if state == _CACHED:
            self.cached.add(page, self.groups[page])
        elif state == _FREE:
            self._free.append(page)

    def _take_free(self, num_pages: int, state: int) -> list[int]:
        if num_pages > len(self._free):
            raise IntegrityError(f"{num_pages} pages were requested, {len(self._free)} are free")
        pages = [self._free.pop() for _ in range(num_pages)]
        for page in pages:
            self._state[page] = state
            self._generation[page] += 1
        self._counts[_FREE] -= num_pages
        self._counts[state] += num_pages
        return pages

    def _end_outside_hold(self, page: int, owner: Owner) -> None:
        if owner in self._transfers.get(page, ()):
            _remove(self._transfers, page, owner)
        elif owner in self._writers.get(page, ()):
            _remove(self._writers, page, owner)
        else:
            raise IntegrityError(f"page {page} is released by {owner}, held by {set(self.owners(page))}")


def _remove(owners_of: dict[int, set[Owner]], page: int, owner: Owner) -> None:
    owners = owners_of[page]
    owners.remove(owner)
    if not owners:
        del owners_of[page]
