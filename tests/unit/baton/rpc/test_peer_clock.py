"""The offset between two clocks, from the times of pings."""

import math
from random import Random

import pytest

from baton.messages.bounds import MAX_SECONDS
from baton.rpc.peer_clock import DRIFT, ClockOffset, PeerClock, PingTimes

AHEAD_S = 1234.5  # the peer's clock


class Wire:
    """Two clocks, and pings between them that take known times."""

    def __init__(self) -> None:
        self.ours, self.peers = PeerClock(), PeerClock()
        self.now_s = 100.0  # by our clock
        self.ahead_s = AHEAD_S

    def to_peer(self, delay_s: float) -> None:
        ping = self.ours.times(self.now_s)
        self.now_s += delay_s
        self.peers.take(ping, self.now_s + self.ahead_s)

    def to_us(self, delay_s: float) -> None:
        ping = self.peers.times(self.now_s + self.ahead_s)
        self.now_s += delay_s
        self.ours.take(ping, self.now_s)

    def round_trip(self, there_s: float, back_s: float, dwell_s: float = 0.5) -> ClockOffset:
        self.to_peer(there_s)
        self.now_s += dwell_s
        self.to_us(back_s)
        offset = self.ours.offset
        assert offset is not None
        return offset


def test_offset_is_unknown_before_a_ping_has_come_back() -> None:
    wire = Wire()
    wire.to_us(0.001)
    assert wire.ours.offset is None
    wire.to_peer(0.001)
    assert wire.ours.offset is None and wire.peers.offset is not None


def test_equal_ways_give_the_offset_exactly_and_time_of_the_peer_in_ours() -> None:
    offset = Wire().round_trip(0.002, 0.002)
    assert offset.offset_s == pytest.approx(AHEAD_S, abs=1e-9)
    assert offset.ours(AHEAD_S + 7.0) == pytest.approx(7.0)
    assert offset.error_s == pytest.approx(0.002)


@pytest.mark.parametrize("seed", range(20))
def test_error_is_never_above_its_bound(seed: int) -> None:
    wire, rng = Wire(), Random(seed)
    for _ in range(50):
        offset = wire.round_trip(rng.expovariate(1000), rng.expovariate(200), rng.random())
        assert abs(offset.offset_s - AHEAD_S) <= offset.error_s + 1e-9


def test_shortest_time_of_each_way_counts_although_they_never_come_together() -> None:
    wire = Wire()
    wire.round_trip(0.0001, 0.004)
    offset = wire.round_trip(0.003, 0.0001)
    assert offset.offset_s == pytest.approx(AHEAD_S, abs=1e-9)
    assert offset.error_s == pytest.approx(0.0001, abs=1e-9)


def test_short_time_counts_until_clocks_may_have_drifted_as_far() -> None:
    wire = Wire()
    best = wire.round_trip(0.0001, 0.0001)
    assert wire.round_trip(0.003, 0.001) == best
    wire.now_s += 0.001 / DRIFT
    assert wire.round_trip(0.0005, 0.0005).error_s == pytest.approx(0.0005, abs=1e-9)


@pytest.mark.parametrize("jump_s", [5.0, -5.0])
def test_clock_that_jumps_is_measured_again(jump_s: float) -> None:
    wire = Wire()
    wire.round_trip(0.0001, 0.0001)
    wire.ahead_s += jump_s
    wire.round_trip(0.001, 0.001)
    assert wire.round_trip(0.001, 0.001).offset_s == pytest.approx(AHEAD_S + jump_s, abs=1e-9)


@pytest.mark.parametrize("times", [(math.nan, 99.0, 1.0), (99.0, math.inf, 1.0), (1.0, 99.0, -math.inf)])
def test_times_that_are_no_numbers_are_ignored(times: tuple[float, float, float]) -> None:
    clock = PeerClock()
    clock.take(PingTimes(*times), 100.0)
    assert clock.offset is None and clock.times(101.0) == PingTimes(101.0)


@pytest.mark.parametrize(
    "times",
    [(1.7e308, 1.0, 1.7e308), (-1.7e308, 1.0, 1.0), (1.0, -1.0, 1.0), (1.0, 1.0, 1e9), (-1e9, 1.0, 1.0)],
)
def test_no_times_of_a_peer_give_an_offset_that_no_message_carries(times: tuple[float, float, float]) -> None:
    clock = PeerClock()
    clock.take(PingTimes(1.0), 100.0)
    clock.take(PingTimes(*times), 101.0)
    assert clock.offset is None or (
        math.isfinite(clock.offset.offset_s) and clock.offset.error_s <= MAX_SECONDS
    )
