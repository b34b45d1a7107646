"""The reader of Redis: other routers' workers, their pages, and the dispatches of those routers.

1. `learn`: read the live workers, and the snapshot of each worker that is not connected to this router.
2. `read`: read the stream from the oldest of these snapshots on. Events that a snapshot includes are
   skipped by their numbers.
3. After a gap, the worker's snapshot is read again until one is new enough.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final, TypeAlias, TypeVar

import numpy as np

from baton.errors import WireError
from baton.router.index.prefix_index import SharedIndex
from baton.router.redis.client import Names, RedisConnection
from baton.router.redis.messages import AnyShared, Codec, SharedJoined, SharedLeft, Snapshot
from baton.router.redis.outbox import RedisOutbox

BLOCK_MS: Final = 200
MAX_ENTRIES: Final = 64  # of one read
FROM_THE_START: Final = "0-0"

_T = TypeVar("_T")
Fields: TypeAlias = Mapping[bytes, bytes]


class Feed:
    """Applies the events and messages of other routers."""

    def __init__(
        self,
        names: Names,
        outbox: RedisOutbox,
        codec: Codec,
        router_id: str,
        index: SharedIndex,
        counters: Counter[str],
        on_shared: Callable[[AnyShared], None],
    ) -> None:
        self._names = names
        self._outbox = outbox
        self._codec = codec
        self._router_id = router_id.encode()
        self._index = index
        self._counters = counters
        self._on_shared = on_shared
        self._foreign: set[str] = set()  # workers that are not connected to this router
        self._doubtful: set[str] = set()  # foreign workers with a gap

    async def learn(self, redis: RedisConnection) -> str:
        """Read workers and snapshots. Returns the id of the stream entry to read from."""
        read_from = await last_stream_id(redis, self._names)
        alive: dict[bytes, bytes] = await redis.call("HGETALL", self._names.workers)
        self._forget_all_but({worker_id.decode(errors="replace") for worker_id in alive})
        for body in alive.values():
            worker = self._checked(self._codec.decode_worker, body)
            if worker is None or worker.id in self._outbox.workers:
                continue
            self._index.join(worker)
            self._foreign.add(worker.id)
            seen = await self._restore(redis, worker.id)
            read_from = min(read_from, seen, key=_order)
        return read_from

    async def read(self, redis: RedisConnection, after: str) -> str:
        """Apply the next entries. Returns the id of the last one; `after` if none has come for BLOCK_MS."""
        limits = ("COUNT", MAX_ENTRIES, "BLOCK", BLOCK_MS)
        reply = await redis.call("XREAD", *limits, "STREAMS", self._names.events, after)
        for entry_id, fields in reply[0][1] if reply else ():
            after = entry_id.decode()
            self._read(fields)
        return after

    async def settle_doubts(self, redis: RedisConnection) -> None:
        """Read the snapshots of workers with a gap again."""
        for worker_id in tuple(self._doubtful):
            await self._restore(redis, worker_id)

    def forget(self, worker_id: str) -> None:
        """Drop a dead worker, unless it is connected to this router."""
        if worker_id in self._outbox.workers:
            return
        self._foreign.discard(worker_id)
        self._doubtful.discard(worker_id)
        self._index.forget(worker_id)

    def adopted(self, worker_id: str) -> None:
        """A worker has joined this router, and reports its pages itself."""
        self._foreign.discard(worker_id)
        self._doubtful.discard(worker_id)

    def _read(self, fields: Fields) -> None:
        if fields.get(b"r") == self._router_id:
            return
        if b"m" in fields:
            message = self._checked(self._codec.decode_shared, fields[b"m"])
            if message is not None:
                self._hear(message)
            return
        worker_id = fields.get(b"w", b"").decode(errors="replace")
        if worker_id in self._outbox.workers:
            return
        events = self._checked(partial(self._codec.decode_pages, worker_id), fields.get(b"p", b""))
        if events is not None and not self._index.apply(worker_id, events):
            self._doubtful.add(worker_id)

    def _hear(self, message: AnyShared) -> None:
        if isinstance(message, SharedLeft):
            self.forget(message.worker)
        elif isinstance(message, SharedJoined):
            if message.worker.id not in self._outbox.workers:
                self._index.join(message.worker)
                self._foreign.add(message.worker.id)
        else:
            self._on_shared(message)

    async def _restore(self, redis: RedisConnection, worker_id: str) -> str:
        """Restore a snapshot. Returns the id of the stream entry from which on the worker's events are
        needed.
        """
        body = await redis.call("GET", self._names.snapshot(worker_id))
        read = partial(self._codec.decode_snapshot, worker_id)
        snapshot = None if body is None else self._checked(read, body)
        if snapshot is None:
            return FROM_THE_START
        if worker_id in self._foreign and self._is_news(worker_id, snapshot):
            keys = np.frombuffer(snapshot.keys, "<u8")
            values = np.frombuffer(snapshot.values, "<u8")
            self._index.restore(worker_id, snapshot.next_number, keys, values)
            self._doubtful.discard(worker_id)
        return snapshot.stream_id

    def _is_news(self, worker_id: str, snapshot: Snapshot) -> bool:
        known = self._index.next_number(worker_id)
        return known is None or known < snapshot.next_number

    def _forget_all_but(self, alive: set[str]) -> None:
        for worker_id in self._foreign - alive:
            self.forget(worker_id)

    def _checked(self, decoder: Callable[[bytes], _T], body: bytes) -> _T | None:
        try:
            return decoder(body)
        except WireError:
            self._counters["redis_malformed"] += 1
            return None


async def last_stream_id(redis: RedisConnection, names: Names) -> str:
    """Return the id of the newest stream entry."""
    words = ("XREVRANGE", names.events, "+", "-", "COUNT", 1)
    newest: list[tuple[bytes, Fields]] = await redis.call(*words)
    return newest[0][0].decode() if newest else FROM_THE_START


def _order(stream_id: str) -> tuple[int, ...]:
    return tuple(int(part) for part in stream_id.split("-"))
