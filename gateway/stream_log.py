"""One accepted request, from its first attempt to its one end: what its client was given, and where it runs.

1. WAITING: it has no worker. It is submitted when there is a router, not before `retry_s`.
2. SUBMITTED: the router has been asked, and will say Routed or Rejected, perhaps Queued before. Tokens may
   come before Routed.
3. ROUTED: workers have it. Every token goes into the log, then to the sink, once and in order.

An attempt that fails leads back to WAITING, and the next one goes on after the tokens of the log. The first
token of an attempt may come from another worker than the later ones, and after them: these are early then.
"""

import math
from collections.abc import Sequence
from enum import Enum
from typing import Final, TypeAlias

import msgspec

from baton.control_wire import fits_request
from baton.errors import InvalidRequest, ProtocolError
from baton.gateway.service import Sink
from baton.request import Request
from baton.token_event import TokenEvent

Key: TypeAlias = tuple[str, int]  # request id, attempt

MAX_EARLY: Final = 1024  # events of one attempt that are kept for its first token
MAX_AVOIDED: Final = 8
BACK_OFF_S: Final = 0.05
MAX_BACK_OFF_S: Final = 1.0


class State(Enum):
    WAITING = "waiting"
    SUBMITTED = "submitted"
    ROUTED = "routed"


class Stream:
    """`next_index` is that of the token that is due; tokens that the request came with count."""

    __slots__ = (
        "attempt",
        "avoid",
        "beside",
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
    )

    def __init__(self, request: Request, sink: Sink, beside: str, now_s: float) -> None:
        self.request = request  # as it was opened, with its seed
        self.sink = sink
        self.beside = beside
        self.router = ""  # that was asked for the present attempt, or the one before
        self.state = State.WAITING
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
        self.state, self.is_begun = State.ROUTED, True
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
        self.state = State.WAITING
        self.attempt += 1
        self.first_index = self.next_index
        self.beside = self.decode = self.prefill = ""
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
