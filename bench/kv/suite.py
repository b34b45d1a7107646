"""KV transfers: rates, the part that a request waits for, and the cost of faults.

    baton bench kv                            prompt sizes of named models over every transport; streaming
    baton bench kv --rival tcp:NAME=COMMAND   the same beside another library
    baton bench kv --trace PATH [--scale 32]  a real trace's hand-offs over a matrix of workers
    baton bench kv --faults                   kill, stall, cut and corrupt in the middle of transfers

Two real processes, real ledgers, scattered pages, digests compared; limits of the machine measured in the
same run. docs/benchmarks.md explains the figures.
"""

import argparse
import sys
from itertools import product
from pathlib import Path
from typing import Final

import msgspec

from baton.bench.kv.cases import FAULTS, PERCENTS, fault_rows, stream_rows, trace_rows
from baton.bench.kv.ends import SHAPES, TRANSPORTS, layout_of
from baton.bench.kv.sweep import (
    Sweep,
    measure_shape,
    plot_of,
    relayout_rows,
    rival_rows,
    sweep_rows,
)
from baton.bench.report import Report, Suite
from baton.sim.workload import read_trace

SIZES: Final = (128, 512, 2048, 8192, 32768)
STREAM_TOKENS: Final = (4096, 8192)


def measure_sweep(options: argparse.Namespace, report: Report) -> None:
    """Measure every prompt size of every shape, pages into other pages, and streaming."""
    sweeps: list[Sweep] = []
    kinds = list(product(options.shapes, options.page_sizes))
    for shape, page_size in kinds:
        found = measure_shape(
            shape, page_size, options.sizes, options.rounds, options.rival, options.also, report.tell
        )
        sweeps.append(found)
        rows = sweep_rows(found.points, found.limits) + rival_rows(found.points, found.rivals)
        report.show(f"{shape}, pages of {page_size} tokens", rows)
    relaid = [
        row
        for (shape, page_size), into in product(kinds, options.into_page_sizes)
        for row in relayout_rows(shape, page_size, into, options.rounds, report.tell)
    ]
    report.show("Into pages of another size", relaid)
    streamed = [
        row
        for num_tokens, transport in product(options.stream_tokens, TRANSPORTS)
        for row in stream_rows(num_tokens, transport, options.rounds, report.tell)
    ]
    report.show("Streaming while a prompt is computed", streamed)
    report.plot = plot_of(sweeps)
    report.extra = {
        "sweeps": [
            {
                **{"shape": each.shape, "page_size": each.page_size, "limits": each.limits},
                "points": [
                    point._asdict() | {"times": msgspec.structs.asdict(point.times)} for point in each.points
                ],
                "rivals": {rival.name: rival.gbps for rival in each.rivals},
            }
            for each in sweeps
        ]
    }


def measure_trace(options: argparse.Namespace, report: Report) -> None:
    """Replay the hand-offs of a trace."""
    requests = read_trace(options.trace, scale=options.scale, limit=options.requests)
    layout = layout_of(options.shapes[0], page_size=options.page_sizes[0])
    rows = [
        row
        for transport in TRANSPORTS
        for row in trace_rows(requests, layout, transport, options.prefill, options.decode, report.tell)
    ]
    report.name = "kv-trace"
    name = f"{options.trace.name} / {options.scale:g} on {options.prefill} x {options.decode} workers"
    report.show(name, rows)


def measure_faults(options: argparse.Namespace, report: Report) -> None:
    """Break transfers in every way, at every point."""
    report.name, report.title = "kv-faults", "Faults in the middle of a transfer"
    layout = layout_of(options.shapes[0], page_size=options.page_sizes[0])
    for fault, transport, percent in product(FAULTS, TRANSPORTS, PERCENTS):
        report.tell(f"{fault} at {percent} % over {transport}")
        report.rows += fault_rows(fault, transport, percent, layout, options.rounds)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the suite's options."""
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--page-sizes", nargs="+", type=int, default=[16], metavar="TOKENS")
    parser.add_argument(
        "--into-page-sizes", nargs="*", type=int, default=[8], metavar="TOKENS", help="of the destination"
    )
    parser.add_argument("--sizes", nargs="+", type=int, default=list(SIZES), metavar="TOKENS", help="prompts")
    parser.add_argument("--stream-tokens", nargs="*", type=int, default=list(STREAM_TOKENS), metavar="TOKENS")
    parser.add_argument(
        "--also", nargs="+", default=[], metavar="TRANSPORT", help="such as nixl: measured beside shm and tcp"
    )
    parser.add_argument("--rounds", type=int, default=5, help="of which the medians are taken")
    parser.add_argument(
        "--rival",
        action="append",
        default=[],
        metavar="TRANSPORT:NAME=COMMAND",
        help="measured in the same rounds; its last line is JSON, see docs/benchmarks.md",
    )
    parser.add_argument("--trace", type=Path, help="a Mooncake JSON-lines or an Azure CSV file to replay")
    parser.add_argument("--scale", type=float, default=1.0, help="divides the trace's lengths")
    parser.add_argument("--requests", type=int, default=200, help="of the trace, from its beginning")
    parser.add_argument("--prefill", type=int, default=2, help="prefill workers of a replay")
    parser.add_argument("--decode", type=int, default=2, help="decode workers of a replay")
    parser.add_argument("--faults", action="store_true", help="break transfers instead")


def measure(options: argparse.Namespace, report: Report) -> None:
    """Run the part of the suite that the options ask for."""
    if options.trace is not None:
        measure_trace(options, report)
    elif options.faults:
        measure_faults(options, report)
    else:
        measure_sweep(options, report)


SUITE: Final = Suite("kv", "KV transfer", add_options, measure)

if __name__ == "__main__":
    sys.exit(SUITE.main(__doc__))
