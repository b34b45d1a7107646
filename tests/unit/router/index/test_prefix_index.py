import numpy as np
import psutil
import pytest

from baton.clock import ManualClock
from baton.messages.control import KvEventBatch
from baton.messages.workers import Tier
from baton.pages import KEY_BYTES
from baton.router.index import prefix_index
from baton.router.index.prefix_index import NUM_SPARE_PAGES, PrefixIndex
from baton.router.index.table import EMPTY, MAX_SLOTS, WIDTH, KeyTable, SlotSets, keys_of
from tests.node_peers import a_worker

RNG = np.random.default_rng(0)
CHAIN = RNG.bytes(20 * KEY_BYTES)
W0, W1 = a_worker("w0"), a_worker("w1")


def stored(keys: bytes, first: int = 0, **fields: object) -> KvEventBatch:
    num_pages = len(keys) // KEY_BYTES
    return KvEventBatch(
        first=first,
        keys=keys,
        pages=tuple(range(num_pages)),
        generations=(3,) * num_pages,
        **fields,  # type: ignore[arg-type]
    )


def an_index(*workers: object, **settings: object) -> PrefixIndex:
    index = PrefixIndex(ManualClock(), **settings)  # type: ignore[arg-type]
    for worker in workers:
        index.join(worker)  # type: ignore[arg-type]
    return index


def held(index: PrefixIndex, worker_id: str, keys: bytes = CHAIN) -> int:
    slot = index.slot(worker_id)
    assert slot is not None
    return int(index.match(keys).num_pages[slot])


def test_each_worker_holds_as_much_as_it_said() -> None:
    index = an_index(W0, W1)
    index.apply(W0.id, stored(CHAIN))
    index.apply(W1.id, stored(CHAIN[: 7 * KEY_BYTES]))
    assert (held(index, W0.id), held(index, W1.id)) == (20, 7)
    assert index.locate(W1.id, CHAIN) == (tuple(range(7)), (3,) * 7)


def test_the_host_tier_continues_the_device() -> None:
    index = an_index(W0)
    index.apply(W0.id, stored(CHAIN[: 5 * KEY_BYTES]))
    index.apply(W0.id, stored(CHAIN[5 * KEY_BYTES : 9 * KEY_BYTES], 5, tier=Tier.HOST))
    match = index.match(CHAIN)
    slot = index.slot(W0.id)
    assert slot is not None
    assert [lengths[slot] for lengths in match] == [5, 9]
    assert index.locate(W0.id, CHAIN) == ((0, 1, 2, 3, 4, 0, 1, 2, 3), (3,) * 5 + (0,) * 4)


def test_a_prompt_without_a_full_page_matches_nowhere() -> None:
    index = an_index(W0)
    index.apply(W0.id, stored(CHAIN))
    assert not index.match(b"").num_pages.any()


def test_a_gap_is_told_once_and_mended_by_all_afresh() -> None:
    index = an_index(W0)
    assert index.apply(W0.id, stored(CHAIN[:KEY_BYTES]))
    assert not index.apply(W0.id, stored(CHAIN, first=5))
    assert not index.is_known(W0.id)
    assert index.apply(W0.id, stored(CHAIN, first=25))
    assert not index.is_known(W0.id)
    assert index.apply(W0.id, stored(CHAIN[: 3 * KEY_BYTES], first=40, is_afresh=True))
    assert index.is_known(W0.id)
    assert held(index, W0.id) == 3
    assert index.counters["gaps"] == 1


def test_what_was_told_before_is_not_applied_again() -> None:
    index = an_index(W0)
    index.apply(W0.id, stored(CHAIN))
    removed = KvEventBatch(first=20, keys=CHAIN[-KEY_BYTES:], pages=(-1,), generations=(0,))
    index.apply(W0.id, removed)
    assert index.apply(W0.id, stored(CHAIN))
    assert held(index, W0.id) == 19
    assert index.counters["stale"] == 20


def test_a_worker_that_is_gone_counts_no_more_and_its_next_life_starts_with_nothing() -> None:
    index = an_index(W0, W1)
    index.apply(W0.id, stored(CHAIN))
    index.apply(W1.id, stored(CHAIN))
    index.forget(W0.id)
    assert index.slot(W0.id) is None
    assert np.count_nonzero(index.match(CHAIN).num_pages) == 1
    next_life = a_worker("w0", id="f" * 32)
    index.join(next_life)
    assert held(index, next_life.id) == 0
    index.tick()
    index.check_integrity()
    index.forget(W1.id)
    index.tick()
    assert index.num_pages == 0


def test_late_events_of_a_dead_life_are_counted_and_dropped() -> None:
    index = an_index(W0)
    index.forget(W0.id)
    assert index.apply(W0.id, stored(CHAIN))
    assert index.counters["unknown"] == 20
    assert index.num_pages == 0


@pytest.mark.parametrize("broken", [{"keys": CHAIN[:-1]}, {"generations": (1,)}, {"pages": (1, 2)}])
def test_events_whose_parts_do_not_fit_are_counted_and_dropped(broken: dict[str, object]) -> None:
    index = an_index(W0)
    fields: dict[str, object] = {"first": 0, "keys": CHAIN, "pages": (1,) * 20, "generations": (1,) * 20}
    index.apply(W0.id, KvEventBatch(**{**fields, **broken}))  # type: ignore[arg-type]
    assert index.counters["malformed"] == 1
    assert index.num_pages == 0
    assert not index.is_known(W0.id)


def test_expectations_end_each_in_its_own_time() -> None:
    clock = ManualClock()
    index = PrefixIndex(clock)
    index.join(W0)
    index.expect(W0.id, CHAIN[: 4 * KEY_BYTES], 10.0)
    index.expect(W0.id, CHAIN, 1.0)
    assert held(index, W0.id) == 20
    clock.advance(1.0)
    index.tick()
    assert held(index, W0.id) == 0, "the later expectation was of the first pages as well"
    index.expect(W0.id, CHAIN[: 4 * KEY_BYTES], 10.0)
    index.expect(W0.id, CHAIN[4 * KEY_BYTES :], 1.0)
    clock.advance(1.0)
    index.tick()
    assert held(index, W0.id) == 4
    index.apply(W0.id, stored(CHAIN))
    clock.advance(100.0)
    index.tick()
    assert held(index, W0.id) == 20


def test_there_is_an_end_to_expectations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_index, "MAX_EXPECTATIONS", 4)
    index = an_index(W0)
    for number in range(20):
        index.expect(W0.id, CHAIN[number * KEY_BYTES : (number + 1) * KEY_BYTES], 100.0)
    assert index.num_held(W0.id) == 4


def test_a_flood_costs_its_own_worker_only() -> None:
    index = an_index(W0, W1)
    index.apply(W1.id, stored(CHAIN))
    for number in range(100):
        index.apply(W0.id, stored(RNG.bytes(1000 * KEY_BYTES), number * 1000))
    assert held(index, W1.id) == 20
    assert index.num_held(W0.id) <= W0.num_pages + NUM_SPARE_PAGES
    assert index.counters["given_up"] == 100_000 - index.num_held(W0.id)
    index.check_integrity()


@pytest.mark.slow
def test_ten_million_pages_of_one_worker_cost_no_memory_and_nobody_elses_hints() -> None:
    index, message = an_index(W0, W1), 10_000
    index.apply(W1.id, stored(CHAIN))
    for number in range(100):
        index.apply(W0.id, stored(RNG.bytes(message * KEY_BYTES), number * message))
    before = psutil.Process().memory_info().rss
    for number in range(100, 1000):
        index.apply(W0.id, stored(RNG.bytes(message * KEY_BYTES), number * message))
    assert psutil.Process().memory_info().rss - before < 16 << 20
    assert index.num_held(W0.id) <= W0.num_pages + NUM_SPARE_PAGES
    num_without_a_cell = 10_000_000 - index.num_held(W0.id) - index.counters["given_up"]
    assert 0 <= num_without_a_cell < 1000
    assert held(index, W1.id) == 20


def test_past_its_share_a_worker_keeps_what_prompts_were_sent_to_lately() -> None:
    index = an_index(W0, max_pages=1000)
    index.apply(W0.id, stored(CHAIN))
    for number in range(10):
        index.apply(W0.id, stored(RNG.bytes(300 * KEY_BYTES), 20 + number * 300))
        index.expect(W0.id, CHAIN, 1.0)
    assert held(index, W0.id) == 20
    assert index.num_held(W0.id) <= 1000


def test_shares_grow_again_when_workers_leave() -> None:
    index = an_index(W0, W1, max_pages=1000)
    index.forget(W1.id)
    index.apply(W0.id, stored(RNG.bytes(900 * KEY_BYTES)))
    assert index.num_held(W0.id) == 900


def test_more_lives_than_slots_push_out_what_is_left_of_the_dead() -> None:
    index = an_index()
    for number in range(MAX_SLOTS + 10):
        worker = a_worker("w", id=f"{number:032x}")
        index.join(worker)
        index.apply(worker.id, stored(CHAIN[: 2 * KEY_BYTES]))
        index.forget(worker.id)
    index.join(W0)
    index.apply(W0.id, stored(CHAIN))
    assert held(index, W0.id) == 20
    assert np.count_nonzero(index.match(CHAIN).num_pages) == 1


def test_a_thousand_workers_share_a_beginning_and_one_has_the_rest() -> None:
    workers = [a_worker("w", id=f"{number:032x}") for number in range(1000)]
    index = an_index(*workers)
    for worker in workers:
        index.apply(worker.id, stored(CHAIN[: 4 * KEY_BYTES]))
    index.apply(workers[700].id, stored(CHAIN[4 * KEY_BYTES :], 4))
    lengths = index.match(CHAIN).num_pages
    slot = index.slot(workers[700].id)
    assert lengths[slot] == 20
    assert sorted(lengths.tolist()) == [4] * 999 + [20]


def test_sets_have_an_end_and_those_out_of_use_make_room() -> None:
    sets = SlotSets(max_sets=4)
    empty = np.array([EMPTY], np.int32)
    first = [sets.joined(empty, place) for place in range(3)]
    assert len({int(each[0]) for each in first}) == 3
    assert sets.joined(empty, 3)[0] == EMPTY
    assert sets.num_refused == 1
    sets.left(first[0], 0)
    assert sets.places(int(sets.joined(empty, 3)[0])).devices == 1 << 3


def test_a_page_for_whose_holders_there_is_no_set_is_left_out() -> None:
    index = an_index(W0)
    index._sets = SlotSets(max_sets=1)
    index.apply(W0.id, stored(CHAIN))
    assert index.num_pages == 0
    assert held(index, W0.id) == 0


def test_warming_up_changes_nothing_that_is_held() -> None:
    index = an_index(W0)
    index.apply(W0.id, stored(CHAIN))
    index.warm_up()
    assert held(index, W0.id) == 20
    index.check_integrity()


def test_a_table_that_is_full_refuses_and_finds_all_the_same() -> None:
    table = KeyTable(8, np.int32)
    keys = keys_of(RNG.bytes(200 * KEY_BYTES))
    cells, new = table.place(keys)
    num_cells = table.keys.size
    assert new.size == 200
    assert 0.8 * num_cells <= len(table) == np.count_nonzero(cells >= 0) <= num_cells < 200
    assert (table.find(keys) == cells).all()
    table.remove(cells[cells >= 0])
    assert len(table) == 0
    assert (table.find(keys) < 0).all()


def test_a_table_at_its_load_refuses_next_to_nothing() -> None:
    table = KeyTable(100_000, np.int32)
    keys = keys_of(RNG.bytes(100_000 * KEY_BYTES))
    num_placed = sum(int((table.place(part)[0] >= 0).sum()) for part in np.split(keys, 100))
    assert num_placed >= 99_990
    assert table.keys.size * WIDTH <= 100_000 * 16


def test_what_was_exported_is_the_same_where_it_is_restored() -> None:
    index, other = an_index(W0), an_index(W0)
    index.apply(W0.id, stored(CHAIN[: 5 * KEY_BYTES]))
    index.apply(W0.id, stored(CHAIN[5 * KEY_BYTES : 9 * KEY_BYTES], 5, tier=Tier.HOST))
    index.expect(W0.id, CHAIN, 1.0)
    other.apply(W0.id, stored(CHAIN))
    next_number = index.next_number(W0.id)
    assert next_number == 9
    other.restore(W0.id, next_number, *index.export(W0.id))
    assert held(other, W0.id) == 9
    assert other.locate(W0.id, CHAIN) == index.locate(W0.id, CHAIN)
    assert other.apply(W0.id, stored(CHAIN[9 * KEY_BYTES :], 9))
    assert held(other, W0.id) == 20
    other.check_integrity()


def test_long_prompts_match_as_far_as_each_worker_holds_them() -> None:
    workers = [a_worker("w", id=f"{number:032x}", num_pages=1000) for number in range(9)]
    lengths = np.random.default_rng(3)
    for num_pages in (31, 32, 33, 34, 47, 48, 49, 63, 64, 65, 300):
        index = an_index(*workers)
        prompt = RNG.bytes(num_pages * KEY_BYTES)
        expected = {}
        for worker in workers:
            expected[worker.id] = int(lengths.integers(0, num_pages + 1))
            index.apply(worker.id, stored(prompt[: expected[worker.id] * KEY_BYTES]))
        assert {worker.id: held(index, worker.id, prompt) for worker in workers} == expected


def test_keys_that_crowd_in_a_table_get_a_larger_one_but_not_without_end() -> None:
    index = an_index(W0)
    mixer = int(KeyTable(8, np.int32)._mixer)
    crowd = np.zeros((1000, 2), "<u8")
    inverse = pow(mixer, -1, 2**64)
    crowd[:, 0] = [number * inverse % 2**64 for number in range(1, 1001)]  # all in the first group
    index.apply(W0.id, stored(crowd.tobytes()))
    assert WIDTH <= index.num_held(W0.id) <= 1000
    holder_table = index._holders[W0.id]._table
    assert holder_table.num_keys <= 8 * (W0.num_pages + NUM_SPARE_PAGES)
    index.check_integrity()
    index.apply(W0.id, stored(CHAIN, 1000))
    assert held(index, W0.id) == 20


def test_a_worker_that_no_slot_is_left_for_is_not_known() -> None:
    index = an_index(*(a_worker(f"w{number}", id=f"{number:032x}") for number in range(MAX_SLOTS)))
    one_more = a_worker("one-more")
    index.join(one_more)
    assert index.slot(one_more.id) is None and not index.is_known(one_more.id)
    index.forget(f"{0:032x}")
    index.join(one_more)
    assert index.slot(one_more.id) is not None
