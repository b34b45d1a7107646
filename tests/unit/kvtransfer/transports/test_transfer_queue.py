"""Pieces of transfers in the queue of a sender."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.kvtransfer.protocol.transfer_plan import plan_transfer
from baton.kvtransfer.transports.base import (
    MAX_OVERTAKES,
    SPLIT_BYTES,
    Part,
    PieceOutcome,
    TransferQueue,
)
from tests.layouts import a_layout
from tests.transfer_ends import piece_of

LAYOUT = a_layout(num_layers=8, num_kv_heads=8, head_dim=128, dtype="bfloat16")
PLAN = plan_transfer(LAYOUT, LAYOUT, 0, 0)
UNIT = PLAN.sent_unit_bytes


class Bench:
    """A queue of two threads whose parts have two units, and the outcomes of pieces by name."""

    def __init__(self, part_units: int = 2, num_threads: int = 2) -> None:
        self.queue = TransferQueue(part_units * UNIT, num_threads)
        self.ended: dict[str, PieceOutcome] = {}
        self._names: dict[bytes, str] = {}

    def push(self, name: str, num_units: int = 4, first: int = 0, *, is_bulk: bool = False) -> None:
        def note(outcome: PieceOutcome) -> None:
            assert name not in self.ended, "a piece ends once"
            self.ended[name] = outcome

        pages, transfer = tuple(range(first + num_units)), name.encode().ljust(16)
        piece = piece_of(PLAN, pages, first=first, transfer=transfer, is_bulk=is_bulk)
        self.queue.push(piece, note)

    def take(self) -> Part:
        part = self.queue.take(wait=False)
        assert part is not None
        return part

    def names_taken(self) -> list[str]:
        names = []
        while (part := self.queue.take(wait=False)) is not None:
            names.append(part.piece.transfer.decode().strip())
        return names


@pytest.fixture
def bench() -> Bench:
    return Bench()


@given(
    first=st.integers(0, 5),
    num_units=st.integers(0, 200),
    part_units=st.integers(1, 40),
    num_threads=st.integers(1, 4),
)
def test_parts_cover_the_piece_once_within_their_limit(
    first: int, num_units: int, part_units: int, num_threads: int
) -> None:
    bench = Bench(part_units, num_threads)
    bench.push("a", num_units, first)
    parts = []
    while (part := bench.queue.take(wait=False)) is not None:
        parts.append(part)
    units = [unit for part in parts for unit in range(part.first, part.stop)]
    assert units == list(range(first, first + num_units))
    assert all(0 < part.num_bytes <= part_units * UNIT for part in parts)
    if num_units * UNIT >= SPLIT_BYTES and num_units >= num_threads:
        assert len(parts) >= num_threads
    assert ("a" in bench.ended) == (num_units == 0)


def test_piece_is_done_with_its_last_part(bench: Bench) -> None:
    bench.push("a")
    first, second = bench.take(), bench.take()
    for part in (second, first):
        assert not bench.ended
        bench.queue.leave(part)
        bench.queue.finish(part)
    outcome = bench.ended["a"]
    assert (outcome.is_done, outcome.num_bytes) == (True, 4 * UNIT)


def test_abort_waits_until_no_thread_is_inside_the_pages(bench: Bench) -> None:
    bench.push("a")
    bench.push("b", 1)
    part = bench.take()
    aborting = threading.Thread(target=bench.queue.abort, args=(part.piece.transfer,))
    aborting.start()
    aborting.join(0.05)
    assert aborting.is_alive() and part.queued.is_over
    bench.queue.leave(part)
    aborting.join(5.0)
    assert not aborting.is_alive()
    bench.queue.finish(part)  # the bytes have arrived, too late to matter
    assert not bench.ended["a"].is_done and bench.names_taken() == ["b"]


@pytest.mark.parametrize("is_bulk", [False, True])
def test_requeued_part_comes_first_unless_its_piece_has_ended(bench: Bench, is_bulk: bool) -> None:
    bench.push("a", is_bulk=is_bulk)
    part = bench.take()
    bench.queue.leave(part)
    bench.queue.requeue(part)
    assert bench.take() is part
    bench.queue.leave(part)
    bench.queue.abort(part.piece.transfer)
    bench.queue.requeue(part)
    assert bench.queue.take(wait=False) is None


def test_broken_queue_fails_all_pieces_now_and_later(bench: Bench) -> None:
    bench.push("a")
    waiting = threading.Thread(target=lambda: [bench.take(), bench.take(), bench.queue.take(wait=True)])
    waiting.start()
    bench.queue.break_off("gone")
    bench.queue.break_off("twice")
    waiting.join(5.0)
    assert not waiting.is_alive()
    bench.push("b")
    assert [bench.ended[name].reason for name in ("a", "b")] == ["gone", "gone"]
    assert bench.queue.take(wait=True) is None


def test_bulk_parts_are_overtaken_but_never_stand_still(bench: Bench) -> None:
    bench.push("bulk", 6, is_bulk=True)
    assert bench.take().piece.is_bulk
    for number in range(2 * MAX_OVERTAKES):
        bench.push(f"{number}", 1)
    names = bench.names_taken()
    first, second = (index for index, name in enumerate(names) if name == "bulk")
    assert (first, second) == (MAX_OVERTAKES, 2 * MAX_OVERTAKES + 1)
