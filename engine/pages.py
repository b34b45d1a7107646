"""The one ledger of KV pages.

The life of a page:

1. FREE: on the free list, contents meaningless.
2. `allocate` makes it ACTIVE for one owner (a sequence); `share` adds owners. Each owner releases once.
3. `mark_known` says that the prefix cache can find its contents. When the last owner of a known page lets
   go it is CACHED: kept, but the first to be taken when pages are short, oldest release first (fair_lru.py).
4. `forget` makes a CACHED page FREE; `share` makes any CACHED page ACTIVE again.
5. `reserve` and `lease` hold pages until a deadline: LEASED is a page that only leases hold, so time alone
   frees it. `reserve` takes free pages for data that will arrive, `adopt` hands them to a sequence;
   `lease` keeps pages that exist while somebody reads them.
6. `quarantine` names a writer outside this process (a transfer). When the last other holder has let go or
   expired, the page is QUARANTINED until every writer has let go too, and never reused before.
7. A sequence may let go of a page that a launched step has yet to write: the steps' latest mark is noted then
   (step_marks.py). Sequences may have the page at once, for their steps come after on the model's stream.
   Whoever else is to write it waits until the mark has passed on every rank: `free_after` tells which.
   Nothing is held back for that in here, and on a CPU, where a launched step has ended, nothing waits.

A page is in exactly one state, so free + active + cached + leased + quarantined == total. Its
generation grows each time it leaves FREE: (page, generation) names contents that can't come back.
"""

from collections.abc import Iterable, Sequence

from baton.engine.fair_lru import FairLru, Group
from baton.engine.leases import LeaseTable, Owner
from baton.engine.page_accounts import PageAccounts
from baton.engine.page_state import PageState as PageState
from baton.engine.step_marks import NOTHING, StepMarks
from baton.errors import IntegrityError

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
