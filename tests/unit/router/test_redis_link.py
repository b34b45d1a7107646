"""Links over a real redis-server, which is killed, held up, emptied and set back."""

import asyncio
import os
import shutil
import signal
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias

import pytest

from baton.control import PageEvents, Tier
from baton.page_keys import KEY_BYTES
from baton.router import redis_link, redis_outbox
from baton.router.redis_client import Connection
from baton.router.redis_link import RedisMatcher
from baton.router.redis_messages import SharedDispatch, SharedEnded
from baton.router.redis_scripts import Names
from baton.router.redis_server import PrivateRedis, find_program
from tests.node_peers import a_worker, id_of
from tests.unit.router.redis_routers import CHAIN, RNG, RouterStandIn, running, until

pytestmark = pytest.mark.skipif(find_program() is None, reason="there is no redis-server on PATH")

W0, W1 = a_worker("w0", num_pages=5000), a_worker("w1", num_pages=5000)
Scene: TypeAlias = Callable[[PrivateRedis], Coroutine[Any, Any, None]]


def play(scene: Scene) -> None:
    async def with_redis() -> None:
        async with PrivateRedis() as redis:
            await scene(redis)

    asyncio.run(with_redis())


async def pages_in_redis(redis: PrivateRedis, keys: bytes = CHAIN) -> dict[str, int]:
    matcher = RedisMatcher(redis.url, "f")
    try:
        return await matcher.match(keys)
    finally:
        await matcher.aclose()


async def until_redis_says(redis: PrivateRedis, expected: dict[str, int]) -> None:
    async with asyncio.timeout(20):
        while (found := await pages_in_redis(redis)) != expected:
            assert found is not None
            await asyncio.sleep(0.01)


def test_one_router_learns_of_the_workers_of_another() -> None:
    async def scene(redis: PrivateRedis) -> None:
        first, second = RouterStandIn(redis.url, "first"), RouterStandIn(redis.url, "second")
        async with running(first, second):
            await until(lambda: first.link.is_up and second.link.is_up)
            first.join(W0)
            first.says(W0, CHAIN)
            await until(lambda: second.held(W0) == 40)
            assert second.index.locate(W0.id, CHAIN) == first.index.locate(W0.id, CHAIN)
            first.says(W0, CHAIN[-KEY_BYTES:], is_stored=False)
            await until(lambda: second.held(W0) == 39)
            first.leave(W0)
            await until(lambda: second.index.slot(W0.id) is None)

    play(scene)


def test_a_dispatch_is_known_to_the_other_router_within_50_ms() -> None:
    async def scene(redis: PrivateRedis) -> None:
        first, second = RouterStandIn(redis.url, "first"), RouterStandIn(redis.url, "second")
        dispatch = SharedDispatch(
            request_id=id_of("r"), attempt=0, decode=W0.id, num_prompt_tokens=10, num_tokens=20
        )
        async with running(first, second):
            await until(lambda: first.link.is_up and second.link.is_up)
            took_s = []
            for number in range(5):
                started_s = time.monotonic()
                first.link.share(dispatch)
                await until(lambda number=number: len(second.heard) > number)  # type: ignore[misc]
                took_s.append(time.monotonic() - started_s)
            assert min(took_s) < 0.05
            second.link.share(SharedEnded(attempts=((id_of("r"), 0),)))
            await until(lambda: bool(first.heard))
        assert second.heard == [dispatch] * 5
        assert first.heard == [SharedEnded(attempts=((id_of("r"), 0),))]

    play(scene)


def test_a_new_router_starts_with_what_the_last_one_knew() -> None:
    async def scene(redis: PrivateRedis) -> None:
        first = RouterStandIn(redis.url, "first")
        async with running(first):
            await until(lambda: first.link.is_up)
            first.join(W0)
            first.says(W0, RNG.bytes(5000 * KEY_BYTES))
            first.says(W0, CHAIN[: 20 * KEY_BYTES])
            await until(lambda: first.link.num_untold == 0)
            first.says(W0, CHAIN[20 * KEY_BYTES :])  # after the snapshot
            await until_redis_says(redis, {W0.id: 40})
        second = RouterStandIn(redis.url, "second")
        async with running(second):
            await until(lambda: second.held(W0) == 40)
            assert second.index.is_known(W0.id)
            second.join(W0)
            second.index.apply(W0.id, _next_of(first, W0.id))
            assert second.index.counters["gaps"] == 0

    play(scene)


def _next_of(router: RouterStandIn, worker_id: str) -> PageEvents:
    first = router.index.next_number(worker_id)
    assert first is not None
    return PageEvents(first=first, keys=RNG.bytes(16), pages=(9,), generations=(9,))


def test_redis_matches_a_chain_in_both_tiers_for_the_living_only() -> None:
    async def scene(redis: PrivateRedis) -> None:
        router = RouterStandIn(redis.url, "first")
        async with running(router):
            await until(lambda: router.link.is_up)
            for worker in (W0, W1):
                router.join(worker)
            router.says(W0, CHAIN[: 8 * KEY_BYTES])
            router.says(W0, CHAIN[6 * KEY_BYTES : 8 * KEY_BYTES], tier=Tier.HOST)
            router.says(W0, CHAIN[6 * KEY_BYTES : 8 * KEY_BYTES], is_stored=False)
            router.says(W1, CHAIN)
            await until_redis_says(redis, {W0.id: 8, W1.id: 40})
            router.says(W0, CHAIN[: 3 * KEY_BYTES], afresh=True)
            await until_redis_says(redis, {W0.id: 3, W1.id: 40})
            router.leave(W1)
            await until_redis_says(redis, {W0.id: 3})

    play(scene)


def test_redis_matches_long_prompts_as_far_as_each_worker_holds_them() -> None:
    async def scene(redis: PrivateRedis) -> None:
        workers = [a_worker(f"w{number}", num_pages=5000) for number in range(6)]
        prompt = RNG.bytes(307 * KEY_BYTES)
        expected = dict(zip((w.id for w in workers), (1, 16, 17, 160, 306, 307), strict=True))
        router = RouterStandIn(redis.url, "first")
        async with running(router):
            await until(lambda: router.link.is_up)
            for worker in workers:
                router.join(worker)
                router.says(worker, prompt[: expected[worker.id] * KEY_BYTES])
            await until(lambda: router.link.num_untold == 0)
            assert await pages_in_redis(redis, prompt) == expected
            assert await pages_in_redis(redis, RNG.bytes(100 * KEY_BYTES)) == {}
            assert await pages_in_redis(redis, b"") == {}

    play(scene)


def test_a_later_life_fences_the_one_before() -> None:
    async def scene(redis: PrivateRedis) -> None:
        first, second = RouterStandIn(redis.url, "first"), RouterStandIn(redis.url, "second")
        later = a_worker("w0", id=id_of("later"), num_pages=5000)
        async with running(first, second):
            await until(lambda: first.link.is_up and second.link.is_up)
            first.join(W0)
            first.says(W0, CHAIN)
            await until_redis_says(redis, {W0.id: 40})
            second.join(later)
            second.says(later, CHAIN[: 2 * KEY_BYTES])
            await until_redis_says(redis, {later.id: 2})
            first.says(W0, CHAIN)
            await until(lambda: first.link.counters["redis_fenced"] == 1)
            await until_redis_says(redis, {later.id: 2})

    play(scene)


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
            connection = Connection(redis.url, Names.of("f"))
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
            connection = Connection(redis.url, Names.of("f"))
            await connection.call("CONFIG", "SET", "maxmemory", "1")
            router.says(W0, CHAIN)
            await until(lambda: router.link.counters["redis_refused"] > 0)
            assert router.held(W0) == 40
            await connection.call("CONFIG", "SET", "maxmemory", "0")
            await connection.aclose()
            await until_redis_says(redis, {W0.id: 40})

    play(scene)


def test_what_others_wrote_into_redis_is_counted_and_passed_over() -> None:
    async def scene(redis: PrivateRedis) -> None:
        first, second = RouterStandIn(redis.url, "first"), RouterStandIn(redis.url, "second")
        names = Names.of("f")
        connection = Connection(redis.url, names)
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


def test_scripts_that_redis_has_forgotten_are_loaded_again() -> None:
    async def scene(redis: PrivateRedis) -> None:
        router = RouterStandIn(redis.url, "first")
        async with running(router):
            await until(lambda: router.link.is_up)
            router.join(W0)
            await until_redis_says(redis, {})
            connection = Connection(redis.url, Names.of("f"))
            await connection.call("SCRIPT FLUSH")
            await connection.aclose()
            router.says(W0, CHAIN)
            await until(lambda: router.link.counters["redis_failures"] > 0)
            await until_redis_says(redis, {W0.id: 40})

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


def test_the_workers_of_a_router_that_died_are_dead_when_their_leases_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(redis_outbox, "LEASE_MS", 300)
    monkeypatch.setattr(redis_link, "RENEW_S", 0.05)

    async def scene(redis: PrivateRedis) -> None:
        first, second = RouterStandIn(redis.url, "first"), RouterStandIn(redis.url, "second")
        async with running(second):
            async with running(first):
                await until(lambda: first.link.is_up and second.link.is_up)
                first.join(W0)
                second.join(W1)
                first.says(W0, CHAIN)
                second.says(W1, CHAIN)
                await until(lambda: second.held(W0) == 40)
            await until(lambda: second.index.slot(W0.id) is None)
            await until_redis_says(redis, {W1.id: 40})

    play(scene)


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
