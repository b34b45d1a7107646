"""Whom a gateway's end is connected to, and what they may say."""

from typing import Any

import pytest

from baton.control import Beat, Reachable, Rejected, Routed, Submit
from baton.control_wire import AnyMessage
from baton.errors import ProtocolError
from baton.operating import Status, StatusQuery
from baton.request import FinishReason
from baton.worker import Load
from tests.node_peers import TestPeer, a_request, a_worker, id_of
from tests.unit.gateway.frontend_peers import ROUTER, gateway

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
KEY = (id_of("r"), 0)


def test_gateway_connects_to_the_router_and_to_every_worker() -> None:
    g = gateway("p0", "d0")
    g["d0"].leave()
    g["router"].leave()
    g.dialled.clear()
    g.tick()
    assert set(g.dialled) == {ROUTER, a_worker("d0").address}


def test_router_is_told_whom_the_gateway_reaches() -> None:
    g = gateway("p0", "d0")
    assert set(g["router"].take(Reachable)[-1].workers) == {id_of("p0"), id_of("d0")}
    g.open()
    g.route("d0")
    g["d0"].leave()
    words = [word for word in g["router"].received if isinstance(word, Reachable | Submit)]
    assert words[0] == Reachable(workers=(id_of("p0"),))
    assert isinstance(words[1], Submit)
    assert set(g.join_router("other").only(Reachable).workers) == {id_of("p0")}


def test_ready_means_a_router_and_a_decode_worker() -> None:
    g = gateway("p0")
    assert not g.frontend.is_ready
    g.list_members("p0", "d0")
    assert not g.frontend.is_ready
    g.join("d0")
    ready = [g.frontend.is_ready]
    g["router"].leave()
    ready.append(g.frontend.is_ready)
    assert ready == [True, False]
    assert [worker.name for worker in g.frontend.workers] == ["p0", "d0"]


def test_status_is_asked_for_every_second() -> None:
    g = gateway("d0")
    for _ in range(9):
        g.tick()
    assert len(g["router"].take(StatusQuery)) == 3
    assert g.frontend.status is None
    g["router"].say(Status(num_gateways=3))
    assert g.frontend.status == Status(num_gateways=3)


@pytest.mark.parametrize(
    ("who", "message"),
    [
        ("router", Beat(load=Load())),
        ("router", Submit(request=a_request())),
        ("d0", Routed(request_id=id_of("r"), attempt=0, decode=id_of("d0"))),
        ("d0", Rejected(request_id=id_of("r"), attempt=0, reason="", retry_after_s=1)),
        ("d0", Reachable(workers=())),
    ],
)
def test_what_a_peer_may_not_say_is_an_offence(who: str, message: AnyMessage) -> None:
    g = gateway("d0")
    with pytest.raises(ProtocolError):
        g[who].say(message)


@pytest.mark.parametrize("make", [TestPeer.gateway, TestPeer.operator])
def test_only_routers_and_workers_may_join(make: Any) -> None:
    with pytest.raises(ProtocolError, match="has no business"):
        make(gateway("d0").frontend)
