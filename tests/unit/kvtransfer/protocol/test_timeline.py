"""The durations of a transfer, on a clock that the test moves."""

from hypothesis import given
from hypothesis import strategies as st

from baton.clock import ManualClock
from baton.kvtransfer.protocol.source import Timeline
from baton.kvtransfer.transports.base import PieceOutcome

PIECE = PieceOutcome(is_done=True, num_bytes=10)


def test_transfer_that_streams_while_its_pages_are_computed() -> None:
    clock = ManualClock()
    timeline = Timeline(clock)
    clock.advance(5)  # until the first chunk is computed
    timeline.offered()
    timeline.pushed()
    clock.advance(8)
    timeline.wrote(PIECE)
    clock.advance(16)  # until the second one is
    timeline.offered()
    timeline.pushed()
    clock.advance(2)
    timeline.pushed()
    clock.advance(30)
    assert timeline.moving_s == 40
    timeline.wrote(PIECE)
    timeline.wrote(PIECE)
    clock.advance(64)
    times = timeline.end()
    assert (times.moving_s, times.verify_s, times.exposed_s, times.total_s) == (40, 64, 96, 125)
    assert times.num_bytes == 30


@given(st.lists(st.tuples(st.sampled_from("opw"), st.integers(0, 100)), max_size=40))
def test_durations_fit_into_the_transfer(events: list[tuple[str, int]]) -> None:
    clock = ManualClock()
    timeline = Timeline(clock)
    num_in_flight = moving_s = 0
    for kind, seconds in events:
        clock.advance(seconds)
        moving_s += seconds if num_in_flight else 0
        if kind == "p":
            timeline.pushed()
            num_in_flight += 1
        elif kind == "w" and num_in_flight:
            timeline.wrote(PIECE)
            num_in_flight -= 1
        elif kind == "o":
            timeline.offered()
    times = timeline.end()
    assert times.moving_s == moving_s and min(times.verify_s, times.exposed_s) >= 0
    assert times.moving_s + times.verify_s <= times.total_s >= times.exposed_s
