"""The messages between routers, the snapshots of workers, and their sealed encoding in Redis.

A message is the field `m` of a stream entry. Messages are hints: a router that misses some counts a worker's
load by the worker's own reports (router/in_flight.py).
"""

import hmac
from typing import Annotated, Final, Generic, NamedTuple, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from baton.errors import WireError
from baton.messages.bounds import MAX_PULLED_PAGES, SHORT_KEY_BYTES, Attempt, Count, Id, Message
from baton.messages.codec import decode_as
from baton.messages.control import Ended, KvEventBatch, Started
from baton.messages.workers import Tier, Worker


class SharedDispatch(Message, frozen=True, kw_only=True):
    """A router has sent an attempt to these workers; it weighs there until it has ended."""

    request_id: Id
    attempt: Attempt
    decode: Id
    prefill: Annotated[str, Meta(max_length=32)] = ""
    num_prompt_tokens: Count  # expected to be computed
    num_tokens: Count  # expected in its KV
    num_output_tokens: Count  # expected in its answer
    # Of the prompt's pages: 229 KB for the longest prompt.
    keys: Annotated[bytes, Meta(max_length=SHORT_KEY_BYTES * MAX_PULLED_PAGES)] = b""


AnyShared: TypeAlias = SharedDispatch | Started | Ended


class Snapshot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All pages of a worker, as `PrefixIndex.export` returns them."""

    next_number: Count
    stream_id: Annotated[str, Meta(pattern=r"\A[0-9]{1,20}-[0-9]{1,20}\Z")]  # of an entry before that change
    pages: dict[Tier, bytes]

    def __post_init__(self) -> None:
        if any(len(keys) % SHORT_KEY_BYTES for keys in self.pages.values()):
            raise ValueError(f"the keys of a snapshot have {SHORT_KEY_BYTES} bytes each")


SEAL_BYTES: Final = 16

_T = TypeVar("_T")
_ENCODER: Final = msgspec.msgpack.Encoder()


class Place(NamedTuple, Generic[_T]):
    """A place in Redis, and the decoder of the values there."""

    name: str
    decoder: msgspec.msgpack.Decoder[_T]


_MESSAGE: Final[msgspec.msgpack.Decoder[AnyShared]] = msgspec.msgpack.Decoder(AnyShared)
_SNAPSHOT: Final = msgspec.msgpack.Decoder(Snapshot)
_PAGES: Final = msgspec.msgpack.Decoder(KvEventBatch)
WORKER: Final = Place("worker", msgspec.msgpack.Decoder(Worker))
MESSAGE: Final = Place("message", _MESSAGE)


def snapshot_of(worker_id: str) -> Place[Snapshot]:
    """The place of a worker's snapshot."""
    return Place(f"snapshot {worker_id}", _SNAPSHOT)


def pages_of(worker_id: str) -> Place[KvEventBatch]:
    """The place of a worker's KV events."""
    return Place(f"pages {worker_id}", _PAGES)


class Codec:
    """Encodes what the routers of one cluster keep in Redis, and decodes only what one of them has written.

    Each value ends with a seal of SEAL_BYTES, which covers the place of the value. A value that another
    program has written, changed or moved raises WireError. Removed or repeated values cost hints, as a
    restart of Redis does.
    """

    def __init__(self, key: bytes) -> None:
        """key: derived from the cluster's key for this purpose (REDIS_VALUES)."""
        self._key = key

    def encode(self, place: Place[_T], value: _T) -> bytes:
        """Encode and seal a value of this place."""
        return self._seal(place.name, _ENCODER.encode(value))

    def decode(self, place: Place[_T], sealed: bytes) -> _T:
        """Decode a value of this place. Raises WireError unless a router of the cluster wrote it there."""
        return decode_as(place.decoder, self._open(place.name, sealed), reason="message")

    def _seal(self, place: str, body: bytes) -> bytes:
        return body + self._digest(place, body)

    def _open(self, place: str, sealed: bytes) -> bytes:
        body, seal = sealed[:-SEAL_BYTES], sealed[-SEAL_BYTES:]
        if not hmac.compare_digest(seal, self._digest(place, body)):
            raise WireError("Redis has a value that no router of this cluster has written", reason="seal")
        return body

    def _digest(self, place: str, body: bytes) -> bytes:
        return hmac.digest(self._key, place.encode() + b"\0" + body, "sha256")[:SEAL_BYTES]
