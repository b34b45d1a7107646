"""The worth of prefix reuse between real processes: two prefill and two decode workers on this machine.

    baton bench prefix            a minute or two
    baton bench prefix --quick    few rounds, to see that the suite runs

Questions about long documents and growing conversations, with the policy `cost`, and again, in turns, with
no page kept anywhere; and a prefix that a busy worker has cached, pulled by another worker, beside the time
that the router expected. All answers are compared. bench/README.md explains the columns.

Everything between the processes is as in `baton serve`: sockets, sealed frames, page transfers. The router
and a gateway run in this process, so that the suite can read decisions beside measured times, and narrow a
choice to the workers that it measures (`wish`).
"""

import argparse
import asyncio
import json
import logging
import secrets
import statistics
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Final, NamedTuple, TypeAlias

import msgspec

from baton.bench.report import Report, Row, add_output_option, at_least, at_most, run_suite
from baton.clock import SystemClock
from baton.cluster.process_spec import ProcessSpec
from baton.cluster.runtimes.local import LocalRuntime
from baton.config.cluster import WorkerConfig
from baton.config.engine import EngineConfig, engine_config
from baton.config.router import RouterConfig
from baton.engine.engine import load_engine
from baton.errors import BatonError, WorkerLost
from baton.gateway.streams.frontend import Frontend
from baton.messages.control import Decision
from baton.messages.workers import WorkerRole
from baton.request import Request, SamplingParams, TokenEvent
from baton.router.policies.cost import CostPolicy
from baton.router.policies.cost_model import PairCandidate
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
    """A routing policy, and the roles of the workers that keep pages for later prompts."""

    policy: str
    caching: tuple[WorkerRole, ...] = tuple(WorkerRole)


class Answer:
    """The sink of one request. `ttft_s` counts from the call that asked."""

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
        """Wait for the end. Raises the error of the request, or TimeoutError."""
        await asyncio.wait_for(asyncio.shield(self._end), ANSWER_S)
        return self


class PrefixCluster:
    """A cluster with its router in this process; a suite may narrow its choices."""

    def __init__(self, router: Router, frontend: Frontend) -> None:
        self.router = router
        self._frontend = frontend
        self._wish: Wish | None = None
        policy = router.cluster_state.policy
        if isinstance(policy, CostPolicy):
            self._select, policy.select = policy.select, self._wished

    def worker_id(self, name: str) -> str:
        """Return the id of the worker of this name."""
        return next(each.id for each in self.router.members.all() if each.worker.name == name)

    async def wait_for_pages(self, name: str, num_changes: int) -> None:
        """Wait until the worker of this name has told of so many changed pages in all."""
        await self._until(lambda: self.num_told(name) >= num_changes, TOLD_S)

    def num_told(self, name: str) -> int:
        """Return how many changed pages the worker of this name has told of."""
        return self.router.cluster_state.index.next_number(self.worker_id(name)) or 0

    async def ask(self, token_ids: Sequence[int], num_tokens: int, wish: Wish | None = None) -> Answer:
        """Ask and return once the request is routed.

        Wish: the candidates that may be chosen, if there are any.
        """
        self._wish = wish
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        request = Request(request_id=secrets.token_hex(16), token_ids=tuple(token_ids), sampling=sampling)
        answer = Answer(request.request_id)
        self._frontend.open(request, answer)
        await self._until(lambda: self.decision(answer) is not None, ANSWER_S)
        self._wish = None
        return answer

    def decision(self, answer: Answer) -> Decision | None:
        """Return the router's decision about a request."""
        return self.router.cluster_state.decisions.get((answer.request_id, 0))

    async def measured(self, answer: Answer) -> Decision:
        """Return the decision once the worker has told what the prompt took."""

        def is_told() -> bool:
            decision = self.decision(answer)
            return decision is not None and decision.measured is not None

        await self._until(is_told, TOLD_S)
        decision = self.decision(answer)
        assert decision is not None
        return decision

    async def wait_until_whole(self) -> None:
        """Wait until all workers reach each other and the gateway."""

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
    """Write the config of the model; return its directory."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(_MODEL))
    return directory


def engine_of(model: Path, *, is_caching: bool) -> EngineConfig:
    """Return the settings of a worker's engine."""
    cache = {
        "page_size": PAGE_SIZE,
        "kv_cache_memory_bytes": ROOM_TOKENS * KV_TOKEN_BYTES,
        "enable_prefix_caching": is_caching,
    }
    steps = {"max_num_batched_tokens": STEP_TOKENS}
    base = {"model": str(model), "device": "cpu", "load_format": "dummy", "dtype": "float32"}
    return engine_config({**base, "cache": cache, "scheduler": steps})


@asynccontextmanager
async def open_cluster(model: Path, plan: Plan) -> AsyncIterator[PrefixCluster]:
    """Run the workers as processes, the router and a gateway here. WorkerLost: a worker does not come."""
    key = secrets.token_bytes(32)
    logging.getLogger("baton.router").setLevel(logging.ERROR)  # at the end all workers leave
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
        cluster = PrefixCluster(router, frontend)
        try:
            await cluster.wait_until_whole()
        except TimeoutError as error:
            raise WorkerLost("the workers did not find each other") from error
        yield cluster


DOCUMENT_TOKENS: Final = 1536
QUESTION_TOKENS: Final = 24
SYSTEM_TOKENS: Final = 1024  # that all conversations of a round begin with
TURN_TOKENS: Final = 32
ANSWER_TOKENS: Final = 8
NUM_AT_ONCE: Final = 2


class Told(NamedTuple):
    """The time to first token and the tokens of one request."""

    ttft_s: float
    token_ids: tuple[int, ...]


def tokens(random: Random, num_tokens: int) -> list[int]:
    """Return random tokens."""
    return [random.randrange(VOCAB_SIZE) for _ in range(num_tokens)]


async def questions(
    cluster: PrefixCluster, seed: int, num_documents: int = 2, num_questions: int = 6
) -> list[Told]:
    """Ask about each document in turns, NUM_AT_ONCE at a time; nothing is cached of the first of each."""
    random = Random(seed)
    documents = [tokens(random, DOCUMENT_TOKENS) for _ in range(num_documents)]
    prompts = [
        [*document, *tokens(random, QUESTION_TOKENS)] for _ in range(num_questions) for document in documents
    ]
    seats = asyncio.Semaphore(NUM_AT_ONCE)

    async def ask(prompt: Sequence[int]) -> Told:
        async with seats:
            return _told(await (await cluster.ask(prompt, ANSWER_TOKENS)).end())

    return await asyncio.gather(*map(ask, prompts))


async def conversations(
    cluster: PrefixCluster, seed: int, num_conversations: int = 2, num_turns: int = 5
) -> list[Told]:
    """Hold conversations side by side; the prompt of each turn is the history and a little more."""
    random = Random(seed)
    system = tokens(random, SYSTEM_TOKENS)
    said = [[tokens(random, TURN_TOKENS) for _ in range(num_turns)] for _ in range(num_conversations)]

    async def converse(turns: Sequence[Sequence[int]]) -> list[Told]:
        history, told = list(system), list[Told]()
        for turn in turns:
            history += turn
            told.append(_told(await (await cluster.ask(history, ANSWER_TOKENS)).end()))
            history += told[-1].token_ids
        return told

    return [each for told in await asyncio.gather(*map(converse, said)) for each in told]


async def warm_up(cluster: PrefixCluster, seed: int) -> None:
    """Ask prompts of all lengths, so that the router learns what they take."""
    random = Random(seed)
    for num_tokens in (24, 100, 400, 800, 1200, DOCUMENT_TOKENS):
        asked = [await cluster.ask(tokens(random, num_tokens), ANSWER_TOKENS) for _ in range(4)]
        for answer in asked:
            await answer.end()


def _told(answer: Answer) -> Told:
    return Told(answer.ttft_s, tuple(answer.token_ids))


PLAN: Final = Plan(policy="cost", caching=(WorkerRole.PREFILL,))
BUSY_PROMPTS: Final = 2
NUM_LESSONS: Final = 3
FIRST, SECOND = "prefill-0", "prefill-1"


class Costs(NamedTuple):
    """Seconds that the KV of one prompt takes at the second worker, until the first token."""

    expected_s: float  # by the router when it chose
    measured_s: float  # by the worker
    pulled_bytes: int
    pulled_s: float

    @classmethod
    def of(cls, decision: Decision) -> "Costs":
        """Read the costs of a decision with measured times."""
        terms, measured = decision.chosen.terms, decision.measured
        assert measured is not None
        return cls(
            terms["pull_s"] + terms["compute_s"],
            measured.pulled_s + measured.computed_s,
            measured.pulled_bytes,
            measured.pulled_s,
        )


class Trial(NamedTuple):
    """A prefix that a busy prefill worker has computed, asked for at the other prefill worker.

    The first worker computes a document and is then kept busy. A question about the document goes to the
    second worker, where the router chooses between a pull and computing. Then the second worker computes a
    prompt of that length of which no page is cached. Decode workers keep nothing, so the first worker alone
    has the document.
    """

    pulled: Costs
    computed: Costs
    queue_s: float  # expected of the busy worker
    is_from_busy_worker: bool
    prompt: list[int]
    token_ids: list[int]  # of the answer after the pull

    @property
    def expected_margin_s(self) -> float:
        return self.computed.expected_s - self.pulled.expected_s

    @property
    def measured_margin_s(self) -> float:
        return self.computed.measured_s - self.pulled.measured_s


async def trials(cluster: PrefixCluster, num_trials: int, seed: int) -> list[Trial]:
    """Run trials; the first ones teach the router what a pull takes and do not count."""
    random = Random(seed)
    found = [await _trial(cluster, random) for _ in range(num_trials + NUM_LESSONS)]
    return found[NUM_LESSONS:]


def median_ratio(trials: Sequence[Trial]) -> float | None:
    """Return the expected over the measured margin; None where a pull was no faster."""
    expected_s = statistics.median(trial.expected_margin_s for trial in trials)
    measured_s = statistics.median(trial.measured_margin_s for trial in trials)
    return expected_s / measured_s if measured_s > 0 else None


async def _trial(cluster: PrefixCluster, random: Random) -> Trial:
    document = tokens(random, DOCUMENT_TOKENS)
    at_first, at_second = _at(cluster, FIRST), _at(cluster, SECOND)
    question = [*document, *tokens(random, QUESTION_TOKENS)]
    num_told = cluster.num_told(FIRST)
    await (await cluster.ask([*document, *tokens(random, QUESTION_TOKENS)], 1, at_first)).end()
    await cluster.wait_for_pages(FIRST, num_told + DOCUMENT_TOKENS // PAGE_SIZE)
    busy = await _keep_busy(cluster, random, at_first)
    queue_s = cluster.router.in_flight.wait_s(cluster.worker_id(FIRST))
    answer = await cluster.ask(question, ANSWER_TOKENS, at_second)
    pulled = await cluster.measured(await answer.end())
    for each in busy:
        await each.end()
    busy = await _keep_busy(cluster, random, at_first)
    cold = await cluster.ask(tokens(random, len(question)), ANSWER_TOKENS, at_second)
    computed = await cluster.measured(await cold.end())
    for each in busy:
        await each.end()
    is_from_first = pulled.chosen.source == cluster.worker_id(FIRST)
    return Trial(
        Costs.of(pulled), Costs.of(computed), queue_s, is_from_first, question, list(answer.token_ids)
    )


async def _keep_busy(cluster: PrefixCluster, random: Random, wish: Wish) -> list[Answer]:
    return [await cluster.ask(tokens(random, DOCUMENT_TOKENS), 1, wish) for _ in range(BUSY_PROMPTS)]


def _at(cluster: PrefixCluster, name: str) -> Wish:
    worker_id = cluster.worker_id(name)
    return lambda candidate: candidate.prefill == worker_id


def plot_prefix(
    workloads: Mapping[str, tuple[Sequence[float], Sequence[float]]], pulls: Sequence[Trial], path: Path
) -> None:
    """Draw times to first token, with and without reuse, as shares of all requests; and each pull's costs.

    workloads: by name, seconds with reuse and without.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * (len(workloads) + 1), 4), layout="constrained")
    *panels, last = figure.subplots(1, len(workloads) + 1, squeeze=False)[0]
    for axes, (name, times) in zip(panels, workloads.items(), strict=True):
        for label, seconds in zip(("with reuse", "without"), times, strict=True):
            shares = [(number + 1) / len(seconds) for number in range(len(seconds))]
            axes.step(sorted(each * 1e3 for each in seconds), shares, where="post", label=label)
        axes.set_xscale("log")
        axes.set_xlabel("ms to the first token")
        axes.set_ylabel("share of requests")
        axes.set_title(name)
        axes.legend(fontsize="small")
    for label, costs in (("pulled", [t.pulled for t in pulls]), ("computed", [t.computed for t in pulls])):
        expected, measured = ([getattr(each, field) * 1e3 for each in costs] for field in _COSTS)
        last.plot(measured, expected, "o", label=label)
    most = max(1e3 * max(*trial.computed[:2]) for trial in pulls)
    last.plot([0, most], [0, most], color="grey", linestyle="--", linewidth=0.8, label="as expected")
    last.set_xlabel("measured, ms")
    last.set_ylabel("expected, ms")
    last.set_title("a prefix that a busy worker holds")
    last.legend(fontsize="small")
    figure.savefig(path, dpi=150)


_COSTS = ("measured_s", "expected_s")

WITH: Final = Plan(policy="cost")
WITHOUT: Final = Plan(policy="least-loaded", caching=())
MOST_TTFT_SHARE: Final = 0.4
MOST_ERROR: Final = 0.3
Workload: TypeAlias = Callable[[PrefixCluster, int], Awaitable[list[Told]]]
WORKLOADS: Final[dict[str, Workload]] = {"documents": questions, "conversations": conversations}


class Compared(NamedTuple):
    """One workload; the rounds ask the same prompts of both clusters."""

    name: str
    reused_s: list[float]  # times to first token
    computed_s: list[float]
    num_different: int  # answers

    @property
    def share(self) -> float:
        return statistics.median(self.reused_s) / statistics.median(self.computed_s)


def rows_of(compared: Compared) -> list[Row]:
    """Return times to first token with reuse and without."""
    name, share = compared.name, compared.share
    medians = statistics.median(compared.reused_s) * 1e3, statistics.median(compared.computed_s) * 1e3
    return [
        Row(f"{name}: TTFT p50 with reuse", medians[0], "ms", note=f"{len(compared.reused_s)} requests"),
        Row(f"{name}: TTFT p50 without", medians[1], "ms", note="no page is kept; least-loaded"),
        at_most(f"{name}: with / without", share, "x", MOST_TTFT_SHARE),
        at_most(f"{name}: answers that differ", compared.num_different, "", 0),
    ]


def rows_of_pulls(pulls: Sequence[Trial], num_wrong: int) -> list[Row]:
    """Return how much faster a pull is than computing, as expected and as measured."""
    ratio, num_pulled = median_ratio(pulls), sum(trial.is_from_busy_worker for trial in pulls)
    expected_ms = 1e3 * statistics.median(trial.expected_margin_s for trial in pulls)
    measured_ms = 1e3 * statistics.median(trial.measured_margin_s for trial in pulls)
    is_close = ratio is not None and abs(ratio - 1) <= MOST_ERROR
    speeds = [t.pulled.pulled_bytes / t.pulled.pulled_s / 1e9 for t in pulls if t.pulled.pulled_bytes]
    queue_s = min(trial.queue_s for trial in pulls)
    return [
        at_least("pull: from the busy worker", num_pulled, "trials", len(pulls), "chosen by cost"),
        at_most("pull: answers that differ from one engine's", num_wrong, "", 0),
        Row("pull: the busy worker's queue, least", queue_s * 1e3, "ms", note="expected by the router"),
        Row("pull: rate p50", statistics.median(speeds) if speeds else None, "GB/s", met=bool(speeds)),
        Row(
            "pull: faster than computing by, expected", expected_ms, "ms", note="p50; the router's decisions"
        ),
        Row(
            "pull: faster than computing by, measured", measured_ms, "ms", note="p50; the workers' own times"
        ),
        Row("pull: expected / measured", ratio, "x", f"within {MOST_ERROR:.0%}", is_close),
    ]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the suite's options."""
    parser.add_argument("--rounds", type=int, default=3, help="of each workload (3)")
    parser.add_argument("--trials", type=int, default=8, help="of a pull (8)")
    parser.add_argument("--quick", action="store_true", help="one round, two trials: no figures to believe")
    parser.add_argument("--seed", type=int, default=0)
    add_output_option(parser)


def measure(options: argparse.Namespace, report: Report) -> None:
    """Compare workloads, then pulls. WorkerLost: no workers come; TimeoutError: one does not answer."""
    num_rounds, num_trials = (1, 2) if options.quick else (options.rounds, options.trials)
    report.tell("starting workers")
    with tempfile.TemporaryDirectory() as directory:
        model = write_model(Path(directory) / "model")
        compared = asyncio.run(_compare(model, num_rounds, options.seed, report))
        report.tell("pulls")
        pulls = asyncio.run(_pull(model, num_trials, options.seed))
        num_wrong = _num_wrong(model, pulls)
    report.rows += [row for each in compared for row in rows_of(each)] + rows_of_pulls(pulls, num_wrong)
    report.extra = {
        "workloads": [each._asdict() for each in compared],
        "pulls": [_plain(each) for each in pulls],
    }
    times = {each.name: (each.reused_s, each.computed_s) for each in compared}
    report.plot = partial(plot_prefix, times, pulls)


async def _compare(model: Path, num_rounds: int, seed: int, report: Report) -> list[Compared]:
    found = {name: Compared(name, [], [], 0) for name in WORKLOADS}
    async with open_cluster(model, WITH) as reusing, open_cluster(model, WITHOUT) as computing:
        for cluster in (reusing, computing):
            await warm_up(cluster, seed + 1_000_000)
        for number in range(num_rounds):
            for name, workload in WORKLOADS.items():
                report.tell(f"{name}, round {number + 1} of {num_rounds}")
                reused = await workload(reusing, seed + number)
                computed = await workload(computing, seed + number)
                before = found[name]
                found[name] = Compared(
                    name,
                    before.reused_s + [each.ttft_s for each in reused],
                    before.computed_s + [each.ttft_s for each in computed],
                    before.num_different + _num_different(reused, computed),
                )
    return list(found.values())


async def _pull(model: Path, num_trials: int, seed: int) -> list[Trial]:
    async with open_cluster(model, PLAN) as cluster:
        await warm_up(cluster, seed + 2_000_000)
        return await trials(cluster, num_trials, seed + 3_000_000)


def _num_different(one: Sequence[Told], other: Sequence[Told]) -> int:
    return sum(a.token_ids != b.token_ids for a, b in zip(one, other, strict=True))


def _num_wrong(model: Path, pulls: Sequence[Trial]) -> int:
    """Count the answers after a pull that differ from those of one engine."""
    engine = load_engine(engine_of(model, is_caching=False))
    num_wrong = 0
    for number, trial in enumerate(pulls):
        sampling = SamplingParams(temperature=0.0, max_tokens=len(trial.token_ids), ignore_eos=True)
        request = Request(request_id=f"{number:032x}", token_ids=tuple(trial.prompt), sampling=sampling)
        engine.add(request)
        said = []
        while engine.has_work():
            said += [output.token_id for output in engine.step()]
        num_wrong += said != trial.token_ids
    engine.close()
    return num_wrong


def _plain(trial: Trial) -> dict[str, object]:
    kept = ("queue_s", "is_from_busy_worker", "expected_margin_s", "measured_margin_s")
    costs = {"pulled": trial.pulled._asdict(), "computed": trial.computed._asdict()}
    return {**costs, **{name: getattr(trial, name) for name in kept}}


run = partial(run_suite, measure, name="prefix", title="Prefix reuse between processes")
