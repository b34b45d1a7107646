"""A worker that computes nothing, so that only the cost of the control plane is left.

To routers and gateways a stub is a worker like any other, prefill or decode, with the same messages over the
same server. A decode stub answers every attempt with the tokens of a hash, one a step for all attempts, in
one message a gateway as the real worker does. No pages move, and torch is not imported.

`python -m baton.bench.serve.stub STEP_S` is a process of a cluster, like `baton.cluster.process`: a worker is
a stub with at least STEP_S seconds between two tokens of an answer, another process is as it always is.

Where the environment names a file, a gateway records how long its loop was held: a timer is due every TICK_S,
and a tick that is late by more than REPORTED_S becomes a line of the file.
"""

import asyncio
import json
import os
import secrets
import sys
import threading
from dataclasses import dataclass, field
from time import monotonic
from typing import Final

import msgspec

from baton.clock import SystemClock
from baton.cluster import process
from baton.cluster.model_directory import resolve_model
from baton.cluster.runtimes.base import Assignment, ProcessMessage, ProcessStarted
from baton.config.cluster import WorkerConfig
from baton.errors import ProtocolError
from baton.messages.bounds import Kind
from baton.messages.codec import AnyMessage
from baton.messages.control import (
    Cancel,
    Dispatch,
    Hello,
    KvEventBatch,
    KvEventsWanted,
    Members,
    Prefill,
    Prefilled,
)
from baton.messages.workers import Address, Load, Routers, Worker, WorkerRole, WorkerTimes
from baton.request import AttemptKey, FinishReason, Request, TokenEvent, TokenLogprobs
from baton.rpc.auth import KeyRing
from baton.rpc.peers import Dial, Peer, PeerRegistry
from baton.rpc.server import RpcServer
from baton.rpc.worker_node import WorkerReports

FIRST_TOKEN: Final = 10
UNUSED_PORT: Final = 9  # no pages move
MAX_NUM_SEQS: Final = 256
NUM_PAGES: Final = 1 << 20


@dataclass(slots=True)
class _Answer:
    """An attempt, and the index of its next token."""

    request: Request
    gateway: str
    index: int
    prefill: str = ""
    arrived_s: float = field(default_factory=monotonic)

    @property
    def times(self) -> WorkerTimes:
        """The phases as a real worker tells them: the prompt takes no time."""
        arrived_s, now_s = self.arrived_s, monotonic()
        return WorkerTimes(arrived_s=arrived_s, started_s=arrived_s, first_token_s=arrived_s, ended_s=now_s)


class StubWorker:
    """The node of a stub. A decode stub asks a prefill stub for the first token when the router says so."""

    def __init__(
        self, worker: Worker, routers: Routers, dial: Dial, vocab_size: int, step_s: float = 0.0
    ) -> None:
        """step_s: between two tokens of an answer, at least."""
        self.hello = Hello(process=Kind.WORKER, id=worker.id, worker=worker)
        self.is_draining = False
        self._role, self._vocab_size, self._step_s = worker.role, vocab_size, step_s
        wanted = (WorkerRole.PREFILL,) if worker.role is WorkerRole.DECODE else ()
        self._peer_registry = PeerRegistry(self.hello, routers, dial, wanted)
        self._reports = WorkerReports(self._peer_registry, SystemClock())
        self._asked: dict[str, _Answer] = {}  # their first token is a prefill stub's
        self._early: dict[str, TokenEvent] = {}  # first tokens that came before their Dispatch
        self._running: dict[str, _Answer] = {}
        self._is_stepping = False
        self._num_tokens = 0

    @property
    def attempts(self) -> tuple[AttemptKey, ...]:
        answers = (*self._asked.values(), *self._running.values())
        return tuple((answer.request.request_id, answer.request.attempt) for answer in answers)

    def load(self) -> Load:
        return Load(num_running=len(self._running), num_tokens=self._num_tokens)

    def joined(self, peer: Peer) -> None:
        self._peer_registry.joined(peer)
        self._report()

    def left(self, peer: Peer) -> None:
        self._peer_registry.left(peer)
        self._peer_registry.recount()
        self._report()

    def tick(self) -> None:
        self._peer_registry.tick()
        self._report()
        self._reports.heartbeat(self)

    def received(self, peer: Peer, message: AnyMessage) -> None:
        match message:
            case Members():
                self._peer_registry.changed(peer, message)
                self._peer_registry.keep_up()
                self._report()
                self._reports.heartbeat(self)
            case Dispatch():
                self._dispatch(message)
            case Prefill():
                self._prefill(message)
            case Prefilled(event):
                self._go_on(event)
            case KvEventsWanted():
                peer.send(KvEventBatch(first=0, keys=b"", is_snapshot=True))
            case Cancel():
                self._asked.pop(message.request_id, None)
                self._early.pop(message.request_id, None)
                self._running.pop(message.request_id, None)
            case _:
                raise ProtocolError(f"a {type(message).__name__} is nothing for a stub")

    def _report(self) -> None:
        """Report the workers that this stub reaches."""
        is_prefill = self._role is WorkerRole.PREFILL
        others = (
            self._peer_registry.of_role(WorkerRole.DECODE) if is_prefill else self._peer_registry.connected()
        )
        self._peer_registry.report(list(others))

    def _dispatch(self, dispatch: Dispatch) -> None:
        request = dispatch.request
        answer = _Answer(request, dispatch.gateway, len(request.generated_token_ids), dispatch.prefill)
        if not dispatch.prefill:
            self._run(answer)
            return
        first = self._early.pop(request.request_id, None)
        self._asked[request.request_id] = answer
        if first is not None:
            self._go_on(first)

    def _prefill(self, prefill: Prefill) -> None:
        answer = _Answer(prefill.request, prefill.gateway, len(prefill.request.generated_token_ids))
        event = self._next(answer)
        self._peer_registry.emit(answer.gateway, event)
        self._peer_registry.flush()
        self._peer_registry.tell(prefill.decode, Prefilled(event=event))

    def _go_on(self, event: TokenEvent) -> None:
        answer = self._asked.pop(event.request_id, None)
        if answer is None:  # the router's Dispatch comes a moment later
            self._early[event.request_id] = event
        if answer is not None and event.finish_reason is None:
            answer.index = event.index + 1
            self._run(answer)

    def _run(self, answer: _Answer) -> None:
        self._running[answer.request.request_id] = answer
        if not self._is_stepping:
            self._is_stepping = True
            asyncio.get_running_loop().call_soon(self._step)

    def _step(self) -> None:
        for answer in list(self._running.values()):
            event = self._next(answer)
            self._peer_registry.emit(answer.gateway, event)
            if event.finish_reason is not None:
                del self._running[event.request_id]
        self._peer_registry.flush()
        self._is_stepping = bool(self._running)
        if self._is_stepping:
            asyncio.get_running_loop().call_later(self._step_s, self._step)

    def _next(self, answer: _Answer) -> TokenEvent:
        request, index = answer.request, answer.index
        answer.index += 1
        self._num_tokens += 1
        is_last = answer.index >= (request.sampling.max_tokens or 1)
        token_id = token_at(request, index, self._vocab_size)
        finish_reason = FinishReason.LENGTH if is_last else None
        return TokenEvent(
            request.request_id,
            request.attempt,
            index,
            token_id,
            finish_reason,
            logprobs=_logprobs(token_id, request.sampling.logprobs),
            times=answer.times if is_last or self._role is WorkerRole.PREFILL else None,
        )


def token_at(request: Request, index: int, vocab_size: int) -> int:
    """Return the token of a stub's answer at this index: a hash of the prompt and the seed."""
    number = len(request.token_ids) * 31 + request.token_ids[-1] * 7919 + index * 104_729
    number = (number + (request.sampling.seed or 0) * 15_485_863) & 0xFFFFFFFF
    return FIRST_TOKEN + number % (vocab_size - FIRST_TOKEN)


def _logprobs(token_id: int, num_top: int | None) -> TokenLogprobs | None:
    """Return as many log probabilities as were asked for, of any value."""
    if num_top is None:
        return None
    top = tuple((index, -0.123456789 * (index + 1)) for index in range(num_top))
    return TokenLogprobs(token_id=token_id, logprob=-1.5, rank=2, top=top)


def worker_of(config: WorkerConfig, address: Address, max_model_len: int) -> Worker:
    """Return how the stub introduces itself."""
    return Worker(
        id=secrets.token_hex(16),
        name=config.name,
        role=config.role,
        model=config.model_name,
        fingerprint="stub",
        address=address,
        kv_address=Address(address.host, UNUSED_PORT),
        page_size=16,
        num_pages=NUM_PAGES,
        max_num_seqs=MAX_NUM_SEQS,
        max_model_len=max_model_len,
    )


async def serve(
    config: WorkerConfig, ring: KeyRing, step_s: float, stop: threading.Event, tell: process.Tell
) -> None:
    """Serve as the worker of this configuration until `stop` is set."""
    facts = json.loads((resolve_model(config.engine.model) / "config.json").read_text())
    rpc_server = RpcServer(ring)
    address = await rpc_server.listen()
    worker = worker_of(config, address, facts["max_position_embeddings"])
    rpc_server.serve(StubWorker(worker, config.routers, rpc_server.dial, facts["vocab_size"], step_s))
    tell(ProcessStarted(address))
    await asyncio.to_thread(stop.wait)
    await rpc_server.close()


FILE_VARIABLE: Final = "BATON_BENCH_LOOP_FILE"
TICK_S: Final = 0.002
REPORTED_S: Final = 0.01


class Held(msgspec.Struct, frozen=True, array_like=True):
    """One late tick."""

    at_s: float  # of the monotonic clock, which all processes of a machine share
    late_s: float
    waited_s: float  # for a core since the tick before, as the kernel counts it for the loop's thread

    @property
    def held_s(self) -> float:
        return max(0.0, self.late_s - self.waited_s)


def record_late_ticks(path: str) -> None:
    """Write the late ticks of the running loop into a file, from now on."""
    loop, file = asyncio.get_running_loop(), open(path, "a", encoding="utf-8")  # noqa: SIM115
    # proc(5): nanoseconds on a core, nanoseconds of waiting for one, times it ran
    schedule = open("/proc/thread-self/schedstat", "rb", buffering=0)  # noqa: SIM115

    def waited_s() -> float:
        return int(os.pread(schedule.fileno(), 100, 0).split()[1]) / 1e9

    def tick(due_s: float, before_s: float) -> None:
        now_s, after_s = monotonic(), waited_s()
        if now_s - due_s > REPORTED_S:
            held = Held(now_s, now_s - due_s, after_s - before_s)
            file.write(msgspec.json.encode(held).decode() + "\n")
            file.flush()
        loop.call_later(TICK_S, tick, monotonic() + TICK_S, waited_s())

    tick(monotonic(), waited_s())


def run(given: Assignment, ring: KeyRing, stop: threading.Event, tell: process.Tell) -> None:
    """Run a worker as a stub, watch the loop of a gateway if asked to, and run the rest as it is."""
    file = os.environ.get(FILE_VARIABLE)

    def tell_and_watch(message: ProcessMessage) -> None:
        if isinstance(message, ProcessStarted) and file is not None:
            record_late_ticks(file)
        tell(message)

    if given.kind is Kind.WORKER:
        config = msgspec.json.decode(given.config, type=WorkerConfig)
        asyncio.run(serve(config, ring, float(sys.argv[1]), stop, tell))
    else:
        process.run(given, ring, stop, tell_and_watch if given.kind is Kind.GATEWAY else tell)


def main() -> int:
    """Run the process that stdin describes; return its exit status. A template calls it, too."""
    return process.main(run)


if __name__ == "__main__":
    sys.exit(main())
