"""A cluster of real processes for bench/router_faults.py, a Redis that can be hurt, and requests for them."""

import asyncio
import os
import random
import secrets
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from time import perf_counter
from typing import Final, NamedTuple

from baton.clock import SystemClock
from baton.cluster.listeners import Listener, processes
from baton.cluster.llm import LLM
from baton.cluster.local_runtime import LocalRuntime
from baton.cluster.operator_node import Operator, connected
from baton.cluster.serve import Cluster
from baton.config import CacheConfig, EngineSettings
from baton.errors import BatonError
from baton.gateway.frontend import Frontend
from baton.hub import Hub
from baton.request import Request, SamplingParams
from baton.router.redis_client import REDIS_FAILURES, Connection, Reply
from baton.router.redis_scripts import Names
from baton.router.redis_server import PrivateRedis
from baton.router_config import RouterConfig
from baton.router_status import RouterStatus
from baton.serve_config import ServeConfig, WorkersConfig
from baton.token_event import TokenEvent
from baton.worker import Routers

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
        os.kill(processes()[Listener(where.host, where.port)], signal.SIGKILL)

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
        connection = Connection(self.url, Names.of("none"))
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
        hub = Hub(key)
        ends.push_async_callback(hub.close)
        frontend = Frontend(secrets.token_hex(16), serving.routers, hub.dial, SystemClock())
        hub.serve(frontend)
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
