"""When a request that lost its worker may have another one: the rules, apart from what carries them out.

1. A worker that is gone, that broke the protocol, made an error of it or fell silent: at once, elsewhere.
2. No room anywhere: again and again, later each time, until `max_wait_s` has passed; once its answer has
   begun, `max_begun_wait_s`: a lost worker's successor may take minutes to load its model.
3. Not after its deadline, where nothing of it has been answered by then.
4. Never a third worker for a request of which two processes died, or that two could not compute: it may be
   the cause. Nor where the tokens so far are too many to be kept.

Whether a process died or just its connection shows in whether it is connected soon after; so where that
decides, DOUBT_S pass before the verdict.
"""

import math
from collections.abc import Callable
from typing import Final, NamedTuple

from baton.errors import BatonError, Overloaded, Refused, WorkerLost
from baton.gateway.stream_log import Stream
from baton.tenancy import Refusal

MAX_STRIKES: Final = 2
RETRY_AFTER_S: Final = 1.0
DOUBT_S: Final = 1.0  # a connection that broke is back by then


class Limits(NamedTuple):
    """What one gateway process takes on."""

    max_streams: int = 4096  # open at once
    max_wait_s: float = 30.0  # without any worker to answer it
    max_begun_wait_s: float = 300.0  # the same, of an answer that has begun
    max_silence_s: float = 120.0  # of the workers that have it
    max_log_tokens: int = 131_072  # of the answer, kept to replay it


def why_not_again(
    stream: Stream,
    is_connected: Callable[[str], bool],
    limits: Limits,
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


def max_wait_s(stream: Stream, limits: Limits) -> float:
    """Seconds that the stream may be without any worker; more once its client has a part of the answer."""
    return limits.max_begun_wait_s if stream.has_answer else limits.max_wait_s


def is_too_late(stream: Stream, now_s: float) -> bool:
    """Whether its deadline has passed before the first token; the other choices follow that of the first."""
    request = stream.request
    deadline_ms = request.sla.deadline_ms
    if deadline_ms is None or stream.log or request.choice:
        return False
    return now_s - request.arrival_s > deadline_ms / 1000


def doubt_ends_s(stream: Stream) -> float:
    """When it can be said which of the lost processes died; -inf where nothing hangs on it."""
    if len(stream.lost) + stream.num_errors < MAX_STRIKES or not stream.lost:
        return -math.inf
    return stream.lost_s + DOUBT_S
