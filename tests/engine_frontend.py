"""The tiny model behind the gateway's seam, in this process: real tokens, no cluster.

One engine on a thread of its own, one request a choice. What the cluster would do on a fault is not here.
"""

import asyncio
import queue
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from baton.cluster.model_directory import resolve_model
from baton.config.engine import EngineConfig, SchedulerConfig
from baton.engine.engine import Engine, load_engine
from baton.errors import BatonError, InvalidRequest, WorkerLost
from baton.gateway.streams.request_stream import Sink
from baton.gateway.streams.routers import Explained
from baton.messages.operations import Status
from baton.messages.workers import Address, Worker, WorkerRole
from baton.request import FinishReason, Request, StepOutput, TokenEvent

WORKER_ID = "d" * 32


def tiny_engine(max_model_len: int | None = None) -> Engine:
    return load_engine(
        EngineConfig(
            model=str(resolve_model("tiny")),
            max_model_len=max_model_len,
            scheduler=SchedulerConfig(max_num_seqs=32),
        )
    )


class EngineFrontend:
    """A Service. Made on the loop's thread; `close` it there."""

    def __init__(self, engine: Engine) -> None:
        self.counters: Counter[str] = Counter()
        self.status: Status | None = None
        self.opened: list[tuple[Request, str]] = []  # with the worker that it was asked to run beside
        self.cancelled: list[str] = []
        self.why_not_ready = ""
        self.prefill_seen_s: float | None = None
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._sinks: dict[str, Sink] = {}
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine")
        self._thread.start()

    @property
    def workers(self) -> Sequence[Worker]:
        address = Address("127.0.0.1", 1)
        return (
            Worker(
                id=WORKER_ID,
                name="decode-0",
                role=WorkerRole.DECODE,
                model="tiny",
                fingerprint="",
                address=address,
                kv_address=address,
                page_size=16,
                num_pages=1,
                max_num_seqs=32,
                max_model_len=self._engine.runner.max_model_len,
            ),
        )

    @property
    def num_open(self) -> int:
        return len(self._sinks)

    def open(self, request: Request, sink: Sink, *, sticky_worker: str = "") -> None:
        self.opened.append((request, sticky_worker))
        self._sinks[request.request_id] = sink
        self._work.put(lambda: self._add(request))

    def cancel(self, request_id: str) -> None:
        if self._sinks.pop(request_id, None) is not None:
            self.cancelled.append(request_id)
            self._work.put(lambda: self._abort(request_id))

    def decode_worker(self, request_id: str) -> str:
        return WORKER_ID if request_id in self._sinks else ""

    def explain(self, request_id: str, explained: Explained) -> None:
        explained(None)

    def close(self) -> None:
        self._work.put(None)
        self._thread.join()

    # On the engine's thread.

    def _run(self) -> None:
        while True:
            try:
                job = self._work.get(block=not self._engine.has_work())
            except queue.Empty:
                self._step()
                continue
            if job is None:
                return
            job()

    def _add(self, request: Request) -> None:
        try:
            self._engine.add(request)
        except InvalidRequest as error:
            refusal = error
            self._tell(lambda: self._fail(request.request_id, refusal))

    def _abort(self, request_id: str) -> None:
        self._engine.abort(request_id)

    def _step(self) -> None:
        outputs = self._engine.step()
        self._tell(lambda: self._deliver(outputs))

    def _tell(self, act: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(act)

    # On the loop's.

    def _fail(self, request_id: str, error: BatonError) -> None:
        sink = self._sinks.pop(request_id, None)
        if sink is not None:
            sink.failed(error)

    def _deliver(self, outputs: Sequence[StepOutput]) -> None:
        events: dict[str, list[TokenEvent]] = defaultdict(list)
        for output in outputs:
            events[output.request_id].append(token_event(output))
        for request_id, batch in events.items():
            reason = batch[-1].finish_reason
            if reason not in (None, FinishReason.STOP, FinishReason.LENGTH):
                self._fail(request_id, WorkerLost(f"the engine ended the request: {reason}"))
                continue
            sink = self._sinks.get(request_id)
            if reason is not None:
                self._sinks.pop(request_id, None)
            if sink is not None:
                sink.tokens(batch)


def token_event(output: StepOutput) -> TokenEvent:
    return TokenEvent(
        output.request_id,
        0,
        output.index,
        output.token_id,
        output.finish_reason,
        output.num_cached_tokens,
        output.logprobs,
        output.prompt_logprobs,
    )
