"""KV transfers: rates, the part that a request waits for, and the cost of faults.

    baton bench kv                            prompt sizes of named models over every transport; streaming
    baton bench kv --rival tcp:NAME=COMMAND   the same beside another library
    baton bench kv --trace PATH [--scale 32]  a real trace's hand-offs over a matrix of workers
    baton bench kv --faults                   kill, stall, cut and corrupt in the middle of transfers

Two real processes, real ledgers, scattered pages, digests compared; limits of the machine measured in the
same run. Columns are explained in bench/README.md.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Final

import msgspec

from baton.bench.kv.cases import (
    KINDS,
    PERCENTS,
    Fault,
    Replayed,
    Streamed,
    measure_fault,
    measure_streaming,
    replay,
)
from baton.bench.kv.ends import SHAPE_NAMES, layout_of
from baton.bench.kv.limits import UNPACED, Rival, RivalRates
from baton.bench.kv.sweep import (
    SMALL,
    SMALL_TOKENS,
    TRANSPORTS,
    Limits,
    Point,
    Relaid,
    Rounds,
    measure_relayout,
    measure_shape,
)
from baton.bench.report import Report, Row, add_output_option, at_least, at_most, run_command, run_suite
from baton.bench.traces import read_trace

MEBIBYTE: Final = 2**20
# transport -> the limit that its rate is compared with, and the least share
BARS: Final = {"shm": ("memcpy", 0.9), "tcp": ("raw socket", 0.85)}
GLOO_BAR: Final = 1.5
SMALL_BAR: Final = 0.6
# the beginning of a rival's name -> the least ratio to its rate of writing
RIVAL_BARS: Final = {"nixl": 1.2, "mooncake": 2.0}
PUSHING: Final = "write"  # the operation of Baton's transports; a rival's other operations have no bar
EXPOSED_BAR: Final = 3.0  # % of a prefill
STREAMING_BAR: Final = 3.0  # times less exposed
BACK_BAR_MS: Final = 1000.0


def sweep_rows(points: Sequence[Point], limits: Limits) -> list[Row]:
    """Return the figures of one shape and page size."""
    rows = [Row(f"limit: {name}", gbps, "GB/s") for name, gbps in limits.gbps.items()]
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


def _ratios(points: Sequence[Point], limits: Limits) -> list[Row]:
    """Compare the largest transfer with the limits, and that of 512 tokens with the largest."""
    largest = max(points, key=lambda point: point.num_bytes)
    transport, (limit, bar) = largest.transport, BARS[largest.transport]
    many = [name for name in limits.gbps if name.startswith(limit) and not name.endswith((SMALL, UNPACED))]
    same_streams = max(many, key=len)
    rows = []
    if largest.num_bytes >= MEBIBYTE:
        ratio = largest.gbps / limits.gbps[same_streams]
        rows.append(at_least(f"{transport} / {same_streams}", ratio, "x", bar))
        unpaced = limits.gbps.get(same_streams + UNPACED)
        if unpaced is not None:
            rows.append(Row(f"{transport} / {same_streams}{UNPACED}", largest.gbps / unpaced, "x"))
        gloo = largest.gbps / limits.gbps["isend/irecv pages"]
        rows.append(at_least(f"{transport} / gloo, same pages", gloo, "x", GLOO_BAR))
    for point in points:
        if point.num_tokens == SMALL_TOKENS:
            rows += _small_ratios(point, largest, limit, limits)
    return rows


def _small_ratios(point: Point, largest: Point, limit: str, limits: Limits) -> list[Row]:
    """Compare a short prompt with the large rate, and with as few bytes moved without a transport."""
    name, bare_gbps = f"{point.transport}: {SMALL_TOKENS} tokens", limits.gbps[limit + SMALL]
    note = f"{limit} of as few bytes: {bare_gbps / largest.gbps:.2f}"
    return [
        at_least(f"{name} / largest", point.gbps / largest.gbps, "x", SMALL_BAR, note),
        Row(f"{name} / {limit} of as few", point.gbps / bare_gbps, "x"),
    ]


def rival_rows(points: Sequence[Point], rivals: Sequence[RivalRates]) -> list[Row]:
    """Return each rival's rates, and the largest transfer of the compared transport over them."""
    rows = []
    for rival in rivals:
        if rival.failure:
            rows.append(Row(rival.name, None, "GB/s", met=False, note=rival.failure))
        ours = [point for point in points if point.transport == rival.transport]
        largest = max(ours, key=lambda point: point.num_bytes)
        for operation, gbps in rival.gbps.items():
            name, ratio = f"{rival.name}: {operation}", largest.gbps / gbps
            bar = RIVAL_BARS.get(rival.name.split()[0]) if operation == PUSHING else None
            rows.append(Row(name, gbps, "GB/s"))
            rows.append(at_least(f"{rival.transport} / {name}", ratio, "x", bar))
    return rows


def relayout_rows(relaid: Sequence[Relaid]) -> list[Row]:
    """Compare pages into smaller pages with a copy of as short runs, and with equal pages."""
    rows = []
    for each in relaid:
        name = f"{each.shape}, {each.transport}: pages of {each.page_size} into {each.into}"
        note = f"{each.run_bytes:,} bytes a run"
        rows += [
            Row(name, each.gbps, "GB/s", note=note),
            Row(f"{name} / memcpy of such runs", each.gbps / each.memcpy_gbps, "x"),
            Row(f"{name} / into equal pages", each.gbps / each.equal_gbps, "x"),
        ]
    return rows


def stream_rows(streamed: Sequence[Streamed]) -> list[Row]:
    """Return the exposed part of each hand-off."""
    rows = []
    for each in streamed:
        name = f"{each.transport}, {each.num_tokens:,} tokens"
        share = 100 * each.exposed_streaming_s / each.prefill_s
        gain = each.exposed_at_end_s / each.exposed_streaming_s
        note = f"{1e3 * each.exposed_streaming_s:.1f} ms of a prefill of {each.prefill_s:.2f} s"
        rows.append(at_most(f"{name}: exposed", share, "% of prefill", EXPOSED_BAR, note))
        rows.append(at_least(f"{name}: pushed at the end / streamed", gain, "x", STREAMING_BAR))
        slower = each.prefill_by_layers_s / each.prefill_s - 1
        note = f"{1e3 * each.exposed_by_layers_s:.1f} ms; the prefill takes {100 * slower:+.1f} %"
        by_layers = each.exposed_streaming_s / each.exposed_by_layers_s
        rows.append(Row(f"{name}: last chunk whole / by groups of layers", by_layers, "x", note=note))
    return rows


def trace_rows(replayed: Sequence[Replayed]) -> list[Row]:
    """Return the hand-offs of a replayed trace."""
    rows = []
    for each in replayed:
        note = f"{each.num_requests} requests, {each.num_cached_tokens:,} tokens were cached"
        rows += [
            Row(f"{each.transport}: while moving", each.gbps, "GB/s", note=note),
            Row(f"{each.transport}: a hand-off, P50", each.p50_ms, "ms"),
            Row(f"{each.transport}: a hand-off, P99", each.p99_ms, "ms"),
            Row(f"{each.transport}: exposed, median", each.exposed_ms, "ms", note="without streaming"),
            Row(f"{each.transport}: exposed / TTFT", 100 * each.exposed_share, "%"),
        ]
    return rows


def fault_rows(faults: Sequence[Fault]) -> list[Row]:
    """Return when each fault was noticed and when the pages were back."""
    rows = []
    for each in faults:
        name = f"{each.kind} at {each.percent} %, {each.transport}"
        note = f"{each.outcome}; {each.wasted_bytes / MEBIBYTE:,.1f} MiB for nothing"
        rows.append(Row(f"{name}: noticed", 1e3 * each.detected_s, "ms", note=note))
        back_ms = 1e3 * (each.pages_back_s - each.detected_s)
        rows.append(at_most(f"{name}: pages back", back_ms, "ms", BACK_BAR_MS))
    return rows


def plot_sweep(points: Sequence[Point], limits: Sequence[Limits], path: Path) -> None:
    """Draw the rate over bytes moved, a panel a transport, with memcpy and raw sockets as lines."""
    from matplotlib.figure import Figure

    transports = sorted({point.transport for point in points})
    figure = Figure(figsize=(5 * len(transports), 4), layout="constrained")
    panels = figure.subplots(1, len(transports), squeeze=False)[0]
    for axes, transport in zip(panels, transports, strict=True):
        for limit in limits:
            curve = sorted(
                (point.num_bytes / 2**20, point.gbps)
                for point in points
                if (point.transport, point.shape, point.page_size)
                == (transport, limit.shape, limit.page_size)
            )
            label = f"{limit.shape}, pages of {limit.page_size}"
            axes.plot([x for x, _ in curve], [y for _, y in curve], "o-", label=label)
        name = "memcpy" if transport == "shm" else "raw socket"
        best = max(rate for limit in limits for key, rate in limit.gbps.items() if key.startswith(name))
        axes.axhline(best, color="grey", linestyle="--", linewidth=0.8, label=f"{name}, best of the run")
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("MiB of a transfer")
        axes.set_ylabel("GB/s while bytes move")
        axes.set_title(transport)
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)


SIZES: Final = (128, 512, 2048, 8192, 32768)
STREAM_TOKENS: Final = (4096, 8192)
FAULT_PAGES: Final = 96


def measure_sweep(options: argparse.Namespace, report: Report) -> None:
    """Measure every prompt size of every shape, pages into other pages, and streaming."""
    points: list[Point] = []
    limits: list[Limits] = []
    rates: list[dict[str, object]] = []
    rivals = [Rival.parsed(text, TRANSPORTS) for text in options.rival]
    rounds = Rounds(options.sizes, options.rounds, rivals)
    kinds = list(product(options.shapes, options.page_sizes))
    for shape, page_size in kinds:
        found = measure_shape(shape, page_size, rounds, report.tell)
        points += found.points
        limits.append(found.limits)
        rates += [{"shape": shape, "page_size": page_size, **each._asdict()} for each in found.rivals]
        rows = sweep_rows(found.points, found.limits) + rival_rows(found.points, found.rivals)
        report.show(f"{shape}, pages of {page_size} tokens", rows)
    relaid = [
        each
        for (shape, page_size), into in product(kinds, options.into_page_sizes)
        for each in measure_relayout(shape, page_size, into, options.rounds, report.tell)
    ]
    report.show("Into pages of another size", relayout_rows(relaid))
    streamed = [
        measure_streaming(num_tokens, transport, options.rounds, report.tell)
        for num_tokens, transport in product(options.stream_tokens, TRANSPORTS)
    ]
    report.show("Streaming while a prompt is computed", stream_rows(streamed))
    report.plot = partial(plot_sweep, points, limits)
    report.extra = {
        "points": [point._asdict() | {"times": msgspec.structs.asdict(point.times)} for point in points],
        "limits": [limit._asdict() for limit in limits],
        "rivals": rates,
        "relaid": [each._asdict() for each in relaid],
        "streamed": [each._asdict() for each in streamed],
    }


def measure_trace(options: argparse.Namespace, report: Report) -> None:
    """Replay the hand-offs of a trace."""
    requests = read_trace(options.trace, scale=options.scale, limit=options.requests)
    layout = layout_of(options.shapes[0], page_size=options.page_sizes[0])
    replayed = [
        replay(requests, layout, transport, options.prefill, options.decode, report.tell)
        for transport in TRANSPORTS
    ]
    name = f"{options.trace.name} / {options.scale:g} on {options.prefill} x {options.decode} workers"
    report.name = "kv-trace"
    report.show(name, trace_rows(replayed))
    report.extra = {"replayed": [each._asdict() for each in replayed]}


def measure_faults(options: argparse.Namespace, report: Report) -> None:
    """Break transfers in every way, at every point."""
    layout = layout_of(options.shapes[0], page_size=options.page_sizes[0])
    faults = [
        measure_fault(kind, transport, percent, layout, FAULT_PAGES, options.rounds, report.tell)
        for kind, transport, percent in product(KINDS, TRANSPORTS, PERCENTS)
    ]
    report.name = "kv-faults"
    report.show("Faults in the middle of a transfer", fault_rows(faults))
    report.extra = {"faults": [each._asdict() for each in faults]}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the suite's options."""
    parser.add_argument("--shapes", nargs="+", choices=SHAPE_NAMES, default=list(SHAPE_NAMES))
    parser.add_argument("--page-sizes", nargs="+", type=int, default=[16], metavar="TOKENS")
    parser.add_argument(
        "--into-page-sizes", nargs="*", type=int, default=[8], metavar="TOKENS", help="of the destination"
    )
    parser.add_argument("--sizes", nargs="+", type=int, default=list(SIZES), metavar="TOKENS", help="prompts")
    parser.add_argument("--stream-tokens", nargs="*", type=int, default=list(STREAM_TOKENS), metavar="TOKENS")
    parser.add_argument("--rounds", type=int, default=5, help="of which the medians are taken")
    parser.add_argument(
        "--rival",
        action="append",
        default=[],
        metavar="TRANSPORT:NAME=COMMAND",
        help="measured in the same rounds; its last line is JSON, see bench/README.md",
    )
    parser.add_argument("--trace", type=Path, help="a Mooncake JSON-lines or an Azure CSV file to replay")
    parser.add_argument("--scale", type=float, default=1.0, help="divides the trace's lengths")
    parser.add_argument("--requests", type=int, default=200, help="of the trace, from its beginning")
    parser.add_argument("--prefill", type=int, default=2, help="prefill workers of a replay")
    parser.add_argument("--decode", type=int, default=2, help="decode workers of a replay")
    parser.add_argument("--faults", action="store_true", help="break transfers instead")
    add_output_option(parser)


def measure(options: argparse.Namespace, report: Report) -> None:
    """Run the part of the suite that the options ask for."""
    if options.trace is not None:
        measure_trace(options, report)
    elif options.faults:
        measure_faults(options, report)
    else:
        measure_sweep(options, report)


run = partial(run_suite, measure, name="kv", title="KV transfer")

if __name__ == "__main__":
    sys.exit(run_command(__doc__, add_options, run))
