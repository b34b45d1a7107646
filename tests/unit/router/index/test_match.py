import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from baton.clock import ManualClock
from baton.messages.control import KvEventBatch
from baton.pages import KEY_BYTES
from baton.router.index.match import MAX_BISECTED, MAX_RUN_ENDS, RunEnds
from baton.router.index.prefix_index import PrefixIndex
from tests.node_peers import a_worker

PROMPT_PAGES = 300


def holders_of(index: PrefixIndex, keys: bytes, held: list[int], name: str = "d") -> list[int]:
    """Slot bits of workers, each of which holds so many of the first pages."""
    bits = []
    for number, num in enumerate(held):
        worker = a_worker(f"{name}{number}", num_pages=PROMPT_PAGES)
        index.join(worker)
        pages, generations = tuple(range(num)), (1,) * num
        events = KvEventBatch(first=0, keys=keys[: num * KEY_BYTES], pages=pages, generations=generations)
        index.apply(worker.id, events)
        slot = index.slot(worker.id)
        assert slot is not None
        bits.append(1 << slot)
    return bits


def check(held: list[int]) -> None:
    index = PrefixIndex(ManualClock(), 2 * PROMPT_PAGES * len(held))
    keys = np.random.default_rng(0).bytes(KEY_BYTES * PROMPT_PAGES)
    bits = holders_of(index, keys, held)
    holdings = index.holdings(keys)
    assert [holdings.num_pages(bit) for bit in bits] == held
    assert index.holdings(b"").levels == []
    unknown = np.random.default_rng(1).bytes(KEY_BYTES * PROMPT_PAGES)
    assert index.holdings(unknown).levels == []


@given(st.lists(st.integers(0, PROMPT_PAGES), min_size=1, max_size=6))
def test_holdings_are_what_the_workers_told(held: list[int]) -> None:
    check(held)


def test_holdings_are_right_where_workers_differ_too_often_to_be_found_by_bisection() -> None:
    check(list(range(0, PROMPT_PAGES + 1, PROMPT_PAGES // (2 * MAX_BISECTED))))


@given(st.lists(st.lists(st.integers(0, PROMPT_PAGES), min_size=1, max_size=4), min_size=1, max_size=4))
def test_holdings_are_right_wherever_the_last_prompt_that_began_alike_had_other_holders(
    tells: list[list[int]],
) -> None:
    """Prompts have their first page in common; who holds them differs from one to the next."""
    index = PrefixIndex(ManualClock(), 2 * PROMPT_PAGES * sum(map(len, tells)))
    rng = np.random.default_rng(0)
    first = rng.bytes(KEY_BYTES)
    for number, held in enumerate(tells):
        keys = first + rng.bytes(KEY_BYTES * (PROMPT_PAGES - 1))
        bits = holders_of(index, keys, held, f"w{number}-")
        holdings = index.holdings(keys)
        assert [holdings.num_pages(bit) for bit in bits] == held


def test_runs_whose_ends_are_remembered_are_bounded() -> None:
    def number_of(number: int) -> bytes:
        return number.to_bytes(KEY_BYTES, "little")

    run_ends = RunEnds()
    for number in range(MAX_RUN_ENDS + 1):
        run_ends.learn(b"".join(map(number_of, (0, number))), 1, 7)
    assert run_ends.guess(number_of(MAX_RUN_ENDS), 0) == 7
    assert run_ends.guess(number_of(0), 0) == 0
