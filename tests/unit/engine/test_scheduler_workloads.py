"""Random workloads on small pools: every page read, every book and every answer is checked every step."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.config.engine import SchedulerConfig
from baton.engine.scheduler.sequence import PreemptMode, SequenceStatus
from baton.engine.scheduler.step_planner import PreemptionRates
from baton.errors import InvalidRequest
from baton.request import SamplingParams
from tests.scheduling import Harness, Settings

SHARED_PREFIX = [7, 7, 1, 2, 3, 9, 8, 4, 4, 4, 5, 6, 1, 1, 2, 30, 31]


def crowded_settings(rng: random.Random) -> Settings:
    """Few pages, a host tier about as large, room in every step: all that the ledgers can do, at once."""
    return Settings(
        num_pages=rng.randint(14, 30),
        page_size=8,
        num_host_pages=rng.randint(4, 40),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=400),
    )


def random_settings(rng: random.Random) -> Settings:
    return Settings(
        num_pages=rng.randint(4, 40),
        page_size=rng.choice([1, 2, 4, 8]),
        num_host_pages=rng.choice([0, 3, 20, 60]),
        prefix_caching=rng.random() < 0.7,
        scheduler=SchedulerConfig(
            max_num_seqs=rng.randint(1, 8),
            max_num_batched_tokens=rng.choice([1, 3, 8, 17, 64]),
            policy=rng.choice(["continuous", "continuous", "continuous", "static", "dynamic"]),
            max_queue_delay_ms=rng.choice([0.0, 0.0, 20.0]),
        ),
    )


def random_prompt(rng: random.Random) -> list[int]:
    if rng.random() < 0.3:
        return [rng.randrange(3)] * rng.randint(1, 20)  # comes again and again
    prefix = SHARED_PREFIX[: rng.randint(0, len(SHARED_PREFIX))] if rng.random() < 0.6 else []
    return prefix + [rng.randrange(50) for _ in range(rng.randint(1, 25))]


def random_sampling(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        n=rng.choice([1, 1, 1, 2, 3]),
        max_tokens=rng.choice([1, 5, 20, 50]),
        stop_token_ids=tuple(rng.sample(range(50), rng.choice([0, 3]))),
        prompt_logprobs=rng.choice([None, None, None, 0]),
    )


def disturb(harness: Harness, rng: random.Random, rate: float) -> None:
    """Abort or preempt something now and then."""
    running = [key for key, s in harness.live.items() if s.status is SequenceStatus.RUNNING]
    if running and rng.random() < rate:
        harness.scheduler.preempt(rng.choice(running), rng.choice(list(PreemptMode)))
    if harness.live and rng.random() < rate / 5:
        harness.abort(rng.choice(list(harness.live))[0])


def crowded_workload(seed: int) -> None:
    """Requests that share their beginnings come in bursts; any of them may be preempted at any step."""
    rng = random.Random(seed)
    harness = Harness(crowded_settings(rng))
    texts = [[number] * 8 + [rng.randrange(3) for _ in range(32)] for number in range(3)]
    for number in range(40):
        for burst in range(rng.choice([0, 1, 3])):
            text = rng.choice(texts)
            harness.add(
                f"r{number}-{burst}",
                text[: rng.randint(7, 40)],
                SamplingParams(max_tokens=rng.choice([1, 4, 17])),
            )
        for _ in range(rng.randint(1, 3)):
            disturb(harness, rng, 0.4)
        harness.step()
    harness.run()


def run_workload(seed: int) -> None:
    rng = random.Random(seed)
    harness = Harness(random_settings(rng))
    if rng.random() < 0.5:
        harness.scheduler.rates = PreemptionRates(rng.random(), rng.random())
    disturbance = rng.choice([0.0, 0.3, 0.7])
    num_requests = rng.randint(1, 25)
    for number in range(num_requests):
        try:
            harness.add(
                f"r{number}",
                random_prompt(rng),
                random_sampling(rng),
                priority=rng.choice([0, 0, 1]),
                arrival_s=harness.clock.now_s(),
                cache_salt=rng.choice([b"", b"", b"tenant"]),
            )
        except InvalidRequest:
            continue
        for _ in range(rng.choice([0, 0, 1, 5])):
            disturb(harness, rng, disturbance)
            harness.step()
            harness.clock.advance(0.001)
    harness.run(max_steps=20_000)


@pytest.mark.parametrize("first_seed", range(0, 160, 20))
def test_random_workloads_are_exact_and_end(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 20):
        run_workload(seed)


def test_crowded_workloads_are_exact_and_end() -> None:
    for seed in range(60):
        crowded_workload(seed)


@settings(max_examples=30, deadline=None)
@given(st.integers(min_value=1000))
def test_any_workload_is_exact_and_ends(seed: int) -> None:
    run_workload(seed)
