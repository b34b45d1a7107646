"""How much of a step an account beyond its share may have, and who may have all of it."""

from math import inf
from pathlib import Path

import msgspec
import pytest

from baton.clock import ManualClock
from baton.config.engine import SchedulerConfig
from baton.engine.cache.host_tier import HostTier
from baton.engine.cache.page_pool import PagePool
from baton.engine.cache.prefix_cache import PrefixCache
from baton.engine.models.parameters import attention_mlp_crossover
from baton.engine.models.registry import read_model_config
from baton.engine.scheduler.accounts import Account, Accounts
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.sequence import Sequence
from baton.engine.scheduler.step_planner import MAX_STRETCH, CostCap
from baton.request import Request, SamplingParams
from baton.tenants import SchedulingKey
from tests.tiny_models import tiny_config

PARITY, STEP = 500.0, 256


def two() -> tuple[Accounts, Account, Account]:
    """One that is beyond its share, and another."""
    accounts = Accounts()
    heavy, light = accounts.open("heavy", SchedulingKey()), accounts.open("light", SchedulingKey())
    accounts.charge([(heavy, 900), (light, 100)], 0.0)
    return accounts, heavy, light


def cost(start: int, num_tokens: int, parity: float) -> float:
    """Brute force: in first tokens."""
    return sum(1 + (position + 0.5) / parity for position in range(start, start + num_tokens))


@pytest.mark.parametrize("parity", [100.0, 480.0, 3072.0, 26_600.0])
@pytest.mark.parametrize("start", [0, 100, 1000, 3500, 100_000])
@pytest.mark.parametrize("budget", [1, 128, 256, 8192])
def test_a_step_of_one_beyond_its_share_costs_no_more_than_it_may(
    parity: float, start: int, budget: int
) -> None:
    accounts, heavy, light = two()
    cost_cap = CostCap(accounts, parity)
    most = cost_cap.most(heavy, start, budget)
    assert 1 <= most <= budget
    assert most == 1 or cost(start, most, parity) <= MAX_STRETCH * budget
    assert most == budget or cost(start, most + 1, parity) > MAX_STRETCH * budget
    assert cost_cap.most(light, start, budget) == budget


def test_what_is_computed_takes_of_the_budget_what_it_costs() -> None:
    accounts, heavy, light = two()
    cost_cap = CostCap(accounts, PARITY)
    assert cost_cap.price(heavy, 0, 100, STEP) == cost_cap.price(light, 3000, 100, STEP) == 100
    price = cost_cap.price(heavy, 3000, 40, STEP)
    assert cost(3000, 40, PARITY) / MAX_STRETCH <= price <= cost(3000, 40, PARITY) / MAX_STRETCH + 1
    assert cost_cap.price(heavy, 3000, 100, STEP) == STEP  # never more than there is
    for budget in (STEP, STEP // 2):
        most = cost_cap.most(heavy, 3000, budget)
        assert 0.9 * budget <= cost_cap.price(heavy, 3000, most, budget) <= budget


def test_nothing_is_held_back_where_all_tokens_cost_the_same() -> None:
    accounts, heavy, _ = two()
    assert (
        CostCap(accounts).most(heavy, 10**6, STEP)
        == CostCap(accounts).price(heavy, 10**6, STEP, STEP)
        == STEP
    )


def test_parity_is_of_operations(tmp_path: Path) -> None:
    config = read_model_config(Path(tiny_config(tmp_path / "model").model))
    weights = config.num_layers * (
        2 * config.hidden_size * config.head_dim * (config.num_heads + config.num_kv_heads)
        + 3 * config.hidden_size * config.intermediate_size
    )
    for_each_token_before = 4 * config.num_layers * config.num_heads * config.head_dim
    assert attention_mlp_crossover(config) == 2 * weights / for_each_token_before
    windows = (4096,) * config.num_layers
    assert attention_mlp_crossover(msgspec.structs.replace(config, sliding_windows=windows)) == inf


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
        """Whose tokens, from where on, and how many."""
        batch = self.scheduler.apply(self.scheduler.plan())
        chunks = [(chunk.sequence.account_name, chunk.start, chunk.num_tokens) for chunk in batch.chunks]
        self.scheduler.commit(batch, [7] * len(batch.chunks))
        return chunks

    def finish(self) -> list[tuple[str, int, int]]:
        chunks = []
        while self.scheduler.has_work():
            chunks += self.step()
        return chunks


def test_a_long_prompt_ends_in_short_steps_where_there_are_other_tenants() -> None:
    worker = Worker(PARITY)
    for tenant, num_tokens in (("heavy", 64), ("light", 64), ("heavy", 4000)):
        worker.ask(tenant, num_tokens)
        chunks = worker.finish()
    assert sum(num for *_, num in chunks) == 4000 and chunks[0][2] == STEP
    assert max(cost(start, num, PARITY) for _, start, num in chunks[-5:]) <= MAX_STRETCH * STEP


@pytest.mark.parametrize("tenant", ["only", ""])
def test_a_tenant_that_nobody_else_was_beside_has_whole_steps(tenant: str) -> None:
    worker = Worker(PARITY)
    worker.ask(tenant, 64)
    worker.finish()
    worker.ask(tenant, 4000)
    assert [num for *_, num in worker.finish()] == [STEP] * (4000 // STEP) + [4000 % STEP]


def test_a_long_prompt_leaves_half_of_its_steps_to_short_ones_and_seats_to_others() -> None:
    worker = Worker(PARITY)
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
