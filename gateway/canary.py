"""Whether the cluster answers, by asking it: a tiny request through a prefill and a decode worker.

Where prefill workers are configured, the request is a probe: one of them computes its prompt and transfers
the pages, or it fails, whatever the routing policy. Prompts of clients that were transferred and answered
lately are as good a proof, so a busy cluster is not asked.
"""

import asyncio
import secrets
import uuid
from collections.abc import Sequence
from typing import Final

from baton.clock import Clock
from baton.errors import BatonError, Overloaded, WorkerLost
from baton.gateway.service import Service
from baton.request import Request, SamplingParams
from baton.token_event import TokenEvent
from baton.worker import Worker, WorkerRole

TIMEOUT_S: Final = 5.0
FRESH_S: Final = 1.0  # an answer is good for so long
PROVED_S: Final = 3.0  # and what clients' requests have shown
NUM_PAGES: Final = 2  # of the prompt, and a token: more than a decode worker computes by itself
# The first token is prefill's, the second decode's.
SAMPLING: Final = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True, seed=0)


class Canary:
    """Everybody who asks at the same time hears the same answer."""

    def __init__(
        self,
        service: Service,
        clock: Clock,
        *,
        expects_prefill: bool | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """expects_prefill: whether prefill workers are configured; None: once one has been seen."""
        self._service = service
        self._expects_prefill = expects_prefill
        self._clock = clock
        self._timeout_s = timeout_s
        self._sung_s: float | None = None
        self._song: asyncio.Task[None] | None = None

    async def sing(self) -> None:
        """Raises the BatonError of what is wrong."""
        now_s = self._clock.now_s()
        if self._sung_s is not None and now_s - self._sung_s < FRESH_S:
            return
        if self._needs_prefill() and self._is_lately(self._service.prefill_seen_s, now_s):
            return
        if self._song is None or self._song.done():
            self._song = asyncio.create_task(self._ask())
        await asyncio.shield(self._song)

    def _needs_prefill(self) -> bool:
        if self._expects_prefill is None and self._has_prefill():
            self._expects_prefill = True
        return bool(self._expects_prefill)

    def _has_prefill(self) -> bool:
        return any(worker.role is WorkerRole.PREFILL for worker in self._service.workers)

    @staticmethod
    def _is_lately(seen_s: float | None, now_s: float) -> bool:
        return seen_s is not None and now_s - seen_s < PROVED_S

    async def _ask(self) -> None:
        workers = self._service.workers
        if not workers or not self._service.is_ready:
            raise Overloaded(self._service.why_not_ready or "no worker is ready", retry_after_s=FRESH_S)
        is_probe = self._needs_prefill()
        if is_probe and not self._has_prefill():
            message = "no prefill worker is there; decode workers compute prompts themselves meanwhile"
            raise Overloaded(message, retry_after_s=FRESH_S)
        sink = _Waiting()
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
        self._sung_s = self._clock.now_s()

    def _prompt(self, workers: Sequence[Worker]) -> tuple[int, ...]:
        """Another each time, at every gateway: no cache answers it. Its ids are in every vocabulary."""
        longest = min(worker.max_model_len for worker in workers) - 2
        length = max(1, min(NUM_PAGES * max(worker.page_size for worker in workers) + 1, longest))
        drawn = secrets.randbits(length)
        return tuple(drawn >> index & 1 for index in range(length))


class _Waiting:
    """A sink that keeps nothing."""

    def __init__(self) -> None:
        self.end: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def tokens(self, events: Sequence[TokenEvent]) -> None:
        if events[-1].finish_reason is not None and not self.end.done():
            self.end.set_result(None)

    def failed(self, error: BatonError) -> None:
        if not self.end.done():
            self.end.set_exception(error)
