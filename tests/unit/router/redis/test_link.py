"""Links between two routers over a real redis-server."""

import statistics
import time

import pytest

from baton.messages.control import KvEventBatch
from baton.messages.workers import Tier, Worker
from baton.pages import KEY_BYTES
from baton.router.redis import link, outbox
from baton.router.redis.client import Names, RedisConnection
from baton.router.redis.messages import SharedDispatch, SharedEnded
from baton.router.redis.server import PrivateRedis, find_program
from tests.node_peers import a_worker, id_of
from tests.unit.router.redis_routers import (
    CHAIN,
    RNG,
    SEEN_S,
    RouterStandIn,
    pages_in_redis,
    play,
    running,
    until,
    until_redis_says,
)

pytestmark = pytest.mark.skipif(find_program() is None, reason="there is no redis-server on PATH")

W0, W1 = a_worker("w0", num_pages=5000), a_worker("w1", num_pages=5000)


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


def test_a_dispatch_is_soon_known_to_the_other_router() -> None:
    async def scene(redis: PrivateRedis) -> None:
        first, second = RouterStandIn(redis.url, "first"), RouterStandIn(redis.url, "second")
        dispatch = SharedDispatch(
            request_id=id_of("r"),
            attempt=0,
            decode=W0.id,
            num_prompt_tokens=10,
            num_tokens=20,
            num_output_tokens=10,
        )
        async with running(first, second):
            await until(lambda: first.link.is_up and second.link.is_up)
            took_s = []
            for number in range(9):
                started_s = time.monotonic()
                first.link.share(dispatch)
                await until(lambda number=number: len(second.heard) > number)  # type: ignore[misc]
                took_s.append(time.monotonic() - started_s)
            assert statistics.median(took_s) < SEEN_S
            second.link.share(SharedEnded(attempts=((id_of("r"), 0),)))
            await until(lambda: bool(first.heard))
        assert second.heard == [dispatch] * 9
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
            assert second.index.apply(W0.id, _next_of(first, W0.id)), "there is no gap"

    play(scene)


def _next_of(router: RouterStandIn, worker_id: str) -> KvEventBatch:
    first = router.index.next_number(worker_id)
    assert first is not None
    return KvEventBatch(first=first, keys=RNG.bytes(16), pages=(9,), generations=(9,))


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


def test_a_worker_of_two_routers_is_there_until_both_have_lost_it() -> None:
    async def scene(redis: PrivateRedis) -> None:
        first, second = RouterStandIn(redis.url, "first"), RouterStandIn(redis.url, "second")
        async with running(first, second):
            await until(lambda: first.link.is_up and second.link.is_up)
            for router in (first, second):
                router.join(W0)
            for part in (slice(0, 320), slice(320, 640)):
                for router in (first, second):
                    router.says(W0, CHAIN[part])
            await until_redis_says(redis, {W0.id: 40})
            second.says(W0, CHAIN[:KEY_BYTES], is_stored=False)  # it was told a moment before the first
            first.says(W0, CHAIN[:KEY_BYTES], is_stored=False)
            await until_redis_says(redis, {})
            for router in (first, second):
                router.says(W0, CHAIN[:KEY_BYTES])
            await until_redis_says(redis, {W0.id: 40})
            first.leave(W0)
            second.says(W0, CHAIN[:KEY_BYTES])
            await until_redis_says(redis, {W0.id: 40})
            assert second.held(W0) == 40
            second.leave(W0)
            await until_redis_says(redis, {})

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


def test_the_workers_of_a_router_that_died_are_dead_when_their_leases_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outbox, "LEASE_MS", 300)
    monkeypatch.setattr(link, "RENEW_S", 0.05)

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
                await until(lambda: first.link.num_untold == 0)
            await until(lambda: second.index.slot(W0.id) is None)
            await until_redis_says(redis, {W1.id: 40})
            await until(lambda: second.link.num_untold == 0)
            assert await has_snapshot(redis, W1) and not await has_snapshot(redis, W0)

    async def has_snapshot(redis: PrivateRedis, worker: Worker) -> bool:
        names = Names.of("f")
        connection = RedisConnection(redis.url, names)
        found = await connection.call("EXISTS", f"{names.workers}:{worker.id}")
        await connection.aclose()
        return bool(found)

    play(scene)
