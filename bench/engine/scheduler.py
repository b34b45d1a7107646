"""What scheduling costs: microseconds a step, and the price of the prefix cache when nothing hits.

python -m baton.bench.engine.scheduler [--steps 3000] [--requests 300]
"""

import argparse
import gc
import random
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter_ns
from typing import NamedTuple

from baton.bench.machine import machine_description, one_line
from baton.bench.report import RESULTS, Row, at_most, format_number, print_table, write_json
from baton.clock import SystemClock
from baton.config.engine import SchedulerConfig
from baton.engine.cache.page_pool import PagePool
from baton.engine.cache.prefix_cache import PrefixCache
from baton.engine.scheduler.plan import Batch
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.sequence import Sequence
from baton.pages import PageKeys
from baton.request import Request, SamplingParams

PAGE_SIZE = 16
LIMITS_US = {32: 50.0, 256: 200.0}  # p50 of plan + apply in a decode step
MODEL_TOKENS_PER_S = 40_000  # prompt and generated: about what one H200 computes of an 8B model
CACHE_LIMIT_PERCENT = 1.0
NUM_CACHE_RUNS = 7


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


def step_rows(num_seqs: int, times: StepTimes) -> list[Row]:
    """Medians; the bar is on plan and apply together."""
    both = [plan + apply for plan, apply in zip(times.plan_us, times.apply_us, strict=True)]
    name = f"{num_seqs} decodes"
    return [
        Row(f"{name}, plan", median(times.plan_us), "us a step", note=_tail(times.plan_us)),
        Row(f"{name}, apply", median(times.apply_us), "us a step", note=_tail(times.apply_us)),
        at_most(f"{name}, plan + apply", median(both), "us a step", LIMITS_US[num_seqs], _tail(both)),
        Row(f"{name}, commit", median(times.commit_us), "us a step", note=_tail(times.commit_us)),
    ]


def _tail(values_us: list[float]) -> str:
    return f"p99 {format_number(quantiles(values_us, n=100)[98])} us"


def cache_rows(off: list[Work], on: list[Work]) -> list[Row]:
    """The extra scheduling time with the cache on, as a share of the model's time for the same tokens.

    The best run of each side is compared: what else the machine does only ever adds.
    """
    best_off, best_on = min(off), min(on)
    extra_s = best_on.seconds - best_off.seconds
    percent = 100 * extra_s * MODEL_TOKENS_PER_S / best_on.num_tokens
    note = f"{extra_s / best_on.num_tokens * 1e6:.3f} us a token, of a model at {MODEL_TOKENS_PER_S:,} tok/s"
    return [
        Row("scheduling without prefix cache", best_off.seconds * 1e3, "ms", note=f"best of {len(off)}"),
        Row("scheduling with prefix cache", best_on.seconds * 1e3, "ms", note=f"best of {len(on)}"),
        at_most("prefix cache at 0 % hits costs", percent, "% of the model", CACHE_LIMIT_PERCENT, note),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=3_000)
    parser.add_argument(
        "--requests", type=int, default=300, help="of the work done with and without the cache"
    )
    parser.add_argument("--output", type=Path, default=RESULTS / "scheduler.json")
    options = parser.parse_args()
    gc.freeze()
    print(one_line(machine_description()), flush=True)
    steps = {num_seqs: decode_steps(num_seqs, options.steps) for num_seqs in LIMITS_US}
    off, on = (
        [workload_seconds(options.requests, prefix_caching=caching) for _ in range(NUM_CACHE_RUNS)]
        for caching in (False, True)
    )
    rows = [row for num_seqs, times in steps.items() for row in step_rows(num_seqs, times)]
    rows += cache_rows(off, on)
    print_table("Scheduling", rows)
    cache_s = {"off": [work.seconds for work in off], "on": [work.seconds for work in on]}
    write_json(options.output, "Scheduling", rows, {"cache_s": cache_s})


if __name__ == "__main__":
    main()
