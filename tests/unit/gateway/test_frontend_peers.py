"""Whom a gateway's end is connected to, and what they may say."""

from typing import Any

import pytest

from baton.errors import ProtocolError
from baton.messages.codec import AnyMessage
from baton.messages.control import Heartbeat, Reachable, Rejected, Routed, Submit
from baton.messages.operations import Status, StatusQuery
from baton.messages.workers import REMOTE_PREFILLS, Load, WorkerStatus
from baton.request import FinishReason
from tests.node_peers import TestPeer, a_request, a_worker, id_of
from tests.unit.gateway.frontend_peers import ROUTER, Gateway, event, gateway

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
        ("router", Heartbeat(load=Load())),
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


def told(num_transferred: int, worker: str = "d0") -> Status:
    """What a router says of a decode worker to which so many prompts were transferred."""
    load = Load(counters={REMOTE_PREFILLS: num_transferred})
    entry = WorkerStatus(worker=a_worker(worker), load=load, num_attempts=0, beat_age_s=0.0)
    return Status(workers=(entry,))


def seen(g: Gateway) -> float | None:
    return g.frontend.prefill_seen_s


def test_prefill_is_seen_once_prompts_were_transferred_and_answered() -> None:
    g = gateway("p0", "d0")
    g["router"].say(told(7))  # before this gateway was there
    g.open()
    g.route("d0", "p0")
    g.say("p0", event(0))
    assert seen(g) is None
    answered_s = g.clock.now_s()
    g.say("d0", event(1))
    assert seen(g) is None  # it may have computed the prompt itself
    g.clock.advance(1.0)
    g["router"].say(told(8))
    assert seen(g) == answered_s
    g.clock.advance(1.0)
    g.say("d0", event(2))
    assert seen(g) == answered_s + 1.0


def test_a_router_that_has_heard_less_shows_no_transfer() -> None:
    g = gateway("p0", "d0")
    g.open()
    g.route("d0", "p0")
    g.say("p0", event(0))
    g.say("d0", event(1))
    for count in (7, 5, 7, 6, 7):
        g["router"].say(told(count))
    assert seen(g) is None
    g["router"].say(told(1, "d1"))  # another worker, whose former prompts are unknown
    assert seen(g) is None


def test_answers_without_a_prefill_worker_show_nothing_of_any() -> None:
    g = gateway("p0", "d0")
    g.open()
    g.route("d0")
    g.say("d0", event(0), event(1))
    g["router"].say(told(7))
    g["router"].say(told(8))
    assert seen(g) is None
