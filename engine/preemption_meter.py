"""Measures, while the engine runs, what preemption costs on this machine."""

from time import perf_counter
from typing import Final

from baton.engine.kv_pool import KvPool
from baton.engine.plan import Batch
from baton.engine.preemption import PreemptionRates

WEIGHT: Final = 0.2  # of a new observation in the running mean
MIN_PREFILL_TOKENS: Final = 16  # fewer say little about the cost of a token
NUM_PROBE_PAGES: Final = 4


class PreemptionMeter:
    """`rates` is None without host pages, where there is no choice, and until a prefill has been seen."""

    def __init__(self, pool: KvPool) -> None:
        self.rates: PreemptionRates | None = None
        self._recompute_s_per_token: float | None = None
        self._num_seen = 0
        self._swap_s_per_page = _time_swap(pool) if len(pool.host) else None

    def observe(self, batch: Batch, step_s: float) -> None:
        """A step took `step_s` seconds; steps that compute prompts tell what a recomputed token costs."""
        num_tokens = sum(chunk.num_tokens for chunk in batch.chunks[batch.num_decodes :])
        if self._swap_s_per_page is None or num_tokens < MIN_PREFILL_TOKENS:
            return
        self._num_seen += 1
        if self._num_seen == 1:
            return  # the first prefill compiles kernels
        cost_s = step_s / (num_tokens + batch.num_decodes)
        mean_s = self._recompute_s_per_token
        self._recompute_s_per_token = cost_s if mean_s is None else mean_s + WEIGHT * (cost_s - mean_s)
        self.rates = PreemptionRates(self._recompute_s_per_token, self._swap_s_per_page)


def _time_swap(pool: KvPool) -> float:
    """Seconds a page takes one way, from a round trip of pages that hold nothing yet."""
    num_pages = min(NUM_PROBE_PAGES, len(pool.host), len(pool.device))
    copies = [(page, page) for page in range(num_pages)]
    pool.copy(copies, copies)  # the first touch of the memory is not what a swap costs
    started_s = perf_counter()
    pool.copy(copies, copies)
    return (perf_counter() - started_s) / (2 * num_pages)
