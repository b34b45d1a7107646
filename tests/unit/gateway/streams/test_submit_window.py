"""A tenant with many requests does not keep the router from the others."""

from typing import Any

import msgspec

from baton.clock import ManualClock
from baton.gateway.streams.routers import (
    ACTIVE_S,
    MAX_UNANSWERED_TOKENS,
    TOKENS_PER_SUBMIT,
    SubmitWindow,
)
from baton.messages.control import Queued, Rejected, Routed, Submit
from baton.request import Request
from tests.node_peers import TestPeer, a_request, id_of
from tests.unit.gateway.frontend_peers import Gateway, gateway

NUM_TOKENS = len(a_request().token_ids)
NUM_AT_ONCE = -(-MAX_UNANSWERED_TOKENS // (TOKENS_PER_SUBMIT + NUM_TOKENS))


def of_tenant(tenant: str, number: int = 0, **fields: Any) -> Request:
    return a_request(f"{tenant} {number}", tenant=tenant, **fields)


def a_crowd(num_requests: int) -> Gateway:
    """The tenant `quiet` has been here; then `busy` asks for so many choices."""
    g = gateway("d0")
    g.open(of_tenant("quiet"))
    g.route("d0")
    for number in range(num_requests):
        g.open(of_tenant("busy", number))
    return g


def numbers(router: TestPeer) -> list[int]:
    """Of the requests of `busy` that have been submitted since this was asked last."""
    known = {of_tenant("busy", number).request_id: number for number in range(4 * NUM_AT_ONCE)}
    return [known[submit.request.request_id] for submit in router.take(Submit)]


def queued(request: Request) -> Queued:
    return Queued(request_id=request.request_id, attempt=request.attempt)


def test_a_busy_tenant_has_few_unanswered_submits_while_another_is_active() -> None:
    g = a_crowd(3 * NUM_AT_ONCE)
    assert numbers(g["router"]) == list(range(NUM_AT_ONCE))
    g.open(of_tenant("quiet", 1))
    assert g.submitted().request.tenant == "quiet"


def test_each_kind_of_answer_lets_the_next_one_go() -> None:
    g = a_crowd(2 * NUM_AT_ONCE)
    numbers(g["router"])
    g.route("d0", request=of_tenant("busy", 0))
    assert numbers(g["router"]) == [NUM_AT_ONCE]
    g["router"].say(queued(of_tenant("busy", 1)))
    assert numbers(g["router"]) == [NUM_AT_ONCE + 1]
    g["router"].say(
        Rejected(request_id=of_tenant("busy", 2).request_id, attempt=0, reason="", retry_after_s=1)
    )
    assert numbers(g["router"]) == [NUM_AT_ONCE + 2]


def test_routed_after_queued_is_no_second_answer() -> None:
    g = a_crowd(2 * NUM_AT_ONCE)
    numbers(g["router"])
    g["router"].say(queued(of_tenant("busy", 0)))
    assert numbers(g["router"]) == [NUM_AT_ONCE]
    g.route("d0", request=of_tenant("busy", 0))
    assert numbers(g["router"]) == []


def test_a_tenant_that_is_alone_is_not_held() -> None:
    g = gateway("d0")
    for number in range(3 * NUM_AT_ONCE):
        g.open(of_tenant("busy", number))
    assert numbers(g["router"]) == list(range(3 * NUM_AT_ONCE))


def test_a_tenant_that_has_been_away_for_long_holds_nobody() -> None:
    clock = ManualClock(1.0)
    window = SubmitWindow(clock)
    window.submitted("router", of_tenant("quiet"))
    for number in range(NUM_AT_ONCE):
        window.submitted("router", of_tenant("busy", number))
    assert window.is_full("busy")
    clock.advance(ACTIVE_S)
    assert not window.is_full("busy")


def test_probes_are_no_other_tenant() -> None:
    window = SubmitWindow(ManualClock(1.0))
    window.submitted("router", msgspec.structs.replace(of_tenant(""), is_probe=True))
    for number in range(NUM_AT_ONCE):
        window.submitted("router", of_tenant("busy", number))
    assert not window.is_full("busy")


def test_a_long_prompt_takes_the_room_of_many_short_ones() -> None:
    g = gateway("d0")
    g.open(of_tenant("quiet"))
    g.route("d0")
    g.open(of_tenant("busy", 0, num_tokens=MAX_UNANSWERED_TOKENS))
    g.open(of_tenant("busy", 1))
    assert numbers(g["router"]) == [0]


def test_what_was_cancelled_while_it_was_held_is_never_submitted() -> None:
    g = a_crowd(NUM_AT_ONCE + 2)
    g.frontend.cancel(of_tenant("busy", NUM_AT_ONCE).request_id)
    numbers(g["router"])
    g.route("d0", request=of_tenant("busy", 0))
    assert numbers(g["router"]) == [NUM_AT_ONCE + 1]


def test_cancelling_what_the_router_has_makes_no_room_before_it_answers() -> None:
    g = a_crowd(NUM_AT_ONCE + 1)
    g.frontend.cancel(of_tenant("busy", 0).request_id)
    g.tick()
    assert numbers(g["router"]) == list(range(NUM_AT_ONCE))
    g["router"].say(Routed(request_id=of_tenant("busy", 0).request_id, attempt=0, decode=id_of("d0")))
    assert numbers(g["router"]) == [NUM_AT_ONCE]


def test_what_was_held_goes_to_the_successor_of_a_router_that_is_lost() -> None:
    g = a_crowd(2 * NUM_AT_ONCE)
    g["router"].leave()
    router = g.join_router("successor")
    g.list_members("d0")
    g.tick()
    found: list[str] = []
    while submits := router.take(Submit):
        assert len(submits) <= NUM_AT_ONCE
        for submit in submits:
            found.append(submit.request.request_id)
            router.say(queued(submit.request))
    assert sorted(found) == sorted(of_tenant("busy", number).request_id for number in range(2 * NUM_AT_ONCE))
