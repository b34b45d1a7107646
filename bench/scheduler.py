"""What scheduling costs: microseconds a step, and the price of the prefix cache when nothing hits.

python -m baton.bench.scheduler [--steps N]
"""

import argparse
import gc
import random
from collections.abc import Callable
from statistics import median, quantiles
from time import perf_counter_ns
from typing import NamedTuple

from baton.clock import SystemClock
from baton.config import SchedulerConfig
from baton.engine.page_keys import PageKeys
from baton.engine.pages import PagePool
from baton.engine.plan import Batch
from baton.engine.prefix_cache import PrefixCache
from baton.engine.scheduler import Scheduler
from baton.engine.sequence import Sequence
from baton.request import Request, SamplingParams

PAGE_SIZE = 16
LIMITS_US = {32: 50.0, 256: 200.0}  # p50 of plan + apply in a decode step
MODEL_TOKENS_PER_S = 40_000  # prompt and generated: about what one H200 computes of an 8B model
CACHE_LIMIT_PERCENT = 1.0


class StepTimes(NamedTuple):
    plan_us: list[float]
    apply_us: list[float]
    commit_us: list[float]


class Work(NamedTuple):
    seconds: float  # spent scheduling
    num_tokens: int  # computed


def build(num_seqs: int, num_pages: int, *, prefix_caching: bool) -> Scheduler:
    keys = PageKeys(model_fingerprint="bench", dtype="bfloat16", page_size=PAGE_SIZE)
    cache = PrefixCache(PagePool(num_pages, PAGE_SIZE), keys if prefix_caching else None)
    config = SchedulerConfig(max_num_seqs=num_seqs, max_num_batched_tokens=max(2048, num_seqs))
    return Scheduler(config, cache, SystemClock())


def new_sequence(number: int, prompt: list[int], max_tokens: int) -> Sequence:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    request = Request(request_id=f"request-{number}", token_ids=tuple(prompt), sampling=sampling)
    return Sequence.from_request(request, 0, max_model_len=1 << 20)


def tokens_for(batch: Batch) -> list[int | None]:
    return [1 if chunk.samples else None for chunk in batch.chunks]


def decode_steps(num_seqs: int, num_steps: int) -> StepTimes:
    """Time `num_steps` steps of `num_seqs` decodes, prompts of 50 to 200 tokens, prefix cache on."""
    rng = random.Random(num_seqs)
    scheduler = build(num_seqs, num_seqs * (num_steps + 300) // PAGE_SIZE + num_seqs, prefix_caching=True)
    for number in range(num_seqs):
        prompt = [rng.randrange(32_000) for _ in range(rng.randint(50, 200))]
        scheduler.add(new_sequence(number, prompt, num_steps + 100))
    while True:  # prefill until every sequence decodes
        batch = scheduler.apply(scheduler.plan())
        scheduler.commit(batch, tokens_for(batch))
        if batch.num_decodes == num_seqs:
            break
    times = StepTimes([], [], [])
    for _ in range(num_steps):
        started = perf_counter_ns()
        plan = scheduler.plan()
        planned = perf_counter_ns()
        batch = scheduler.apply(plan)
        applied = perf_counter_ns()
        sampled = tokens_for(batch)
        sampled_at = perf_counter_ns()
        scheduler.commit(batch, sampled)
        times.commit_us.append((perf_counter_ns() - sampled_at) / 1e3)
        times.plan_us.append((planned - started) / 1e3)
        times.apply_us.append((applied - planned) / 1e3)
    return times


def workload_seconds(num_requests: int, *, prefix_caching: bool) -> Work:
    """Schedule requests that share nothing, in a pool small enough to evict all the time."""
    rng = random.Random(0)
    scheduler = build(64, 2_000, prefix_caching=prefix_caching)
    sequences = [
        new_sequence(n, [rng.randrange(32_000) for _ in range(rng.randint(16, 1024))], rng.randint(16, 128))
        for n in range(num_requests)
    ]
    num_tokens, started = 0, perf_counter_ns()
    for sequence in sequences:
        scheduler.add(sequence)
    while scheduler.has_work():
        batch = scheduler.apply(scheduler.plan())
        num_tokens += sum(chunk.num_tokens for chunk in batch.chunks)
        scheduler.commit(batch, tokens_for(batch))
    return Work((perf_counter_ns() - started) / 1e9, num_tokens)


def row(name: str, values_us: list[float], limit_us: float | None = None) -> str:
    p50, p99 = median(values_us), quantiles(values_us, n=100)[98]
    verdict = "" if limit_us is None else f"  limit {limit_us:.0f}  {'ok' if p50 <= limit_us else 'OVER'}"
    return f"  {name:<16} p50 {p50:7.1f} us  p99 {p99:7.1f} us{verdict}"


def report_steps(num_seqs: int, num_steps: int, write: Callable[[str], None]) -> None:
    times = decode_steps(num_seqs, num_steps)
    both = [plan + apply for plan, apply in zip(times.plan_us, times.apply_us, strict=True)]
    write(f"{num_seqs} running sequences, {num_steps} decode steps")
    write(row("plan", times.plan_us))
    write(row("apply", times.apply_us))
    write(row("plan + apply", both, LIMITS_US[num_seqs]))
    write(row("commit", times.commit_us))


def report_cache(num_requests: int, write: Callable[[str], None]) -> None:
    """The extra scheduling time with the cache on, as a share of the model's time for the same tokens."""
    off = min(workload_seconds(num_requests, prefix_caching=False) for _ in range(7))
    on = min(workload_seconds(num_requests, prefix_caching=True) for _ in range(7))
    extra_s = on.seconds - off.seconds
    percent = 100 * extra_s * MODEL_TOKENS_PER_S / on.num_tokens
    write(f"prefix cache at 0 % hits, {num_requests} requests, prompts 16-1024, outputs 16-128")
    write(f"  scheduling in all  off {off.seconds * 1e3:.1f} ms  on {on.seconds * 1e3:.1f} ms")
    verdict = "ok" if percent <= CACHE_LIMIT_PERCENT else "OVER"
    write(
        f"  {extra_s / on.num_tokens * 1e6:.3f} us a token: {percent:.2f} % of a model that computes "
        f"{MODEL_TOKENS_PER_S:,} tokens/s  limit {CACHE_LIMIT_PERCENT:.0f} %  {verdict}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3_000)
    parser.add_argument("--requests", type=int, default=300)
    arguments = parser.parse_args()
    gc.freeze()
    for num_seqs in LIMITS_US:
        report_steps(num_seqs, arguments.steps, print)
    report_cache(arguments.requests, print)


if __name__ == "__main__":
    main()
