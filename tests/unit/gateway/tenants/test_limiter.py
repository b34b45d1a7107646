from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.adapters import Adapter
from baton.config.gateway import GatewaySettings
from baton.errors import Overloaded, Refused
from baton.gateway.api.call import Call
from baton.gateway.api.errors import ApiError
from baton.gateway.metrics.metrics import MAX_TENANTS, OTHERS, Metrics, TenantCounts
from baton.gateway.tenants.budget import Budget
from baton.gateway.tenants.limiter import Limiter, Permit
from baton.gateway.tenants.tenants import Tenant
from baton.tenants import Quotas, Refusal, SchedulingKey, Sla
from tests.unit.gateway.calls import PROMPT, call


def a_call(tenant: str = "acme", *, most: int | None = None, **fields: Any) -> Call:
    scheduling_key = SchedulingKey(quotas=Quotas(max_concurrent_requests=most))
    return call(tenant=Tenant(name=tenant, cache_salt=b"s" * 16), scheduling_key=scheduling_key, **fields)


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


NUM_SLOTS = 1000


@pytest.fixture
def limiter(metrics: Metrics) -> Limiter:
    return Limiter(metrics, GatewaySettings(max_open_requests=NUM_SLOTS))


def test_calls_are_counted_by_adapter_before_and_after_their_first_token(
    limiter: Limiter, metrics: Metrics
) -> None:
    adapter = Adapter("/adapters/sql", b"d" * 16)
    first, second = (limiter.enter(a_call(model="sql", adapter=adapter)) for _ in range(2))
    limiter.enter(a_call()).tokens(0, 1, 1.0)
    assert (metrics.waiting_adapters, metrics.running_adapters) == ({"sql": 2}, {})
    for _ in range(2):
        first.tokens(0, 1, 1.0)
    assert (metrics.waiting_adapters, metrics.running_adapters) == ({"sql": 1}, {"sql": 1})
    first.leave("answered", 0, 2.0)
    second.leave("gone", 0, 2.0)
    assert not metrics.waiting_adapters and not metrics.running_adapters


def fill(limiter: Limiter, *tenants: str, num_choices: int = 1) -> dict[str, list[Permit]]:
    """Admit calls of the tenants in turn until each is refused."""
    visits: dict[str, list[Permit]] = {tenant: [] for tenant in tenants}
    asking = list(tenants)
    while asking:
        for tenant in list(asking):
            try:
                visits[tenant].append(limiter.enter(a_call(tenant, num_choices=num_choices)))
            except Overloaded:
                asking.remove(tenant)
    return visits


def test_greedy_tenant_leaves_slots_to_others(limiter: Limiter, metrics: Metrics) -> None:
    noisy = fill(limiter, "noisy")["noisy"]
    assert len(noisy) == 800
    for number in range(50):
        limiter.enter(a_call(f"quiet {number}"))
    with pytest.raises(Overloaded, match="800 of this gateway's 1000 slots") as full:
        limiter.enter(a_call("noisy"))
    assert full.value.retry_after_s > 0
    assert counted(metrics, "noisy").calls == {"no_room": 2}
    for permit in noisy[:100]:
        permit.leave("answered", 0, 0.0)
    limiter.enter(a_call("noisy"))


def test_without_tenants_all_slots_may_be_taken(limiter: Limiter) -> None:
    assert len(fill(limiter, "")[""]) == NUM_SLOTS


def counted(metrics: Metrics, tenant: str = "acme") -> TenantCounts:
    return metrics.tenants[tenant]


def test_tokens_and_ends_are_counted(limiter: Limiter, metrics: Metrics) -> None:
    permit = limiter.enter(a_call())
    permit.tokens(0, 3, 1.0)
    assert counted(metrics).num_open == 1
    permit.leave("answered", 0, 0.0)
    limiter.enter(a_call()).leave("failed", 0, 0.0)
    counts = counted(metrics)
    assert (counts.num_open, counts.generated_tokens) == (0, 3)
    assert counts.prompt_tokens == 2 * len(PROMPT.token_ids)
    assert counts.calls == {"answered": 1, "failed": 1}


@pytest.mark.parametrize(
    ("first_s", "last_s", "met", "missed"),
    [
        (10.4, 10.7, {"ttft": 1, "tpot": 1, "deadline": 1}, {}),
        (10.6, 10.9, {"tpot": 1, "deadline": 1}, {"ttft": 1}),
        (10.4, 11.0, {"ttft": 1, "deadline": 1}, {"tpot": 1}),
        (12.5, 12.6, {"tpot": 1}, {"ttft": 1, "deadline": 1}),
    ],
)
def test_objectives_are_kept_or_missed(
    limiter: Limiter,
    metrics: Metrics,
    first_s: float,
    last_s: float,
    met: dict[str, int],
    missed: dict[str, int],
) -> None:
    sla = Sla(ttft_ms=500, tpot_ms=100, deadline_ms=2000)
    permit = limiter.enter(a_call(sla=sla, arrival_s=10.0))
    permit.tokens(0, 1, first_s)
    permit.tokens(0, 4, last_s)
    permit.leave("answered", 0, 0.0)
    assert (counted(metrics).met, counted(metrics).missed) == (met, missed)


def test_refused_or_failed_call_misses_its_objective(limiter: Limiter, metrics: Metrics) -> None:
    for outcome in ("shed", "failed"):
        limiter.enter(a_call(sla=Sla(ttft_ms=500, tpot_ms=50))).leave(outcome, 0, 0.0)
    assert counted(metrics).missed == {"ttft": 2} and not counted(metrics).met


def test_client_that_left_early_misses_no_objective(limiter: Limiter, metrics: Metrics) -> None:
    limiter.enter(a_call(sla=Sla(ttft_ms=500))).leave("gone", 0, 0.0)
    assert not counted(metrics).missed and counted(metrics).calls == {"gone": 1}


def test_tenants_above_max_tenants_are_counted_together(limiter: Limiter, metrics: Metrics) -> None:
    for number in range(MAX_TENANTS + 50):
        limiter.enter(a_call(f"t{number}")).leave("answered", 0, 0.0)
    counts = metrics.tenants
    assert len(counts) == MAX_TENANTS + 1
    assert counts[OTHERS].calls == {"answered": 50}


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["acme", "zeta"]), st.integers(1, 3), st.integers(1, 5), st.booleans()),
        max_size=40,
    )
)
def test_quota_is_never_exceeded_and_every_call_is_counted(
    calls: list[tuple[str, int, int, bool]],
) -> None:
    """Each comes with the quota that its tenant has by then; each True ends the oldest that is open."""
    metrics = Metrics()
    limiter, visits = (
        Limiter(metrics, GatewaySettings(max_open_requests=NUM_SLOTS)),
        list[tuple[str, int, Permit]](),
    )
    for tenant, num_choices, most, ends_one in calls:
        before = sum(number for name, number, _ in visits if name == tenant)
        try:
            permit = limiter.enter(a_call(tenant, most=most, num_choices=num_choices))
        except Refused:
            assert num_choices <= most < before + num_choices
        except ApiError as refused:
            assert num_choices > most and refused.status == 400
            assert f"{num_choices} answers, its tenant may have {most}" in str(refused)
        else:
            assert before + num_choices <= most
            visits.append((tenant, num_choices, permit))
        if ends_one and visits:
            visits.pop(0)[2].leave("answered", 0, 0.0)
        for name, counts in metrics.tenants.items():
            num_open = sum(number for owner, number, _ in visits if owner == name)
            assert counts.num_open == num_open


NUM_BYTES = 1000


@pytest.fixture
def budget(metrics: Metrics) -> Budget:
    return Budget(metrics, NUM_BYTES, Refusal.MAX_INPUT_BYTES)


def test_charge_is_released_after_an_error(budget: Budget) -> None:
    for _ in range(3):
        with pytest.raises(KeyError), budget.charge("", Quotas()) as charge:
            charge.add(NUM_BYTES)
            with pytest.raises(Overloaded, match="0 are free, 1 are needed"):
                charge.add(1)
            assert charge.amount == NUM_BYTES
            raise KeyError


def test_quota_bounds_the_bytes_of_all_calls_of_a_tenant(budget: Budget, metrics: Metrics) -> None:
    quotas = Quotas(max_input_bytes=100)
    with budget.charge("acme", quotas) as one, budget.charge("acme", quotas) as other:
        one.add(60)
        with pytest.raises(Refused, match="60 are taken and 50 more are needed") as later:
            other.add(50)
        with pytest.raises(Refused) as never:
            other.add(101)
        assert later.value.retry_after_s > 0 and never.value.retry_after_s == 0
        assert counted(metrics, "acme").calls == {"max_input_bytes": 2}
    with budget.charge("acme", quotas) as again:
        again.add(100)


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["acme", "zeta", ""]), st.integers(0, 3), st.integers(0, 600)), max_size=40
    )
)
def test_charges_never_add_up_to_more_than_the_budget(steps: list[tuple[str, int, int]]) -> None:
    budget = Budget(Metrics(), NUM_BYTES, Refusal.MAX_INPUT_BYTES)
    with ExitStack() as ends:
        charges = {
            (tenant, number): ends.enter_context(budget.charge(tenant, Quotas(max_input_bytes=700)))
            for tenant in ("acme", "zeta", "")
            for number in range(4)
        }
        for tenant, number, num_bytes in steps:
            before = charges[tenant, number].amount
            try:
                charges[tenant, number].set(num_bytes)
            except (Refused, Overloaded):
                assert charges[tenant, number].amount == before
            assert sum(each.amount for each in charges.values()) <= NUM_BYTES
            for name in ("acme", "zeta", ""):
                assert sum(each.amount for (of, _), each in charges.items() if of == name) <= 700
    with budget.charge("", Quotas()) as whole:
        whole.add(NUM_BYTES)
