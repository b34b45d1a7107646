"""Loads that `baton serve` answers and rehearsals predict: synthetic ones, and traces at any rate."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import islice
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Final, TypeAlias

import msgspec

from baton.bench.clusters import served_cluster
from baton.bench.serve.client import Address, Client
from baton.bench.serve.figures import Run, Slo
from baton.bench.serve.load import Load, Shape, model_of, random_jobs, trace_jobs
from baton.bench.sim.calibration import options_of
from baton.config.cluster import ServeConfig
from baton.config.environment import environment_of_child
from baton.sim.rehearsal import Layout, RehearsalSettings, rehearse_each
from baton.sim.timed.times import TimeModel
from baton.sim.timed.workload import Lengths, TraceRequest, read_trace, synthetic

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


def at_speed(requests: Sequence[TraceRequest], speed: float) -> list[TraceRequest]:
    """Return the same requests in a shorter time. speed: 2.0 halves the time."""
    return [msgspec.structs.replace(each, arrival_s=each.arrival_s / speed) for each in requests]


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
    with TemporaryDirectory() as folder:
        async with served_cluster(
            Path(folder),
            ("--runtime", "local", *options_of(config)),
            prefill=layout.num_prefill,
            decode=layout.num_decode,
            model=config.model,
            environment=environment_of_child(num_threads=1),
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
