"""How much of a hand-off a request waits for: pages that stream while a real engine prefills, and pages that
are all sent at its end.

The engine computes a prompt in chunks on this machine's cores, while the transport's threads move what is
done. Exposed is the time from the last computed page to the destination's word that all are right.
"""

from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Final, NamedTuple

from baton.bench.kv_ends import DEADLINE_S, DestinationProcess, settings_of
from baton.bench.replica import LlamaShape, load_replica
from baton.engine.engine import Engine
from baton.engine.pages import PagePool
from baton.engine.sequence import Sequence
from baton.kvtransfer.ended import Ended
from baton.kvtransfer.endpoint import KvEndpoint
from baton.kvtransfer.handoff import Outcome
from baton.kvtransfer.link import Link
from baton.request import Request, SamplingParams

CHUNK_TOKENS: Final = 512
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


class Streamed(NamedTuple):
    """Medians, in seconds, of prompts of `num_tokens`."""

    num_tokens: int
    transport: str
    prefill_s: float
    exposed_streaming_s: float
    exposed_at_end_s: float


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

    def run(self, name: str, num_tokens: int, *, streams: bool) -> tuple[float, float]:
        """Seconds of the prefill, and seconds exposed."""
        num_pages = self._layout.num_pages(num_tokens)
        token_ids = tuple(1 + index % (SHAPE.vocab_size - 1) for index in range(num_tokens))
        sampling = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
        transfer = self._endpoint.start(self._link, num_pages, deadline_s=DEADLINE_S)
        self.engine.add(Request(request_id=name, token_ids=token_ids, sampling=sampling))
        (sequence,) = self.engine.scheduler.sequences()
        started_s, num_offered = perf_counter(), 0
        while sequence.num_computed_tokens < num_tokens:
            self.engine.step()
            is_done = sequence.num_computed_tokens >= num_tokens
            if streams or is_done:
                num_offered = self._offer(transfer, sequence, num_offered, num_pages if is_done else None)
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

    def _offer(self, transfer: bytes, sequence: Sequence, num_offered: int, num_pages: int | None) -> int:
        """num_pages: of the whole prompt, once it is computed; before that, only full pages go."""
        stop = num_pages or sequence.num_computed_tokens // self._layout.page_size
        self._endpoint.offer(transfer, sequence.page_table[num_offered:stop], stop)
        return stop

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
    """Rounds with and without streaming alternate; the first pair warms up."""
    prefill = _Prefill(transport, num_tokens)
    try:
        taken: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        for number in range(num_rounds + 1):
            progress(f"streaming {num_tokens} tokens over {transport}")
            for streams in (True, False):
                taken[streams].append(prefill.run(f"{number}-{streams}", num_tokens, streams=streams))
    finally:
        prefill.close()
    streaming, at_end = taken[True][1:], taken[False][1:]
    return Streamed(
        num_tokens=num_tokens,
        transport=transport,
        prefill_s=median(prefill_s for prefill_s, _ in streaming),
        exposed_streaming_s=median(exposed_s for _, exposed_s in streaming),
        exposed_at_end_s=median(exposed_s for _, exposed_s in at_end),
    )
