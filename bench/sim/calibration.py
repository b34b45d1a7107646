"""Measures real workers for rehearsals: `baton calibrate MODEL`.

1. A child process loads the model as a worker does, and computes steps of many shapes: batches of decodes
   over short and long contexts, chunks of prompts, and both together.
2. Further children compute beside it, one more at a time: how much slower are its steps?
3. Pages go from this process to another, one transfer and several at once (bench/kv/ends.py).
4. A served cluster of one prefill and one decode worker answers requests, one after the other and several at
   once. What steps and transfers do not explain is overhead; the processor time of gateway, router and client
   takes time from the workers.
"""

import asyncio
import random
import select
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from statistics import fmean, median
from typing import Any, Final, NamedTuple
from unittest.mock import patch

import msgspec
import numpy as np

from baton.bench.clusters import WatchedCluster, served_cluster
from baton.bench.engine.replica import greedy
from baton.bench.kv.ends import DestinationProcess, SourceEnd, settings_of
from baton.bench.machine import machine_description
from baton.bench.processes import READ_S, Child
from baton.bench.report import Progress
from baton.bench.serve.client import Address, Client
from baton.bench.serve.figures import Run
from baton.bench.serve.load import Job, Load, Shape, model_of
from baton.cluster.model_directory import resolve_model, served_name
from baton.config.cluster import ServeConfig
from baton.config.engine import EngineConfig, EngineSettings, engine_config
from baton.config.environment import environment_of_child
from baton.engine.engine import Engine, load_engine
from baton.engine.scheduler.sequence import Batch
from baton.errors import ConfigError
from baton.kvtransfer.transports.base import AUTO
from baton.messages.status import Times
from baton.messages.workers import WorkerRole
from baton.pages import PageLayout
from baton.router.policies.cost_model import solve_nonnegative
from baton.rpc.liveness import BEAT_S
from baton.sim.rehearsal import Layout, RehearsalSettings, rehearse_each
from baton.sim.timed.full import work_of
from baton.sim.timed.times import (
    Cost,
    Overheads,
    ReplicaTimes,
    StepSample,
    StepWork,
    TimeModel,
    TransferSample,
    fit_steps,
    fit_transfers,
)
from baton.sim.timed.workload import TraceRequest

NUM_STEPS: Final = 12  # of a batch of decodes
NUM_CHUNKS: Final = 3  # of one shape
BATCHES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS: Final = (32, 128, 512, 2048, 8192, 32_768)
CHUNKS: Final = (16, 64, 128, 256, 512, 1024, 2048, 8192)
MOST_SETUP_TOKENS: Final = 40_000  # contexts of one batch, computed before its steps are timed
MOST_TRANSFER: Final = 4096  # tokens
NUM_TRANSFERS: Final = 6  # sizes, from one page on
STREAMS: Final = (1, 2, 4, 8, 16)
MOST_AT_ONCE: Final = 4 * MOST_TRANSFER  # tokens
# Shares of the seconds that each part takes.
STEPS_SHARE: Final = 0.45
NEIGHBOURS_SHARE: Final = 0.2
TRANSFERS_SHARE: Final = 0.1
NUM_ALONE: Final = 12  # served requests, one after the other
HANDS_OVER: Final = "round-robin"  # the policy that never has a decode worker compute a prompt
# Loads that show what processes take beside steps: requests, tokens of an answer, requests at once.
COST_LOADS: Final = ((32, 2, 4), (12, 64, 1), (32, 96, 4), (96, 96, 16))


class StepShape(msgspec.Struct, frozen=True):
    """Sequences that decode over so many tokens each, and a prompt to compute beside them."""

    num_decodes: int
    context: int
    num_new: int = 0


class Loaded(msgspec.Struct, frozen=True):
    """A child that has loaded the model."""

    fingerprint: str
    layout: PageLayout  # of rank 0: see `of_rank`
    num_pages: int
    max_model_len: int
    step_tokens: int
    max_num_seqs: int


class Order(msgspec.Struct, frozen=True):
    """Shapes to measure again and again for so long; without seconds: compute until the next line comes."""

    shapes: tuple[StepShape, ...]
    seconds: float = 0.0


# The child.


class Stepper:
    """Computes and times steps of an engine, those of a pipeline alone, on their way through all stages."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        engine.scheduler.num_batches = 1
        self._random = random.Random(0)
        self._batch: Batch | None = None
        apply = engine.scheduler.apply

        def noted(plan: object) -> Batch:
            self._batch = apply(plan)  # type: ignore[arg-type]
            return self._batch

        self._patch = patch.object(engine.scheduler, "apply", noted)
        self._patch.start()

    def measure(self, shape: StepShape) -> list[StepSample]:
        """Compute a shape's steps: the chunks that set it up, its decodes, and prompts beside them."""
        names = [self._add(shape.context) for _ in range(shape.num_decodes)]
        samples = list(self._steps_until(len(names))) if names else []
        if names and not shape.num_new:
            steps = [self._step()[0] for _ in range(NUM_STEPS)]
            context = round(fmean(each.work.num_context for each in steps))
            samples += [StepSample(each.work._replace(num_context=context), each.seconds) for each in steps]
        for _ in range(NUM_CHUNKS if shape.num_new else 0):
            name = self._add(shape.num_new)
            samples += self._steps_until(1, name)
            self._engine.abort(name)
        for name in names:
            self._engine.abort(name)
        return samples

    def _steps_until(self, number: int, name: str = "") -> Iterator[StepSample]:
        """Step until so many sequences, or the named one, have their first token."""
        begun: set[str] = set()
        while len(begun) < number:
            sample, sampled = self._step()
            begun |= {each for each in sampled if not name or each == name}
            yield sample

    def _step(self) -> tuple[StepSample, set[str]]:
        begin_s = time.perf_counter()
        outputs = self._engine.step()
        taken_s = time.perf_counter() - begin_s
        assert self._batch is not None
        return StepSample(work_of(self._batch), taken_s), {each.request_id for each in outputs}

    def _add(self, num_tokens: int) -> str:
        prompt = self._random.choices(range(self._engine.vocab_size), k=num_tokens)
        request = greedy(prompt, num_tokens=10_000)
        self._engine.add(request)
        return request.request_id


def shapes_of(loaded: Loaded, most_tokens: int = MOST_SETUP_TOKENS) -> list[StepShape]:
    """Return the shapes that cover a worker's steps, the cheap ones first."""
    room = min(most_tokens, (loaded.num_pages - 1) * loaded.layout.page_size // 2)
    longest = loaded.max_model_len - NUM_STEPS - 2
    contexts = [each for each in CONTEXTS if each < longest] + [longest]
    batches = [each for each in BATCHES if each <= loaded.max_num_seqs]
    shapes = [
        StepShape(number, context) for number in batches for context in contexts if number * context <= room
    ]
    chunks = [each for each in CHUNKS if each <= loaded.step_tokens and each < longest] + [longest]
    shapes += [StepShape(0, 0, num_new) for num_new in chunks]
    shapes += [StepShape(number, 256, num_new) for number in (4, 16) for num_new in chunks[1:-1:2]]
    return sorted(shapes, key=lambda each: each.num_decodes * each.context + 3 * each.num_new)


def of_rank(layout: PageLayout) -> PageLayout:
    """Return the layout of a worker whose only rank holds as much as each rank of this one."""
    return msgspec.structs.replace(layout, tp_size=1, num_kv_heads=layout.heads_per_rank)


def serve(config: EngineConfig) -> None:
    """Load the model, then carry out the orders of stdin."""
    engine = load_engine(config)
    loaded = Loaded(
        engine.fingerprint,
        of_rank(engine.runner.own_layout),
        engine.pages.num_pages,
        engine.max_model_len,
        config.scheduler.max_num_batched_tokens,
        config.scheduler.max_num_seqs,
    )
    _tell(msgspec.json.encode(loaded))
    stepper = Stepper(engine)
    for shape in shapes_of(loaded)[:4]:
        stepper.measure(shape)  # compiles kernels and settles the allocator
    for line in sys.stdin:
        order = msgspec.json.decode(line, type=Order)
        samples: list[StepSample] = []
        until_s, rounds = time.perf_counter() + order.seconds, 0
        if not order.seconds:
            _tell(b"[]")
        while _goes_on(order, until_s) or not rounds:
            for shape in order.shapes:
                samples += stepper.measure(shape)
                if rounds and not _goes_on(order, until_s):
                    break
            rounds += 1
        if order.seconds:
            _tell(msgspec.json.encode(samples))
    engine.close()


def _goes_on(order: Order, until_s: float) -> bool:
    if order.seconds:
        return time.perf_counter() < until_s
    return not select.select([sys.stdin], [], [], 0)[0]


def _tell(line: bytes) -> None:
    sys.stdout.write(line.decode() + "\n")
    sys.stdout.flush()


# The measuring process.


class WorkerChild(Child):
    """A child with the model; `start_s` is how long its start took."""

    STOP_S = 0.0

    def __init__(self, config: EngineConfig, num_threads: int) -> None:
        begin_s = time.perf_counter()
        words = "-m", "baton.bench.sim.calibration", msgspec.json.encode(config).decode()
        super().__init__(*words, environment=environment_of_child(num_threads=num_threads))
        self.loaded = msgspec.json.decode(self.read(), type=Loaded)
        self.start_s = time.perf_counter() - begin_s

    def measure(self, shapes: Sequence[StepShape], seconds: float) -> list[StepSample]:
        """Measure shapes, in turns, for so long."""
        line = self._ask(Order(tuple(shapes), seconds))
        return [StepSample(StepWork(*work), taken_s) for work, taken_s in msgspec.json.decode(line)]

    def keep_busy(self, shapes: Sequence[StepShape]) -> None:
        """Compute shapes until the next order, or the end."""
        self._ask(Order(tuple(shapes)))

    def _ask(self, order: Order) -> str:
        self.tell(msgspec.json.encode(order).decode())
        return self.read(READ_S + order.seconds)


def calibrate(
    config: ServeConfig, seconds: float, num_neighbours: int, tell: Progress, num_threads: int = 1
) -> TimeModel:
    """Measure for about so many seconds, and fit.

    num_neighbours: workers of one rank beside a worker that are measured; 0 where workers have devices of
    their own. Workers of several ranks are measured alone.
    ConfigError: rehearsals do not know one of the settings.
    """
    _check_settings(config.engine)
    name = served_name(config.model).rpartition("/")[2]
    config = msgspec.structs.replace(config, model=str(resolve_model(config.model)))
    engine = {role: pool.engine(config.engine) for role, pool in config.pools.items()}
    sizes = {each.tensor_parallel_size: each.pipeline_parallel_size for each in engine.values()}
    if any(sizes[each.tensor_parallel_size] != each.pipeline_parallel_size for each in engine.values()):
        raise ConfigError("pipeline_parallel_size: roles with as many ranks a stage need as many stages")
    settings = engine[WorkerRole.DECODE]
    measured: list[Measured] = []
    for size, num_stages in sorted(sizes.items()):
        ranks = {"tensor_parallel_size": size, "pipeline_parallel_size": num_stages}
        own = engine_config({**msgspec.to_builtins(settings), "model": config.model, **ranks})
        tell(f"steps, tensor parallel size {size}")
        others = num_neighbours if size == num_stages == 1 else 0
        measured.append(_measure_workers(own, seconds / len(sizes), others, num_threads, tell))
    loaded = measured[0].loaded  # of the fewest ranks, each of which moves the most bytes of a token
    tell("transfers")
    samples = measure_transfers(
        loaded.layout, loaded.max_model_len, TRANSFERS_SHARE * seconds, config.transport
    )
    model = TimeModel(
        model=name,
        fingerprint=loaded.fingerprint,
        engine=settings,
        machine={name: str(value) for name, value in machine_description().items()},
        replicas=dict(zip(sorted(sizes), (each.times for each in measured), strict=True)),
        transfer=fit_transfers(samples),
        kv_token_bytes=loaded.layout.page_bytes // loaded.layout.page_size,
        page_size=loaded.layout.page_size,
        max_model_len=loaded.max_model_len,
        neighbours=min((each.neighbours for each in measured), key=len) if num_neighbours else (),
        drift=max(each.drift for each in measured),
    )
    tell("a served cluster")
    overheads = asyncio.run(measure_overheads(config, model, num_threads))
    return msgspec.structs.replace(model, overheads=overheads)


def _check_settings(engine: EngineSettings) -> None:
    """Raise ConfigError for settings that rehearsals do not know."""
    if engine.scheduler.policy != "continuous" or engine.scheduler.max_queue_delay_ms:
        raise ConfigError("scheduler: rehearsals know the policy continuous, without max_queue_delay_ms")
    if engine.speculative is not None:
        raise ConfigError("speculative: rehearsals do not know speculative decoding; leave it out")


class Measured(NamedTuple):
    """The measured workers of one size."""

    loaded: Loaded
    times: ReplicaTimes
    neighbours: tuple[float, ...]  # the multiples beside 0, 1, ... busy workers
    drift: float


def _measure_workers(
    config: EngineConfig, seconds: float, num_neighbours: int, num_threads: int, tell: Progress
) -> Measured:
    """Measure the workers of one size."""
    with ExitStack() as ends:
        children = [WorkerChild(config, num_threads)]
        ends.callback(children[0].close)
        loaded = children[0].loaded
        shapes = shapes_of(loaded, 4000 if seconds < 30 else MOST_SETUP_TOKENS)
        samples = children[0].measure(shapes, STEPS_SHARE * seconds)
        probes = [StepShape(8, 128), StepShape(0, 0, min(256, loaded.step_tokens)), StepShape(4, 128, 64)]
        each_s = NEIGHBOURS_SHARE * seconds / (num_neighbours + 2)
        alone = [children[0].measure(probes, each_s)]
        multiples = [1.0]
        for number in range(num_neighbours):
            tell(f"{number + 1} busy neighbours")
            children.append(WorkerChild(config, num_threads))
            ends.callback(children[-1].close)
            for child in children[1:]:
                child.keep_busy(probes)
            slower = _ratio(children[0].measure(probes, each_s), alone[0])
            multiples.append(max(multiples[-1], slower))
        for child in children[1:]:
            child.close()
        alone.append(children[0].measure(probes, each_s))
        drift = abs(_ratio(alone[1], alone[0]) - 1.0)
        starts_s = tuple(child.start_s for child in children)
        times = ReplicaTimes(
            steps=fit_steps(samples),
            num_pages=loaded.num_pages,
            start_s=starts_s,
            num_stages=config.pipeline_parallel_size,
        )
        return Measured(loaded, times, tuple(multiples), drift)


def _ratio(samples: Sequence[StepSample], others: Sequence[StepSample]) -> float:
    """Return the median over shapes of the ratio of mean seconds."""
    means = []
    for each in (samples, others):
        by_work: dict[StepWork, list[float]] = {}
        for sample in each:
            by_work.setdefault(sample.work, []).append(sample.seconds)
        means.append({work: fmean(seconds) for work, seconds in by_work.items()})
    return median(means[0][work] / means[1][work] for work in means[0].keys() & means[1].keys())


def measure_transfers(
    layout: PageLayout, max_tokens: int, seconds: float, transport: str = AUTO
) -> list[TransferSample]:
    """Move pages from this process to another, by one transfer and by several at once."""
    most_pages = layout.num_pages(min(MOST_TRANSFER, max_tokens))
    sizes = [layout.page_size * round(each) for each in np.geomspace(1, most_pages, NUM_TRANSFERS)]
    kinds = [(num, streams) for num in sizes for streams in STREAMS if num * streams <= MOST_AT_ONCE]
    num_pages = max(64, *(layout.num_pages(num) * streams for num, streams in kinds))
    samples: list[TransferSample] = []
    until_s, token_bytes = time.perf_counter() + seconds, layout.page_bytes // layout.page_size
    with ExitStack() as ends:
        destination = DestinationProcess(layout, num_pages, transport=transport)
        ends.callback(destination.close)
        source = SourceEnd.random(settings_of(layout, transport), num_pages)
        ends.callback(source.endpoint.close)
        for _ in range(3):
            source.send(destination, sizes[-1])
        while not samples or time.perf_counter() < until_s:
            for num_tokens, num_transfers in kinds:
                for taken_s in source.send_together(destination, num_tokens, num_transfers):
                    samples.append(TransferSample(num_tokens * token_bytes, num_transfers, taken_s))
    return samples


# A served cluster.


async def measure_overheads(config: ServeConfig, model: TimeModel, num_threads: int) -> Overheads:
    """Serve requests by one prefill and one decode worker, and compare with a rehearsal.

    Every prompt is handed over, so that hand-offs are measured. Both have the ranks of decode workers.
    """
    engine = config.decode.engine(config.engine)
    size = engine.tensor_parallel_size
    layout = Layout(num_prefill=1, num_decode=1, prefill_tp=size, decode_tp=size)
    async with served_cluster(
        ("--runtime", "local", "--router-policy", HANDS_OVER),
        prefill=1,
        decode=1,
        model=config.model,
        environment=environment_of_child(num_threads=num_threads),
        engine=engine,
    ) as cluster:
        return await _overheads(cluster, model, layout)


async def _overheads(cluster: WatchedCluster, model: TimeModel, layout: Layout) -> Overheads:
    client = Client(Address(cluster.url, ""))
    listed = await model_of(client)
    vocab_size, longest = listed.vocab_size or 1000, model.max_model_len // 2
    draw = random.Random(1)
    lengths = [(draw.randint(16, min(512, longest)), draw.randint(8, 48)) for _ in range(NUM_ALONE)]
    await _ask(client, listed.name, lengths[:4], 1, vocab_size, 0)
    measured = await _ask(client, listed.name, lengths, 1, vocab_size, 1)
    trace = [
        TraceRequest(arrival_s=10.0 * at, input_tokens=num_input, output_tokens=num_output)
        for at, (num_input, num_output) in enumerate(lengths)
    ]
    predicted = rehearse_each(trace, layout, model, RehearsalSettings(mode="full", policy=HANDS_OVER))
    ttft_s = median(each.ttft_s for each in measured.samples) - median(predicted.ttft_ms.tolist()) / 1e3
    later = [
        (each.num_tokens - 1, each.e2el_s - each.ttft_s - num_ms / 1e3)
        for each, num_ms in zip(measured.samples, predicted.e2el_ms - predicted.ttft_ms, strict=True)
    ]
    handoff_s, step_s = _least_squares([(1.0, num) for num, _ in later], [taken_s for _, taken_s in later])
    gateway, others = await _costs(cluster, client, listed.name, vocab_size)
    client.close()
    return Overheads(
        first_token_s=max(0.0, ttft_s - step_s),  # the prompt takes a step, too
        handoff_s=handoff_s,
        step_s=step_s,
        gateway=gateway,
        others=others,
    )


async def _costs(cluster: WatchedCluster, client: Client, name: str, vocab_size: int) -> tuple[Cost, Cost]:
    """Return what the gateway, and the other processes beside the steps of workers, take to serve."""
    columns, spent = list[tuple[float, float, float]](), list[tuple[float, float]]()  # of a request
    for seed, (number, num_output, concurrency) in enumerate(COST_LOADS):
        before = await _usage(cluster)
        await _ask(client, name, [(64, num_output)] * number, concurrency, vocab_size, seed)
        gateway_s, others_s, num_steps = (await _usage(cluster) - before) / number
        columns.append((1.0, num_steps, num_output))
        spent.append((gateway_s, others_s))
    gateway, others = (_least_squares(columns, seconds) for seconds in zip(*spent, strict=True))
    return Cost(*gateway), Cost(*others)


async def _usage(cluster: WatchedCluster) -> "np.ndarray[Any, Any]":
    """Return processor seconds of gateways, those of others beside the steps of workers, and steps."""
    await asyncio.sleep(2 * BEAT_S)  # workers report their steps with heartbeats
    status = await cluster.status()
    assert status is not None
    num_steps = sum(each.load.times.get("step", Times()).num for each in status.workers)
    workers = {each.worker.pid for each in status.workers}
    gateway_s, others_s = 0.0, time.process_time()
    for name, pid in (await cluster.pids()).items():
        if name.startswith("gateway"):
            gateway_s += _cpu_s(pid)
        else:
            others_s += _cpu_s(pid, is_worker=pid in workers)
    return np.array([gateway_s, others_s, num_steps])


def _cpu_s(pid: int, *, is_worker: bool = False) -> float:
    """Return the processor seconds of a process; of a worker without its first thread, which computes."""
    import psutil

    threads = psutil.Process(pid).threads()
    return sum(each.user_time + each.system_time for each in threads if not (is_worker and each.id == pid))


def _least_squares(columns: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Return the coefficients of the columns, all at least 0."""
    matrix = np.array(columns, float)
    solved = solve_nonnegative(matrix.T @ matrix, matrix.T @ np.array(values))
    return [float(each) for each in solved]


async def _ask(
    client: Client,
    name: str,
    lengths: Sequence[tuple[int, int]],
    concurrency: int,
    vocab_size: int,
    seed: int,
) -> Run:
    draw = random.Random(seed)
    jobs = [
        Job(tuple(draw.randrange(4, vocab_size) for _ in range(num_input)), num_output)
        for num_input, num_output in lengths
    ]
    run = await Load(client, name, Shape(concurrency=concurrency)).run(jobs)
    if run.failures:
        raise RuntimeError(f"the served cluster fails: {run.failures[0]} {run.said}")
    return run


if __name__ == "__main__":
    serve(msgspec.json.decode(sys.argv[1], type=EngineConfig))
