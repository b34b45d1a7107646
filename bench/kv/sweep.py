"""The rate at which pages of many prompt sizes move over each transport, beside limits of the machine.

Rounds of all subjects alternate, so other work on the machine disturbs all alike. The first round warms up.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from statistics import median
from time import perf_counter
from typing import Final, NamedTuple

import numpy as np
import torch

from baton.bench.kv.ends import TRANSPORTS, Ends, layout_of, moving_s
from baton.bench.kv.limits import (
    SMALL,
    SMALL_TOKENS,
    UNPACED,
    Rival,
    limits_of,
    scattered_moves,
)
from baton.bench.report import Plot, Row, at_least
from baton.kernels.huge_pages import huge_zeros
from baton.kernels.pages import copy_runs
from baton.kvtransfer.protocol.handoff import TransferTimes
from baton.kvtransfer.protocol.transfer_plan import plan_transfer

MEBIBYTE: Final = 2**20
# transport -> the limit that its rate is compared with, and the least share
BARS: Final = {"shm": ("memcpy", 0.9), "tcp": ("raw socket", 0.85)}
GLOO_BAR: Final = 1.5
SMALL_BAR: Final = 0.6
# the beginning of a rival's name -> the least ratio to its rate of writing; other operations have no bar
RIVAL_BARS: Final = {"nixl": 1.2, "mooncake": 2.0}
RELAID_TOKENS: Final = 2048
Progress = Callable[[str], None]


class Point(NamedTuple):
    """The round with the median time of moving, of one prompt size over one transport."""

    num_tokens: int
    transport: str
    times: TransferTimes

    @property
    def num_bytes(self) -> int:
        return self.times.num_bytes

    @property
    def gbps(self) -> float:
        """GB/s while bytes moved."""
        return self.num_bytes / moving_s(self.times) / 1e9


class Sweep(NamedTuple):
    """The results of one shape and page size; `limits` are medians in GB/s by name."""

    shape: str
    page_size: int
    points: list[Point]
    limits: dict[str, float]
    rivals: list[Rival]


def measure_shape(
    shape: str,
    page_size: int,
    sizes: Sequence[int],
    num_rounds: int,
    rivals: Sequence[str],
    also: Sequence[str],
    progress: Progress,
) -> Sweep:
    """Measure every prompt size, the limits and the rivals. ConfigError: a rival's text is not valid.

    also: transports beside TRANSPORTS, which have no bars.
    """
    layout = layout_of(shape, page_size=page_size)
    competing = [Rival(text) for text in rivals]
    moves = scattered_moves(layout.page_bytes)
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    times: defaultdict[tuple[str, int], list[TransferTimes]] = defaultdict(list)
    limits = limits_of(layout)
    try:
        with ExitStack() as stack:
            num_tokens = max(sizes) * 5 // 4
            both = stack.enter_context(Ends(layout, layout, num_tokens))
            bare = stack.enter_context(Ends(layout, layout, num_tokens, has_digests=False))
            ends = {transport: (both, transport) for transport in TRANSPORTS}
            ends |= {f"{transport}, no digests": (bare, transport) for transport in TRANSPORTS}
            for asked in also:  # a destination listens with one transport that is not automatic
                ends[asked] = stack.enter_context(Ends(layout, layout, num_tokens, (asked,))), asked
            for _ in range(1 + num_rounds):
                for num_tokens in sizes:
                    progress(f"{shape}, pages of {page_size}: {num_tokens} tokens")
                    for name, (each, transport) in ends.items():
                        times[name, num_tokens].append(each.send(transport, num_tokens))
                for limit in limits:
                    seconds[limit.name].append(limit.run())
                for rival in competing:
                    rival.run(moves)
    finally:
        for limit in limits:
            limit.close()
    points = [
        Point(num_tokens, transport, sorted(taken[1:], key=moving_s)[num_rounds // 2])
        for (transport, num_tokens), taken in times.items()
    ]
    gbps = {each.name: each.num_bytes / median(seconds[each.name][1:]) / 1e9 for each in limits}
    return Sweep(shape, page_size, points, gbps, competing)


def sweep_rows(points: Sequence[Point], limits: Mapping[str, float]) -> list[Row]:
    """Return the figures of one shape and page size."""
    rows = [Row(f"limit: {name}", gbps, "GB/s") for name, gbps in limits.items()]
    for point in sorted(points, key=lambda point: (point.transport, point.num_tokens)):
        times = point.times
        note = (
            f"{point.num_bytes / MEBIBYTE:,.1f} MiB; "
            f"verify {1e3 * times.verify_s:.1f} ms, whole {1e3 * times.total_s:.1f} ms"
        )
        rows.append(Row(f"{point.transport}: {point.num_tokens:,} tokens", point.gbps, "GB/s", note=note))
    for transport in TRANSPORTS:
        rows += _ratios([point for point in points if point.transport == transport], limits)
    return rows


def _ratios(points: Sequence[Point], limits: Mapping[str, float]) -> list[Row]:
    """Compare the largest transfer with the limits; compare that of 512 tokens with the largest one."""
    largest = max(points, key=lambda point: point.num_bytes)
    transport, (limit, bar) = largest.transport, BARS[largest.transport]
    same_streams = max(
        (name for name in limits if name.startswith(limit) and not name.endswith((SMALL, UNPACED))), key=len
    )
    rows = []
    if largest.num_bytes >= MEBIBYTE:
        ratio, gloo = largest.gbps / limits[same_streams], largest.gbps / limits["isend/irecv pages"]
        rows.append(at_least(f"{transport} / {same_streams}", ratio, "x", bar))
        if same_streams + UNPACED in limits:
            unpaced = largest.gbps / limits[same_streams + UNPACED]
            rows.append(Row(f"{transport} / {same_streams}{UNPACED}", unpaced, "x"))
        rows.append(at_least(f"{transport} / gloo, same pages", gloo, "x", GLOO_BAR))
    for point in points:
        if point.num_tokens == SMALL_TOKENS:
            name, bare_gbps = f"{transport}: {SMALL_TOKENS} tokens", limits[limit + SMALL]
            note = f"{limit} of as few bytes: {bare_gbps / largest.gbps:.2f}"
            rows.append(at_least(f"{name} / largest", point.gbps / largest.gbps, "x", SMALL_BAR, note))
            rows.append(Row(f"{name} / {limit} of as few", point.gbps / bare_gbps, "x"))
    return rows


def rival_rows(points: Sequence[Point], rivals: Sequence[Rival]) -> list[Row]:
    """Return each rival's rates, and the largest transfer of the compared transport over these rates."""
    rows = []
    for rival in rivals:
        if rival.failure:
            rows.append(Row(rival.name, None, "GB/s", met=False, note=rival.failure))
        ours = [point for point in points if point.transport == rival.transport]
        largest = max(ours, key=lambda point: point.num_bytes)
        for operation, gbps in rival.gbps.items():
            name, ratio = f"{rival.name}: {operation}", largest.gbps / gbps
            bar = RIVAL_BARS.get(rival.name.split()[0]) if operation == "write" else None
            rows.append(Row(name, gbps, "GB/s"))
            rows.append(at_least(f"{rival.transport} / {name}", ratio, "x", bar))
    return rows


def relayout_rows(shape: str, page_size: int, into: int, num_rounds: int, progress: Progress) -> list[Row]:
    """Measure pages into pages of `into` tokens, beside equal pages and beside a plain copy of as short runs.

    A run of bytes is then not a page but one head's keys, or values, of the smaller page's tokens.
    """
    source, other = layout_of(shape, page_size=page_size), layout_of(shape, page_size=into)
    run_bytes = plan_transfer(source, other, 0, 0).run_bytes
    copy_gbps = _run_copies(run_bytes)
    found: defaultdict[str, list[tuple[float, float, float]]] = defaultdict(list)
    with Ends(source, source, 2 * RELAID_TOKENS) as equal, Ends(source, other, 2 * RELAID_TOKENS) as unequal:
        for _ in range(1 + num_rounds):
            progress(f"{shape}, pages of {page_size} into {into}")
            for transport in TRANSPORTS:
                rates = [
                    Point(RELAID_TOKENS, transport, ends.send(transport, RELAID_TOKENS)).gbps
                    for ends in (unequal, equal)
                ]
                found[transport].append((rates[0], rates[1], copy_gbps()))
    rows = []
    for transport, taken in found.items():
        name = f"{shape}, {transport}: pages of {page_size} into {into}"
        gbps, equal_gbps, memcpy_gbps = (median(rates) for rates in zip(*taken[1:], strict=True))
        rows += [
            Row(name, gbps, "GB/s", note=f"{run_bytes:,} bytes a run"),
            Row(f"{name} / memcpy of such runs", gbps / memcpy_gbps, "x"),
            Row(f"{name} / into equal pages", gbps / equal_gbps, "x"),
        ]
    return rows


def _run_copies(run_bytes: int) -> Callable[[], float]:
    """Return a call that copies runs from random places to random places, and returns its rate in GB/s."""
    moves = scattered_moves(run_bytes)
    pool_bytes = moves.num_pool_pages * run_bytes
    source, target = (huge_zeros((pool_bytes,), torch.uint8).fill_(1) for _ in range(2))
    from_N = np.asarray(moves.source_pages, np.int64) * run_bytes
    to_N = np.asarray(moves.destination_pages, np.int64) * run_bytes

    def run() -> float:
        started_s = perf_counter()
        copy_runs(source, target, from_N, to_N, run_bytes, keep_in_cache=True)
        return moves.num_bytes / (perf_counter() - started_s) / 1e9

    return run


def plot_of(sweeps: Sequence[Sweep]) -> Plot:
    """Return the rate over bytes moved, a panel a transport, with memcpy and raw sockets as lines."""
    panels = {}
    for transport in TRANSPORTS:
        limit, _ = BARS[transport]
        best = max(rate for each in sweeps for name, rate in each.limits.items() if name.startswith(limit))
        curves = {
            f"{each.shape}, pages of {each.page_size}": sorted(
                (point.num_bytes / MEBIBYTE, point.gbps)
                for point in each.points
                if point.transport == transport
            )
            for each in sweeps
        }
        moved = [x for curve in curves.values() for x, _ in curve]
        curves[f"{limit}, best of the run"] = [(min(moved), best), (max(moved), best)]
        panels[transport] = curves
    return Plot(panels, x_label="MiB of a transfer", y_label="GB/s while bytes move", is_log=True)
