"""`/ping` and `/health`: whether this process runs, and whether a request gets through the cluster."""

import asyncio
import secrets
import uuid
from collections.abc import Sequence
from typing import Final

import orjson
from fastapi import FastAPI, Response

from baton.clock import Clock
from baton.errors import BatonError, Overloaded, WorkerLost
from baton.gateway.api.body_reader import ServedModels
from baton.gateway.api.errors import ApiError
from baton.gateway.streams.request_stream import Service, run_once
from baton.messages.workers import Worker, WorkerRole
from baton.request import HEALTH_PRIORITY, Request, SamplingParams, TokenIds

TIMEOUT_S: Final = 5.0
FRESH_S: Final = 1.0  # the result of a health check is reused for this long
NUM_PAGES: Final = 2  # the prompt has a token more: it is longer than a decode worker computes by itself
# The prefill worker samples the first token, the decode worker the second.
SAMPLING: Final = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True, seed=0)


class Canary:
    """Checks the cluster with a tiny request through a prefill worker and a decode worker.

    With prefill workers, the request is a probe. A probe succeeds only if a prefill worker computes the
    prompt and transfers the pages, under every routing policy. The router dispatches the request at once, and
    workers take it before the requests of clients, even when every seat is taken. Concurrent checks share one
    request.
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
        """Return whether a check goes through a prefill worker; sleeping ones compute nothing."""
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
            priority=HEALTH_PRIORITY,
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


def add_health_routes(app: FastAPI, models: ServedModels, canaries: Sequence[Canary]) -> None:
    """Add `/ping`, `/health` and `/version`. canaries: one for each model, in order."""

    @app.get("/ping")
    async def ping() -> Response:
        """Answer while this process runs, with or without workers."""
        return Response(b"{}", media_type="application/json")

    @app.get("/health")
    async def health() -> Response:
        """Answer when a request has just gone through the workers, prefill included where configured."""
        asleep = [model.name for model in models if model.view.is_asleep]
        # A check of a model that changes proves nothing, and might wake it.
        asked = [each for each, served in zip(canaries, models, strict=True) if not served.is_changing]
        faults = await asyncio.gather(*(canary.check() for canary in asked), return_exceptions=True)
        for canary, fault in zip(asked, faults, strict=True):
            if isinstance(fault, BatonError):
                which = f"model {canary.model!r}: " if canary.model else ""
                message = f"not healthy: {which}{fault}"
                raise ApiError(503, message, code="unhealthy", retry_after_s=1.0) from fault
            if fault is not None:
                raise fault
        said: dict[str, object] = {"status": "ok", "model": models.first.name}
        if len(canaries) > 1:
            said["models"] = models.names
        if asleep:
            said["asleep"] = asleep
        status = models.first.service.status
        if status is not None and status.head_away_s:
            said["warnings"] = [
                f"Ray's head has not answered for {status.head_away_s:.0f} s: no worker can be started"
            ]
        return Response(orjson.dumps(said), media_type="application/json")

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": app.version}
