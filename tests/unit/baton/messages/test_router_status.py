import math

import pytest

from baton.messages.status import ROUTING_BOUNDS_S, RouterStatus, RoutingTimes


def routed(*times_s: float) -> RouterStatus:
    times = RoutingTimes()
    for seconds in times_s:
        times.add(seconds)
    return RouterStatus(id="a" * 32, routing_counts=tuple(times.counts), routing_s=times.total_s)


def test_a_time_counts_up_to_the_bound_that_it_does_not_pass() -> None:
    status = routed(ROUTING_BOUNDS_S[0], 0.9 * ROUTING_BOUNDS_S[2], 2 * ROUTING_BOUNDS_S[-1])
    assert [number for number, count in enumerate(status.routing_counts) if count] == [
        0,
        2,
        len(ROUTING_BOUNDS_S),
    ]
    assert status.routing_s == pytest.approx(ROUTING_BOUNDS_S[0] + 0.9 * ROUTING_BOUNDS_S[2] + 2)


@pytest.mark.parametrize(("share", "bound_s"), [(0.5, 0.001), (0.9, 0.001), (0.99, 0.02), (1.0, math.inf)])
def test_a_quantile_is_bounded_from_above(share: float, bound_s: float) -> None:
    assert routed(*[0.0009] * 950, *[0.015] * 45, *[3.0] * 5).routing_quantile_s(share) == bound_s


def test_without_a_decision_nothing_is_slow_or_blind() -> None:
    assert routed().routing_quantile_s(0.99) <= ROUTING_BOUNDS_S[0]
    assert routed().blind_share == 0.0
