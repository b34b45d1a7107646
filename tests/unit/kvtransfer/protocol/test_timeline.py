"""The spans of a transfer, on a clock that the test moves."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.clock import ManualClock
from baton.kvtransfer.protocol.handoff import TransferTimes
from baton.kvtransfer.protocol.source import Timeline
from baton.kvtransfer.transports.base import PieceOutcome

PIECE = PieceOutcome(is_done=True, num_bytes=10)


def sum_of_spans(times: TransferTimes) -> float:
    return times.handshake_s + times.moving_s + times.waiting_s + times.verify_s


def test_a_transfer_that_streams_while_it_is_computed() -> None:
    clock = ManualClock()
    timeline = Timeline(clock, num_units=4)
    clock.advance(1)
    timeline.opened()
    clock.advance(4)  # the first chunk is being computed
    timeline.offered()
    timeline.pushed()
    clock.advance(8)
    timeline.wrote(2, PIECE)
    clock.advance(16)  # the second one
    timeline.offered()
    timeline.pushed()
    clock.advance(32)
    timeline.wrote(2, PIECE)
    clock.advance(64)
    times = timeline.end()
    assert (times.handshake_s, times.moving_s, times.waiting_s, times.verify_s) == (1, 40, 20, 64)
    assert times.exposed_s == 96
    assert times.num_bytes == 20
    assert sum_of_spans(times) == times.total_s == 125


@given(st.lists(st.tuples(st.sampled_from("sopwf"), st.floats(0, 100)), max_size=40))
def test_spans_always_add_up(happenings: list[tuple[str, float]]) -> None:
    clock = ManualClock()
    timeline = Timeline(clock, num_units=3)
    num_in_flight = 0
    for kind, seconds in happenings:
        clock.advance(seconds)
        if kind == "p":
            timeline.pushed()
            num_in_flight += 1
        elif kind == "w" and num_in_flight:
            timeline.wrote(1, PIECE)
            num_in_flight -= 1
        elif kind in "so":
            {"s": timeline.opened, "o": timeline.offered}[kind]()
    times = timeline.end()
    assert sum_of_spans(times) == pytest.approx(times.total_s, abs=1e-6)
    assert 0 <= times.exposed_s <= times.total_s
