"""How long work takes: on a GPU by events around graph replays, on a CPU by the clock."""

from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import Final, TypeAlias

import torch

Call: TypeAlias = Callable[[], object]

NUM_WARMUP_RUNS: Final = 2  # the first runs compile kernels, make handles and settle the allocator


def seconds_per_call(calls: Sequence[Call], device: torch.device, *, num_runs: int = 7) -> float:
    """Median over `num_runs` of the time of all calls, one after another, divided by their number.

    On a GPU the calls are captured into one graph and its replays are timed, so that neither Python nor
    launches are in the figure; a call may therefore not wait for the device. Calls should differ in the
    memory they touch: what fits into a cache is measured from the cache.
    """
    for _ in range(NUM_WARMUP_RUNS):
        _run(calls)
    if device.type == "cuda":
        return median(_replay_seconds(calls, num_runs)) / len(calls)
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


def _replay_seconds(calls: Sequence[Call], num_runs: int) -> list[float]:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _run(calls)
    graph.replay()  # the first replay uploads the graph
    events = []
    for _ in range(num_runs):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in events]
