"""Redis and routers are killed, stopped and set back under load: no request fails, no token differs."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Final, TypeAlias

import pytest
from _pytest.mark import ParameterSet

from baton.cluster.offline.llm import LLM
from baton.cluster.redis_server import find_program
from baton.config.cluster import ServeConfig, WorkersConfig
from baton.config.engine import CacheConfig, EngineSettings
from baton.config.router import RouterConfig
from baton.gateway.streams.routers import SILENT_S
from tests.cluster_threads import wait_for
from tests.process_cluster import ProcessCluster
from tests.redis_load import NUM_OPEN, HurtRedis, Load, RoutingShare

pytestmark = pytest.mark.skipif(find_program() is None, reason="there is no redis-server on PATH")

DISPATCHED_AGAIN_S: Final = 3.0
REWARMED_S: Final = 30.0
ROUTING_S: Final = 0.02
STANDS_STILL_S: Final = 10.0

Act: TypeAlias = Callable[[HurtRedis, Load], None]


@pytest.fixture(scope="module")
def redis() -> Iterator[HurtRedis]:
    with HurtRedis() as redis:
        yield redis


def config_of(redis: HurtRedis, num_routers: int) -> ServeConfig:
    return ServeConfig(
        model="tiny",
        runtime="local",
        port=0,
        routers=num_routers,
        router=RouterConfig(policy="cost", redis=redis.url),
        decode=WorkersConfig(num_workers=2),
        engine=EngineSettings(cache=CacheConfig(kv_cache_memory_bytes=32 << 20)),
    )


@pytest.fixture(scope="module")
def cluster(redis: HurtRedis) -> Iterator[ProcessCluster]:
    with ProcessCluster(config_of(redis, 2)) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("tiny", cache={"kv_cache_memory_bytes": 32 << 20}) as llm:
        yield llm


def gone_for_a_while(redis: HurtRedis, load: Load) -> None:
    redis.kill()
    load.answer(40)
    redis.start_empty()


def restarted_empty(redis: HurtRedis, load: Load) -> None:
    redis.kill()
    redis.start_empty()


def set_back(redis: HurtRedis, load: Load) -> None:
    redis.kill()
    redis.start_old()


def stopped(redis: HurtRedis, load: Load) -> None:
    load.until(redis.stand_still(STANDS_STILL_S))


def slow(act: Act) -> ParameterSet:
    return pytest.param(act, marks=pytest.mark.slow)


def all_are_up(cluster: ProcessCluster) -> bool:
    status = cluster.frontend.status
    return status is not None and all(router.redis == "up" for router in status.routers)


ACTS: Final = [gone_for_a_while, slow(restarted_empty), slow(set_back), slow(stopped)]


@pytest.mark.parametrize("act", ACTS)
def test_a_redis_that_is_hurt_fails_no_request_and_is_told_all_again(
    redis: HurtRedis, cluster: ProcessCluster, llm: LLM, act: Act
) -> None:
    redis.remember()
    num_before = redis.snapshot_bytes()
    load = Load(cluster, llm, seed=num_before)  # new prompts: Redis is set back to what knows nothing of them
    load.answer(20)
    load.until(lambda: redis.snapshot_bytes() > num_before)
    num_pages = redis.snapshot_bytes()
    act(redis, load)
    load.until(lambda: redis.snapshot_bytes() >= num_pages and all_are_up(cluster), REWARMED_S)
    load.answer(20)
    load.finish()


@pytest.mark.parametrize("name", ["router-0", "router-1"])
def test_a_router_that_is_killed_fails_no_request_and_holds_up_none(
    cluster: ProcessCluster, llm: LLM, name: str
) -> None:
    cluster.wait_until_whole()
    load = Load(cluster, llm, seed=1)
    load.answer(20)
    cluster.kill(name)
    load.answer(20)
    load.finish()
    wait_for(lambda: has_all_routers(cluster))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["router-0", "router-1"])
def test_a_router_that_stands_still_holds_up_no_request_for_long(
    cluster: ProcessCluster, llm: LLM, name: str
) -> None:
    cluster.wait_until_whole()
    load = Load(cluster, llm, seed=4)
    load.answer(20)
    pid, stopped_s = cluster.pid(name), time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    try:
        load.until(lambda: len(cluster.frontend._peer_registry.routers) == 1, 2 * SILENT_S)
        load.answer(20)
        load.until(lambda: time.monotonic() - stopped_s > STANDS_STILL_S)
    finally:
        os.kill(pid, signal.SIGCONT)
    load.until(lambda: has_all_routers(cluster))
    load.answer(20)
    load.finish()


def has_all_routers(cluster: ProcessCluster) -> bool:
    status = cluster.frontend.status
    return status is not None and len(status.routers) == cluster.config.routers


@pytest.mark.slow
@pytest.mark.parametrize("act", [gone_for_a_while, restarted_empty, set_back, stopped])
def test_routing_is_as_fast_while_redis_is_hurt(
    redis: HurtRedis, cluster: ProcessCluster, llm: LLM, act: Act
) -> None:
    load = Load(cluster, llm, seed=2)
    redis.remember()
    load.answer(40)
    routing = RoutingShare(cluster)
    act(redis, load)
    load.answer(200)
    load.finish()
    assert routing.within(ROUTING_S) >= 0.99


@pytest.mark.slow
def test_the_only_router_is_back_soon_and_knows_what_workers_hold(redis: HurtRedis, llm: LLM) -> None:
    with ProcessCluster(config_of(redis, 1)) as cluster:
        load = Load(cluster, llm, seed=3)
        load.answer(40)
        cluster.kill("router-0")
        killed_s = time.monotonic()
        load.answer(NUM_OPEN + 1)  # one of them was asked for after the kill
        assert time.monotonic() - killed_s <= DISPATCHED_AGAIN_S
        load.answer(200)
        load.finish()
        cluster.wait_until_whole()
        status = cluster.frontend.status
        assert status is not None
        (router,) = status.routers
        assert router.counters["decisions"] >= 200 and router.blind_share < 0.01
