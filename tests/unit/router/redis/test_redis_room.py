"""A Redis with little memory is not filled up, and one that is full, of whatever, is soon in use again."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from itertools import count
from random import Random

import pytest
from redis.exceptions import ResponseError

from baton.messages.bounds import MAX_PULLED_PAGES
from baton.router.index.prompt_keys import SHORT_KEY_BYTES
from baton.router.redis.client import Names, RedisConnection, is_full
from baton.router.redis.messages import SharedDispatch
from baton.router.redis.outbox import MAX_PAGES, MAX_STREAM_BYTES, PAGE_BYTES, STREAM_ENTRIES, RedisBudget
from baton.router.redis.server import PrivateRedis, find_program
from tests.node_peers import a_worker, id_of
from tests.unit.router.redis_routers import CHAIN, CODEC, RouterStandIn, running, until, until_redis_says

needs_redis = pytest.mark.skipif(find_program() is None, reason="there is no redis-server on PATH")

NAMES = Names.of("f")
W0 = a_worker("w0", num_pages=5000)
SMALL_BYTES = 24 * 2**20


def dispatch(number: int) -> SharedDispatch:
    """Of the longest prompt that there is."""
    keys = Random(number).randbytes(SHORT_KEY_BYTES * MAX_PULLED_PAGES)
    return SharedDispatch(
        request_id=id_of(f"r{number}"),
        attempt=0,
        decode=W0.id,
        num_prompt_tokens=1,
        num_tokens=2,
        num_output_tokens=1,
        keys=keys,
    )


def test_all_that_a_namespace_keeps_fits_the_memory() -> None:
    for max_memory_bytes in (2**28, 2**30, 2**31):
        room = RedisBudget.of(max_memory_bytes)
        stream_bytes = room.stream_bytes * (1 + math.log(2**19 * STREAM_ENTRIES / room.stream_bytes))
        snapshot_bytes = 16 * room.num_pages
        assert room.num_pages * PAGE_BYTES + 1.25 * (snapshot_bytes + stream_bytes) < max_memory_bytes
    assert RedisBudget.of(0) == RedisBudget(MAX_PAGES, MAX_STREAM_BYTES) == RedisBudget.of(2**40)


def test_the_stream_keeps_less_the_larger_its_entries_are() -> None:
    room = RedisBudget.of(2**30)
    assert room.num_entries(0) == room.num_entries(2048) == STREAM_ENTRIES
    assert room.num_entries(2**19) == 64
    assert RedisBudget.of(2**20).num_entries(2**19) == 1


@pytest.mark.parametrize("seed", range(3))
def test_whatever_sizes_follow_each_other_the_stream_stays_within_its_bound(seed: int) -> None:
    random, room, entries = Random(seed), RedisBudget.of(2**25), list[int]()
    most_bytes, least = room.stream_bytes, room.stream_bytes / STREAM_ENTRIES
    for number in range(30_000):
        steady = 2**19 / (1 + number / 50)
        entries.append(max(64, int(steady if seed == 0 else 2 ** random.uniform(6, 19))))
        del entries[: -room.num_entries(entries[-1])]
        if number % 100 == 0:
            assert sum(entries) <= most_bytes * (1 + math.log(2**19 / least))


@needs_redis
def test_long_prompts_do_not_fill_it_up() -> None:
    async def scene() -> None:
        async with PrivateRedis(SMALL_BYTES) as redis:
            router, other = RouterStandIn(redis.url, "first"), RouterStandIn(redis.url, "second")
            async with running(router, other):
                await until(lambda: router.link.is_up and other.link.is_up)
                router.join(W0)
                for number in range(200):  # 46 MB
                    router.link.share(dispatch(number))
                    await until(lambda: not router.link.num_untold)
                router.says(W0, CHAIN)
                await until_redis_says(redis, {W0.id: 40})
                await until(lambda: other.held(W0) == 40)
            assert router.link.counters["redis_failures"] == 0
            assert len(other.heard) > 100, "it hears of most, while it reads as they come"

    asyncio.run(scene())


async def fill_stream(connection: RedisConnection, number: int) -> None:
    body = CODEC.encode_shared(dispatch(number))
    await connection.call("XADD", NAMES.events, "*", "r", id_of("gone"), "m", body)


async def fill_pages(connection: RedisConnection, number: int) -> None:
    random = Random(number)
    fields = [random.randbytes(8) for _ in range(2000)]
    await connection.call("HSET", NAMES.pages, *(part for field in fields for part in (field, b"\0\0\0\2")))


@needs_redis
@pytest.mark.parametrize("fill", [fill_stream, fill_pages])
def test_one_that_is_full_is_relieved_and_told_all(
    fill: Callable[[RedisConnection, int], Awaitable[None]],
) -> None:
    """As one that an older Baton has filled, or workers that are gone."""

    async def scene() -> None:
        async with PrivateRedis(SMALL_BYTES) as redis:
            router = RouterStandIn(redis.url, "first")
            connection = RedisConnection(redis.url, NAMES)
            with pytest.raises(ResponseError) as refused:
                for number in count():
                    await fill(connection, number)
            assert is_full(refused.value)
            async with running(router):
                router.join(W0)
                router.says(W0, CHAIN)
                await until_redis_says(redis, {W0.id: 40})
                await until(lambda: not router.link.num_untold)
                assert router.link.counters["redis_reliefs"] >= 1
            await connection.aclose()

    asyncio.run(scene())


@needs_redis
def test_what_was_fenced_stays_so_when_all_else_goes() -> None:
    async def scene() -> None:
        async with PrivateRedis() as redis:
            connection = RedisConnection(redis.url, NAMES)
            await connection.load()
            former, newer = a_worker("w0"), id_of("newer")
            for worker_id in (former.id, newer):
                await connection.run("join", worker_id, "w0", b"", 1000)
            await connection.run("relieve", 1)
            assert await connection.run("join", former.id, "w0", b"", 1000) == -2
            assert await connection.run("join", newer, "w0", b"", 1000) == -1
            await connection.aclose()

    asyncio.run(scene())
