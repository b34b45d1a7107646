from baton.bench.router.faults import routed_between
from baton.messages.status import RouterStatus, RoutingTimes
from tests.node_peers import id_of


def routed(name: str, *times_s: float) -> RouterStatus:
    times = RoutingTimes()
    for seconds in times_s:
        times.observe(seconds)
    return RouterStatus(id=id_of(name), routing=times)


def test_only_requests_routed_between_two_moments_count() -> None:
    before = [routed("a", 0.5, 0.5), routed("b", 0.5)]
    after = [routed("a", 0.5, 0.5, *[0.0009] * 99), routed("b", 0.5, 0.0019)]
    between = routed_between(before, after)
    assert between.num == 100
    assert [between.quantile(share) for share in (0.99, 1.0)] == [0.001, 0.002]
