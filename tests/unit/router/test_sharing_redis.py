"""Two routers over a real redis-server see each other's dispatches."""

import asyncio
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from redis.asyncio import Redis

from baton.clock import SystemClock
from baton.cluster.redis_server import RedisServer
from baton.config.router import RouterConfig
from baton.messages.bounds import SHORT_KEY_BYTES
from baton.messages.control import (
    Ended,
    Heartbeat,
    KvEventBatch,
    KvEventsWanted,
    Reachable,
    Routed,
    Started,
    Submit,
)
from baton.messages.workers import Load
from baton.request import Request, TokenIds
from baton.router.redis.link import PAUSE_S, SNAPSHOT_EVERY_S, RedisLink
from baton.router.router import Router
from baton.router.sliced_work import PromptKeys, family_of
from tests.event_loop import on_loop
from tests.needs import needs_redis
from tests.node_peers import TestPeer, a_worker, id_of, name_of
from tests.unit.router.redis_routers import CHAIN, CODEC, SEEN_S, RouterStandIn, running
from tests.waiting import until

pytestmark = [
    needs_redis,
    pytest.mark.usefixtures("patient_links"),
]

WORKERS = {
    name: a_worker(name, num_pages=16_384, max_num_seqs=256, max_model_len=65_536)
    for name in ("p0", "p1", "d0")
}
IDS = tuple(worker.id for worker in WORKERS.values())
LONG = 60_000  # tokens, that take longer than a message of a slow machine


class Linked:
    """A router with a gateway of its own, to which all workers are connected."""

    def __init__(self, name: str, redis: RedisServer) -> None:
        self.router = Router(RouterConfig(seed=ord(name)), SystemClock(), id_of(name))
        router = self.router
        index = router.cluster_state.index
        self.link = RedisLink(redis.url, "f", CODEC, id_of(name), index, router.change_index, router.heard)
        router.link(self.link)
        self.gateway = TestPeer.gateway(self.router, f"gateway of {name}")
        self.workers = {key: TestPeer.worker(self.router, worker) for key, worker in WORKERS.items()}
        for peer in (self.gateway, *self.workers.values()):
            peer.say(Reachable(workers=IDS))
        for peer in self.workers.values():
            peer.take(KvEventsWanted)
            peer.say(KvEventBatch(first=0, keys=b"", is_snapshot=True))
        running = tuple((id_of(f"running {number}"), 0) for number in range(64))
        self.workers["d0"].say(Heartbeat(load=Load(), attempts=running))  # so that it computes no prompt

    def submit(self, number: int, num_tokens: int = 8000) -> str:
        """Submit a prompt unlike all others, and return its prefill worker."""
        self.gateway.received.clear()
        request = Request(
            request_id=id_of(f"r{number}"), token_ids=TokenIds.of(range(number, number + num_tokens))
        )
        self.gateway.say(Submit(request=request))
        return self.gateway.only(Routed).prefill


@asynccontextmanager
async def two_routers(redis: RedisServer) -> AsyncIterator[tuple[Linked, Linked]]:
    both = Linked("a", redis), Linked("b", redis)
    links = [asyncio.create_task(each.link.run()) for each in both]
    try:
        await until(lambda: all(each.link.is_up for each in both))
        yield both
    finally:
        for task in links:
            task.cancel()
        await asyncio.gather(*links, return_exceptions=True)


@on_loop
async def test_prompts_of_two_routers_go_to_different_workers() -> None:
    async with RedisServer() as redis, two_routers(redis) as (one, other):
        for number in range(2):  # more would wait at the routers
            first = one.submit(10_000 * (2 * number), LONG)
            await until(lambda number=number: len(other.router.in_flight) == 2 * number + 1)  # type: ignore[misc]
            second = other.submit(10_000 * (2 * number + 1), LONG)
            assert {first, second} == {id_of("p0"), id_of("p1")}
            await until(lambda number=number: len(one.router.in_flight) == 2 * number + 2)  # type: ignore[misc]
        for each in (one, other):
            each.router.in_flight.check_integrity()


@on_loop
async def test_first_token_and_end_soon_reach_the_other_router() -> None:
    async with RedisServer() as redis, two_routers(redis) as (one, other):
        took_s, in_flight = [], other.router.in_flight
        for number in range(9):
            key = (id_of(f"r{number}"), 0)
            begun_s = time.monotonic()
            prefill = one.submit(number)
            await until(lambda key=key: in_flight.is_anothers(key))  # type: ignore[misc]
            took_s.append(time.monotonic() - begun_s)
            assert in_flight.account(prefill).num_computing == 1
            one.gateway.say(Started(attempts=(key,)))
            await until(lambda prefill=prefill: not in_flight.account(prefill).num_computing)  # type: ignore[misc]
            one.gateway.say(Ended(attempts=(key,)))
            await until(lambda: not len(in_flight))
        assert statistics.median(took_s) < SEEN_S
        in_flight.check_integrity()


@on_loop
async def test_other_router_expects_the_pages_of_a_dispatched_prompt() -> None:
    async with RedisServer() as redis, two_routers(redis) as (one, other):
        prefill = one.submit(7)
        await until(lambda: len(other.router.in_flight) == 1)
        request = Request(request_id=id_of("sibling"), token_ids=TokenIds.of(range(7, 7 + 8200)))
        keys = PromptKeys().keys(family_of(WORKERS["p0"]), request)
        index = other.router.cluster_state.index
        held = {
            name: index.holdings(keys).num_pages(1 << (index.slot(id_of(name)) or 0)) for name in ("p0", "p1")
        }
        assert held[name_of(prefill)] == 500 and sum(held.values()) == 500


@on_loop
async def test_changes_share_round_trips_and_snapshots() -> None:
    """A hundred changes in a third of a second cost Redis few reads and few snapshots."""
    async with RedisServer() as redis:
        client = Redis.from_url(redis.url)
        one = RouterStandIn(redis.url, "a")
        async with running(one):
            await until(lambda: one.link.is_up)
            one.join(WORKERS["p0"])
            await until(lambda: not one.link.num_unsent)
            before, begun_s = await counts(client), time.monotonic()
            for number in range(100):
                one.report(
                    WORKERS["p0"],
                    CHAIN[number % 40 * SHORT_KEY_BYTES :][:SHORT_KEY_BYTES],
                    is_snapshot=number == 0,
                )
                await asyncio.sleep(0.003)
            await until(lambda: not one.link.num_unsent)
            grown, took_s = await counts(client), time.monotonic() - begun_s
            grown.subtract(before)
        await client.aclose()
        assert grown["evalsha"] >= 100
        assert grown["reads"] <= 40 + 3 * took_s / PAUSE_S
        assert 1 <= grown["set"] <= 2 + took_s / SNAPSHOT_EVERY_S


async def counts(client: Redis) -> Counter[str]:
    """The reads from sockets, and the calls of two commands."""
    stats, commands = await client.info("stats"), await client.info("commandstats")
    found = Counter({"reads": int(stats["total_reads_processed"])})
    for name in ("evalsha", "set"):
        found[name] = int(commands.get(f"cmdstat_{name}", {}).get("calls", 0))
    return found
