import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.clock import ManualClock
from baton.kvtransfer.tickets import MAX_OVERTAKES, SPLIT_BYTES, Part, Tickets
from baton.kvtransfer.transfer_plan import plan_transfer
from baton.kvtransfer.transport import OutgoingTransfer, Piece, TransferStatus
from baton.layout import PageLayout

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
def tickets(clock: ManualClock, ended: Ended) -> Tickets:
    return Tickets(2 * UNIT, 2, clock, ended.append)


def take(tickets: Tickets) -> Part:
    part = tickets.take(wait=False)
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
    tickets = Tickets(units_a_part * UNIT, num_lanes, ManualClock(), None)
    tickets.push(piece(num_units, first))
    parts = []
    while (part := tickets.take(wait=False)) is not None:
        parts.append(part)
    units = [unit for part in parts for unit in range(part.first, part.stop)]
    assert units == list(range(first, first + num_units))
    assert all(0 < part.num_bytes <= units_a_part * UNIT for part in parts)
    if num_units * UNIT >= SPLIT_BYTES and num_units >= num_lanes:
        assert len(parts) >= num_lanes


def test_a_ticket_is_done_with_its_last_part(tickets: Tickets, ended: Ended, clock: ManualClock) -> None:
    number = tickets.push(piece())
    assert tickets.poll(number).status == PENDING
    clock.advance(1.0)
    first, second = take(tickets), take(tickets)
    assert tickets.poll(number).status == SENDING
    clock.advance(2.0)
    for part in (second, first):
        assert not ended
        tickets.leave(part)
        tickets.finish(part, num_messages=3, gather_s=0.25)
    progress = tickets.poll(number)
    assert (progress.status, progress.num_bytes, progress.num_messages) == (DONE, 4 * UNIT, 6)
    spans = progress.spans
    assert (spans.queued_s, spans.gather_s, spans.wire_s) == (1.0, 0.5, 1.5)
    assert ended == [number]


def test_an_empty_piece_is_done_at_once(tickets: Tickets, ended: Ended) -> None:
    number = tickets.push(piece(0))
    assert tickets.poll(number).status == DONE and ended == [number]


def test_one_failed_part_fails_its_ticket_once_and_stops_the_others(tickets: Tickets, ended: Ended) -> None:
    number, other = tickets.push(piece()), tickets.push(piece(1))
    part = take(tickets)
    tickets.leave(part)
    tickets.fail(part, "why")
    tickets.fail(part, "again")
    assert (tickets.poll(number).status, tickets.poll(number).reason) == (FAILED, "why")
    assert take(tickets).ticket.number == other and ended == [number]


def test_abort_waits_until_nobody_is_inside(tickets: Tickets, ended: Ended) -> None:
    number, other = tickets.push(piece()), tickets.push(piece(1, transfer=b"b" * 16))
    part = take(tickets)
    aborting = threading.Thread(target=tickets.abort, args=(b"a" * 16,))
    aborting.start()
    aborting.join(0.05)
    assert aborting.is_alive() and part.ticket.is_failed
    tickets.leave(part)
    aborting.join(5.0)
    assert not aborting.is_alive() and ended == [number]
    tickets.finish(part, 1, 0.0)  # its bytes had arrived, too late to matter
    assert tickets.poll(number).status == FAILED and take(tickets).ticket.number == other


def test_a_part_put_back_comes_first(tickets: Tickets) -> None:
    tickets.push(piece())
    part = take(tickets)
    tickets.leave(part)
    tickets.requeue(part)
    assert take(tickets) is part
    tickets.leave(part)
    tickets.abort(b"a" * 16)
    tickets.requeue(part)
    assert tickets.take(wait=False) is None


def test_a_broken_queue_fails_what_is_there_and_what_comes(tickets: Tickets, ended: Ended) -> None:
    number = tickets.push(piece())
    waiting = threading.Thread(target=lambda: [take(tickets), take(tickets), tickets.take(wait=True)])
    waiting.start()
    tickets.break_off("gone")
    tickets.break_off("twice")
    waiting.join(5.0)
    assert not waiting.is_alive()
    late = tickets.push(piece())
    assert {tickets.poll(ticket).reason for ticket in (number, late)} == {"gone"}
    assert ended == [number, late] and tickets.take(wait=True) is None


def test_a_forgotten_ticket_goes_when_it_ends(tickets: Tickets) -> None:
    number = tickets.push(piece(1))
    tickets.forget(number)
    assert tickets.poll(number).status == PENDING
    part = take(tickets)
    tickets.leave(part)
    tickets.finish(part, 1, 0.0)
    with pytest.raises(KeyError):
        tickets.poll(number)


def order_taken(tickets: Tickets) -> list[int]:
    """Numbers of the tickets that the parts are of."""
    numbers = []
    while (part := tickets.take(wait=False)) is not None:
        numbers.append(part.ticket.number)
    return numbers


def test_a_bulk_piece_is_overtaken_by_others_however_late_they_come(tickets: Tickets) -> None:
    bulk = tickets.push(piece(6, transfer=b"b" * 16, is_bulk=True))
    assert take(tickets).ticket.number == bulk
    due = tickets.push(piece())
    assert order_taken(tickets) == [due, due, bulk, bulk]


def test_bulk_never_stands_still(tickets: Tickets) -> None:
    bulk = tickets.push(piece(4, transfer=b"b" * 16, is_bulk=True))
    due = [tickets.push(piece(1)) for _ in range(2 * MAX_OVERTAKES + 1)]
    assert order_taken(tickets) == [*due[:MAX_OVERTAKES], bulk, *due[MAX_OVERTAKES:-1], bulk, due[-1]]


def test_a_failed_piece_overtakes_nobody(tickets: Tickets) -> None:
    due = tickets.push(piece())
    bulk = tickets.push(piece(2, transfer=b"b" * 16, is_bulk=True))
    tickets.abort(b"a" * 16)
    assert order_taken(tickets) == [bulk] and tickets.is_idle and tickets.poll(due).status == FAILED


def test_a_bulk_part_put_back_waits_for_no_other_bulk(tickets: Tickets) -> None:
    tickets.push(piece(4, is_bulk=True))
    part = take(tickets)
    tickets.leave(part)
    tickets.requeue(part)
    assert take(tickets) is part
