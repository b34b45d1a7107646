"""What keys beyond their shares may compute in a step, and each prompt's part of the step times."""

from collections import defaultdict
from math import inf
from random import Random

import pytest

from baton.clock import ManualClock
from baton.config.engine import SchedulerConfig
from baton.engine.cache.page_pool import PagePool
from baton.engine.cache.prefix_cache import HostTier, PrefixCache
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.sequence import Sequence, SequenceStatus
from baton.engine.scheduler.step_planner import MAX_STRETCH, CostCap
from baton.fair_queue import DecayedShares, Share
from baton.request import Request, SamplingParams

CROSSOVER, STEP = 500.0, 256


def two() -> tuple[DecayedShares, Share, Share]:
    """A key beyond its share, and another."""
    shares = DecayedShares()
    heavy, light = shares.join("heavy", 1.0), shares.join("light", 1.0)
    shares.charge([(heavy, 900), (light, 100)], 0.0)
    return shares, heavy, light


def cost(start: int, num_tokens: int, crossover: float) -> float:
    """Brute force: in first tokens."""
    return sum(1 + (position + 0.5) / crossover for position in range(start, start + num_tokens))


@pytest.mark.parametrize("crossover", [100.0, 480.0, 3072.0, 26_600.0])
@pytest.mark.parametrize("start", [0, 100, 1000, 3500, 100_000])
@pytest.mark.parametrize("budget", [1, 128, 256, 8192])
def test_step_of_a_key_beyond_its_share_has_a_bounded_cost(crossover: float, start: int, budget: int) -> None:
    shares, heavy, light = two()
    cost_cap = CostCap(shares, crossover)
    most = cost_cap.most(heavy, start, budget)
    assert 1 <= most <= budget
    assert most == 1 or cost(start, most, crossover) <= MAX_STRETCH * budget
    assert most == budget or cost(start, most + 1, crossover) > MAX_STRETCH * budget
    assert cost_cap.most(light, start, budget) == budget


def test_tokens_take_their_cost_from_the_budget() -> None:
    shares, heavy, light = two()
    cost_cap = CostCap(shares, CROSSOVER)
    assert cost_cap.price(heavy, 0, 100, STEP) == cost_cap.price(light, 3000, 100, STEP) == 100
    price = cost_cap.price(heavy, 3000, 40, STEP)
    assert cost(3000, 40, CROSSOVER) / MAX_STRETCH <= price <= cost(3000, 40, CROSSOVER) / MAX_STRETCH + 1
    assert cost_cap.price(heavy, 3000, 100, STEP) == STEP  # never more than there is
    for budget in (STEP, STEP // 2):
        most = cost_cap.most(heavy, 3000, budget)
        assert 0.9 * budget <= cost_cap.price(heavy, 3000, most, budget) <= budget


def test_equal_token_costs_are_not_capped() -> None:
    shares, heavy, _ = two()
    assert CostCap(shares).most(heavy, 10**6, STEP) == CostCap(shares).price(heavy, 10**6, STEP, STEP) == STEP


class Worker:
    """Prompts to their first token."""

    def __init__(self, attention_mlp_crossover: float) -> None:
        cache = PrefixCache(PagePool(8000, 16), None, HostTier(0))
        config = SchedulerConfig(max_num_batched_tokens=STEP, max_num_seqs=16)
        self.scheduler = Scheduler(config, cache, ManualClock(), attention_mlp_crossover)
        self.num_asked = 0

    def ask(self, tenant: str, num_tokens: int) -> None:
        self.num_asked += 1
        request = Request(
            request_id=str(self.num_asked),
            token_ids=(5,) * num_tokens,
            tenant=tenant,
            sampling=SamplingParams(max_tokens=1),
        )
        self.scheduler.add(Sequence.from_request(request, 0, max_model_len=1 << 16))

    def step(self) -> list[tuple[str, int, int]]:
        """(scheduling key, start, num_tokens) of each chunk."""
        batch = self.scheduler.apply(self.scheduler.plan())
        chunks = [(chunk.sequence.scheduling_key, chunk.start, chunk.num_tokens) for chunk in batch.chunks]
        self.scheduler.commit(batch, [7] * len(batch.chunks))
        return chunks

    def finish(self) -> list[tuple[str, int, int]]:
        chunks = []
        while self.scheduler.has_work():
            chunks += self.step()
        return chunks


def test_long_prompt_ends_in_short_steps_beside_other_keys() -> None:
    worker = Worker(CROSSOVER)
    for tenant, num_tokens in (("heavy", 64), ("light", 64), ("heavy", 4000)):
        worker.ask(tenant, num_tokens)
        chunks = worker.finish()
    assert sum(num for *_, num in chunks) == 4000 and chunks[0][2] == STEP
    assert max(cost(start, num, CROSSOVER) for _, start, num in chunks[-5:]) <= MAX_STRETCH * STEP


@pytest.mark.parametrize("tenant", ["only", ""])
def test_only_key_has_whole_steps(tenant: str) -> None:
    worker = Worker(CROSSOVER)
    worker.ask(tenant, 64)
    worker.finish()
    worker.ask(tenant, 4000)
    assert [num for *_, num in worker.finish()] == [STEP] * (4000 // STEP) + [4000 % STEP]


def test_long_prompt_leaves_half_of_its_steps_to_short_ones_and_seats_to_other_keys() -> None:
    worker = Worker(CROSSOVER)
    for tenant in ("heavy", "light"):
        worker.ask(tenant, 64)
        worker.finish()
    worker.ask("heavy", 4000)
    while worker.step()[0][1] < 2500:
        pass
    for _ in range(50):
        worker.ask("heavy", 600)
    short = [num for _, start, num in worker.step() if start < 2500]
    assert 0.4 * STEP <= sum(short) <= 0.6 * STEP and len(short) == 1
    assert worker.scheduler.num_waiting == 49
    worker.ask("light", 100)
    assert worker.step()[0] == ("light", 0, 100)


# Step times.

STEP_TOKENS = 32
STEP_S = 0.5


class Steps:
    def __init__(self, attention_mlp_crossover: float = inf, num_pages: int = 2000) -> None:
        cache = PrefixCache(PagePool(num_pages, 4), None, HostTier(0))
        config = SchedulerConfig(max_num_batched_tokens=STEP_TOKENS, max_num_seqs=8)
        self.scheduler = Scheduler(config, cache, ManualClock(), attention_mlp_crossover)
        self.num_asked = 0

    def ask(self, num_tokens: int, max_tokens: int = 1) -> Sequence:
        self.num_asked += 1
        request = Request(
            request_id=str(self.num_asked),
            token_ids=(5,) * num_tokens,
            sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        )
        sequence = Sequence.from_request(request, 0, max_model_len=1 << 16)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> dict[str, int]:
        """Request id -> computed tokens."""
        batch = self.scheduler.apply(self.scheduler.plan())
        self.scheduler.commit(batch, [7] * len(batch.chunks), STEP_S)
        return {chunk.sequence.request_id: chunk.num_tokens for chunk in batch.chunks}


def test_single_prompt_has_all_of_its_steps_and_decodes_have_none() -> None:
    steps = Steps()
    answered = steps.ask(10, max_tokens=50)
    steps.step()
    prompt, before_s = steps.ask(100), answered.own_s
    while steps.step().get("2"):
        pass
    assert prompt.status is SequenceStatus.FINISHED and prompt.own_s == 4 * STEP_S
    assert answered.own_s == before_s == STEP_S


@pytest.mark.parametrize("num_pages", [2000, 60])
def test_step_time_is_divided_among_its_prompts(num_pages: int) -> None:
    """With few pages, some prompts are preempted."""
    num_preemptions = sum(run_at_random(Random(seed), num_pages) for seed in range(20))
    assert (num_preemptions > 0) == (num_pages == 60)


def run_at_random(random: Random, num_pages: int) -> int:
    """Run a random workload; return the number of preemptions."""
    steps = Steps(num_pages=num_pages)
    sequences: dict[str, Sequence] = {}
    own_s: dict[str, float] = defaultdict(float)
    while len(sequences) < 12 or steps.scheduler.has_work():
        if len(sequences) < 12 and random.random() < 0.5:
            sequence = steps.ask(random.choice([1, 3, 33, 200]), max_tokens=random.choice([1, 40]))
            sequences[sequence.request_id] = sequence
        has_answer = {name: each.num_generated_tokens > 0 for name, each in sequences.items()}
        computed = steps.step()
        if max(computed.values(), default=1) == 1:
            continue
        prompts = {name: num for name, num in computed.items() if num > 1 or not has_answer[name]}
        for name, num in prompts.items():
            own_s[name] += STEP_S * num / sum(prompts.values())
    for name, each in sequences.items():
        assert each.own_s == pytest.approx(own_s[name]), name
    return steps.scheduler.num_preemptions


def test_step_time_is_divided_by_token_cost() -> None:
    steps = Steps(attention_mlp_crossover=100.0)
    late = steps.ask(200)
    for _ in range(5):
        steps.step()
    start, before_s = late.num_computed_tokens, late.own_s
    early = steps.ask(20)
    computed = steps.step()
    costs = [
        num * (1 + (first + num / 2) / 100) for num, first in ((computed["1"], start), (computed["2"], 0))
    ]
    assert late.own_s - before_s == pytest.approx(STEP_S * costs[0] / sum(costs))
    assert early.own_s == pytest.approx(STEP_S * costs[1] / sum(costs))
