"""The one ledger of KV pages.

The life of a page:

1. FREE: on the free list, contents meaningless.
2. `allocate` makes it ACTIVE for one owner (a sequence); `share` adds owners. Each owner releases once.
3. `mark_known` says that the prefix cache can find its contents. When the last owner of a known page lets go
   it is CACHED: kept, but the first to be taken when pages are short, oldest release first
   (baton/fair_queue.py).
4. `forget` makes a CACHED page FREE; `share` makes any CACHED page ACTIVE again.
5. `reserve` and `lease` hold pages until a deadline: LEASED is a page that only leases hold, so time alone
   frees it. `reserve` takes free pages for data that will arrive, `adopt` hands them to a sequence;
   `lease` keeps pages that exist while somebody reads them.
6. `quarantine` names a writer outside this process (a transfer). When the last other holder has let go or
   expired, the page is QUARANTINED until every writer has let go too, and never reused before.
7. A sequence may let go of a page that a launched step has yet to write: the steps' latest mark is noted then
   (engine/cache/step_marks.py). Sequences may have the page at once, for their steps come after on the
   model's stream. Whoever else is to write it waits until the mark has passed on every rank: `free_after`
   tells which. Nothing is held back for that in here, and on a CPU, where a launched step has ended, nothing
   waits.

A page is in exactly one state, so free + active + cached + leased + quarantined == total. Its
generation grows each time it leaves FREE: (page, generation) names contents that can't come back.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TypeAlias

from baton.engine.cache.step_marks import NOTHING, StepMarks
from baton.errors import IntegrityError
from baton.fair_queue import FairLru, Group


class PageState(IntEnum):
    """The states of a KV page; pages.py tells its life."""

    FREE = 0
    ACTIVE = 1
    CACHED = 2
    LEASED = 3
    QUARANTINED = 4


# Holds on pages that end by themselves: owner -> deadline and pages.

Owner: TypeAlias = Hashable


@dataclass(slots=True)
class Lease:
    deadline_s: float
    pages: set[int] = field(default_factory=set)


class LeaseTable:
    """One lease an owner, indexed both ways; knows nothing of what a page is."""

    def __init__(self) -> None:
        self._leases: dict[Owner, Lease] = {}
        self.by_page: dict[int, set[Owner]] = {}  # page -> lease owners, never an empty set; read only

    def owners(self, page: int) -> frozenset[Owner]:
        return frozenset(self.by_page.get(page, ()))

    def deadline_s(self, page: int) -> float | None:
        """When time alone has freed the page: the latest deadline on it, None without a lease."""
        owners = self.by_page.get(page)
        return max(self._leases[owner].deadline_s for owner in owners) if owners else None

    def holds(self, owner: Owner, page: int) -> bool:
        lease = self._leases.get(owner)
        return lease is not None and page in lease.pages

    def grant(self, pages: Iterable[int], owner: Owner, deadline_s: float) -> None:
        """Add pages to the owner's lease, whose one deadline becomes `deadline_s`."""
        lease = self._leases.setdefault(owner, Lease(deadline_s))
        lease.deadline_s = deadline_s
        for page in pages:
            lease.pages.add(page)
            self.by_page.setdefault(page, set()).add(owner)

    def extend(self, owner: Owner, deadline_s: float) -> None:
        """Raises KeyError when the lease has ended: the caller no longer owns its pages."""
        lease = self._leases[owner]
        lease.deadline_s = max(lease.deadline_s, deadline_s)

    def drop(self, page: int, owner: Owner) -> None:
        lease = self._leases[owner]
        lease.pages.remove(page)
        if not lease.pages:
            del self._leases[owner]
        owners = self.by_page[page]
        owners.remove(owner)
        if not owners:
            del self.by_page[page]

    def expired(self, now_s: float) -> list[tuple[Owner, list[int]]]:
        return [
            (owner, sorted(lease.pages)) for owner, lease in self._leases.items() if lease.deadline_s <= now_s
        ]


# How many pages each account holds: a page counts once, however many of its users are on the account.
#
# 1. `book` says on whose account an owner takes pages from now on; it has none yet.
# 2. `took` and `let_go` follow what the owner does with pages. Owners that are not booked count for nobody.
# 3. `close` ends a booking once the owner has let go of all its pages, at once or later.
# 4. `expect` counts pages that an account is about to get, so that nothing else takes their place in its
#    quota.
#
# Leases and writers are on nobody's account: they are others' business, and end by themselves.


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


_FREE, _ACTIVE, _CACHED, _LEASED, _QUARANTINED = (int(state) for state in PageState)


class PagePool:
    """Which of `num_pages` pages is whose. Holds no tensor; one thread uses it."""

    def __init__(self, num_pages: int, page_size: int, steps: StepMarks | None = None) -> None:
        """steps: that write the pages; None: all that is to be written is, whenever somebody lets go."""
        self._steps = steps
        self._let_go = [NOTHING] * num_pages  # the latest mark when a sequence let go of the page
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, -1, -1))
        self.cached: FairLru[int] = FairLru()
        self.accounts = PageAccounts()
        self._state = bytearray(num_pages)
        self._known = bytearray(num_pages)
        self.groups: list[Group] = [b""] * num_pages  # of known pages, read only
        self._counts = [num_pages, 0, 0, 0, 0]
        self._owners: list[frozenset[Owner]] = [frozenset()] * num_pages  # nonempty iff ACTIVE
        self._generation = [0] * num_pages
        self._leases = LeaseTable()
        self._writers: dict[int, set[Owner]] = {}  # page -> writers, never an empty set

    @property
    def launched(self) -> int:
        """The mark of all that steps have been told to write so far."""
        return NOTHING if self._steps is None else self._steps.launched

    def free_after(self, pages: Iterable[int]) -> int:
        """The mark after which no step writes these pages, which no sequence uses now."""
        return max((self._let_go[page] for page in pages), default=NOTHING)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Pages that can be had now: free ones, and cached ones after eviction."""
        return len(self._free) + self._counts[_CACHED]

    def count(self, state: PageState) -> int:
        return self._counts[state]

    def state(self, page: int) -> PageState:
        return PageState(self._state[page])

    def owners(self, page: int) -> frozenset[Owner]:
        """Everybody who must let go before the page can be reused."""
        return self._owners[page] | self._leases.owners(page) | self._writers.get(page, set())

    def generation(self, page: int) -> int:
        return self._generation[page]

    def is_known(self, page: int) -> bool:
        """Whether the prefix cache can find its contents, which are settled then: nobody may write them."""
        return bool(self._known[page])

    def deadline_s(self, page: int) -> float | None:
        return self._leases.deadline_s(page)

    def is_available(self, page: int) -> bool:
        return self._state[page] in (_FREE, _CACHED)

    def is_freed_by(self, page: int, num_releases: int) -> bool:
        """Whether the page would be available if that many of its owners let go."""
        held_outside = page in self._leases.by_page or page in self._writers
        return len(self._owners[page]) == num_releases and not held_outside

    def held_outside(self) -> set[int]:
        """Pages with a lease or a writer: no sequence that lets go makes them available."""
        return self._leases.by_page.keys() | self._writers.keys()

    def is_only_used_by(self, page: int, owner: Owner) -> bool:
        """Whether nobody else reads or writes it; leases may be on it."""
        return self._owners[page] == {owner} and page not in self._writers

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    # Pages of sequences.

    def allocate(self, num_pages: int, owner: Owner) -> list[int]:
        """Take free pages. The caller has made room: asking for more than `num_free` is a bug."""
        pages = self._take_free(num_pages, _ACTIVE)
        owners = frozenset((owner,))
        for page in pages:
            self._owners[page] = owners
        self.accounts.took_fresh(owner, num_pages)
        return pages

    def share(self, pages: Iterable[int], owner: Owner) -> None:
        """Add an owner to pages whose contents are in use, cached or leased."""
        for page in pages:
            state, owners = self._state[page], self._owners[page]
            if state in (_FREE, _QUARANTINED) or owner in owners or page in self._writers:
                raise IntegrityError(f"page {page} ({self.state(page).name}) cannot be shared with {owner}")
            self._owners[page] = owners | {owner}
            self.accounts.took(owner, owners)
            if state != _ACTIVE:
                self._move(page, _ACTIVE)

    def check_used_by(self, pages: Sequence[int], owner: Owner) -> None:
        """IntegrityError unless the owner uses each of them (a lease is no use) and no writer has one."""
        for page in pages:
            if owner not in self._owners[page] or page in self._writers:
                raise IntegrityError(f"page {page} is held by {set(self.owners(page))}, not used by {owner}")

    def hand_over(self, pages: Sequence[int], owner: Owner, new_owner: Owner) -> None:
        """Make pages that `owner` uses pages of `new_owner`, who uses none of them yet."""
        for page in pages:
            others = self._owners[page] - {owner}
            self._owners[page] = others | {new_owner}
            self.accounts.moved(owner, new_owner, others)

    def release(self, pages: Sequence[int], owner: Owner) -> None:
        """End the owner's hold on each page, of whatever kind, last page first.

        Last first, because pages come in the order of their tokens and eviction takes the oldest release:
        so a page is always evicted before the page that precedes it in its chain.
        """
        launched = self.launched
        for page in reversed(pages):
            owners = self._owners[page]
            if owner in owners:
                owners = self._owners[page] = owners - {owner}
                self._let_go[page] = launched
                self.accounts.let_go(owner, owners)
            else:
                self._end_outside_hold(page, owner)
            if not owners:
                self._settle(page)

    # Cached pages.

    def mark_known(self, page: int, group: Group = b"") -> None:
        """group: whose share of the cached pages it will be in."""
        if self._state[page] == _FREE or page in self._writers:
            raise IntegrityError(f"page {page} ({self.state(page).name}) has no settled contents to know")
        self._known[page] = 1
        self.groups[page] = group

    def forget(self, page: int) -> None:
        """The prefix cache can no longer find the page: if only the cache kept it, it is free."""
        self._known[page] = 0
        if self._state[page] == _CACHED:
            self._settle(page)

    def oldest_cached(self) -> int | None:
        """The page to evict next: of the group that has most for its weight."""
        return self.cached.next_out()

    # Leases and quarantine.

    def reserve(self, num_pages: int, owner: Owner, deadline_s: float) -> list[int]:
        """Take free pages for data to come, held by a lease. The caller has made room."""
        pages = self._take_free(num_pages, _LEASED)
        self._leases.grant(pages, owner, deadline_s)
        return pages

    def lease(self, pages: Sequence[int], owner: Owner, deadline_s: float) -> None:
        """Hold pages that have contents until the deadline, whatever their present owners do."""
        for page in pages:
            if self._state[page] in (_FREE, _QUARANTINED) or owner in self.owners(page):
                raise IntegrityError(f"page {page} ({self.state(page).name}) cannot be leased to {owner}")
        self._leases.grant(pages, owner, deadline_s)
        for page in pages:
            if self._state[page] == _CACHED:
                self._move(page, _LEASED)

    def extend(self, owner: Owner, deadline_s: float) -> None:
        """Move the owner's deadline, never backwards. KeyError: the lease has ended, its pages are gone."""
        self._leases.extend(owner, deadline_s)

    def adopt(self, pages: Sequence[int], lease_owner: Owner, owner: Owner) -> None:
        """Turn a lease into a sequence's pages; every writer has let go of them."""
        for page in pages:
            if page in self._writers:
                raise IntegrityError(f"page {page} still has writers {self._writers[page]}")
            if not self._leases.holds(lease_owner, page):
                raise IntegrityError(f"page {page} is not leased to {lease_owner}")
        self.share(pages, owner)
        for page in pages:
            self._leases.drop(page, lease_owner)

    def expire(self, now_s: float) -> list[Owner]:
        """End every lease whose deadline has come; return whose they were."""
        expired = self._leases.expired(now_s)
        for owner, pages in expired:
            self.release(pages, owner)
        return [owner for owner, _ in expired]

    def quarantine(self, pages: Sequence[int], owner: Owner) -> None:
        """Record that writer `owner` may write these held pages until it releases them."""
        for page in pages:
            if self._state[page] in (_FREE, _CACHED) or self._known[page] or owner in self.owners(page):
                raise IntegrityError(f"page {page} ({self.state(page).name}) cannot be written by {owner}")
            self._writers.setdefault(page, set()).add(owner)

    # The books.

    def lose(self, owners: Iterable[Owner]) -> None:
        """These own nothing any more, and no page's contents are known.

        All else is derived from who holds what, so a call that was interrupted half-way leaves no trace.
        """
        gone = frozenset(owners)
        self._known = bytearray(self.num_pages)
        self.cached.clear()
        self._free.clear()
        self._counts = [0] * len(PageState)
        self._let_go = [self.launched] * self.num_pages
        for page in reversed(range(self.num_pages)):
            self._owners[page] -= gone
            state = self._state[page] = self._state_by_holders(page)
            self._counts[state] += 1
            if state == _FREE:
                self._free.append(page)
        self.accounts.lose(gone, self._owners)

    def check_integrity(self) -> None:
        """Derive every state anew from who holds what and compare; raises IntegrityError."""
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
        self.accounts.check_integrity(self._owners)

    def _state_by_holders(self, page: int) -> int:
        if self._owners[page]:
            return _ACTIVE
        if page in self._leases.by_page:
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
            raise IntegrityError(f"{num_pages} pages were asked for, {len(self._free)} are free")
        pages = [self._free.pop() for _ in range(num_pages)]
        for page in pages:
            self._state[page] = state
            self._generation[page] += 1
        self._counts[_FREE] -= num_pages
        self._counts[state] += num_pages
        return pages

    def _end_outside_hold(self, page: int, owner: Owner) -> None:
        writers = self._writers.get(page, set())
        if self._leases.holds(owner, page):
            self._leases.drop(page, owner)
        elif owner in writers:
            writers.remove(owner)
            if not writers:
                del self._writers[page]
        else:
            raise IntegrityError(f"page {page} is released by {owner}, held by {set(self.owners(page))}")
