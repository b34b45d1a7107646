"""Links to a redis-server that is killed, held up, emptied, set back, filled and written to by others."""

import asyncio
import os
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial

import pytest

from baton.messages.control import KvEventBatch
from baton.pages import KEY_BYTES
from baton.router.redis.client import Names, RedisConnection
from baton.router.redis.messages import Codec, SharedEnded, SharedJoined, SharedLeft, Snapshot
from baton.router.redis.server import PrivateRedis, find_program
from tests.node_peers import a_worker, id_of
from tests.unit.router.redis_routers import (
    CHAIN,
    CODEC,
    RNG,
    RouterStandIn,
    pages_in_redis,
    play,
    running,
    until,
    until_redis_says,
)

pytestmark = pytest.mark.skipif(find_program() is None, reason="there is no redis-server on PATH")

W0, W1, W2 = (a_worker(name, num_pages=5000) for name in ("w0", "w1", "w2"))


def test_redis_that_is_killed_and_comes_back_empty_is_told_everything_again() -> None:
    async def scene(redis: PrivateRedis) -> None:
        first, second = RouterStandIn(redis.url, "first"), RouterStandIn(redis.url, "second")
        async with running(first, second):
            await until(lambda: first.link.is_up and second.link.is_up)
            first.join(W0)
            first.says(W0, CHAIN[: 10 * KEY_BYTES])
            await until(lambda: second.held(W0) == 10)
            os.kill(redis.pid, signal.SIGKILL)
            await until(lambda: not first.link.is_up and not second.link.is_up)
            first.says(W0, CHAIN[10 * KEY_BYTES : 30 * KEY_BYTES])
            assert first.held(W0) == 30, "routing reads the replica"
            await redis.start()
            await until(lambda: first.link.is_up and second.link.is_up)
            first.says(W0, CHAIN[30 * KEY_BYTES :])
            await until_redis_says(redis, {W0.id: 40})
            await until(lambda: second.held(W0) == 40)

    play(scene)


def test_a_redis_that_hangs_holds_nobody_up() -> None:
    async def scene(redis: PrivateRedis) -> None:
        router = RouterStandIn(redis.url, "first")
        async with running(router):
            await until(lambda: router.link.is_up)
            router.join(W0)
            os.kill(redis.pid, signal.SIGSTOP)
            try:
                longest_s = 0.0
                router.says(W0, CHAIN)
                while router.link.is_up:
                    started_s = time.monotonic()
                    router.says(W0, CHAIN[:KEY_BYTES])
                    assert router.held(W0) == 40
                    longest_s = max(longest_s, time.monotonic() - started_s)
                    await asyncio.sleep(0)
            finally:
                os.kill(redis.pid, signal.SIGCONT)
            assert longest_s < 1.0
            await until_redis_says(redis, {W0.id: 40})

    play(scene)


def test_a_redis_set_back_to_an_old_snapshot_is_brought_up_to_date() -> None:
    async def scene(redis: PrivateRedis) -> None:
        router = RouterStandIn(redis.url, "first")
        folder = redis.url.removeprefix("unix://").removesuffix("/redis.sock")
        async with running(router):
            await until(lambda: router.link.is_up)
            router.join(W0)
            router.says(W0, CHAIN[: 10 * KEY_BYTES])
            await until_redis_says(redis, {W0.id: 10})
            connection = RedisConnection(redis.url, Names.of("f"))
            await connection.call("SAVE")
            await connection.aclose()
            shutil.copy(f"{folder}/dump.rdb", f"{folder}/old.rdb")
            router.says(W0, CHAIN[10 * KEY_BYTES :])
            router.says(W0, CHAIN[:KEY_BYTES], is_stored=False)
            await until_redis_says(redis, {})
            os.kill(redis.pid, signal.SIGKILL)
            await until(lambda: not router.link.is_up)
            shutil.copy(f"{folder}/old.rdb", f"{folder}/dump.rdb")
            await redis.start()
            assert (await pages_in_redis(redis)) in ({W0.id: 10}, {}), (
                "it has the old state, or was told by now"
            )
            await until_redis_says(redis, {})
            router.says(W0, CHAIN[:KEY_BYTES])
            await until_redis_says(redis, {W0.id: 40})

    play(scene)


def test_a_redis_without_memory_refuses_and_routing_goes_on() -> None:
    async def scene(redis: PrivateRedis) -> None:
        router = RouterStandIn(redis.url, "first")
        async with running(router):
            await until(lambda: router.link.is_up)
            router.join(W0)
            connection = RedisConnection(redis.url, Names.of("f"))
            await connection.call("CONFIG", "SET", "maxmemory", "1")
            router.says(W0, CHAIN)
            await until(lambda: router.link.counters["redis_refused"] > 0)
            assert router.held(W0) == 40
            await connection.call("CONFIG", "SET", "maxmemory", "0")
            await connection.aclose()
            await until_redis_says(redis, {W0.id: 40})

    play(scene)


def test_a_redis_without_memory_is_counted_when_there_is_no_news() -> None:
    async def scene(redis: PrivateRedis) -> None:
        router = RouterStandIn(redis.url, "first")
        async with running(router):
            await until(lambda: router.link.is_up)
            router.join(W0)
            router.says(W0, CHAIN)
            await until_redis_says(redis, {W0.id: 40})
            await until(lambda: not router.link.num_untold)
            connection = RedisConnection(redis.url, Names.of("f"))
            await connection.call("CONFIG", "SET", "maxmemory", "1")
            await connection.aclose()
            await until(lambda: router.link.counters["redis_refused"] > 0)

    play(scene)


def test_what_others_wrote_into_redis_is_counted_and_passed_over() -> None:
    async def scene(redis: PrivateRedis) -> None:
        first, second = RouterStandIn(redis.url, "first"), RouterStandIn(redis.url, "second")
        names = Names.of("f")
        connection = RedisConnection(redis.url, names)
        await connection.call("HSET", names.workers, id_of("x"), b"\x00nonsense")
        await connection.call("SET", f"{names.workers}:{W0.id}", b"\xff")
        async with running(first, second):
            await until(lambda: first.link.is_up and second.link.is_up)
            await connection.call("XADD", names.events, "*", "m", b"\xc1")
            await connection.call("XADD", names.events, "*", "w", W0.id, "p", b"\x93")
            await connection.call("XADD", names.events, "*", "anything", "else")
            first.join(W0)
            first.says(W0, CHAIN)
            await until(lambda: second.held(W0) == 40)
            assert second.link.counters["redis_malformed"] >= 3
        await connection.aclose()

    play(scene)


def test_nothing_is_believed_that_no_router_of_the_cluster_has_written() -> None:
    async def scene(redis: PrivateRedis) -> None:
        first, second = RouterStandIn(redis.url, "first"), RouterStandIn(redis.url, "second")
        names, forger = Names.of("f"), Codec(b"another key" * 3)
        forged = KvEventBatch(first=0, keys=CHAIN, pages=tuple(range(40)), generations=(1,) * 40)
        connection = RedisConnection(redis.url, names)
        await connection.call("HSET", names.workers, W1.id, forger.encode_worker(W1))
        async with running(first, second):
            await until(lambda: first.link.is_up and second.link.is_up)
            assert second.index.slot(W1.id) is None
            first.join(W0)
            first.join(W2)
            first.says(W0, CHAIN)
            await until(lambda: second.held(W0) == 40)
            await until(lambda: not first.link.num_untold)
            written = await connection.call("XREVRANGE", names.events, "+", "-")
            of_w0 = next(fields[b"p"] for _, fields in written if fields.get(b"w") == W0.id.encode())
            for entry in (
                ("m", forger.encode_shared(SharedJoined(worker=W1))),
                ("m", forger.encode_shared(SharedLeft(worker=W0.id))),
                ("m", forger.encode_shared(SharedEnded(attempts=((id_of("r"), 0),)))),
                ("m", of_w0),
                ("w", W2.id, "p", forger.encode_pages(W2.id, forged)),
                ("w", W2.id, "p", of_w0),
            ):
                await connection.call("XADD", names.events, "*", *entry)
            await until(lambda: second.link.counters["redis_malformed"] == 7)
            assert second.index.slot(W1.id) is None
            assert (second.held(W0), second.held(W2)) == (40, 0)
            assert not any(isinstance(heard, SharedEnded) for heard in second.heard)
            snapshot = await connection.call("GET", f"{names.workers}:{W0.id}")
        for each in (snapshot, forger.encode_snapshot(W2.id, Snapshot(40, "0-0", bytes(8), bytes(8)))):
            await connection.call("SET", f"{names.workers}:{W2.id}", each)
            third = RouterStandIn(redis.url, "third")
            async with running(third):
                # One of the eight is the snapshot. Without it, the router reads the whole stream.
                await until(partial(counts, third, "redis_malformed", 8))
                assert (third.held(W0), third.held(W2)) == (40, 0)
        await connection.aclose()

    play(scene)


def counts(router: RouterStandIn, counter: str, number: int) -> bool:
    return router.link.counters[counter] >= number


def test_junk_in_place_of_every_value_does_not_end_the_link() -> None:
    async def scene(redis: PrivateRedis) -> None:
        first, second = RouterStandIn(redis.url, "first"), RouterStandIn(redis.url, "second")
        names = Names.of("f")
        connection = RedisConnection(redis.url, names)
        async with running(first, second):
            await until(lambda: first.link.is_up and second.link.is_up)
            first.join(W0)
            first.says(W0, CHAIN[: 10 * KEY_BYTES])
            await until(lambda: second.held(W0) == 10)
            odd = CODEC.encode_snapshot(W0.id, Snapshot(2**40, "here", b"", b""))
            await connection.call("SET", f"{names.workers}:{W0.id}", odd)
            for name in (names.workers, names.names, names.numbers, names.next, names.leases):
                await connection.call("HSET", name, W0.id, b"\xfe junk", b"\xff\xfe", b"\xff")
            await connection.call("HSET", names.leases, b"\xff\xfd", "1")
            await connection.call("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            failed = first.link.counters["redis_failures"]
            await until(lambda: first.link.counters["redis_failures"] > failed)
            first.says(W0, CHAIN[10 * KEY_BYTES :])
            await until(lambda: first.link.is_up and second.link.is_up and second.held(W0) == 40)
            await connection.call("DEL", names.next)
            await connection.call("HSET", names.next, W0.id, "9" * 400)
            await connection.call("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            await connection.call("FLUSHALL")
            await until_redis_says(redis, {W0.id: 40})
            assert (first.held(W0), second.held(W0)) == (40, 40)
        await connection.aclose()

    play(scene)


def test_a_link_that_fails_as_soon_as_it_is_up_is_made_less_and_less_often() -> None:
    async def scene(redis: PrivateRedis) -> None:
        router = RouterStandIn(redis.url, "first")
        connection = RedisConnection(redis.url, Names.of("f"))
        await connection.call("SET", Names.of("f").pages, "somebody else's")
        router.join(W0)
        router.says(W0, CHAIN)
        async with running(router):
            await until(lambda: router.link.counters["redis_failures"] == 1)
            first_s = time.monotonic()
            await until(lambda: router.link.counters["redis_failures"] == 4)
            assert time.monotonic() - first_s >= 0.2 + 0.4 + 0.8
            await connection.call("FLUSHALL")
            await until_redis_says(redis, {W0.id: 40})
        await connection.aclose()

    play(scene)


def test_scripts_that_redis_has_forgotten_are_loaded_again() -> None:
    async def scene(redis: PrivateRedis) -> None:
        router = RouterStandIn(redis.url, "first")
        async with running(router):
            await until(lambda: router.link.is_up)
            router.join(W0)
            await until_redis_says(redis, {})
            connection = RedisConnection(redis.url, Names.of("f"))
            await connection.call("SCRIPT FLUSH")
            await connection.aclose()
            router.says(W0, CHAIN)
            await until(lambda: router.link.counters["redis_failures"] > 0)
            await until_redis_says(redis, {W0.id: 40})
            assert router.link.is_up
            assert router.link.counters["redis_failures"] == 1  # it was not needed a second time

    play(scene)


def test_without_a_redis_the_replica_is_all_there_is() -> None:
    async def scene() -> None:
        router = RouterStandIn("redis://127.0.0.1:1/0", "first")
        async with running(router):
            router.join(W0)
            router.says(W0, CHAIN)
            await until(lambda: router.link.counters["redis_failures"] >= 2)
            assert router.held(W0) == 40
            assert not router.link.is_up

    asyncio.run(scene())


def test_routing_stays_quick_while_redis_dies_and_is_told_all_again() -> None:
    async def scene(redis: PrivateRedis) -> None:
        router = RouterStandIn(redis.url, "first")
        workers = [a_worker(f"w{number}", num_pages=5000) for number in range(4)]
        turns_s: list[float] = []

        async def route_until(condition: Callable[[], bool]) -> None:
            async with asyncio.timeout(30):
                while not condition():
                    started_s = time.thread_time()
                    if not router.link.is_up:
                        router.says(workers[0], CHAIN[:KEY_BYTES])
                    assert router.held(workers[3]) == 40
                    await asyncio.sleep(0)  # all else that this process has to do now
                    turns_s.append(time.thread_time() - started_s)

        async with running(router):
            await until(lambda: router.link.is_up)
            for worker in workers:
                router.join(worker)
                router.says(worker, CHAIN)
                router.says(worker, RNG.bytes(5000 * KEY_BYTES))
            await until(lambda: router.link.num_untold == 0)
            os.kill(redis.pid, signal.SIGKILL)
            await route_until(lambda: not router.link.is_up)
            await redis.start()
            await route_until(lambda: router.link.is_up and router.link.num_untold == 0)
            await until_redis_says(redis, {worker.id: 40 for worker in workers})
        assert sorted(turns_s)[len(turns_s) * 99 // 100] < 0.02

    play(scene)
