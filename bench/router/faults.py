"""What requests notice when Redis or a router is hurt: real processes on this machine, under load.

python -m baton.bench.router.faults [--rest 8] [--json FILE]

Two prefill and two decode workers of the tiny model, by the policy `cost`. Redis is killed and stays away,
stands still for 10 s, is set back to nothing and to what it held before the load; then a router is killed,
beside another and alone. Every answer is compared with what one engine says. How long routing takes is the
routers' own count: the bound within which 99 of 100 were routed.
"""

import argparse
import asyncio
import os
import random
import secrets
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from time import perf_counter
from typing import Final, NamedTuple, TypeAlias

import msgspec

from baton.bench.machine import machine_description, one_line
from baton.bench.report import RESULTS, Row, at_least, at_most, print_table, write_json
from baton.clock import SystemClock
from baton.cluster.offline.llm import LLM
from baton.cluster.operator_node import Operator, connected
from baton.cluster.ports import ListeningProcess, processes
from baton.cluster.runtimes.local import LocalRuntime
from baton.cluster.serve import Cluster
from baton.config.cluster import ServeConfig, WorkersConfig
from baton.config.engine import CacheConfig, EngineSettings
from baton.config.router import RouterConfig
from baton.errors import BatonError, PeerGone
from baton.gateway.streams.frontend import Frontend
from baton.messages.status import RouterStatus
from baton.messages.workers import Routers
from baton.request import Request, SamplingParams, TokenEvent
from baton.router.redis.client import REDIS_FAILURES, Names, RedisConnection, Reply
from baton.router.redis.server import PrivateRedis
from baton.rpc.server import RpcServer

# A cluster of real processes for bench/router/faults.py, a Redis that can be hurt, and requests for them.

VOCAB_SIZE: Final = 1024
NUM_PROMPTS: Final = 48
NUM_DOCUMENTS: Final = 6
NUM_CLIENTS: Final = 6  # each asks again when it has its answer
DOCUMENT_TOKENS: Final = 320
WORKERS: Final = WorkersConfig(num_workers=2)
ENGINE: Final = EngineSettings(cache=CacheConfig(kv_cache_memory_bytes=64 << 20))
DUMP: Final = "dump.rdb"


class Prompt(NamedTuple):
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    golden: tuple[int, ...]  # what one engine answers


def make_prompts(seed: int) -> list[Prompt]:
    """Questions about documents: greedy and seeded by turns, each answered once by one engine."""
    rng = random.Random(seed)
    documents = [_tokens(rng, DOCUMENT_TOKENS) for _ in range(NUM_DOCUMENTS)]
    asked = [documents[number % NUM_DOCUMENTS] + _tokens(rng, 20) for number in range(NUM_PROMPTS)]
    how = [
        SamplingParams(max_tokens=12, temperature=float(number % 2), seed=number, ignore_eos=True)
        for number in range(NUM_PROMPTS)
    ]
    with LLM("tiny", cache={"kv_cache_memory_bytes": 64 << 20}) as llm:
        answered = [
            llm.generate([list(each)], sampling)[0] for each, sampling in zip(asked, how, strict=True)
        ]
    golden = [tuple(each.outputs[0].token_ids) for each in answered]
    return [Prompt(*each) for each in zip(map(tuple, asked), how, golden, strict=True)]


class Answer:
    """A Sink."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.first_s = 0.0  # when its first token came
        self.error: BatonError | None = None
        self._end = asyncio.Event()

    def tokens(self, events: Sequence[TokenEvent]) -> None:
        if not self.token_ids:
            self.first_s = perf_counter()
        self.token_ids += [event.token_id for event in events if event.token_id is not None]
        if events[-1].finish_reason is not None:
            self._end.set()

    def failed(self, error: BatonError) -> None:
        self.error = error
        self._end.set()

    async def end(self) -> None:
        await self._end.wait()


class World:
    """`num_answered`, `num_failed` and `num_wrong` go on counting while `load` lasts."""

    def __init__(self, operator: Operator, frontend: Frontend, routers: Routers) -> None:
        self.num_answered = self.num_failed = self.num_wrong = 0
        self._operator = operator
        self._frontend = frontend
        self._routers = routers

    async def statuses(self) -> Sequence[RouterStatus]:
        return (await self._operator.status()).routers

    def kill_router(self, number: int) -> None:
        where = self._routers[number]
        os.kill(processes()[ListeningProcess(where.host, where.port)], signal.SIGKILL)

    async def ask(self, prompt: Prompt) -> Answer:
        """Returns when it has ended, and is counted."""
        request = Request(
            request_id=secrets.token_hex(16), token_ids=prompt.token_ids, sampling=prompt.sampling
        )
        answer = Answer()
        try:
            self._frontend.open(request, answer)
        except BatonError as error:
            answer.failed(error)
        await answer.end()
        self.num_answered += 1
        self.num_failed += answer.error is not None
        self.num_wrong += answer.error is None and tuple(answer.token_ids) != prompt.golden
        return answer

    @asynccontextmanager
    async def load(self, prompts: Sequence[Prompt]) -> AsyncIterator[None]:
        """Until the block ends; then what was asked for is answered."""
        is_over = False

        async def client(number: int) -> None:
            while not is_over:
                number += 1
                await self.ask(prompts[number % len(prompts)])

        clients = [asyncio.create_task(client(7 * number)) for number in range(NUM_CLIENTS)]
        try:
            yield
        finally:
            is_over = True
            await asyncio.gather(*clients)


class HurtRedis:
    """A redis-server, and what may happen to one."""

    def __init__(self, redis: PrivateRedis) -> None:
        self._redis = redis
        self._folder = Path(redis.url.removeprefix("unix://")).parent
        self._snapshot = b""

    @property
    def url(self) -> str:
        return self._redis.url

    async def remember(self) -> None:
        """For `start_old`."""
        await self.ask("SAVE")
        self._snapshot = (self._folder / DUMP).read_bytes()
        (self._folder / DUMP).unlink()

    async def kill(self) -> None:
        os.kill(self._redis.pid, signal.SIGKILL)
        await self._redis.ended()

    async def start_empty(self) -> None:
        await self._redis.start()

    async def start_old(self) -> None:
        (self._folder / DUMP).write_bytes(self._snapshot)
        await self._redis.start()
        (self._folder / DUMP).unlink()

    async def stand_still(self, seconds: float) -> None:
        os.kill(self._redis.pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            os.kill(self._redis.pid, signal.SIGCONT)

    async def num_pages(self) -> int:
        """That it says somebody holds; 0 where it does not answer."""
        try:
            names = await self.ask("KEYS", "baton:*:pages")
            return sum([int(await self.ask("HLEN", name)) for name in names])
        except REDIS_FAILURES:
            return 0

    async def ask(self, *words: str | bytes) -> Reply:
        connection = RedisConnection(self.url, Names.of("none"))
        try:
            return await connection.call(*words)
        finally:
            await connection.aclose()


@asynccontextmanager
async def open_world(redis_url: str, num_routers: int) -> AsyncIterator[World]:
    """WorkerLost when a worker does not come."""
    key = secrets.token_bytes(32)
    config = ServeConfig(
        model="tiny",
        runtime="local",
        port=0,
        routers=num_routers,
        router=RouterConfig(policy="cost", redis=redis_url),
        prefill=WORKERS,
        decode=WORKERS,
        engine=ENGINE,
    )
    async with AsyncExitStack() as ends:
        cluster = Cluster(config, LocalRuntime(key), key, say=lambda text: None)
        ends.push_async_callback(cluster.close)
        serving = await cluster.start()
        rpc_server = RpcServer(key)
        ends.push_async_callback(rpc_server.close)
        frontend = Frontend(secrets.token_hex(16), serving.routers, rpc_server.dial, SystemClock())
        rpc_server.serve(frontend)
        operator = await ends.enter_async_context(connected(serving.routers, key))
        num_workers = 2 * WORKERS.num_workers
        await until(lambda: frontend.is_ready and len(frontend.workers) == num_workers)
        yield World(operator, frontend, serving.routers)


async def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


def _tokens(rng: random.Random, number: int) -> list[int]:
    return [rng.randrange(2, VOCAB_SIZE) for _ in range(number)]


TITLE: Final = "Faults of Redis and routers under load"
ROUTING_MS: Final = 20.0
REWARMED_S: Final = 30.0
DISPATCHED_S: Final = 3.0
BLIND_PERCENT: Final = 1.0
STANDS_STILL_S: Final = 10.0
AWAY_S: Final = 3.0
Act: TypeAlias = Callable[[HurtRedis], Awaitable[None]]


async def away(redis: HurtRedis) -> None:
    await redis.kill()
    await asyncio.sleep(AWAY_S)
    await redis.start_empty()


async def restarted_empty(redis: HurtRedis) -> None:
    await redis.kill()
    await redis.start_empty()


async def set_back(redis: HurtRedis) -> None:
    await redis.kill()
    await redis.start_old()


async def stopped(redis: HurtRedis) -> None:
    await redis.stand_still(STANDS_STILL_S)


ACTS: Final[dict[str, Act]] = {
    f"Redis killed, back in {AWAY_S:g} s": away,
    f"Redis stopped {STANDS_STILL_S:g} s": stopped,
    "Redis restarted empty": restarted_empty,
    "Redis set back": set_back,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rest", type=float, default=8.0, help="seconds of load after each fault (8)")
    parser.add_argument("--json", type=Path, default=RESULTS / "router_faults.json", metavar="FILE")
    options = parser.parse_args()
    print(one_line(machine_description()), flush=True)
    rows = asyncio.run(_measure(make_prompts(seed=1), options.rest))
    print_table(TITLE, rows)
    write_json(options.json, TITLE, rows, {})


async def _measure(prompts: Sequence[Prompt], rest_s: float) -> list[Row]:
    rows: list[Row] = []
    async with PrivateRedis() as server:
        redis = HurtRedis(server)
        async with open_world(redis.url, num_routers=2) as world:
            await redis.remember()
            for name, act in ACTS.items():
                rows += await _hurt(world, redis, prompts, name, act, rest_s)
            rows += await _kill_router(world, prompts, "one router of two killed", rest_s)
        async with open_world(redis.url, num_routers=1) as world:
            rows += await _kill_router(world, prompts, "the only router killed", rest_s)
    return rows


async def _hurt(
    world: World, redis: HurtRedis, prompts: Sequence[Prompt], name: str, act: Act, rest_s: float
) -> list[Row]:
    num_before = world.num_answered, world.num_failed, world.num_wrong
    async with world.load(prompts):
        await asyncio.sleep(rest_s)  # everybody knows what workers hold, and Redis too
        num_pages, before = await redis.num_pages(), await world.statuses()
        await act(redis)
        begun_s = perf_counter()
        while await redis.num_pages() < num_pages:
            if perf_counter() - begun_s > 2 * REWARMED_S:
                break
            await asyncio.sleep(0.02)
        rewarmed_s = perf_counter() - begun_s
        await asyncio.sleep(rest_s)
        routing = _difference(before, await world.statuses())
    return [
        *_answer_rows(world, name, num_before),
        at_most(f"{name}: routing p99", 1000 * routing.routing_quantile_s(0.99), "ms", ROUTING_MS),
        at_most(f"{name}: rewarmed after", rewarmed_s, "s", REWARMED_S, f"{num_pages} pages"),
    ]


async def _kill_router(world: World, prompts: Sequence[Prompt], name: str, rest_s: float) -> list[Row]:
    num_before = world.num_answered, world.num_failed, world.num_wrong
    async with world.load(prompts):
        await asyncio.sleep(rest_s)
        before = {router.id for router in await world.statuses()}
        killed_s = perf_counter()
        world.kill_router(0)
        answer = await world.ask(prompts[0])
        new = await _new_router(world, before)
        await asyncio.sleep(rest_s)
        after = await world.statuses()
    asked = [router for router in after if router.counters.get("decisions")]
    blind = max((router.blind_share for router in asked if router.id == new or len(after) > 1), default=0.0)
    num_decisions = sum(router.counters["decisions"] for router in asked)
    return [
        *_answer_rows(world, name, num_before),
        at_most(f"{name}: next first token after", answer.first_s - killed_s, "s", DISPATCHED_S),
        at_most(f"{name}: blind decisions", 100 * blind, "%", BLIND_PERCENT, f"of {num_decisions}"),
    ]


def _answer_rows(world: World, name: str, num_before: tuple[int, int, int]) -> list[Row]:
    num_answered = world.num_answered - num_before[0]
    return [
        at_least(f"{name}: requests", num_answered, "", 100),
        at_most(f"{name}: failed", world.num_failed - num_before[1], "", 0),
        at_most(f"{name}: with wrong tokens", world.num_wrong - num_before[2], "", 0),
    ]


async def _new_router(world: World, before: set[str]) -> str:
    """Its id, once one answers that was not there before."""
    while True:
        try:
            for router in await world.statuses():
                if router.id not in before:
                    return router.id
        except (PeerGone, TimeoutError):
            pass
        await asyncio.sleep(0.05)


def _difference(before: Sequence[RouterStatus], after: Sequence[RouterStatus]) -> RouterStatus:
    """What all have routed in between."""
    was = [sum(counts) for counts in zip(*(each.routing_counts for each in before), strict=True)]
    now = [sum(counts) for counts in zip(*(each.routing_counts for each in after), strict=True)]
    counts = tuple(late - early for early, late in zip(was, now, strict=True))
    return msgspec.structs.replace(after[0], routing_counts=counts)


if __name__ == "__main__":
    main()
