"""Links to a redis-server that is killed, stopped, emptied, set back, full, or written to by others."""

import asyncio
import os
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial

from baton.cluster.redis_server import RedisServer
from baton.messages.bounds import SHORT_KEY_BYTES
from baton.messages.control import Ended
from baton.messages.workers import Tier, Worker
from baton.router.redis.messages import MESSAGE, WORKER, Codec, Snapshot, pages_of, snapshot_of
from tests.event_loop import on_loop
from tests.needs import needs_redis
from tests.node_peers import a_worker, id_of
from tests.unit.router.redis_routers import (
    CHAIN,
    CODEC,
    NAMES,
    RNG,
    RouterStandIn,
    connected,
    known_from,
    linked,
    running,
    until_known,
)
from tests.unit.router.router_cluster import stored
from tests.waiting import until

pytestmark = needs_redis

W0, W1, W2 = (a_worker(name, num_pages=5000) for name in ("w0", "w1", "w2"))


@on_loop
async def test_killed_redis_that_comes_back_empty_gets_all_pages_again() -> None:
    async with linked(2) as (redis, (first, second)):
        first.join(W0)
        first.report(W0, CHAIN[: 10 * SHORT_KEY_BYTES])
        await until(lambda: second.held(W0) == 10)
        os.kill(redis.pid, signal.SIGKILL)
        await until(lambda: not first.link.is_up and not second.link.is_up)
        first.report(W0, CHAIN[10 * SHORT_KEY_BYTES : 30 * SHORT_KEY_BYTES])
        assert first.held(W0) == 30, "routing reads the index in memory"
        await redis.start()
        await until(lambda: first.link.is_up and second.link.is_up)
        first.report(W0, CHAIN[30 * SHORT_KEY_BYTES :])
        await until_known(redis, {W0.id: 40})
        await until(lambda: second.held(W0) == 40)


@on_loop
async def test_stopped_redis_delays_no_decision() -> None:
    async with linked(1) as (redis, (router,)):
        router.join(W0)
        os.kill(redis.pid, signal.SIGSTOP)
        try:
            longest_s = 0.0
            router.report(W0, CHAIN)
            while router.link.is_up:
                started_s = time.monotonic()
                router.report(W0, CHAIN[:SHORT_KEY_BYTES])
                assert router.held(W0) == 40
                longest_s = max(longest_s, time.monotonic() - started_s)
                await asyncio.sleep(0)
        finally:
            os.kill(redis.pid, signal.SIGCONT)
        assert longest_s < 1.0
        await until_known(redis, {W0.id: 40})


@on_loop
async def test_redis_set_back_to_an_old_state_is_brought_up_to_date() -> None:
    async with RedisServer() as redis:
        router = RouterStandIn(redis.url, "first")
        folder = redis.url.removeprefix("unix://").removesuffix("/redis.sock")
        async with running(router):
            await until(lambda: router.link.is_up)
            router.join(W0)
            router.report(W0, CHAIN[: 10 * SHORT_KEY_BYTES])
            await until_known(redis, {W0.id: 10})
            async with connected(redis.url) as connection:
                await connection.call("SAVE")
            shutil.copy(f"{folder}/dump.rdb", f"{folder}/old.rdb")
            router.report(W0, CHAIN[10 * SHORT_KEY_BYTES :])
            router.report(W0, CHAIN[:SHORT_KEY_BYTES], None)
            await until_known(redis, {})
            os.kill(redis.pid, signal.SIGKILL)
            await until(lambda: not router.link.is_up)
            shutil.copy(f"{folder}/old.rdb", f"{folder}/dump.rdb")
            await redis.start()
            assert (await known_from(redis.url)) in ({W0.id: 10}, {}), "the old state, or already the new one"
            await until_known(redis, {})
            router.report(W0, CHAIN[:SHORT_KEY_BYTES])
            await until_known(redis, {W0.id: 40})


@on_loop
async def test_redis_without_memory_refuses_and_routing_goes_on() -> None:
    async with linked(1) as (redis, (router,)):
        router.join(W0)
        async with connected(redis.url) as connection:
            await connection.call("CONFIG", "SET", "maxmemory", "1")
            router.report(W0, CHAIN)
            await until(lambda: router.link.counters["redis_refused"] > 0)
            assert router.held(W0) == 40
            await connection.call("CONFIG", "SET", "maxmemory", "0")
        await until_known(redis, {W0.id: 40})


@on_loop
async def test_redis_without_memory_is_counted_when_nothing_changes() -> None:
    async with linked(1) as (redis, (router,)):
        router.join(W0)
        router.report(W0, CHAIN)
        await until_known(redis, {W0.id: 40})
        await until(lambda: not router.link.num_unsent)
        async with connected(redis.url) as connection:
            await connection.call("CONFIG", "SET", "maxmemory", "1")
        await until(lambda: router.link.counters["redis_refused"] > 0)


@on_loop
async def test_values_that_no_router_of_the_cluster_has_written_are_ignored() -> None:
    async with RedisServer() as redis:
        first, second = RouterStandIn(redis.url, "first"), RouterStandIn(redis.url, "second")
        forger = Codec(b"another key" * 3)
        forged = stored(CHAIN)
        async with connected(redis.url) as connection:
            await connection.call("HSET", NAMES.workers, W1.id, forger.encode(WORKER, W1))
            async with running(first, second):
                await until(lambda: first.link.is_up and second.link.is_up)
                assert second.index.slot(W1.id) is None
                first.join(W0)
                first.join(W2)
                first.report(W0, CHAIN)
                await until(lambda: second.held(W0) == 40)
                await until(lambda: not first.link.num_unsent)
                written = await connection.call("XREVRANGE", NAMES.events, "+", "-")
                of_w0 = next(fields[b"p"] for _, fields in written if fields.get(b"w") == W0.id.encode())
                for entry in (
                    ("m", forger.encode(MESSAGE, Ended(attempts=((id_of("r"), 0),)))),
                    ("m", of_w0),
                    ("w", W2.id, "p", forger.encode(pages_of(W2.id), forged)),
                    ("w", W2.id, "p", of_w0),
                ):
                    await connection.call("XADD", NAMES.events, "*", *entry)
                await until(lambda: second.link.counters["redis_malformed"] == 5)
                assert second.index.slot(W1.id) is None
                assert (second.held(W0), second.held(W2)) == (40, 0)
                assert not any(isinstance(heard, Ended) for heard in second.heard)
                snapshot = await connection.call("GET", NAMES.snapshot(W0.id))
            forged_snapshot = forger.encode(snapshot_of(W2.id), Snapshot(40, "0-0", {Tier.DEVICE: bytes(8)}))
            for each in (snapshot, forged_snapshot):
                await connection.call("SET", NAMES.snapshot(W2.id), each)
                third = RouterStandIn(redis.url, "third")
                async with running(third):
                    # The description of W1, and the snapshot.
                    await until(partial(counts, third, "redis_malformed", 2))
                    await until(partial(holds, third, W0, 40))
                    assert third.held(W2) == 0


def holds(router: RouterStandIn, worker: Worker, num_pages: int) -> bool:
    return router.held(worker) == num_pages


def counts(router: RouterStandIn, counter: str, number: int) -> bool:
    return router.link.counters[counter] >= number


@on_loop
async def test_junk_in_place_of_every_value_does_not_end_the_link() -> None:
    async with RedisServer() as redis:
        first, second = RouterStandIn(redis.url, "first"), RouterStandIn(redis.url, "second")
        async with connected(redis.url) as connection, running(first, second):
            await until(lambda: first.link.is_up and second.link.is_up)
            first.join(W0)
            first.report(W0, CHAIN[: 10 * SHORT_KEY_BYTES])
            await until(lambda: second.held(W0) == 10)
            odd = CODEC.encode(snapshot_of(W0.id), Snapshot(2**40, "here", {}))
            await connection.call("SET", NAMES.snapshot(W0.id), odd)
            for name in (NAMES.workers, NAMES.names, NAMES.numbers, NAMES.leases):
                await connection.call("HSET", name, W0.id, b"\xfe junk", b"\xff\xfe", b"\xff")
            await connection.call("HSET", NAMES.leases, b"\xff\xfd", "1")
            await connection.call("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            failed = first.link.counters["redis_failures"]
            await until(lambda: first.link.counters["redis_failures"] > failed)
            first.report(W0, CHAIN[10 * SHORT_KEY_BYTES :])
            await until(lambda: first.link.is_up and second.link.is_up and second.held(W0) == 40)
            await connection.call("DEL", NAMES.numbers)
            await connection.call("HSET", NAMES.numbers, W0.id, "9" * 400)
            await connection.call("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            await connection.call("FLUSHALL")
            await until_known(redis, {W0.id: 40})
            assert (first.held(W0), second.held(W0)) == (40, 40)


@on_loop
async def test_link_that_fails_as_soon_as_it_is_up_is_made_less_and_less_often() -> None:
    async with RedisServer() as redis:
        router = RouterStandIn(redis.url, "first")
        async with connected(redis.url) as connection:
            last_id = f"{2**64 - 1}-{2**64 - 1}"
            await connection.call("XADD", NAMES.events, last_id, "no", "id is left")
            router.join(W0)
            router.report(W0, CHAIN)
            async with running(router):
                await until(lambda: router.link.counters["redis_failures"] == 1)
                first_s = time.monotonic()
                await until(lambda: router.link.counters["redis_failures"] == 4)
                assert time.monotonic() - first_s >= 0.2 + 0.4 + 0.8
                await connection.call("FLUSHALL")
                await until_known(redis, {W0.id: 40})


@on_loop
async def test_scripts_that_redis_has_lost_are_loaded_again() -> None:
    async with linked(1) as (redis, (router,)):
        router.join(W0)
        await until_known(redis, {})
        async with connected(redis.url) as connection:
            await connection.call("SCRIPT FLUSH")
        router.report(W0, CHAIN)
        await until(lambda: router.link.counters["redis_failures"] > 0)
        await until_known(redis, {W0.id: 40})
        assert router.link.is_up
        assert router.link.counters["redis_failures"] == 1, "one new connection was enough"


@on_loop
async def test_without_redis_the_index_in_memory_is_enough() -> None:
    router = RouterStandIn("redis://127.0.0.1:1/0", "first")
    async with running(router):
        router.join(W0)
        router.report(W0, CHAIN)
        await until(lambda: router.link.counters["redis_failures"] >= 2)
        assert router.held(W0) == 40
        assert not router.link.is_up


@on_loop
async def test_routing_stays_quick_while_redis_dies_and_gets_all_pages_again() -> None:
    async with RedisServer() as redis:
        router = RouterStandIn(redis.url, "first")
        workers = [a_worker(f"w{number}", num_pages=5000) for number in range(4)]
        turns_s: list[float] = []

        async def route_until(condition: Callable[[], bool]) -> None:
            async with asyncio.timeout(30):
                while not condition():
                    started_s = time.thread_time()
                    if not router.link.is_up:
                        router.report(workers[0], CHAIN[:SHORT_KEY_BYTES])
                    assert router.held(workers[3]) == 40
                    await asyncio.sleep(0)  # the other work of this process
                    turns_s.append(time.thread_time() - started_s)

        async with running(router):
            await until(lambda: router.link.is_up)
            for worker in workers:
                router.join(worker)
                router.report(worker, CHAIN)
                router.report(worker, RNG.bytes(5000 * SHORT_KEY_BYTES))
            await until(lambda: router.link.num_unsent == 0)
            os.kill(redis.pid, signal.SIGKILL)
            await route_until(lambda: not router.link.is_up)
            await redis.start()
            await route_until(lambda: router.link.is_up and router.link.num_unsent == 0)
            await until_known(redis, {worker.id: 40 for worker in workers})
        assert sorted(turns_s)[len(turns_s) * 99 // 100] < 0.02
