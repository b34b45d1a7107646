"""The cost of scheduling: microseconds a step.

docs/benchmarks.md explains the figures.
"""

import random
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from time import perf_counter_ns
from typing import NamedTuple
from unittest.mock import patch

import torch

from baton.bench.engine.replica import TOY_LLAMA, decode_step_seconds, load_replica, request_of
from baton.bench.report import Report, Row, at_most, format_number, option, percentile, suite
from baton.clock import SystemClock
from baton.config.engine import SchedulerConfig
from baton.engine.cache.page_pool import PagePool
from baton.engine.cache.prefix_cache import PrefixCache
from baton.engine.runner import sampler
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.sequence import Batch, Sequence
from baton.pages import PageKeys
from baton.request import Request, SamplingParams, TokenIds
from baton.rpc import process

PAGE_SIZE = 16
LIMITS_US = {32: 50.0, 256: 200.0}  # p50 of plan + apply in a decode step
HOST_LIMITS_US = {1: 60.0, 64: 120.0, 256: 250.0}  # p50 of the host time of a decode step
HOST_SHAPE = replace(TOY_LLAMA, max_positions=8192)


class StepTimes(NamedTuple):
    """Microseconds of each part of each step."""

    plan_us: list[float]
    apply_us: list[float]
    commit_us: list[float]


def _scheduler(num_seqs: int, num_pages: int) -> Scheduler:
    keys = PageKeys(model_fingerprint="bench", dtype="bfloat16", page_size=PAGE_SIZE)
    cache = PrefixCache(PagePool(num_pages, PAGE_SIZE), keys)
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
    scheduler = _scheduler(num_seqs, num_pages)
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


@suite("scheduler", "Scheduling", option("--steps", 3_000, "decode steps that are timed"))
def measure(options: Namespace, report: Report) -> None:
    """Time the parts of decode steps, then all that the host does for one."""
    with process.freeze_gc():
        for num_seqs in LIMITS_US:
            report.tell(f"{num_seqs} decodes")
            report.rows += step_rows(num_seqs, decode_steps(num_seqs, options.steps))
        report.tell("host time")
        for number, times_us in host_times_us(options.steps):
            limit_us = HOST_LIMITS_US[number]
            report.rows.append(
                at_most(f"host time of {number} decodes", median(times_us), "us a step", limit_us)
            )
