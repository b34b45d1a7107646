"""Layouts that `baton serve` runs: loads for them, and does `baton advise` choose the best one?

Loads are synthetic, or traces at any rate; rehearsals predict the same ones.

1. A workload's rate is a share of the capacity that the best layout has in a rehearsal. Its objectives are
   multiples of what a worker without other load takes.
2. Every layout serves every workload. `is_able`: so many requests keep the objectives. Layouts of the fewest
   devices that are able serve it faster, until they are not: this is their headroom.
3. `advise` chooses among the same layouts, by the calibrated time model. `distance` says by how much the
   measured course of its choice is worse than the best one, by what the advice optimises.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import islice
from pathlib import Path
from random import Random
from typing import Final, NamedTuple, TypeAlias

import msgspec

from baton.bench.clusters import served_cluster
from baton.bench.report import Progress, Row, at_most
from baton.bench.serve.client import Address, Client
from baton.bench.serve.figures import Run, Slo
from baton.bench.serve.load import Load, Shape, model_of, random_jobs, trace_jobs
from baton.config.cluster import ServeConfig
from baton.sim.advice import SPEEDS, Advice, Search, advise
from baton.sim.rehearsal import Layout, RehearsalSettings, rehearse, rehearse_each
from baton.sim.timed.times import TimeModel
from baton.sim.timed.workload import Lengths, TraceRequest, at_speed, read_trace, synthetic
from baton.tenants import Sla

LENGTHS: Final = {
    "chat": Lengths(96, 256, 48, 96, 0.3),
    "documents": Lengths(700, 1100, 24, 48),
}
WORKLOADS: Final = {**LENGTHS, "mixed": Lengths(210, 850, 11, 19, 0.2, 0.4)}
# Divisors of the lengths of traces: a machine of two cores serves some ten thousand tokens a second.
CHAT_SCALE, MIXED_SCALE, CODE_SCALE = 8.0, 32.0, 4.0
CHAT_TOKENS: Final = 256  # of a prompt, at most
BIN_S: Final = 3.0  # Mooncake's trace has its arrivals in bins
NUM_FOR_CAPACITY: Final = 200
NUM_WARM_UP: Final = 8
WARM_UP_SEED: Final = 999

# Serves requests at their moments: (requests, objectives) -> the answers.
Serve: TypeAlias = Callable[[Sequence[TraceRequest], Slo], Awaitable[Run]]


def workloads_of(
    traces: Sequence[Path], num_requests: int, seed: int, max_model_len: int
) -> dict[str, list[TraceRequest]]:
    """Return the first requests of each workload by its name. Requests above `max_model_len` are left out.

    A trace of Azure's format has documents. One of Mooncake's has the mixed workload with its shared
    prefixes; its short prompts, as if they shared nothing, are chat. Others are synthetic.
    """
    found = {name: synthetic(1.0, 1.2 * num_requests, each, seed) for name, each in WORKLOADS.items()}
    for path in traces:
        if path.suffix == ".csv":
            found["documents"] = read_trace(path, scale=CODE_SCALE)
            continue
        found["mixed"] = _spread(read_trace(path, scale=MIXED_SCALE), seed)
        spread = _spread(read_trace(path, scale=CHAT_SCALE), seed)
        found["chat"] = [
            msgspec.structs.replace(each, block_ids=()) for each in spread if each.input_tokens <= CHAT_TOKENS
        ]

    def fits(request: TraceRequest) -> bool:
        return request.input_tokens + request.output_tokens <= max_model_len

    return {
        name: [*islice(filter(fits, map(_answered, requests)), num_requests)]
        for name, requests in found.items()
    }


def _answered(request: TraceRequest) -> TraceRequest:
    """Return the request with an answer of two tokens at least: one alone has no TPOT."""
    return msgspec.structs.replace(request, output_tokens=max(2, request.output_tokens))


def _spread(requests: Sequence[TraceRequest], seed: int) -> list[TraceRequest]:
    """Spread the arrivals of a bin evenly."""
    random = Random(seed)
    moved = [
        msgspec.structs.replace(each, arrival_s=each.arrival_s + random.uniform(0.0, BIN_S))
        for each in requests
    ]
    return sorted(moved, key=lambda each: each.arrival_s)


def at_rate(requests: Sequence[TraceRequest], rate: float, seconds: float) -> list[TraceRequest]:
    """Return the first requests, as many as come in so many seconds, at `rate` a second on average."""
    chosen = requests[: max(2, round(rate * seconds))]
    begin_s = chosen[0].arrival_s
    speed = rate * (chosen[-1].arrival_s - begin_s) / len(chosen)
    return [msgspec.structs.replace(each, arrival_s=(each.arrival_s - begin_s) / speed) for each in chosen]


def all_at_once(requests: Sequence[TraceRequest]) -> list[TraceRequest]:
    """Return the same requests, which come at one moment."""
    return [msgspec.structs.replace(each, arrival_s=0.0) for each in requests]


def capacity(layout: Layout, times: TimeModel, requests: Sequence[TraceRequest]) -> float:
    """Return the requests a second of a layout that is asked for everything at once."""
    course = rehearse_each(all_at_once(requests[:NUM_FOR_CAPACITY]), layout, times, RehearsalSettings())
    return len(course.ttft_ms) / course.duration_s


@asynccontextmanager
async def serving(layout: Layout, config: ServeConfig) -> AsyncIterator[Serve]:
    """Run `baton serve` with a layout, warm it up, and yield the function that puts loads on it."""
    async with served_cluster(
        ("--runtime", "local"),
        prefill=layout.num_prefill,
        decode=layout.num_decode,
        model=config.model,
        engine=config.engine,
    ) as cluster:
        client = Client(Address(cluster.url))
        listed = await model_of(client)
        vocab_size = listed.vocab_size or 1000

        async def serve(requests: Sequence[TraceRequest], slo: Slo) -> Run:
            jobs = trace_jobs(requests, vocab_size=vocab_size)
            return await Load(client, listed.name, Shape(slo=slo)).run(jobs)

        warm_up = random_jobs(NUM_WARM_UP, WARM_UP_SEED, vocab_size=vocab_size)
        await Load(client, listed.name, Shape(concurrency=2)).run(warm_up)
        yield serve
        client.close()


# Advice against measured layouts.

GOAL: Final = 0.9  # attainment: a run has a few hundred requests
CALM: Final = 0.1  # share of a worker's capacity at which it seems to have no other load
NUM_CALM: Final = 200  # requests
TTFT_ROOM, TPOT_ROOM = 5.0, 4.0  # objectives, as multiples of a calm worker's p90 and p50
MOST_SPEED: Final = 2.0  # that headroom is measured to
MOST_WORSE: Final = 5.0  # percent


class Workload(NamedTuple):
    """Requests, and their objectives."""

    name: str
    requests: list[TraceRequest]
    sla: Sla

    @property
    def slo(self) -> Slo:
        """The objectives in seconds."""
        assert self.sla.ttft_ms is not None and self.sla.tpot_ms is not None
        return Slo(ttft_s=self.sla.ttft_ms / 1e3, tpot_s=self.sla.tpot_ms / 1e3)


class Measured(NamedTuple):
    """The course of one workload on one served layout."""

    layout: Layout
    attained: float  # share of the requests that kept the objectives
    headroom: float = 0.0  # largest of SPEEDS at which it is able; 1.0 where it was not tried faster
    failures: tuple[str, ...] = ()  # of answers, which miss the objectives

    @property
    def is_able(self) -> bool:
        """It keeps the objectives."""
        return self.attained >= GOAL

    @property
    def merit(self) -> tuple[bool, int, float, float]:
        """The larger, the better, in the order of the advice."""
        ranks = self.layout.num_ranks if self.is_able else 0
        return self.is_able, -ranks, self.headroom, self.attained


def workload_of(
    name: str,
    requests: Sequence[TraceRequest],
    layouts: Sequence[Layout],
    times: TimeModel,
    share: float,
    seconds: float,
) -> Workload:
    """Return a workload at a share of the best layout's capacity, with its objectives."""
    alone = Layout.parse("1M")
    rate = share * max(capacity(layout, times, requests) for layout in layouts)
    apart_s = 1 / (CALM * capacity(alone, times, requests))
    calm = [
        msgspec.structs.replace(each, arrival_s=at * apart_s) for at, each in enumerate(requests[:NUM_CALM])
    ]
    figures = rehearse(calm, alone, times, RehearsalSettings(has_intervals=False)).figures
    sla = Sla(
        ttft_ms=TTFT_ROOM * figures["ttft_p90_ms"].value, tpot_ms=TPOT_ROOM * figures["tpot_p50_ms"].value
    )
    return Workload(name, at_rate(requests, rate, seconds), sla)


def attained_by(run: Run) -> float:
    """Return the share of the requests that were answered within the objectives."""
    return sum(map(run.slo.is_met, run.samples)) / (len(run.samples) + len(run.failures))


async def measured_on(
    layout: Layout,
    workloads: Sequence[Workload],
    config: ServeConfig,
    fewest: dict[str, int],
    tell: Progress,
) -> dict[str, Measured]:
    """Serve all workloads with one layout.

    fewest: the devices of the smallest able layout, by workload; grows. Larger layouts are not tried faster.
    """
    async with serving(layout, config) as serve:
        found = {}
        for workload in workloads:
            tell(f"{layout.name}: {workload.name}")
            found[workload.name] = await _measure(layout, workload, serve, fewest)
        return found


async def _measure(layout: Layout, workload: Workload, serve: Serve, fewest: dict[str, int]) -> Measured:
    run = await serve(workload.requests, workload.slo)
    measured = Measured(layout, attained_by(run), failures=tuple(run.failures))
    if not measured.is_able:
        return measured
    headroom = 1.0
    if layout.num_ranks <= fewest.setdefault(workload.name, layout.num_ranks):
        for speed in (each for each in SPEEDS if 1.0 < each <= MOST_SPEED):
            if attained_by(await serve(at_speed(workload.requests, speed), workload.slo)) < GOAL:
                break
            headroom = speed
    return measured._replace(headroom=headroom)


def distance(chosen: Measured | None, best: Measured) -> float:
    """Return by how many percent the choice is worse: in the objectives, devices, headroom or attainment,
    whichever differs first. chosen: None where the advice is that no layout is able.
    """
    if chosen is None:
        return 100.0 if best.is_able else 0.0
    if best.is_able and not chosen.is_able:
        return 100 * (1 - chosen.attained / GOAL)
    if not best.is_able:
        return 100 * (1 - chosen.attained / max(best.attained, 1e-9))
    if chosen.layout.num_ranks != best.layout.num_ranks:
        return 100 * (chosen.layout.num_ranks / best.layout.num_ranks - 1)
    if chosen.headroom != best.headroom:
        return 100 * (1 - chosen.headroom / best.headroom)
    return 100 * (1 - chosen.attained / best.attained)


def advised(workload: Workload, layouts: Sequence[Layout], times: TimeModel) -> Advice:
    """Return the advice for a workload, among these layouts."""
    settings = RehearsalSettings(sla=workload.sla)
    return advise(Search(workload.requests, times, settings, GOAL), layouts)


def rows_of(workload: Workload, measured: Mapping[str, Measured], advice: Advice) -> list[Row]:
    """Return a row for each layout, and one for the choice."""
    rows = []
    predicted = {option.layout.name: option for option in advice.options}
    for name, each in measured.items():
        option, headroom = predicted[name], f"headroom {each.headroom:g}" if each.is_able else "misses"
        figures = option.best_known.figures
        told = f"{100 * figures['attainment'].value:.0f} %" if figures else "not calibrated"
        failed = f"{len(each.failures)} failed: {each.failures[0]}; " if each.failures else ""
        note = f"{failed}{headroom}; predicted {told}, headroom {option.headroom:g}"
        rows.append(Row(f"{workload.name}, {name}: attained", 100 * each.attained, "%", note=note))
    best = max(measured.values(), key=lambda each: each.merit)
    chosen = advice.chosen.layout.name if advice.chosen is not None else ""
    rate = len(workload.requests) / workload.requests[-1].arrival_s
    objectives = (
        f"{rate:.0f} requests/s, TTFT {workload.sla.ttft_ms:.0f} ms, TPOT {workload.sla.tpot_ms:.1f} ms"
    )
    note = f"chosen: {chosen or 'none is able'}, measured best: {best.layout.name}; {objectives}"
    worse = distance(measured.get(chosen), best)
    return [*rows, at_most(f"{workload.name}: the choice is worse by", worse, "%", MOST_WORSE, note)]


async def advice_rows(
    workloads: Sequence[Workload],
    layouts: Sequence[Layout],
    times: TimeModel,
    config: ServeConfig,
    tell: Progress,
) -> list[Row]:
    """Serve all workloads with all layouts, the smallest first; return the rows of each workload."""
    measured: dict[str, dict[str, Measured]] = {workload.name: {} for workload in workloads}
    fewest: dict[str, int] = {}
    for layout in sorted(layouts, key=lambda each: each.num_ranks):
        found = await measured_on(layout, workloads, config, fewest, tell)
        for name, each in found.items():
            measured[name][layout.name] = each
    rows = []
    for workload in workloads:
        tell(f"{workload.name}: advice")
        rows += rows_of(workload, measured[workload.name], advised(workload, layouts, times))
    return rows
