"""The benchmark of hurt Redis and routers: a few seconds of its faults, and all of it."""

import argparse
from pathlib import Path

import pytest

from baton.bench.clusters import watched_cluster
from baton.bench.faults.clients import make_questions
from baton.bench.report import Report
from baton.bench.router.faults import (
    MAX_TOKENS,
    OPTIONS,
    HurtRedis,
    hurt_redis,
    kill_router,
    measure,
)
from baton.cluster.redis_server import RedisServer
from tests.event_loop import on_loop
from tests.needs import needs_redis
from tests.served import served

pytestmark = needs_redis

REST_S = 2.0
TIMINGS = ("routing p99", "blind decisions")  # wrong by chance on a busy machine in so short a time


@on_loop
async def test_lost_redis_and_a_killed_router_fail_no_request() -> None:
    questions = make_questions(1, MAX_TOKENS)
    async with RedisServer() as server:
        redis, options = HurtRedis(server), (*OPTIONS, "--redis", server.url, "--drain-timeout", "5")
        with served("tiny", *options, "--prefill", "2", "--decode", "2", "--routers", "2") as found:
            async with watched_cluster(found.port, 2 + 2 + 2 + 1, found.process.pid) as cluster:
                rows = await hurt_redis(cluster, redis, questions, "Redis away", HurtRedis.away, REST_S)
                rows += await kill_router(cluster, questions, "one router killed", REST_S)
    assert not [row for row in rows if not row.met and not row.name.endswith(TIMINGS)]


@pytest.mark.slow
@pytest.mark.timeout(600)
@on_loop
async def test_every_fault_of_redis_and_routers_stays_within_its_limits(tmp_path: Path) -> None:
    report = Report(measure.name, measure.title, tmp_path)
    measuring = measure.measure(argparse.Namespace(rest=8.0), report)
    assert measuring is not None
    await measuring
    assert report.rows and not [row for row in report.rows if not row.met]
