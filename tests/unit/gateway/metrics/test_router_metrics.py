from baton.gateway.metrics.metrics import Metrics
from baton.messages.operations import Status
from baton.messages.status import ROUTING_BOUNDS_S, RouterStatus, RoutingTimes
from tests.node_peers import id_of
from tests.scripted_service import ScriptedService
from tests.unit.gateway.metrics.test_metrics import exporter, samples


def test_each_router_has_series_of_its_own() -> None:
    times = RoutingTimes()
    for seconds in (0.0001, 0.003, 7.0):
        times.add(seconds)
    counters = {"decisions": 40, "blind_decisions": 1, "redis_failures": 2}
    one = RouterStatus(
        id=id_of("one"),
        num_attempts=3,
        redis="down",
        routing_counts=tuple(times.counts),
        routing_s=times.total_s,
        counters=counters,
    )
    service = ScriptedService()
    service.status = Status(routers=(one, RouterStatus(id=id_of("two"))))
    found = samples(exporter(Metrics(), service))
    label = ("router", id_of("one")[:8])
    other = ("router", id_of("two")[:8])
    assert found["baton_router_decisions_total", (label,)] == 40
    assert found["baton_router_blind_decisions_total", (label,)] == 1
    assert found["baton_router_events_total", (("event", "redis_failures"), label)] == 2
    assert found["baton_router_redis_up", (label,)] == 0
    assert ("baton_router_redis_up", (other,)) not in found
    assert found["baton_router_attempts", (label,)] == 3
    assert found["baton_router_routing_seconds_count", (label,)] == 3
    assert found["baton_router_routing_seconds_bucket", (("le", "0.005"), label)] == 2
    assert found["baton_router_routing_seconds_count", (other,)] == 0
    assert len(ROUTING_BOUNDS_S) + 1 == sum(
        name.endswith("_bucket") and label in labels for name, labels in found
    )
