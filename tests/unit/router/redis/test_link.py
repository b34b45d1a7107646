"""Links between two routers over a real redis-server."""

import asyncio
from collections import Counter

import pytest

from baton.clock import SystemClock
from baton.cluster.redis_server import RedisServer
from baton.messages.bounds import SHORT_KEY_BYTES
from baton.messages.workers import Tier
from baton.router.index.prefix_index import PrefixIndex
from baton.router.redis import link, outbox
from baton.router.redis.outbox import RedisOutbox
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
    linked,
    num_held,
    read_all,
    running,
    until_known,
)
from tests.unit.router.router_cluster import stored
from tests.waiting import until

pytestmark = [
    needs_redis,
    pytest.mark.usefixtures("patient_links"),
]

W0, W1 = a_worker("w0", num_pages=5000), a_worker("w1", num_pages=5000)


@on_loop
async def test_router_learns_of_the_workers_of_another_router() -> None:
    async with linked(2) as (_, (first, second)):
        first.join(W0)
        first.report(W0, CHAIN)
        await until(lambda: second.held(W0) == 40)
        assert second.index.num_reported(W0.id, CHAIN) == 40
        first.report(W0, CHAIN[-SHORT_KEY_BYTES:], None)
        await until(lambda: second.held(W0) == 39)
        first.leave(W0)
        await until(lambda: second.index.slot(W0.id) is None)


@on_loop
async def test_new_router_starts_with_the_pages_that_the_last_router_knew() -> None:
    async with linked(1) as (redis, (first,)):
        first.join(W0)
        first.report(W0, RNG.bytes(5000 * SHORT_KEY_BYTES))
        first.report(W0, CHAIN[: 20 * SHORT_KEY_BYTES])
        await until(lambda: first.link.num_unsent == 0)
        first.report(W0, CHAIN[20 * SHORT_KEY_BYTES :])  # after the snapshot
        await until_known(redis, {W0.id: 40})
        second = RouterStandIn(redis.url, "second")
        async with running(second):
            await until(lambda: second.held(W0) == 40)
            assert second.index.is_known(W0.id)
            second.join(W0)
            first_number = first.index.next_number(W0.id)
            assert first_number is not None
            assert second.index.apply(W0.id, stored(RNG.bytes(8), first_number)), "there is no gap"


@on_loop
async def test_redis_holds_pages_of_both_tiers_and_of_live_workers_only() -> None:
    async with linked(1) as (redis, (router,)):
        for worker in (W0, W1):
            router.join(worker)
        router.report(W0, CHAIN[: 8 * SHORT_KEY_BYTES])
        router.report(W0, CHAIN[6 * SHORT_KEY_BYTES : 8 * SHORT_KEY_BYTES], Tier.HOST)
        router.report(W1, CHAIN)
        await until_known(redis, {W0.id: 8, W1.id: 40})
        router.report(W0, CHAIN[: 3 * SHORT_KEY_BYTES], is_snapshot=True)
        await until_known(redis, {W0.id: 3, W1.id: 40})
        router.leave(W1)
        await until_known(redis, {W0.id: 3})


@on_loop
async def test_events_that_two_routers_report_count_once_and_the_worker_stays_for_the_other_router() -> None:
    async with linked(2) as (redis, (first, second)):
        for router in (first, second):
            router.join(W0)
        for part in (slice(0, 160), slice(160, 320)):
            for router in (first, second):
                router.report(W0, CHAIN[part])
        await until_known(redis, {W0.id: 40})
        second.report(W0, CHAIN[:SHORT_KEY_BYTES], None)
        first.report(W0, CHAIN[:SHORT_KEY_BYTES], None)
        await until_known(redis, {})
        await until(lambda: not first.link.num_unsent and not second.link.num_unsent)
        async with connected(redis.url) as connection:
            entries = await connection.call("XRANGE", NAMES.events, "-", "+")
        assert sum(b"p" in fields for _, fields in entries) == 3
        for router in (first, second):
            router.report(W0, CHAIN[:SHORT_KEY_BYTES])
        await until_known(redis, {W0.id: 40})
        first.leave(W0)
        second.report(W0, CHAIN[:SHORT_KEY_BYTES])
        await until_known(redis, {W0.id: 40})
        assert second.held(W0) == 40
        second.leave(W0)
        await until_known(redis, {})


@on_loop
async def test_worker_that_leaves_one_router_is_added_for_an_idle_one_again() -> None:
    async with linked(2) as (redis, (first, second)), connected(redis.url) as connection:
        for router in (first, second):
            router.join(W0)
            router.report(W0, CHAIN)
        await until_known(redis, {W0.id: 40})
        await until(lambda: not first.link.num_unsent and not second.link.num_unsent)
        before = await link.last_stream_id(connection, NAMES)
        first.leave(W0)
        while await link.last_stream_id(connection, NAMES) == before:  # Redis has removed the worker by then
            await asyncio.sleep(0.005)
        await until_known(redis, {W0.id: 40})


@on_loop
async def test_idle_worker_is_added_to_a_redis_that_lost_its_data_without_a_disconnect() -> None:
    async with linked(1) as (redis, (router,)), connected(redis.url) as connection:
        router.join(W0)
        router.report(W0, CHAIN)
        await until_known(redis, {W0.id: 40})
        await until(lambda: not router.link.num_unsent)
        await connection.call("FLUSHALL")
        await until_known(redis, {W0.id: 40})


def writer_and_reader() -> tuple[tuple[PrefixIndex, RedisOutbox], tuple[PrefixIndex, link.Feed]]:
    """The index of a router that has worker W0, with its outbox, and that of one that follows it."""
    index, known = (PrefixIndex(SystemClock(), 1000) for _ in range(2))
    writer, reader = (
        RedisOutbox(NAMES, CODEC, id_of(name), each, Counter())
        for name, each in (("writer", index), ("reader", known))
    )
    index.join(W0)
    return (index, writer), (known, link.Feed(reader, known.change, lambda message: None))


@on_loop
async def test_events_after_the_snapshot_that_settles_a_doubt_are_read_again() -> None:
    (index, writer), (known, feed) = writer_and_reader()
    writer.joined(W0)  # the link is down
    writer.open()
    async with RedisServer() as redis, connected(redis.url) as connection:
        await connection.load()
        after = await feed.begin(connection)
        for first, last in ((0, 30), (30, 40)):
            events = stored(CHAIN[first * SHORT_KEY_BYTES : last * SHORT_KEY_BYTES], first)
            index.apply(W0.id, events)
            if first == 0:
                writer.mark_stale(W0.id)
                await connection.run_all(writer.snapshot(W0.id, "0-0"))
            else:
                writer.pages(W0.id, events)
                await connection.run_all(writer.take_batch())
        await read_all(feed, connection, after)
    assert num_held(known, W0.id) == 40


@on_loop
async def test_workers_of_a_router_that_reaches_redis_last_are_known() -> None:
    async with linked(1) as (redis, (early,)):
        late = RouterStandIn(redis.url, "late")
        late.join(W0)
        late.report(W0, CHAIN)
        async with running(late):
            await until(lambda: early.held(W0) == 40)
            late.leave(W0)
            await until(lambda: early.held(W0) == 0)


@on_loop
async def test_events_between_two_connections_of_the_reader_are_not_missed() -> None:
    (index, writer), (known, feed) = writer_and_reader()
    writer.open()
    writer.joined(W0)
    async with RedisServer() as redis, connected(redis.url) as connection:
        await connection.load()
        for first, last in ((0, 30), (30, 40)):
            events = stored(CHAIN[first * SHORT_KEY_BYTES : last * SHORT_KEY_BYTES], first)
            index.apply(W0.id, events)
            writer.pages(W0.id, events)
            await connection.run_all([*writer.take_batch(), *writer.snapshot(W0.id, "0-0")])
            await feed.begin(connection)  # nothing is read over either connection
    assert num_held(known, W0.id) == 40


@on_loop
async def test_snapshot_that_redis_has_dropped_is_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "RENEW_S", 0.05)
    async with linked(1) as (redis, (router,)), connected(redis.url) as connection:
        router.join(W0)
        router.report(W0, CHAIN)
        await until_known(redis, {W0.id: 40})
        await until(lambda: not router.link.num_unsent)
        assert await connection.call("DEL", NAMES.snapshot(W0.id)) == 1
        await until_known(redis, {W0.id: 40})


@on_loop
async def test_later_incarnation_fences_the_earlier_one() -> None:
    later = a_worker("w0", id=id_of("later"), num_pages=5000)
    async with linked(2) as (redis, (first, second)):
        first.join(W0)
        first.report(W0, CHAIN)
        await until_known(redis, {W0.id: 40})
        second.join(later)
        second.report(later, CHAIN[: 2 * SHORT_KEY_BYTES])
        await until_known(redis, {later.id: 2})
        first.report(W0, CHAIN)
        await until(lambda: first.link.counters["redis_fenced"] == 1)
        await until_known(redis, {later.id: 2})


@on_loop
async def test_workers_of_a_killed_router_are_forgotten_when_their_leases_expire(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outbox, "LEASE_MS", 300)
    monkeypatch.setattr(link, "RENEW_S", 0.05)
    async with RedisServer() as redis:
        first, second = RouterStandIn(redis.url, "first"), RouterStandIn(redis.url, "second")
        async with running(second):
            async with running(first):
                await until(lambda: first.link.is_up and second.link.is_up)
                first.join(W0)
                second.join(W1)
                first.report(W0, CHAIN)
                second.report(W1, CHAIN)
                await until(lambda: second.held(W0) == 40)
                await until(lambda: first.link.num_unsent == 0)
            await until(lambda: second.index.slot(W0.id) is None)
            await until_known(redis, {W1.id: 40})
            await until(lambda: second.link.num_unsent == 0)
            async with connected(redis.url) as connection:
                found = [await connection.call("EXISTS", NAMES.snapshot(each.id)) for each in (W0, W1)]
            assert found == [0, 1]


@pytest.mark.parametrize(("told_after_s", "num_warnings"), [(60.0, 0), (0.0, 1)])
@on_loop
async def test_redis_that_is_down_for_long_is_warned_of_once(
    told_after_s: float,
    num_warnings: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(link, "TOLD_AFTER_S", told_after_s)
    async with linked(1) as (redis, (router,)):
        await redis.stop()
        await until(lambda: router.link.counters["redis_failures"] >= 3)
    warnings = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert len(warnings) == num_warnings and all("the link to Redis is down: " in each for each in warnings)
