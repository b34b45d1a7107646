"""A worker that computes nothing, so that only the cost of the control plane is left.

To routers and gateways a stub is a worker like any other, prefill or decode, with the same messages over the
same server. A decode stub answers every attempt with the tokens of a hash, one a step for all attempts, in
one message a gateway as the real worker does. No pages move, and torch is not imported.
bench/serve/overhead.py starts stubs and writes the assignment to their stdin.
"""

import asyncio
import logging
import signal
import sys
import threading
from dataclasses import dataclass
from typing import Final

import msgspec

from baton.clock import SystemClock
from baton.cluster.process import hear_parent, ring_of
from baton.cluster.runtimes.base import Assignment, ProcessStarted
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
from baton.messages.workers import Address, Load, Worker, WorkerRole
from baton.request import FinishReason, Request, TokenEvent, TokenLogprobs
from baton.rpc.auth import KeyRing
from baton.rpc.peers import Dial, Peer, PeerRegistry
from baton.rpc.server import RpcServer
from baton.rpc.worker_node import WorkerReports

FIRST_TOKEN: Final = 10
UNUSED_PORT: Final = 9  # no pages move
MAX_NUM_SEQS: Final = 256
NUM_PAGES: Final = 1 << 20


class StubConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of one stub."""

    id: str  # 32 hex digits
    name: str
    role: WorkerRole
    model: str
    router: Address
    vocab_size: int
    max_model_len: int
    step_s: float = 0.0  # between two tokens of an answer, at least


@dataclass(slots=True)
class _Answer:
    """An attempt, and the index of its next token."""

    request: Request
    gateway: str
    index: int
    prefill: str = ""


class StubWorker:
    """The node of a stub. A decode stub asks a prefill stub for the first token when the router says so."""

    def __init__(self, config: StubConfig, hello: Hello, dial: Dial) -> None:
        self.hello = hello
        self.is_draining = False
        wanted = (WorkerRole.PREFILL,) if config.role is WorkerRole.DECODE else ()
        self._config = config
        self._peer_registry = PeerRegistry(hello, (config.router,), dial, wanted)
        self._reports = WorkerReports(self._peer_registry, SystemClock())
        self._asked: dict[str, _Answer] = {}  # their first token is a prefill stub's
        self._early: dict[str, TokenEvent] = {}  # first tokens that came before their Dispatch
        self._running: dict[str, _Answer] = {}
        self._is_stepping = False
        self._num_tokens = 0

    @property
    def attempts(self) -> tuple[tuple[str, int], ...]:
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
                peer.send(KvEventBatch(first=0, keys=b"", pages=(), generations=(), is_afresh=True))
            case Cancel():
                self._asked.pop(message.request_id, None)
                self._early.pop(message.request_id, None)
                self._running.pop(message.request_id, None)
            case _:
                raise ProtocolError(f"a {type(message).__name__} is nothing for a stub")

    def _report(self) -> None:
        """Report the workers that this stub reaches."""
        is_prefill = self._config.role is WorkerRole.PREFILL
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
            asyncio.get_running_loop().call_later(self._config.step_s, self._step)

    def _next(self, answer: _Answer) -> TokenEvent:
        request, index = answer.request, answer.index
        answer.index += 1
        self._num_tokens += 1
        is_last = answer.index >= (request.sampling.max_tokens or 1)
        number = (len(request.token_ids) * 31 + request.token_ids[-1] * 7919 + index * 104_729) & 0xFFFFFFFF
        token_id = FIRST_TOKEN + number % (self._config.vocab_size - FIRST_TOKEN)
        finish_reason = FinishReason.LENGTH if is_last else None
        return TokenEvent(
            request.request_id,
            request.attempt,
            index,
            token_id,
            finish_reason,
            logprobs=_logprobs(token_id, request.sampling.logprobs),
        )


def _logprobs(token_id: int, num_top: int | None) -> TokenLogprobs | None:
    """Return as many log probabilities as were asked for, of any value."""
    if num_top is None:
        return None
    top = tuple((index, -0.123456789 * (index + 1)) for index in range(num_top))
    return TokenLogprobs(token_id=token_id, logprob=-1.5, rank=2, top=top)


def hello_of(config: StubConfig, address: Address) -> Hello:
    """Return how the stub introduces itself."""
    worker = Worker(
        id=config.id,
        name=config.name,
        role=config.role,
        model=config.model,
        fingerprint="stub",
        address=address,
        kv_address=Address(address.host, UNUSED_PORT),
        page_size=16,
        num_pages=NUM_PAGES,
        max_num_seqs=MAX_NUM_SEQS,
        max_model_len=config.max_model_len,
    )
    return Hello(process=Kind.WORKER, id=config.id, worker=worker)


async def serve(given: Assignment) -> None:
    """Serve until SIGTERM."""
    config = msgspec.json.decode(given.config, type=StubConfig)
    rpc_server = RpcServer(KeyRing(Kind.WORKER, given.generations))
    address = await rpc_server.listen()
    rpc_server.serve(StubWorker(config, hello_of(config, address), rpc_server.dial))
    sys.stdout.buffer.write(msgspec.json.encode(ProcessStarted(address)) + b"\n")
    sys.stdout.buffer.flush()
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    await stopping.wait()
    await rpc_server.close()


def main() -> None:
    """Run the stub of the assignment on stdin."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    given = msgspec.json.decode(sys.stdin.buffer.readline(), type=Assignment)
    threading.Thread(target=hear_parent, args=(ring_of(given),), name="parent", daemon=True).start()
    asyncio.run(serve(given))


if __name__ == "__main__":
    main()
