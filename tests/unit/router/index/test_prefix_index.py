from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from baton.clock import ManualClock
from baton.messages.bounds import SHORT_KEY_BYTES
from baton.messages.control import KvEventBatch
from baton.messages.workers import Tier, Worker
from baton.router.index import prefix_index
from baton.router.index.prefix_index import MAX_BISECTED, NUM_SPARE_PAGES, PrefixIndex
from baton.router.index.table import EMPTY, MAX_SLOTS, WIDTH, KeyTable, SlotSets, keys_of
from tests.node_peers import a_worker
from tests.unit.router.prefix_index_twin import Twin, TwinWorker
from tests.unit.router.router_cluster import stored

RNG = np.random.default_rng(0)
CHAIN = RNG.bytes(20 * SHORT_KEY_BYTES)
W0, W1 = a_worker("w0"), a_worker("w1")
PROMPT_PAGES = 300


def an_index(*workers: Worker, max_pages: int = prefix_index.MAX_PAGES) -> PrefixIndex:
    index = PrefixIndex(ManualClock(), max_pages)
    for worker in workers:
        index.join(worker)
    return index


def held(index: PrefixIndex, worker_id: str, keys: bytes = CHAIN) -> int:
    slot = index.slot(worker_id)
    assert slot is not None
    return index.holdings(keys).num_pages(1 << slot)


def holdings_match(index: PrefixIndex, keys: bytes, lengths: list[int], name: str = "d") -> bool:
    """Join workers that hold these numbers of first pages; true when the index agrees."""
    workers = [a_worker(f"{name}{number}", num_pages=PROMPT_PAGES) for number in range(len(lengths))]
    for worker, num in zip(workers, lengths, strict=True):
        index.join(worker)
        index.apply(worker.id, stored(keys[: num * SHORT_KEY_BYTES]))
    return [held(index, worker.id, keys) for worker in workers] == lengths


@given(st.lists(st.integers(0, PROMPT_PAGES), min_size=1, max_size=6))
def test_holdings_are_the_reported_pages(lengths: list[int]) -> None:
    index = PrefixIndex(ManualClock(), 2 * PROMPT_PAGES * len(lengths))
    assert holdings_match(index, RNG.bytes(PROMPT_PAGES * SHORT_KEY_BYTES), lengths)


def test_holdings_are_exact_where_workers_differ_too_often_for_bisection() -> None:
    lengths = list(range(0, PROMPT_PAGES + 1, PROMPT_PAGES // (2 * MAX_BISECTED)))
    assert holdings_match(an_index(), RNG.bytes(PROMPT_PAGES * SHORT_KEY_BYTES), lengths)


@given(st.lists(st.lists(st.integers(0, PROMPT_PAGES), min_size=1, max_size=4), min_size=1, max_size=4))
def test_remembered_run_ends_of_another_prompt_mislead_nothing(prompts: list[list[int]]) -> None:
    index, first = (
        PrefixIndex(ManualClock(), 2 * PROMPT_PAGES * sum(map(len, prompts))),
        RNG.bytes(SHORT_KEY_BYTES),
    )
    for number, lengths in enumerate(prompts):
        keys = first + RNG.bytes(SHORT_KEY_BYTES * (PROMPT_PAGES - 1))
        assert holdings_match(index, keys, lengths, f"w{number}-")


def test_remembered_run_ends_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_index, "MAX_RUN_ENDS", 4)
    index = an_index(W0)
    for _ in range(20):
        assert holdings_match(index, RNG.bytes(PROMPT_PAGES * SHORT_KEY_BYTES), [7], "w")
        index.forget(a_worker("w0").id)


def test_malformed_events_are_dropped() -> None:
    index = an_index(W0)
    index.apply(W0.id, stored(CHAIN[:-1]))
    assert index.num_pages == 0
    assert not index.is_known(W0.id)


def test_expectations_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_index, "MAX_EXPECTATIONS", 4)
    index = an_index(W0)
    for number in range(20):
        index.expect(W0.id, CHAIN[number * SHORT_KEY_BYTES : (number + 1) * SHORT_KEY_BYTES], 100.0)
    assert index.num_pages == 4


def test_flood_of_events_costs_only_its_own_worker() -> None:
    index = an_index(W0, W1)
    index.apply(W1.id, stored(CHAIN))
    for number in range(100):
        index.apply(W0.id, stored(RNG.bytes(1000 * SHORT_KEY_BYTES), number * 1000))
    assert held(index, W1.id) == 20
    assert index.num_pages <= 20 + W0.num_pages + NUM_SPARE_PAGES
    index.check_integrity()


@pytest.mark.slow
def test_ten_million_pages_of_one_worker_cost_no_memory() -> None:
    index, message = an_index(W0, W1), 10_000
    index.apply(W1.id, stored(CHAIN))
    for number in range(1000):
        if number == 100:
            before = psutil.Process().memory_info().rss
        index.apply(W0.id, stored(RNG.bytes(message * SHORT_KEY_BYTES), number * message))
    assert psutil.Process().memory_info().rss - before < 16 << 20
    assert index.num_pages <= 20 + W0.num_pages + NUM_SPARE_PAGES
    assert held(index, W1.id) == 20


def test_worker_past_its_share_keeps_the_pages_of_recent_dispatches() -> None:
    index = an_index(W0, max_pages=1000)
    index.apply(W0.id, stored(CHAIN))
    for number in range(10):
        index.apply(W0.id, stored(RNG.bytes(300 * SHORT_KEY_BYTES), 20 + number * 300))
        index.expect(W0.id, CHAIN, 1.0)
    assert held(index, W0.id) == 20
    assert index.num_pages <= 1000


def test_shares_grow_when_workers_leave() -> None:
    index = an_index(W0, W1, max_pages=1000)
    index.forget(W1.id)
    index.apply(W0.id, stored(RNG.bytes(900 * SHORT_KEY_BYTES)))
    assert index.num_pages == 900


def test_worker_without_a_slot_is_not_known() -> None:
    index = an_index(*(a_worker(f"w{number}", id=f"{number:032x}") for number in range(MAX_SLOTS)))
    one_more = a_worker("one-more")
    index.join(one_more)
    assert index.slot(one_more.id) is None and not index.is_known(one_more.id)
    index.forget(f"{0:032x}")
    index.join(one_more)
    assert index.slot(one_more.id) is not None


def test_exported_pages_are_the_same_after_restore() -> None:
    index, other = an_index(W0), an_index(W0)
    index.apply(W0.id, stored(CHAIN[: 5 * SHORT_KEY_BYTES]))
    index.apply(W0.id, stored(CHAIN[5 * SHORT_KEY_BYTES : 9 * SHORT_KEY_BYTES], 5, tier=Tier.HOST))
    index.expect(W0.id, CHAIN, 1.0)
    other.apply(W0.id, stored(CHAIN))
    next_number = index.next_number(W0.id)
    assert next_number == 9
    other.restore(W0.id, next_number, index.export(W0.id))
    assert held(other, W0.id) == other.num_reported(W0.id, CHAIN) == 9
    assert other.export(W0.id) == index.export(W0.id)
    assert other.outside(W0.id, CHAIN, 9) == (4, 0)
    assert other.apply(W0.id, stored(CHAIN[9 * SHORT_KEY_BYTES :], 9))
    assert held(other, W0.id) == 20
    other.check_integrity()


def test_warm_up_changes_no_entry() -> None:
    index = an_index(W0)
    index.apply(W0.id, stored(CHAIN))
    index.warm_up()
    assert held(index, W0.id) == 20
    index.check_integrity()


def test_sets_are_bounded_and_unused_ones_make_room() -> None:
    sets = SlotSets(max_sets=4)
    empty = np.array([EMPTY], np.int32)
    first = [sets.joined(empty, slot) for slot in range(3)]
    assert len({int(each[0]) for each in first}) == 3
    assert sets.joined(empty, 3)[0] == EMPTY
    assert sets.num_refused == 1
    sets.left(first[0], 0)
    assert sets.slots(int(sets.joined(empty, 3)[0])) == 1 << 3


def test_page_without_a_set_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_index, "MAX_SETS", 1)
    index = an_index(W0)
    index.apply(W0.id, stored(CHAIN))
    assert index.num_pages == 0
    assert held(index, W0.id) == 0


def test_full_table_refuses_keys_and_finds_the_others() -> None:
    table = KeyTable(8, np.int32)
    keys = keys_of(RNG.bytes(200 * SHORT_KEY_BYTES))
    cells, new = table.place(keys)
    num_cells = table.keys.size
    assert new.size == 200
    assert 0.8 * num_cells <= len(table) == np.count_nonzero(cells >= 0) <= num_cells < 200
    assert (table.find(keys) == cells).all()
    table.remove(cells[cells >= 0])
    assert len(table) == 0
    assert (table.find(keys) < 0).all()


def test_table_at_its_load_refuses_next_to_nothing() -> None:
    table = KeyTable(100_000, np.int32)
    keys = keys_of(RNG.bytes(100_000 * SHORT_KEY_BYTES))
    num_placed = sum(int((table.place(part)[0] >= 0).sum()) for part in np.split(keys, 100))
    assert num_placed >= 99_990
    assert table.keys.size * WIDTH <= 100_000 * 16


def test_crowded_keys_get_a_larger_table_within_bounds() -> None:
    index = an_index(W0)
    inverse = pow(0x9E3779B97F4A7C15, -1, 2**64)  # of the table's multiplier
    # All in the first group.
    crowd = np.array([number * inverse % 2**64 for number in range(1, 1001)], "<u8")
    before = psutil.Process().memory_info().rss
    index.apply(W0.id, stored(crowd.tobytes()))
    assert psutil.Process().memory_info().rss - before < 16 << 20
    assert WIDTH <= index.num_pages <= 1000
    index.check_integrity()
    index.apply(W0.id, stored(CHAIN, 1000))
    assert held(index, W0.id) == 20


NAMES = ("w0", "w1", "w2")
LIVES = st.sampled_from([a_worker(name) for name in NAMES])
KEYS = [bytes([number]) * 8 for number in range(12)]  # key 0 is all zeros: the mark of an empty cell
CHAINS = st.lists(st.sampled_from(KEYS), max_size=8, unique=True).map(b"".join)
CHANGES = st.lists(st.sampled_from(KEYS), max_size=8).map(b"".join)
TIERS = st.sampled_from([None, *Tier])


class IndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.index = PrefixIndex(self.clock, 10_000)
        self.twin = Twin()

    @rule(worker=LIVES)
    def join(self, worker: Any) -> None:
        self.index.join(worker)
        self.twin.workers.setdefault(worker.id, TwinWorker())

    @rule(worker=LIVES)
    def forget(self, worker: Any) -> None:
        self.index.forget(worker.id)
        self.twin.workers.pop(worker.id, None)

    @rule(worker=LIVES, keys=CHANGES, tier=TIERS, skipped=st.integers(-3, 1), is_snapshot=st.booleans())
    def say(self, worker: Any, keys: bytes, tier: Tier | None, skipped: int, is_snapshot: bool) -> None:
        """skipped: below 0 some were told before, above 0 some were lost."""
        if worker.id not in self.twin.workers:
            return
        known = self.twin.workers[worker.id].next_number
        first = max(0, (known or 0) + skipped)
        events = KvEventBatch(first=first, keys=keys, tier=tier, is_snapshot=is_snapshot)
        assert self.index.apply(worker.id, events) == self.twin.apply(worker.id, events)

    @rule(worker=LIVES, keys=CHAINS, ttl_s=st.sampled_from([1.0, 3.0]))
    def expect(self, worker: Any, keys: bytes, ttl_s: float) -> None:
        if worker.id in self.twin.workers:
            self.index.expect(worker.id, keys, ttl_s)
            self.twin.expect(worker.id, keys, self.clock.now_s() + ttl_s)

    @rule(seconds=st.sampled_from([0.0, 1.0, 2.0]))
    def tick(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.index.tick()
        self.twin.tick(self.clock.now_s())

    @rule(keys=CHAINS)
    def match(self, keys: bytes) -> None:
        holdings = self.index.holdings(keys)
        for worker_id in self.twin.workers:
            slot = self.index.slot(worker_id)
            assert slot is not None
            if self.twin.is_prefix_closed(keys):  # `holdings` bisects, so it relies on this
                assert holdings.num_pages(1 << slot) == self.twin.num_pages(worker_id, keys)

    @rule(worker=LIVES, keys=CHAINS)
    def num_reported(self, worker: Any, keys: bytes) -> None:
        if worker.id in self.twin.workers:
            assert self.index.num_reported(worker.id, keys) == self.twin.num_reported(worker.id, keys)

    @invariant()
    def is_sound(self) -> None:
        self.index.check_integrity()
        for worker_id, worker in self.twin.workers.items():
            for key in KEYS:
                is_held = key in worker.held or key in worker.expected
                assert self.index.holdings(key).num_pages(1 << (self.index.slot(worker_id) or 0)) == is_held
                assert self.index.outside(worker_id, key, 1) == self.twin.outside(worker_id, key)
            assert self.index.is_known(worker_id) == (worker.next_number is not None)


TestIndex: Any = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_pages_below_the_device_are_told_by_tier() -> None:
    index = an_index(W0, W1)
    index.apply(W0.id, stored(CHAIN[: 6 * SHORT_KEY_BYTES]))
    assert index.outside(W0.id, CHAIN, 6) == index.outside(W1.id, CHAIN, 0) == (0, 0)
    index.apply(W0.id, stored(CHAIN[6 * SHORT_KEY_BYTES : 11 * SHORT_KEY_BYTES], 6, tier=Tier.HOST))
    index.apply(W0.id, stored(CHAIN[11 * SHORT_KEY_BYTES :], 11, tier=Tier.DISK))
    assert index.outside(W0.id, CHAIN, 20) == (5, 9)
    assert index.outside(W0.id, CHAIN, 12) == (5, 1)
    assert index.outside(W0.id, CHAIN, 6) == (0, 0)
    assert held(index, W0.id) == index.num_reported(W0.id, CHAIN) == 20
    index.apply(W0.id, stored(CHAIN, 20))  # they are on the device again
    assert index.outside(W0.id, CHAIN, 20) == (0, 0)
