from baton.cluster.cli.commands.status import MAX_LINES, queue_lines, refusals, table
from baton.messages.operations import GatewayStatus, Status
from baton.messages.status import OverloadLevel, QueueStatus, RouterStatus, TenantStatus
from baton.tenants import Refusal

ACME = TenantStatus(
    tenant="acme",
    weight=2.0,
    num_queued=3,
    num_active=4,
    oldest_wait_s=1.25,
    work_tokens=300,
    num_met=99,
    num_missed=1,
    num_degraded=5,
    refused={Refusal.SHED: 99},  # attempts: calls are the gateways' to count
)


def test_a_calm_cluster_without_tenants_has_nothing_to_tell() -> None:
    nameless = TenantStatus(tenant="", work_tokens=9)
    assert queue_lines(QueueStatus(tenants=(nameless,)), {}) == []


def test_the_rung_and_what_waits_are_told() -> None:
    queue = QueueStatus(level=OverloadLevel.SMALL_CHUNKS, num_queued=12, oldest_wait_s=3.44)
    assert queue_lines(queue, {}) == ["overload: small chunks, 12 wait, the oldest 3.4 s"]


def test_each_tenant_has_a_line_with_its_share_of_all_work() -> None:
    nameless, quiet = TenantStatus(tenant="", work_tokens=100), TenantStatus(tenant="quiet")
    first, *lines = queue_lines(
        QueueStatus(tenants=(ACME, nameless, quiet)), {"acme": {"shed": 7, "tokens_per_s": 2}}
    )
    assert first == "overload: calm, nobody waits"
    assert [line.split()[0] for line in lines] == ["tenant", "acme", "quiet"]
    assert lines[1].split() == (
        ["acme", "2", "75%", "3", "1.2", "s", "4", "99.0%", "5", "shed", "7", "tokens_per_s", "2"]
    )
    assert lines[2].split() == ["quiet", "1", "0%", "0", "-", "0", "-", "0", "0"]


def test_of_many_tenants_the_first_are_shown() -> None:
    many = tuple(TenantStatus(tenant=f"t{number}") for number in range(MAX_LINES + 3))
    lines = queue_lines(QueueStatus(tenants=many), {})
    assert len(lines) == MAX_LINES + 3 and lines[-1] == "and 3 more tenants, see --json"


def test_tenants_that_a_status_had_no_room_for_are_counted() -> None:
    lines = queue_lines(QueueStatus(tenants=(ACME,), num_left_out=7), {})
    assert lines[-1].startswith("and 7 tenants that are not told of")


def test_what_a_status_left_out_of_workers_is_said() -> None:
    lines = table(Status(left_out={"counters": 3, "workers": 2})).splitlines()
    assert lines[-2] == "for want of room this leaves out: 3 counters, 2 workers"


def test_baton_status_shows_them() -> None:
    queue = QueueStatus(level=OverloadLevel.SHED, tenants=(ACME,))
    lines = table(Status(routers=(RouterStatus(id="e" * 32, queue=queue),))).splitlines()
    assert "overload: shed, nobody waits" in lines and lines[-1] == "0 gateways, 0 requests under way"


def test_refusals_of_all_gateways_are_summed_and_a_tenant_that_only_gateways_know_is_shown() -> None:
    one = GatewayStatus(id="a" * 32, refused={"acme": {"shed": 2}, "new": {"max_concurrent_requests": 5}})
    other = GatewayStatus(id="b" * 32, refused={"acme": {"shed": 1, "tokens_per_s": 4}})
    refused = refusals([one, other])
    assert refused == {"acme": {"shed": 3, "tokens_per_s": 4}, "new": {"max_concurrent_requests": 5}}
    lines = queue_lines(QueueStatus(tenants=(ACME,)), refused)
    assert lines[-1].split() == ["new", "1", "0%", "0", "-", "0", "-", "0", "max_concurrent_requests", "5"]
