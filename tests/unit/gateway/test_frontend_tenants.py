"""Several routers: tenants wait at one of them, whichever gateway their requests are of."""

from baton.clock import ManualClock
from baton.gateway.streams.frontend import Frontend
from baton.messages.control import Members, Submit
from baton.tenants import Quotas, SchedulingKey
from tests.node_peers import TestPeer, a_request, a_worker, id_of
from tests.unit.gateway.frontend_peers import ROUTER, Gateway, ListSink

NAMES = ("r0", "r1", "r2")
LIMITED = SchedulingKey(quotas=Quotas(max_queued=5))


def a_gateway(name: str) -> Gateway:
    """With three routers, which all know one worker."""
    clock = ManualClock(50.0)
    g = Gateway(clock, Frontend(id_of(name), [ROUTER], lambda address: None, clock), [], {})
    for router in NAMES:
        g.peers[router] = TestPeer.router(g.frontend, router)
        g[router].say(Members(workers=(a_worker("d0"),)))
    g.join("d0")
    return g


def asked(g: Gateway, tenant: str, scheduling_key: SchedulingKey) -> str:
    """The router that is asked for a request of the tenant's."""
    g.frontend.open(
        a_request(f"r{g.frontend.num_open}", tenant=tenant, scheduling_key=scheduling_key), ListSink()
    )
    (router,) = [name for name in NAMES if name in g.peers and g[name].take(Submit)]
    return router


TENANTS = [f"tenant-{number}" for number in range(8)]


def test_all_tenants_of_all_gateways_wait_at_one_router() -> None:
    gateways = [a_gateway(f"g{number}") for number in range(6)]
    scheduling_keys = (SchedulingKey(), SchedulingKey(weight=2.0), LIMITED)
    chosen = {asked(g, tenant, each) for g in gateways for tenant in TENANTS for each in scheduling_keys}
    assert len(chosen) == 1


def test_without_tenants_each_gateway_has_a_router_of_its_own() -> None:
    gateways = [a_gateway(f"g{number}") for number in range(12)]
    chosen = [{asked(g, "", SchedulingKey()) for _ in range(4)} for g in gateways]
    assert all(len(routers) == 1 for routers in chosen)
    assert set().union(*chosen) == set(NAMES)


def test_tenants_of_a_router_that_is_gone_move_to_another_together() -> None:
    gateways = [a_gateway(f"g{number}") for number in range(6)]
    (gone,) = {asked(g, TENANTS[0], LIMITED) for g in gateways}
    for g in gateways:
        g[gone].leave()
        del g.peers[gone]
    chosen = {asked(g, tenant, LIMITED) for g in gateways for tenant in TENANTS}
    assert len(chosen) == 1 and chosen != {gone}


def test_a_router_that_knows_all_workers_goes_before_one_that_has_just_started() -> None:
    g = a_gateway("g0")
    chosen = asked(g, TENANTS[0], LIMITED)
    g[chosen].say(Members(workers=(), is_complete=False))
    assert asked(g, TENANTS[0], LIMITED) != chosen
