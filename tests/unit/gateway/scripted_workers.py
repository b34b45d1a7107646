"""Workers that speak as real ones do, and compute nothing: the next token follows from the request alone."""

from random import Random
from zlib import crc32

from baton.clock import Clock
from baton.messages.bounds import Kind
from baton.messages.codec import AnyMessage
from baton.messages.control import (
    AttemptFailed,
    Cancel,
    Dispatch,
    Failure,
    Hello,
    KvEventBatch,
    KvEventsWanted,
    Members,
    Prefill,
    Prefilled,
)
from baton.messages.operations import Drain
from baton.messages.workers import Address, Load, Worker, WorkerRole
from baton.request import FinishReason, Request, TokenEvent
from baton.rpc.peers import Dial, Peer, PeerRegistry
from baton.rpc.worker_node import WorkerReports


def golden(request: Request) -> list[int]:
    """Every token of the whole answer."""
    assert request.sampling.max_tokens is not None
    text = repr((request.token_ids, request.sampling.seed, request.choice)).encode()
    return [crc32(text, index) % 50_000 for index in range(request.sampling.max_tokens)]


class Work:
    """An attempt at its worker."""

    def __init__(self, request: Request, gateway: str, other: str = "", *, is_waiting: bool = False) -> None:
        self.request = request
        self.gateway = gateway
        self.other = other  # a decode worker's prefill worker, and the other way round
        self.is_waiting = is_waiting  # for a first token from elsewhere
        self.next_index = len(request.generated_token_ids)

    def event(self) -> TokenEvent:
        """The next token."""
        tokens, index = golden(self.request), self.next_index
        self.next_index += 1
        reason = FinishReason.LENGTH if self.next_index == len(tokens) else None
        return TokenEvent(self.request.request_id, self.request.attempt, index, tokens[index], reason)


class ScriptedWorker:
    """See node.Node. `step` is to be called again and again."""

    def __init__(self, worker: Worker, router: Address, dial: Dial, clock: Clock, random: Random) -> None:
        hello = Hello(process=Kind.WORKER, id=worker.id, worker=worker)
        is_decode = worker.role is WorkerRole.DECODE
        self.is_draining = False
        self.is_busy = False  # refuses whatever comes
        self.work: dict[str, Work] = {}
        self._is_decode = is_decode
        self._random = random
        self._peer_registry = PeerRegistry(hello, (router,), dial, [WorkerRole.PREFILL] if is_decode else [])
        self._reports = WorkerReports(self._peer_registry, clock)
        self._cancelled: set[tuple[str, int]] = set()  # before they came

    @property
    def hello(self) -> Hello:
        return self._peer_registry.hello

    @property
    def attempts(self) -> tuple[tuple[str, int], ...]:
        return tuple((work.request.request_id, work.request.attempt) for work in self.work.values())

    def load(self) -> Load:
        return Load(num_running=len(self.work), pages={"active": 2 * len(self.work)})

    def joined(self, peer: Peer) -> None:
        self._peer_registry.joined(peer)
        self._report()

    def left(self, peer: Peer) -> None:
        if self._peer_registry.left(peer):
            for gone in (peer.hello.id, *self._peer_registry.recount()):
                self._lost(gone)
            self._report()

    def tick(self) -> None:
        self._peer_registry.keep_up()
        self._report()
        self._reports.heartbeat(self)

    def received(self, peer: Peer, message: AnyMessage) -> None:
        match message:
            case Members():
                for gone in self._peer_registry.changed(peer, message):
                    self._lost(gone)
                self._report()
            case Dispatch():
                self._dispatched(message)
            case Prefill(request=request):
                self.work[request.request_id] = Work(request, message.gateway, message.decode)
            case Prefilled(event=event):
                self._prefilled(event)
            case Cancel():
                self._cancel(message)
            case KvEventsWanted():
                peer.send(KvEventBatch(first=0, keys=b"", pages=(), generations=(), is_snapshot=True))
            case Drain():
                self.is_draining = True
            case _:
                raise AssertionError(message)

    def step(self) -> None:
        for work in list(self.work.values()):
            if work.is_waiting:
                continue
            event = work.event()
            self._peer_registry.emit(work.gateway, event)
            if not self._is_decode:
                self._peer_registry.tell(work.other, Prefilled(event=event))
            if event.finish_reason is not None or not self._is_decode:
                del self.work[event.request_id]
        self._peer_registry.flush()

    def _dispatched(self, dispatch: Dispatch) -> None:
        request = dispatch.request
        older = self.work.get(request.request_id)
        if older is not None and older.request.attempt >= request.attempt:
            return
        self.work.pop(request.request_id, None)
        if (request.request_id, request.attempt) in self._cancelled:
            return
        if self.is_busy:
            self._fail(Work(request, dispatch.gateway), Failure.BUSY)
            return
        is_elsewhere = self._peer_registry.peer(dispatch.prefill) is not None
        work = Work(request, dispatch.gateway, dispatch.prefill, is_waiting=is_elsewhere)
        self.work[request.request_id] = work

    def _prefilled(self, event: TokenEvent) -> None:
        work = self.work.get(event.request_id)
        if work is None or work.request.attempt != event.attempt or not work.is_waiting:
            return
        work.is_waiting = False
        work.next_index = event.index + 1
        if event.finish_reason is not None:
            del self.work[event.request_id]

    def _cancel(self, cancel: Cancel) -> None:
        work = self.work.get(cancel.request_id)
        if work is None or work.request.attempt < cancel.attempt:
            self._cancelled.add((cancel.request_id, cancel.attempt))
        elif work.request.attempt == cancel.attempt:
            del self.work[cancel.request_id]
            if self._is_decode and work.is_waiting:
                self._peer_registry.tell(work.other, cancel)

    def _lost(self, process: str) -> None:
        for work in list(self.work.values()):
            if work.gateway == process or (work.other == process and not self._is_decode):
                del self.work[work.request.request_id]
            elif work.other == process and work.is_waiting:
                del self.work[work.request.request_id]
                self._fail(work, Failure.LOST, worker=process)

    def _fail(self, work: Work, failure: Failure, *, worker: str = "") -> None:
        request = work.request
        failed = AttemptFailed(
            request_id=request.request_id,
            attempt=request.attempt,
            failure=failure,
            reason="as the script says",
            worker=worker,
        )
        self._peer_registry.tell(work.gateway, failed)

    def _report(self) -> None:
        self._peer_registry.report(self._peer_registry.connected())
