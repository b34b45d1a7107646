import math
from itertools import product

import msgspec
import pytest

from baton.messages.status import (
    MAX_CELLS,
    MAX_TENANTS,
    Histogram,
    OverloadLevel,
    QueueStatus,
    RouterStatus,
    RoutingTimes,
    StreamCounts,
    TenantStatus,
    bucket,
    buckets_of,
    cell_of,
    joined,
)
from baton.tenants import Refusal


def a_tenant(name: str, count: int) -> TenantStatus:
    return TenantStatus(
        tenant=name,
        weight=2.0,
        num_queued=count,
        num_active=count + 1,
        oldest_wait_s=float(count),
        work_tokens=10 * count,
        num_dispatched=count,
        waited_s=count / 2,
        num_met=count,
        num_missed=count,
        num_degraded=count,
        refused={Refusal.SHED: count},
    )


def test_queues_of_several_routers_are_added_up() -> None:
    one = QueueStatus(
        level=OverloadLevel.CLIP,
        num_queued=3,
        oldest_wait_s=9.0,
        escalations={"clip": 2},
        tenants=(a_tenant("a", 3),),
    )
    other = QueueStatus(
        level=OverloadLevel.QUEUE,
        num_queued=6,
        oldest_wait_s=4.0,
        escalations={"clip": 1, "queue": 5},
        tenants=(a_tenant("b", 4), a_tenant("a", 2)),
    )
    both = joined((one, other))
    assert (both.level, both.num_queued, both.oldest_wait_s) == (OverloadLevel.CLIP, 9, 9.0)
    assert both.escalations == {"clip": 3, "queue": 5}
    assert [(each.tenant, each.num_queued, each.oldest_wait_s) for each in both.tenants] == [
        ("a", 5, 3.0),
        ("b", 4, 4.0),
    ]
    assert both.tenants[0].refused == {Refusal.SHED: 5}


def test_queue_of_one_router_is_unchanged() -> None:
    one = QueueStatus(level=OverloadLevel.SHED, num_queued=1, oldest_wait_s=1.0, tenants=(a_tenant("a", 1),))
    assert joined([one]) == one
    assert joined([]) == QueueStatus()


def test_tenants_that_are_left_out_are_counted() -> None:
    many = tuple(a_tenant(f"t{number}", 1) for number in range(MAX_TENANTS))
    both = joined((QueueStatus(tenants=many, num_left_out=5), QueueStatus(tenants=(a_tenant("a", 1),))))
    assert len(both.tenants) == MAX_TENANTS and both.num_left_out == 6


def test_every_count_of_a_tenant_is_added() -> None:
    one, both = a_tenant("a", 1), joined([QueueStatus(tenants=(a_tenant("a", 1),))] * 2).tenants[0]
    for field in set(TenantStatus.__struct_fields__) - {"tenant", "weight", "oldest_wait_s"}:
        assert getattr(both, field) != getattr(one, field), field


def routed(*times_s: float) -> RoutingTimes:
    times = RoutingTimes()
    for seconds in times_s:
        times.observe(seconds)
    return times


def test_counts_of_requests_are_written_as_json_and_as_messages() -> None:
    counts = StreamCounts(tenant="a", arrived={}, ended={})
    counts.arrive(1000)
    counts.end(1000, 640, 50)
    (cell,) = counts.ended
    assert buckets_of(cell) == (bucket(1000), bucket(640), bucket(50))
    for format in (msgspec.json, msgspec.msgpack):
        assert format.decode(format.encode(counts), type=StreamCounts) == counts


@pytest.mark.parametrize("num_tokens", [1, 700, 10**9])
def test_request_of_new_lengths_counts_as_the_nearest_when_there_is_no_room(num_tokens: int) -> None:
    counts = StreamCounts(arrived={}, ended={})
    for prompt, output in product(range(16), repeat=2):
        counts.end(2**prompt, 0, 2**output)
    before = dict(counts.ended)
    counts.end(num_tokens, 0, 5)
    (grown,) = [cell for cell, num in counts.ended.items() if num != before.get(cell)]
    new = buckets_of(cell_of(num_tokens, 0, 5))
    distances = {
        cell: sum(abs(one - other) for one, other in zip(buckets_of(cell), new, strict=True))
        for cell in before
    }
    assert len(counts.ended) == MAX_CELLS and distances[grown] == min(distances.values())


def test_time_counts_in_the_bucket_of_its_upper_bound() -> None:
    bounds_s = RoutingTimes.BOUNDS
    times = routed(bounds_s[0], 0.9 * bounds_s[2], 2 * bounds_s[-1])
    assert [number for number, count in enumerate(times.counts) if count] == [0, 2, len(bounds_s)]
    assert times.sum == pytest.approx(bounds_s[0] + 0.9 * bounds_s[2] + 2)


class Few(Histogram):
    BOUNDS = (1.0, 3.0, 4.0)


def test_histogram_with_too_many_counts_is_refused() -> None:
    with pytest.raises(ValueError, match="3 bounds have one bucket more, got 5 counts"):
        Few([1, 2, 0, 0, 1])


def test_values_since_a_copy_are_counted() -> None:
    now = Few([1, 2], 5.0)
    before, since = now.copy(), Few([3], 0.5)
    now.observe(9.0)
    since.add_since(before, now)
    assert since == Few([3, 0, 0, 1], 9.5)


@pytest.mark.parametrize(("share", "bound_s"), [(0.5, 0.001), (0.9, 0.001), (0.99, 0.02), (1.0, math.inf)])
def test_quantile_is_an_upper_bound(share: float, bound_s: float) -> None:
    assert routed(*[0.0009] * 950, *[0.015] * 45, *[3.0] * 5).quantile(share) == bound_s


def test_router_without_decisions_is_neither_slow_nor_blind() -> None:
    assert routed().quantile(0.99) == 0.0
    assert RouterStatus(id="a" * 32).blind_share == 0.0


@pytest.mark.parametrize(
    ("share", "seconds"), [(0.0, 0.0), (0.2, 0.5), (0.4, 1.0), (0.6, 2.0), (0.8, 3.0), (0.9, 4.0), (1.0, 4.0)]
)
def test_estimate_spreads_values_within_their_bucket(share: float, seconds: float) -> None:
    """As histogram_quantile of Prometheus; values beyond the last bound count as that bound."""
    assert Few([4, 4, 0, 2]).estimate(share) == pytest.approx(seconds)


def test_estimate_without_values_is_zero() -> None:
    assert Few().estimate(0.5) == 0.0
