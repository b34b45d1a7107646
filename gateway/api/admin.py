"""Operators' views of the cluster: routing decisions, and whether a request gets through.

gateway/http/auth.py admits operators alone to `/admin/`.
"""

import asyncio
import re
import secrets
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import msgspec
from fastapi import FastAPI

from baton.clock import Clock
from baton.errors import BatonError, Overloaded, WorkerLost
from baton.gateway.api.errors import ApiError
from baton.gateway.streams.request_stream import Service
from baton.gateway.streams.routers import Explained
from baton.messages.control import Decision
from baton.messages.workers import Worker, WorkerRole
from baton.request import Request, SamplingParams, TokenEvent
from baton.token_ids import TokenIds

ANSWER_TIMEOUT_S: Final = 5.0
_ID: Final = re.compile("[0-9a-f]{32}")
Explain: TypeAlias = Callable[[str, Explained], None]


def add_admin_routes(app: FastAPI, explain: Explain) -> None:
    """Add `/admin/decisions/ID`. explain: asks the routers."""

    @app.get("/admin/decisions/{request_id}", include_in_schema=False)
    async def decisions(request_id: str) -> dict[str, Any]:
        """Return how a request was routed, one entry an attempt, by the `id` of its answer."""
        found = await _ask(explain, request_id.rpartition("-")[2])
        if found is None:
            raise ApiError(503, "the router does not answer", code="unavailable", retry_after_s=1.0)
        if not found:
            raise ApiError(404, "the router does not know that request", code="not_found")
        return {"object": "list", "data": [_shown(decision) for decision in found]}


async def _ask(explain: Explain, request_id: str) -> tuple[Decision, ...] | None:
    if not _ID.fullmatch(request_id):
        return ()
    answer: asyncio.Future[tuple[Decision, ...] | None] = asyncio.get_running_loop().create_future()

    def told(decisions: tuple[Decision, ...] | None) -> None:
        if not answer.done():
            answer.set_result(decisions)

    explain(request_id, told)
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            return await answer
    except TimeoutError:
        return None


def _shown(decision: Decision) -> dict[str, Any]:
    return {**msgspec.to_builtins(decision), "regret_s": decision.regret_s}


TIMEOUT_S: Final = 5.0
FRESH_S: Final = 1.0  # the result of a health check is reused for this long
PROVED_S: Final = 3.0  # requests of clients replace a health check for this long
NUM_PAGES: Final = 2  # of the prompt, and a token: longer than a decode worker computes by itself
# The prefill worker samples the first token, the decode worker the second.
SAMPLING: Final = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True, seed=0)


class Canary:
    """Checks the cluster with a tiny request through a prefill worker and a decode worker.

    Where prefill workers are configured the request is a probe: a prefill worker computes its prompt and
    transfers the pages, or the probe fails, whatever the routing policy. A recent client's request that took
    the same way proves as much, so a busy cluster is not probed. Concurrent checks share one request.
    """

    def __init__(
        self,
        service: Service,
        clock: Clock,
        *,
        expects_prefill: bool | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """expects_prefill: prefill workers are configured; None: as soon as one has joined."""
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
        seen_s = self._service.prefill_seen_s
        if self._needs_prefill() and seen_s is not None and now_s - seen_s < PROVED_S:
            return
        if self._probing is None or self._probing.done():
            self._probing = asyncio.create_task(self._probe())
        await asyncio.shield(self._probing)

    def _needs_prefill(self) -> bool:
        if self._expects_prefill is None and self._has_prefill():
            self._expects_prefill = True
        return bool(self._expects_prefill)

    def _has_prefill(self) -> bool:
        return any(worker.role is WorkerRole.PREFILL for worker in self._service.workers)

    async def _probe(self) -> None:
        workers, missing = self._service.workers, self._service.why_not_ready
        if not workers or missing:
            raise Overloaded(missing or "no worker is ready", retry_after_s=FRESH_S)
        is_probe = self._needs_prefill()
        if is_probe and not self._has_prefill():
            message = "no prefill worker is connected; decode workers compute prompts themselves meanwhile"
            raise Overloaded(message, retry_after_s=FRESH_S)
        sink = _ProbeSink()
        request = Request(
            request_id=uuid.uuid4().hex,
            token_ids=self._prompt(workers),
            sampling=SAMPLING,
            cache_salt=b"canary",
            arrival_s=self._clock.now_s(),
            is_probe=is_probe,
        )
        self._service.open(request, sink)
        try:
            async with asyncio.timeout(self._timeout_s):
                await sink.end
        except TimeoutError:
            what = "no prompt was computed by a prefill worker and transferred" if is_probe else "no answer"
            raise WorkerLost(f"{what} within {self._timeout_s:g} s") from None
        finally:
            self._service.cancel(request.request_id)
        self._checked_s = self._clock.now_s()

    def _prompt(self, workers: Sequence[Worker]) -> TokenIds:
        """Return a new prompt each time, so that no cache has it, of ids that every vocabulary has."""
        longest = min(worker.max_model_len for worker in workers) - 2
        length = max(1, min(NUM_PAGES * max(worker.page_size for worker in workers) + 1, longest))
        drawn = secrets.randbits(length)
        return TokenIds.of(drawn >> index & 1 for index in range(length))


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
