"""One accepted request, from its first attempt to its one end: what its client was given, and where it runs.

1. WAITING: it has no worker. It is submitted when there is a router, not before `retry_s`.
2. SUBMITTED: the router has been asked, and will say Routed or Rejected, perhaps Queued before. Tokens may
   come before Routed.
3. ROUTED: workers have it. Every token goes into the log, then to the sink, once and in order.

An attempt that fails leads back to WAITING, and the next one goes on after the tokens of the log. The first
token of an attempt may come from another worker than the later ones, and after them: these are early then.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Final, NamedTuple, Protocol, TypeAlias

import msgspec

from baton.errors import BatonError, InvalidRequest, Overloaded, ProtocolError, Refused, WorkerLost
from baton.messages.codec import fits_request
from baton.messages.operations import Status
from baton.messages.workers import Worker
from baton.request import Request, TokenEvent
from baton.tenants import Refusal

# What the HTTP side needs of the cluster; `Frontend` is it, and so is a single engine in tests.


class Sink(Protocol):
    """Where one request's tokens go: on the loop's thread, each once, in order."""

    def tokens(self, events: Sequence[TokenEvent]) -> None:
        """With a finish reason on the last event, the end."""

    def failed(self, error: BatonError) -> None:
        """The end, without an answer."""


class Service(Protocol):
    def open(self, request: Request, sink: Sink, *, sticky_worker: str = "") -> None:
        """Begin a request of one choice. Raises Overloaded, and keeps nothing of it, when there are too many.

        `sticky_worker`: the decode worker that has the prompt already.
        """

    def cancel(self, request_id: str) -> None:
        """Its sink hears nothing more. What is unknown, or has ended, is no error."""

    def decode_worker(self, request_id: str) -> str:
        """The worker that the request runs on now; "" for none."""

    @property
    def is_ready(self) -> bool:
        """Whether a request that came now could be sent somewhere."""

    @property
    def why_not_ready(self) -> str:
        """What is missing, for operators and clients to read; "" when it is ready."""

    @property
    def workers(self) -> Sequence[Worker]: ...

    @property
    def prefill_seen_s(self) -> float | None:
        """When both were last seen: a prompt whose pages a prefill worker transferred, and an answer to this
        gateway of a decode worker that such a prompt was sent to. By the service's clock; None: never.
        """

    @property
    def status(self) -> Status | None:
        """What the router last told of its workers."""

    @property
    def counters(self) -> Counter[str]:
        """Replays, drops and the like, by name."""


Key: TypeAlias = tuple[str, int]  # request id, attempt
MAX_EARLY: Final = 1024  # events of one attempt that are kept for its first token
MAX_AVOIDED: Final = 8
BACK_OFF_S: Final = 0.05
MAX_BACK_OFF_S: Final = 1.0


class StreamState(Enum):
    WAITING = "waiting"
    SUBMITTED = "submitted"
    ROUTED = "routed"


class RequestStream:
    """`next_index` is that of the token that is due; tokens that the request came with count."""

    __slots__ = (
        "attempt",
        "avoid",
        "decode",
        "doubted_s",
        "early",
        "first_index",
        "has_started",
        "heard_s",
        "homeless_s",
        "is_begun",
        "is_reported",
        "log",
        "lost",
        "lost_s",
        "next_index",
        "num_errors",
        "num_retries",
        "prefill",
        "request",
        "retry_s",
        "router",
        "sink",
        "state",
        "sticky_worker",
    )

    def __init__(self, request: Request, sink: Sink, sticky_worker: str, now_s: float) -> None:
        self.request = request  # as it was opened, with its seed
        self.sink = sink
        self.sticky_worker = sticky_worker
        self.router = ""  # that was asked for the present attempt, or the one before
        self.state = StreamState.WAITING
        self.attempt = request.attempt
        self.log = list(request.generated_token_ids)
        self.next_index = self.first_index = len(self.log)  # the latter: of the present attempt
        self.is_begun = bool(self.log)  # workers have had it, in whatever attempt
        self.has_started = self.is_reported = False  # the present attempt; the latter: to the router
        self.early: dict[int, TokenEvent] = {}
        self.decode = self.prefill = ""  # of the present attempt, once it is ROUTED
        self.doubted_s = math.inf  # since when it is not sure that they ever heard of it
        self.avoid: list[str] = []  # workers that failed it, the latest last
        self.lost: dict[str, float] = {}  # processes that seemed to have died while they held it, and when
        self.lost_s = now_s  # when the latest of them did
        self.num_errors = 0  # attempts that a living worker failed
        self.num_retries = 0  # in a row, since it last had a worker
        self.retry_s = now_s
        self.homeless_s = now_s  # since when no worker has answered it
        self.heard_s = now_s

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def has_answer(self) -> bool:
        """Whether its client has a part of the answer, of this choice or of the first one."""
        return bool(self.log) or self.request.choice > 0

    @property
    def key(self) -> Key:
        return self.request.request_id, self.attempt

    @property
    def num_answered(self) -> int:
        """Tokens, by the present attempt."""
        return self.next_index - self.first_index

    def next_request(self) -> Request | None:
        """Of the present attempt. None: it has become too large, or all that was asked for is there."""
        if not self.attempt:
            return self.request
        try:
            request = msgspec.structs.replace(
                self.request, attempt=self.attempt, generated_token_ids=tuple(self.log)
            )
        except InvalidRequest:  # its worker should have said that this is the end
            return None
        return request if fits_request(request) else None

    def take(self, event: TokenEvent) -> Sequence[TokenEvent]:
        """What the sink is due now that this event of the present attempt has come; in the log already.

        ProtocolError: a token is missing that can't come any more.
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
        """Whether a token that came again is the same as before."""
        return event.token_id is None or self.log[event.index] == event.token_id

    def routed(self, decode: str, prefill: str, now_s: float) -> None:
        self.state, self.is_begun = StreamState.ROUTED, True
        self.decode, self.prefill = decode, prefill
        self.homeless_s += max(0.0, now_s - self.heard_s)  # in the router's queue
        self.heard_s = now_s

    def next_attempt(self, now_s: float, *, at_once: bool) -> None:
        """Back to WAITING; the more attempts in a row came to nothing, the longer."""
        if self.has_started:
            self.homeless_s, self.num_retries = now_s, 0
        if at_once:
            self.retry_s = now_s
        else:
            self.retry_s = now_s + min(MAX_BACK_OFF_S, BACK_OFF_S * 2**self.num_retries)
            self.num_retries = min(self.num_retries + 1, 10)
        self.state = StreamState.WAITING
        self.attempt += 1
        self.first_index = self.next_index
        self.sticky_worker = self.decode = self.prefill = ""
        self.has_started = self.is_reported = False
        self.doubted_s = math.inf
        self.early.clear()

    def needs(self, worker: str) -> bool:
        """Whether tokens of the present attempt can be lost with this worker."""
        return self.decode == worker or (self.prefill == worker and not self.has_started)

    def blame(self, worker: str) -> None:
        """Have the next attempts avoid it, if they can; "" is nobody."""
        if not worker:
            return
        if worker in self.avoid:
            self.avoid.remove(worker)
        self.avoid.append(worker)
        del self.avoid[:-MAX_AVOIDED]

    def _enter(self, event: TokenEvent) -> None:
        self.has_started = True
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


# When a request that lost its worker may have another one: the rules, apart from what carries them out.
#
# 1. A worker that is gone, that broke the protocol, made an error of it or fell silent: at once, elsewhere.
# 2. No room anywhere: again and again, later each time, until `max_wait_s` has passed; once its answer has
# begun, `max_begun_wait_s`: a lost worker's successor may take minutes to load its model.
# 3. Not after its deadline, where nothing of it has been answered by then.
# 4. Never a third worker for a request of which two processes died, or that two could not compute: it may be
# the cause. Nor where the tokens so far are too many to be kept.
#
# Whether a process died or just its connection shows in whether it is connected soon after; so where that
# decides, DOUBT_S pass before the verdict.
MAX_STRIKES: Final = 2
RETRY_AFTER_S: Final = 1.0
DOUBT_S: Final = 1.0  # a connection that broke is back by then


class ReplayLimits(NamedTuple):
    """What one gateway process takes on."""

    max_streams: int = 4096  # open at once
    max_wait_s: float = 30.0  # without any worker to answer it
    max_begun_wait_s: float = 300.0  # the same, of an answer that has begun
    max_silence_s: float = 120.0  # of the workers that have it
    max_log_tokens: int = 131_072  # of the answer, kept to replay it


def why_not_again(
    stream: RequestStream,
    is_connected: Callable[[str], bool],
    limits: ReplayLimits,
    now_s: float,
    *,
    has_router: bool = True,
) -> BatonError | None:
    """The error that ends the request; None: it may have another attempt. has_router: one is connected."""
    if is_too_late(stream, now_s):
        deadline_ms = stream.request.sla.deadline_ms
        return Refused(
            f"request {stream.request_id}: no token of it came within {deadline_ms:g} ms",
            refusal=Refusal.DEADLINE,
            retry_after_s=0.0,
        )
    num_died = sum(not is_connected(worker) for worker in stream.lost)
    if num_died + stream.num_errors >= MAX_STRIKES:
        return WorkerLost(
            f"request {stream.request_id}: {num_died} workers died and {stream.num_errors} failed "
            "while they worked on it, it is not tried again"
        )
    if stream.attempt and len(stream.log) > limits.max_log_tokens:
        return WorkerLost(
            f"request {stream.request_id}: its worker is gone, and its {len(stream.log)} tokens are "
            f"more than the {limits.max_log_tokens} that are kept for a replay"
        )
    wait_s = max_wait_s(stream, limits)
    if now_s - stream.homeless_s > wait_s:
        missing = "no worker had room for it" if has_router else "no router answered"
        return Overloaded(
            f"request {stream.request_id}: {missing} within {wait_s:g} s",
            retry_after_s=RETRY_AFTER_S,
        )
    return None


def max_wait_s(stream: RequestStream, limits: ReplayLimits) -> float:
    """Seconds that the stream may be without any worker; more once its client has a part of the answer."""
    return limits.max_begun_wait_s if stream.has_answer else limits.max_wait_s


def is_too_late(stream: RequestStream, now_s: float) -> bool:
    """Whether its deadline has passed before the first token; the other choices follow that of the first."""
    request = stream.request
    deadline_ms = request.sla.deadline_ms
    if deadline_ms is None or stream.log or request.choice:
        return False
    return now_s - request.arrival_s > deadline_ms / 1000


def doubt_ends_s(stream: RequestStream) -> float:
    """When it can be said which of the lost processes died; -inf where nothing hangs on it."""
    if len(stream.lost) + stream.num_errors < MAX_STRIKES or not stream.lost:
        return -math.inf
    return stream.lost_s + DOUBT_S
