"""Several routers: a tenant with quotas is counted by one of them, whichever gateway its requests are of."""

from baton.clock import ManualClock
from baton.control import Members, Submit
from baton.gateway.frontend import Frontend
from baton.tenancy import Quotas, Standing
from tests.node_peers import TestPeer, a_request, a_worker, id_of
from tests.unit.gateway.frontend_peers import ROUTER, Gateway, ListSink

NAMES = ("r0", "r1", "r2")
LIMITED = Standing(quotas=Quotas(max_queued=5))


def a_gateway(name: str) -> Gateway:
    """With three routers, which all know one worker."""
    clock = ManualClock(50.0)
    g = Gateway(clock, Frontend(id_of(name), [ROUTER], lambda address: None, clock), [], {})
    for router in NAMES:
        g.peers[router] = TestPeer.router(g.frontend, router)
        g[router].say(Members(workers=(a_worker("d0"),)))
    g.join("d0")
    return g


def asked(g: Gateway, tenant: str, standing: Standing) -> str:
    """The router that is asked for a request of the tenant's."""
    g.frontend.open(a_request(f"r{g.frontend.num_open}", tenant=tenant, standing=standing), ListSink())
    (router,) = [name for name in NAMES if name in g.peers and g[name].take(Submit)]
    return router


TENANTS = [f"tenant-{number}" for number in range(24)]


def test_one_router_counts_a_tenant_of_all_gateways() -> None:
    gateways = [a_gateway(f"g{number}") for number in range(6)]
    chosen = {tenant: {asked(g, tenant, LIMITED) for g in gateways} for tenant in TENANTS}
    assert all(len(routers) == 1 for routers in chosen.values())
    assert set().union(*chosen.values()) == set(NAMES), "tenants spread over the routers"


def test_requests_without_quotas_go_to_the_gateways_own() -> None:
    gateways = [a_gateway(f"g{number}") for number in range(12)]
    assert all(len({asked(g, tenant, Standing()) for tenant in TENANTS[:4]}) == 1 for g in gateways)
    assert len({asked(g, TENANTS[0], Standing(weight=2.0)) for g in gateways}) > 1


def test_tenants_of_a_router_that_is_gone_move_and_the_others_stay() -> None:
    before, after = a_gateway("g0"), a_gateway("g0")
    gone = asked(before, TENANTS[0], LIMITED)
    after[gone].leave()
    del after.peers[gone]
    for tenant in TENANTS[1:]:
        first, second = asked(before, tenant, LIMITED), asked(after, tenant, LIMITED)
        assert second == first or (first == gone and second != gone)


def test_a_router_that_knows_all_workers_goes_before_one_that_has_just_started() -> None:
    g = a_gateway("g0")
    chosen = asked(g, TENANTS[0], LIMITED)
    g[chosen].say(Members(workers=(), is_complete=False))
    assert asked(g, TENANTS[0], Standing(quotas=Quotas(max_queued=6))) != chosen
