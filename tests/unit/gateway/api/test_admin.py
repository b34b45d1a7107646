"""Routes of operators, without the auth middleware; tests/e2e/test_http_access.py tests the middleware."""

from typing import Any

import pytest
from fastapi import FastAPI

from baton.gateway.api.admin import Find, add_admin_routes
from baton.messages.control import Decision, Weighed
from baton.messages.operations import Decisions, Explain, FindRequests, FoundRequests
from baton.messages.timeline import RequestTimeline, TimelinePart
from baton.messages.workers import PrefillTimes
from tests.event_loop import on_loop
from tests.node_peers import id_of
from tests.scripted_service import ScriptedService
from tests.unit.gateway import calls

BEST = Weighed(decode=id_of("d1"), terms={"queue_s": 0.1, "compute_s": 0.4, "decode_delay_s": 9.0})
CHOSEN = Weighed(decode=id_of("d0"), terms={"queue_s": 0.0, "compute_s": 0.8, "decode_delay_s": 0.0})
DECISION = Decision(
    request_id=id_of("a"),
    attempt=0,
    age_s=1.0,
    reason="cost",
    num_tokens=3,
    chosen=CHOSEN,
    weighed=(CHOSEN, BEST),
    measured=PrefillTimes(id_of("a"), 0, waited_s=0.25, computed_s=9.5, num_new_tokens=3, num_tokens=3),
)


class ToldDecisions(ScriptedService):
    """Routers that tell these decisions of any request. None: no router answers."""

    def __init__(self, decisions: tuple[Decision, ...] | None) -> None:
        super().__init__()
        self.decisions, self.asked = decisions, list[str]()

    async def explain(self, question: Explain, timeout_s: float) -> list[Decisions]:
        self.asked.append(question.request_id)
        return [] if self.decisions is None else [Decisions(decisions=self.decisions)]

    async def get(self, name: str) -> tuple[int, dict[str, Any]]:
        return await get(self, lambda query: (), f"/admin/decisions/{name}")


async def get(service: ScriptedService, find: Find, path: str) -> tuple[int, Any]:
    app = FastAPI()
    add_admin_routes(app, service, find)
    return await calls.ask(app, path)


@on_loop
async def test_decision_has_its_terms_and_its_regret() -> None:
    service = ToldDecisions((DECISION,))
    status, answer = await service.get(f"chatcmpl-{id_of('a')}")
    assert (status, service.asked) == (200, [id_of("a")])
    assert (await service.get(f"resp_{id_of('a')}"))[1] == answer
    (decision,) = answer["data"]
    assert decision["chosen"]["terms"] == CHOSEN.terms
    assert [each["decode"] for each in decision["weighed"]] == [id_of("d0"), id_of("d1")]
    assert decision["regret_s"] == 0.25


@on_loop
async def test_unknown_request_is_not_found() -> None:
    assert (await ToldDecisions(()).get(id_of("a")))[0] == 404


@on_loop
async def test_malformed_id_is_not_found_without_a_question() -> None:
    service = ToldDecisions((DECISION,))
    for name in ("x", "chatcmpl-", id_of("a")[:-1] + "G", "a" * 33):
        assert (await service.get(name))[0] == 404
    assert not service.asked


@on_loop
async def test_without_a_router_the_answer_is_503() -> None:
    assert (await ToldDecisions(None).get(id_of("a")))[0] == 503


# Timelines.


def a_timeline(name: str, total_s: float, began_s: float = 1.7e9, **fields: object) -> RequestTimeline:
    return RequestTimeline(
        request_id=id_of(name),
        outcome="answered",
        began_s=began_s,
        total_s=total_s,
        parts=(TimelinePart("queued", 0.0, total_s / 2, "router 1"),),
        unaccounted_s=total_s / 2,
        **fields,  # type: ignore[arg-type]
    )


class TwoGateways(ScriptedService):
    """This gateway's requests, and those of another gateway, which the service asks."""

    def __init__(self, own: list[RequestTimeline], others: list[RequestTimeline] | None) -> None:
        """others: None: the other gateway never answers."""
        super().__init__()
        self.own, self.others = own, others
        self.queries: list[FindRequests] = []

    def find(self, query: FindRequests) -> list[RequestTimeline]:
        return [each for each in self.own if query.request_id in (None, each.request_id)]

    async def find_requests(self, query: FindRequests, timeout_s: float) -> list[FoundRequests]:
        self.queries.append(query)
        told = [FoundRequests(timelines=tuple(self.find(query)))]  # a router asks this gateway, too
        if self.others is not None:
            of_id = [each for each in self.others if query.request_id in (None, each.request_id)]
            told.append(FoundRequests(timelines=tuple(of_id)))
        return told

    async def get(self, path: str) -> tuple[int, dict[str, Any]]:
        return await get(self, self.find, path)


@on_loop
async def test_slowest_requests_of_all_gateways_come_in_one_order_and_once() -> None:
    gateways = TwoGateways([a_timeline("a", 1.0), a_timeline("b", 3.0)], [a_timeline("c", 2.0)])
    status, listed = await gateways.get("/admin/requests?order=slowest&limit=2&tenant=acme")
    assert status == 200
    assert [each["request_id"] for each in listed["data"]] == [id_of("b"), id_of("c")]
    assert listed["data"][0]["seconds"] == {"queued": 1.5, "unaccounted": 1.5}
    assert listed["data"][0]["num_attempts"] == 0 and "parts" not in listed["data"][0]
    (query,) = gateways.queries
    assert (query.order, query.limit, query.tenant) == ("slowest", 2, "acme")


@on_loop
async def test_latest_requests_are_those_that_ended_last() -> None:
    own = [a_timeline("a", 9.0, 1000.0), a_timeline("b", 1.0, 1005.0)]
    status, listed = await TwoGateways(own, [a_timeline("c", 1.0, 1007.5)]).get("/admin/requests")
    assert status == 200
    assert [each["request_id"] for each in listed["data"]] == [id_of("a"), id_of("c"), id_of("b")]


@on_loop
async def test_gateway_that_does_not_answer_is_left_out() -> None:
    status, listed = await TwoGateways([a_timeline("a", 1.0)], None).get("/admin/requests")
    assert (status, len(listed["data"])) == (200, 1)


@on_loop
async def test_timeline_is_found_here_without_a_question_or_at_another_gateway() -> None:
    gateways = TwoGateways([a_timeline("a", 1.0)], [a_timeline("c", 2.0)])
    status, found = await gateways.get(f"/admin/requests/chatcmpl-{id_of('a')}")
    assert status == 200 and not gateways.queries
    assert found["parts"] == [{"name": "queued", "begin_s": 0.0, "seconds": 0.5, "process": "router 1"}]
    assert found["seconds"] == {"queued": 0.5, "unaccounted": 0.5}
    status, found = await gateways.get(f"/admin/requests/{id_of('c')}")
    assert (status, found["total_s"], len(gateways.queries)) == (200, 2.0, 1)


@on_loop
async def test_timeline_that_no_gateway_has_is_not_found() -> None:
    gateways = TwoGateways([], [])
    for name in (id_of("a"), "x", "a" * 33):
        assert (await gateways.get(f"/admin/requests/{name}"))[0] == 404


@pytest.mark.parametrize(
    "query",
    [
        *("order=fastest", "limit=0", "limit=101", "limit=x", "sort=1"),
        *("limit=" + 5000 * "9", "limit=%D9%A3", "tenant=" + 129 * "x"),
    ],
)
@on_loop
async def test_query_that_is_not_known_is_refused(query: str) -> None:
    assert (await TwoGateways([], []).get(f"/admin/requests?{query}"))[0] == 400
