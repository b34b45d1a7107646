"""A worker is ready when gateways reach it, and it and its partners reach each other."""

from baton.clock import ManualClock
from baton.config.router import RouterConfig
from baton.messages.control import Reachable
from baton.router.router import Router
from tests.node_peers import TestPeer, a_worker, id_of


def test_worker_is_ready_when_gateways_and_partners_reach_it() -> None:
    router = Router(RouterConfig(), ManualClock(), id_of("router"))
    p, d = (TestPeer.worker(router, a_worker(name)) for name in ("p", "d"))
    assert router.status().num_met == 0
    p.say(Reachable(workers=(d.id,)))
    assert router.status().num_met == 0
    d.say(Reachable(workers=(p.id,)))
    assert router.status().num_met == 2
    gateway = TestPeer.gateway(router)
    assert router.status().num_met == 0
    gateway.say(Reachable(workers=(d.id,)))
    assert router.status().num_met == 1
    gateway.say(Reachable(workers=(d.id, p.id)))
    assert router.status().num_met == 2
    d.leave()
    assert router.status().num_met == 1


def test_workers_of_other_weights_need_not_reach_each_other() -> None:
    router = Router(RouterConfig(), ManualClock(), id_of("router"))
    for name, fingerprint in (("p", "f"), ("d", "others")):
        TestPeer.worker(router, a_worker(name, fingerprint=fingerprint))
    assert router.status().num_met == 2
