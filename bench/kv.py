"""KV pages on the move: how fast, how much of it a request waits for, and what faults cost.

    baton bench kv                            prompt sizes of named models over every transport; streaming
    baton bench kv --rival tcp:NAME=COMMAND   the same beside another library
    baton bench kv --trace PATH [--scale 32]  a real trace's hand-offs over a matrix of workers
    baton bench kv --faults                   kill, stall, cut and corrupt in the middle of transfers

Two real processes, real ledgers, scattered pages, digests compared; limits of the machine measured in the
same run. Columns are explained in bench/README.md.
"""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from baton.bench.kv_faults import KINDS, PERCENTS, measure_fault
from baton.bench.kv_plot import plot_sweep
from baton.bench.kv_relayout import measure_relayout
from baton.bench.kv_rivals import Rival
from baton.bench.kv_rows import fault_rows, relayout_rows, rival_rows, stream_rows, sweep_rows, trace_rows
from baton.bench.kv_shapes import SHAPE_NAMES, layout_of
from baton.bench.kv_stream import measure_streaming
from baton.bench.kv_sweep import TRANSPORTS, Limits, Point, Rounds, measure
from baton.bench.kv_trace import replay
from baton.bench.machine import machine_description, one_line
from baton.bench.report import RESULTS, Row, can_plot, print_table, write_json
from baton.bench.traces import read_trace

SIZES: Final = (128, 512, 2048, 8192, 32768)
STREAM_TOKENS: Final = (4096, 8192)
FAULT_PAGES: Final = 96


class Bench(NamedTuple):
    """One part of the suite: its rows, and what the JSON keeps besides."""

    name: str
    rows: list[Row]
    extra: Mapping[str, object]


class ProgressLine:
    """What is being measured, on one line of a terminal."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()

    def __call__(self, text: str) -> None:
        if self._is_terminal:
            sys.stderr.write(f"\r\033[K{text}")
            sys.stderr.flush()

    def table(self, title: str, rows: list[Row]) -> None:
        self("")
        print_table(title, rows)


def run_sweep(options: argparse.Namespace, progress: ProgressLine) -> Bench:
    rows: list[Row] = []
    points: list[Point] = []
    limits: list[Limits] = []
    rates: list[dict[str, object]] = []
    rivals = [Rival.parsed(text, TRANSPORTS) for text in options.rival]
    rounds = Rounds(options.sizes, options.rounds, rivals)
    for shape in options.shapes:
        for page_size in options.page_sizes:
            found = measure(shape, page_size, rounds, progress)
            points += found.points
            limits.append(found.limits)
            rates += [{"shape": shape, "page_size": page_size, **each._asdict()} for each in found.rivals]
            new_rows = sweep_rows(found.points, found.limits) + rival_rows(found.points, found.rivals)
            rows += _shown(progress, f"{shape}, pages of {page_size} tokens", new_rows)
    relaid = [
        each
        for shape in options.shapes
        for page_size in options.page_sizes
        for into in options.into_page_sizes
        for each in measure_relayout(shape, page_size, into, options.rounds, progress)
    ]
    rows += _shown(progress, "Into pages of another size", relayout_rows(relaid))
    streamed = [
        measure_streaming(num_tokens, transport, options.rounds, progress)
        for num_tokens in options.stream_tokens
        for transport in TRANSPORTS
    ]
    rows += _shown(progress, "Streaming while a prompt is computed", stream_rows(streamed))
    if can_plot():
        plot_sweep(points, limits, options.output / "kv.png")
    extra = {
        "points": [point._asdict() | {"times": msgspec.structs.asdict(point.times)} for point in points],
        "limits": [limit._asdict() for limit in limits],
        "rivals": rates,
        "relaid": [each._asdict() for each in relaid],
        "streamed": [each._asdict() for each in streamed],
    }
    return Bench("kv", rows, extra)


def run_trace(options: argparse.Namespace, progress: ProgressLine) -> Bench:
    requests = read_trace(options.trace, scale=options.scale, limit=options.requests)
    layout = layout_of(options.shapes[0], page_size=options.page_sizes[0])
    replayed = [
        replay(requests, layout, transport, options.prefill, options.decode, progress)
        for transport in TRANSPORTS
    ]
    title = f"{options.trace.name} / {options.scale:g} on {options.prefill} x {options.decode} workers"
    rows = _shown(progress, title, trace_rows(replayed))
    return Bench("kv-trace", rows, {"replayed": [each._asdict() for each in replayed]})


def run_faults(options: argparse.Namespace, progress: ProgressLine) -> Bench:
    layout = layout_of(options.shapes[0], page_size=options.page_sizes[0])
    faults = [
        measure_fault(kind, transport, percent, layout, FAULT_PAGES, options.rounds, progress)
        for kind in KINDS
        for transport in TRANSPORTS
        for percent in PERCENTS
    ]
    rows = _shown(progress, "Faults in the middle of a transfer", fault_rows(faults))
    return Bench("kv-faults", rows, {"faults": [each._asdict() for each in faults]})


def _shown(progress: ProgressLine, title: str, rows: list[Row]) -> list[Row]:
    progress.table(title, rows)
    return rows


def add_options(parser: argparse.ArgumentParser) -> None:
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
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="FOLDER", help="for JSON and plots")


def run(options: argparse.Namespace) -> None:
    print(one_line(machine_description()), flush=True)
    progress = ProgressLine()
    suite = run_trace if options.trace is not None else run_faults if options.faults else run_sweep
    bench = suite(options, progress)
    write_json(options.output / f"{bench.name}.json", "KV transfer", bench.rows, bench.extra)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    run(parser.parse_args())


if __name__ == "__main__":
    main()
