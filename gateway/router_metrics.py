"""What routers last said of themselves, as Prometheus reads it. `router` is the beginning of a life's id."""

from collections.abc import Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from baton.operating import Status
from baton.router_status import ROUTING_BOUNDS_S, RouterStatus

ROUTER: Final = ("router",)
OWN_COUNTERS: Final = {
    "decisions": "Choices of workers by what they hold and cost.",
    "blind_decisions": "Of these, about a worker that had not told what it holds.",
}


def router_families(status: Status) -> Iterator[Metric]:
    routers = {router.id[:8]: router for router in status.routers}
    routing = HistogramMetricFamily("baton_router_routing_seconds", "To choose workers.", labels=ROUTER)
    attempts = GaugeMetricFamily("baton_router_attempts", "Under way, that it has sent out.", labels=ROUTER)
    redis = GaugeMetricFamily("baton_router_redis_up", "1 when its link to Redis is up.", labels=ROUTER)
    for name, router in routers.items():
        routing.add_metric([name], _buckets(router), router.routing_s)
        attempts.add_metric([name], router.num_attempts)
        if router.redis != "none":
            redis.add_metric([name], float(router.redis == "up"))
    yield from (routing, attempts, redis)
    away = "Seconds since Ray's head last answered; nothing can be started meanwhile. 0: it does."
    yield GaugeMetricFamily("baton_ray_head_away_seconds", away, value=status.head_away_s)
    yield from _counters(routers)


def _counters(routers: dict[str, RouterStatus]) -> Iterator[Metric]:
    for counter, documentation in OWN_COUNTERS.items():
        family = CounterMetricFamily(f"baton_router_{counter}", documentation, labels=ROUTER)
        for name, router in routers.items():
            family.add_metric([name], router.counters.get(counter, 0))
        yield family
    events = CounterMetricFamily("baton_router_events", "By kind.", labels=("router", "event"))
    for name, router in routers.items():
        for event, count in router.counters.items():
            if event not in OWN_COUNTERS:
                events.add_metric([name, event], count)
    yield events


def _buckets(router: RouterStatus) -> list[tuple[str, float]]:
    buckets, total = [], 0
    for bound, count in zip((*map(str, ROUTING_BOUNDS_S), "+Inf"), router.routing_counts, strict=True):
        total += count
        buckets.append((bound, float(total)))
    return buckets
