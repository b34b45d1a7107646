"""A router's link to Redis: the prefix index that outlives this process, and what other routers do.

1. `run` connects, twice: one connection tells (router/redis/outbox.py), the other follows the stream
   (router/redis/feed.py).
2. The router calls `joined`, `left`, `pages` and `share`, none of which waits: routing reads the replica in
   this process alone, and goes on the same when there is no Redis.
3. Whatever fails, or takes longer than a second, ends both connections. After a pause they are made anew:
   Redis is told of the workers that are connected here, and afresh what it has missed or lost; then 1.

A Redis that is gone, hung, empty or old therefore costs hints of what other routers' workers hold, until it
is back; and it costs this process nothing but a try every few seconds.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from typing import Any, Final

from baton.messages.control import KvEventBatch
from baton.messages.workers import Worker
from baton.router.index.prefix_index import PrefixIndex
from baton.router.index.prompt_keys import first_halves
from baton.router.redis.client import REDIS_FAILURES, Command, Names, RedisConnection, Reply, is_full
from baton.router.redis.feed import Feed, last_stream_id
from baton.router.redis.messages import AnyShared, Codec
from baton.router.redis.outbox import RedisBudget, RedisOutbox

RENEW_S: Final = 2.0
PAUSE_S: Final = 0.05  # once all is told: what comes meanwhile goes together, for the price of one
SNAPSHOT_EVERY_S: Final = 1.0  # of each worker,
SNAPSHOT_S: Final = 0.1  # where that is no more often than this of any
SETTLE_S: Final = 1.0
SWEPT_PAGES: Final = 500  # at each renewal
LEAST_PAUSE_S: Final = 0.1
MOST_PAUSE_S: Final = 3.0
IDLE_S: Final = 0.1
CANCEL_AGAIN_S: Final = 0.1

logger = logging.getLogger(__name__)


class RedisLink:
    """`counters`: redis_ and failures, gaps, fenced, refused, overflows, reliefs, malformed."""

    def __init__(
        self,
        url: str,
        namespace: str,
        codec: Codec,
        router_id: str,
        index: PrefixIndex,
        on_shared: Callable[[AnyShared], None],
    ) -> None:
        """namespace: of those that may share pages, as the model's fingerprint. ConfigError: no such url."""
        self.counters: Counter[str] = Counter()
        self.is_up = False
        self.has_learned = asyncio.Event()  # what Redis knew when this was connected for the first time
        self._url = url
        self._names = Names.of(namespace)
        self._index = index
        self._outbox = RedisOutbox(self._names, codec, router_id, index, self.counters)
        self._feed = Feed(self._outbox, codec, router_id, index, self.counters, on_shared)
        self._publisher = asyncio.Event()
        self._cursor = 0
        self._num_full = 0  # times in a row that Redis had no memory, before all was told
        RedisConnection(url, self._names)

    def joined(self, worker: Worker) -> None:
        """After the index was told."""
        self._outbox.joined(worker)
        self._feed.adopted(worker.id)
        self._publisher.set()

    def left(self, worker_id: str) -> None:
        self._outbox.left(worker_id)
        self._publisher.set()

    def pages(self, worker_id: str, events: KvEventBatch) -> None:
        """After they were applied to the index."""
        self._outbox.pages(worker_id, events)
        self._publisher.set()

    def share(self, message: AnyShared) -> None:
        """Tell other routers; they are told nothing while the link is down."""
        self._outbox.share(message)
        self._publisher.set()

    @property
    def num_untold(self) -> int:
        """Commands and stale workers that Redis has not been told of, and workers without a new snapshot."""
        return len(self._outbox) + (self._outbox.next_to_snapshot() is not None)

    async def run(self) -> None:
        """Until cancelled."""
        pause_s, loop = LEAST_PAUSE_S, asyncio.get_running_loop()
        while True:
            began_s = loop.time()
            try:
                await _until_one_fails(self._stay_connected())
            except Exception as error:  # whatever others wrote there, it does not end this for good
                # Where our keys hold something else, each link comes up, to fail at once.
                was_well = self.is_up and loop.time() - began_s > MOST_PAUSE_S
                pause_s = LEAST_PAUSE_S if was_well else min(2 * pause_s, MOST_PAUSE_S)
                self._failed(error)
            finally:
                self.is_up = False
                self._outbox.close()
            await asyncio.sleep(pause_s)

    def _failed(self, error: Exception) -> None:
        self.counters["redis_failures"] += 1
        self._num_full = self._num_full + 1 if is_full(error) else 0
        level = logging.WARNING if self.is_up else logging.DEBUG
        unforeseen = None if isinstance(error, REDIS_FAILURES) else error
        logger.log(level, "the link to Redis is down", extra={"error": str(error)}, exc_info=unforeseen)

    async def _stay_connected(self) -> None:
        async with AsyncExitStack() as stack:
            teller, follower = (RedisConnection(self._url, self._names) for _ in range(2))
            stack.push_async_callback(teller.aclose)
            stack.push_async_callback(follower.aclose)
            await teller.load()
            self._outbox.room = RedisBudget.of(await teller.max_memory_bytes())
            await self._relieve(teller)
            await self._rejoin(teller)
            after = await self._feed.learn(follower, self._names.events, self._names.workers)
            self.is_up = True
            self.has_learned.set()
            logger.info("the link to Redis is up")
            await _until_one_fails(self._tell(teller), self._follow(follower, after))

    async def _relieve(self, teller: RedisConnection) -> None:
        """Of what it has no memory for: the oldest events and snapshots, then all, to be told again."""
        if self._num_full:
            self.counters["redis_reliefs"] += 1
            for reply in await teller.run_all([self._outbox.relieve(of_all=self._num_full > 1)]):
                self._check(reply)

    async def _rejoin(self, teller: RedisConnection) -> None:
        self._outbox.open()
        workers = list(self._outbox.workers.values())
        replies = await teller.run_all(map(self._outbox.join, workers))
        for worker, reply in zip(workers, replies, strict=True):
            self._check(reply)
            self._outbox.rejoined(worker, int(reply))

    async def _tell(self, teller: RedisConnection) -> None:
        loop = asyncio.get_running_loop()
        renew_at_s = snapshot_at_s = loop.time()
        while True:
            batch = self._outbox.take_batch()
            if batch:
                await self._send(teller, batch)
                if not len(self._outbox):
                    await asyncio.sleep(PAUSE_S)
            if loop.time() >= renew_at_s:
                renew_at_s = loop.time() + RENEW_S
                await self._renew(teller)
            if loop.time() >= snapshot_at_s:
                num_workers = max(1, len(self._outbox.workers))
                snapshot_at_s = loop.time() + max(SNAPSHOT_S, SNAPSHOT_EVERY_S / num_workers)
                await self._write_snapshot(teller)
            if not self.num_untold:
                self._num_full = 0
            if not len(self._outbox):
                self._publisher.clear()
                await self._wait_for_news()

    async def _send(self, teller: RedisConnection, batch: list[Command]) -> None:
        for command, reply in zip(batch, await teller.run_all(batch), strict=True):
            self._outbox.answered(command, reply)
            self._check(reply)

    def _check(self, reply: Reply) -> None:
        """Raise what Redis has refused: it is out of memory, or not what it was. Later it is told all."""
        if isinstance(reply, Exception):
            self.counters["redis_refused"] += 1
            raise reply

    async def _wait_for_news(self) -> None:
        try:
            async with asyncio.timeout(IDLE_S):
                await self._publisher.wait()
        except TimeoutError:
            return  # there may be a lease to renew

    async def _renew(self, teller: RedisConnection) -> None:
        sweep = Command("sweep", (self._cursor, SWEPT_PAGES))
        dead, cursor = await teller.run_all([self._outbox.renew(), sweep])
        for reply in (dead, cursor):
            self._check(reply)
        self._cursor = int(cursor)
        for worker_id in dead:
            self._feed.forget(worker_id.decode(errors="replace"))
            self._outbox.buried(worker_id.decode(errors="replace"))

    async def _write_snapshot(self, teller: RedisConnection) -> None:
        worker_id = self._outbox.next_to_snapshot()
        if worker_id is None:
            return
        stream_id = await last_stream_id(teller, self._names.events)
        command = self._outbox.snapshot(worker_id, stream_id)
        if command is not None:
            await self._send(teller, [command])

    async def _follow(self, follower: RedisConnection, after: str) -> None:
        loop = asyncio.get_running_loop()
        settle_at_s = loop.time()
        while True:
            after = await self._feed.follow(follower, self._names.events, after)
            if loop.time() >= settle_at_s:
                settle_at_s = loop.time() + SETTLE_S
                await self._feed.settle_doubts(follower)


async def _until_one_fails(*endless: Coroutine[Any, Any, None]) -> None:
    """Raises what it failed with.

    A TaskGroup would not do: Python 3.11's leaves this task half cancelled, and redis-py now and then
    swallows a cancellation, so that it has to be said again.
    """
    tasks = [asyncio.create_task(each) for each in endless]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        await _end(tasks)


async def _end(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Whoever cancels this meanwhile waits as well: none of them may be left behind."""
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
            task.exception()  # what they ended with is nobody's news
    if again is not None:
        raise again


class RedisMatcher:
    """Asks Redis itself, one round trip a prompt: for a process that keeps no replica."""

    def __init__(self, url: str, namespace: str) -> None:
        self._redis = RedisConnection(url, Names.of(namespace))
        self._is_loaded = False

    async def match(self, keys: bytes) -> dict[str, int]:
        """keys: 16 bytes a page. How many first pages each worker holds, by its id; none where that is 0.

        RedisError, OSError or TimeoutError within a second when Redis does not answer.
        """
        if not self._is_loaded:
            await self._redis.load()
            self._is_loaded = True
        reply = await self._redis.run("match", first_halves(keys))
        return {worker.decode(): int(length) for worker, length in zip(reply[::2], reply[1::2], strict=True)}

    async def aclose(self) -> None:
        await self._redis.aclose()
