"""A cluster for bench/prefix/suite.py: prefill and decode workers as processes, router and gateway in this
one.

All that is between them is what `baton serve` runs: sockets, sealed frames, pages that move. The router is
here so that its decisions, and what it expected of them, can be read beside what they came to; and so that a
bench can narrow a choice (`wish`) to the workers that it wants to measure.
"""

import asyncio
import json
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Final, NamedTuple, TypeAlias

import msgspec

from baton.clock import SystemClock
from baton.cluster.process_spec import ProcessSpec
from baton.cluster.runtimes.local import LocalRuntime
from baton.config.cluster import WorkerConfig
from baton.config.engine import EngineConfig, engine_config
from baton.config.router import RouterConfig
from baton.errors import BatonError, WorkerLost
from baton.gateway.streams.frontend import Frontend
from baton.messages.control import Decision
from baton.messages.workers import WorkerRole
from baton.request import Request, SamplingParams, TokenEvent
from baton.router.policies.cost import CostPolicy
from baton.router.policies.costs import PairCandidate
from baton.router.router import Router
from baton.rpc.server import RpcServer

START_S: Final = 120.0
ANSWER_S: Final = 120.0
TOLD_S: Final = 10.0  # workers tell what their work took once a second
VOCAB_SIZE: Final = 1024
MAX_MODEL_LEN: Final = 4096
NUM_WORKERS: Final = 2  # of either role
LAYERS: Final = 6
PAGE_SIZE: Final = 16
STEP_TOKENS: Final = 128  # a worker hears what is asked of it between two steps
ROOM_TOKENS: Final = 40_000  # in each worker's pages
KV_TOKEN_BYTES: Final = LAYERS * 2 * 2 * 32 * 4  # keys and values of two heads
# Some three million weights: a prompt takes a CPU long enough to be worth keeping, and a bench not too long.
_MODEL: Final = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": MAX_MODEL_LEN,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "mlp_bias": False,
    "initializer_range": 0.2,
}
Wish: TypeAlias = Callable[[PairCandidate], bool]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    policy: str
    caching: tuple[WorkerRole, ...] = tuple(WorkerRole)  # whose workers keep what they have computed or got


class Answer:
    """A Sink. `ttft_s` is from the call that asked on."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.token_ids: list[int] = []
        self.ttft_s = 0.0
        self._began_s = perf_counter()
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def tokens(self, events: Sequence[TokenEvent]) -> None:
        if not self.token_ids:
            self.ttft_s = perf_counter() - self._began_s
        self.token_ids += [event.token_id for event in events if event.token_id is not None]
        if events[-1].finish_reason is not None:
            self._end.set_result(None)

    def failed(self, error: BatonError) -> None:
        self._end.set_exception(error)

    async def end(self) -> "Answer":
        """Raises what the request failed with, or TimeoutError."""
        await asyncio.wait_for(asyncio.shield(self._end), ANSWER_S)
        return self


class World:
    def __init__(self, router: Router, frontend: Frontend) -> None:
        self.router = router
        self._frontend = frontend
        self._wish: Wish | None = None
        policy = router.cluster_state.policy
        if isinstance(policy, CostPolicy):
            self._select, policy.select = policy.select, self._wished

    def worker_id(self, name: str) -> str:
        return next(each.id for each in self.router.members.all() if each.worker.name == name)

    async def publisher(self, name: str, num_changes: int) -> None:
        """Wait until the worker of this name has told of so many changed pages in all."""
        await self._until(lambda: self.num_told(name) >= num_changes, TOLD_S)

    def num_told(self, name: str) -> int:
        return self.router.cluster_state.index.next_number(self.worker_id(name)) or 0

    async def ask(self, token_ids: Sequence[int], num_tokens: int, wish: Wish | None = None) -> Answer:
        """Returns once it has been routed. wish: of all candidates those that may be chosen, if any is."""
        self._wish = wish
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        request = Request(request_id=secrets.token_hex(16), token_ids=tuple(token_ids), sampling=sampling)
        answer = Answer(request.request_id)
        self._frontend.open(request, answer)
        await self._until(lambda: self.decision(answer) is not None, ANSWER_S)
        self._wish = None
        return answer

    def decision(self, answer: Answer) -> Decision | None:
        return self.router.cluster_state.decisions.get((answer.request_id, 0))

    async def told(self, answer: Answer) -> Decision:
        """The decision, once the worker has told what the prompt took."""

        def is_told() -> bool:
            decision = self.decision(answer)
            return decision is not None and decision.measured is not None

        await self._until(is_told, TOLD_S)
        decision = self.decision(answer)
        assert decision is not None
        return decision

    async def wait_until_whole(self) -> None:
        def is_whole() -> bool:
            members = list(self.router.members.all())
            return len(members) == 2 * NUM_WORKERS and all(
                len(member.reached) >= (NUM_WORKERS if member.worker.role is WorkerRole.DECODE else 3)
                for member in members
            )

        await self._until(lambda: is_whole() and self._frontend.is_ready, START_S)
        await self._until(lambda: len(self._frontend.workers) == 2 * NUM_WORKERS, START_S)

    async def _until(self, is_so: Callable[[], bool], timeout_s: float) -> None:
        async with asyncio.timeout(timeout_s):
            while not is_so():
                await asyncio.sleep(0.001)

    def _wished(
        self, candidates: Sequence[PairCandidate], random: int, given: Callable[[str], float]
    ) -> PairCandidate:
        wish = self._wish
        wished = [each for each in candidates if wish is None or wish(each)]
        return self._select(wished or candidates, random, given)


def write_model(directory: Path) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(_MODEL))
    return directory


def engine_of(model: Path, *, is_caching: bool) -> EngineConfig:
    cache = {
        "page_size": PAGE_SIZE,
        "kv_cache_memory_bytes": ROOM_TOKENS * KV_TOKEN_BYTES,
        "enable_prefix_caching": is_caching,
    }
    steps = {"max_num_batched_tokens": STEP_TOKENS}
    base = {"model": str(model), "device": "cpu", "load_format": "dummy", "dtype": "float32"}
    return engine_config({**base, "cache": cache, "scheduler": steps})


@asynccontextmanager
async def open_world(model: Path, plan: Plan) -> AsyncIterator[World]:
    """WorkerLost when a worker does not come."""
    key = secrets.token_bytes(32)
    logging.getLogger("baton.router").setLevel(logging.ERROR)  # in the end it sees all workers go
    async with AsyncExitStack() as ends:
        router_hub, gateway_hub, runtime = RpcServer(key), RpcServer(key), LocalRuntime(key)
        await runtime.open()
        ends.push_async_callback(runtime.close)
        ends.push_async_callback(router_hub.close)
        router = Router(RouterConfig(policy=plan.policy), SystemClock(), secrets.token_hex(16))
        address = await router_hub.listen()
        router_hub.serve(router)
        specs = []
        for role in WorkerRole:
            engine = engine_of(model, is_caching=role in plan.caching)
            for name in (f"{role.value}-{index}" for index in range(NUM_WORKERS)):
                config = WorkerConfig(
                    role=role, name=name, model_name="model", engine=engine, routers=(address,)
                )
                specs.append(
                    ProcessSpec(kind="worker", name=name, config=config, num_ranks=1, role=role.value)
                )
        await runtime.place(specs)
        processes = [await runtime.spawn(spec) for spec in specs]
        async with asyncio.timeout(START_S):
            for process in processes:
                await process.ready()
        frontend = Frontend(secrets.token_hex(16), [address], gateway_hub.dial, SystemClock())
        ends.push_async_callback(gateway_hub.close)
        gateway_hub.serve(frontend)
        world = World(router, frontend)
        try:
            await world.wait_until_whole()
        except TimeoutError as error:
            raise WorkerLost("the workers did not find each other") from error
        yield world


# Prompts with shared beginnings: questions about long documents, and conversations that grow.

DOCUMENT_TOKENS: Final = 1536
QUESTION_TOKENS: Final = 24
SYSTEM_TOKENS: Final = 1024  # that all conversations of a round begin with
TURN_TOKENS: Final = 32
ANSWER_TOKENS: Final = 8
NUM_AT_ONCE: Final = 2


class Told(NamedTuple):
    """Of one request: its time to first token, and its tokens, which must be the same whoever answers."""

    ttft_s: float
    token_ids: tuple[int, ...]


def tokens(random: Random, num_tokens: int) -> list[int]:
    return [random.randrange(VOCAB_SIZE) for _ in range(num_tokens)]


async def questions(world: World, seed: int, num_documents: int = 2, num_questions: int = 6) -> list[Told]:
    """In turns about each document, NUM_AT_ONCE at a time; the first of each is as cold as any."""
    random = Random(seed)
    documents = [tokens(random, DOCUMENT_TOKENS) for _ in range(num_documents)]
    prompts = [
        [*document, *tokens(random, QUESTION_TOKENS)] for _ in range(num_questions) for document in documents
    ]
    seats = asyncio.Semaphore(NUM_AT_ONCE)

    async def ask(prompt: Sequence[int]) -> Told:
        async with seats:
            return _told(await (await world.ask(prompt, ANSWER_TOKENS)).end())

    return await asyncio.gather(*map(ask, prompts))


async def conversations(
    world: World, seed: int, num_conversations: int = 2, num_turns: int = 5
) -> list[Told]:
    """Each turn's prompt is all that was said before and a little more; conversations go on side by side."""
    random = Random(seed)
    system = tokens(random, SYSTEM_TOKENS)
    said = [[tokens(random, TURN_TOKENS) for _ in range(num_turns)] for _ in range(num_conversations)]

    async def converse(turns: Sequence[Sequence[int]]) -> list[Told]:
        history, told = list(system), list[Told]()
        for turn in turns:
            history += turn
            told.append(_told(await (await world.ask(history, ANSWER_TOKENS)).end()))
            history += told[-1].token_ids
        return told

    return [each for told in await asyncio.gather(*map(converse, said)) for each in told]


async def warm_up(world: World, seed: int) -> None:
    """Prompts of all lengths that come: workers have run, and the router has seen what they take."""
    random = Random(seed)
    for num_tokens in (24, 100, 400, 800, 1200, DOCUMENT_TOKENS):
        asked = [await world.ask(tokens(random, num_tokens), ANSWER_TOKENS) for _ in range(4)]
        for answer in asked:
            await answer.end()


def _told(answer: Answer) -> Told:
    return Told(answer.ttft_s, tuple(answer.token_ids))
