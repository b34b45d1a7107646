"""Every legal call of a page pool in any order, against plain sets of holders."""

from typing import TypeAlias

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.engine.cache.page_pool import PagePool, PageState

Holds: TypeAlias = dict[int, set[str]]  # page -> names of holders


class PoolMachine(RuleBasedStateMachine):
    """Drives a pool with every legal call and compares it with plain sets of holders."""

    NUM_PAGES = 8

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(self.NUM_PAGES, 4)
        self.now_s = 0.0
        self.sequences: dict[str, set[int]] = {}
        self.leases: dict[str, tuple[float, set[int]]] = {}
        self.writers: dict[str, set[int]] = {}
        self.known: set[int] = set()
        self.names = 0

    def name(self) -> str:
        self.names += 1
        owner = f"owner-{self.names}"
        if self.names % 3:
            self.pool.accounts.book(owner, f"account-{self.names % 3}")
        return owner

    def holds(self, kind: str) -> Holds:
        groups = {
            "sequence": self.sequences,
            "lease": {owner: pages for owner, (_, pages) in self.leases.items()},
            "writer": self.writers,
        }
        holds: Holds = {page: set() for page in range(self.NUM_PAGES)}
        for owner, pages in groups[kind].items():
            for page in pages:
                holds[page].add(owner)
        return holds

    def expected_state(self, page: int) -> PageState:
        if self.holds("sequence")[page]:
            return PageState.ACTIVE
        if self.holds("lease")[page]:
            return PageState.LEASED
        if self.holds("writer")[page]:
            return PageState.QUARANTINED
        return PageState.CACHED if page in self.known else PageState.FREE

    def pages_in(self, *states: PageState) -> list[int]:
        return [page for page in range(self.NUM_PAGES) if self.expected_state(page) in states]

    def forget_reused(self) -> None:
        """What nobody holds and the cache does not know is free."""
        self.sequences = {owner: pages for owner, pages in self.sequences.items() if pages}
        self.leases = {owner: lease for owner, lease in self.leases.items() if lease[1]}
        self.writers = {owner: pages for owner, pages in self.writers.items() if pages}

    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        num_pages = data.draw(st.integers(0, self.pool.num_free))
        generations = [self.pool.generation(page) for page in range(self.NUM_PAGES)]
        owner = self.name()
        pages = self.pool.allocate(num_pages, owner)
        assert all(self.pool.generation(page) == generations[page] + 1 for page in pages)
        self.sequences[owner] = set(pages)
        self.forget_reused()

    @rule(data=st.data())
    def reserve(self, data: st.DataObject) -> None:
        num_pages = data.draw(st.integers(0, self.pool.num_free))
        owner, deadline_s = self.name(), self.now_s + data.draw(st.integers(1, 5))
        if num_pages:
            self.leases[owner] = (deadline_s, set(self.pool.reserve(num_pages, owner, deadline_s)))

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        written = self.holds("writer")
        pages = [
            p for p in self.pages_in(PageState.ACTIVE, PageState.CACHED, PageState.LEASED) if not written[p]
        ]
        if pages:
            page, owner = data.draw(st.sampled_from(pages)), self.name()
            self.pool.share([page], owner)
            self.sequences[owner] = {page}

    @rule(data=st.data())
    def lease(self, data: st.DataObject) -> None:
        pages = self.pages_in(PageState.ACTIVE, PageState.CACHED, PageState.LEASED)
        if pages:
            chosen = data.draw(st.lists(st.sampled_from(pages), min_size=1, unique=True))
            owner, deadline_s = self.name(), self.now_s + data.draw(st.integers(1, 5))
            self.pool.lease(chosen, owner, deadline_s)
            self.leases[owner] = (deadline_s, set(chosen))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def hand_over(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.sequences)))
        pages, new_owner = sorted(self.sequences[owner]), self.name()
        if not any(self.holds("writer")[page] for page in pages):
            self.pool.check_used_by(pages, owner)
            self.pool.hand_over(pages, owner, new_owner)
            self.sequences[new_owner] = self.sequences.pop(owner)

    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        """Whatever half-done calls have left in what is derived."""
        lost = data.draw(st.sets(st.sampled_from(sorted(self.sequences) or ["nobody"])))
        if data.draw(st.booleans()):
            self.pool._free.clear()
            self.pool._counts = [7] * len(PageState)
            self.pool._state = bytearray([PageState.CACHED] * self.NUM_PAGES)
        self.pool.lose(lost)
        for owner in lost:
            self.sequences.pop(owner, None)
        self.known.clear()
        self.forget_reused()

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.leases)))
        deadline_s, pages = self.leases[owner]
        new_deadline_s = self.now_s + data.draw(st.integers(1, 5))
        self.pool.extend(owner, new_deadline_s)
        self.leases[owner] = (max(deadline_s, new_deadline_s), pages)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def adopt(self, data: st.DataObject) -> None:
        lease_owner = data.draw(st.sampled_from(sorted(self.leases)))
        _, pages = self.leases[lease_owner]
        if not any(self.holds("writer")[page] for page in pages):
            owner = self.name()
            self.pool.adopt(sorted(pages), lease_owner, owner)
            del self.leases[lease_owner]
            self.sequences[owner] = set(pages)

    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        states = (PageState.ACTIVE, PageState.LEASED, PageState.QUARANTINED)
        pages = [page for page in self.pages_in(*states) if page not in self.known]
        if pages:
            chosen = data.draw(st.lists(st.sampled_from(pages), min_size=1, unique=True))
            owner = self.name()
            self.pool.quarantine(chosen, owner)
            self.writers[owner] = set(chosen)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        groups = [self.sequences, {owner: pages for owner, (_, pages) in self.leases.items()}, self.writers]
        holders = [(owner, pages) for group in groups for owner, pages in sorted(group.items())]
        if holders:
            owner, pages = data.draw(st.sampled_from(holders))
            released = data.draw(st.lists(st.sampled_from(sorted(pages)), min_size=1, unique=True))
            self.pool.release(released, owner)
            pages.difference_update(released)
            self.forget_reused()

    @rule(data=st.data())
    def learn(self, data: st.DataObject) -> None:
        written = self.holds("writer")
        pages = [page for page in self.pages_in(PageState.ACTIVE) if not written[page]]
        if pages:
            page = data.draw(st.sampled_from(pages))
            self.pool.mark_known(page)
            self.known.add(page)

    @rule()
    def evict(self) -> None:
        page = self.pool.oldest_cached()
        assert (page is None) == (not self.pages_in(PageState.CACHED))
        if page is not None:
            self.pool.forget(page)
            self.known.remove(page)

    @rule(seconds=st.integers(1, 4))
    def expire(self, seconds: int) -> None:
        self.now_s += seconds
        ended = {owner for owner, (deadline_s, _) in self.leases.items() if deadline_s <= self.now_s}
        assert set(self.pool.expire(self.now_s)) == ended
        for owner in ended:
            del self.leases[owner]

    @invariant()
    def agrees_with_plain_sets(self) -> None:
        self.pool.check_integrity()
        assert sum(self.pool.count(state) for state in PageState) == self.NUM_PAGES
        sequences, leases, writers = (self.holds(kind) for kind in ("sequence", "lease", "writer"))
        for page in range(self.NUM_PAGES):
            assert self.pool.state(page) is self.expected_state(page)
            assert self.pool.owners(page) == sequences[page] | leases[page] | writers[page]
            deadlines = [self.leases[owner][0] for owner in leases[page]]
            assert self.pool.deadline_s(page) == max(deadlines, default=None)
        for account in ("account-1", "account-2"):
            booked = {
                f"owner-{number}" for number in range(self.names + 1) if account == f"account-{number % 3}"
            }
            used = sum(bool(owners & booked) for owners in sequences.values())
            assert self.pool.accounts.num_pages.get(account, 0) == used
        assert self.pool.num_available == len(self.pages_in(PageState.FREE, PageState.CACHED))


PoolMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestPoolMachine = PoolMachine.TestCase
