"""Objectives and classes that headers ask for."""

import pytest

from baton.gateway.api.errors import ApiError
from baton.gateway.tenants.objectives import read_objectives
from baton.gateway.tenants.tenants import Tenant
from baton.tenants import Degradation, Quotas, SchedulingKey, Sla, TenantPolicy


def a_tenant(*, rank: int = 1, **policy: object) -> Tenant:
    return Tenant(
        name="acme",
        cache_salt=b"s" * 16,
        policy=TenantPolicy(**policy),  # type: ignore[arg-type]
        classes=("fast", "normal", "batch"),
        rank=rank,
    )


def asked(tenant: Tenant, **headers: str) -> tuple[Sla, SchedulingKey]:
    """Return the objectives of a request with these headers."""
    named = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return read_objectives({"headers": named}, tenant)


def test_first_of_repeated_headers_counts() -> None:
    twice = [(b"x-slo-ttft-ms", b"5"), (b"x-slo-ttft-ms", b"7"), (b"accept", b"x")]
    assert read_objectives({"headers": twice}, a_tenant())[0] == Sla(ttft_ms=5)


def test_request_without_headers_has_the_objectives_of_its_tenant() -> None:
    sla = Sla(ttft_ms=500, tpot_ms=50, deadline_ms=1000)
    assert asked(a_tenant(sla=sla))[0] == sla


@pytest.mark.parametrize("prefix", ["x_slo", "x_llm_d_slo"])
def test_headers_loosen_and_never_tighten_objectives(prefix: str) -> None:
    tenant = a_tenant(sla=Sla(ttft_ms=500, tpot_ms=50, deadline_ms=1000))
    sla, _ = asked(tenant, **{f"{prefix}_ttft_ms": "800", f"{prefix}_tpot_ms": "1"})
    assert sla == Sla(ttft_ms=800, tpot_ms=50, deadline_ms=1000)


def test_headers_set_objectives_that_the_tenant_lacks() -> None:
    assert asked(a_tenant(), x_slo_ttft_ms="1.5")[0] == Sla(ttft_ms=1.5)


def test_header_of_baton_precedes_the_header_of_llm_d() -> None:
    assert asked(a_tenant(), x_llm_d_slo_ttft_ms="7", x_slo_ttft_ms="9")[0] == Sla(ttft_ms=9)


@pytest.mark.parametrize("value", ["", "0", "-1", "nan", "inf", "1e99", "fast", "86400001"])
@pytest.mark.parametrize("name", ["x_slo_ttft_ms", "x_slo_tpot_ms", "x_llm_d_slo_ttft_ms"])
def test_header_without_milliseconds_is_refused(name: str, value: str) -> None:
    with pytest.raises(ApiError, match="expected milliseconds") as refused:
        asked(a_tenant(), **{name: value})
    assert refused.value.status == 400 and refused.value.param == name.replace("_", "-")


@pytest.mark.parametrize(("name", "rank"), [(None, 1), ("fast", 1), ("normal", 1), ("batch", 2)])
def test_header_lowers_and_never_raises_the_class(name: str | None, rank: int) -> None:
    headers = {"x_baton_priority": name} if name else {}
    assert asked(a_tenant(), **headers)[1].rank == rank


def test_unknown_class_is_refused_with_the_nearest() -> None:
    with pytest.raises(ApiError, match="no class 'bach'; did you mean 'batch'") as refused:
        asked(a_tenant(), x_baton_priority="bach")
    assert refused.value.status == 400


@pytest.mark.parametrize(
    ("name", "wishes"),
    [("x_slo_ttft_ms", False), ("x_llm_d_slo_ttft_ms", False), ("x_slo_tpot_ms", True), ("x_other", False)],
)
def test_objective_beyond_the_promises_of_the_tenant_is_marked(name: str, wishes: bool) -> None:
    tenant = a_tenant(sla=Sla(ttft_ms=500))
    assert asked(tenant, **{name: "900"})[1].has_unpromised_sla is wishes


def test_scheduling_key_has_the_policy_of_the_tenant() -> None:
    tenant = a_tenant(
        rank=0,
        weight=4.0,
        quotas=Quotas(max_kv_pages=9),
        degradation=Degradation(may_shed=False),
        max_queue_delay_ms=5.0,
    )
    _, scheduling_key = asked(tenant)
    assert (scheduling_key.weight, scheduling_key.rank, scheduling_key.max_queue_delay_ms) == (4.0, 0, 5.0)
    assert scheduling_key.quotas.max_kv_pages == 9 and not scheduling_key.degradation.may_shed
