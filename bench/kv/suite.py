"""KV transfers: rates, the part that a request waits for, and the cost of faults.

    baton bench kv                            prompt sizes of named models over every transport; streaming
    baton bench kv --rival tcp:NAME=COMMAND   the same beside another library
    baton bench kv --trace PATH [--scale 32]  a real trace's hand-offs over a matrix of workers
    baton bench kv --faults                   kill, stall, cut and corrupt in the middle of transfers

Two real processes, real ledgers, scattered pages, digests compared; limits of the machine measured in the
same run. docs/benchmarks.md explains the figures. A replay keeps the trace's order, one hand-off at a time
from and to the least busy workers, so each figure is a transfer's own.
"""

import os
import signal
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from enum import Enum
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Final

import msgspec

from baton.bench.engine.replica import LLAMA_56M, load_replica, request_of
from baton.bench.kv.ends import (
    SHAPES,
    TRANSPORTS,
    DestinationProcess,
    SourceEnd,
    layout_of,
    moving_s,
    settings_of,
    times_of,
    wait_for,
)
from baton.bench.kv.sweep import (
    Sweep,
    measure_shape,
    plot_of,
    relayout_rows,
    rival_rows,
    sweep_rows,
)
from baton.bench.report import Report, Row, at_least, at_most, option, percentile, suite
from baton.engine.cache.page_pool import PageState
from baton.kvtransfer.endpoint import KvEndpoint
from baton.kvtransfer.protocol.handoff import HandoffOutcome, Timing, TransferTimes
from baton.messages.control import Prefill
from baton.pages import PageLayout
from baton.prefill_worker.prefill_job import LayerwiseSend, PrefillJob
from baton.request import SamplingParams
from baton.rpc.worker_node import PromptTimer
from baton.sim.timed.fleet import PageStore
from baton.sim.timed.workload import TraceRequest, read_trace

Progress = Callable[[str], None]
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
            progress=sequence,
        )
        layerwise = LayerwiseSend(endpoint, {request.request_id: job}.get)
        started_s, ended = perf_counter(), None
        while sequence.num_computed_tokens < num_tokens:
            engine.step(layerwise if leaving is Leaving.BY_LAYERS else None)
            may_leave = leaving is not Leaving.AT_END or sequence.num_computed_tokens >= num_tokens
            if may_leave and (offer := job.take_offer()) is not None:
                endpoint.offer(job.transfer, offer.pages, offer.num_units)
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


CACHED_BLOCKS: Final = 1000  # of a decode worker
PREFILL_TOKENS_PER_S: Final = 8000.0  # gives the time to the first token, beside which exposed time is shown


def num_cached_tokens(blocks: PageStore, request: TraceRequest) -> int:
    """Return the tokens of the prompt that a decode worker has cached; have it cache the other blocks."""
    keys = tuple(block.to_bytes(8, "big") for block in request.block_ids)
    num_blocks = blocks.num_held(keys)
    deque(blocks.keep(keys), maxlen=0)
    return min(num_blocks * request.block_tokens, request.input_tokens - 1)


def trace_rows(
    requests: Sequence[TraceRequest],
    layout: PageLayout,
    transport: str,
    num_prefill: int,
    num_decode: int,
    progress: Progress,
) -> list[Row]:
    """Replay the hand-offs of a trace over a matrix of prefill and decode workers."""
    num_pages = 2 * layout.num_pages(max(request.input_tokens for request in requests)) + 64
    decodes = [DestinationProcess(layout, num_pages) for _ in range(num_decode)]
    blocks = [PageStore(CACHED_BLOCKS) for _ in decodes]
    sources = [SourceEnd.random(settings_of(layout, transport), num_pages) for _ in range(num_prefill)]
    busy_tokens = [0] * num_prefill, [0] * num_decode
    taken: list[TransferTimes] = []
    num_cached = 0
    try:
        for number, request in enumerate(requests):
            progress(f"{transport}: request {number + 1} of {len(requests)}")
            p, d = (min(range(len(busy)), key=busy.__getitem__) for busy in busy_tokens)
            cached = num_cached_tokens(blocks[d], request) // layout.page_size * layout.page_size
            num_cached += cached
            busy_tokens[0][p] += request.input_tokens - cached
            busy_tokens[1][d] += request.input_tokens + request.output_tokens
            taken.append(sources[p].send(decodes[d], request.input_tokens - cached))
    finally:
        for source in sources:
            source.endpoint.close()
        for decode in decodes:
            decode.close()
    totals_ms = [1e3 * times.total_s for times in taken]
    gbps = sum(times.num_bytes for times in taken) / sum(map(moving_s, taken)) / 1e9
    p99_ms = percentile(totals_ms, 99)
    exposed_shares = [
        times.exposed_s / (times.exposed_s + request.input_tokens / PREFILL_TOKENS_PER_S)
        for request, times in zip(requests, taken, strict=True)
    ]
    exposed_ms, note = 1e3 * median(times.exposed_s for times in taken), "without streaming"
    moved = f"{len(taken)} requests, {num_cached:,} tokens were cached"
    return [
        Row(f"{transport}: while moving", gbps, "GB/s", note=moved),
        Row(f"{transport}: a hand-off, P50", median(totals_ms), "ms"),
        Row(f"{transport}: a hand-off, P99", p99_ms, "ms"),
        Row(f"{transport}: exposed, median", exposed_ms, "ms", note=note),
        Row(f"{transport}: exposed / TTFT", 100 * median(exposed_shares), "%"),
    ]


FAULTS: Final = ("kill", "stall", "abort", "cut", "corrupt")
PERCENTS: Final = (1, 50, 99)
NUM_PAGES: Final = 96
LEASE_S: Final = 2.0  # after which a stalled peer is given up
LIMIT_S: Final = 30.0
BACK_BAR_MS: Final = 1000.0


def fault_rows(fault: str, transport: str, percent: int, layout: PageLayout, num_rounds: int) -> list[Row]:
    """Break `num_rounds` transfers after `percent` % of their pages."""
    rounds = [_break(fault, transport, percent, layout) for _ in range(num_rounds)]
    outcomes, detected_s, back_s, wasted_bytes = zip(*rounds, strict=True)
    name = f"{fault} at {percent} %, {transport}"
    note = f"{outcomes[-1]}; {median(wasted_bytes) / 2**20:,.1f} MiB for nothing"
    return [
        Row(f"{name}: noticed", 1e3 * median(detected_s), "ms", note=note),
        at_most(f"{name}: pages back", 1e3 * median(back_s), "ms", BACK_BAR_MS),
    ]


def _break(fault: str, transport: str, percent: int, layout: PageLayout) -> tuple[str, float, float, int]:
    """Return the outcome, seconds until the source knows, seconds until all pages are free, wasted bytes."""
    num_units = NUM_PAGES // 2
    damaged_unit = max(1, num_units * percent // 100) if fault == "corrupt" else None
    destination = DestinationProcess(layout, NUM_PAGES, damaged_unit=damaged_unit)
    timing = Timing(lease_s=LEASE_S, heartbeat_s=LEASE_S / 4)
    settings = msgspec.structs.replace(settings_of(layout, transport), timing=timing)
    source = SourceEnd.random(settings, NUM_PAGES)
    endpoint, ledger = source.endpoint, source.ledger
    try:
        source.send(destination, layout.page_size)  # opens and warms everything
        transfer = destination.grant(endpoint, num_units).transfer
        pages = ledger.allocate(num_units, "prompt")
        num_first = max(1, len(pages) * percent // 100)
        endpoint.offer(transfer, pages[:num_first], num_first)
        _poll_for(endpoint, 0.2)  # the first pages move before the others are computed
        started_s = perf_counter()
        match fault:
            case "kill":
                os.kill(destination.pid, signal.SIGKILL)
            case "stall":
                os.kill(destination.pid, signal.SIGSTOP)
            case "abort":
                endpoint.abort(transfer, "a bench of faults")
            case "cut":
                endpoint._transfers[transfer].link.close()
        endpoint.offer(transfer, pages[num_first:], len(pages))
        ledger.release(pages, "prompt")
        ended = wait_for(endpoint, transfer)
        detected_s = perf_counter()
        while ledger.count(PageState.FREE) < NUM_PAGES and perf_counter() - started_s < LIMIT_S:
            _poll_for(endpoint, 0.0)
        back_s = perf_counter() - detected_s
    finally:
        os.kill(destination.pid, signal.SIGCONT)
        endpoint.close()
        destination.close()
    num_bytes = 0 if ended.times is None else ended.times.num_bytes
    is_whole = ended.outcome is HandoffOutcome.HANDED_OVER
    wasted_bytes = num_bytes - num_units * layout.page_bytes if is_whole else num_bytes
    return ended.outcome.value, detected_s - started_s, back_s, wasted_bytes


def _poll_for(endpoint: KvEndpoint, seconds: float) -> None:
    until_s = perf_counter() + seconds
    while True:
        endpoint.poll()
        if perf_counter() >= until_s:
            return
        endpoint.wait(0.01)


SIZES: Final = (128, 512, 2048, 8192, 32768)
STREAM_TOKENS: Final = (4096, 8192)


def measure_sweep(options: Namespace, report: Report) -> None:
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


def measure_trace(options: Namespace, report: Report) -> None:
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


def measure_faults(options: Namespace, report: Report) -> None:
    """Break transfers in every way, at every point."""
    report.name, report.title = "kv-faults", "Faults in the middle of a transfer"
    layout = layout_of(options.shapes[0], page_size=options.page_sizes[0])
    for fault, transport, percent in product(FAULTS, TRANSPORTS, PERCENTS):
        report.tell(f"{fault} at {percent} % over {transport}")
        report.rows += fault_rows(fault, transport, percent, layout, options.rounds)


@suite(
    "kv",
    "KV transfer",
    option("--shapes", tuple(SHAPES), choices=SHAPES),
    option("--page-sizes", (16,), "tokens"),
    option("--into-page-sizes", (8,), "of the destination, in tokens", nargs="*"),
    option("--sizes", SIZES, "of prompts, in tokens"),
    option("--stream-tokens", STREAM_TOKENS, "of prompts that stream while they are computed", nargs="*"),
    option("--also", [], "transports such as nixl: measured beside shm and tcp", nargs="+"),
    option("--rounds", 5, "of which the medians are taken"),
    option(
        "--rival",
        [],
        "measured in the same rounds; its last line is JSON, see docs/benchmarks.md",
        action="append",
        metavar="TRANSPORT:NAME=COMMAND",
    ),
    option("--trace", type=Path, help="a Mooncake JSON-lines or an Azure CSV file to replay"),
    option("--scale", 1.0, "divides the trace's lengths"),
    option("--requests", 200, "of the trace, from its beginning"),
    option("--prefill", 2, "prefill workers of a replay"),
    option("--decode", 2, "decode workers of a replay"),
    option("--faults", False, "break transfers instead"),
)
def measure(options: Namespace, report: Report) -> None:
    """Run the part of the suite that the options ask for."""
    if options.trace is not None:
        measure_trace(options, report)
    elif options.faults:
        measure_faults(options, report)
    else:
        measure_sweep(options, report)


if __name__ == "__main__":
    measure.main(__doc__)
