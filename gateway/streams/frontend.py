"""The gateway's end of the cluster: it submits requests, passes their tokens on, and replays what is lost.

A request that is open here has exactly one end: a token with a finish reason, or one error. In between it is
one stream (gateway/streams/request_stream.py), whatever number of attempts it takes
(gateway/streams/request_stream.py, gateway/streams/request_streams.py). Nothing here knows text, HTTP or
clients.
"""

import logging
import secrets
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import msgspec

from baton.clock import Clock
from baton.errors import InvalidRequest, Overloaded, ProtocolError
from baton.gateway.streams.request_stream import RETRY_AFTER_S, ReplayLimits, RequestStream, Sink
from baton.gateway.streams.request_streams import RequestStreams
from baton.messages.bounds import Kind
from baton.messages.codec import AnyMessage, fits_request
from baton.messages.control import (
    AttemptFailed,
    Cancel,
    Decision,
    Failure,
    Hello,
    Members,
    Queued,
    Rejected,
    Routed,
    Tokens,
)
from baton.messages.operations import Decisions, Explain, GatewayReport, GatewayStatus, Status, StatusQuery
from baton.messages.workers import REMOTE_PREFILLS, Address, Worker, WorkerRole
from baton.request import FinishReason, Request, TokenEvent
from baton.rpc.peers import Dial, Peer, PeerRegistry

# Questions to the routers of how they have routed requests.
#
# All of them are asked, as each knows its own attempts alone; each answers in the order in which it was
# asked.

MAX_ASKED: Final = 64  # at once

# Called once: with a decision for each attempt, or None when there is no router to answer.
Told: TypeAlias = Callable[[tuple[Decision, ...] | None], None]


class ExplainQuery:
    def __init__(self, told: Told, num_asked: int) -> None:
        self._told = told
        self._num_waiting = num_asked
        self._found: list[Decision] | None = None  # None: nobody has answered

    def answered(self, decisions: Sequence[Decision] | None) -> None:
        """By one of those that were asked; None: it is gone."""
        self._num_waiting -= 1
        if decisions is not None:
            self._found = [*(self._found or ()), *decisions]
        if not self._num_waiting:
            found = self._found
            self._told(None if found is None else tuple(sorted(found, key=lambda each: each.attempt)))


class Explanations:
    def __init__(self, routers: Callable[[], Sequence[Peer]]) -> None:
        """routers: those that are connected, whenever it is asked."""
        self._routers = routers
        self._asked: dict[str, deque[ExplainQuery]] = {}  # by the router's id, oldest first

    def ask(self, request_id: str, told: Told) -> None:
        routers = self._routers()
        if not routers or any(len(waiting) >= MAX_ASKED for waiting in self._asked.values()):
            told(None)
            return
        question = ExplainQuery(told, len(routers))
        for router in routers:
            self._asked.setdefault(router.hello.id, deque()).append(question)
        for router in routers:
            router.send(Explain(request_id=request_id))

    def answer(self, router: Peer, decisions: tuple[Decision, ...]) -> None:
        waiting = self._asked.get(router.hello.id)
        if waiting:
            waiting.popleft().answered(decisions)

    def lose(self, router: Peer) -> None:
        """It will answer nothing any more."""
        for question in self._asked.pop(router.hello.id, ()):
            question.answered(None)


SILENT_S: Final = 3.0


class RouterWatch:
    """What a gateway's routers say of themselves, and which of them have fallen silent.

    Each is asked for its status once a second. One that has answered nothing for SILENT_S, while another
    does, stands still: it is given up, and connected to again when it answers. While none answers none is
    given up here, which a link's own timeout does (baton/rpc/liveness.py); but the gateway is not ready then,
    and says so.
    """

    def __init__(self, peer_registry: PeerRegistry, clock: Clock) -> None:
        self._peer_registry = peer_registry
        self._clock = clock
        self._heard_s: dict[str, float] = {}  # by router, as the statuses
        self._statuses: dict[str, Status] = {}
        self._any_heard_s = clock.now_s()
        self._num_transferred: dict[str, int] = {}  # prompts, by decode worker
        self.transferred_s: float | None = None  # when some were seen to have been

    @property
    def silence_s(self) -> float:
        """For how long no router has said anything, whether one is connected or not."""
        return self._clock.now_s() - self._any_heard_s

    @property
    def status(self) -> Status | None:
        """Of workers as that router sees them which is asked for pairs, and of all routers, once all told."""
        router, present = self._peer_registry.router, self._peer_registry.routers
        if router is None or any(each.hello.id not in self._statuses for each in present):
            return None
        return msgspec.structs.replace(
            self._statuses[router.hello.id],
            num_attempts=sum(each.num_attempts for each in self._statuses.values()),
            routers=tuple(router for each in self._statuses.values() for router in each.routers),
        )

    def forget(self) -> None:
        """`status` is None until they are heard of again."""
        self._statuses.clear()

    def ask(self, own: GatewayStatus | None = None) -> None:
        """Ask every router for its status, after reporting this gateway's own."""
        for router in self._peer_registry.routers:
            self._heard_s.setdefault(router.hello.id, self._clock.now_s())
            if own is not None:
                router.send(GatewayReport(status=own))
            router.send(StatusQuery())

    def answered(self, router: Peer, status: Status) -> None:
        """Counts that have risen since the worker's last one show that prompts were transferred."""
        self._statuses[router.hello.id] = status
        before, counts = self._num_transferred, dict[str, int]()
        for each in status.workers:
            count = each.load.counters.get(REMOTE_PREFILLS, 0)
            known = before.get(each.worker.id, count)
            if count > known:
                self.transferred_s = self._clock.now_s()
            counts[each.worker.id] = max(count, known)  # another router may have heard more
        self._num_transferred = counts

    def heard(self, router: Peer) -> None:
        self._heard_s[router.hello.id] = self._any_heard_s = self._clock.now_s()

    def left(self, router: Peer) -> None:
        self._heard_s.pop(router.hello.id, None)
        self._statuses.pop(router.hello.id, None)

    def held_up(self, seconds: float) -> None:
        """This process stood still so long: what they said meanwhile is unread."""
        self._any_heard_s += seconds
        for router in self._heard_s:
            self._heard_s[router] += seconds

    def silent(self) -> list[Peer]:
        """None of them, where nobody else would answer."""
        now_s, routers = self._clock.now_s(), self._peer_registry.routers
        silent = [each for each in routers if now_s - self._heard_s.get(each.hello.id, now_s) > SILENT_S]
        return silent if len(silent) < len(routers) else []


LATE_TICK_S: Final = 1.0  # this process stood still
STATUS_S: Final = 1.0
_NO_ANSWERS: Final = frozenset({FinishReason.ABORT, FinishReason.ERROR})
logger = logging.getLogger(__name__)


class Frontend:
    """See node.Node, and service.Service for what the HTTP side calls; all from one thread."""

    def __init__(
        self,
        id: str,
        routers: Sequence[Address],
        dial: Dial,
        clock: Clock,
        limits: ReplayLimits | None = None,
    ) -> None:
        """id: of this life of the process, 32 hex digits. routers: where they listen."""
        self.hello = Hello(process=Kind.GATEWAY, id=id)
        self._peer_registry = PeerRegistry(self.hello, routers, dial, wanted=list(WorkerRole))
        self._watch = RouterWatch(self._peer_registry, clock)
        self._clock = clock
        self._limits = limits or ReplayLimits()
        self._streams = RequestStreams(self._peer_registry, clock, self._limits)
        self._explanations = Explanations(lambda: self._peer_registry.routers)
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
        if self._peer_registry.router is None:
            return "no router is connected"
        decoders = self._peer_registry.of_role(WorkerRole.DECODE)
        return "" if any(map(self._streams.is_connected, decoders)) else "no decode worker is connected"

    @property
    def status(self) -> Status | None:
        return self._watch.status

    @property
    def workers(self) -> Sequence[Worker]:
        return list(self._peer_registry.members.values())

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

    def open(self, request: Request, sink: Sink, *, sticky_worker: str = "") -> None:
        """Begin a request of one choice; its id must be new.

        Raises Overloaded or InvalidRequest, and keeps nothing of it then. `sticky_worker`: the decode worker
        that has the prompt already.
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
        self._streams.open(RequestStream(request, sink, sticky_worker, self._clock.now_s()))

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
        former = self._peer_registry.peer(peer.hello.id)
        if former is not None and former.hello.process is peer.hello.process:
            self.left(former)
            former.close()
        self._peer_registry.joined(peer)
        self._report()
        if peer.hello.process is Kind.ROUTER:
            self._watch.heard(peer)
            self._streams.submit_waiting()
        else:
            self._streams.find_worker(peer.hello.id)

    def left(self, peer: Peer) -> None:
        if not self._peer_registry.left(peer):
            return
        if peer.hello.process is Kind.ROUTER:
            self._watch.left(peer)
            self._streams.lose_router(peer.hello.id)
            self._explanations.lose(peer)
            self._leave(self._peer_registry.recount())
        else:
            self._report()  # before anything is submitted again
            self._streams.lose_worker(peer.hello.id)

    def received(self, peer: Peer, message: AnyMessage) -> None:
        if peer.hello.process is Kind.WORKER:
            self._streams.hear(peer.hello.id)
            self._from_worker(peer, message)
        elif self._peer_registry.is_router(peer):
            self._watch.heard(peer)
            self._streams.hear(peer.hello.id)
            self._from_router(peer, message)
        self._streams.flush()

    def tick(self) -> None:
        self._peer_registry.keep_up()
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

    def _deliver(self, stream: RequestStream, due: Sequence[TokenEvent]) -> None:
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

    def _repeated(self, stream: RequestStream, event: TokenEvent) -> None:
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
            self._peer_registry.tell(routed.decode, cancel)
        else:
            self._streams.routed(stream, routed)

    def _take_members(self, router: Peer, members: Members) -> None:
        self._streams.drain(members.draining)
        self._leave(self._peer_registry.changed(router, members))
        self._peer_registry.keep_up()
        self._report()

    def _leave(self, workers: Sequence[str]) -> None:
        """They are gone, however their connections look."""
        for worker in workers:
            peer = self._peer_registry.peer(worker)
            if peer is not None:
                self.left(peer)
                peer.close()

    def _report(self) -> None:
        self._peer_registry.report(self._peer_registry.connected())
