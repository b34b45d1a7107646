"""What it costs that the destination cuts its pages otherwise: the same prompt into pages of another size.

A page is then no run of bytes any more: a run is one head's keys, or values, of the smaller page's tokens.
Rounds of equal pages, of unequal ones and of a plain copy of as short runs alternate.
"""

import random
from collections import defaultdict
from statistics import median
from time import perf_counter
from typing import Final, NamedTuple

import numpy as np
import torch

from baton.bench.kv_ends import DestinationProcess, SourceEnd
from baton.bench.kv_shapes import layout_of
from baton.bench.kv_sweep import LIMIT_BYTES, TRANSPORTS, Progress, moving_s
from baton.kernels.copy_runs import Offsets, copy_runs
from baton.kernels.huge_pages import huge_zeros
from baton.kvtransfer.transfer_plan import plan_transfer

NUM_TOKENS: Final = 2048


class Relaid(NamedTuple):
    """Medians, in GB/s while bytes moved."""

    shape: str
    page_size: int
    into: int
    transport: str
    run_bytes: int
    gbps: float
    equal_gbps: float  # into pages of the same size
    memcpy_gbps: float  # of as short runs, within one process


class _Pair:
    """Two ranks, over every transport."""

    def __init__(self, shape: str, page_size: int, into: int) -> None:
        source, destination = layout_of(shape, page_size=page_size), layout_of(shape, page_size=into)
        self.plan = plan_transfer(source, destination, 0, 0)
        self._destination = DestinationProcess(destination, destination.num_pages(NUM_TOKENS) * 2)
        self._sources: dict[str, SourceEnd] = {}
        for name in TRANSPORTS:
            pool = next(iter(self._sources.values())).pool if self._sources else None
            self._sources[name] = SourceEnd(source, source.num_pages(NUM_TOKENS) * 2, name, pool)
        self._links = {name: end.link(self._destination) for name, end in self._sources.items()}

    def gbps(self, transport: str) -> float:
        times = self._sources[transport].send(self._links[transport], NUM_TOKENS)
        return times.num_bytes / moving_s(times) / 1e9

    def close(self) -> None:
        for end in self._sources.values():
            end.close()
        self._destination.close()


class RunCopy:
    """memcpy, run by run, from random places to random places."""

    def __init__(self, run_bytes: int) -> None:
        num_runs = LIMIT_BYTES // run_bytes
        self._run_bytes = run_bytes
        pool_bytes = 2 * num_runs * run_bytes
        self._source, self._destination = (huge_zeros((pool_bytes,), torch.uint8).fill_(1) for _ in range(2))
        self._from, self._to = (self._scattered(num_runs, seed) for seed in range(2))

    def gbps(self) -> float:
        started_s = perf_counter()
        copy_runs(self._source, self._destination, self._from, self._to, self._run_bytes, keep_in_cache=True)
        return len(self._from) * self._run_bytes / (perf_counter() - started_s) / 1e9

    def _scattered(self, num_runs: int, seed: int) -> Offsets:
        chosen = random.Random(seed).sample(range(2 * num_runs), num_runs)
        return np.asarray(chosen, dtype=np.int64) * self._run_bytes


def measure_relayout(
    shape: str, page_size: int, into: int, num_rounds: int, progress: Progress
) -> list[Relaid]:
    equal, unequal = _Pair(shape, page_size, page_size), _Pair(shape, page_size, into)
    copy = RunCopy(unequal.plan.run_bytes)
    found: defaultdict[str, list[tuple[float, float, float]]] = defaultdict(list)
    try:
        for round_number in range(-1, num_rounds):
            progress(f"{shape}, pages of {page_size} into {into}")
            for name in TRANSPORTS:
                rates = unequal.gbps(name), equal.gbps(name), copy.gbps()
                if round_number >= 0:  # the first one warms up
                    found[name].append(rates)
    finally:
        unequal.close()
        equal.close()
    run_bytes = unequal.plan.run_bytes
    return [
        Relaid(
            shape, page_size, into, name, run_bytes, *(median(rates) for rates in zip(*taken, strict=True))
        )
        for name, taken in found.items()
    ]
