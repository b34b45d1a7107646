"""All peers hear which workers drain."""

import pytest

from baton.messages.control import Heartbeat, Members
from baton.messages.operations import Drain
from baton.messages.workers import Load
from tests.node_peers import TestPeer, id_of
from tests.unit.router.router_cluster import cluster


@pytest.mark.parametrize("who", ["worker", "operator"])
def test_members_name_draining_workers(who: str) -> None:
    c = cluster("p", "d")
    c.tick()
    assert c["g"].take(Members)[-1].draining == ()
    if who == "worker":
        c["d"].say(Heartbeat(load=Load(), is_draining=True))
    else:
        TestPeer.operator(c.router).say(Drain(worker="d"))
    c.tick()
    assert c["g"].take(Members)[-1].draining == (id_of("d"),)
    assert c["p"].take(Members)[-1].draining == (id_of("d"),)
    c.tick()
    assert c["g"].take(Members) == []
