"""How long work takes: on a GPU by events around graph replays, on a CPU by the clock."""

from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import Final, TypeAlias

import torch

Call: TypeAlias = Callable[[], object]

NUM_WARMUP_RUNS: Final = 2  # the first runs compile kernels, make handles and settle the allocator
LEAST_GRAPH_S: Final = 2e-3  # a graph repeats short calls, so that its own launch is no part of the figure
MAX_ROUNDS: Final = 20
CLOCK_RAMP_S: Final = 0.1  # an idle GPU takes this long to reach its clocks


def seconds_per_call(calls: Sequence[Call], device: torch.device, *, num_runs: int = 7) -> float:
    """Median over `num_runs` of the time of all calls, one after another, divided by their number.

    On a GPU the calls are captured into one graph and its replays are timed, so that neither Python nor
    launches are in the figure; a call may therefore not wait for the device. Calls should differ in the
    memory they touch: what fits into a cache is measured from the cache.
    """
    for _ in range(NUM_WARMUP_RUNS):
        _run(calls)
    if device.type == "cuda":
        eager_s = wall_seconds(lambda: _run(calls), device)
        num_rounds = min(MAX_ROUNDS, max(1, round(LEAST_GRAPH_S / eager_s)))
        return median(_replay_seconds(calls, num_rounds, num_runs)) / (num_rounds * len(calls))
    return median(wall_seconds(lambda: _run(calls), device) for _ in range(num_runs)) / len(calls)


def wall_seconds(run: Call, device: torch.device) -> float:
    """Time by the clock until the device has finished: for work that includes Python."""
    synchronize(device)
    started_s = perf_counter()
    run()
    synchronize(device)
    return perf_counter() - started_s


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _run(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


def _replay_seconds(calls: Sequence[Call], num_rounds: int, num_runs: int) -> list[float]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(num_rounds):
            _run(calls)
    warm_until_s = perf_counter() + CLOCK_RAMP_S
    while perf_counter() < warm_until_s:
        graph.replay()
        torch.cuda.synchronize()
    events = []
    for _ in range(num_runs):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in events]
