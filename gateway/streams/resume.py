"""Ids of a stream's events, with which any gateway of the cluster continues the stream (docs/resume.md).

An event of a resumable stream carries `id: ...`. A client that lost its gateway sends the same POST with the
last id in the header `Last-Event-ID`. The id has the seed and the name of the answer, and how much of each
choice the client has. The tokens themselves are generated again, from the same seed.

An id is opaque: encrypted and authenticated with keys that are derived from the cluster key, as in SIV mode.

    payload   msgpack of a ResumePoint
    tag       BLAKE2b-128 keyed, of the tenant's name and the payload
    id        base64url of: tag, payload XOR SHAKE-256(key, tag)

The tag covers the tenant's name: an id of another tenant is as unknown as a forged one.
"""

import base64
import binascii
import hashlib
import hmac
from typing import Final

import msgspec

from baton.gateway.api.errors import ApiError
from baton.messages.bounds import Kind
from baton.rpc.auth import EVENT_IDS, ClusterKeys, KeyRing

TAG_BYTES: Final = 16
NAME_BYTES: Final = 16  # of an answer
DIGEST_BYTES: Final = 16
MAX_ID_CHARS: Final = 1024
MAX_RESUMABLE_CHOICES: Final = 8  # over all prompts of a call; an id grows with each
HEADER: Final = b"last-event-id"
PARAM: Final = "Last-Event-ID"

_CONTEXT: Final = b"baton event id 1"


class DeliveredChoice(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The part of one choice that its client has."""

    is_begun: bool = False  # the chunk before its first text was sent
    has_ended: bool = False
    num_chars: int = 0
    num_tokens: int = 0  # tokens that were sent as text, ids or logprobs
    token_checksum: int = 0  # CRC-32 of their ids
    num_call_chars: int = 0  # characters of tool calls' arguments; the beginning of a call counts as one
    num_reasoning_chars: int = 0
    num_cached_tokens: int = 0  # of the prompt, as the usage says
    num_reasoning_tokens: int = 0  # the same


class ResumePoint(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A stream after one of its events."""

    answer: bytes  # its random name: clients see it in each chunk's id
    digest: bytes  # Call.digest
    seed: int
    created_s: int  # in each chunk, in seconds since 1970
    expires_s: int  # in seconds since 1970
    has_shown_usage: bool
    choices: tuple[DeliveredChoice, ...]

    def is_whole(self, *, has_usage: bool) -> bool:
        """Tell whether only the end of the stream is missing. has_usage: the client asked for the usage."""
        return all(choice.has_ended for choice in self.choices) and (self.has_shown_usage or not has_usage)


class EventIds:
    """Seals resume points into ids and opens ids; keeps no state of any stream."""

    def __init__(self, keys: ClusterKeys) -> None:
        """keys: a gateway's. The current key seals; an id that any of the keys has sealed can be opened."""
        self._ring = KeyRing.of(keys, Kind.GATEWAY)
        self._ring.follow(self._use_keys)
        self._use_keys()
        self._decoder = msgspec.msgpack.Decoder(ResumePoint)

    def seal(self, point: ResumePoint, tenant: str) -> bytes:
        """Return an id of ASCII letters, digits, '-' and '_'."""
        tag_key, stream_key = self._keys[0]
        payload = msgspec.msgpack.encode(point)
        tag = _tag(tag_key, tenant, payload)
        sealed = tag + _xor(payload, stream_key, tag)
        return base64.urlsafe_b64encode(sealed).rstrip(b"=")

    def open(self, text: str, tenant: str, now_s: float) -> ResumePoint:
        """Return the point that was sealed for this tenant. now_s: seconds since 1970.

        Raises ApiError 400. The error does not tell an id of another tenant from a forged one.
        """
        point = self._point(text, tenant)
        if point is None:
            message = f"{PARAM}: the id is not one of this service; send no id to begin anew"
            raise ApiError(400, message, code="unknown_event_id", param=PARAM)
        if now_s >= point.expires_s:
            message = f"{PARAM}: the id has expired; send the request without it to begin anew"
            raise ApiError(400, message, code="expired_event_id", param=PARAM)
        return point

    def _use_keys(self) -> None:
        self._keys = [
            (_derived(key, b"tag"), _derived(key, b"stream")) for key in self._ring.all_derived(EVENT_IDS)
        ]

    def _point(self, text: str, tenant: str) -> ResumePoint | None:
        if len(text) > MAX_ID_CHARS:
            return None
        try:
            data = text.encode("ascii")
            sealed = base64.b64decode(data + b"=" * (-len(data) % 4), altchars=b"-_", validate=True)
        except (UnicodeEncodeError, binascii.Error):
            return None
        tag, hidden = sealed[:TAG_BYTES], sealed[TAG_BYTES:]
        for tag_key, stream_key in self._keys:
            payload = _xor(hidden, stream_key, tag)
            if hmac.compare_digest(tag, _tag(tag_key, tenant, payload)):
                return self._decoded(payload)
        return None

    def _decoded(self, payload: bytes) -> ResumePoint | None:
        """Return None for a point that a gateway of another version has sealed."""
        try:
            return self._decoder.decode(payload)
        except msgspec.MsgspecError:
            return None


def _derived(key: bytes, purpose: bytes) -> bytes:
    return hmac.digest(key, _CONTEXT + b" " + purpose, "sha256")


def _tag(key: bytes, tenant: str, payload: bytes) -> bytes:
    name = tenant.encode()
    message = len(name).to_bytes(4, "big") + name + payload
    return hashlib.blake2b(message, key=key, digest_size=TAG_BYTES).digest()


def _xor(data: bytes, key: bytes, tag: bytes) -> bytes:
    """Encrypt or decrypt. The tag serves as the nonce: only equal payloads have equal tags."""
    stream = hashlib.shake_256(key + tag).digest(len(data))
    return (int.from_bytes(data, "big") ^ int.from_bytes(stream, "big")).to_bytes(len(data), "big")
