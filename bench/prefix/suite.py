"""The worth of prefix reuse between real processes: two prefill and two decode workers on this machine.

    baton bench prefix            a minute or two
    baton bench prefix --quick    few rounds, to see that the suite runs

docs/benchmarks.md explains the figures. The router and a gateway run in this process, so that the suite can
read decisions beside measured times, and narrow a choice to the workers that it measures.
"""

import asyncio
import logging
import secrets
import tempfile
from argparse import Namespace
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter
from typing import Final, NamedTuple, TypeAlias

from baton.bench.engine.replica import LLAMA_3M, random_tokens
from baton.bench.report import Plot, Report, Row, at_least, at_most, option, ranked_shares, suite
from baton.clock import SystemClock
from baton.cluster.offline.llm import LLM
from baton.cluster.runtimes.base import ProcessSpec
from baton.cluster.runtimes.local import LocalRuntime
from baton.config.cluster import WorkerConfig
from baton.config.engine import engine_config
from baton.config.router import RouterConfig
from baton.errors import BatonError
from baton.gateway.streams.frontend import Frontend
from baton.messages.bounds import Kind
from baton.messages.control import Decision
from baton.messages.workers import WorkerRole
from baton.request import Request, SamplingParams, TokenEvent
from baton.router.policies.candidates import PairCandidate
from baton.router.policies.cost import CostPolicy
from baton.router.router import Router
from baton.rpc.server import RpcServer
from baton.token_ids import TokenIds

START_S: Final = 120.0
ANSWER_S: Final = 120.0
TOLD_S: Final = 10.0  # workers tell what their work took once a second
NUM_WORKERS: Final = 2  # of either role
PAGE_SIZE: Final = 16
STEP_TOKENS: Final = 128  # a worker reads its messages between two steps
ROOM_TOKENS: Final = 40_000  # in each worker's pages
# A prompt takes a CPU long enough to be worth keeping, and a bench not too long.
SHAPE: Final = replace(LLAMA_3M, max_positions=4096, initializer_range=0.2)
KV_TOKEN_BYTES: Final = SHAPE.num_layers * 2 * SHAPE.num_kv_heads * SHAPE.head_dim * 4
DOCUMENT_TOKENS: Final = 1536
QUESTION_TOKENS: Final = 24
SYSTEM_TOKENS: Final = 1024  # that all conversations of a round begin with
TURN_TOKENS: Final = 32
ANSWER_TOKENS: Final = 8
NUM_AT_ONCE: Final = 2
BUSY_PROMPTS: Final = 2
NUM_LESSONS: Final = 3  # pulls that teach the router and do not count
FIRST, SECOND = "prefill-0", "prefill-1"
MOST_TTFT_SHARE: Final = 0.4
MOST_ERROR: Final = 0.3


class AnswerSink:
    """The sink of one request. `ttft_s` counts from the call that asked."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.token_ids: list[int] = []
        self.ttft_s = 0.0
        self._began_s = perf_counter()
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def tokens(self, events: Sequence[TokenEvent]) -> None:
        """Take tokens from the gateway."""
        if not self.token_ids:
            self.ttft_s = perf_counter() - self._began_s
        self.token_ids += [event.token_id for event in events if event.token_id is not None]
        if events[-1].finish_reason is not None:
            self._end.set_result(None)

    def failed(self, error: BatonError) -> None:
        """Take an error from the gateway."""
        self._end.set_exception(error)

    async def end(self) -> "AnswerSink":
        """Wait for the end. Raises the error of the request, or TimeoutError."""
        await asyncio.wait_for(asyncio.shield(self._end), ANSWER_S)
        return self


class PrefixCluster:
    """A cluster with its router in this process. With the policy `cost` a call may name a prefill worker."""

    def __init__(self, router: Router, frontend: Frontend) -> None:
        self.router = router
        self._frontend = frontend
        self._prefill = ""
        policy = router.cluster_state.policy
        if isinstance(policy, CostPolicy):
            self._select, policy.select = policy.select, self._narrowed

    def worker_id(self, name: str) -> str:
        """Return the id of the worker of this name."""
        return next(each.id for each in self.router.members.all() if each.worker.name == name)

    def num_changes(self, name: str) -> int:
        """Return how many changed pages the worker of this name has told the router of."""
        return self.router.cluster_state.index.next_number(self.worker_id(name)) or 0

    async def ask(self, token_ids: Sequence[int], num_tokens: int, prefill: str = "") -> AnswerSink:
        """Ask and return once the request is routed. prefill: the name of the prefill worker to choose."""
        self._prefill = self.worker_id(prefill) if prefill else ""
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        request = Request(
            request_id=secrets.token_hex(16), token_ids=TokenIds.of(token_ids), sampling=sampling
        )
        answer = AnswerSink(request)
        self._frontend.open(request, answer)
        await _until(lambda: self._decision(answer) is not None, ANSWER_S)
        self._prefill = ""
        return answer

    async def decision(self, answer: AnswerSink) -> Decision:
        """Return the decision about an answered request once the worker has told what the prompt took."""
        await answer.end()
        await _until(lambda: getattr(self._decision(answer), "measured", None) is not None, TOLD_S)
        decision = self._decision(answer)
        assert decision is not None
        return decision

    def is_whole(self) -> bool:
        """Return whether all workers reach each other and the gateway."""
        members = list(self.router.members.all())
        return (
            not self._frontend.why_not_ready
            and len(members) == len(self._frontend.workers) == 2 * NUM_WORKERS
            and all(
                len(member.reached) >= (NUM_WORKERS if member.worker.role is WorkerRole.DECODE else 3)
                for member in members
            )
        )

    def _decision(self, answer: AnswerSink) -> Decision | None:
        return self.router.cluster_state.decisions.get((answer.request.request_id, 0))

    def _narrowed(
        self, candidates: Sequence[PairCandidate], random: int, given: Callable[[str], float]
    ) -> PairCandidate:
        narrowed = [each for each in candidates if each.prefill == self._prefill] if self._prefill else []
        return self._select(narrowed or candidates, random, given)


async def _until(is_so: Callable[[], bool], timeout_s: float) -> None:
    async with asyncio.timeout(timeout_s):
        while not is_so():
            await asyncio.sleep(0.001)


@asynccontextmanager
async def open_cluster(
    model: Path, policy: str, caching: Collection[WorkerRole]
) -> AsyncIterator[PrefixCluster]:
    """Run the workers as processes, the router and a gateway here.

    caching: the roles of workers that keep pages for later prompts. TimeoutError: a worker does not come.
    """
    key = secrets.token_bytes(32)
    logging.getLogger("baton.router").setLevel(logging.ERROR)  # at the end all workers leave
    async with AsyncExitStack() as ends:
        router_rpc, gateway_rpc, runtime = RpcServer(key), RpcServer(key), LocalRuntime(key)
        await runtime.open()
        ends.push_async_callback(runtime.close)
        ends.push_async_callback(router_rpc.close)
        router = Router(RouterConfig(policy=policy), SystemClock(), secrets.token_hex(16))
        address = await router_rpc.listen()
        router_rpc.serve(router)
        specs = []
        for role in WorkerRole:
            cache = {
                "page_size": PAGE_SIZE,
                "kv_cache_memory_bytes": ROOM_TOKENS * KV_TOKEN_BYTES,
                "enable_prefix_caching": role in caching,
            }
            steps = {"max_num_batched_tokens": STEP_TOKENS}
            settings = {"model": str(model), "device": "cpu", "load_format": "dummy", "dtype": "float32"}
            engine = engine_config({**settings, "cache": cache, "scheduler": steps})
            for name in (f"{role.value}-{index}" for index in range(NUM_WORKERS)):
                config = WorkerConfig(role=role, name=name, model_name="m", engine=engine, routers=(address,))
                specs.append(
                    ProcessSpec(kind=Kind.WORKER, name=name, config=config, num_ranks=1, role=role.value)
                )
        await runtime.place(specs)
        processes = [await runtime.spawn(spec) for spec in specs]
        async with asyncio.timeout(START_S):
            for process in processes:
                await process.ready()
        frontend = Frontend(secrets.token_hex(16), [address], gateway_rpc.dial, SystemClock())
        ends.push_async_callback(gateway_rpc.close)
        gateway_rpc.serve(frontend)
        cluster = PrefixCluster(router, frontend)
        await _until(cluster.is_whole, START_S)
        yield cluster


tokens: Final = partial(random_tokens, SHAPE)


async def ask_about_documents(cluster: PrefixCluster, random: Random) -> list[AnswerSink]:
    """Ask six questions about each of two documents, in turns, NUM_AT_ONCE at a time."""
    documents = [tokens(random, DOCUMENT_TOKENS) for _ in range(2)]
    prompts = [[*document, *tokens(random, QUESTION_TOKENS)] for _ in range(6) for document in documents]
    seats = asyncio.Semaphore(NUM_AT_ONCE)

    async def ask(prompt: Sequence[int]) -> AnswerSink:
        async with seats:
            return await (await cluster.ask(prompt, ANSWER_TOKENS)).end()

    return await asyncio.gather(*map(ask, prompts))


async def converse(cluster: PrefixCluster, random: Random) -> list[AnswerSink]:
    """Hold two conversations of five turns side by side; each prompt is the history and a little more."""
    system = tokens(random, SYSTEM_TOKENS)
    turns = [[tokens(random, TURN_TOKENS) for _ in range(5)] for _ in range(2)]

    async def hold(turns: Sequence[Sequence[int]]) -> list[AnswerSink]:
        history, answers = list(system), list[AnswerSink]()
        for turn in turns:
            history += turn
            answers.append(await (await cluster.ask(history, ANSWER_TOKENS)).end())
            history += answers[-1].token_ids
        return answers

    return [answer for answers in await asyncio.gather(*map(hold, turns)) for answer in answers]


Workload: TypeAlias = Callable[[PrefixCluster, Random], Awaitable[list[AnswerSink]]]
WORKLOADS: Final[dict[str, Workload]] = {"documents": ask_about_documents, "conversations": converse}


async def warm_up(cluster: PrefixCluster, random: Random) -> None:
    """Ask prompts of all lengths, so that the router learns what they take."""
    for num_tokens in (24, 100, 400, 800, 1200, DOCUMENT_TOKENS):
        for answer in [await cluster.ask(tokens(random, num_tokens), ANSWER_TOKENS) for _ in range(4)]:
            await answer.end()


class Pull(NamedTuple):
    """A question at the second prefill worker about a document that only the busy first worker has.

    The router chooses between a pull and computing. `computed` is of a prompt of that length of which no page
    is cached. Decode workers keep nothing.
    """

    pulled: Decision
    computed: Decision
    queue_s: float  # expected of the busy worker
    is_from_busy_worker: bool
    answer: AnswerSink  # after the pull

    @property
    def expected_margin_s(self) -> float:
        """Seconds until the first token that the pull saves, by the router when it chose."""
        terms, others = self.pulled.chosen.terms, self.computed.chosen.terms
        return others["pull_s"] + others["compute_s"] - terms["pull_s"] - terms["compute_s"]

    @property
    def measured_margin_s(self) -> float:
        """The same by the times of the worker."""
        pulled, computed = self.pulled.measured, self.computed.measured
        assert pulled is not None and computed is not None
        return computed.pulled_s + computed.computed_s - pulled.pulled_s - pulled.computed_s


async def pull(cluster: PrefixCluster, random: Random) -> Pull:
    """Have the first worker compute a document and keep it busy; then ask the second worker about it."""
    document = tokens(random, DOCUMENT_TOKENS)
    num_changes = cluster.num_changes(FIRST) + DOCUMENT_TOKENS // PAGE_SIZE
    await (await cluster.ask([*document, *tokens(random, QUESTION_TOKENS)], 1, FIRST)).end()
    await _until(lambda: cluster.num_changes(FIRST) >= num_changes, TOLD_S)
    question, cold = [*document, *tokens(random, QUESTION_TOKENS)], tokens(random, len(document))
    queue_s, decisions, answers = 0.0, list[Decision](), list[AnswerSink]()
    for prompt in (question, [*cold, *tokens(random, QUESTION_TOKENS)]):
        busy = [await cluster.ask(tokens(random, DOCUMENT_TOKENS), 1, FIRST) for _ in range(BUSY_PROMPTS)]
        queue_s = queue_s or cluster.router.in_flight.wait_s(cluster.worker_id(FIRST))
        answers.append(await cluster.ask(prompt, ANSWER_TOKENS, SECOND))
        decisions.append(await cluster.decision(answers[-1]))
        for each in busy:
            await each.end()
    is_from_first = decisions[0].chosen.source == cluster.worker_id(FIRST)
    return Pull(decisions[0], decisions[1], queue_s, is_from_first, answers[0])


def workload_rows(
    name: str, reused_s: Sequence[float], computed_s: Sequence[float], num_different: int
) -> list[Row]:
    """Return times to first token with reuse and without."""
    with_s, without_s = median(reused_s), median(computed_s)
    return [
        Row(f"{name}: TTFT p50 with reuse", 1e3 * with_s, "ms", note=f"{len(reused_s)} requests"),
        Row(f"{name}: TTFT p50 without", 1e3 * without_s, "ms", note="no page is kept; least-loaded"),
        at_most(f"{name}: with / without", with_s / without_s, "x", MOST_TTFT_SHARE),
        at_most(f"{name}: answers that differ", num_different, "", 0),
    ]


def pull_rows(pulls: Sequence[Pull], num_wrong: int) -> list[Row]:
    """Return how much faster a pull is than computing, as expected and as measured."""
    expected_ms = 1e3 * median(pull.expected_margin_s for pull in pulls)
    measured_ms = 1e3 * median(pull.measured_margin_s for pull in pulls)
    ratio = expected_ms / measured_ms if measured_ms > 0 else None
    is_close = ratio is not None and abs(ratio - 1) <= MOST_ERROR
    times = [pull.pulled.measured for pull in pulls]
    speeds = [each.pulled_bytes / each.pulled_s / 1e9 for each in times if each and each.pulled_bytes]
    num_pulled, queue_ms = (
        sum(pull.is_from_busy_worker for pull in pulls),
        1e3 * min(p.queue_s for p in pulls),
    )
    decided, timed = "p50; the router's decisions", "p50; the workers' own times"
    return [
        at_least("pull: from the busy worker", num_pulled, "trials", len(pulls), "chosen by cost"),
        at_most("pull: answers that differ from one engine's", num_wrong, "", 0),
        Row("pull: the busy worker's queue, least", queue_ms, "ms", note="expected by the router"),
        Row("pull: rate p50", median(speeds) if speeds else None, "GB/s", met=bool(speeds)),
        Row("pull: faster than computing by, expected", expected_ms, "ms", note=decided),
        Row("pull: faster than computing by, measured", measured_ms, "ms", note=timed),
        Row("pull: expected / measured", ratio, "x", f"within {MOST_ERROR:.0%}", is_close),
    ]


@suite(
    "prefix",
    "Prefix reuse between processes",
    option("--rounds", 3, "of each workload"),
    option("--trials", 8, "of a pull"),
    option("--quick", False, "one round, two trials: no figures to believe"),
    option("--seed", 0),
)
async def measure(options: Namespace, report: Report) -> None:
    """Compare workloads, then pulls. TimeoutError: workers do not come, or do not answer."""
    num_rounds, num_trials = (1, 2) if options.quick else (options.rounds, options.trials)
    with tempfile.TemporaryDirectory() as folder:
        SHAPE.write(Path(folder))
        await _compare(Path(folder), num_rounds, options.seed, report)
        report.tell("pulls")
        pulls = await _pull(Path(folder), num_trials, options.seed)
        num_wrong = _num_wrong(Path(folder), [each.answer for each in pulls])
    report.rows += pull_rows(pulls, num_wrong)


async def _compare(model: Path, num_rounds: int, seed: int, report: Report) -> None:
    report.tell("starting workers")
    reused_s: dict[str, list[float]] = {name: [] for name in WORKLOADS}
    computed_s: dict[str, list[float]] = {name: [] for name in WORKLOADS}
    num_different = dict.fromkeys(WORKLOADS, 0)
    async with (
        open_cluster(model, "cost", tuple(WorkerRole)) as reusing,
        open_cluster(model, "least-loaded", ()) as computing,
    ):
        for cluster in (reusing, computing):
            await warm_up(cluster, Random(seed + 1_000_000))
        for number in range(num_rounds):
            for name, workload in WORKLOADS.items():
                report.tell(f"{name}, round {number + 1} of {num_rounds}")
                reused, computed = [
                    await workload(cluster, Random(seed + number)) for cluster in (reusing, computing)
                ]
                reused_s[name] += [answer.ttft_s for answer in reused]
                computed_s[name] += [answer.ttft_s for answer in computed]
                pairs = zip(reused, computed, strict=True)
                num_different[name] += sum(one.token_ids != other.token_ids for one, other in pairs)
    for name in WORKLOADS:
        report.rows += workload_rows(name, reused_s[name], computed_s[name], num_different[name])
    report.extra = {"reused_s": reused_s, "computed_s": computed_s}
    curves = {
        name: {
            "with reuse": ranked_shares(1e3 * each for each in reused_s[name]),
            "without": ranked_shares(1e3 * each for each in computed_s[name]),
        }
        for name in WORKLOADS
    }
    report.plot = Plot(
        curves,
        x_label="ms to the first token",
        y_label="share of requests",
        is_log=True,
        is_stepped=True,
    )


async def _pull(model: Path, num_trials: int, seed: int) -> list[Pull]:
    async with open_cluster(model, "cost", (WorkerRole.PREFILL,)) as cluster:
        await warm_up(cluster, Random(seed + 2_000_000))
        random = Random(seed + 3_000_000)
        return [await pull(cluster, random) for _ in range(num_trials + NUM_LESSONS)][NUM_LESSONS:]


def _num_wrong(model: Path, answers: Sequence[AnswerSink]) -> int:
    """Count the answers that differ from those of one engine."""
    cache = {"kv_cache_memory_bytes": ROOM_TOKENS * KV_TOKEN_BYTES}
    with LLM(model, device="cpu", load_format="dummy", dtype="float32", cache=cache) as llm:
        outputs = llm.generate(
            [list(answer.request.token_ids) for answer in answers],
            [answer.request.sampling for answer in answers],
        )
    right = [list(output.outputs[0].token_ids) for output in outputs]
    return sum(answer.token_ids != token_ids for answer, token_ids in zip(answers, right, strict=True))
