"""The rate at which pages of many prompt sizes move over each transport, beside limits of the machine.

Rounds of all subjects alternate, so other work on the machine disturbs all alike.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import Final, NamedTuple

import numpy as np
import torch

from baton.bench.kv.ends import DestinationProcess, SourceEnd, layout_of
from baton.bench.kv.limits import (
    CONTIGUOUS,
    PAGES,
    UNPACED,
    Contest,
    Gloo,
    Memcpy,
    PageMoves,
    RawSocket,
    Rival,
    RivalRates,
    Subject,
)
from baton.kernels.copy_runs import Offsets, copy_runs
from baton.kernels.huge_pages import huge_zeros
from baton.kvtransfer.protocol.handoff import TransferTimes
from baton.kvtransfer.protocol.transfer_plan import plan_transfer
from baton.kvtransfer.transports.tcp import TcpSettings
from baton.pages import PageLayout

SMALL_TOKENS: Final = 512
SMALL: Final = f", {SMALL_TOKENS} tokens"  # the end of a limit's name that moves only so many bytes
LIMIT_BYTES: Final = 2**26  # of a limit's round: rates do not change beyond
TRANSPORTS: Final = ("shm", "tcp")
Progress = Callable[[str], None]


class Point(NamedTuple):
    """Medians over the rounds of one prompt size."""

    shape: str
    page_size: int
    num_tokens: int
    transport: str
    num_bytes: int
    gbps: float  # while bytes moved
    gbps_whole: float  # from the first message to the last, digests and their comparison included
    times: TransferTimes


class Limits(NamedTuple):
    """Medians of each limit in GB/s, for one shape and page size."""

    shape: str
    page_size: int
    gbps: dict[str, float]


class Rounds(NamedTuple):
    """The prompt sizes and rivals of one round, and the number of rounds."""

    sizes: Sequence[int]  # of prompts, in tokens
    num_rounds: int
    rivals: Sequence[Rival] = ()


class Measured(NamedTuple):
    """The results of one shape and page size."""

    points: list[Point]
    limits: Limits
    rivals: list[RivalRates]


class Ends:
    """A pool here, a pool in another process, and a link between them over each transport."""

    def __init__(self, source: PageLayout, destination: PageLayout, num_tokens: int) -> None:
        """num_tokens: room of either pool; there are 64 pages at least."""
        self._destination = DestinationProcess(destination, max(64, destination.num_pages(num_tokens)))
        self._sources: dict[str, SourceEnd] = {}
        for transport in TRANSPORTS:
            pool = next(iter(self._sources.values())).pool if self._sources else None
            num_pages = max(64, source.num_pages(num_tokens))
            self._sources[transport] = SourceEnd(source, num_pages, transport, pool)

    def send(self, transport: str, num_tokens: int) -> TransferTimes:
        """Hand over the pages of so many tokens."""
        return self._sources[transport].send(self._destination, num_tokens)

    def close(self) -> None:
        """Close both ends."""
        for source in self._sources.values():
            source.close()
        self._destination.close()


def measure_shape(shape: str, page_size: int, rounds: Rounds, progress: Progress) -> Measured:
    """Measure every prompt size of one shape, the limits and the rivals."""
    layout = layout_of(shape, page_size=page_size)
    ends = Ends(layout, layout, max(rounds.sizes) * 5 // 4)
    subjects = limit_subjects(layout)
    contest = Contest(rounds.rivals, many_moves(layout.page_bytes))
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    times: defaultdict[tuple[str, int], list[TransferTimes]] = defaultdict(list)
    try:
        for round_number in range(-1, rounds.num_rounds):
            for num_tokens in rounds.sizes:
                progress(f"{shape}, pages of {page_size}: {num_tokens} tokens")
                for transport in TRANSPORTS:
                    taken = ends.send(transport, num_tokens)
                    if round_number >= 0:  # the first one warms up
                        times[transport, num_tokens].append(taken)
            for subject in subjects:
                taken_s = subject.run()
                if round_number >= 0:
                    seconds[subject.name].append(taken_s)
            if round_number >= 0:
                contest.run()
    finally:
        for subject in subjects:
            subject.close()
        ends.close()
    limits = {each.name: each.num_bytes / median(seconds[each.name]) / 1e9 for each in subjects}
    points = [
        point_of(shape, page_size, num_tokens, transport, taken)
        for (transport, num_tokens), taken in times.items()
    ]
    return Measured(points, Limits(shape, page_size, limits), contest.rates())


def point_of(
    shape: str, page_size: int, num_tokens: int, transport: str, taken: Sequence[TransferTimes]
) -> Point:
    """Return the round with the median time of moving."""
    middle = sorted(taken, key=moving_s)[len(taken) // 2]
    return Point(
        shape=shape,
        page_size=page_size,
        num_tokens=num_tokens,
        transport=transport,
        num_bytes=middle.num_bytes,
        gbps=middle.num_bytes / moving_s(middle) / 1e9,
        gbps_whole=median(each.num_bytes / each.total_s for each in taken) / 1e9,
        times=middle,
    )


def moving_s(times: TransferTimes) -> float:
    """Return the seconds while bytes moved."""
    return times.gather_s + times.wire_s


def limit_moves(page_bytes: int, num_pages: int) -> PageMoves:
    """Return a round of so many pages, scattered over pools of twice as many."""
    pool, choose = 2 * max(num_pages, LIMIT_BYTES // page_bytes), random.Random(0)
    return PageMoves(
        page_bytes, pool, choose.sample(range(pool), num_pages), choose.sample(range(pool), num_pages)
    )


def many_moves(page_bytes: int) -> PageMoves:
    """Return a round of LIMIT_BYTES."""
    return limit_moves(page_bytes, max(1, LIMIT_BYTES // page_bytes))


def limit_subjects(layout: PageLayout) -> list[Subject]:
    """Return every limit."""
    moves = many_moves(layout.page_bytes)
    few = limit_moves(layout.page_bytes, layout.num_pages(SMALL_TOKENS))
    streams = sorted({1, TcpSettings().num_streams})
    return [
        Memcpy(moves),
        *(RawSocket(moves, num_streams) for num_streams in streams),
        RawSocket(moves, streams[-1], UNPACED),
        Gloo(moves, CONTIGUOUS),
        Gloo(moves, PAGES),
        Memcpy(few, SMALL),
        RawSocket(few, 1, SMALL),
    ]


RELAID_TOKENS: Final = 2048


class Relaid(NamedTuple):
    """Medians, in GB/s while bytes moved, of a prompt that goes into pages of another size.

    A run of bytes is then not a page but one head's keys, or values, of the smaller page's tokens.
    """

    shape: str
    page_size: int
    into: int
    transport: str
    run_bytes: int
    gbps: float
    equal_gbps: float  # into pages of the same size
    memcpy_gbps: float  # of as short runs, within one process


class RunCopy:
    """Copies run by run from random places to random places."""

    def __init__(self, run_bytes: int) -> None:
        num_runs = LIMIT_BYTES // run_bytes
        self._run_bytes = run_bytes
        pool_bytes = 2 * num_runs * run_bytes
        self._source, self._destination = (huge_zeros((pool_bytes,), torch.uint8).fill_(1) for _ in range(2))
        self._from, self._to = (self._scattered(num_runs, seed) for seed in range(2))

    def gbps(self) -> float:
        """Run one round; return its rate."""
        started_s = perf_counter()
        copy_runs(self._source, self._destination, self._from, self._to, self._run_bytes, keep_in_cache=True)
        return len(self._from) * self._run_bytes / (perf_counter() - started_s) / 1e9

    def _scattered(self, num_runs: int, seed: int) -> Offsets:
        chosen = random.Random(seed).sample(range(2 * num_runs), num_runs)
        return np.asarray(chosen, dtype=np.int64) * self._run_bytes


def measure_relayout(
    shape: str, page_size: int, into: int, num_rounds: int, progress: Progress
) -> list[Relaid]:
    """Measure pages into equal pages, into pages of `into` tokens, and a plain copy of as short runs."""
    source, other = layout_of(shape, page_size=page_size), layout_of(shape, page_size=into)
    equal, unequal = (Ends(source, each, 2 * RELAID_TOKENS) for each in (source, other))
    run_bytes = plan_transfer(source, other, 0, 0).run_bytes
    copy = RunCopy(run_bytes)
    found: defaultdict[str, list[tuple[float, float, float]]] = defaultdict(list)
    try:
        for round_number in range(-1, num_rounds):
            progress(f"{shape}, pages of {page_size} into {into}")
            for name in TRANSPORTS:
                rates = _rate(unequal, name), _rate(equal, name), copy.gbps()
                if round_number >= 0:  # the first one warms up
                    found[name].append(rates)
    finally:
        unequal.close()
        equal.close()
    return [
        Relaid(
            shape, page_size, into, name, run_bytes, *(median(rates) for rates in zip(*taken, strict=True))
        )
        for name, taken in found.items()
    ]


def _rate(ends: Ends, transport: str) -> float:
    times = ends.send(transport, RELAID_TOKENS)
    return times.num_bytes / moving_s(times) / 1e9
