"""Requests while routers have no room, leave or join; questions to routers; the window of Submits."""

import asyncio
from typing import Any

import msgspec
import pytest

from baton.clock import ManualClock
from baton.errors import Overloaded
from baton.gateway.streams.frontend import UNHEARD_S, Frontend
from baton.gateway.streams.routers import (
    ACTIVE_S,
    MAX_UNANSWERED_TOKENS,
    SILENT_S,
    TOKENS_PER_SUBMIT,
    SubmitWindow,
)
from baton.messages.control import (
    Cancel,
    Decision,
    Ended,
    Failure,
    Members,
    Queued,
    Started,
    Submit,
    Weighed,
)
from baton.messages.operations import (
    Decisions,
    Explain,
    FindRequests,
    FoundRequests,
    GatewayStatus,
    Status,
    StatusQuery,
)
from baton.messages.status import RouterStatus
from baton.request import HEALTH_PRIORITY, FinishReason, Request
from baton.rpc.questions import MAX_ASKED
from tests.answer import Answer
from tests.event_loop import on_loop
from tests.node_peers import TestPeer, a_request, a_worker, id_of
from tests.unit.gateway.frontend_peers import ROUTER, Gateway, event, failed, gateway, running

STOP = FinishReason.STOP


@pytest.mark.parametrize("how", ["rejected", "busy"])
def test_request_without_room_is_submitted_again_until_max_wait_s(how: str) -> None:
    g = gateway("d0", max_wait_s=5.0)
    sink, submitted_s = g.open(), list[float]()
    start_s = g.clock.now_s()
    while sink.error is None:
        for submit in g["router"].take(Submit):
            submitted_s.append(g.clock.now_s() - start_s)
            attempt = submit.request.attempt
            if how == "rejected":
                g.refuse(attempt)
            else:
                g.route("d0", request=submit.request)
                g["d0"].say(failed(Failure.BUSY, attempt))
        g.tick()
    assert isinstance(sink.error, Overloaded)
    assert 5 <= g.clock.now_s() - start_s <= 6.5
    assert 5 <= len(submitted_s) <= 12
    assert g.frontend.num_open == 0


def test_answer_that_has_begun_waits_longer_for_a_worker() -> None:
    g = gateway("d0", max_wait_s=2.0, max_begun_wait_s=60.0)
    begun = g.open()
    g.route("d0")
    g.say("d0", event(0))
    start_s = g.clock.now_s()
    g["d0"].leave()
    while begun.error is None:
        for submit in g["router"].take(Submit):
            g.refuse(submit.request.attempt)
        g.tick()
    assert isinstance(begun.error, Overloaded)
    assert 60 <= g.clock.now_s() - start_s <= 61.5


def test_unanswered_attempt_is_submitted_anew_to_the_next_router() -> None:
    g = gateway("d0")
    g.open()
    first = g.submitted().request
    g["router"].leave()
    g.join_router("another")
    assert g.submitted().request == a_request(attempt=1)
    g.say("d0", event(0))  # the first router had dispatched it
    assert first.attempt == 0 and g["d0"].only(Cancel).attempt == 0


@pytest.mark.parametrize("has_first_token", [False, True])
def test_attempt_of_a_lost_router_is_replaced_unless_its_decode_worker_sends_tokens(
    has_first_token: bool,
) -> None:
    g = gateway("p0", "d0", "d1")
    sink = g.open()
    g.route("d0", "p0")
    if has_first_token:
        g.say("p0", event(0))
    g["router"].leave()
    g.join_router("another")
    g.tick(UNHEARD_S - 0.5)
    assert g["router"].take(Submit) == []
    for _ in range(10):
        g.tick()
    assert g.submitted().request.attempt == 1
    assert g["d0"].only(Cancel).attempt == 0
    assert sink.error is None


@pytest.mark.parametrize("num_tokens", [1, 2])
def test_attempt_on_a_worker_that_its_router_has_lost_is_replaced_unless_it_decodes(num_tokens: int) -> None:
    g, sink = running("p0", "d0", "d1", num_tokens=num_tokens)  # the first token comes from p0
    g["router"].say(failed(Failure.LOST, worker="d0"))
    if num_tokens == 2:
        g.say("d0", event(2, STOP))
        assert (sink.token_ids, sink.finish) == ([100, 101, 102], STOP)
        assert g["router"].take(Submit) == []
    else:
        resubmitted = g.submitted()
        assert (resubmitted.request.attempt, resubmitted.avoid) == (1, (id_of("d0"),))
        assert g["d0"].only(Cancel).attempt == 0


def test_gateway_with_a_silent_only_router_is_not_ready() -> None:
    g = gateway("d0")
    told = [not g.frontend.why_not_ready]
    for _ in range(int(SILENT_S / 0.25) + 1):
        g.tick()
    told.append(not g.frontend.why_not_ready)
    assert g.frontend.why_not_ready == "no router has answered for 3 s"
    assert g["router"].is_open  # the link's own timeout ends that
    g["router"].say(Status())
    told.append(not g.frontend.why_not_ready)
    assert told == [True, False, True]


def test_request_that_finds_no_router_is_overloaded_after_max_wait_s() -> None:
    g = gateway("d0", max_wait_s=5.0)
    sink = g.open()
    g["router"].leave()
    for _ in range(24):
        g.tick()
    assert isinstance(sink.error, Overloaded) and "no router answered within 5 s" in str(sink.error)
    assert sink.error.retry_after_s > 0


NAMES = ("router", "other")


def with_two(*workers: str) -> Gateway:
    """Return a gateway with two routers; requests go to `router`, not to `other`."""
    g = gateway(*workers)
    g.peers["other"] = TestPeer.router(g.frontend, "other")
    g["other"].say(Members(workers=tuple(map(a_worker, workers))))
    asked = g.frontend._peer_registry.router
    if asked is g["other"]:
        g.peers["router"], g.peers["other"] = g["other"], g["router"]
    for name in NAMES:
        g[name].received.clear()
    return g


def begun(g: Gateway) -> Answer:
    sink = g.open()
    g.route("d0")
    g.say("d0", event(0))
    return sink


def test_unanswered_request_of_a_dead_router_goes_to_the_other_at_once() -> None:
    g = with_two("d0")
    sink = g.open()
    assert g["router"].take(Submit)
    g["router"].leave()
    submit = g["other"].only(Submit)
    assert submit.request.attempt == 1
    g.route("d0", request=submit.request, router="other")
    g.say("d0", event(0, FinishReason.LENGTH, attempt=1))
    assert sink.finish is FinishReason.LENGTH


def test_stream_outlives_its_router_and_the_other_router_hears_its_end() -> None:
    g = with_two("d0")
    sink = begun(g)
    g["router"].take(Started)
    g["router"].leave()
    assert not g["other"].take(Submit)
    g.say("d0", event(1, FinishReason.LENGTH))
    assert sink.token_ids == [100, 101]
    assert g["other"].only(Ended).attempts == ((id_of("r"), 0),)


def test_silent_router_is_given_up_while_another_answers() -> None:
    g = with_two("d0")
    g.open()
    assert g["router"].take(Submit)
    for _ in range(int(SILENT_S / 0.25) + 6):
        g.tick()
        g["other"].say(Status())
    assert [g[name].is_open for name in NAMES] == [False, True]
    assert g["other"].only(Submit).request.attempt == 1


def test_standstill_of_the_gateway_gives_up_no_router() -> None:
    g = with_two("d0")
    g.tick(1.0)
    g.tick(30.0)
    g["other"].say(Status())
    g.tick()
    assert g["router"].is_open


def test_worker_that_only_a_dead_router_listed_is_given_up() -> None:
    """A host with both loses its power: the other router says nothing more after the router's end."""
    g = with_two("d0", "d1")
    begun(g)
    g["other"].say(Members(workers=(a_worker("d1"),)))
    kept = [g["d0"].is_open]
    g["router"].leave()
    kept.append(g["d0"].is_open)
    assert kept == [True, False] and g["d1"].is_open
    assert g["other"].only(Submit).request.attempt == 1


def test_status_joins_all_routers_once_all_have_answered() -> None:
    g = with_two("d0")
    g.tick(1.0)
    assert all(g[name].take(StatusQuery) for name in NAMES)
    statuses = [
        Status(
            num_gateways=3,
            num_attempts=2,
            gateways=(GatewayStatus(id=id_of(f"heard by {name}")),),
            routers=(RouterStatus(id=id_of(name), num_attempts=2),),
        )
        for name in NAMES
    ]
    told = list[Status | None]()
    for name, status in zip(NAMES, statuses, strict=True):
        g[name].say(status)
        told.append(g.frontend.status)
    g["other"].leave()
    told.append(g.frontend.status)
    assert told == [None, Status.joined(statuses, statuses[0]), statuses[0]]
    both = told[1]
    assert both is not None and (both.num_gateways, both.num_attempts) == (3, 4)
    assert [len(part) for part in (both.gateways, both.routers)] == [2, 2]


def test_tenants_of_all_gateways_queue_at_one_router() -> None:
    """Without tenants the gateways spread over the routers."""
    chosen: dict[str, set[str]] = {"acme": set(), "": set()}
    for number in range(8):
        clock = ManualClock(50.0)
        g = Gateway(clock, Frontend(id_of(f"g{number}"), [ROUTER], lambda address: None, clock), [], {})
        routers = {name: TestPeer.router(g.frontend, name) for name in NAMES}
        for router in routers.values():
            router.say(Members(workers=(a_worker("d0"),)))
        g.join("d0")
        for tenant, names in chosen.items():
            g.open(a_request(f"of {tenant}", tenant=tenant))
            names |= {name for name, router in routers.items() if router.take(Submit)}
    assert len(chosen["acme"]) == 1 and chosen[""] == set(NAMES)


def a_decision(name: str, attempt: int = 0) -> Decision:
    chosen = Weighed(decode=id_of("d0"))
    return Decision(
        request_id=id_of(name), attempt=attempt, age_s=1.0, reason="cost", num_tokens=3, chosen=chosen
    )


def asked(g: Gateway, name: str, timeout_s: float = 0.2) -> asyncio.Task[list[Decisions]]:
    return asyncio.create_task(g.frontend.explain(Explain(request_id=id_of(name)), timeout_s))


@on_loop
async def test_answers_go_to_their_questions_whatever_their_order() -> None:
    g = gateway("d0")
    a, b = asked(g, "a"), asked(g, "b")
    await asyncio.sleep(0)
    explain_a, explain_b = g["router"].take(Explain)
    for name, question in (("b", explain_b), ("a", explain_a)):
        g["router"].say(Decisions.answer_to(question, decisions=(a_decision(name),)))
    g["router"].say(Decisions(question=7))  # an answer without a question changes nothing
    for name, task in (("a", a), ("b", b)):
        assert [each.decisions for each in await task] == [(a_decision(name),)]


@on_loop
async def test_question_to_all_gateways_goes_through_one_router() -> None:
    g = gateway("d0")
    task = asyncio.create_task(g.frontend.find_requests(FindRequests(), 5.0))
    await asyncio.sleep(0)
    query = g["router"].only(FindRequests)
    for _ in range(2):
        g["router"].say(FoundRequests(question=query.question, num_asked=2))
    assert len(await task) == 2


@on_loop
async def test_question_whose_routers_are_lost_ends_at_once_with_the_answers_so_far() -> None:
    g = gateway("d0")
    other = TestPeer.router(g.frontend, "other")
    never_s = 600.0
    explained = asked(g, "a", never_s)
    found = asyncio.create_task(g.frontend.find_requests(FindRequests(), never_s))
    await asyncio.sleep(0)
    for router in (g["router"], other):
        for query in router.take(FindRequests):  # one of them passes it on
            router.say(FoundRequests(question=query.question, num_asked=2))
    other.say(Decisions.answer_to(other.only(Explain)))
    for router in (g["router"], other):
        router.leave()
    async with asyncio.timeout(5.0):
        assert (len(await explained), len(await found)) == (1, 1)


@on_loop
async def test_questions_above_the_limit_or_without_a_router_have_no_answers() -> None:
    g = gateway("d0")
    tasks = [asked(g, str(number)) for number in range(MAX_ASKED + 1)]
    assert await tasks[-1] == [] and len(g["router"].take(Explain)) == MAX_ASKED
    g["router"].leave()
    assert await asked(g, "a") == []
    await asyncio.gather(*tasks)


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


def test_busy_tenant_has_few_unanswered_submits_while_another_is_active() -> None:
    g = a_crowd(3 * NUM_AT_ONCE)
    assert numbers(g["router"]) == list(range(NUM_AT_ONCE))
    g.open(of_tenant("quiet", 1))
    assert g.submitted().request.tenant == "quiet"


def test_each_kind_of_answer_releases_the_next_request() -> None:
    g = a_crowd(2 * NUM_AT_ONCE)
    numbers(g["router"])
    g.route("d0", request=of_tenant("busy", 0))
    assert numbers(g["router"]) == [NUM_AT_ONCE]
    g["router"].say(queued(of_tenant("busy", 1)))
    assert numbers(g["router"]) == [NUM_AT_ONCE + 1]
    g.refuse(name="busy 2")
    assert numbers(g["router"]) == [NUM_AT_ONCE + 2]


def test_routed_after_queued_releases_no_second_request() -> None:
    g = a_crowd(2 * NUM_AT_ONCE)
    numbers(g["router"])
    g["router"].say(queued(of_tenant("busy", 0)))
    assert numbers(g["router"]) == [NUM_AT_ONCE]
    g.route("d0", request=of_tenant("busy", 0))
    assert numbers(g["router"]) == []


def test_single_tenant_is_not_held() -> None:
    g = gateway("d0")
    for number in range(3 * NUM_AT_ONCE):
        g.open(of_tenant("busy", number))
    assert numbers(g["router"]) == list(range(3 * NUM_AT_ONCE))


def test_idle_tenant_holds_no_other_tenant() -> None:
    clock = ManualClock(1.0)
    window = SubmitWindow(clock)
    window.submitted("router", of_tenant("quiet"))
    for number in range(NUM_AT_ONCE):
        window.submitted("router", of_tenant("busy", number))
    assert window.is_full("busy")
    clock.advance(ACTIVE_S)
    assert not window.is_full("busy")


def test_health_check_does_not_count_as_another_tenant() -> None:
    window = SubmitWindow(ManualClock(1.0))
    window.submitted("router", msgspec.structs.replace(of_tenant(""), priority=HEALTH_PRIORITY))
    for number in range(NUM_AT_ONCE):
        window.submitted("router", of_tenant("busy", number))
    assert not window.is_full("busy")


def test_long_prompt_takes_the_room_of_many_short_prompts() -> None:
    g = gateway("d0")
    g.open(of_tenant("quiet"))
    g.route("d0")
    g.open(of_tenant("busy", 0, num_tokens=MAX_UNANSWERED_TOKENS))
    g.open(of_tenant("busy", 1))
    assert numbers(g["router"]) == [0]


def test_request_cancelled_while_held_is_never_submitted() -> None:
    g = a_crowd(NUM_AT_ONCE + 2)
    g.frontend.cancel(of_tenant("busy", NUM_AT_ONCE).request_id)
    numbers(g["router"])
    g.route("d0", request=of_tenant("busy", 0))
    assert numbers(g["router"]) == [NUM_AT_ONCE + 1]


def test_cancelled_request_makes_no_room_before_the_router_answers() -> None:
    g = a_crowd(NUM_AT_ONCE + 1)
    g.frontend.cancel(of_tenant("busy", 0).request_id)
    g.tick()
    assert numbers(g["router"]) == list(range(NUM_AT_ONCE))
    g.route("d0", request=of_tenant("busy", 0))
    assert numbers(g["router"]) == [NUM_AT_ONCE]


def test_held_requests_go_to_the_successor_of_a_lost_router() -> None:
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
