"""One accepted request, from its first attempt to its one end: its tokens so far, and its workers.

1. WAITING: the request has no worker. It is submitted when there is a router, not before `retry_s`.
2. SUBMITTED: the router has been asked, and will answer Routed or Rejected, perhaps Queued before. Tokens may
   come before Routed.
3. ROUTED: workers have the request. Every token goes into the log, then to the sink, once and in order.

A ROUTED request may have a `migration` beside: its next attempt, which another decode worker prepares while
the present one runs (gateway/streams/migrations.py). `switch` makes it the present attempt.

An attempt that fails leads back to WAITING, and the next attempt goes on after the tokens of the log. The
decode worker's tokens may come before the first token, which the prefill worker sends; they wait in `early`.

A request that has lost its worker may have another attempt under these rules:

1. It is submitted at once, and avoids the worker, when the worker is gone, breaks the protocol, reports an
   error or falls silent.
2. It is submitted with exponential back-off while no worker has room, for at most `max_wait_s`, or
   `max_begun_wait_s` once its answer has begun. The successor of a lost worker may take minutes to load.
3. It fails at its deadline if it has no token by then.
4. It fails when its answer exceeds `max_log_tokens`. It also fails after two processes died with it or two
   workers could not compute it, because the request may be the cause.

A process that died and a connection that broke look alike until the connection is back. Where rule 4 depends
on the difference, the next attempt waits for DOUBT_S. When a node ends or freezes, the request may go from
one of its workers to another: a worker that was silent before it had the request did not die of it, and the
workers of a node that is lost as a whole, within NODE_ENDS_S, count as one process.

`RequestMarks` has the times of the request: when each attempt was submitted, dispatched and answered, and the
times that routers and workers send with messages of the attempt (`Routed`, the first and the last
`TokenEvent`), with the offset of the sender's clock at that moment. gateway/metrics/requests.py makes a
timeline of them.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import InitVar, dataclass, field
from enum import Enum
from typing import Final, NamedTuple, Protocol

import msgspec

from baton.clock import Clock
from baton.errors import BatonError, InvalidRequest, Overloaded, ProtocolError, Refused, WorkerLost
from baton.messages.codec import fits_request
from baton.messages.control import Routed
from baton.messages.operations import Decisions, Explain, FindRequests, FoundRequests, Status
from baton.messages.orders import Sleep, Wake
from baton.messages.timeline import MAX_ATTEMPTS
from baton.messages.workers import Worker, WorkerTimes
from baton.request import AttemptKey, Request, TokenEvent
from baton.rpc.peer_clock import ClockOffset
from baton.rpc.peers import Peer, PeerRegistry
from baton.tenants import Refusal

# How an attempt ended, in its marks.
FINISHED: Final = "finished"
CANCELLED: Final = "cancelled"  # by the client, or at a stop string
MIGRATED: Final = "migrated"  # to the worker of the next attempt


# The garbage collector visits no marks: a busy gateway keeps thousands, and they are in no reference cycle.


class WorkerMarks(msgspec.Struct, frozen=True, gc=False):
    """The times of one worker, and its clock."""

    name: str
    times: WorkerTimes
    clock: ClockOffset | None  # None: not measured


class AttemptMarks(msgspec.Struct, eq=False, gc=False):
    """One attempt, by the gateway's clock."""

    number: int
    submitted_s: float
    router: str = ""  # its id
    routed: Routed | None = None
    router_clock: ClockOffset | None = None
    decode: str = ""  # names of workers
    prefill: str = ""
    workers: list[WorkerMarks] = []
    first_token_s: float | None = None
    num_tokens: int = 0
    ended_s: float = 0.0
    end: str = ""


class RequestMarks(msgspec.Struct, eq=False, gc=False):
    """One choice of a call, from `opened_s` on. `last_token_s` is the arrival of the last token."""

    opened_s: float
    last_token_s: float = 0.0
    attempts: list[AttemptMarks] = []  # the latest MAX_ATTEMPTS

    def submitted(self, number: int, router: str, now_s: float) -> None:
        """Note that a router was asked. router: its id."""
        if len(self.attempts) >= MAX_ATTEMPTS:
            del self.attempts[0]
        self.attempts.append(AttemptMarks(number, now_s, router))

    def ended(self, end: str, num_tokens: int, now_s: float) -> None:
        """Note that the present attempt has ended; an attempt ends once."""
        if self.attempts and not self.attempts[-1].end:
            attempt = self.attempts[-1]
            attempt.end, attempt.num_tokens, attempt.ended_s = end, num_tokens, now_s


MAX_REMEMBERED: Final = 4096  # workers that have left
SILENT_BEFORE_S: Final = 1.0  # of silence; more than between two pings


class _LostWorker(NamedTuple):
    nodes: frozenset[str]
    left_s: float  # when its connection ended
    heard_s: float  # when bytes last came, a ping or more


class WorkerConnections:
    """The gateway's connections to workers, and those that have ended."""

    def __init__(self, peer_registry: PeerRegistry, clock: Clock) -> None:
        self._peer_registry = peer_registry
        self._clock = clock
        self._lost: dict[str, _LostWorker] = {}  # by id, the earliest first

    def has(self, worker: str) -> bool:
        """Return whether the worker is connected."""
        return self._peer_registry.peer(worker) is not None

    def lose(self, peer: Peer) -> None:
        """Record the end of a worker's connection."""
        now_s, worker = self._clock.now_s(), peer.hello.worker
        self._lost.pop(peer.hello.id, None)
        self._lost[peer.hello.id] = _LostWorker(
            worker.nodes if worker is not None else frozenset(), now_s, heard_s=now_s - peer.quiet_s
        )
        if len(self._lost) > MAX_REMEMBERED:
            del self._lost[next(iter(self._lost))]

    def left_s(self, worker: str) -> float:
        """Return when the worker's connection last ended; -inf when it never did."""
        lost = self._lost.get(worker)
        return -math.inf if lost is None else lost.left_s

    def was_silent(self, worker: str, assigned_s: float) -> bool:
        """Return whether the worker stood still before it was given an attempt.

        assigned_s: when this gateway heard of the assignment. A worker that has left was assigned the attempt
        before it left.
        """
        if not self.has(worker) and worker in self._lost:
            assigned_s = min(assigned_s, self._lost[worker].left_s)
        return self._heard_s(worker) < assigned_s - SILENT_BEFORE_S

    def _heard_s(self, worker: str) -> float:
        now_s, peer, lost = self._clock.now_s(), self._peer_registry.peer(worker), self._lost.get(worker)
        if peer is not None:
            return now_s - peer.quiet_s
        return now_s if lost is None else lost.heard_s

    def lost_nodes(self, worker: str) -> frozenset[str]:
        """Return the nodes of a lost worker on which all workers are gone, while others are not."""
        lost = self._lost.get(worker)
        if lost is None or self.has(worker):
            return frozenset()
        workers = self._peer_registry.members
        live = [workers[id_].nodes for id_ in self._peer_registry.connected()]
        return lost.nodes.difference(*live) if live else frozenset()


MAX_EARLY: Final = 1024  # events of one attempt that wait for its first token
MAX_AVOIDED: Final = 8
BACK_OFF_S: Final = 0.05
MAX_BACK_OFF_S: Final = 1.0
MAX_STRIKES: Final = 2
RETRY_AFTER_S: Final = 1.0
DOUBT_S: Final = 1.0  # a broken connection is back by then
NODE_ENDS_S: Final = 1.0  # from one worker of a lost node to the next; no worker starts so fast


class Sink(Protocol):
    """The reader of one request's tokens, called on the loop's thread."""

    def tokens(self, events: Sequence[TokenEvent]) -> None:
        """Take tokens in order, each once. The last one has a finish reason, STOP or LENGTH."""

    def failed(self, error: BatonError) -> None:
        """Take the end without an answer."""


class Service(Protocol):
    """The cluster as the HTTP side sees it. `Frontend` is one, and in tests a single engine is."""

    def open(self, request: Request, sink: Sink, *, sticky_worker: str = "") -> RequestMarks:
        """Begin a request of one choice, and return its marks, which the service keeps writing.

        sticky_worker: the decode worker that has the prompt already. Raises Overloaded when too many are
        open, and keeps nothing of the request then.
        """

    def cancel(self, request_id: str) -> None:
        """End a request; its sink hears nothing more. An unknown or ended request is no error."""

    def decode_worker(self, request_id: str) -> str:
        """Return the worker that the request runs on now; "" for none."""

    async def explain(self, question: Explain, timeout_s: float) -> list[Decisions]:
        """Ask all routers how a request was routed. Returns the answers that come in time."""

    async def find_requests(self, query: FindRequests, timeout_s: float) -> list[FoundRequests]:
        """Ask all gateways for ended requests, through a router. Returns the answers that come in time."""

    def send_order(self, order: Sleep | Wake) -> None:
        """Send a numbered order to all routers, which pass it on to the model's workers.

        Without a router the order is dropped.
        """

    @property
    def why_not_ready(self) -> str:
        """The part that is missing to dispatch requests, for operators and clients; "" when none is."""

    @property
    def workers(self) -> Sequence[Worker]:
        """The workers of the cluster; the same object as long as none has changed."""

    @property
    def draining(self) -> Collection[str]:
        """The ids of workers that take no new requests; of workers that have left, too."""

    @property
    def status(self) -> Status | None:
        """The last status of the routers."""

    @property
    def counters(self) -> Counter[str]:
        """Replays, drops and the like, by name."""

    @property
    def worker_us(self) -> Counter[str]:
        """Time of workers' steps by tenant, each step divided by its tokens, in microseconds."""


async def run_once(service: Service, request: Request, timeout_s: float) -> None:
    """Run a request of the gateway's own to its end. Raises TimeoutError, or the error of the request."""
    sink = _EndSink()
    service.open(request, sink)
    try:
        async with asyncio.timeout(timeout_s):
            await sink.end
    finally:
        service.cancel(request.request_id)


class _EndSink:
    """A Sink that keeps nothing but the end."""

    def __init__(self) -> None:
        self.end: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def tokens(self, events: Sequence[TokenEvent]) -> None:
        if events[-1].finish_reason is not None and not self.end.done():
            self.end.set_result(None)

    def failed(self, error: BatonError) -> None:
        if not self.end.done():
            self.end.set_exception(error)


class ReplayLimits(NamedTuple):
    """Limits of one gateway process."""

    max_streams: int = 4096  # open at once, without health checks
    max_wait_s: float = 30.0  # without any worker
    max_begun_wait_s: float = 300.0  # without any worker, once the answer has begun
    max_silence_s: float = 120.0  # of the workers that have the request
    max_log_tokens: int = 131_072  # of the answer, kept for a replay


class StreamState(Enum):
    """See the life of a request above."""

    WAITING = "waiting"
    SUBMITTED = "submitted"
    ROUTED = "routed"


@dataclass(slots=True, eq=False)
class Migration:
    """The next attempt of a stream, which another decode worker prepares while the present attempt runs."""

    attempt: int
    router: str  # that was asked
    since_s: float
    num_tokens: int  # of the log, when the router was asked
    routed: Routed | None = None  # the router's answer
    router_clock: ClockOffset | None = None
    prepared: set[str] = field(default_factory=set)  # workers whose Prepared has come

    @property
    def decode(self) -> str:
        """The worker that prepares the attempt; "" until the router has answered."""
        return "" if self.routed is None else self.routed.decode


@dataclass(slots=True, eq=False)
class RequestStream:
    """One request. `next_index` is the index of the next token; tokens that the request came with count."""

    request: Request
    sink: Sink
    sticky_worker: str
    opened_s: InitVar[float]
    router: str = ""  # that was asked for the present attempt, or the one before
    state: StreamState = StreamState.WAITING
    attempt: int = field(init=False)
    last_attempt: int = field(init=False)  # the highest number that an attempt has had, migrations included
    log: list[int] = field(init=False)  # tokens of the answer
    next_index: int = field(init=False)
    first_index: int = field(init=False)  # of the present attempt
    early: dict[int, TokenEvent] = field(default_factory=dict)
    is_begun: bool = field(init=False)  # workers have had the request, in any attempt
    assigned_s: float = field(init=False)  # when the router, and then its workers, were given the attempt
    decode: str = ""  # of the present attempt, once it is ROUTED
    prefill: str = ""
    unconfirmed_since_s: float = math.inf  # since when the workers may never have heard of the attempt
    avoid: list[str] = field(default_factory=list)  # workers that failed the request, the latest last
    lost: dict[str, float] = field(default_factory=dict)  # processes that seemed to die with it, and when
    num_errors: int = 0  # attempts that a living worker failed
    num_retries: int = 0  # in a row, since the request last had a worker
    retry_s: float = field(init=False)
    unserved_since_s: float = field(init=False)  # since when no worker has answered the request
    heard_s: float = field(init=False)  # when its router or its workers last took it on or answered
    marks: RequestMarks = field(init=False)
    migration: Migration | None = None
    num_failed_migrations: int = 0
    migrates_after_s: float = -math.inf  # when a draining worker may be left again

    def __post_init__(self, opened_s: float) -> None:
        self.marks = RequestMarks(opened_s)
        self.attempt = self.last_attempt = self.request.attempt
        self.log = list(self.request.generated_token_ids)
        self.next_index = self.first_index = len(self.log)
        self.is_begun = bool(self.log)
        self.retry_s = self.unserved_since_s = self.heard_s = self.assigned_s = opened_s

    @property
    def request_id(self) -> str:
        """The id of the request."""
        return self.request.request_id

    @property
    def has_answer(self) -> bool:
        """The client has a part of the answer, of this choice or of the first one."""
        return bool(self.log) or self.request.choice > 0

    @property
    def key(self) -> AttemptKey:
        """The present attempt."""
        return self.request.request_id, self.attempt

    @property
    def num_answered(self) -> int:
        """Tokens of the present attempt."""
        return self.next_index - self.first_index

    @property
    def has_started(self) -> bool:
        """The present attempt has given a token."""
        return self.num_answered > 0

    @property
    def is_decoding(self) -> bool:
        """The decode worker has sent a token of this attempt: a prefill worker sends the first one alone."""
        return self.num_answered > bool(self.prefill)

    def request_of(self, attempt: int) -> Request | None:
        """Return the request of an attempt that begins now; None when it is too large or already complete."""
        if not attempt:
            return self.request
        try:
            request = msgspec.structs.replace(
                self.request, attempt=attempt, generated_token_ids=tuple(self.log)
            )
        except InvalidRequest:  # its worker should have ended the request
            return None
        return request if fits_request(request) else None

    def take(self, event: TokenEvent) -> Sequence[TokenEvent]:
        """Enter an event of the present attempt, and return the events for the sink, which are in the log.

        Raises ProtocolError when a token is missing that cannot come any more.
        """
        if event.index > self.next_index:
            return self._keep_early(event)
        if event.index < self.next_index:
            return ()
        self._enter(event)
        if not self.early:
            return (event,)
        due = [event]
        while (following := self.early.pop(self.next_index, None)) is not None:
            self._enter(following)
            due.append(following)
        return due

    def is_known(self, event: TokenEvent) -> bool:
        """Return whether a token that came again is the same as before."""
        return event.token_id is None or self.log[event.index] == event.token_id

    def submitted(self, router: str, now_s: float) -> None:
        """Enter SUBMITTED: this router has been asked."""
        self.state, self.router = StreamState.SUBMITTED, router
        self.heard_s = self.assigned_s = now_s
        self.marks.submitted(self.attempt, router, now_s)

    def routed(self, decode: str, prefill: str, now_s: float) -> None:
        """Enter ROUTED: these workers have the attempt."""
        self.state, self.is_begun = StreamState.ROUTED, True
        self.decode, self.prefill = decode, prefill
        # The wait in the router's queue does not count.
        self.unserved_since_s += max(0.0, now_s - self.heard_s)
        self.heard_s = self.assigned_s = now_s

    def next_attempt(self, now_s: float, *, at_once: bool) -> None:
        """Go back to WAITING; for longer the more attempts in a row found no worker, unless `at_once`."""
        if self.has_started:
            self.unserved_since_s, self.num_retries = now_s, 0
        if at_once:
            self.retry_s = now_s
        else:
            self.retry_s = now_s + min(MAX_BACK_OFF_S, BACK_OFF_S * 2**self.num_retries)
            self.num_retries = min(self.num_retries + 1, 10)
        self.retry_s = max(self.retry_s, self._doubt_ends_s())
        self.state, self.decode = StreamState.WAITING, ""
        self.last_attempt += 1
        self._begin_attempt(self.last_attempt)

    def migrate(self, router: str, now_s: float) -> None:
        """Begin a migration: this router has been asked."""
        self.last_attempt += 1
        self.migration = Migration(self.last_attempt, router, now_s, len(self.log))

    def switch(self, migration: Migration, now_s: float) -> None:
        """Go on with the attempt of a migration, at its worker."""
        self.router, self.decode = migration.router, migration.decode
        self._begin_attempt(migration.attempt)
        self.num_failed_migrations = 0
        self.heard_s = self.assigned_s = now_s
        self.marks.submitted(self.attempt, self.router, now_s)

    def _begin_attempt(self, attempt: int) -> None:
        self.attempt = attempt
        self.first_index = self.next_index
        self.sticky_worker = self.prefill = ""
        self.unconfirmed_since_s = math.inf
        self.early.clear()

    def needs(self, worker: str) -> bool:
        """Return whether the loss of this worker can lose tokens of the present attempt."""
        return self.decode == worker or (self.prefill == worker and not self.has_started)

    def may_come_from(self, worker: str) -> bool:
        """Return whether this worker answers the present attempt; True of every worker until Routed names
        them.
        """
        return not self.decode or worker in (self.decode, self.prefill)

    def avoid_worker(self, worker: str) -> None:
        """Have the next attempts avoid a worker, if they can; "" is no worker."""
        if not worker:
            return
        if worker in self.avoid:
            self.avoid.remove(worker)
        self.avoid.append(worker)
        del self.avoid[:-MAX_AVOIDED]

    def lose(self, worker: str, connections: WorkerConnections, now_s: float) -> None:
        """Count a process that seems to have died with the request."""
        if connections.was_silent(worker, self.assigned_s):
            return
        # A connected process lives; but different processes hear of one death at different times.
        self.lost = {
            other: lost_s
            for other, lost_s in self.lost.items()
            if now_s - lost_s < DOUBT_S or not connections.has(other)
        }
        self.lost[worker] = now_s

    def merge_node_losses(self, connections: WorkerConnections) -> None:
        """Count workers that ended with their node as one process, for good: new workers may start there."""
        if len(self.lost) < 2:
            return
        latest_s: dict[str, float] = {}  # when the latest worker of each node was lost
        for worker, lost_s in list(self.lost.items()):
            nodes = connections.lost_nodes(worker)
            if any(lost_s - latest_s.get(node, -math.inf) <= NODE_ENDS_S for node in nodes):
                del self.lost[worker]
            latest_s |= dict.fromkeys(nodes, lost_s)

    def is_too_late(self, now_s: float) -> bool:
        """Return whether the deadline has passed without a token. Only the first choice has a deadline."""
        deadline_ms = self.request.sla.deadline_ms
        if deadline_ms is None or self.log or self.request.choice:
            return False
        return now_s - self.request.arrival_s > deadline_ms / 1000

    def waits_too_long(self, limits: ReplayLimits, now_s: float) -> bool:
        """Return whether the request has been without a worker for longer than the limit."""
        return now_s - self.unserved_since_s > self._max_wait_s(limits)

    def why_not_again(
        self, connections: WorkerConnections, limits: ReplayLimits, now_s: float, *, has_router: bool
    ) -> BatonError | None:
        """Return the error that ends the request, or None when it may have another attempt.

        has_router: a router is connected.
        """
        if self.is_too_late(now_s):
            deadline_ms = self.request.sla.deadline_ms
            return Refused(
                f"request {self.request_id}: no token of it came within {deadline_ms:g} ms",
                refusal=Refusal.DEADLINE,
                retry_after_s=0.0,
            )
        num_died = sum(not connections.has(worker) for worker in self.lost)
        if num_died + self.num_errors >= MAX_STRIKES:
            return WorkerLost(
                f"request {self.request_id}: {num_died} workers died and {self.num_errors} failed "
                "while they worked on it, it is not tried again"
            )
        if self.attempt and len(self.log) > limits.max_log_tokens:
            return WorkerLost(
                f"request {self.request_id}: its worker is gone, and its {len(self.log)} tokens are "
                f"more than the {limits.max_log_tokens} that are kept for a replay"
            )
        if self.waits_too_long(limits, now_s):
            wait_s = self._max_wait_s(limits)
            missing = "no worker had room for it" if has_router else "no router answered"
            return Overloaded(
                f"request {self.request_id}: {missing} within {wait_s:g} s", retry_after_s=RETRY_AFTER_S
            )
        return None

    def _max_wait_s(self, limits: ReplayLimits) -> float:
        return limits.max_begun_wait_s if self.has_answer else limits.max_wait_s

    def _doubt_ends_s(self) -> float:
        """Return when it is known which lost processes have died; -inf when nothing depends on that."""
        if len(self.lost) + self.num_errors < MAX_STRIKES or not self.lost:
            return -math.inf
        return max(self.lost.values()) + DOUBT_S

    def _enter(self, event: TokenEvent) -> None:
        if event.token_id is not None:
            self.log.append(event.token_id)
            self.next_index += 1
        elif event.finish_reason is None:
            raise ProtocolError("an event with no token that does not end its request")

    def _keep_early(self, event: TokenEvent) -> Sequence[TokenEvent]:
        if self.has_started or len(self.early) >= MAX_EARLY:
            message = f"token {event.index} came, {self.next_index} was due"
            raise ProtocolError(message)
        self.early[event.index] = event
        return ()
