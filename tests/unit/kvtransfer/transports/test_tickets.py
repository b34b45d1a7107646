import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.clock import ManualClock
from baton.kvtransfer.protocol.transfer_plan import plan_transfer
from baton.kvtransfer.transports.base import (
    MAX_OVERTAKES,
    SPLIT_BYTES,
    OutgoingTransfer,
    Part,
    Piece,
    TransferQueue,
    TransferStatus,
)
from baton.pages import PageLayout

LAYOUT = PageLayout(tp_size=1, page_size=16, num_layers=8, num_kv_heads=8, head_dim=128, dtype="bfloat16")
PLAN = plan_transfer(LAYOUT, LAYOUT, 0, 0)
UNIT = PLAN.unit_bytes
PENDING, SENDING, DONE, FAILED = TransferStatus


def piece(num_units: int = 4, first: int = 0, transfer: bytes = b"a" * 16, *, is_bulk: bool = False) -> Piece:
    pages = tuple(range(first + num_units))
    outgoing = OutgoingTransfer(
        id=transfer,
        epoch=1,
        plan=PLAN,
        source_pages=pages,
        destination_pages=pages,
        destination_generations=pages,
        is_bulk=is_bulk,
    )
    return Piece(outgoing, first, first + num_units)


class Ended(list[int]):
    """Numbers of tickets, as they ended."""


@pytest.fixture
def ended() -> Ended:
    return Ended()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def transfer_queue(clock: ManualClock, ended: Ended) -> TransferQueue:
    return TransferQueue(2 * UNIT, 2, clock, ended.append)


def take(transfer_queue: TransferQueue) -> Part:
    part = transfer_queue.take(wait=False)
    assert part is not None
    return part


@given(
    first=st.integers(0, 5),
    num_units=st.integers(0, 200),
    units_a_part=st.integers(1, 40),
    num_lanes=st.integers(1, 4),
)
def test_parts_cover_the_piece_once_and_are_no_larger_than_they_may_be(
    first: int, num_units: int, units_a_part: int, num_lanes: int
) -> None:
    transfer_queue = TransferQueue(units_a_part * UNIT, num_lanes, ManualClock(), None)
    transfer_queue.push(piece(num_units, first))
    parts = []
    while (part := transfer_queue.take(wait=False)) is not None:
        parts.append(part)
    units = [unit for part in parts for unit in range(part.first, part.stop)]
    assert units == list(range(first, first + num_units))
    assert all(0 < part.num_bytes <= units_a_part * UNIT for part in parts)
    if num_units * UNIT >= SPLIT_BYTES and num_units >= num_lanes:
        assert len(parts) >= num_lanes


def test_a_ticket_is_done_with_its_last_part(
    transfer_queue: TransferQueue, ended: Ended, clock: ManualClock
) -> None:
    number = transfer_queue.push(piece())
    assert transfer_queue.poll(number).status == PENDING
    clock.advance(1.0)
    first, second = take(transfer_queue), take(transfer_queue)
    assert transfer_queue.poll(number).status == SENDING
    clock.advance(2.0)
    for part in (second, first):
        assert not ended
        transfer_queue.leave(part)
        transfer_queue.finish(part, num_messages=3, gather_s=0.25)
    progress = transfer_queue.poll(number)
    assert (progress.status, progress.num_bytes, progress.num_messages) == (DONE, 4 * UNIT, 6)
    spans = progress.spans
    assert (spans.queued_s, spans.gather_s, spans.wire_s) == (1.0, 0.5, 1.5)
    assert ended == [number]


def test_an_empty_piece_is_done_at_once(transfer_queue: TransferQueue, ended: Ended) -> None:
    number = transfer_queue.push(piece(0))
    assert transfer_queue.poll(number).status == DONE and ended == [number]


def test_one_failed_part_fails_its_ticket_once_and_stops_the_others(
    transfer_queue: TransferQueue, ended: Ended
) -> None:
    number, other = transfer_queue.push(piece()), transfer_queue.push(piece(1))
    part = take(transfer_queue)
    transfer_queue.leave(part)
    transfer_queue.fail(part, "why")
    transfer_queue.fail(part, "again")
    assert (transfer_queue.poll(number).status, transfer_queue.poll(number).reason) == (FAILED, "why")
    assert take(transfer_queue).handle.number == other and ended == [number]


def test_abort_waits_until_nobody_is_inside(transfer_queue: TransferQueue, ended: Ended) -> None:
    number, other = transfer_queue.push(piece()), transfer_queue.push(piece(1, transfer=b"b" * 16))
    part = take(transfer_queue)
    aborting = threading.Thread(target=transfer_queue.abort, args=(b"a" * 16,))
    aborting.start()
    aborting.join(0.05)
    assert aborting.is_alive() and part.handle.is_failed
    transfer_queue.leave(part)
    aborting.join(5.0)
    assert not aborting.is_alive() and ended == [number]
    transfer_queue.finish(part, 1, 0.0)  # its bytes had arrived, too late to matter
    assert transfer_queue.poll(number).status == FAILED and take(transfer_queue).handle.number == other


def test_a_part_put_back_comes_first(transfer_queue: TransferQueue) -> None:
    transfer_queue.push(piece())
    part = take(transfer_queue)
    transfer_queue.leave(part)
    transfer_queue.requeue(part)
    assert take(transfer_queue) is part
    transfer_queue.leave(part)
    transfer_queue.abort(b"a" * 16)
    transfer_queue.requeue(part)
    assert transfer_queue.take(wait=False) is None


def test_a_broken_queue_fails_what_is_there_and_what_comes(
    transfer_queue: TransferQueue, ended: Ended
) -> None:
    number = transfer_queue.push(piece())
    waiting = threading.Thread(
        target=lambda: [take(transfer_queue), take(transfer_queue), transfer_queue.take(wait=True)]
    )
    waiting.start()
    transfer_queue.break_off("gone")
    transfer_queue.break_off("twice")
    waiting.join(5.0)
    assert not waiting.is_alive()
    late = transfer_queue.push(piece())
    assert {transfer_queue.poll(handle).reason for handle in (number, late)} == {"gone"}
    assert ended == [number, late] and transfer_queue.take(wait=True) is None


def test_a_forgotten_ticket_goes_when_it_ends(transfer_queue: TransferQueue) -> None:
    number = transfer_queue.push(piece(1))
    transfer_queue.forget(number)
    assert transfer_queue.poll(number).status == PENDING
    part = take(transfer_queue)
    transfer_queue.leave(part)
    transfer_queue.finish(part, 1, 0.0)
    with pytest.raises(KeyError):
        transfer_queue.poll(number)


def order_taken(transfer_queue: TransferQueue) -> list[int]:
    """Numbers of the tickets that the parts are of."""
    numbers = []
    while (part := transfer_queue.take(wait=False)) is not None:
        numbers.append(part.handle.number)
    return numbers


def test_a_bulk_piece_is_overtaken_by_others_however_late_they_come(transfer_queue: TransferQueue) -> None:
    bulk = transfer_queue.push(piece(6, transfer=b"b" * 16, is_bulk=True))
    assert take(transfer_queue).handle.number == bulk
    due = transfer_queue.push(piece())
    assert order_taken(transfer_queue) == [due, due, bulk, bulk]


def test_bulk_never_stands_still(transfer_queue: TransferQueue) -> None:
    bulk = transfer_queue.push(piece(4, transfer=b"b" * 16, is_bulk=True))
    due = [transfer_queue.push(piece(1)) for _ in range(2 * MAX_OVERTAKES + 1)]
    assert order_taken(transfer_queue) == [*due[:MAX_OVERTAKES], bulk, *due[MAX_OVERTAKES:-1], bulk, due[-1]]


def test_a_failed_piece_overtakes_nobody(transfer_queue: TransferQueue) -> None:
    due = transfer_queue.push(piece())
    bulk = transfer_queue.push(piece(2, transfer=b"b" * 16, is_bulk=True))
    transfer_queue.abort(b"a" * 16)
    assert (
        order_taken(transfer_queue) == [bulk]
        and transfer_queue.is_idle
        and transfer_queue.poll(due).status == FAILED
    )


def test_a_bulk_part_put_back_waits_for_no_other_bulk(transfer_queue: TransferQueue) -> None:
    transfer_queue.push(piece(4, is_bulk=True))
    part = take(transfer_queue)
    transfer_queue.leave(part)
    transfer_queue.requeue(part)
    assert take(transfer_queue) is part
