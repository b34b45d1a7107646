"""The page pool: legal calls in any order against plain sets of holders, and refusals of illegal calls."""

from collections.abc import Callable
from typing import TypeAlias

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.engine.cache.page_pool import PagePool, PageState
from baton.errors import IntegrityError

Holds: TypeAlias = dict[int, set[str]]  # page -> names of holders


class PoolMachine(RuleBasedStateMachine):
    """Drives a pool with every legal call and compares it with plain sets of holders."""

    NUM_PAGES = 8

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(self.NUM_PAGES, 4)
        self.sequences: dict[str, set[int]] = {}
        self.transfers: dict[str, set[int]] = {}
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
        groups = {"sequence": self.sequences, "transfer": self.transfers, "writer": self.writers}
        holds: Holds = {page: set() for page in range(self.NUM_PAGES)}
        for owner, pages in groups[kind].items():
            for page in pages:
                holds[page].add(owner)
        return holds

    def expected_state(self, page: int) -> PageState:
        if self.holds("sequence")[page]:
            return PageState.ACTIVE
        if self.holds("transfer")[page]:
            return PageState.LEASED
        if self.holds("writer")[page]:
            return PageState.QUARANTINED
        return PageState.CACHED if page in self.known else PageState.FREE

    def pages_in(self, *states: PageState) -> list[int]:
        return [page for page in range(self.NUM_PAGES) if self.expected_state(page) in states]

    def forget_reused(self) -> None:
        """Drop holders without pages."""
        self.sequences = {owner: pages for owner, pages in self.sequences.items() if pages}
        self.transfers = {owner: pages for owner, pages in self.transfers.items() if pages}
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
        owner = self.name()
        if num_pages:
            self.transfers[owner] = set(self.pool.reserve(num_pages, owner))

    def settled_pages(self) -> list[int]:
        """Pages with contents that no writer has."""
        written = self.holds("writer")
        states = (PageState.ACTIVE, PageState.CACHED, PageState.LEASED)
        return [page for page in self.pages_in(*states) if not written[page]]

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        pages = self.settled_pages()
        if pages:
            page, owner = data.draw(st.sampled_from(pages)), self.name()
            self.pool.share([page], owner)
            self.sequences[owner] = {page}

    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        pages = self.settled_pages()
        if pages:
            chosen = data.draw(st.lists(st.sampled_from(pages), min_size=1, unique=True))
            owner = self.name()
            self.pool.hold(chosen, owner)
            self.transfers[owner] = set(chosen)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def hand_over(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.sequences)))
        pages, new_owner = sorted(self.sequences[owner]), self.name()
        if not any(self.holds("writer")[page] for page in pages):
            self.pool.check_used_by(pages, owner)
            self.pool.hand_over(pages, owner, new_owner)
            self.sequences[new_owner] = self.sequences.pop(owner)

    @precondition(lambda self: self.transfers)
    @rule(data=st.data())
    def adopt(self, data: st.DataObject) -> None:
        transfer = data.draw(st.sampled_from(sorted(self.transfers)))
        pages = self.transfers[transfer]
        if not any(self.holds("writer")[page] for page in pages):
            owner = self.name()
            self.pool.adopt(sorted(pages), transfer, owner)
            self.sequences[owner] = self.transfers.pop(transfer)

    @rule(data=st.data())
    def add_writer(self, data: st.DataObject) -> None:
        states = (PageState.ACTIVE, PageState.LEASED, PageState.QUARANTINED)
        pages = [page for page in self.pages_in(*states) if page not in self.known]
        if pages:
            chosen = data.draw(st.lists(st.sampled_from(pages), min_size=1, unique=True))
            owner = self.name()
            self.pool.add_writer(chosen, owner)
            self.writers[owner] = set(chosen)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        groups = (self.sequences, self.transfers, self.writers)
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
        page = self.pool.cached.next_out()
        assert (page is None) == (not self.pages_in(PageState.CACHED))
        if page is not None:
            self.pool.forget(page)
            self.known.remove(page)

    @invariant()
    def agrees_with_plain_sets(self) -> None:
        self.pool.check_integrity()
        assert sum(self.pool.count(state) for state in PageState) == self.NUM_PAGES
        sequences, transfers, writers = (self.holds(kind) for kind in ("sequence", "transfer", "writer"))
        for page in range(self.NUM_PAGES):
            assert self.pool.state(page) is self.expected_state(page)
            owners = sequences[page] | transfers[page] | writers[page]
            assert self.pool.owners(page) == owners
            assert all(self.pool.is_only_held_by(page, owner) == (len(owners) == 1) for owner in owners)
        for account in ("account-1", "account-2"):
            booked = {
                f"owner-{number}" for number in range(self.names + 1) if account == f"account-{number % 3}"
            }
            used = sum(bool(owners & booked) for owners in sequences.values())
            assert self.pool.accounts.num_pages.get(account, 0) == used
        assert self.pool.num_available == len(self.pages_in(PageState.FREE, PageState.CACHED))


PoolMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestPoolMachine = PoolMachine.TestCase


class Crowd:
    """A pool with a page of each kind."""

    def __init__(self) -> None:
        self.pool = PagePool(5, 16)
        (self.used,), (self.known,) = (self.pool.allocate(1, "a") for _ in range(2))
        self.pool.mark_known(self.known)
        (self.leased,), (self.written,) = (self.pool.reserve(1, "transfer") for _ in range(2))
        self.pool.add_writer([self.written], "writer")
        (self.free,) = {*range(5)} - {self.used, self.known, self.leased, self.written}


REFUSED: dict[str, tuple[Callable[[Crowd], object], str]] = {
    "allocate too many": (lambda c: c.pool.allocate(2, "a"), "2 pages were requested, 1 are free"),
    "share free": (lambda c: c.pool.share([c.free], "b"), "cannot be shared"),
    "share written": (lambda c: c.pool.share([c.written], "b"), "cannot be shared"),
    "share again": (lambda c: c.pool.share([c.used], "a"), "cannot be shared"),
    "hold free": (lambda c: c.pool.hold([c.free], "b"), "cannot be held"),
    "hold again": (lambda c: c.pool.hold([c.leased], "transfer"), "cannot be held"),
    "hold written": (lambda c: c.pool.hold([c.written], "b"), "cannot be held"),
    "know free": (lambda c: c.pool.mark_known(c.free), "no settled contents"),
    "know written": (lambda c: c.pool.mark_known(c.written), "no settled contents"),
    "write free": (lambda c: c.pool.add_writer([c.free], "b"), "cannot be written"),
    "write known": (lambda c: c.pool.add_writer([c.known], "b"), "cannot be written"),
    "adopt another's": (lambda c: c.pool.adopt([c.leased], "other", "b"), "not held for other"),
    "adopt written": (lambda c: c.pool.adopt([c.written], "transfer", "b"), "still has writers"),
    "release another's": (lambda c: c.pool.release([c.used], "b"), "released by b"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_illegal_call_is_refused(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(IntegrityError, match=message):
        call(Crowd())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda pool: pool._free.append(0), "list disagrees"),
        (lambda pool: pool.accounts.num_pages.update(a=1), "accounts hold"),
    ],
)
def test_integrity_check_finds_damage(damage: Callable[[PagePool], None], message: str) -> None:
    pool = PagePool(2, 16)
    pool.accounts.book("owner", "a")
    assert pool.allocate(2, "owner") == [0, 1]
    damage(pool)
    with pytest.raises(IntegrityError, match=message):
        pool.check_integrity()


def test_last_page_of_a_released_table_is_evicted_first() -> None:
    pool = PagePool(3, 16)
    pages = pool.allocate(3, "a")
    for page in pages:
        pool.mark_known(page)
    pool.release(pages, "a")
    evicted = []
    while (oldest := pool.cached.next_out()) is not None:
        evicted.append(oldest)
        pool.forget(oldest)
    assert evicted == pages[::-1]
    assert pool.num_free == 3


@pytest.fixture
def pool() -> PagePool:
    pool = PagePool(8, 4)
    for owner in ("a1", "a2"):
        pool.accounts.book(owner, "a")
    pool.accounts.book("b1", "b")
    return pool


def test_handing_over_within_an_account_keeps_its_count(pool: PagePool) -> None:
    pages = pool.allocate(2, "a1")
    pool.hand_over(pages, "a1", "a2")
    assert pool.accounts.num_pages["a"] == 2
    pool.accounts.close("a1")
    pool.accounts.close("a2")
    assert pool.accounts.num_open == 2  # a2 still has pages, b1 has not ended
    pool.release(pages, "a2")
    assert pool.accounts.num_open == 1 and not pool.accounts.num_pages


def test_owner_has_one_account(pool: PagePool) -> None:
    pool.accounts.book("a1", "a")
    with pytest.raises(ValueError, match="on the account 'a' already, not 'b'"):
        pool.accounts.book("a1", "b")
