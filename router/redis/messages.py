"""The messages between routers, the snapshots of workers, and their sealed encoding in Redis.

A message is the field `m` of a stream entry. Messages are hints: a router that misses some counts a worker's
load by the worker's own reports (router/in_flight.py).
"""

import hmac
from typing import Annotated, Final, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from baton.errors import WireError
from baton.messages import codec
from baton.messages.bounds import MAX_EVENTS, MAX_PULLED_PAGES, Attempt, Count, Id
from baton.messages.control import KvEventBatch
from baton.messages.workers import Worker
from baton.router.index.prefix_index import SHORT_KEY_BYTES


class SharedMessage(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True, tag_field="kind"
):
    """One of the classes below."""


class SharedDispatch(SharedMessage, frozen=True, kw_only=True):
    """A router has sent an attempt to these workers; it weighs there until it has ended."""

    request_id: Id
    attempt: Attempt
    decode: Id
    prefill: Annotated[str, Meta(max_length=32)] = ""
    num_prompt_tokens: Count  # expected to be computed
    num_tokens: Count  # expected in its KV
    num_output_tokens: Count  # expected in its answer
    # First halves of the keys of the prompt's pages: 229 KB for the longest prompt.
    keys: Annotated[bytes, Meta(max_length=SHORT_KEY_BYTES * MAX_PULLED_PAGES)] = b""


class SharedStarted(SharedMessage, frozen=True):
    """These attempts have their first token."""

    attempts: Annotated[tuple[tuple[Id, Attempt], ...], Meta(max_length=MAX_EVENTS)]


class SharedEnded(SharedMessage, frozen=True):
    """These attempts have ended."""

    attempts: Annotated[tuple[tuple[Id, Attempt], ...], Meta(max_length=MAX_EVENTS)]


AnyShared: TypeAlias = SharedDispatch | SharedStarted | SharedEnded


class Snapshot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All pages of a worker: keys and values of eight bytes each, little-endian, as in
    router/index/prefix_index.py.
    """

    next_number: Count
    stream_id: Annotated[str, Meta(pattern=r"\A[0-9]{1,20}-[0-9]{1,20}\Z")]  # of an entry before that change
    keys: bytes
    values: bytes

    def __post_init__(self) -> None:
        if len(self.keys) != len(self.values) or len(self.keys) % 8:
            raise ValueError(f"{len(self.keys)} bytes of keys, {len(self.values)} bytes of values")


SEAL_BYTES: Final = 16
_WORKER_PLACE: Final = "worker"
_SHARED_PLACE: Final = "message"

_T = TypeVar("_T")
_ENCODER: Final = msgspec.msgpack.Encoder()
_SHARED: Final[msgspec.msgpack.Decoder[AnyShared]] = msgspec.msgpack.Decoder(AnyShared)
_SNAPSHOT: Final = msgspec.msgpack.Decoder(Snapshot)
_WORKER: Final = msgspec.msgpack.Decoder(Worker)


class Codec:
    """Encodes what the routers of one cluster keep in Redis, and decodes only what one of them has written.

    Each value ends with a seal of SEAL_BYTES, which covers the place of the value. A value that another
    program has written, changed or moved raises WireError. Removed or repeated values cost hints, as a
    restart of Redis does.
    """

    def __init__(self, key: bytes) -> None:
        """key: derived from the cluster's key for this purpose (REDIS_VALUES)."""
        self._key = key

    def encode_worker(self, worker: Worker) -> bytes:
        return self._seal(_WORKER_PLACE, _ENCODER.encode(worker))

    def decode_worker(self, sealed: bytes) -> Worker:
        return _decoded(_WORKER, self._open(_WORKER_PLACE, sealed))

    def encode_shared(self, message: AnyShared) -> bytes:
        return self._seal(_SHARED_PLACE, _ENCODER.encode(message))

    def decode_shared(self, sealed: bytes) -> AnyShared:
        return _decoded(_SHARED, self._open(_SHARED_PLACE, sealed))

    def encode_snapshot(self, worker_id: str, snapshot: Snapshot) -> bytes:
        return self._seal(_snapshot_place(worker_id), _ENCODER.encode(snapshot))

    def decode_snapshot(self, worker_id: str, sealed: bytes) -> Snapshot:
        return _decoded(_SNAPSHOT, self._open(_snapshot_place(worker_id), sealed))

    def encode_pages(self, worker_id: str, events: KvEventBatch) -> bytes:
        return self._seal(_pages_place(worker_id), codec.encode(events))

    def decode_pages(self, worker_id: str, sealed: bytes) -> KvEventBatch:
        events = codec.decode(self._open(_pages_place(worker_id), sealed))
        if not isinstance(events, KvEventBatch):
            raise WireError(f"Redis has a {type(events).__name__} where pages belong", reason="message")
        return events

    def _seal(self, place: str, body: bytes) -> bytes:
        return body + self._digest(place, body)

    def _open(self, place: str, sealed: bytes) -> bytes:
        body, seal = sealed[:-SEAL_BYTES], sealed[-SEAL_BYTES:]
        if not hmac.compare_digest(seal, self._digest(place, body)):
            raise WireError("Redis has a value that no router of this cluster has written", reason="seal")
        return body

    def _digest(self, place: str, body: bytes) -> bytes:
        return hmac.digest(self._key, place.encode() + b"\0" + body, "sha256")[:SEAL_BYTES]


def _snapshot_place(worker_id: str) -> str:
    return f"snapshot {worker_id}"


def _pages_place(worker_id: str) -> str:
    return f"pages {worker_id}"


def _decoded(decoder: msgspec.msgpack.Decoder[_T], body: bytes) -> _T:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise WireError(f"Redis has something that can't be read: {error}", reason="message") from error
