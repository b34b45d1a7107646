"""The effect on requests when Redis or a router is hurt: real processes on this machine, under load.

Redis is killed and stays away, is stopped for 10 s, is set back to nothing and to its contents before the
load. Then one of two routers is killed, the other is killed, and one is stopped for 10 s; in a second cluster
the only router is killed. docs/benchmarks.md explains the figures.
"""

import asyncio
import os
import signal
from argparse import Namespace
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from time import perf_counter
from typing import Final, TypeAlias

from baton.bench.clusters import WatchedCluster, served_cluster
from baton.bench.faults.clients import Clients, Question, make_questions
from baton.bench.processes import stopped
from baton.bench.report import Report, Row, at_least, at_most, option, suite
from baton.cluster.redis_server import RedisServer
from baton.gateway.streams.routers import SILENT_S
from baton.messages.bounds import SHORT_KEY_BYTES
from baton.messages.status import RouterStatus, RoutingTimes
from baton.router.redis.client import REDIS_FAILURES, Names, RedisConnection, Reply

NUM_CLIENTS: Final = 6
NUM_WORKERS: Final = 4
MAX_TOKENS: Final = (12,)
OPTIONS: Final = ("--runtime", "local", "--router-policy", "cost", "--kv-cache-memory", "64MiB")
DUMP: Final = "dump.rdb"
LEAST_ANSWERED: Final = 100
LEAST_PAGES: Final = 50
ROUTING_MS: Final = 20.0
REWARMED_S: Final = 30.0
DISPATCHED_S: Final = 3.0
BLIND_PERCENT: Final = 1.0
STOPPED_S: Final = 10.0
AWAY_S: Final = 3.0
NEW_ROUTER_S: Final = 30.0
FIRST_TOKEN_S: Final = 2 * SILENT_S  # a gateway gives up a silent router after SILENT_S


class HurtRedis:
    """A redis-server, and the faults that happen to one."""

    def __init__(self, redis: RedisServer) -> None:
        self._redis = redis
        self._folder = Path(redis.url.removeprefix("unix://")).parent
        self._snapshot = b""

    @property
    def url(self) -> str:
        return self._redis.url

    async def remember(self) -> None:
        """Take the snapshot that `set_back` goes back to."""
        await self._ask("SAVE")
        self._snapshot = (self._folder / DUMP).read_bytes()
        (self._folder / DUMP).unlink()

    async def away(self) -> None:
        """Kill Redis, and start an empty one after AWAY_S."""
        await self._kill()
        await asyncio.sleep(AWAY_S)
        await self._redis.start()

    async def stopped(self) -> None:
        """Stop the process for STOPPED_S."""
        with stopped(self._redis.pid):
            await asyncio.sleep(STOPPED_S)

    async def restarted_empty(self) -> None:
        """Kill Redis and start an empty one at once."""
        await self._kill()
        await self._redis.start()

    async def set_back(self) -> None:
        """Kill Redis and start one with the snapshot."""
        await self._kill()
        (self._folder / DUMP).write_bytes(self._snapshot)
        await self._redis.start()
        (self._folder / DUMP).unlink()

    async def num_pages(self) -> int:
        """Return the size of the workers' snapshots in pages; 0 where Redis does not answer.

        The rest of a snapshot counts as a few pages. Snapshots of the same pages may differ by one page,
        because a stream id has no fixed length.
        """
        try:
            keys = await self._ask("KEYS", "baton:*:workers:*")
            return sum([int(await self._ask("STRLEN", key)) // SHORT_KEY_BYTES for key in keys])
        except REDIS_FAILURES:
            return 0

    async def _kill(self) -> None:
        os.kill(self._redis.pid, signal.SIGKILL)
        await self._redis.ended()

    async def _ask(self, *words: str | bytes) -> Reply:
        connection = RedisConnection(self.url, Names.of("none"))
        try:
            return await connection.call(*words)
        finally:
            await connection.aclose()


Fault: TypeAlias = Callable[[HurtRedis], Awaitable[None]]
FAULTS: Final[dict[str, Fault]] = {
    f"Redis killed, back in {AWAY_S:g} s": HurtRedis.away,
    f"Redis stopped {STOPPED_S:g} s": HurtRedis.stopped,
    "Redis restarted empty": HurtRedis.restarted_empty,
    "Redis set back": HurtRedis.set_back,
}


@suite(
    "router_faults",
    "Faults of Redis and routers under load",
    option("--rest", 8.0, "seconds of load around each fault"),
)
async def measure(options: Namespace, report: Report) -> None:
    """Hurt Redis, then routers."""
    report.tell("questions")
    questions, rest_s = make_questions(1, MAX_TOKENS), options.rest
    async with RedisServer() as server:
        redis = HurtRedis(server)
        async with routed_cluster(redis, num_routers=2) as cluster:
            await redis.remember()
            for name, fault in FAULTS.items():
                report.tell(name)
                report.rows += await hurt_redis(cluster, redis, questions, name, fault, rest_s)
            for name in ("one router of two killed", "the other router killed"):
                report.tell(name)
                report.rows += await kill_router(cluster, questions, name, rest_s)
            report.tell("one router of two stopped")
            report.rows += await stop_router(cluster, questions, rest_s)
        async with routed_cluster(redis, num_routers=1) as cluster:
            report.tell("the only router killed")
            report.rows += await kill_router(cluster, questions, "the only router killed", rest_s)


def routed_cluster(redis: HurtRedis, num_routers: int) -> AbstractAsyncContextManager[WatchedCluster]:
    """Run two prefill and two decode workers, with routers that share what they know through this Redis."""
    return served_cluster([*OPTIONS, "--redis", redis.url], routers=num_routers)


async def _routers(cluster: WatchedCluster) -> Sequence[RouterStatus]:
    status = await cluster.status()
    return status.routers if status is not None else ()


async def hurt_redis(
    cluster: WatchedCluster,
    redis: HurtRedis,
    questions: Sequence[Question],
    name: str,
    fault: Fault,
    rest_s: float,
) -> list[Row]:
    """Hurt Redis under load, and wait until it has as many pages again and every router uses it."""
    clients = Clients(cluster.url, questions, 0, NUM_CLIENTS)

    async def is_warm(least: int) -> bool:
        if await redis.num_pages() < least:
            return False
        return all(router.redis == "up" for router in await _routers(cluster))

    async with clients.asking(rest_s):  # routers and Redis know the pages of workers then
        num_pages, before = await redis.num_pages(), await _routers(cluster)
        await fault(redis)
        begin_s, least = perf_counter(), num_pages - NUM_WORKERS
        while not await is_warm(least) and perf_counter() - begin_s <= 2 * REWARMED_S:
            await asyncio.sleep(0.02)
        rewarmed_s = perf_counter() - begin_s
    routing = routed_between(before, await _routers(cluster))
    return [
        *_answer_rows(name, clients),
        at_most(f"{name}: routing p99", 1000 * routing.quantile(0.99), "ms", ROUTING_MS),
        at_least(f"{name}: pages before", num_pages, "", LEAST_PAGES),
        at_most(f"{name}: rewarmed after", rewarmed_s, "s", REWARMED_S),
    ]


async def kill_router(
    cluster: WatchedCluster, questions: Sequence[Question], name: str, rest_s: float
) -> list[Row]:
    """Kill the oldest router under load."""
    clients = Clients(cluster.url, questions, 0, NUM_CLIENTS)
    async with clients.asking(rest_s):
        routers = await _routers(cluster)
        before = {router.id for router in routers}
        os.kill(min(router.pid for router in routers), signal.SIGKILL)
        first_token_s = await clients.time_first_token()
        new_s = await cluster.seconds_until(
            lambda status: bool(_new_routers(status.routers, before)), 2 * NEW_ROUTER_S
        )
    after = await _routers(cluster)
    asked = [router for router in after if router.counters.get("decisions")]
    counted = asked if len(after) > 1 else _new_routers(asked, before)
    blind = max((router.blind_share for router in counted), default=0.0)
    num_decisions = sum(router.counters["decisions"] for router in asked)
    return [
        *_answer_rows(name, clients),
        at_most(f"{name}: next first token after", first_token_s, "s", DISPATCHED_S),
        at_most(f"{name}: new router after", new_s, "s", NEW_ROUTER_S),
        at_most(f"{name}: blind decisions", 100 * blind, "%", BLIND_PERCENT, f"of {num_decisions}"),
    ]


async def stop_router(cluster: WatchedCluster, questions: Sequence[Question], rest_s: float) -> list[Row]:
    """Stop one of two routers for STOPPED_S under load, and wait until both are there."""
    name = f"one router of two stopped {STOPPED_S:g} s"
    clients = Clients(cluster.url, questions, 0, NUM_CLIENTS)
    async with clients.asking(rest_s):
        with stopped(min(router.pid for router in await _routers(cluster))):
            await asyncio.sleep(STOPPED_S)
        back_s = await cluster.seconds_until(cluster.is_whole, 2 * NEW_ROUTER_S)
    return [
        *_answer_rows(name, clients),
        at_most(f"{name}: longest wait for a first token", max(clients.waits_s), "s", FIRST_TOKEN_S),
        at_most(f"{name}: both there after", back_s, "s", NEW_ROUTER_S),
    ]


def _new_routers(routers: Sequence[RouterStatus], before: set[str]) -> list[RouterStatus]:
    return [router for router in routers if router.id not in before]


def _answer_rows(name: str, clients: Clients) -> list[Row]:
    num_answered = clients.outcomes["answered"]
    return [at_least(f"{name}: requests", num_answered, "", LEAST_ANSWERED), *clients.answer_rows(name)]


def routed_between(before: Sequence[RouterStatus], after: Sequence[RouterStatus]) -> RoutingTimes:
    """Return the routing times of all routers between two moments."""
    earlier, between = {each.id: each.routing for each in before}, RoutingTimes()
    for router in after:
        between.add_since(earlier.get(router.id, RoutingTimes()), router.routing)
    return between
