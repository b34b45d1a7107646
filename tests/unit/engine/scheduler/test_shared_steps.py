"""Steps shared among scheduling keys: the cost cap, each prompt's part of the step times, and bursts."""

from collections import defaultdict
from random import Random

import pytest

from baton.engine.scheduler.sequence import Batch, Sequence, SequenceKey
from baton.engine.scheduler.step_planner import MAX_STRETCH, CostCap
from baton.fair_queue import HALF_LIFE_S, DecayedShares, Share
from tests.scheduling import BareScheduler

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


def chunks_of(batch: Batch) -> list[tuple[str, int, int]]:
    """(scheduling key, start, num_tokens) of each chunk."""
    return [(chunk.sequence.scheduling_key, chunk.start, chunk.num_tokens) for chunk in batch.chunks]


def answer(bare: BareScheduler, tenant: str, num_tokens: int) -> list[tuple[str, int, int]]:
    """Compute one prompt; return its chunks."""
    bare.ask(num_tokens, tenant)
    chunks = []
    while bare.scheduler.has_work():
        chunks += chunks_of(bare.step()[0])
    return chunks


@pytest.fixture
def bare() -> BareScheduler:
    return BareScheduler(STEP, attention_mlp_crossover=CROSSOVER, max_num_seqs=16)


@pytest.mark.parametrize("tenant", ["only", ""])
def test_only_key_has_whole_steps(bare: BareScheduler, tenant: str) -> None:
    answer(bare, tenant, 64)
    assert [num for *_, num in answer(bare, tenant, 4000)] == [STEP] * (4000 // STEP) + [4000 % STEP]


def test_long_prompt_leaves_half_of_its_steps_to_short_ones_and_seats_to_other_keys(
    bare: BareScheduler,
) -> None:
    for tenant in ("heavy", "light"):
        answer(bare, tenant, 64)
    bare.ask(4000, "heavy")
    while chunks_of(bare.step()[0])[0][1] < 2500:
        pass
    for _ in range(50):
        bare.ask(600, "heavy")
    short = [num for _, start, num in chunks_of(bare.step()[0]) if start < 2500]
    assert 0.4 * STEP <= sum(short) <= 0.6 * STEP and len(short) == 1
    assert bare.scheduler.num_waiting == 49
    bare.ask(100, "light")
    assert chunks_of(bare.step()[0])[0] == ("light", 0, 100)


# Step times.

STEP_S = 0.5


def step(bare: BareScheduler) -> dict[str, int]:
    """Request id -> computed tokens."""
    return {chunk.sequence.request_id: chunk.num_tokens for chunk in bare.step(STEP_S)[0].chunks}


@pytest.mark.parametrize("num_pages", [2000, 60])
def test_step_time_is_divided_among_its_prompts(num_pages: int) -> None:
    """With few pages, some prompts are preempted."""
    num_preemptions = sum(run_at_random(Random(seed), num_pages) for seed in range(20))
    assert (num_preemptions > 0) == (num_pages == 60)


def run_at_random(random: Random, num_pages: int) -> int:
    """Run a random workload; return the number of preemptions."""
    bare = BareScheduler(32, num_pages=num_pages, page_size=4, max_num_seqs=8)
    sequences: dict[str, Sequence] = {}
    own_s: dict[str, float] = defaultdict(float)
    used_s: dict[str, float] = defaultdict(float)
    while len(sequences) < 12 or bare.scheduler.has_work():
        if len(sequences) < 12 and random.random() < 0.5:
            num_tokens, max_tokens = random.choice([1, 3, 33, 200]), random.choice([1, 40])
            sequence = bare.ask(num_tokens, max_tokens=max_tokens)
            sequences[sequence.request_id] = sequence
        has_answer = {name: each.num_generated_tokens > 0 for name, each in sequences.items()}
        computed = step(bare)
        for name, num in computed.items():
            used_s[name] += STEP_S * num / sum(computed.values())
        if max(computed.values(), default=1) == 1:
            continue
        prompts = {name: num for name, num in computed.items() if num > 1 or not has_answer[name]}
        for name, num in prompts.items():
            own_s[name] += STEP_S * num / sum(prompts.values())
    for name, each in sequences.items():
        assert each.own_s == pytest.approx(own_s[name]), name
        assert each.used_s == pytest.approx(used_s[name]), name
    return bare.scheduler.num_preemptions


def test_step_time_is_divided_by_token_cost() -> None:
    bare = BareScheduler(32, attention_mlp_crossover=100.0)
    late = bare.ask(200)
    for _ in range(5):
        step(bare)
    start, before_s = late.num_computed_tokens, late.own_s
    early = bare.ask(20)
    computed = step(bare)
    costs = [cost(first, computed[name], 100.0) for name, first in (("1", start), ("2", 0))]
    assert late.own_s - before_s == pytest.approx(STEP_S * costs[0] / sum(costs))
    assert early.own_s == pytest.approx(STEP_S * costs[1] / sum(costs))


# Bursts of quiet scheduling keys beside a key that always wants more, in steps.

BURST_STEP_TOKENS = 128
NUM_STEPS = 128  # in a half-life
NUM_QUIET = 4
QUIET_LOAD = 0.5  # of all that can be computed
LONG = 2000


class Prefill:
    """Computes prompts to their first tokens and records the waits of the quiet keys in steps."""

    def __init__(self) -> None:
        self.bare = BareScheduler(BURST_STEP_TOKENS)
        self.began: dict[SequenceKey, int] = {}
        self.num_steps = 0
        self.num_computed = {"quiet": 0, "noisy": 0}
        self.waited: list[int] = []

    def add(self, tenant: str, num_tokens: int) -> None:
        sequence = self.bare.ask(num_tokens, tenant)
        if tenant != "noisy":
            self.began[sequence.key] = self.num_steps

    def step(self) -> None:
        self.num_steps += 1
        self.bare.clock.advance(HALF_LIFE_S / NUM_STEPS)
        batch, outputs = self.bare.step()
        for key, _, num_tokens in chunks_of(batch):
            self.num_computed[key.split("-")[0]] += num_tokens
        for output in outputs:
            began = self.began.get((output.request_id, output.choice))
            if began is not None:
                self.waited.append(self.num_steps - began)

    @property
    def num_noisy(self) -> int:
        return sum(each.scheduling_key == "noisy" for each in self.bare.scheduler.sequences())


def quiet_tenants(num_steps: int, seed: int, *, is_noisy: bool) -> list[int]:
    """The steps that each prompt of a quiet key took, sorted."""
    random, prefill, due = Random(seed), Prefill(), 0.0
    mean_tokens = 305
    while prefill.num_steps < num_steps:
        while due <= prefill.num_steps:
            due += random.expovariate(QUIET_LOAD * BURST_STEP_TOKENS / mean_tokens)
            num_tokens = max(16, min(LONG, round(random.lognormvariate(5.4, 0.8))))
            prefill.add(f"quiet-{random.randrange(NUM_QUIET)}", num_tokens)
        while is_noisy and prefill.num_noisy < 3:
            prefill.add("noisy", LONG)
        prefill.step()
    return sorted(prefill.waited)


def test_busy_key_hardly_delays_bursts_of_quiet_keys() -> None:
    for seed in range(2):
        alone = quiet_tenants(1500, seed, is_noisy=False)
        beside = quiet_tenants(1500, seed, is_noisy=True)
        assert len(beside) > 0.98 * len(alone)
        slow_alone, slow = (waited[int(0.97 * len(waited))] for waited in (alone, beside))
        assert slow <= 1.1 * slow_alone + 1, (seed, slow, slow_alone)


def test_burst_is_served_at_once_up_to_a_bound() -> None:
    prefill = Prefill()
    for _ in range(80):
        prefill.add("noisy", LONG)
    for _ in range(4 * NUM_STEPS):
        prefill.step()
    noisy_before = prefill.num_computed["noisy"]
    for _ in range(40):
        prefill.add("quiet-0", LONG)
    for _ in range(4 * NUM_STEPS):
        prefill.step()
    noisy = prefill.num_computed["noisy"] - noisy_before
    most = NUM_STEPS * BURST_STEP_TOKENS  # of a key without recent work: see `DecayedShares`
    assert prefill.num_computed["quiet"] - noisy <= most + 2 * BURST_STEP_TOKENS
    assert prefill.num_computed["quiet"] - noisy >= 0.9 * most


def test_sequence_counts_the_steps_that_compute_it_and_the_time_that_it_is_preempted() -> None:
    bare = BareScheduler(64)
    long, short = bare.ask(100, max_tokens=3), bare.ask(8, max_tokens=2)

    def step() -> None:
        batch = bare.scheduler.apply(bare.scheduler.plan())
        bare.clock.advance(STEP_S)
        tokens = [7 if chunk.samples else None for chunk in batch.chunks]
        bare.scheduler.commit(batch, tokens, 2 * STEP_S, computed_s=STEP_S)

    step()
    first_s = long.computed_s, short.computed_s
    assert sorted(first_s) in ([0.0, STEP_S], [STEP_S, STEP_S])
    bare.scheduler.preempt(long.key)
    step()  # without it
    assert long.is_queued and long.computed_s == first_s[0]
    num_steps = 0
    while long.finish_reason is None:
        step()
        num_steps += 1
    assert long.computed_s == pytest.approx(first_s[0] + num_steps * STEP_S)
    assert long.preempted_s == pytest.approx(STEP_S) and short.preempted_s == 0.0
