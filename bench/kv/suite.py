"""KV transfers: rates, and the part that a request waits for.

    baton bench kv                            prompt sizes of named models over every transport; streaming
    baton bench kv --rival tcp:NAME=COMMAND   the same beside another library

Two real processes, real ledgers, scattered pages, digests compared. Rounds of all transports, limits and
rivals alternate, so other work on the machine disturbs all alike; the first round warms up.
docs/benchmarks.md explains the figures.
"""

from argparse import Namespace
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from enum import Enum
from functools import partial
from itertools import product
from operator import attrgetter
from statistics import median
from time import perf_counter
from typing import Final, NamedTuple

import msgspec

from baton.bench.engine.replica import LLAMA_56M, load_replica, request_of
from baton.bench.kv.ends import (
    SHAPES,
    TRANSPORTS,
    DestinationProcess,
    Ends,
    SourceEnd,
    layout_of,
    settings_of,
    times_of,
    wait_for,
)
from baton.bench.kv.limits import SMALL, SMALL_TOKENS, UNPACED, Rival, limits_of, scattered_moves
from baton.bench.report import Plot, Progress, Report, Row, at_least, at_most, option, suite
from baton.kvtransfer.protocol.handoff import TransferTimes
from baton.messages.control import Prefill
from baton.prefill_worker.worker import LayerwiseSend, PrefillJob
from baton.request import SamplingParams
from baton.rpc.worker_node import PromptTimer

SIZES: Final = (128, 512, 2048, 8192, 32768)
STREAM_TOKENS: Final = (4096, 8192)
MEBIBYTE: Final = 2**20
# transport -> the limit that its rate is compared with, and the least share
BARS: Final = {"shm": ("memcpy", 0.9), "tcp": ("raw socket", 0.85)}
GLOO_BAR: Final = 1.5
SMALL_BAR: Final = 0.6
# the beginning of a rival's name -> the least ratio to its rate of writing; other operations have no bar
RIVAL_BARS: Final = {"nixl": 1.2, "mooncake": 2.0}


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
        """Return the rate in GB/s while bytes moved."""
        return self.num_bytes / self.times.moving_s / 1e9


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
    progress: Progress,
) -> Sweep:
    """Measure every prompt size, the limits and the rivals. ConfigError: a rival's text is not valid."""
    layout = layout_of(shape, page_size=page_size)
    competing = [Rival(text) for text in rivals]
    moves = scattered_moves(layout.page_bytes)
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    times: defaultdict[tuple[str, int], list[TransferTimes]] = defaultdict(list)
    limits = limits_of(layout)
    try:
        with ExitStack() as stack:
            num_tokens = max(sizes) * 5 // 4
            both = stack.enter_context(Ends(layout, num_tokens))
            bare = stack.enter_context(Ends(layout, num_tokens, has_digests=False))
            ends = {transport: (both, transport) for transport in TRANSPORTS}
            ends |= {f"{transport}, no digests": (bare, transport) for transport in TRANSPORTS}
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
        Point(num_tokens, transport, sorted(taken[1:], key=attrgetter("moving_s"))[num_rounds // 2])
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


# Streaming: the pages of a prompt leave while it is computed.

CHUNK_TOKENS: Final = 512
NUM_LAYER_GROUPS: Final = 4
# The KV of a token and layer is that of an 8B model, 4 KiB.
SHAPE: Final = replace(LLAMA_56M, num_kv_heads=8, head_dim=128, vocab_size=4096, max_positions=8192 + 64)
EXPOSED_BAR: Final = 3.0  # % of a prefill
STREAMING_BAR: Final = 3.0  # times less exposed


class Leaving(Enum):
    """When the pages of a prompt leave."""

    BY_LAYERS = "by layers"  # chunk by chunk, the last one by groups of layers
    BY_CHUNKS = "by chunks"
    AT_END = "at the end"


class _StreamingPrefill:
    """An engine, and an endpoint that sends its pages."""

    def __init__(self, transport: str, most_tokens: int) -> None:
        token_bytes = 2 * SHAPE.num_layers * SHAPE.num_kv_heads * SHAPE.head_dim * 2
        kv_bytes = (SHAPE.max_positions + 2 * most_tokens) * token_bytes  # the last prompt's are still held
        self._engine = load_replica(
            SHAPE,
            {
                "scheduler": {"max_num_seqs": 2, "max_num_batched_tokens": CHUNK_TOKENS},
                "cache": {"kv_cache_memory_bytes": kv_bytes, "enable_prefix_caching": False},
            },
        )
        runner = self._engine.runner
        pool, self._layout = runner.pool.device, runner.layout
        self._destination = DestinationProcess(runner.layout, len(pool))
        self._source = SourceEnd(settings_of(runner.layout, transport), pool, self._engine.scheduler.pool)

    def run(self, num_tokens: int, leaving: Leaving) -> tuple[float, float]:
        """Return the seconds of the prefill, and the exposed seconds."""
        engine, endpoint = self._engine, self._source.endpoint
        num_pages = self._layout.num_pages(num_tokens)
        token_ids = tuple(1 + index % (SHAPE.vocab_size - 1) for index in range(num_tokens))
        sampling = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
        num_groups = NUM_LAYER_GROUPS if leaving is Leaving.BY_LAYERS else 1
        granted = self._destination.grant(endpoint, num_pages, num_groups)
        request = request_of(token_ids, sampling)
        (sequence,) = engine.add(request)
        job = PrefillJob(
            Prefill(request=request, gateway="", decode="", transfer=granted.transfer),
            self._layout.page_size,
            PromptTimer(request, 0.0),
            granted=granted,
            sequence=sequence,
        )
        layerwise = LayerwiseSend(endpoint, {request.request_id: job}.get)
        started_s, ended = perf_counter(), None
        while sequence.num_computed_tokens < num_tokens:
            engine.step(layerwise if leaving is Leaving.BY_LAYERS else None)
            may_leave = leaving is not Leaving.AT_END or sequence.num_computed_tokens >= num_tokens
            if may_leave and (offer := job.take_offer()) is not None:
                endpoint.offer(job.transfer, *offer)
            ended = next((each for each in endpoint.poll() if each.transfer == job.transfer), ended)
        prefill_s = perf_counter() - started_s
        times = times_of(ended or wait_for(endpoint, job.transfer))
        engine.abort(request.request_id)
        return prefill_s, times.exposed_s

    def close(self) -> None:
        self._source.endpoint.close()
        self._destination.close()
        self._engine.close()


def stream_rows(num_tokens: int, transport: str, num_rounds: int, report: Report) -> list[Row]:
    """Measure every way to leave in turns. A request waits for the exposed time."""
    with closing(_StreamingPrefill(transport, num_tokens)) as prefill:
        ways = {leaving: partial(prefill.run, num_tokens, leaving) for leaving in Leaving}
        taken = report.in_rounds(ways, num_rounds, f"streaming {num_tokens} tokens over {transport}, ")
    prefill_s, exposed_s = (
        {way: median(run[part] for run in runs) for way, runs in taken.items()} for part in range(2)
    )
    streamed_s, layers_s = exposed_s[Leaving.BY_CHUNKS], exposed_s[Leaving.BY_LAYERS]
    whole_s, name = prefill_s[Leaving.BY_CHUNKS], f"{transport}, {num_tokens:,} tokens"
    note = f"{1e3 * streamed_s:.1f} ms of a prefill of {whole_s:.2f} s"
    slower = 100 * (prefill_s[Leaving.BY_LAYERS] / whole_s - 1)
    layers_note = f"{1e3 * layers_s:.1f} ms; the prefill takes {slower:+.1f} %"
    gain, layers_gain = exposed_s[Leaving.AT_END] / streamed_s, streamed_s / layers_s
    return [
        at_most(f"{name}: exposed", 100 * streamed_s / whole_s, "% of prefill", EXPOSED_BAR, note),
        at_least(f"{name}: pushed at the end / streamed", gain, "x", STREAMING_BAR),
        Row(f"{name}: last chunk whole / by groups of layers", layers_gain, "x", note=layers_note),
    ]


@suite(
    "kv",
    "KV transfer",
    option("--shapes", tuple(SHAPES), choices=SHAPES),
    option("--page-sizes", (16,), "tokens"),
    option("--sizes", SIZES, "of prompts, in tokens"),
    option("--stream-tokens", STREAM_TOKENS, "of prompts that stream while they are computed", nargs="*"),
    option("--rounds", 5, "of which the medians are taken"),
    option(
        "--rival",
        [],
        "measured in the same rounds; its last line is JSON, see docs/benchmarks.md",
        action="append",
        metavar="TRANSPORT:NAME=COMMAND",
    ),
)
def measure(options: Namespace, report: Report) -> None:
    """Measure every prompt size of every shape, then streaming."""
    sweeps: list[Sweep] = []
    for shape, page_size in product(options.shapes, options.page_sizes):
        found = measure_shape(shape, page_size, options.sizes, options.rounds, options.rival, report.tell)
        sweeps.append(found)
        rows = sweep_rows(found.points, found.limits) + rival_rows(found.points, found.rivals)
        report.show(f"{shape}, pages of {page_size} tokens", rows)
    streamed = [
        row
        for num_tokens, transport in product(options.stream_tokens, TRANSPORTS)
        for row in stream_rows(num_tokens, transport, options.rounds, report)
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
