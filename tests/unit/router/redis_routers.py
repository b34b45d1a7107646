"""What stands in for two routers: an index and a link each, over a Redis of their own."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import numpy as np

from baton.clock import SystemClock
from baton.messages.control import KvEventBatch
from baton.messages.workers import Tier, Worker
from baton.pages import KEY_BYTES
from baton.router.index.prefix_index import PrefixIndex
from baton.router.redis.link import RedisLink, RedisMatcher
from baton.router.redis.messages import AnyShared, Codec
from baton.router.redis.server import PrivateRedis
from tests.node_peers import id_of

CODEC = Codec(b"k" * 32)
RNG = np.random.default_rng(1)
CHAIN = RNG.bytes(40 * KEY_BYTES)
DEADLINE_S = 20.0
SEEN_S = 0.25  # by the other router, as a rule: a few milliseconds, and more where all cores are busy


class RouterStandIn:
    """Does with what its workers say what a router does."""

    def __init__(self, url: str, name: str, namespace: str = "f") -> None:
        self.index = PrefixIndex(SystemClock(), 100_000)
        self.heard: list[AnyShared] = []
        self.link = RedisLink(url, namespace, CODEC, id_of(name), self.index, self.heard.append)
        self._next: dict[str, int] = {}

    def join(self, worker: Worker) -> None:
        self.index.join(worker)
        self.link.joined(worker)

    def leave(self, worker: Worker) -> None:
        self.index.forget(worker.id)
        self.link.left(worker.id)

    def says(
        self,
        worker: Worker,
        keys: bytes,
        *,
        is_stored: bool = True,
        tier: Tier = Tier.DEVICE,
        afresh: bool = False,
    ) -> None:
        num_pages = len(keys) // KEY_BYTES
        first = self._next.get(worker.id, 0)
        self._next[worker.id] = first + num_pages
        events = KvEventBatch(
            first=first,
            keys=keys,
            pages=tuple(range(num_pages)) if is_stored else (-1,) * num_pages,
            generations=(first + 1,) * num_pages,
            tier=tier,
            is_afresh=afresh,
        )
        assert self.index.apply(worker.id, events)
        self.link.pages(worker.id, events)

    def held(self, worker: Worker, keys: bytes = CHAIN) -> int:
        slot = self.index.slot(worker.id)
        return 0 if slot is None else self.index.holdings(keys).num_pages(1 << slot)


@asynccontextmanager
async def running(*routers: RouterStandIn) -> AsyncIterator[None]:
    """Their links, all of them up at the start unless Redis is not there."""
    tasks = [asyncio.create_task(router.link.run()) for router in routers]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def until(condition: Callable[[], bool]) -> None:
    """TimeoutError when it does not come true."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.005)


Scene: TypeAlias = Callable[[PrivateRedis], Coroutine[Any, Any, None]]


def play(scene: Scene) -> None:
    async def with_redis() -> None:
        async with PrivateRedis() as redis:
            await scene(redis)

    asyncio.run(with_redis())


async def pages_in_redis(redis: PrivateRedis, keys: bytes = CHAIN) -> dict[str, int]:
    return await pages_at(redis.url, keys)


async def pages_at(url: str, keys: bytes = CHAIN) -> dict[str, int]:
    """How many of the chain's first pages each worker holds, as that Redis says."""
    matcher = RedisMatcher(url, "f")
    try:
        return await matcher.match(keys)
    finally:
        await matcher.aclose()


async def until_redis_says(redis: PrivateRedis, expected: dict[str, int]) -> None:
    async with asyncio.timeout(20):
        while (found := await pages_in_redis(redis)) != expected:
            assert found is not None
            await asyncio.sleep(0.01)
