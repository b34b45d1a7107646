"""The gateway's end of the cluster: it submits requests, passes their tokens on, and replays what is lost.

A request that is open here has exactly one end: a token with a finish reason, or one error. In between it is
one stream (stream_log.py), whatever number of attempts it takes (replay.py, open_streams.py). Nothing here
knows text, HTTP or clients.
"""

import logging
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from baton.clock import Clock
from baton.colleagues import Colleagues
from baton.control import AttemptFailed, Cancel, Failure, Hello, Members, Queued, Rejected, Routed, Tokens
from baton.control_wire import AnyMessage, fits_request
from baton.errors import InvalidRequest, Overloaded, ProtocolError
from baton.gateway.explanations import Explanations, Told
from baton.gateway.open_streams import OpenStreams
from baton.gateway.replay import RETRY_AFTER_S, Limits
from baton.gateway.router_watch import SILENT_S, RouterWatch
from baton.gateway.service import Sink
from baton.gateway.stream_log import Stream
from baton.node import Dial, Peer
from baton.operating import Decisions, GatewayStatus, Status
from baton.request import FinishReason, Request
from baton.token_event import TokenEvent
from baton.wire_types import Kind
from baton.worker import Address, Worker, WorkerRole

LATE_TICK_S: Final = 1.0  # this process stood still
STATUS_S: Final = 1.0

_NO_ANSWERS: Final = frozenset({FinishReason.ABORT, FinishReason.ERROR})

logger = logging.getLogger(__name__)


class Frontend:
    """See node.Node, and service.Service for what the HTTP side calls; all from one thread."""

    def __init__(
        self, id: str, routers: Sequence[Address], dial: Dial, clock: Clock, limits: Limits | None = None
    ) -> None:
        """id: of this life of the process, 32 hex digits. routers: where they listen."""
        self.hello = Hello(process=Kind.GATEWAY, id=id)
        self._colleagues = Colleagues(self.hello, routers, dial, wanted=list(WorkerRole))
        self._watch = RouterWatch(self._colleagues, clock)
        self._clock = clock
        self._limits = limits or Limits()
        self._streams = OpenStreams(self._colleagues, clock, self._limits)
        self._explanations = Explanations(lambda: self._colleagues.routers)
        self._looked_s = clock.now_s() - STATUS_S
        self._ticked_s = clock.now_s()
        self.report: Callable[[], GatewayStatus] | None = None  # what routers are told each second
        self._answered_s: float | None = None  # a decode worker, a request that a prefill worker had as well

    # What the HTTP side calls.

    @property
    def is_ready(self) -> bool:
        """Whether a request that came now could be sent somewhere."""
        return not self.why_not_ready

    @property
    def why_not_ready(self) -> str:
        silence_s = self._watch.silence_s
        if silence_s > SILENT_S:
            return f"no router has answered for {silence_s:.0f} s"
        if self._colleagues.router is None:
            return "no router is connected"
        decoders = self._colleagues.of_role(WorkerRole.DECODE)
        return "" if any(map(self._streams.is_connected, decoders)) else "no decode worker is connected"

    @property
    def status(self) -> Status | None:
        return self._watch.status

    @property
    def workers(self) -> Sequence[Worker]:
        return list(self._colleagues.members.values())

    @property
    def prefill_seen_s(self) -> float | None:
        transferred_s, answered_s = self._watch.transferred_s, self._answered_s
        return None if transferred_s is None or answered_s is None else min(transferred_s, answered_s)

    @property
    def counters(self) -> Counter[str]:
        return self._streams.counters

    @property
    def num_open(self) -> int:
        return len(self._streams)

    def open(self, request: Request, sink: Sink, *, beside: str = "") -> None:
        """Begin a request of one choice; its id must be new.

        Raises Overloaded or InvalidRequest, and keeps nothing of it then. `beside`: the decode worker that
        has the prompt already.
        """
        if len(self._streams) >= self._limits.max_streams:
            message = f"{self._limits.max_streams} requests are open, this gateway takes no more"
            raise Overloaded(message, retry_after_s=RETRY_AFTER_S)
        if not fits_request(request):
            raise InvalidRequest(
                f"the request, of {len(request.token_ids)} tokens, is too large to be sent on"
            )
        assert self._streams.get(request.request_id) is None and request.sampling.n == 1, request.request_id
        if request.sampling.seed is None and request.sampling.temperature > 0:
            sampling = msgspec.structs.replace(request.sampling, seed=secrets.randbits(63))
            request = msgspec.structs.replace(request, sampling=sampling)
        self._streams.open(Stream(request, sink, beside, self._clock.now_s()))

    def cancel(self, request_id: str) -> None:
        """Its sink hears nothing more. What is unknown, or has ended, is no error."""
        stream = self._streams.get(request_id)
        if stream is not None:
            self._streams.cancel(stream)

    def decode_worker(self, request_id: str) -> str:
        """The worker that the request runs on now; "" for none."""
        stream = self._streams.get(request_id)
        return stream.decode if stream is not None else ""

    def explain(self, request_id: str, told: Told) -> None:
        """Ask the routers how the request was routed."""
        self._explanations.ask(request_id, told)

    # What its host calls.

    def joined(self, peer: Peer) -> None:
        if peer.hello.process not in (Kind.ROUTER, Kind.WORKER):
            raise ProtocolError(f"a {peer.hello.process} has no business with a gateway")
        former = self._colleagues.peer(peer.hello.id)
        if former is not None and former.hello.process is peer.hello.process:
            self.left(former)
            former.close()
        self._colleagues.joined(peer)
        self._report()
        if peer.hello.process is Kind.ROUTER:
            self._watch.heard(peer)
            self._streams.submit_waiting()
        else:
            self._streams.find_worker(peer.hello.id)

    def left(self, peer: Peer) -> None:
        if not self._colleagues.left(peer):
            return
        if peer.hello.process is Kind.ROUTER:
            self._watch.left(peer)
            self._streams.lose_router(peer.hello.id)
            self._explanations.lose(peer)
            self._leave(self._colleagues.recount())
        else:
            self._report()  # before anything is submitted again
            self._streams.lose_worker(peer.hello.id)

    def received(self, peer: Peer, message: AnyMessage) -> None:
        if peer.hello.process is Kind.WORKER:
            self._streams.hear(peer.hello.id)
            self._from_worker(peer, message)
        elif self._colleagues.is_router(peer):
            self._watch.heard(peer)
            self._streams.hear(peer.hello.id)
            self._from_router(peer, message)
        self._streams.flush()

    def tick(self) -> None:
        self._colleagues.keep_up()
        self._report()
        now_s = self._clock.now_s()
        held_up_s, self._ticked_s = now_s - self._ticked_s, now_s
        if held_up_s > LATE_TICK_S:
            self._streams.held_up(held_up_s)
            self._watch.held_up(held_up_s)
        if now_s - self._looked_s >= STATUS_S:
            self._looked_s = now_s
            self._watch.ask(self.report() if self.report is not None else None)
            self._streams.find_overdue()
        for router in self._watch.silent():
            logger.warning("a router does not answer, another is asked", extra={"router": router.hello.id})
            self.left(router)
            router.close()
        self._streams.submit_waiting()
        self._streams.flush()

    # Workers.

    def _from_worker(self, peer: Peer, message: AnyMessage) -> None:
        match message:
            case Tokens(events=events):
                self._take_all(peer, events)
            case AttemptFailed():
                self._attempt_failed(peer, message)
            case _:
                raise ProtocolError(f"a {type(message).__name__} is nothing for a gateway")

    def _take_all(self, peer: Peer, events: Sequence[TokenEvent]) -> None:
        now_s, streams = self._clock.now_s(), self._streams
        for event in events:
            stream = streams.get(event.request_id)
            if stream is None or stream.attempt != event.attempt:
                self._stray(peer, event)
                continue
            stream.heard_s = now_s
            try:
                due = stream.take(event) if event.finish_reason not in _NO_ANSWERS else None
            except ProtocolError as error:
                streams.fault(stream, peer.hello.id, str(error))
                continue
            if due is None:
                streams.fault(stream, peer.hello.id, f"it ended with {event.finish_reason}")
            elif due:
                if stream.prefill and peer.hello.id == stream.decode:
                    self._answered_s = now_s
                self._deliver(stream, due)
            elif event.index < stream.next_index:
                self._repeated(stream, event)

    def _deliver(self, stream: Stream, due: Sequence[TokenEvent]) -> None:
        try:
            stream.sink.tokens(due)
        except Exception:  # a bug of this one request's reader: the others of the message go on
            logger.exception("request %s: its sink failed, it is cancelled", stream.request_id)
            self.cancel(stream.request_id)
            return
        if not self._streams.is_open(stream):
            return  # its sink has cancelled it
        if not stream.is_reported and stream.num_answered:
            self._streams.started(stream)
        if due[-1].finish_reason is not None:
            self._streams.finished(stream)

    def _stray(self, peer: Peer, event: TokenEvent) -> None:
        """Of an attempt that is over, or was never here: its worker works for nobody."""
        self.counters["stale_events"] += 1
        peer.send(Cancel(request_id=event.request_id, attempt=event.attempt))

    def _repeated(self, stream: Stream, event: TokenEvent) -> None:
        self.counters["repeated_events"] += 1
        if not stream.is_known(event):
            self.counters["contradictions"] += 1
            logger.error("request %s: token %d came again, and differs", event.request_id, event.index)

    def _attempt_failed(self, peer: Peer, failed: AttemptFailed) -> None:
        stream = self._streams.get(failed.request_id)
        if stream is None or stream.attempt != failed.attempt:
            return
        worker = failed.worker or peer.hello.id
        if failed.failure is Failure.INVALID and not stream.log:
            self._streams.fail(stream, InvalidRequest(failed.reason))
        elif failed.failure is Failure.BUSY:
            stream.blame(worker)
            self._streams.again(stream, "busy", at_once=False)
        elif failed.failure is Failure.LOST:
            self._streams.lose(stream, worker)
        else:
            self._streams.fault(stream, worker, failed.reason)

    # The router.

    def _from_router(self, peer: Peer, message: AnyMessage) -> None:
        match message:
            case Queued():
                pass
            case Routed():
                self._routed(message)
            case Rejected():
                stream = self._streams.get(message.request_id)
                if stream is not None and stream.attempt == message.attempt:
                    self._streams.rejected(stream, message)
            case AttemptFailed():
                self._attempt_failed(peer, message)
            case Members():
                self._take_members(peer, message)
            case Status():
                self._watch.answered(peer, message)
            case Decisions():
                self._explanations.answer(peer, message.decisions)
            case _:
                raise ProtocolError(f"a {type(message).__name__} is nothing for a gateway")
        if isinstance(message, Queued | Routed | Rejected):
            self._streams.answered(peer.hello.id, (message.request_id, message.attempt))

    def _routed(self, routed: Routed) -> None:
        stream = self._streams.get(routed.request_id)
        if stream is None or stream.attempt != routed.attempt:
            cancel = Cancel(request_id=routed.request_id, attempt=routed.attempt)
            self._colleagues.tell(routed.decode, cancel)
        else:
            self._streams.routed(stream, routed)

    def _take_members(self, router: Peer, members: Members) -> None:
        self._streams.drain(members.draining)
        self._leave(self._colleagues.changed(router, members))
        self._colleagues.keep_up()
        self._report()

    def _leave(self, workers: Sequence[str]) -> None:
        """They are gone, however their connections look."""
        for worker in workers:
            peer = self._colleagues.peer(worker)
            if peer is not None:
                self.left(peer)
                peer.close()

    def _report(self) -> None:
        self._colleagues.report(self._colleagues.connected())
