"""Encodes and decodes messages, and checks whether requests and events fit a control message."""

from typing import Final, TypeAlias, TypeVar

import msgspec

from baton.errors import WireError
from baton.messages import control, operations, orders
from baton.messages.bounds import MAX_BODY_BYTES, schema_hash
from baton.request import Request, TokenEvent

MessageT = TypeVar("MessageT")
MAX_REQUEST_BYTES: Final = MAX_BODY_BYTES - 4096

AnyMessage: TypeAlias = (
    control.Hello
    | control.Members
    | control.Reachable
    | control.Submit
    | control.Queued
    | control.Routed
    | control.Rejected
    | control.Started
    | control.Ended
    | control.Dispatch
    | control.Prefill
    | control.Tokens
    | control.Prefilled
    | control.PrefillFailed
    | control.AttemptFailed
    | control.Prepared
    | control.TakeOver
    | control.Cancel
    | control.Heartbeat
    | control.Alive
    | control.KvEventBatch
    | control.KvEventsWanted
    | control.Measured
    | operations.Drain
    | control.Pressure
    | operations.StatusQuery
    | operations.Status
    | operations.Explain
    | operations.Decisions
    | operations.FindRequests
    | operations.FoundRequests
    | operations.GatewayReport
    | operations.WatchWorkers
    | operations.WorkerRemoved
    | operations.Undrain
    | operations.SupervisorReport
    | operations.RestartWorker
    | operations.Scale
    | operations.Flip
    | orders.Sleep
    | orders.Wake
    | operations.Migrate
    | operations.Migrated
    | operations.RecordingQuery
    | operations.RecordingPart
)


# The ends of a control link exchange this hash in their prefaces: see baton/rpc/auth.py.
CONTROL_SCHEMA: Final = schema_hash(AnyMessage)

_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final[msgspec.msgpack.Decoder[AnyMessage]] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: AnyMessage) -> bytes:
    """Return a frame's body. WireError for a message that no frame holds."""
    try:
        body = _ENCODER.encode(message)
    except (OverflowError, TypeError, ValueError) as error:  # a number of too many bits, half a character
        complaint = f"a {type(message).__name__} that can't be written: {error}"
        raise WireError(complaint, reason="message") from error
    if len(body) > MAX_BODY_BYTES:
        raise WireError(
            f"a {type(message).__name__} of {len(body)} bytes, {MAX_BODY_BYTES} is most", reason="length"
        )
    return body


TOO_LARGE: Final = "its log probabilities do not fit one message: ask for fewer, or for a shorter prompt's"


def fits(event: TokenEvent) -> bool:
    """Return whether a message can carry an event; prompt log probabilities may be too many."""
    return (
        event.prompt_logprobs is None
        or len(_ENCODER.encode(control.Prefilled(event=event))) <= MAX_BODY_BYTES  # longer than Tokens
    )


def fits_request(request: Request) -> bool:
    """Return whether the request fits every message that carries one."""
    return len(_ENCODER.encode(request)) <= MAX_REQUEST_BYTES


def decode_as(
    kind: "type[MessageT] | msgspec.msgpack.Decoder[MessageT]", body: bytes, reason: str = "malformed"
) -> MessageT:
    """Return the message in a body. Raises WireError with this reason for any other body.

    kind: the message's type, or a decoder of several types.
    """
    try:
        if isinstance(kind, msgspec.msgpack.Decoder):
            return kind.decode(body)
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # ValueError: a key that is no text
        name = kind.__name__ if isinstance(kind, type) else "the message"
        raise WireError(f"cannot decode {name}: {error}", reason=reason) from None


def decode(body: bytes) -> AnyMessage:
    """Return the message in a body. WireError for an unknown message, or a value out of its bounds."""
    return decode_as(_DECODER, body, reason="message")
