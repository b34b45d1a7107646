"""Operators' calls: routing decisions, timelines, whether a request gets through.

gateway/http/auth.py admits operators alone.
"""

import asyncio
import secrets
import uuid
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from fastapi import FastAPI
from fastapi import Request as HttpRequest
from msgspec import Meta

from baton.clock import Clock
from baton.errors import BatonError, Overloaded, WorkerLost
from baton.gateway.api.body import read_query
from baton.gateway.api.errors import ApiError
from baton.gateway.streams.request_stream import Service
from baton.messages.bounds import MAX_NAME_CHARS, request_id_in
from baton.messages.control import Decision
from baton.messages.operations import Explain, FindRequests
from baton.messages.timeline import RequestTimeline
from baton.messages.workers import Worker, WorkerRole
from baton.request import Request, SamplingParams, TokenEvent, TokenIds

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


TIMEOUT_S: Final = 5.0
FRESH_S: Final = 1.0  # the result of a health check is reused for this long
NUM_PAGES: Final = 2  # of the prompt, and a token: longer than a decode worker computes by itself
# The prefill worker samples the first token, the decode worker the second.
SAMPLING: Final = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True, seed=0)
FIRST: Final = -(2**31)  # the priority that goes before all others


class Canary:
    """Checks the cluster with a tiny request through a prefill worker and a decode worker.

    Where prefill workers are configured the request is a probe: a prefill worker computes its prompt and
    transfers the pages, or the probe fails, whatever the routing policy. The request is the first of its
    tenant in every queue, so a cluster that is busy answers it, too. Concurrent checks share one request.
    """

    def __init__(
        self,
        service: Service,
        clock: Clock,
        *,
        expects_prefill: bool | None = None,
        timeout_s: float = TIMEOUT_S,
        model: str = "",
    ) -> None:
        """expects_prefill: prefill workers are configured; None: as soon as one has joined.

        model: the one to ask, as in Request.model.
        """
        self.model = model
        self._service = service
        self._expects_prefill = expects_prefill
        self._clock = clock
        self._timeout_s = timeout_s
        self._checked_s: float | None = None
        self._probing: asyncio.Task[None] | None = None

    async def check(self) -> None:
        """Raise a BatonError that names the fault unless the cluster answers requests."""
        now_s = self._clock.now_s()
        if self._checked_s is not None and now_s - self._checked_s < FRESH_S:
            return
        if self._probing is None or self._probing.done():
            self._probing = asyncio.create_task(self._probe())
        await asyncio.shield(self._probing)

    def _needs_prefill(self) -> bool:
        """Return whether a probe takes the way through a prefill worker; those that sleep cannot compute."""
        prefills = [worker for worker in self._workers if worker.role is WorkerRole.PREFILL]
        if prefills and all(worker.is_asleep for worker in prefills):
            return False
        if self._expects_prefill is None and self._has_prefill():
            self._expects_prefill = True
        return bool(self._expects_prefill)

    def _has_prefill(self) -> bool:
        return any(worker.role is WorkerRole.PREFILL for worker in self._workers)

    @property
    def _workers(self) -> list[Worker]:
        return [worker for worker in self._service.workers if worker.serves(self.model)]

    async def _probe(self) -> None:
        workers, missing = self._workers, self._service.why_not_ready
        if not workers or missing:
            raise Overloaded(missing or "no worker is ready", retry_after_s=FRESH_S)
        is_probe = self._needs_prefill()
        if is_probe and not self._has_prefill():
            message = "no prefill worker is connected; decode workers compute prompts themselves meanwhile"
            raise Overloaded(message, retry_after_s=FRESH_S)
        request = Request(
            request_id=uuid.uuid4().hex,
            token_ids=self._prompt(workers),
            sampling=SAMPLING,
            model=self.model,
            cache_salt=b"canary",
            priority=FIRST,
            arrival_s=self._clock.now_s(),
            is_probe=is_probe,
        )
        try:
            await run_once(self._service, request, self._timeout_s)
        except TimeoutError:
            what = "no prompt was computed by a prefill worker and transferred" if is_probe else "no answer"
            raise WorkerLost(f"{what} within {self._timeout_s:g} s") from None
        self._checked_s = self._clock.now_s()

    def _prompt(self, workers: Sequence[Worker]) -> TokenIds:
        """Return a new prompt each time, so that no cache has it, of ids that every vocabulary has."""
        longest = min(worker.max_model_len for worker in workers) - 2
        length = max(1, min(NUM_PAGES * max(worker.page_size for worker in workers) + 1, longest))
        drawn = secrets.randbits(length)
        return TokenIds.of(drawn >> index & 1 for index in range(length))


async def run_once(service: Service, request: Request, timeout_s: float) -> None:
    """Run a request of the gateway's own to its end. Raises TimeoutError, or the error of the request."""
    sink = _ProbeSink()
    service.open(request, sink)
    try:
        async with asyncio.timeout(timeout_s):
            await sink.end
    finally:
        service.cancel(request.request_id)


class _ProbeSink:
    """A Sink that keeps nothing but the end."""

    def __init__(self) -> None:
        self.end: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def tokens(self, events: Sequence[TokenEvent]) -> None:
        if events[-1].finish_reason is not None and not self.end.done():
            self.end.set_result(None)

    def failed(self, error: BatonError) -> None:
        if not self.end.done():
            self.end.set_exception(error)
