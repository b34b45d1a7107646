"""A router's link to Redis: the prefix index that outlives this process, and messages between routers.

1. `run` opens two connections: one sends (router/redis/outbox.py), the other reads (`Feed`).
2. The router calls `joined`, `left`, `pages` and `share`, none of which waits or fails. Routing reads only
   the index of this process, and works the same without Redis.
3. A failure, or a reply that takes longer than a second, closes both connections. After a pause `run` opens
   them again, adds the workers of this router to Redis again, and writes new snapshots of the workers with
   lost events.

Without Redis, or with a Redis that hangs or lost its data, routers lack hints about each other's workers.
This process tries to connect every few seconds.

`Feed` reads other routers' workers, their pages, and the dispatches of those routers:

1. `settle`, every second: compare the known workers with those in Redis, and read the snapshot of each new
   worker that is not connected to this router, and of each worker with a gap in its events.
2. `read`: read the stream from the oldest of these snapshots on. Events that a snapshot includes are skipped
   by their numbers.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, Final, TypeAlias, TypeVar

from baton.errors import WireError
from baton.messages.workers import Worker
from baton.router.index.prefix_index import (
    IndexChange,
    IndexEvents,
    IndexForgotten,
    IndexJoined,
    IndexRestored,
    PrefixIndex,
)
from baton.router.redis.client import (
    REDIS_FAILURES,
    Command,
    Names,
    RedisConnection,
    Reply,
    is_full,
)
from baton.router.redis.messages import (
    MESSAGE,
    WORKER,
    AnyShared,
    Codec,
    Place,
    Snapshot,
    pages_of,
    snapshot_of,
)
from baton.router.redis.outbox import RedisOutbox, stream_budget

RENEW_S: Final = 2.0
PAUSE_S: Final = 0.05  # once all is sent: commands that arrive meanwhile share a round trip
SNAPSHOT_EVERY_S: Final = 1.0  # of each worker
SNAPSHOT_S: Final = 0.1  # the shortest time between two snapshots of any workers
SETTLE_S: Final = 1.0
LEAST_PAUSE_S: Final = 0.1
MOST_PAUSE_S: Final = 3.0
# A link that is down for so long is logged as a warning. A shorter failure costs nothing: on a machine that
# loads models, a reply may take longer than a second.
TOLD_AFTER_S: Final = 5.0
IDLE_S: Final = 0.1
CANCEL_AGAIN_S: Final = 0.1

ChangeIndex: TypeAlias = Callable[[IndexChange], bool]  # see `PrefixIndex.change`

logger = logging.getLogger(__name__)


class RedisLink:
    """A SharingLink through Redis. While the link is down, shared messages are dropped.

    `counters`: redis_failures, _gaps, _fenced, _refused, _overflows, _reliefs ...
    """

    def __init__(
        self,
        url: str,
        namespace: str,
        codec: Codec,
        router_id: str,
        index: PrefixIndex,
        change_index: ChangeIndex,
        on_shared: Callable[[AnyShared], None],
    ) -> None:
        """namespace: of the routers that share. change_index: makes all changes of the index.

        Raises ConfigError for an invalid url.
        """
        self.counters: Counter[str] = Counter()
        self.is_up = False
        self.has_learned = asyncio.Event()  # set when the index of Redis was loaded for the first time
        self._url = url
        self._names = Names.of(namespace)
        self._outbox = RedisOutbox(self._names, codec, router_id, index, self.counters)
        self._feed = Feed(self._outbox, change_index, on_shared)
        self.left, self.pages, self.share = self._outbox.left, self._outbox.pages, self._outbox.share
        self._num_full = 0  # times in a row that Redis was out of memory before all was sent
        RedisConnection(url, self._names)  # raises ConfigError for an invalid url

    def joined(self, worker: Worker) -> None:
        self._outbox.joined(worker)
        self._feed.unfollow(worker.id)

    @property
    def num_unsent(self) -> int:
        """The number of unsent commands and stale workers, plus 1 when a snapshot is due."""
        return len(self._outbox) + (self._outbox.next_to_snapshot() is not None)

    async def run(self) -> None:
        """Keep the link up until cancelled."""
        pause_s, loop = LEAST_PAUSE_S, asyncio.get_running_loop()
        well_s, is_told = loop.time(), False
        while True:
            began_s = loop.time()
            try:
                await _until_one_fails(self._stay_connected())
            except Exception as error:  # junk in Redis must not end the link for good
                # Keys of another type in Redis make every link fail right after it came up, so only a longer
                # life resets the pause.
                was_well = self.is_up and loop.time() - began_s > MOST_PAUSE_S
                pause_s = LEAST_PAUSE_S if was_well else min(2 * pause_s, MOST_PAUSE_S)
                if was_well:
                    well_s, is_told = loop.time(), False
                is_news = not is_told and loop.time() - well_s >= TOLD_AFTER_S
                self._failed(error, logging.WARNING if is_news else logging.DEBUG)
                is_told = is_told or is_news
            finally:
                self.is_up = False
                self._outbox.close()
            await asyncio.sleep(pause_s)

    def _failed(self, error: Exception, level: int) -> None:
        self.counters["redis_failures"] += 1
        self._num_full = self._num_full + 1 if is_full(error) else 0
        unforeseen = None if isinstance(error, REDIS_FAILURES) else error
        logger.log(level, "the link to Redis is down: %s", error, exc_info=unforeseen)

    async def _stay_connected(self) -> None:
        async with AsyncExitStack() as stack:
            writer, reader = (RedisConnection(self._url, self._names) for _ in range(2))
            stack.push_async_callback(writer.aclose)
            stack.push_async_callback(reader.aclose)
            await writer.load()
            self._outbox.budget_bytes = stream_budget(await writer.max_memory_bytes())
            await self._relieve(writer)
            await self._rejoin(writer)
            after = await self._feed.begin(reader)
            self.is_up = True
            self.has_learned.set()
            logger.info("the link to Redis is up")
            await _until_one_fails(self._write(writer), self._read(reader, after))

    async def _relieve(self, writer: RedisConnection) -> None:
        """Free memory of a full Redis: old events and snapshots first, then everything; all is sent again."""
        if self._num_full:
            self.counters["redis_reliefs"] += 1
            for reply in await writer.run_all([self._outbox.relieve(of_all=self._num_full > 1)]):
                self._check(reply)

    async def _rejoin(self, writer: RedisConnection) -> None:
        self._outbox.open()
        workers = list(self._outbox.workers.values())
        replies = await writer.run_all(map(self._outbox.join, workers))
        for worker, reply in zip(workers, replies, strict=True):
            self._check(reply)
            self._outbox.rejoined(worker, int(reply))

    async def _write(self, writer: RedisConnection) -> None:
        loop = asyncio.get_running_loop()
        renew_at_s = snapshot_at_s = loop.time()
        while True:
            if self._outbox.has_stale:
                await self._write_snapshot(writer)
            if batch := self._outbox.take_batch():
                await self._send(writer, batch)
                if not len(self._outbox):
                    await asyncio.sleep(PAUSE_S)
            if loop.time() >= renew_at_s:
                renew_at_s = loop.time() + RENEW_S
                await self._renew(writer)
            if loop.time() >= snapshot_at_s:
                num_workers = max(1, len(self._outbox.workers))
                snapshot_at_s = loop.time() + max(SNAPSHOT_S, SNAPSHOT_EVERY_S / num_workers)
                await self._write_snapshot(writer)
            if not self.num_unsent:
                self._num_full = 0
            if not len(self._outbox):
                self._outbox.has_unsent.clear()
                await self._wait_for_news()

    async def _send(self, writer: RedisConnection, commands: Sequence[Command]) -> None:
        for command, reply in zip(commands, await writer.run_all(commands), strict=True):
            self._outbox.answered(command, reply)
            self._check(reply)

    def _check(self, reply: Reply) -> None:
        """Raise the error of a refused command. Everything is sent again later."""
        if isinstance(reply, Exception):
            self.counters["redis_refused"] += 1
            raise reply

    async def _wait_for_news(self) -> None:
        try:
            async with asyncio.timeout(IDLE_S):
                await self._outbox.has_unsent.wait()
        except TimeoutError:
            return  # leases may be due

    async def _renew(self, writer: RedisConnection) -> None:
        (reply,) = await writer.run_all([self._outbox.renew()])
        self._check(reply)
        for worker_id in reply:  # it left another router, or Redis lost its data
            self._outbox.mark_stale(worker_id.decode(errors="replace"))

    async def _write_snapshot(self, writer: RedisConnection) -> None:
        worker_id = self._outbox.next_to_snapshot()
        if worker_id is not None:
            stream_id = await last_stream_id(writer, self._names)
            await self._send(writer, self._outbox.snapshot(worker_id, stream_id))

    async def _read(self, reader: RedisConnection, after: str) -> None:
        loop = asyncio.get_running_loop()
        settle_at_s = loop.time()
        while True:
            after = await self._feed.read(reader, after)
            if loop.time() >= settle_at_s:
                settle_at_s = loop.time() + SETTLE_S
                after = await self._feed.settle(reader, after)


async def _until_one_fails(*endless: Coroutine[Any, Any, None]) -> None:
    """Run coroutines until one raises, then cancel the others and raise its error.

    A TaskGroup does not work here: Python 3.11's leaves this task half cancelled, and redis-py now and then
    swallows a cancellation, which must be repeated.
    """
    tasks = [asyncio.create_task(each) for each in endless]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        await _end(tasks)


async def _end(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel tasks until all have ended. A cancellation of this coroutine waits for them too."""
    again: asyncio.CancelledError | None = None
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        try:
            await asyncio.wait(pending, timeout=CANCEL_AGAIN_S)
        except asyncio.CancelledError as error:
            again = error
    for task in tasks:
        if not task.cancelled():
            task.exception()  # retrieved, so that asyncio does not log it
    if again is not None:
        raise again


BLOCK_MS: Final = 200
MAX_ENTRIES: Final = 64  # of one read
FROM_THE_START: Final = "0-0"

_T = TypeVar("_T")
Fields: TypeAlias = Mapping[bytes, bytes]


class Feed:
    """Applies the events and messages of other routers."""

    def __init__(
        self,
        outbox: RedisOutbox,
        change_index: ChangeIndex,
        on_shared: Callable[[AnyShared], None],
    ) -> None:
        """outbox: of the same router."""
        self._outbox = outbox
        self._names, self._codec, self._index = outbox.names, outbox.codec, outbox.index
        self._change_index = change_index
        self._on_shared = on_shared
        self._foreign: set[str] = set()  # workers that are not connected to this router
        # Foreign workers with unknown pages: new workers, and workers with a gap in their events.
        self._doubtful: set[str] = set()
        self._unreadable: set[str] = set()  # ids in Redis without a description of this cluster

    async def read(self, redis: RedisConnection, after: str) -> str:
        """Apply the next entries. Returns the id of the last one; `after` if none has come for BLOCK_MS."""
        limits = ("COUNT", MAX_ENTRIES, "BLOCK", BLOCK_MS)
        reply = await redis.call("XREAD", *limits, "STREAMS", self._names.events, after)
        for entry_id, fields in reply[0][1] if reply else ():
            after = entry_id.decode()
            self._read(fields)
        return after

    async def begin(self, redis: RedisConnection) -> str:
        """Follow the workers in Redis over a new connection. Returns the id of the entry to read on from.

        Events may have been missed since the last connection: the snapshots of all foreign workers are read.
        """
        after = await last_stream_id(redis, self._names)
        for worker_id in tuple(self._foreign):
            after = min(after, await self._restore(redis, worker_id), key=_order)
        return await self.settle(redis, after)

    async def settle(self, redis: RedisConnection, after: str) -> str:
        """Compare the foreign workers with those in Redis, and read the snapshots of doubtful ones.

        after: the entry that was read last. Returns the one to read on from, an earlier one where a snapshot
        lacks events that were read already.
        """
        ids: list[bytes] = await redis.call("HKEYS", self._names.workers)
        alive = {worker_id.decode(errors="replace") for worker_id in ids}
        for worker_id in self._foreign - alive:
            self.unfollow(worker_id)
            self._change_index(IndexForgotten(worker=worker_id))
        self._unreadable &= alive
        await self._meet(redis, alive - self._foreign - self._unreadable)
        for worker_id in tuple(self._doubtful):
            if self._index.next_number(worker_id) is not None:
                self._doubtful.discard(worker_id)  # the worker has reported all its pages since
                continue
            seen = await self._restore(redis, worker_id)
            if worker_id not in self._doubtful:
                after = min(after, seen, key=_order)
        return after

    async def _meet(self, redis: RedisConnection, ids: set[str]) -> None:
        """Read the descriptions of workers that are not known yet."""
        if not (unknown := sorted(ids - self._outbox.workers.keys())):
            return
        bodies: list[bytes | None] = await redis.call("HMGET", self._names.workers, *unknown)
        for worker_id, body in zip(unknown, bodies, strict=True):
            if body is None:  # it has left meanwhile
                continue
            worker = self._checked(WORKER, body)
            if worker is None or worker.id != worker_id:
                self._unreadable.add(worker_id)
            elif worker_id not in self._outbox.workers:
                self._change_index(IndexJoined(worker=worker))
                self._foreign.add(worker_id)
                self._doubtful.add(worker_id)

    def unfollow(self, worker_id: str) -> None:
        """Stop following a worker: it has joined this router, or has left Redis."""
        self._foreign.discard(worker_id)
        self._doubtful.discard(worker_id)

    def _read(self, fields: Fields) -> None:
        if fields.get(b"r") == self._outbox.router_id.encode():
            return
        if b"m" in fields:
            message = self._checked(MESSAGE, fields[b"m"])
            if message is not None:
                self._on_shared(message)
            return
        worker_id = fields.get(b"w", b"").decode(errors="replace")
        if worker_id not in self._foreign:
            return  # `settle` reads these events again once it has met the worker
        events = self._checked(pages_of(worker_id), fields.get(b"p", b""))
        if events is None:
            return
        if not self._change_index(IndexEvents(worker=worker_id, events=events)):
            self._doubtful.add(worker_id)

    async def _restore(self, redis: RedisConnection, worker_id: str) -> str:
        """Restore a snapshot. Returns the id of the stream entry from which on the worker's events are
        needed.
        """
        body = await redis.call("GET", self._names.snapshot(worker_id))
        snapshot = None if body is None else self._checked(snapshot_of(worker_id), body)
        if snapshot is None:
            return FROM_THE_START
        if worker_id in self._foreign and self._is_news(worker_id, snapshot):
            number, pages = snapshot.next_number, snapshot.pages
            self._change_index(IndexRestored(worker=worker_id, next_number=number, pages=pages))
            self._doubtful.discard(worker_id)
        return snapshot.stream_id

    def _is_news(self, worker_id: str, snapshot: Snapshot) -> bool:
        known = self._index.next_number(worker_id)
        return known is None or known < snapshot.next_number

    def _checked(self, place: Place[_T], sealed: bytes) -> _T | None:
        try:
            return self._codec.decode(place, sealed)
        except WireError:
            self._outbox.counters["redis_malformed"] += 1
            return None


async def last_stream_id(redis: RedisConnection, names: Names) -> str:
    """Return the id of the newest stream entry."""
    words = ("XREVRANGE", names.events, "+", "-", "COUNT", 1)
    newest: list[tuple[bytes, Fields]] = await redis.call(*words)
    return newest[0][0].decode() if newest else FROM_THE_START


def _order(stream_id: str) -> tuple[int, ...]:
    return tuple(int(part) for part in stream_id.split("-"))
