"""Hand-offs in three circumstances: streaming while an engine prefills, the replay of a trace, and faults.

1. Streaming: an engine computes a prompt in chunks while the transport's threads move finished pages, the
   last chunk whole or by groups of layers; compared with pages that are all sent at the end. The exposed
   time is from the last computed page until the destination says that all pages are right.
2. Replay: each request of a trace goes to the least busy prefill and decode worker. Blocks that the decode
   worker has cached are not sent. Requests keep the trace's order, one hand-off at a time, so each figure is
   a transfer's own. Every worker is an endpoint, every decode worker a process. Nothing streams: the worst
   case.
3. Faults in the middle of a transfer, when they are noticed, when the pages are back, and the wasted bytes:
   kill: the destination's process dies; stall: the destination's process is stopped (SIGSTOP) for good;
   abort: the source gives up; cut: the link closes; corrupt: a bit of a page flips on arrival, and its unit
   is written again.
"""

import os
import signal
from collections import OrderedDict
from collections.abc import Callable, Sequence
from enum import Enum
from statistics import median, quantiles
from time import perf_counter
from typing import Final, NamedTuple

from baton.bench.engine.replica import LlamaShape, load_replica
from baton.bench.kv.ends import DEADLINE_S, DestinationProcess, SourceEnd, settings_of
from baton.bench.kv.sweep import moving_s
from baton.bench.traces import TraceRequest
from baton.engine.cache.page_pool import PagePool, PageState
from baton.engine.engine import Engine
from baton.engine.scheduler.sequence import ScheduledChunk
from baton.kvtransfer.endpoint import KvEndpoint
from baton.kvtransfer.protocol.handoff import HandoffOutcome, Timing, TransferEnded, TransferTimes
from baton.pages import PageLayout
from baton.request import Request, SamplingParams

CHUNK_TOKENS: Final = 512
NUM_LAYER_GROUPS: Final = 4
SHAPE: Final = LlamaShape(
    hidden_size=512,
    intermediate_size=1408,
    num_layers=8,
    num_heads=8,
    num_kv_heads=8,  # the KV of a token and layer is that of an 8B model, 4 KiB
    head_dim=128,
    vocab_size=4096,
    max_positions=8192 + 64,
)


class Leaving(Enum):
    """When the pages of a prompt leave."""

    BY_LAYERS = "by layers"  # chunk by chunk, the last one by groups of layers
    BY_CHUNKS = "by chunks"
    AT_END = "at the end"


class Streamed(NamedTuple):
    """Medians in seconds of prompts of `num_tokens`. A request waits for the exposed time after the prefill.

    The prefill with a last chunk that leaves by layers has a time of its own, because pages leave while it
    computes.
    """

    num_tokens: int
    transport: str
    prefill_s: float
    exposed_streaming_s: float
    exposed_at_end_s: float
    prefill_by_layers_s: float
    exposed_by_layers_s: float


class _LastChunk:
    """Offers the pages of one prompt, those of its last chunk as their layers are written."""

    def __init__(self, endpoint: KvEndpoint, transfer: bytes, num_tokens: int, num_pages: int) -> None:
        self._endpoint = endpoint
        self._transfer = transfer
        self._num_tokens = num_tokens
        self._num_pages = num_pages
        self._num_offered = 0
        self._group = 0
        self._page_table: Sequence[int] = ()

    def offer(self, page_table: Sequence[int], stop: int, group: int | None = None) -> None:
        pages = page_table[self._num_offered : stop]
        if pages or group is not None:
            self._num_offered = stop
            self._endpoint.offer(self._transfer, pages, stop, group=group)

    def begin(self, chunks: Sequence[ScheduledChunk]) -> int:
        (chunk,) = chunks
        self._page_table = chunk.sequence.page_table
        return NUM_LAYER_GROUPS if chunk.start + chunk.num_tokens == self._num_tokens else 0

    def layers_written(self, first: int, stop: int) -> None:
        self.offer(self._page_table, self._num_pages, self._group)
        self._group += 1
        self._endpoint.poll()  # tells the destination of earlier groups at once


class _Prefill:
    """An engine, and an endpoint that sends its pages."""

    def __init__(self, transport: str, most_tokens: int) -> None:
        token_bytes = 2 * SHAPE.num_layers * SHAPE.num_kv_heads * SHAPE.head_dim * 2
        kv_bytes = (
            SHAPE.max_positions + 2 * most_tokens
        ) * token_bytes  # the pages of the last prompt are still held
        replica = load_replica(
            SHAPE,
            {
                "scheduler": {"max_num_seqs": 2, "max_num_batched_tokens": CHUNK_TOKENS},
                "cache": {"kv_cache_memory_bytes": kv_bytes, "enable_prefix_caching": False},
            },
        )
        self.engine: Engine = replica.engine
        runner = self.engine.runner
        self._ledger: PagePool = self.engine.scheduler.pool
        self._layout = runner.layout
        self._destination = DestinationProcess(runner.layout, len(runner.pool.device))
        self._endpoint = KvEndpoint(settings_of(runner.layout, transport), runner.pool.device, self._ledger)

    def run(self, name: str, num_tokens: int, leaving: Leaving) -> tuple[float, float]:
        """Return the seconds of the prefill, and the exposed seconds."""
        num_pages = self._layout.num_pages(num_tokens)
        token_ids = tuple(1 + index % (SHAPE.vocab_size - 1) for index in range(num_tokens))
        sampling = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
        num_groups = NUM_LAYER_GROUPS if leaving is Leaving.BY_LAYERS else 1
        transfer = self._destination.grant(self._endpoint, num_pages, num_groups)
        (sequence,) = self.engine.add(Request(request_id=name, token_ids=token_ids, sampling=sampling))
        watch = _LastChunk(self._endpoint, transfer, num_tokens, num_pages)
        started_s = perf_counter()
        while sequence.num_computed_tokens < num_tokens:
            self.engine.step(watch if leaving is Leaving.BY_LAYERS else None)
            is_done = sequence.num_computed_tokens >= num_tokens
            if leaving is not Leaving.AT_END or is_done:
                stop = num_pages if is_done else sequence.num_computed_tokens // self._layout.page_size
                watch.offer(sequence.page_table, stop)
            self._check(self._endpoint.poll(), transfer)
        prefill_s = perf_counter() - started_s
        ended = self._wait_for(transfer)
        self.engine.abort(name)
        if ended.outcome is not HandoffOutcome.HANDED_OVER or ended.times is None:
            raise RuntimeError(f"the pages were not handed over: {ended.outcome}: {ended.reason}")
        return prefill_s, ended.times.exposed_s

    def close(self) -> None:
        self._endpoint.close()
        self._destination.close()
        self.engine.close()

    def _check(self, ended: list[TransferEnded], transfer: bytes) -> None:
        for each in ended:
            if each.transfer == transfer:
                raise RuntimeError(f"the transfer ended during the prefill: {each.outcome}: {each.reason}")

    def _wait_for(self, transfer: bytes) -> TransferEnded:
        while True:
            for ended in self._endpoint.poll():
                if ended.transfer == transfer:
                    return ended
            self._endpoint.wait(DEADLINE_S)


def measure_streaming(
    num_tokens: int, transport: str, num_rounds: int, progress: Callable[[str], None]
) -> Streamed:
    """Measure every way to leave in turns; the first round warms up."""
    prefill = _Prefill(transport, num_tokens)
    try:
        taken: dict[Leaving, list[tuple[float, float]]] = {leaving: [] for leaving in Leaving}
        for number in range(num_rounds + 1):
            progress(f"streaming {num_tokens} tokens over {transport}")
            for leaving in Leaving:
                taken[leaving].append(prefill.run(f"{number}-{leaving.value}", num_tokens, leaving))
    finally:
        prefill.close()
    prefill_s = {way: median(prefill_s for prefill_s, _ in runs[1:]) for way, runs in taken.items()}
    exposed_s = {way: median(exposed_s for _, exposed_s in runs[1:]) for way, runs in taken.items()}
    return Streamed(
        num_tokens=num_tokens,
        transport=transport,
        prefill_s=prefill_s[Leaving.BY_CHUNKS],
        exposed_streaming_s=exposed_s[Leaving.BY_CHUNKS],
        exposed_at_end_s=exposed_s[Leaving.AT_END],
        prefill_by_layers_s=prefill_s[Leaving.BY_LAYERS],
        exposed_by_layers_s=exposed_s[Leaving.BY_LAYERS],
    )


CACHED_BLOCKS: Final = 1000  # of a decode worker
PREFILL_TOKENS_PER_S: Final = 8000.0  # gives the time to the first token, beside which exposed time is shown


class Replayed(NamedTuple):
    """The replay over one transport."""

    transport: str
    num_requests: int
    num_bytes: int
    num_cached_tokens: int  # not sent, as the decode worker had them
    gbps: float  # bytes over the time in which any moved
    p50_ms: float  # of a hand-off, from its first message to its last
    p99_ms: float
    exposed_ms: float  # median
    exposed_share: float  # of the time to the first token, at PREFILL_TOKENS_PER_S


class _Decode:
    """A decode worker's process, and the blocks that it has cached."""

    def __init__(self, layout: PageLayout, num_pages: int) -> None:
        self.process = DestinationProcess(layout, num_pages)
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def num_cached_tokens(self, request: TraceRequest) -> int:
        """Return the cached tokens of the prompt; cache the other blocks."""
        num_blocks = 0
        for block in request.block_ids:
            if block not in self._blocks:
                break
            num_blocks += 1
        for block in request.block_ids:
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > CACHED_BLOCKS:
            self._blocks.popitem(last=False)
        return min(num_blocks * request.block_tokens, request.input_tokens - 1)


def replay(
    requests: Sequence[TraceRequest],
    layout: PageLayout,
    transport: str,
    num_prefill: int,
    num_decode: int,
    progress: Callable[[str], None],
) -> Replayed:
    """Replay the hand-offs of a trace over a matrix of prefill and decode workers."""
    most_pages = layout.num_pages(max(request.input_tokens for request in requests))
    num_pages = 2 * most_pages + 64
    decodes = [_Decode(layout, num_pages) for _ in range(num_decode)]
    sources = [SourceEnd(layout, num_pages, transport) for _ in range(num_prefill)]
    busy_tokens = [0] * num_prefill, [0] * num_decode
    taken: list[tuple[TraceRequest, TransferTimes]] = []
    num_cached = 0
    try:
        for number, request in enumerate(requests):
            progress(f"{transport}: request {number + 1} of {len(requests)}")
            p, d = (min(range(len(busy)), key=busy.__getitem__) for busy in busy_tokens)
            cached = decodes[d].num_cached_tokens(request) // layout.page_size * layout.page_size
            num_cached += cached
            busy_tokens[0][p] += request.input_tokens - cached
            busy_tokens[1][d] += request.input_tokens + request.output_tokens
            taken.append((request, sources[p].send(decodes[d].process, request.input_tokens - cached)))
    finally:
        for source in sources:
            source.close()
        for decode in decodes:
            decode.process.close()
    return _summary(transport, taken, num_cached)


def _summary(
    transport: str, taken: Sequence[tuple[TraceRequest, TransferTimes]], num_cached_tokens: int
) -> Replayed:
    totals_ms = [1e3 * times.total_s for _, times in taken]
    num_bytes = sum(times.num_bytes for _, times in taken)
    shares = [
        times.exposed_s / (times.exposed_s + request.input_tokens / PREFILL_TOKENS_PER_S)
        for request, times in taken
    ]
    return Replayed(
        transport=transport,
        num_requests=len(taken),
        num_bytes=num_bytes,
        num_cached_tokens=num_cached_tokens,
        gbps=num_bytes / sum(moving_s(times) for _, times in taken) / 1e9,
        p50_ms=median(totals_ms),
        p99_ms=quantiles(totals_ms, n=100)[98] if len(totals_ms) > 1 else totals_ms[0],
        exposed_ms=median(1e3 * times.exposed_s for _, times in taken),
        exposed_share=median(shares),
    )


PERCENTS: Final = (1, 50, 99)
KINDS: Final = ("kill", "stall", "abort", "cut", "corrupt")
LEASE_S: Final = 2.0  # after which a stalled peer is given up
LIMIT_S: Final = 30.0


class Fault(NamedTuple):
    """Medians over the rounds."""

    kind: str
    transport: str
    percent: int
    outcome: str
    detected_s: float  # until the source knows that the transfer has ended
    pages_back_s: float  # until every page of the source is free
    wasted_bytes: int


def measure_fault(
    kind: str,
    transport: str,
    percent: int,
    layout: PageLayout,
    num_pages: int,
    num_rounds: int,
    progress: Callable[[str], None],
) -> Fault:
    """Break `num_rounds` transfers after `percent` % of their pages."""
    rounds = []
    for _ in range(num_rounds):
        progress(f"{kind} at {percent} % over {transport}")
        rounds.append(_one(kind, transport, percent, layout, num_pages))
    return Fault(
        kind=kind,
        transport=transport,
        percent=percent,
        outcome=rounds[-1][0],
        detected_s=median(each[1] for each in rounds),
        pages_back_s=median(each[2] for each in rounds),
        wasted_bytes=round(median(each[3] for each in rounds)),
    )


def _one(
    kind: str, transport: str, percent: int, layout: PageLayout, num_pages: int
) -> tuple[str, float, float, int]:
    num_units = num_pages // 2
    damaged_unit = max(1, num_units * percent // 100) if kind == "corrupt" else None
    destination = DestinationProcess(layout, num_pages, damaged_unit=damaged_unit)
    source = SourceEnd(layout, num_pages, transport)
    source.endpoint.close()
    timing = Timing(lease_s=LEASE_S, heartbeat_s=LEASE_S / 4)
    settings = settings_of(layout, transport, timing)
    endpoint = source.endpoint = KvEndpoint(settings, source.pool, source.ledger)
    try:
        source.send(destination, layout.page_size)  # opens and warms everything
        transfer = destination.grant(endpoint, num_units)
        pages = source.ledger.allocate(num_units, "prompt")
        num_first = max(1, len(pages) * percent // 100)
        endpoint.offer(transfer, pages[:num_first], num_first)
        _poll_for(endpoint, 0.2)  # the first pages move before the others are computed
        started_s = perf_counter()
        if kind == "cut":
            endpoint._outgoing[transfer].link.close()
        else:
            _strike(kind, endpoint, destination, transfer)
        endpoint.offer(transfer, pages[num_first:], len(pages))
        source.ledger.release(pages, "prompt")
        ended = source.wait_for(transfer)
        detected_s = perf_counter() - started_s
        while source.ledger.count(PageState.FREE) < num_pages and perf_counter() - started_s < LIMIT_S:
            endpoint.wait(0.001)
            endpoint.poll()
        pages_back_s = perf_counter() - started_s
    finally:
        os.kill(destination.pid, signal.SIGCONT)
        source.close()
        destination.close()
    num_bytes = 0 if ended.times is None else ended.times.num_bytes
    is_whole = ended.outcome is HandoffOutcome.HANDED_OVER
    wasted_bytes = num_bytes - num_units * layout.page_bytes if is_whole else num_bytes
    return ended.outcome.value, detected_s, pages_back_s, wasted_bytes


def _strike(kind: str, endpoint: KvEndpoint, destination: DestinationProcess, transfer: bytes) -> None:
    if kind == "kill":
        os.kill(destination.pid, signal.SIGKILL)
    elif kind == "stall":
        os.kill(destination.pid, signal.SIGSTOP)
    elif kind == "abort":
        endpoint.abort(transfer, "a bench of faults")


def _poll_for(endpoint: KvEndpoint, seconds: float) -> None:
    until_s = perf_counter() + seconds
    while perf_counter() < until_s:
        endpoint.wait(0.01)
        endpoint.poll()
