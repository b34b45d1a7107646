"""The same requests through one engine under a batching policy: what came out, and when.

1. `Requests` fixes prompts, answer lengths and arrival times; every policy gets the same ones.
2. `run` hands each request to the engine when it is due and steps until all have ended.
3. `Outcome` counts tokens, seconds, computed rows and each request's latency since its arrival.
"""

import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean, pstdev
from typing import Final

from baton.bench.replica import LlamaShape, Replica, load_replica
from baton.request import Request, SamplingParams

POLICIES: Final = ("static", "dynamic", "continuous")
NUM_SEATS: Final = 16  # sequences a batch
PROMPT_TOKENS: Final = 32
MAX_OUTPUT_TOKENS: Final = 512
# Large enough that reading the weights is most of a step, as on a GPU: a step of one row then costs
# nearly what a step of sixteen does, and rows that are computed for nothing are not cheaper than others.
SHAPE: Final = LlamaShape(
    hidden_size=512,
    intermediate_size=1536,
    num_layers=4,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    vocab_size=1024,
    max_positions=PROMPT_TOKENS + MAX_OUTPUT_TOKENS,
)
DRAWS_A_LENGTH: Final = 64
DYNAMIC_WINDOW_MS: Final = 10.0  # a request-level batcher waits this long for a full batch


@dataclass(frozen=True)
class Requests:
    output_lengths: tuple[int, ...]  # tokens
    arrivals_s: tuple[float, ...]  # since the start, ascending

    @property
    def mean(self) -> float:
        return fmean(self.output_lengths)

    @property
    def variation(self) -> float:
        """Standard deviation over mean of the output lengths."""
        return pstdev(self.output_lengths) / self.mean


@dataclass(frozen=True)
class Outcome:
    seconds: float  # from the first arrival to the last token
    num_tokens: int  # generated, all of them asked for
    latencies_s: tuple[float, ...]  # from each arrival to its own last token, in order of arrival
    num_steps: int
    num_rows: int  # computed, prompts and padding included
    num_padded_rows: int

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def mean_latency_s(self) -> float:
        return fmean(self.latencies_s)

    @property
    def p99_latency_s(self) -> float:
        return sorted(self.latencies_s)[-(-len(self.latencies_s) * 99 // 100) - 1]

    @property
    def padding_percent(self) -> float:
        return 100 * self.num_padded_rows / self.num_rows


def mixed_lengths(num_requests: int, seed: int = 0) -> tuple[int, ...]:
    """10 % short (4 tokens, a label), 80 % medium (32, a sentence), 10 % long (256, a page), shuffled."""
    num_tails = num_requests // 10
    lengths = [4] * num_tails + [256] * num_tails + [32] * (num_requests - 2 * num_tails)
    random.Random(seed).shuffle(lengths)
    return tuple(lengths)


def varied_lengths(num_requests: int, mean: int, variation: float, seed: int = 0) -> tuple[int, ...]:
    """Gamma-distributed lengths of the wanted coefficient of variation, scaled to the exact mean.

    Quantiles of a larger draw, shuffled: a plain draw of this size misses the variation by a tenth.
    """
    if variation == 0:
        return (mean,) * num_requests
    shape, rng = variation**-2, random.Random(seed)
    drawn = sorted(rng.gammavariate(shape, mean / shape) for _ in range(num_requests * DRAWS_A_LENGTH))
    quantiles = drawn[DRAWS_A_LENGTH // 2 :: DRAWS_A_LENGTH]
    lengths = _scaled(quantiles, mean)
    rng.shuffle(lengths)
    return tuple(lengths)


def burst(output_lengths: tuple[int, ...]) -> Requests:
    return Requests(output_lengths, (0.0,) * len(output_lengths))


def poisson(output_lengths: tuple[int, ...], requests_per_s: float, seed: int = 0) -> Requests:
    rng = random.Random(seed)
    gaps_s = [rng.expovariate(requests_per_s) for _ in output_lengths]
    return Requests(output_lengths, tuple(accumulate(gaps_s)))


def load_policies(shape: LlamaShape = SHAPE) -> dict[str, Replica]:
    """One engine a policy, with the same weights, seats and pages; no prefix cache, so no prompt is free."""
    return {policy: _load(policy, shape) for policy in POLICIES}


def run(replica: Replica, requests: Requests) -> Outcome:
    """Run to the end in real time; an idle engine sleeps until the next arrival."""
    engine, runner = replica.engine, replica.runner
    before = (runner.num_steps, runner.num_rows, runner.num_padded_rows)
    due = _Due(requests)
    ended_s: dict[str, float] = {}
    num_tokens, started_s = 0, time.perf_counter()
    while len(ended_s) < len(requests.output_lengths):
        for request in due.until(time.perf_counter() - started_s):
            engine.add(request)
        outputs = engine.step() if engine.has_work() else []
        num_tokens += len(outputs)
        now_s = time.perf_counter() - started_s
        ended_s.update({output.request_id: now_s for output in outputs if output.finish_reason})
        if not engine.has_work():
            _sleep_until_due(due.next_s, now_s)
        elif engine.wait_s is not None:  # the queue window holds all there is
            _sleep_until_due(due.next_s, now_s, engine.wait_s)
    arrivals_s = requests.arrivals_s
    return Outcome(
        seconds=max(ended_s.values()) - arrivals_s[0],
        num_tokens=num_tokens,
        latencies_s=tuple(ended_s[str(index)] - arrival_s for index, arrival_s in enumerate(arrivals_s)),
        num_steps=runner.num_steps - before[0],
        num_rows=runner.num_rows - before[1],
        num_padded_rows=runner.num_padded_rows - before[2],
    )


class _Due:
    """Requests not yet handed out, by arrival."""

    def __init__(self, requests: Requests) -> None:
        rng = random.Random(len(requests.output_lengths))
        self._arrivals_s = requests.arrivals_s
        self._requests = [
            _request(index, length, rng) for index, length in enumerate(requests.output_lengths)
        ]
        self._num_taken = 0

    @property
    def next_s(self) -> float | None:
        return self._arrivals_s[self._num_taken] if self._num_taken < len(self._requests) else None

    def until(self, now_s: float) -> Iterator[Request]:
        while self.next_s is not None and self.next_s <= now_s:
            self._num_taken += 1
            yield self._requests[self._num_taken - 1]


def _request(index: int, num_tokens: int, rng: random.Random) -> Request:
    prompt = tuple(rng.randrange(SHAPE.vocab_size) for _ in range(PROMPT_TOKENS))
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    return Request(request_id=str(index), token_ids=prompt, sampling=sampling)


def _sleep_until_due(next_s: float | None, now_s: float, window_s: float = math.inf) -> None:
    """Until the next arrival or the opening of the queue window; not at all when neither will come."""
    pause_s = min(window_s, math.inf if next_s is None else next_s - now_s)
    if 0 < pause_s < math.inf:
        time.sleep(pause_s)


def _load(policy: str, shape: LlamaShape) -> Replica:
    scheduler: dict[str, object] = {"policy": policy, "max_num_seqs": NUM_SEATS}
    if policy == "dynamic":
        window = {"max_queue_delay_ms": DYNAMIC_WINDOW_MS, "preferred_batch_sizes": [NUM_SEATS]}
        scheduler |= window
    cache = {"kv_cache_memory_bytes": 2**27, "enable_prefix_caching": False}
    return load_replica(shape, {"scheduler": scheduler, "cache": cache})


def _scaled(values: Sequence[float], mean: int) -> list[int]:
    """Whole lengths within the bounds, in the order of the ascending `values`, of exactly this mean."""
    total, factor = mean * len(values), 1.0
    for _ in range(10):  # the bounds move the mean
        lengths = [min(MAX_OUTPUT_TOKENS, max(1, round(value * factor))) for value in values]
        factor *= total / sum(lengths)
    missing = total - sum(lengths)
    middle = len(lengths) // 2  # of those above it none is at a bound that matters
    for index in range(middle, middle + abs(missing)):
        lengths[index] += 1 if missing > 0 else -1
    return lengths
