"""Operators' calls: routing decisions and timelines.

gateway/http/auth.py admits operators alone.
"""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from fastapi import FastAPI
from fastapi import Request as HttpRequest
from msgspec import Meta

from baton.gateway.api.body import read_query
from baton.gateway.api.errors import ApiError
from baton.gateway.streams.request_stream import Service
from baton.messages.bounds import MAX_NAME_CHARS, request_id_in
from baton.messages.control import Decision
from baton.messages.operations import Explain, FindRequests
from baton.messages.timeline import RequestTimeline

ANSWER_TIMEOUT_S: Final = 5.0
OTHERS_TIMEOUT_S: Final = 1.0  # for the answers of other gateways
Find: TypeAlias = Callable[[FindRequests], Sequence[RequestTimeline]]


class RequestsQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The parameters of `/admin/requests`."""

    order: Literal["latest", "slowest"] = "latest"
    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    # A router drops a peer that sends a longer name.
    tenant: Annotated[str, Meta(max_length=MAX_NAME_CHARS)] | None = None


def add_admin_routes(app: FastAPI, service: Service, find: Find) -> None:
    """Add `/admin/decisions/ID`, `/admin/requests` and `/admin/requests/ID`.

    find: of the requests of this gateway; the service asks the other gateways.
    """

    @app.get("/admin/decisions/{request_id}", include_in_schema=False)
    async def decisions(request_id: str) -> dict[str, Any]:
        """Return how a request was routed, one entry an attempt, by the `id` of its answer."""
        bare_id = request_id_in(request_id)
        found: list[Decision] = []
        if bare_id is not None:
            answers = await service.explain(Explain(request_id=bare_id), ANSWER_TIMEOUT_S)
            if not answers:
                raise ApiError(503, "the router does not answer", code="unavailable", retry_after_s=1.0)
            found = sorted(
                (each for answer in answers for each in answer.decisions), key=attrgetter("attempt")
            )
        if not found:
            raise ApiError(404, "the router does not know that request", code="not_found")
        return {"object": "list", "data": [_shown(decision) for decision in found]}

    @app.get("/admin/requests", include_in_schema=False)
    async def requests(request: HttpRequest) -> dict[str, Any]:
        """List ended requests of all gateways, the latest or the slowest first."""
        asked = read_query(request.query_params, RequestsQuery)
        query = FindRequests(order=asked.order, limit=asked.limit, tenant=asked.tenant)
        key = attrgetter("total_s") if query.order == "slowest" else _ended_s
        found = sorted(await _find(service, find, query), key=key, reverse=True)
        return {
            "object": "list",
            "data": [msgspec.to_builtins(each.summary()) for each in found[: query.limit]],
        }

    @app.get("/admin/requests/{request_id}", include_in_schema=False)
    async def one_request(request_id: str) -> dict[str, Any]:
        """Return the timeline of an ended request, by the `id` of its answer."""
        bare_id = request_id_in(request_id)
        if bare_id is not None:
            query = FindRequests(request_id=bare_id)
            for timeline in find(query) or await _find(service, find, query):
                return {**msgspec.to_builtins(timeline), "seconds": timeline.seconds}
        message = "no gateway has that request: it runs, or it ended too long ago"
        raise ApiError(404, message, code="not_found")


async def _find(service: Service, find: Find, query: FindRequests) -> list[RequestTimeline]:
    """Return what this gateway and the others have, without those that do not answer in time."""
    found = {timeline.request_id: timeline for timeline in find(query)}
    for answer in await service.find_requests(query, OTHERS_TIMEOUT_S):
        found.update((timeline.request_id, timeline) for timeline in answer.timelines)
    return list(found.values())


def _ended_s(timeline: RequestTimeline) -> float:
    return timeline.began_s + timeline.total_s


def _shown(decision: Decision) -> dict[str, Any]:
    return {**msgspec.to_builtins(decision), "regret_s": decision.regret_s}
