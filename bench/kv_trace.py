"""A real trace's hand-offs replayed over a matrix of prefill and decode workers.

Each request goes to the prefill and the decode worker that are least busy, blocks that the decode worker
holds already (the trace's shared prefixes, in a cache of its own size) are not sent again, and the page
lists are those of ledgers that have been in use: scattered. Requests keep the trace's order, one hand-off
at a time, so each figure is a transfer's own; every worker is an endpoint, every decode worker a process.
Pages are there when a hand-off starts: exposed is the whole of it, the worst case.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import product
from statistics import median, quantiles
from typing import Final, NamedTuple

from baton.bench.kv_ends import DestinationProcess, SourceEnd
from baton.bench.kv_sweep import moving_s
from baton.bench.traces import TraceRequest
from baton.kvtransfer.link import Link
from baton.kvtransfer.timeline import TransferTimes
from baton.layout import PageLayout

CACHED_BLOCKS: Final = 1000  # of a decode worker
PREFILL_TOKENS_PER_S: Final = 8000.0  # by which exposed time is set against the time to the first token


class Replayed(NamedTuple):
    """One transport's replay."""

    transport: str
    num_requests: int
    num_bytes: int
    num_cached_tokens: int  # not sent: the decode worker had them
    gbps: float  # bytes over the time in which any moved
    p50_ms: float  # of a hand-off, from its first message to its last
    p99_ms: float
    exposed_ms: float  # median
    exposed_share: float  # of the time to the first token, at PREFILL_TOKENS_PER_S


class _Decode:
    """A decode worker's process, and which blocks it holds."""

    def __init__(self, layout: PageLayout, num_pages: int) -> None:
        self.process = DestinationProcess(layout, num_pages)
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def num_cached_tokens(self, request: TraceRequest) -> int:
        """Of the prompt's leading blocks; takes note of the others."""
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
    most_pages = layout.num_pages(max(request.input_tokens for request in requests))
    num_pages = 2 * most_pages + 64
    decodes = [_Decode(layout, num_pages) for _ in range(num_decode)]
    sources = [SourceEnd(layout, num_pages, transport) for _ in range(num_prefill)]
    links: dict[tuple[int, int], Link] = {
        (p, d): sources[p].link(decodes[d].process) for p, d in product(range(num_prefill), range(num_decode))
    }
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
            taken.append((request, sources[p].send(links[p, d], request.input_tokens - cached)))
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
