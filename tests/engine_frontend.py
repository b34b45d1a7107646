"""The tiny model behind the gateway's seam, in this process: real tokens, no cluster.

One engine on a thread of its own, one request a choice. What the cluster would do on a fault is not here.
"""

import asyncio
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from baton.cluster.model_directory import resolve_model
from baton.config.engine import EngineConfig, SchedulerConfig
from baton.engine.engine import Engine, load_engine
from baton.errors import InvalidRequest, WorkerLost
from baton.request import FinishReason, Request, StepOutput, TokenEvent
from tests.scripted_service import ScriptedService, worker
from tests.served_gateway import ServedGateway


def tiny_engine(max_model_len: int | None = None, model: str | None = None) -> Engine:
    return load_engine(
        EngineConfig(
            model=model or str(resolve_model("tiny")),
            max_model_len=max_model_len,
            scheduler=SchedulerConfig(max_num_seqs=32),
        )
    )


@contextmanager
def served_engine(engine: Engine, **settings: Any) -> "Iterator[ServedGateway[EngineFrontend]]":
    """Run a gateway over an engine. settings: of the gateway."""
    with ServedGateway(lambda: EngineFrontend(engine), **settings) as gateway:
        yield gateway
    gateway.service.close()


class EngineFrontend(ScriptedService):
    """A service whose requests an engine computes. Made on the loop's thread; `close` it there."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(lambda _, request: self._work.put(lambda: self._add(request)))
        self.workers = (worker(max_model_len=engine.runner.max_model_len),)
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine")
        self._thread.start()

    def cancel(self, request_id: str) -> None:
        if request_id in self.sinks:
            self._work.put(lambda: self._abort(request_id))
        super().cancel(request_id)

    def close(self) -> None:
        self._work.put(None)
        self._thread.join()

    # On the engine's thread.

    def _run(self) -> None:
        while True:
            try:
                job = self._work.get(block=not self._engine.has_work())
            except queue.Empty:
                outputs = self._engine.step()
                self._loop.call_soon_threadsafe(self._deliver, outputs)
                continue
            if job is None:
                return
            job()

    def _add(self, request: Request) -> None:
        try:
            self._engine.add(request)
        except InvalidRequest as error:
            self._loop.call_soon_threadsafe(self.fail, request.request_id, error)

    def _abort(self, request_id: str) -> None:
        self._engine.abort(request_id)

    # On the loop's.

    def _deliver(self, outputs: Sequence[StepOutput]) -> None:
        events: dict[str, list[TokenEvent]] = defaultdict(list)
        for output in outputs:
            events[output.request_id].append(token_event(output))
        for request_id, batch in events.items():
            reason = batch[-1].finish_reason
            if reason in (None, FinishReason.STOP, FinishReason.LENGTH):
                self.emit(request_id, batch)
            else:
                self.fail(request_id, WorkerLost(f"the engine ended the request: {reason}"))


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
