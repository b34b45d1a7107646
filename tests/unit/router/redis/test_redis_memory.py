"""A Redis with little memory does not fill up, and a full Redis is soon in use again."""

from collections.abc import Awaitable, Callable
from itertools import count
from random import Random

import pytest
from redis.exceptions import ResponseError

from baton.cluster.redis_server import RedisServer
from baton.messages.bounds import MAX_PULLED_PAGES, SHORT_KEY_BYTES
from baton.router.redis.client import Command, RedisConnection, is_full
from baton.router.redis.messages import MESSAGE, SharedDispatch
from tests.event_loop import on_loop
from tests.needs import needs_redis
from tests.node_peers import a_worker, id_of
from tests.unit.router.redis_routers import (
    CHAIN,
    CODEC,
    NAMES,
    RouterStandIn,
    connected,
    linked,
    running,
    until_known,
)
from tests.waiting import until

pytestmark = needs_redis

W0 = a_worker("w0", num_pages=5000)
SMALL_BYTES = 24 * 2**20


def dispatch(number: int) -> SharedDispatch:
    """A dispatch of a prompt of the greatest length."""
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


@on_loop
async def test_long_prompts_do_not_fill_redis() -> None:
    async with linked(2, max_memory_bytes=SMALL_BYTES) as (redis, (router, other)):
        router.join(W0)
        for number in range(200):  # 46 MB
            router.link.share(dispatch(number))
            await until(lambda: not router.link.num_unsent)
        router.report(W0, CHAIN)
        await until_known(redis, {W0.id: 40})
        await until(lambda: other.held(W0) == 40)
        assert router.link.counters["redis_failures"] == 0
        assert len(other.heard) > 100, "a router that reads in time receives most messages"


async def fill_stream(connection: RedisConnection, number: int) -> None:
    body = CODEC.encode(MESSAGE, dispatch(number))
    await connection.call("XADD", NAMES.events, "*", "r", id_of("gone"), "m", body)


async def fill_workers(connection: RedisConnection, number: int) -> None:
    await connection.call("HSET", NAMES.workers, id_of(f"gone {number}"), Random(number).randbytes(2**15))


async def fill_snapshots(connection: RedisConnection, number: int) -> None:
    worker_id = id_of(f"gone {number}")
    await connection.call("HSET", NAMES.workers, worker_id, b"")
    await connection.call("SET", NAMES.snapshot(worker_id), Random(number).randbytes(2**17))


@pytest.mark.parametrize("fill", [fill_stream, fill_workers, fill_snapshots])
@on_loop
async def test_full_redis_is_relieved_and_gets_all_pages_again(
    fill: Callable[[RedisConnection, int], Awaitable[None]],
) -> None:
    async with RedisServer(SMALL_BYTES) as redis, connected(redis.url) as connection:
        router = RouterStandIn(redis.url, "first")
        with pytest.raises(ResponseError) as refused:
            for number in count():
                await fill(connection, number)
        assert is_full(refused.value)
        async with running(router):
            router.join(W0)
            router.report(W0, CHAIN)
            await until_known(redis, {W0.id: 40})
            await until(lambda: not router.link.num_unsent)
            assert router.link.counters["redis_reliefs"] >= 1


def join_of(born: int) -> Command:
    """The join of the life of worker w0 with this incarnation."""
    return Command("join", (id_of(f"life {born}"), "w0", born, b"", 1000))


@on_loop
async def test_worker_that_left_is_fenced_by_its_next_life() -> None:
    async with RedisServer() as redis, connected(redis.url) as connection:
        former, newer = (Command("join", (id_of(name), "w0", 1, b"", 1000)) for name in ("former", "newer"))
        leave = Command("leave", (id_of("former"),))
        await connection.load()
        assert await connection.run_all([former, leave, newer, former, newer]) == [-1, 0, -1, -2, -1]


@on_loop
async def test_earlier_life_that_joins_a_redis_without_data_last_is_fenced() -> None:
    async with RedisServer() as redis, connected(redis.url) as connection:
        earlier, later = (join_of(born) for born in (9, 10))
        await connection.load()
        assert await connection.run_all([later, earlier, later, earlier]) == [-1, -2, -1, -2]


@on_loop
async def test_life_that_has_left_fences_none_whatever_its_number() -> None:
    async with RedisServer() as redis, connected(redis.url) as connection:
        lower, higher = (join_of(born) for born in (9, 10))
        await connection.load()
        commands = [higher, Command("leave", higher.arguments[:1]), lower, lower, higher]
        assert await connection.run_all(commands) == [-1, 0, -1, -1, -2]


@on_loop
async def test_fenced_workers_stay_fenced_when_everything_else_is_dropped() -> None:
    async with RedisServer() as redis:
        former, newer = id_of("former"), id_of("newer")

        def join(worker_id: str) -> Command:
            return Command("join", (worker_id, "w0", 1, b"", 1000))

        async with connected(redis.url) as connection:
            await connection.load()
            commands = [join(former), join(newer), Command("relieve", (1,)), join(former), join(newer)]
            assert await connection.run_all(commands) == [-1, -1, 0, -2, -1]
