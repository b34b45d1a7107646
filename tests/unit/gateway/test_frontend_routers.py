"""A gateway of several routers: each attempt is one router's, and another takes over where that is lost."""

from baton.gateway.streams.routers import SILENT_S
from baton.messages.control import Ended, Members, Routed, Started, Submit
from baton.messages.operations import Status, StatusQuery
from baton.messages.status import RouterStatus
from baton.request import FinishReason
from tests.node_peers import TestPeer, a_request, a_worker, id_of
from tests.unit.gateway.frontend_peers import Gateway, ListSink, event, gateway

NAMES = ("router", "other")


def with_two(*workers: str) -> Gateway:
    """`router` is the one that is asked, `other` is beside it."""
    g = gateway(*workers)
    g.peers["other"] = TestPeer.router(g.frontend, "other")
    g["other"].say(Members(workers=tuple(map(a_worker, workers))))
    asked = g.frontend._peer_registry.router
    if asked is g["other"]:
        g.peers["router"], g.peers["other"] = g["other"], g["router"]
    for name in NAMES:
        g[name].received.clear()
    return g


def routed(g: Gateway, name: str, submit: Submit, decode: str = "d0") -> None:
    request = submit.request
    g[name].say(Routed(request_id=request.request_id, attempt=request.attempt, decode=id_of(decode)))


def begun(g: Gateway) -> ListSink:
    sink = g.open()
    routed(g, "router", g["router"].only(Submit))
    g.say("d0", event(0))
    return sink


def test_a_request_goes_to_one_router_which_hears_what_becomes_of_it() -> None:
    g = with_two("d0")
    begun(g)
    g.say("d0", event(1, FinishReason.LENGTH))
    assert len(g["router"].take(Started)) == len(g["router"].take(Ended)) == 1
    assert not g["other"].take(Submit) and not g["other"].take(Started) and not g["other"].take(Ended)


def test_what_a_router_that_dies_has_not_answered_is_asked_of_the_other_at_once() -> None:
    g = with_two("d0")
    sink = g.open()
    assert g["router"].take(Submit)
    g["router"].leave()
    submit = g["other"].only(Submit)
    assert submit.request.attempt == 1
    routed(g, "other", submit)
    g.say("d0", event(0, FinishReason.LENGTH, attempt=1))
    assert sink.finish is FinishReason.LENGTH


def test_a_stream_outlives_its_router_whose_end_the_other_is_told() -> None:
    g = with_two("d0")
    sink = begun(g)
    g["router"].take(Started)
    g["router"].leave()
    assert not g["other"].take(Submit)
    g.say("d0", event(1, FinishReason.LENGTH))
    assert sink.token_ids == [100, 101]
    assert g["other"].only(Ended).attempts == ((id_of("r"), 0),)


def test_a_router_that_dies_is_no_matter_of_the_others_requests() -> None:
    g = with_two("d0")
    g.open()
    g["other"].leave()
    assert len(g["router"].take(Submit)) == 1
    g.tick()
    assert not g["router"].take(Submit)


def test_a_router_that_answers_nothing_is_given_up_while_another_does() -> None:
    g = with_two("d0")
    g.open()
    assert g["router"].take(Submit)
    for _ in range(int(SILENT_S / 0.25) + 6):
        g.tick()
        g["other"].say(Status())
    assert [g[name].is_open for name in NAMES] == [False, True]
    assert g["other"].only(Submit).request.attempt == 1


def test_when_none_answers_none_is_given_up() -> None:
    g = with_two("d0")
    for _ in range(40):
        g.tick()
    assert g["router"].is_open and g["other"].is_open


def test_time_that_the_gateway_stood_still_is_no_routers_silence() -> None:
    g = with_two("d0")
    g.tick(1.0)
    g.tick(30.0)
    g["other"].say(Status())
    g.tick()
    assert g["router"].is_open


def test_a_worker_that_one_router_has_lost_is_kept() -> None:
    g = with_two("d0")
    sink = begun(g)
    g["other"].say(Members(workers=()))
    kept = [g["d0"].is_open]
    g["router"].say(Members(workers=()))
    kept.append(g["d0"].is_open)
    assert kept == [True, False] and sink.error is None


def test_a_worker_that_was_lost_before_its_router_is_given_up_with_it() -> None:
    """A host with both loses its power: the other router says nothing more after the router's end."""
    g = with_two("d0", "d1")
    begun(g)
    g["other"].say(Members(workers=(a_worker("d1"),)))
    kept = [g["d0"].is_open]
    g["router"].leave()
    kept.append(g["d0"].is_open)
    assert kept == [True, False] and g["d1"].is_open
    assert g["other"].only(Submit).request.attempt == 1


def test_status_is_of_all_routers_once_all_have_told() -> None:
    g = with_two("d0")
    g.tick(1.0)
    assert all(g[name].take(StatusQuery) for name in NAMES)
    one, other = (RouterStatus(id=id_of(name), num_attempts=2) for name in NAMES)
    g["router"].say(Status(num_gateways=3, num_attempts=2, routers=(one,)))
    told = [g.frontend.status]
    g["other"].say(Status(num_attempts=2, routers=(other,)))
    told.append(g.frontend.status)
    g["other"].leave()
    told.append(g.frontend.status)
    both = Status(num_gateways=3, num_attempts=4, routers=(one, other))
    assert told == [None, both, Status(num_gateways=3, num_attempts=2, routers=(one,))]


def test_new_requests_are_not_asked_of_a_router_that_does_not_know_all_workers() -> None:
    g = with_two("d0")
    g["router"].say(Members(workers=(a_worker("d0"),), is_complete=False))
    g.open(a_request("s"))
    assert not g["router"].take(Submit) and len(g["other"].take(Submit)) == 1
