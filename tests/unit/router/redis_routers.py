"""Stand-ins for routers that share through a real redis-server, and a reader of what Redis holds."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import numpy as np

from baton.clock import ManualClock, SystemClock
from baton.cluster.redis_server import RedisServer
from baton.messages.bounds import SHORT_KEY_BYTES
from baton.messages.control import KvEventBatch
from baton.messages.workers import Tier, Worker
from baton.router.index.prefix_index import PrefixIndex
from baton.router.redis.client import REDIS_FAILURES, Names, RedisConnection
from baton.router.redis.link import Feed, RedisLink, last_stream_id
from baton.router.redis.messages import AnyShared, Codec
from baton.router.redis.outbox import RedisOutbox
from tests.node_peers import id_of
from tests.waiting import until

CODEC = Codec(b"k" * 32)
NAMES = Names.of("f")
RNG = np.random.default_rng(1)
CHAIN = RNG.bytes(40 * SHORT_KEY_BYTES)
DEADLINE_S = 20.0
SEEN_S = 0.25  # a message reaches the other router in a few milliseconds, later where all cores are busy


class RouterStandIn:
    """An index and a link, which do with workers' events what a router does."""

    def __init__(self, url: str, name: str, namespace: str = "f") -> None:
        self.index = PrefixIndex(SystemClock(), 100_000)
        self.heard: list[AnyShared] = []
        index = self.index
        self.link = RedisLink(url, namespace, CODEC, id_of(name), index, index.change, self.heard.append)
        self._next: dict[str, int] = {}

    def join(self, worker: Worker) -> None:
        self.index.join(worker)
        self.link.joined(worker)

    def leave(self, worker: Worker) -> None:
        self.index.forget(worker.id)
        self.link.left(worker.id)

    def report(
        self,
        worker: Worker,
        keys: bytes,
        tier: Tier | None = Tier.DEVICE,
        *,
        is_snapshot: bool = False,
    ) -> None:
        """Take the worker's report that these pages are in this tier now."""
        first = self._next.get(worker.id, 0)
        events = KvEventBatch(first=first, keys=keys, tier=tier, is_snapshot=is_snapshot)
        self._next[worker.id] = first + events.num_changes
        assert self.index.apply(worker.id, events)
        self.link.pages(worker.id, events)

    def held(self, worker: Worker, keys: bytes = CHAIN) -> int:
        return num_held(self.index, worker.id, keys)


def num_held(index: PrefixIndex, worker_id: str, keys: bytes = CHAIN) -> int:
    """The number of the chain's first pages that a worker holds, as this index knows."""
    slot = index.slot(worker_id)
    return 0 if slot is None else index.holdings(keys).num_pages(1 << slot)


@asynccontextmanager
async def running(*routers: RouterStandIn) -> AsyncIterator[None]:
    """Run the links of these routers."""
    tasks = [asyncio.create_task(router.link.run()) for router in routers]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def linked(
    num_routers: int, max_memory_bytes: int = 2**30
) -> AsyncIterator[tuple[RedisServer, list[RouterStandIn]]]:
    """A Redis, and routers with links to it that are up."""
    async with RedisServer(max_memory_bytes) as redis:
        routers = [RouterStandIn(redis.url, f"router {number}") for number in range(num_routers)]
        async with running(*routers):
            await until(lambda: all(router.link.is_up for router in routers))
            yield redis, routers


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[RedisConnection]:
    """A connection for a test's own commands."""
    connection = RedisConnection(url, NAMES)
    try:
        yield connection
    finally:
        await connection.aclose()


async def known_from(url: str, keys: bytes = CHAIN) -> dict[str, int]:
    """Return what a new router learns from Redis: worker id -> first pages of the chain, without zeros."""
    index = PrefixIndex(ManualClock(), 100_000)
    outbox = RedisOutbox(NAMES, CODEC, id_of("reader"), index, Counter())
    feed = Feed(outbox, index.change, lambda message: None)
    async with connected(url) as connection:
        await read_all(feed, connection, await feed.begin(connection))
        workers: list[bytes] = await connection.call("HKEYS", NAMES.workers)
    held = {worker.decode(): num_held(index, worker.decode(), keys) for worker in workers}
    return {worker_id: num_pages for worker_id, num_pages in held.items() if num_pages}


async def read_all(feed: Feed, connection: RedisConnection, after: str) -> None:
    """Read the stream to its end, and settle the doubts of the reader."""
    for _ in range(2):  # to settle a doubt, entries are read again
        while after != await last_stream_id(connection, NAMES):
            after = await feed.read(connection, after)
        after = await feed.settle(connection, after)


async def until_known(redis: RedisServer, expected: dict[str, int]) -> None:
    """Wait until a new router would learn this from Redis. On a busy machine a reply may take too long."""
    known: dict[str, int] | None = None
    async with asyncio.timeout(DEADLINE_S):
        while known != expected:
            with suppress(*REDIS_FAILURES):
                known = await known_from(redis.url)
            await asyncio.sleep(0.01)
