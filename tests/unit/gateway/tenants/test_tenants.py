import logging
import os
from pathlib import Path

import pytest

from baton.clock import ManualClock
from baton.errors import ConfigError
from baton.gateway.api.errors import ApiError
from baton.gateway.tenants.tenants import (
    SETTLE_S,
    Tenant,
    Tenants,
    TenantsWatch,
    cache_salt,
    key_digest,
    read_objectives,
)
from baton.messages.bounds import Kind
from baton.rpc.auth import KeyRing
from baton.tenants import Degradation, Quotas, SchedulingKey, Sla, TenantPolicy
from tests.fakes import JumpingClock

KEY, NEW_KEY = b"k" * 32, b"n" * 32
GOOD = f"sha256:{key_digest('good').hex()}"
OTHER = f"sha256:{key_digest('other').hex()}"


def tenants(path: Path, text: str) -> Tenants:
    (path / "tenants.yaml").write_text(text)
    return Tenants.from_file(path / "tenants.yaml", KEY)


def salt_of(found: Tenants) -> bytes:
    tenant = found.find("good")
    assert tenant is not None
    return tenant.cache_salt


def test_key_finds_its_tenant(tmp_path: Path) -> None:
    found = tenants(
        tmp_path, f'tenants: {{acme: {{keys: ["{GOOD}"]}}, zeta: {{keys: ["{OTHER}"], models: [tiny]}}}}'
    )
    acme, zeta = found.find("good"), found.find("other")
    assert acme is not None and acme.name == "acme" and acme.may_use("anything")
    assert zeta is not None and zeta.may_use("tiny") and not zeta.may_use("large")
    assert acme.cache_salt != zeta.cache_salt
    for wrong in ("", "goo", "good ", "Good", "\udcff", GOOD):
        assert found.find(wrong) is None


def test_without_a_file_every_client_is_one_tenant() -> None:
    found = Tenants(KEY)
    assert not found.need_keys
    assert found.find("") == found.find("anything") is not None


def test_salts_depend_on_the_cluster_key() -> None:
    assert cache_salt(KEY, "a") != cache_salt(b"x" * 32, "a")
    assert len(cache_salt(KEY, "a")) == 16


@pytest.mark.parametrize("text", ["tenants: {}", "tenants: {a: {keys: []}}"])
def test_file_without_keys_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="at least one tenant"):
        tenants(tmp_path, text)


def test_rotation_of_the_cluster_key_changes_the_salts(tmp_path: Path) -> None:
    (tmp_path / "tenants.yaml").write_text(f'tenants: {{acme: {{keys: ["{GOOD}"]}}}}')
    ring = KeyRing.of(KEY, Kind.GATEWAY)
    found = [Tenants.from_file(tmp_path / "tenants.yaml", ring), Tenants(ring)]
    before = [salt_of(each) for each in found]
    ring.replace(KeyRing.of((NEW_KEY, KEY), Kind.GATEWAY).generations)
    after = [salt_of(each) for each in found]
    ring.replace(KeyRing.of(NEW_KEY, Kind.GATEWAY).generations)
    assert [salt_of(each) for each in found] == after
    assert not {*before} & {*after}


# Objectives and classes of headers.


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


# The tenants file that changes.


def text(**keys: str) -> str:
    """Return the text of a tenants file in which each tenant has one key."""
    tenants = "".join(
        f"  {name}:\n    keys: ['sha256:{key_digest(key).hex()}']\n" for name, key in keys.items()
    )
    return f"tenants:\n{tenants}"


class Watched:
    def __init__(self, folder: Path) -> None:
        self.path = folder / "tenants.yaml"
        self.num_writes = 0
        self.write(text(acme="old"))
        self.clock = JumpingClock(1000.0)
        self.watch = TenantsWatch(self.path, KEY, self.clock)

    def write(self, content: str) -> None:
        """In place, each a second after the one before: a file system may tell no finer times apart."""
        self.path.write_text(content)
        self.num_writes += 1
        os.utime(self.path, (self.num_writes, self.num_writes))

    def settle(self) -> bool:
        """Look at the file twice, SETTLE_S apart."""
        self.watch.look()
        self.clock.advance(SETTLE_S)
        return self.watch.look()

    def lets_in(self, key: str) -> bool:
        return self.watch.tenants.find(key) is not None


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path)


def test_changed_file_is_taken_once_it_has_settled(watched: Watched) -> None:
    watched.write(text(acme="new"))
    assert not watched.watch.look(), "it may be half written"
    assert watched.lets_in("old")
    watched.clock.advance(SETTLE_S)
    assert watched.watch.look()
    assert watched.lets_in("new") and not watched.lets_in("old")
    assert not watched.settle() and watched.watch.counters["taken"] == 1


def test_file_that_keeps_changing_is_not_taken(watched: Watched) -> None:
    whole = text(acme="new", zeta="other")
    for end in range(10, len(whole) - 1, 10):
        watched.write(whole[:end])
        watched.clock.advance(SETTLE_S)
        assert not watched.watch.look()
    assert watched.lets_in("old") and not watched.watch.counters["refused"]


def test_wrong_file_changes_nothing_and_is_logged_once(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    watched.write(text(acme="new")[:-5])
    with caplog.at_level(logging.WARNING):
        assert not watched.settle() and not watched.settle()
    assert watched.lets_in("old") and not watched.lets_in("new")
    (record,) = caplog.records
    assert "stay what they were" in record.getMessage() and "tenants.yaml" in record.getMessage()
    watched.write(text(acme="new"))
    assert watched.settle() and watched.lets_in("new")


def test_missing_file_changes_nothing(watched: Watched, caplog: pytest.LogCaptureFixture) -> None:
    watched.path.unlink()
    assert not watched.settle() and not watched.settle()
    assert watched.lets_in("old") and len(caplog.records) == 1
    watched.write(text(acme="new"))
    assert watched.settle() and watched.lets_in("new")


def test_last_key_can_be_revoked(watched: Watched) -> None:
    watched.write("tenants: {acme: {keys: []}}")
    assert watched.settle()
    assert watched.watch.tenants.need_keys and not watched.lets_in("old") and not watched.lets_in("")


def test_clock_that_jumps_back_only_delays(watched: Watched) -> None:
    watched.write(text(acme="new"))
    watched.watch.look()
    watched.clock.jump(-500)
    assert not watched.watch.look()
    watched.clock.advance(2 * SETTLE_S)
    assert watched.watch.look() and watched.lets_in("new")


def test_missing_file_at_the_start_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        TenantsWatch(tmp_path / "none.yaml", KEY, ManualClock())
