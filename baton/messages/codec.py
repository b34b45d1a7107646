"""The messages of a cluster as bytes, and what fits into them."""

from typing import Final, TypeAlias

import msgspec

from baton.errors import WireError
from baton.messages.bounds import MAX_BODY_BYTES, schema_hash
from baton.messages.control import (
    Alive,
    AttemptFailed,
    Cancel,
    Dispatch,
    Ended,
    Heartbeat,
    Hello,
    KvEventBatch,
    KvEventsWanted,
    Measured,
    Members,
    Prefill,
    Prefilled,
    PrefillFailed,
    Pressure,
    PullSource,
    Queued,
    Reachable,
    Rejected,
    Routed,
    Started,
    Submit,
    Tokens,
)
from baton.messages.operations import (
    Decisions,
    Drain,
    Explain,
    GatewayReport,
    HeadAway,
    RestartWorker,
    Status,
    StatusQuery,
    Undrain,
    WatchWorkers,
    WorkerRemoved,
)
from baton.request import Request, TokenEvent

MAX_REQUEST_BYTES: Final = MAX_BODY_BYTES - 4096


AnyMessage: TypeAlias = (
    Hello
    | Members
    | Reachable
    | Submit
    | Queued
    | Routed
    | Rejected
    | Started
    | Ended
    | Dispatch
    | Prefill
    | Tokens
    | Prefilled
    | PrefillFailed
    | AttemptFailed
    | Cancel
    | Heartbeat
    | Alive
    | KvEventBatch
    | KvEventsWanted
    | Measured
    | Drain
    | Pressure
    | StatusQuery
    | Status
    | Explain
    | Decisions
    | GatewayReport
    | WatchWorkers
    | WorkerRemoved
    | Undrain
    | HeadAway
    | RestartWorker
)


# Both ends of a control link exchange this hash in their prefaces: see baton/rpc/auth.py.
CONTROL_SCHEMA: Final = schema_hash(AnyMessage)

_ENCODER: Final = msgspec.msgpack.Encoder()


_DECODER: Final[msgspec.msgpack.Decoder[AnyMessage]] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: AnyMessage) -> bytes:
    """A frame's body. WireError for what no frame holds: nothing of it has been sent then."""
    try:
        body = _ENCODER.encode(message)
    except (OverflowError, TypeError, ValueError) as error:  # a number of too many bits, half a character
        what = f"a {type(message).__name__} that can't be written: {error}"
        raise WireError(what, reason="message") from error
    if len(body) > MAX_BODY_BYTES:
        raise WireError(
            f"a {type(message).__name__} of {len(body)} bytes, {MAX_BODY_BYTES} is most", reason="length"
        )
    return body


TOO_LARGE: Final = "its log probabilities do not fit one message: ask for fewer, or for a shorter prompt's"


def fits(event: TokenEvent) -> bool:
    """Whether a message can carry it; only the log probabilities of a long prompt may be too many."""
    return event.prompt_logprobs is None or len(_ENCODER.encode(Tokens(events=(event,)))) <= MAX_BODY_BYTES


def fits_request(request: Request) -> bool:
    """Whether all messages that carry a request can carry this one, with what they say beside it."""
    sampling = request.sampling
    num_integers = request.num_tokens + len(sampling.stop_token_ids)
    most_bytes = 9 * num_integers + 18 * len(sampling.logit_bias)
    return most_bytes <= MAX_REQUEST_BYTES // 2 or len(_ENCODER.encode(request)) <= MAX_REQUEST_BYTES


def fits_beside(request: Request, source: PullSource) -> bool:
    """Whether a message can carry both."""
    return len(_ENCODER.encode(request)) + 10 * len(source.pages) <= MAX_REQUEST_BYTES


def decode(body: bytes) -> AnyMessage:
    """WireError for anything that is no message, or has a value out of its bounds."""
    try:
        return _DECODER.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise WireError(f"a message that can't be read: {error}", reason="message") from error
