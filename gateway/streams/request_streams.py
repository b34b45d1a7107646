"""The streams of one gateway, and what is done to them: submitted, tried again, failed, forgotten.

An attempt is submitted once. Where nobody knows what became of it, the next one takes its place, and whoever
works on an attempt that is not the present one is told to stop when that shows.
"""

import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final, NamedTuple

from baton.clock import Clock
from baton.errors import BatonError, InvalidRequest, Refused, WireError, WorkerLost
from baton.gateway.streams.request_stream import (
    DOUBT_S,
    Key,
    ReplayLimits,
    RequestStream,
    StreamState,
    doubt_ends_s,
    is_too_late,
    max_wait_s,
    why_not_again,
)
from baton.messages.bounds import MAX_EVENTS
from baton.messages.control import Cancel, Ended, Rejected, Routed, Started, Submit, age_s
from baton.request import Request
from baton.rpc.peers import Peer, PeerRegistry
from baton.tenants import Refusal

# What routers have yet to be told of attempts: that they have started, and that they have ended.


class _Untold(NamedTuple):
    """To a router."""

    started: list[Key]
    ended: list[tuple[Key, int]]  # with the tokens that each has answered


class AttemptReports:
    """Kept until `flush`, so that what a step has made leaves in one message."""

    def __init__(self, peer_registry: PeerRegistry) -> None:
        self._peer_registry = peer_registry
        self._untold: dict[str, _Untold] = {}  # by router

    def started(self, stream: RequestStream) -> None:
        self._of(stream).started.append(stream.key)

    def ended(self, stream: RequestStream) -> None:
        self._of(stream).ended.append((stream.key, stream.num_answered))

    def flush(self) -> None:
        """Tell each router what became of the attempts that it was asked for; the others, if it is gone."""
        if not self._untold:
            return
        untold, self._untold = self._untold, {}
        for router_id, (started, ended) in untold.items():
            router = self._peer_registry.peer(router_id)
            for told in [router] if router is not None else self._peer_registry.routers:
                for first in range(0, len(started), MAX_EVENTS):
                    told.send(Started(attempts=tuple(started[first : first + MAX_EVENTS])))
                for first in range(0, len(ended), MAX_EVENTS):
                    part = ended[first : first + MAX_EVENTS]
                    num_tokens = tuple(num_answered for _, num_answered in part)
                    told.send(Ended(attempts=tuple(key for key, _ in part), num_tokens=num_tokens))

    def _of(self, stream: RequestStream) -> _Untold:
        return self._untold.setdefault(stream.router, _Untold([], []))


# How much a gateway asks of a router for one tenant before the router has answered.
#
# A router handles the messages of a gateway in order, so a call with a thousand choices would delay every
# other tenant by the time that the router takes for all of them. While other tenants are active, a gateway
# therefore sends Submits of one tenant only until those that no Routed, Queued or Rejected has answered have
# MAX_UNANSWERED_TOKENS. It holds the tenant's other streams, and submits them in the order in which they
# came.

MAX_UNANSWERED_TOKENS: Final = 6_144
TOKENS_PER_SUBMIT: Final = 1024  # beside its prompt's: a router takes as long for them as for an empty prompt
ACTIVE_S: Final = 60.0  # since a tenant's last Submit


class SubmitWindow:
    """Of one gateway."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._unanswered: dict[str, dict[Key, tuple[str, int]]] = {}  # router -> attempt -> tenant, tokens
        self._num_tokens: Counter[str] = Counter()  # of these, by tenant
        self._held: dict[str, dict[str, None]] = {}  # tenant -> request ids, first come first
        self._submitted_s: dict[str, float] = {}  # each tenant's last Submit, oldest first

    def is_full(self, tenant: str) -> bool:
        if self._num_tokens[tenant] < MAX_UNANSWERED_TOKENS:
            return False
        latest = islice(reversed(self._submitted_s.items()), 2)
        now_s = self._clock.now_s()
        return any(other != tenant and now_s - since_s < ACTIVE_S for other, since_s in latest)

    def submitted(self, router: str, request: Request) -> None:
        num_tokens = TOKENS_PER_SUBMIT + len(request.token_ids) + len(request.generated_token_ids)
        key = (request.request_id, request.attempt)
        self._unanswered.setdefault(router, {})[key] = (request.tenant, num_tokens)
        self._num_tokens[request.tenant] += num_tokens
        if not request.is_probe:
            self._submitted_s.pop(request.tenant, None)
            self._submitted_s[request.tenant] = self._clock.now_s()
        self.let_go(request)

    def hold(self, request: Request) -> None:
        """Keep its place until `answered` names it."""
        self._held.setdefault(request.tenant, {})[request.request_id] = None

    def let_go(self, request: Request) -> None:
        """It need not be held any more, if it was."""
        if request.request_id in self._held.get(request.tenant, ()):
            self._drop(request.tenant, request.request_id)

    def answered(self, router: str, key: Key) -> Iterator[str]:
        """The held requests that may be submitted now; whoever iterates submits each before the next."""
        found = self._unanswered.get(router, {}).pop(key, None)
        if found is None:
            return  # answered before: it was queued
        self._free(*found)
        tenant = found[0]
        while not self.is_full(tenant) and (held := self._held.get(tenant)):
            request_id = next(iter(held))
            self._drop(tenant, request_id)
            yield request_id

    def lose(self, router: str) -> None:
        """It answers nothing any more."""
        for tenant, num_tokens in self._unanswered.pop(router, {}).values():
            self._free(tenant, num_tokens)

    def _drop(self, tenant: str, request_id: str) -> None:
        del self._held[tenant][request_id]
        if not self._held[tenant]:
            del self._held[tenant]

    def _free(self, tenant: str, num_tokens: int) -> None:
        self._num_tokens[tenant] -= num_tokens
        if not self._num_tokens[tenant]:
            del self._num_tokens[tenant]


UNHEARD_S: Final = 3.0  # for the first token of an attempt whose router is gone
MAX_AHEAD: Final = 10  # times as long as a worker may be silent, for the first token of one that talks
MAX_REMEMBERED: Final = 4096  # workers that are gone
logger = logging.getLogger(__name__)


class RequestStreams:
    """`counters` are for metrics; sinks may open and cancel streams while they are being called."""

    def __init__(self, peer_registry: PeerRegistry, clock: Clock, limits: ReplayLimits) -> None:
        self.counters: Counter[str] = Counter()
        self._peer_registry = peer_registry
        self._clock = clock
        self._limits = limits
        self._streams: dict[str, RequestStream] = {}
        self._waiting: dict[str, RequestStream] = {}  # those of them that are WAITING
        self._reports = AttemptReports(peer_registry)
        self._window = SubmitWindow(clock)
        self._draining: dict[str, None] = {}  # workers, also such as have ended, oldest first
        self._heard_s: dict[str, float] = {}  # routers and workers, when each said anything
        self._left_s: dict[str, float] = {}  # workers -> when their connection ended

    def __len__(self) -> int:
        return len(self._streams)

    def get(self, request_id: str) -> RequestStream | None:
        return self._streams.get(request_id)

    def is_open(self, stream: RequestStream) -> bool:
        return self._streams.get(stream.request_id) is stream

    def open(self, stream: RequestStream) -> None:
        """Raises InvalidRequest, and keeps nothing of it, for what no message can carry."""
        self.counters["opened"] += 1
        self._streams[stream.request_id] = self._waiting[stream.request_id] = stream
        try:
            self._hand_on(stream)
        except InvalidRequest:
            self._forget(stream)
            raise

    def cancel(self, stream: RequestStream) -> None:
        self.counters["cancelled"] += 1
        self._stop_attempt(stream)
        self._forget(stream)

    def started(self, stream: RequestStream) -> None:
        """The present attempt's first token is there."""
        stream.is_reported = True
        self._reports.started(stream)

    def finished(self, stream: RequestStream) -> None:
        self.counters["finished"] += 1
        self._reports.ended(stream)
        self._forget(stream)

    def fail(self, stream: RequestStream, error: BatonError) -> None:
        self.counters[f"failed_{type(error).__name__}"] += 1
        logger.info("request %s failed: %s", stream.request_id, error)
        self._stop_attempt(stream)
        self._forget(stream)
        try:
            stream.sink.failed(error)
        except Exception:  # a bug of this one request's reader
            logger.exception("request %s: its sink failed as it was told of its end", stream.request_id)

    def again(self, stream: RequestStream, reason: str, *, at_once: bool = True) -> None:
        """Another attempt in place of the present one."""
        self.counters[f"replays_{reason}"] += 1
        self._stop_attempt(stream)
        stream.next_attempt(self._clock.now_s(), at_once=at_once)
        stream.retry_s = max(stream.retry_s, doubt_ends_s(stream))
        self._waiting[stream.request_id] = stream
        if stream.retry_s <= self._clock.now_s():
            self._submit(stream)

    def fault(self, stream: RequestStream, worker: str, reason: str) -> None:
        """A worker that lives did not do what it should. worker: "" where it is not known which."""
        logger.warning("request %s: %s failed: %s", stream.request_id, worker or "a worker", reason)
        stream.num_errors += 1
        stream.blame(worker)
        self.again(stream, "error")

    def lose(self, stream: RequestStream, worker: str) -> None:
        """A process is gone that held part of it, or it seems so."""
        if worker in self._draining:  # it had nothing to do with its end
            stream.blame(worker)
            self.again(stream, "drained")
            return
        now_s = self._clock.now_s()
        # Whoever is connected is well; but a death is heard of from different processes at different times.
        stream.lost = {
            other: lost_s
            for other, lost_s in stream.lost.items()
            if now_s - lost_s < DOUBT_S or not self.is_connected(other)
        }
        stream.lost[worker] = stream.lost_s = now_s
        stream.blame(worker)
        self.again(stream, "lost")

    def lose_worker(self, worker: str) -> None:
        self._heard_s.pop(worker, None)
        self._left_s[worker] = self._clock.now_s()
        if len(self._left_s) > MAX_REMEMBERED:
            del self._left_s[next(iter(self._left_s))]
        for stream in self._each():
            if stream.state is StreamState.ROUTED and stream.needs(worker):
                self.lose(stream, worker)

    def drain(self, workers: Iterable[str]) -> None:
        """These are going to end in order."""
        self._draining.update(dict.fromkeys(workers))
        while len(self._draining) > MAX_REMEMBERED:
            del self._draining[next(iter(self._draining))]

    def find_worker(self, worker: str) -> None:
        """It is connected again: only its connection was lost. If it dies later, that is something else."""
        for stream in self._streams.values():
            stream.lost.pop(worker, None)

    def held_up(self, seconds: float) -> None:
        """This process stood still so long: what others did meanwhile is unread, and no silence of theirs."""
        for stream in self._streams.values():
            stream.heard_s += seconds
            stream.homeless_s += seconds
            if stream.lost:
                stream.retry_s += seconds

    def hear(self, process: str) -> None:
        """A router, or a worker, has said something."""
        self._heard_s[process] = self._clock.now_s()

    def lose_router(self, router: str) -> None:
        """What it had not answered may be dispatched or not; what it had dispatched may be lost."""
        now_s = self._clock.now_s()
        self._heard_s.pop(router, None)
        self._window.lose(router)
        for stream in self._each():
            if stream.router != router:
                continue
            if stream.state is StreamState.SUBMITTED:
                self.again(stream, "router")
            elif stream.state is StreamState.ROUTED and not stream.has_started:
                stream.doubted_s = min(stream.doubted_s, now_s)

    def routed(self, stream: RequestStream, routed: Routed) -> None:
        asked_s = stream.heard_s
        stream.routed(routed.decode, routed.prefill, self._clock.now_s())
        for worker in (routed.decode, routed.prefill):
            if worker and self.is_connected(worker) and self._left_s.get(worker, asked_s - 1) >= asked_s:
                stream.doubted_s = self._clock.now_s()  # it may have let the attempt go with the connection
            if worker and not self.is_connected(worker) and stream.needs(worker):
                # One that was there when the router was asked may have died of this very request.
                if self._left_s.get(worker, asked_s - 1) >= asked_s:
                    self.lose(stream, worker)
                else:
                    stream.blame(worker)
                    self.again(stream, "unreached", at_once=False)
                return

    def rejected(self, stream: RequestStream, rejected: Rejected) -> None:
        """What its client has a part of already was accepted: it waits, whatever stands against it."""
        if rejected.refusal is Refusal.NO_ROOM or stream.has_answer:
            self.again(stream, "rejected", at_once=False)
            return
        self.fail(
            stream,
            Refused(
                rejected.reason,
                refusal=rejected.refusal,
                retry_after_s=rejected.retry_after_s,
                may_return=rejected.may_return,
            ),
        )

    def answered(self, router: str, key: Key) -> None:
        """The router has answered a Submit: the tenant's next may be sent."""
        for request_id in self._window.answered(router, key):
            stream = self._waiting.get(request_id)
            if stream is not None and stream.retry_s <= self._clock.now_s():
                self._submit(stream)

    def submit_waiting(self) -> None:
        now_s = self._clock.now_s()
        for stream in [stream for stream in self._waiting.values() if stream.retry_s <= now_s]:
            if self._waiting.get(stream.request_id) is stream:
                self._submit(stream)

    def find_overdue(self) -> None:
        now_s = self._clock.now_s()
        for stream in self._each():
            if is_too_late(stream, now_s):
                self._end(stream, now_s)
            elif stream.state is StreamState.ROUTED:
                silence_s = now_s - stream.heard_s
                if not stream.has_started and now_s - stream.doubted_s > UNHEARD_S:
                    self.again(stream, "unheard")
                elif silence_s > self._limits.max_silence_s and not self._is_ahead(stream, now_s):
                    self.fault(stream, stream.decode, f"it was silent for {silence_s:.0f} s")
            elif self._waits_too_long(stream, now_s) and not self._is_queued(stream, now_s):
                self._end(stream, now_s)

    def _waits_too_long(self, stream: RequestStream, now_s: float) -> bool:
        return now_s - stream.homeless_s > max_wait_s(stream, self._limits)

    def _is_queued(self, stream: RequestStream, now_s: float) -> bool:
        """Whether a router that is well has it: it may be there for long, which is no want of workers."""
        heard_s = max(stream.heard_s, self._heard_s.get(stream.router, 0.0))
        return stream.state is StreamState.SUBMITTED and now_s - heard_s <= self._limits.max_silence_s

    def _is_ahead(self, stream: RequestStream, now_s: float) -> bool:
        """Whether it may still wait for its turn at a worker, which goes on with what came before it."""
        if stream.has_started or now_s - stream.heard_s > MAX_AHEAD * self._limits.max_silence_s:
            return False
        heard_s = self._heard_s.get(stream.decode, -math.inf)
        return now_s - heard_s <= self._limits.max_silence_s

    def flush(self) -> None:
        """Tell routers what is to be told."""
        self._reports.flush()

    def is_connected(self, worker: str) -> bool:
        return self._peer_registry.peer(worker) is not None

    def _each(self) -> Iterator[RequestStream]:
        """All that are open when their turn comes."""
        for stream in list(self._streams.values()):
            if self.is_open(stream):
                yield stream

    def _end(self, stream: RequestStream, now_s: float) -> None:
        """If there is a reason to."""
        has_router = self._peer_registry.router is not None
        error = why_not_again(stream, self.is_connected, self._limits, now_s, has_router=has_router)
        if error is not None:
            self.fail(stream, error)

    def _submit(self, stream: RequestStream) -> None:
        """What no message can carry ends this one alone: the others that wait for the router go on."""
        try:
            self._hand_on(stream)
        except InvalidRequest as error:
            self.fail(stream, error)

    def _hand_on(self, stream: RequestStream) -> None:
        """Now, if there is a router that its tenant does not keep busy; the stream stays WAITING otherwise.

        Raises InvalidRequest.
        """
        if self._window.is_full(stream.request.tenant):
            self._window.hold(stream.request)
            return
        now_s = self._clock.now_s()
        has_router = self._peer_registry.router is not None
        error = why_not_again(stream, self.is_connected, self._limits, now_s, has_router=has_router)
        if error is not None:
            self.fail(stream, error)
            return
        router = self._router_for(stream.request)
        if router is None:
            return
        request = stream.next_request()
        if request is None:
            self.fail(stream, WorkerLost(f"its {len(stream.log)} tokens can't be sent on to another worker"))
            return
        self.flush()
        try:
            submit = Submit(
                request=request,
                sticky_worker=stream.sticky_worker,
                avoid=tuple(stream.avoid),
                age_s=age_s(request, now_s),
                is_begun=stream.is_begun,
            )
            router.send(submit)
        except WireError as error:
            raise InvalidRequest(f"the request can't be sent on: {error}") from error
        self._window.submitted(router.hello.id, request)
        stream.state, stream.heard_s, stream.router = StreamState.SUBMITTED, now_s, router.hello.id
        del self._waiting[stream.request_id]

    def _router_for(self, request: Request) -> Peer | None:
        """Tenants wait in one queue: two would each share out what both of them take from."""
        return self._peer_registry.common_router if request.tenant else self._peer_registry.router

    def _stop_attempt(self, stream: RequestStream) -> None:
        """At its workers and in the router's books. Where they are not known yet, Routed will tell."""
        if stream.state is StreamState.WAITING:
            return
        request_id, attempt = stream.key
        if stream.decode:
            self._peer_registry.tell(stream.decode, Cancel(request_id=request_id, attempt=attempt))
        self._reports.ended(stream)

    def _forget(self, stream: RequestStream) -> None:
        del self._streams[stream.request_id]
        self._waiting.pop(stream.request_id, None)
        self._window.let_go(stream.request)
