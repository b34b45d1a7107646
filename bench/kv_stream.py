"""How much of a hand-off a request waits for: pages that stream while a real engine prefills, chunk by chunk
and the last chunk by groups of layers or as one, and pages that are all sent at the end.

The engine computes a prompt in chunks on this machine's cores, while the transport's threads move what is
done. Exposed is the time from the last computed page to the destination's word that all are right.
"""

from collections.abc import Callable, Sequence
from enum import Enum
from statistics import median
from time import perf_counter
from typing import Final, NamedTuple

from baton.bench.kv_ends import DEADLINE_S, DestinationProcess, settings_of
from baton.bench.replica import LlamaShape, load_replica
from baton.engine.engine import Engine
from baton.engine.pages import PagePool
from baton.engine.plan import ScheduledChunk
from baton.kvtransfer.ended import Ended
from baton.kvtransfer.endpoint import KvEndpoint
from baton.kvtransfer.handoff import Outcome
from baton.kvtransfer.link import Link
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
    BY_LAYERS = "by layers"  # chunk by chunk, the last one by groups of layers
    BY_CHUNKS = "by chunks"
    AT_END = "at the end"


class Streamed(NamedTuple):
    """Medians, in seconds, of prompts of `num_tokens`. Exposed is what a request waits for after `prefill_s`;
    the by-layers prefill is told apart, because its pages leave while it computes.
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
        self._endpoint.poll()  # what is written of earlier groups is told at once


class _Prefill:
    """One engine whose pages an endpoint sends from."""

    def __init__(self, transport: str, most_tokens: int) -> None:
        token_bytes = 2 * SHAPE.num_layers * SHAPE.num_kv_heads * SHAPE.head_dim * 2
        kv_bytes = (SHAPE.max_positions + 2 * most_tokens) * token_bytes  # what was sent last is still held
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
        self._link: Link = self._endpoint.link(self._destination.address)

    def run(self, name: str, num_tokens: int, leaving: Leaving) -> tuple[float, float]:
        """Seconds of the prefill, and seconds exposed."""
        num_pages = self._layout.num_pages(num_tokens)
        token_ids = tuple(1 + index % (SHAPE.vocab_size - 1) for index in range(num_tokens))
        sampling = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
        num_groups = NUM_LAYER_GROUPS if leaving is Leaving.BY_LAYERS else 1
        transfer = self._endpoint.start(
            self._link, num_pages, deadline_s=DEADLINE_S, num_layer_groups=num_groups
        )
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
        if ended.outcome is not Outcome.HANDED_OVER or ended.times is None:
            raise RuntimeError(f"the pages were not handed over: {ended.outcome}: {ended.reason}")
        return prefill_s, ended.times.exposed_s

    def close(self) -> None:
        self._endpoint.close()
        self._destination.close()
        self.engine.close()

    def _check(self, ended: list[Ended], transfer: bytes) -> None:
        for each in ended:
            if each.transfer == transfer:
                raise RuntimeError(f"the transfer ended during the prefill: {each.outcome}: {each.reason}")

    def _wait_for(self, transfer: bytes) -> Ended:
        while True:
            for ended in self._endpoint.poll():
                if ended.transfer == transfer:
                    return ended
            self._endpoint.wait(DEADLINE_S)


def measure_streaming(
    num_tokens: int, transport: str, num_rounds: int, progress: Callable[[str], None]
) -> Streamed:
    """Rounds of each way alternate; the first of each warms up."""
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
