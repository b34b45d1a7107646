"""The cost of scheduling: microseconds a step, and the price of the prefix cache when nothing hits.

    python -m baton.bench.engine.scheduler [--steps 3000] [--requests 300]

docs/benchmarks.md explains the figures.
"""

import gc
import random
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from time import perf_counter_ns
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import torch

from baton.bench.engine.replica import TOY_LLAMA, decode_step_seconds, load_replica, request_of
from baton.bench.report import Report, Row, at_most, format_number, option, percentile, suite
from baton.clock import SystemClock
from baton.config.engine import SchedulerConfig
from baton.engine.cache.page_pool import PagePool
from baton.engine.cache.prefix_cache import PrefixCache
from baton.engine.runner import sampler
from baton.engine.runner.cuda_graphs import graph_shapes
from baton.engine.runner.step_inputs import GraphInputs, GraphShape, StepBuilder
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.sequence import Batch, Sequence
from baton.pages import PageKeys
from baton.request import Request, SamplingParams
from baton.token_ids import TokenIds

PAGE_SIZE = 16
LIMITS_US = {32: 50.0, 256: 200.0}  # p50 of plan + apply in a decode step
HOST_LIMITS_US = {1: 60.0, 64: 120.0, 256: 250.0}  # p50 of the host time of a decode step
HOST_SHAPE = replace(TOY_LLAMA, max_positions=8192)
PACKED_TOKENS = 1_000  # context of each sequence whose step is packed
MODEL_TOKENS_PER_S = 40_000  # prompt and generated: about what one H200 computes of an 8B model
CACHE_LIMIT_PERCENT = 1.0
NUM_CACHE_RUNS = 7


class StepTimes(NamedTuple):
    """Microseconds of each part of each step."""

    plan_us: list[float]
    apply_us: list[float]
    commit_us: list[float]


class Work(NamedTuple):
    """One run of the scheduler: seconds spent scheduling, and tokens scheduled."""

    seconds: float
    num_tokens: int


def _scheduler(num_seqs: int, num_pages: int, *, prefix_caching: bool) -> Scheduler:
    keys = PageKeys(model_fingerprint="bench", dtype="bfloat16", page_size=PAGE_SIZE)
    cache = PrefixCache(PagePool(num_pages, PAGE_SIZE), keys if prefix_caching else None)
    config = SchedulerConfig(max_num_seqs=num_seqs, max_num_batched_tokens=max(2048, num_seqs))
    return Scheduler(config, cache, SystemClock())


def _sequence(number: int, prompt: list[int], max_tokens: int) -> Sequence:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    request = Request(request_id=f"request-{number}", token_ids=TokenIds.of(prompt), sampling=sampling)
    return Sequence.from_request(request, 0, max_model_len=1 << 20)


def _sampled(batch: Batch) -> list[int | None]:
    return [1 if chunk.samples else None for chunk in batch.chunks]


def decode_steps(num_seqs: int, num_steps: int) -> StepTimes:
    """Time `num_steps` steps of `num_seqs` decodes, prompts of 50 to 200 tokens, prefix cache on."""
    rng = random.Random(num_seqs)
    num_pages = num_seqs * (num_steps + 300) // PAGE_SIZE + num_seqs
    scheduler = _scheduler(num_seqs, num_pages, prefix_caching=True)
    for number in range(num_seqs):
        prompt = [rng.randrange(32_000) for _ in range(rng.randint(50, 200))]
        scheduler.add(_sequence(number, prompt, num_steps + 100))
    num_decodes = 0
    while num_decodes < num_seqs:  # prefill until every sequence decodes
        batch = scheduler.apply(scheduler.plan())
        scheduler.commit(batch, _sampled(batch))
        num_decodes = batch.num_decodes
    times = StepTimes([], [], [])
    for _ in range(num_steps):
        started = perf_counter_ns()
        plan = scheduler.plan()
        planned = perf_counter_ns()
        batch = scheduler.apply(plan)
        applied = perf_counter_ns()
        sampled = _sampled(batch)
        sampled_at = perf_counter_ns()
        scheduler.commit(batch, sampled)
        times.commit_us.append((perf_counter_ns() - sampled_at) / 1e3)
        times.plan_us.append((planned - started) / 1e3)
        times.apply_us.append((applied - planned) / 1e3)
    return times


def host_times_us(num_steps: int) -> Iterator[tuple[int, list[float]]]:
    """Yield (batch size, microseconds of each decode step); constants replace the model and the draw."""
    most = max(HOST_LIMITS_US)
    settings = {
        "max_model_len": HOST_SHAPE.max_positions,
        "cache": {"kv_cache_memory_bytes": 2**30},
        "scheduler": {"max_num_seqs": most, "async_scheduling": True},  # as on a GPU
    }
    engine, rng = load_replica(HOST_SHAPE, {"device": "cpu", **settings}), random.Random(0)
    logits_BV, tokens_B = torch.zeros((most, HOST_SHAPE.vocab_size)), torch.full((most,), 7)
    with (
        patch.object(engine.runner, "execute", lambda arrays, *_: logits_BV[: len(arrays.logit_rows)]),
        patch.object(sampler, "sample", lambda rows_BV, tensors: tokens_B[: len(rows_BV)]),
    ):
        for num_seqs in HOST_LIMITS_US:
            sampling = SamplingParams(max_tokens=num_steps + 1000, ignore_eos=True)
            prompts = [
                [rng.randrange(HOST_SHAPE.vocab_size) for _ in range(rng.randint(50, 200))]
                for _ in range(num_seqs)
            ]
            requests = [request_of(prompt, sampling) for prompt in prompts]
            yield num_seqs, [1e6 * each for each in decode_step_seconds(engine, requests, num_steps)]


def packing_times_us(num_steps: int) -> Iterator[tuple[int, list[float]]]:
    """Yield (batch size, microseconds to write a decode step to the addresses that a CUDA graph reads)."""
    most, max_pages = max(HOST_LIMITS_US), HOST_SHAPE.max_positions // PAGE_SIZE
    inputs = GraphInputs(graph_shapes(most, 2048), max_pages, torch.device("cpu"))
    sequences = [_sequence(number, [1] * PACKED_TOKENS, 1) for number in range(most)]
    for number, sequence in enumerate(sequences):
        sequence.page_table = list(range(number, number + -(-PACKED_TOKENS // PAGE_SIZE)))
    for num_seqs in HOST_LIMITS_US:
        batch = Batch(
            sequences=sequences[:num_seqs],
            starts=np.full(num_seqs, PACKED_TOKENS - 1),
            lengths=[1] * num_seqs,
            num_decodes=num_seqs,
            is_pure_decode=True,
        )
        arrays, shape = StepBuilder(PAGE_SIZE, most, max_pages).build(batch), GraphShape(num_seqs)
        times_us = []
        for _ in range(num_steps):
            started = perf_counter_ns()
            inputs.write(arrays, shape)
            times_us.append((perf_counter_ns() - started) / 1e3)
        yield num_seqs, times_us


def schedule_unshared(num_requests: int, *, prefix_caching: bool) -> Work:
    """Schedule requests that share nothing, in a pool so small that it evicts all the time."""
    rng = random.Random(0)
    scheduler = _scheduler(64, 2_000, prefix_caching=prefix_caching)
    sequences = [
        _sequence(n, [rng.randrange(32_000) for _ in range(rng.randint(16, 1024))], rng.randint(16, 128))
        for n in range(num_requests)
    ]
    num_tokens, started = 0, perf_counter_ns()
    for sequence in sequences:
        scheduler.add(sequence)
    while scheduler.has_work():
        batch = scheduler.apply(scheduler.plan())
        num_tokens += batch.num_tokens
        scheduler.commit(batch, _sampled(batch))
    return Work((perf_counter_ns() - started) / 1e9, num_tokens)


def step_rows(num_seqs: int, times: StepTimes) -> list[Row]:
    """Return medians; the limit is on plan and apply together."""
    both = [plan + apply for plan, apply in zip(times.plan_us, times.apply_us, strict=True)]
    parts = {"plan": times.plan_us, "apply": times.apply_us, "plan + apply": both, "commit": times.commit_us}
    return [
        at_most(
            f"{num_seqs} decodes, {name}",
            median(values_us),
            "us a step",
            LIMITS_US[num_seqs] if values_us is both else None,
            f"p99 {format_number(percentile(values_us, 99))} us",
        )
        for name, values_us in parts.items()
    ]


def cache_rows(off: list[Work], on: list[Work]) -> list[Row]:
    """Return the extra scheduling time with the cache, as a share of the model's time for the same tokens.

    The best runs are compared: other work on the machine only ever adds.
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


@suite(
    "scheduler",
    "Scheduling",
    option("--steps", 3_000, "decode steps that are timed"),
    option("--requests", 300, "scheduled with and without the cache"),
)
def measure(options: Namespace, report: Report) -> None:
    """Time decode steps, then whole runs with and without the prefix cache."""
    gc.freeze()
    for num_seqs in LIMITS_US:
        report.tell(f"{num_seqs} decodes")
        report.rows += step_rows(num_seqs, decode_steps(num_seqs, options.steps))
    report.tell("host time")
    report.rows += [
        at_most(f"host time of {number} decodes", median(times_us), "us a step", HOST_LIMITS_US[number])
        for number, times_us in host_times_us(options.steps)
    ]
    report.rows += [
        Row(
            f"packing of {number} decodes",
            median(times_us),
            "us a step",
            note=f"{PACKED_TOKENS:,} tokens each",
        )
        for number, times_us in packing_times_us(options.steps)
    ]
    runs: dict[str, list[Work]] = {"off": [], "on": []}
    for name, works in runs.items():
        for number in range(NUM_CACHE_RUNS):
            report.tell(f"prefix cache {name}, run {number + 1}")
            works.append(schedule_unshared(options.requests, prefix_caching=name == "on"))
    gc.unfreeze()
    report.rows += cache_rows(runs["off"], runs["on"])
    report.extra = {"cache_s": {name: [work.seconds for work in works] for name, works in runs.items()}}


if __name__ == "__main__":
    measure.main(__doc__)
