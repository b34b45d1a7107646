"""KV transfers: rates, and the part that a request waits for.

    baton bench kv                            prompt sizes of named models over every transport; streaming
    baton bench kv --rival tcp:NAME=COMMAND   the same beside another library

Two real processes, real ledgers, scattered pages, digests compared; limits of the machine measured in the
same run. docs/benchmarks.md explains the figures.
"""

from argparse import Namespace
from contextlib import closing
from dataclasses import replace
from enum import Enum
from functools import partial
from itertools import product
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
    settings_of,
    times_of,
    wait_for,
)
from baton.bench.kv.sweep import (
    Sweep,
    measure_shape,
    plot_of,
    rival_rows,
    sweep_rows,
)
from baton.bench.report import Report, Row, at_least, at_most, option, suite
from baton.messages.control import Prefill
from baton.prefill_worker.prefill_job import LayerwiseSend, PrefillJob
from baton.request import SamplingParams
from baton.rpc.worker_node import PromptTimer

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


SIZES: Final = (128, 512, 2048, 8192, 32768)
STREAM_TOKENS: Final = (4096, 8192)


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


if __name__ == "__main__":
    measure.main(__doc__)
