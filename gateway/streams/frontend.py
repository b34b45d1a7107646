"""The gateway's end of the cluster: it submits requests, passes their tokens on, and replays lost requests.

An open request is one `RequestStream`, which ends exactly once: with a token that has a finish reason, or
with one error. A request may take several attempts; gateway/streams/request_stream.py has its states and the
rules of replay. Each attempt is submitted once. When the gateway cannot tell what became of an attempt, it
submits the next one, and a worker that sends tokens of the former attempt gets a Cancel for it. This module
knows no text, no HTTP and no clients.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Final

from baton.clock import Clock, PauseDetector
from baton.errors import BatonError, InvalidRequest, Overloaded, ProtocolError, Refused, WireError, WorkerLost
from baton.gateway.metrics.metrics import counted_name
from baton.gateway.streams.migrations import Migrations
from baton.gateway.streams.request_stream import (
    CANCELLED,
    FINISHED,
    MAX_REMEMBERED,
    RETRY_AFTER_S,
    AttemptMarks,
    ReplayLimits,
    RequestMarks,
    RequestStream,
    Sink,
    StreamState,
    WorkerConnections,
    WorkerMarks,
)
from baton.gateway.streams.routers import (
    SILENT_S,
    AttemptReports,
    RouterWatch,
    SubmitWindow,
)
from baton.messages.bounds import Kind
from baton.messages.codec import AnyMessage, fits_request
from baton.messages.control import (
    AttemptFailed,
    Cancel,
    Failure,
    Hello,
    Members,
    Prepared,
    Queued,
    Rejected,
    Routed,
    Submit,
    Tokens,
    age_s,
)
from baton.messages.operations import (
    Decisions,
    Explain,
    FindRequests,
    FoundRequests,
    GatewayStatus,
    Migrate,
    Status,
)
from baton.messages.orders import Sleep, Wake, latest_order, numbered
from baton.messages.timeline import RequestTimeline
from baton.messages.workers import Address, Worker, WorkerRole, WorkerTimes, are_asleep
from baton.request import AttemptKey, FinishReason, Request, TokenEvent
from baton.rpc.peers import Dial, Peer, PeerRegistry
from baton.rpc.questions import Questions
from baton.tenants import Refusal

STATUS_S: Final = 1.0
UNHEARD_S: Final = 3.0  # for the first token of the decode worker after the router of the attempt has left
# A first token may take MAX_AHEAD times `max_silence_s` while its worker sends other tokens.
MAX_AHEAD: Final = 10
MAX_CANCELLED: Final = 1024
_NO_ANSWERS: Final = frozenset({FinishReason.ABORT, FinishReason.ERROR})
logger = logging.getLogger(__name__)


class Frontend:
    """A Node for its host and a Service for the HTTP side; all calls come from one thread.

    Sinks may open and cancel requests while they are being called.
    """

    def __init__(
        self,
        id: str,
        routers: Sequence[Address],
        dial: Dial,
        clock: Clock,
        limits: ReplayLimits | None = None,
        *,
        wakes_models: bool = False,
    ) -> None:
        """id: of this life of the process, 32 hex digits. routers: their addresses.

        wakes_models: a request for a model that sleeps wakes the model.
        """
        self.hello = Hello(process=Kind.GATEWAY, id=id)
        self.counters: Counter[str] = Counter()
        self.worker_us: Counter[str] = Counter()  # by tenant: time of steps of workers, in microseconds
        self.report: Callable[[], GatewayStatus] | None = None  # sent to routers each second
        self.find: Callable[[FindRequests], Sequence[RequestTimeline]] = lambda query: ()  # of this gateway
        self._peer_registry = PeerRegistry(self.hello, routers, dial, wanted=list(WorkerRole))
        self._connections = WorkerConnections(self._peer_registry, clock)
        self._watch = RouterWatch(self._peer_registry, clock)
        self._questions = Questions()
        self._reports = AttemptReports(self._peer_registry)
        self._window = SubmitWindow(clock)
        self._clock = clock
        self._limits = limits or ReplayLimits()
        self._wakes_models = wakes_models
        self._streams: dict[str, RequestStream] = {}
        self._num_client_streams = 0  # without those of health checks
        # tenant -> its WAITING streams, by request id; none is empty
        self._waiting: dict[str, dict[str, RequestStream]] = {}
        # Cancelled attempts that have no phases yet, and their tenants; the oldest is first.
        self._cancelled: dict[AttemptKey, tuple[AttemptMarks, str]] = {}
        self._draining: dict[str, None] = {}  # workers, ended ones too, oldest first
        self.migrations = Migrations(
            self._streams, self._cancel_attempt, self._peer_registry, self._reports, clock, self.counters
        )
        self._heard_s: dict[str, float] = {}  # worker -> when it last sent anything
        self._looked_s = clock.now_s() - STATUS_S
        self._pauses = PauseDetector(clock.now_s())

    # The HTTP side: see Service.

    @property
    def why_not_ready(self) -> str:
        silence_s = self._watch.silence_s
        if silence_s > SILENT_S:
            return f"no router has answered for {silence_s:.0f} s"
        if self._peer_registry.router is None:
            return "no router is connected"
        decoders = self._peer_registry.of_role(WorkerRole.DECODE)
        return "" if any(map(self._connections.has, decoders)) else "no decode worker is connected"

    @property
    def status(self) -> Status | None:
        return self._watch.status

    @property
    def workers(self) -> Sequence[Worker]:
        return self._peer_registry.workers

    @property
    def draining(self) -> Collection[str]:
        return self._draining.keys()

    @property
    def num_open(self) -> int:
        """Open requests."""
        return len(self._streams)

    def open(self, request: Request, sink: Sink, *, sticky_worker: str = "") -> RequestMarks:
        """See Service. The id must be new, and a sampled request has its seed: replays need the same one.

        Raises Overloaded or InvalidRequest, and keeps nothing of the request then.
        """
        if self._num_client_streams >= self._limits.max_streams and not request.is_health_check:
            message = f"{self._limits.max_streams} requests are open, this gateway takes no more"
            raise Overloaded(message, retry_after_s=RETRY_AFTER_S)
        if not fits_request(request):
            raise InvalidRequest(
                f"the request, of {len(request.token_ids)} tokens, is too large to be sent on"
            )
        assert request.request_id not in self._streams and request.sampling.n == 1, request.request_id
        assert request.sampling.seed is not None or not request.sampling.temperature, request.request_id
        stream = RequestStream(request, sink, sticky_worker, self._clock.now_s())
        self.counters["opened"] += 1
        self._streams[stream.request_id] = stream
        self._num_client_streams += not request.is_health_check
        self._wait(stream)
        self._submit(stream)
        return stream.marks

    def cancel(self, request_id: str) -> None:
        stream = self._streams.get(request_id)
        if stream is not None:
            self.counters["cancelled"] += 1
            self._cancel_attempt(stream)
            self._forget(stream, CANCELLED)

    def decode_worker(self, request_id: str) -> str:
        stream = self._streams.get(request_id)
        return stream.decode if stream is not None else ""

    async def explain(self, question: Explain, timeout_s: float) -> list[Decisions]:
        return await self._questions.ask(question, self._peer_registry.routers, Decisions, timeout_s)

    async def find_requests(self, query: FindRequests, timeout_s: float) -> list[FoundRequests]:
        router = self._peer_registry.router
        return await self._questions.ask(query, [router] if router else [], FoundRequests, timeout_s)

    def send_order(self, order: Sleep | Wake) -> None:
        for router in self._peer_registry.routers:
            router.send(order)

    # The host: see Node.

    def joined(self, peer: Peer) -> None:
        if peer.hello.process not in (Kind.ROUTER, Kind.WORKER):
            raise ProtocolError(f"a {peer.hello.process} has no business with a gateway")
        former = self._peer_registry.peer(peer.hello.id)
        if former is not None and former.hello.process is peer.hello.process:
            self.left(former)
            former.close()
        self._peer_registry.joined(peer)
        self._report_connections()
        if peer.hello.process is Kind.ROUTER:
            self._watch.heard(peer)
            self._submit_waiting()
        else:
            for stream in self._streams.values():  # only the connection was lost, not the process
                stream.lost.pop(peer.hello.id, None)

    def left(self, peer: Peer) -> None:
        if not self._peer_registry.left(peer):
            return
        if peer.hello.process is Kind.ROUTER:
            self._watch.left(peer)
            self._lose_router(peer.hello.id)
            self._questions.lose(peer)
            self._close_workers(self._peer_registry.recount())
        else:
            self._report_connections()  # before anything is submitted again
            self._lose_worker(peer)

    def received(self, peer: Peer, message: AnyMessage) -> None:
        if peer.hello.process is Kind.WORKER:
            self._heard_s[peer.hello.id] = self._clock.now_s()
            self._from_worker(peer, message)
        elif self._peer_registry.is_router(peer):
            self._watch.heard(peer)
            self._from_router(peer, message)
        self._reports.flush()

    def tick(self) -> None:
        self._peer_registry.keep_up()
        self._report_connections()
        now_s = self._clock.now_s()
        if pause_s := self._pauses.pause_s(now_s):
            self._excuse(pause_s)
        if now_s - self._looked_s >= STATUS_S:
            self._looked_s = now_s
            self._watch.ask(self.report() if self.report is not None else None)
            self._find_overdue(now_s)
            if self._wakes_models and self._waiting:
                self._wake_models()
        for router in self._watch.silent():
            logger.warning("a router does not answer, another is asked", extra={"router": router.hello.id})
            self.left(router)
            router.close()
        self._submit_waiting()
        self.migrations.tick(self._draining)
        self._reports.flush()

    # Workers.

    def _from_worker(self, peer: Peer, message: AnyMessage) -> None:
        match message:
            case Tokens(events=events):
                self._take_all(peer, events)
            case AttemptFailed():
                self._attempt_failed(peer, message)
            case Prepared():
                self.migrations.prepared(peer, message)
            case _:
                raise ProtocolError(f"a {type(message).__name__} is nothing for a gateway")

    def _take_all(self, peer: Peer, events: Sequence[TokenEvent]) -> None:
        now_s = self._clock.now_s()
        for event in events:
            stream = self._streams.get(event.request_id)
            if stream is None or stream.attempt != event.attempt or not stream.may_come_from(peer.hello.id):
                if event.times is not None and event.finish_reason is FinishReason.ABORT:
                    self._cancelled_phases(peer, event)
                    continue
                self.counters["stale_events"] += 1
                peer.send(Cancel(request_id=event.request_id, attempt=event.attempt))
                continue
            stream.heard_s = now_s
            if event.times is not None:
                self._note_phases(stream.marks.attempts[-1], stream.request.tenant, peer, event.times)
            try:
                due = stream.take(event) if event.finish_reason not in _NO_ANSWERS else None
            except ProtocolError as error:
                self._fault(stream, peer.hello.id, str(error))
                continue
            if due is None:
                self._fault(stream, peer.hello.id, f"it ended with {event.finish_reason}")
            elif due:
                self._deliver(stream, due)
            elif event.index < stream.next_index:
                self._repeated(stream, event)

    def _cancelled_phases(self, peer: Peer, event: TokenEvent) -> None:
        """Note the phases of a cancelled attempt, which its worker reports a moment later."""
        cancelled = self._cancelled.pop((event.request_id, event.attempt), None)
        if cancelled is not None and event.times is not None:
            self._note_phases(*cancelled, peer, event.times)

    def _note_phases(self, attempt: AttemptMarks, tenant: str, peer: Peer, times: WorkerTimes) -> None:
        self.worker_us[counted_name(tenant, self.worker_us)] += round(1e6 * times.used_s)
        attempt.workers.append(WorkerMarks(self._peer_registry.name(peer.hello.id), times, peer.clock_offset))

    def _deliver(self, stream: RequestStream, due: Sequence[TokenEvent]) -> None:
        is_first = stream.has_started and stream.marks.attempts[-1].first_token_s is None
        if is_first:
            stream.marks.attempts[-1].first_token_s = stream.heard_s
        try:
            stream.sink.tokens(due)
        except Exception:  # a bug of this reader: the other requests of the message continue
            logger.exception("request %s: its sink failed, it is cancelled", stream.request_id)
            self.cancel(stream.request_id)
            return
        if not self._is_open(stream):
            return  # the sink has cancelled it
        if is_first:
            self._reports.started(stream.router, stream.key)
        if due[-1].finish_reason is not None:
            self.counters["finished"] += 1
            self._reports.ended(stream.router, stream.key, stream.num_answered)
            self._forget(stream, FINISHED)

    def _repeated(self, stream: RequestStream, event: TokenEvent) -> None:
        self.counters["repeated_events"] += 1
        if not stream.is_known(event):
            self.counters["contradictions"] += 1
            logger.error("request %s: token %d came again, and differs", event.request_id, event.index)

    def _attempt_failed(self, peer: Peer, failed: AttemptFailed) -> None:
        stream = self._present(failed.key)
        if stream is None:
            self.migrations.failed(peer, failed)
            return
        if stream.is_decoding and peer.hello.process is Kind.ROUTER:
            return  # only the router's connection to the decode worker is lost
        if peer.hello.process is Kind.WORKER and not stream.may_come_from(peer.hello.id):
            return
        worker = failed.worker or peer.hello.id
        if failed.failure is Failure.INVALID and not stream.log:
            self._fail(stream, InvalidRequest(failed.reason))
        elif failed.failure is Failure.BUSY:
            stream.avoid_worker(worker)
            self._again(stream, "busy", at_once=False)
        elif failed.failure is Failure.LOST:
            self._lose(stream, worker)
        else:
            self._fault(stream, worker, failed.reason)

    def _lose_worker(self, peer: Peer) -> None:
        worker = peer.hello.id
        self._heard_s.pop(worker, None)
        self._connections.lose(peer)
        self.migrations.lose_worker(worker)
        for stream in self._each():
            if stream.state is StreamState.ROUTED and stream.needs(worker):
                self._lose(stream, worker)

    def _close_workers(self, workers: Sequence[str]) -> None:
        """Give up workers that no router lists, though they may be connected."""
        for worker in workers:
            peer = self._peer_registry.peer(worker)
            if peer is not None:
                self.left(peer)
                peer.close()

    # Routers.

    def _from_router(self, peer: Peer, message: AnyMessage) -> None:
        match message:
            case Queued():
                pass
            case Routed():
                self._routed(peer, message)
            case Rejected():
                self._rejected(message)
            case AttemptFailed():
                self._attempt_failed(peer, message)
            case Members():
                self._take_members(peer, message)
            case Status():
                self._watch.answered(peer, message)
            case Decisions() | FoundRequests():
                self._questions.take(peer, message)
            case FindRequests():
                found = FoundRequests.answer_to(message, timelines=tuple(self.find(message)))
                peer.send(found)
            case Migrate():
                self.migrations.order(message, peer.send)
            case _:
                raise ProtocolError(f"a {type(message).__name__} is nothing for a gateway")
        if isinstance(message, (Queued, Routed, Rejected)):
            tenant = self._window.answered(peer.hello.id, message.key)
            if tenant is not None:
                self._submit_waiting(tenant)

    def _routed(self, peer: Peer, routed: Routed) -> None:
        stream = self._present(routed.key)
        if stream is None:
            if self.migrations.routed(peer, routed):
                return
            cancel = Cancel(request_id=routed.request_id, attempt=routed.attempt)
            self._peer_registry.tell(routed.decode, cancel)
            return
        asked_s, now_s = stream.assigned_s, self._clock.now_s()  # a token may have come before
        stream.routed(routed.decode, routed.prefill, now_s)
        attempt = stream.marks.attempts[-1]
        attempt.routed, attempt.router_clock = routed, peer.clock_offset
        attempt.decode = self._peer_registry.name(routed.decode)
        attempt.prefill = self._peer_registry.name(routed.prefill)
        for worker in (routed.decode, routed.prefill):
            has_left = self._connections.left_s(worker) >= asked_s  # since the router was asked
            is_here = self._connections.has(worker)
            if has_left and is_here and stream.needs(worker):
                # The worker may have dropped the attempt with the connection.
                stream.unconfirmed_since_s = now_s
            if worker and not is_here and stream.needs(worker):
                if has_left:  # perhaps it died of this very request
                    self._lose(stream, worker)
                else:
                    stream.avoid_worker(worker)
                    self._again(stream, "unreached", at_once=False)
                return

    def _rejected(self, rejected: Rejected) -> None:
        """Fail a request without an answer so far; submit it again when its answer has begun."""
        stream = self._present(rejected.key)
        if stream is None:
            self.migrations.rejected(rejected.key, rejected.reason)
            return
        if rejected.refusal is Refusal.NO_ROOM or stream.has_answer:
            self._again(stream, "rejected", at_once=False)
            return
        refused = Refused(
            rejected.reason,
            refusal=rejected.refusal,
            retry_after_s=rejected.retry_after_s,
            should_retry=rejected.should_retry,
        )
        self._fail(stream, refused)

    def _take_members(self, router: Peer, members: Members) -> None:
        self._draining.update(dict.fromkeys(members.draining))
        while len(self._draining) > MAX_REMEMBERED:
            del self._draining[next(iter(self._draining))]
        self._close_workers(self._peer_registry.changed(router, members))
        self._peer_registry.keep_up()
        self._report_connections()

    def _lose_router(self, router: str) -> None:
        """Submit the router's unanswered requests again; its dispatched ones may not have reached workers."""
        now_s = self._clock.now_s()
        self._window.lose(router)
        self.migrations.lose_router(router)
        for stream in self._each():
            if stream.router != router:
                continue
            if stream.state is StreamState.SUBMITTED:
                self._again(stream, "router")
            elif stream.state is StreamState.ROUTED and not stream.is_decoding:
                stream.unconfirmed_since_s = min(stream.unconfirmed_since_s, now_s)

    def _report_connections(self) -> None:
        """Report the workers that are connected, and the listed ones that sleep: they need no connection."""
        asleep = (worker.id for worker in self.workers if worker.is_asleep)
        self._peer_registry.report([*self._peer_registry.connected(), *asleep])

    # Time.

    def _excuse(self, seconds: float) -> None:
        """Leave out the seconds in which this process did not run from the silence of other processes."""
        for stream in self._streams.values():
            stream.heard_s += seconds
            stream.unserved_since_s += seconds
            if stream.lost:
                stream.retry_s += seconds
        self._watch.excuse(seconds)

    def _find_overdue(self, now_s: float) -> None:
        for stream in self._each():
            if stream.is_too_late(now_s):
                self._end_if_due(stream, now_s)
            elif stream.state is StreamState.ROUTED:
                silence_s = now_s - stream.heard_s
                if not stream.is_decoding and now_s - stream.unconfirmed_since_s > UNHEARD_S:
                    self._again(stream, "unheard")
                elif silence_s > self._limits.max_silence_s and not self._is_behind_others(stream, now_s):
                    reason = f"it was silent for {silence_s:.0f} s"
                    self._fault(stream, stream.decode, reason, replay="silent")
            elif stream.waits_too_long(self._limits, now_s) and not self._is_queued(stream, now_s):
                self._end_if_due(stream, now_s)

    def _is_queued(self, stream: RequestStream, now_s: float) -> bool:
        """Return whether a router that answers holds the request in its queue, which may be long."""
        heard_s = max(stream.heard_s, self._watch.heard_s(stream.router))
        return stream.state is StreamState.SUBMITTED and now_s - heard_s <= self._limits.max_silence_s

    def _is_behind_others(self, stream: RequestStream, now_s: float) -> bool:
        """Return whether its worker may still be busy with earlier requests."""
        if stream.has_started or now_s - stream.heard_s > MAX_AHEAD * self._limits.max_silence_s:
            return False
        heard_s = self._heard_s.get(stream.decode, -math.inf)
        return now_s - heard_s <= self._limits.max_silence_s

    # Attempts.

    def _submit_waiting(self, tenant: str | None = None) -> None:
        """Submit the waiting streams that are due, of each tenant until its window is full.

        tenant: submit only its streams.
        """
        now_s = self._clock.now_s()
        for name in list(self._waiting) if tenant is None else (tenant,):
            for stream in list(self._waiting.get(name, {}).values()):
                if self._window.is_full(name):
                    break
                if stream.retry_s <= now_s and stream.state is StreamState.WAITING and self._is_open(stream):
                    self._submit(stream)

    def _wake_models(self) -> None:
        """Wake the models that requests of clients wait for."""
        waiting = (stream.request for streams in self._waiting.values() for stream in streams.values())
        orders = () if self.status is None else self.status.orders
        for model in {request.model for request in waiting if not request.is_health_check}:
            if are_asleep(self.workers, model):
                self.counters["wakes"] += 1
                latest = latest_order(orders, model)
                # The number follows from the order to sleep, so all gateways give the same order.
                self.send_order(latest if isinstance(latest, Wake) else numbered(Wake(model=model), orders))

    def _wait(self, stream: RequestStream) -> None:
        self._waiting.setdefault(stream.request.tenant, {})[stream.request_id] = stream

    def _stop_waiting(self, stream: RequestStream) -> None:
        """Forget that the stream waits, if it does."""
        waiting = self._waiting.get(stream.request.tenant, {})
        waiting.pop(stream.request_id, None)
        if not waiting:
            self._waiting.pop(stream.request.tenant, None)

    def _submit(self, stream: RequestStream) -> None:
        """Submit a request; it stays WAITING without a router, or while its tenant's window is full."""
        if self._window.is_full(stream.request.tenant):
            return
        now_s = self._clock.now_s()
        if self._end_if_due(stream, now_s):
            return
        router = self._peer_registry.router_for(stream.request.tenant)
        if router is None:
            return
        request = stream.request_of(stream.attempt)
        if request is None:
            message = f"its {len(stream.log)} tokens can't be sent on to another worker"
            self._fail(stream, WorkerLost(message))
            return
        self._reports.flush()
        submit = Submit(
            request=request,
            sticky_worker=stream.sticky_worker,
            avoid=tuple(stream.avoid),
            age_s=age_s(request, now_s),
            is_begun=stream.is_begun,
        )
        try:
            router.send(submit)
        except WireError as error:  # only this request fails
            self._fail(stream, InvalidRequest(f"the request can't be sent on: {error}"))
            return
        self._window.submitted(router.hello.id, request)
        stream.submitted(router.hello.id, now_s)
        self._stop_waiting(stream)

    def _again(self, stream: RequestStream, reason: str, *, at_once: bool = True) -> None:
        """Replace the present attempt by another."""
        self.migrations.give_up(stream, "its worker failed it")
        self.counters[f"replays_{reason}"] += 1
        self._stop_attempt(stream)
        stream.marks.ended(reason, stream.num_answered, self._clock.now_s())
        stream.next_attempt(self._clock.now_s(), at_once=at_once)
        self._wait(stream)
        if stream.retry_s <= self._clock.now_s():
            self._submit(stream)

    def _fault(self, stream: RequestStream, worker: str, reason: str, *, replay: str = "error") -> None:
        """Try again after a living worker failed. worker: "" when it is not known."""
        logger.warning("request %s: %s failed: %s", stream.request_id, worker or "a worker", reason)
        stream.num_errors += 1
        stream.avoid_worker(worker)
        self._again(stream, replay)

    def _lose(self, stream: RequestStream, worker: str) -> None:
        """Try again after a process with a part of the request has gone, or seems to have."""
        stream.avoid_worker(worker)
        if worker in self._draining:  # the request had nothing to do with the end of the process
            self._again(stream, "drained")
            return
        stream.lose(worker, self._connections, self._clock.now_s())
        self._again(stream, "lost")

    def _end_if_due(self, stream: RequestStream, now_s: float) -> bool:
        """Fail a request that may have no further attempt. Returns True when the request has failed."""
        has_router = self._peer_registry.router is not None
        stream.merge_node_losses(self._connections)
        error = stream.why_not_again(self._connections, self._limits, now_s, has_router=has_router)
        if error is not None:
            self._fail(stream, error)
        return error is not None

    def _fail(self, stream: RequestStream, error: BatonError) -> None:
        self.counters[f"failed_{type(error).__name__}"] += 1
        logger.info("request %s failed: %s", stream.request_id, error)
        self._stop_attempt(stream)
        self._forget(stream, type(error).__name__)
        try:
            stream.sink.failed(error)
        except Exception:  # a bug of this one reader
            logger.exception("request %s: its sink failed as it was told of its end", stream.request_id)

    def _stop_attempt(self, stream: RequestStream) -> None:
        """End the attempt at its workers and at the router. Unknown workers are told when Routed comes."""
        if stream.state is StreamState.WAITING:
            return
        request_id, attempt = stream.key
        if stream.decode:
            self._peer_registry.tell(stream.decode, Cancel(request_id=request_id, attempt=attempt))
        self._reports.ended(stream.router, stream.key, stream.num_answered)

    def _cancel_attempt(self, stream: RequestStream) -> None:
        """End the attempt as `_stop_attempt` does; its worker reports its phases a moment later."""
        self._stop_attempt(stream)
        if stream.decode:
            self._cancelled[stream.key] = stream.marks.attempts[-1], stream.request.tenant
            if len(self._cancelled) > MAX_CANCELLED:
                del self._cancelled[next(iter(self._cancelled))]

    def _forget(self, stream: RequestStream, end: str) -> None:
        now_s = self._clock.now_s()
        stream.marks.ended(end, stream.num_answered, now_s)
        stream.marks.last_token_s = stream.heard_s if stream.log else now_s
        del self._streams[stream.request_id]
        self._num_client_streams -= not stream.request.is_health_check
        self._stop_waiting(stream)
        self.migrations.forget(stream)

    def _present(self, key: AttemptKey) -> RequestStream | None:
        """Return the stream that has this attempt now."""
        stream = self._streams.get(key[0])
        return stream if stream is not None and stream.key == key else None

    def _each(self) -> Iterator[RequestStream]:
        """Yield every stream that is open when its turn comes."""
        for stream in list(self._streams.values()):
            if self._is_open(stream):
                yield stream

    def _is_open(self, stream: RequestStream) -> bool:
        return self._streams.get(stream.request_id) is stream
