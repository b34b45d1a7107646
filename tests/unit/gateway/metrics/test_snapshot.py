from collections import Counter

import msgspec

from baton.gateway.metrics.metrics import Metrics
from baton.gateway.metrics.snapshot import ClusterSnapshot, ReadingWindow, read
from baton.messages.operations import GatewayStatus, Status
from baton.messages.status import OverloadLevel, QueueStatus, RouterStatus, TenantStatus
from baton.messages.workers import Address, Load, WorkerStatus
from tests.node_peers import a_worker_status, id_of


def counts(name: str = "g0", num_requests: int = 0, num_tokens: int = 0) -> Metrics:
    metrics = Metrics(gateway=name, events=Counter(replays_lost=3, opened=5))
    metrics.duration.add(0, num_requests)
    metrics.generated_tokens = num_tokens
    return metrics


def worker(name: str = "decode-0", **load: object) -> WorkerStatus:
    fields = {"num_running": 3, "pages": {"free": 16, "cached": 32, "active": 16}, **load}
    return a_worker_status(name, msgspec.convert(fields, Load), num_attempts=5)


def status(*workers: WorkerStatus, num_routed: int = 0, **fields: object) -> Status:
    queue = QueueStatus(
        level=OverloadLevel.SMALL_CHUNKS,
        num_queued=7,
        oldest_wait_s=1.5,
        tenants=(TenantStatus(tenant="acme", num_queued=7), TenantStatus(tenant="", num_queued=1)),
    )
    router = RouterStatus(id="e" * 32, queue=queue)
    router.routing.add(0, num_routed)
    return msgspec.structs.replace(Status(workers=workers, routers=(router,)), **fields)


def change(
    before: list[Metrics],
    after: list[Metrics],
    *,
    old: Status | None = None,
    new: Status | None = None,
    seconds: float = 2.0,
) -> ReadingWindow:
    new = new or Status()
    return ReadingWindow(read(10.0, before, old or Status()), read(10.0 + seconds, after, new), new)


def snapshot(gateways: list[Metrics], new: Status, old: Status | None = None) -> ClusterSnapshot:
    found = change(gateways, gateways, old=old or new, new=new)
    return found.snapshot("tiny", found.point())


def test_rates_are_over_the_time_between_the_readings() -> None:
    point = change([counts("g0", 10, 100)], [counts("g0", 30, 500)]).point()
    assert (point.time_s, point.requests_per_s, point.tokens_per_s) == (12.0, 10.0, 200.0)


def test_gateway_that_comes_or_goes_does_not_change_the_rates() -> None:
    assert change([counts("g0", 10)], [counts("g1", 500)]).point().requests_per_s == 0.0
    assert change([counts("g0", 10), counts("g1", 7)], [counts("g0", 13)]).point().requests_per_s == 1.5


def test_worker_that_started_again_has_no_rate() -> None:
    """Its id is another one, so that its counts, which begin again, are not compared."""
    old = status(worker("decode-0", num_tokens=900))
    new = status(worker("decode-1", num_tokens=10))
    assert snapshot([counts()], new, old).workers[0].tokens_per_s == 0.0


def test_no_percentiles_without_values() -> None:
    assert change([counts()], [counts()]).point().itl_s == ()


def test_reading_keeps_its_counts_while_the_gateway_goes_on() -> None:
    metrics = counts("g0", 10)
    before = read(10.0, [metrics], Status())
    metrics.duration.observe(1.0)
    metrics.ttft.observe(1.0)
    point = ReadingWindow(before, read(11.0, [metrics], Status()), Status()).point()
    assert point.requests_per_s == 1.0 and point.ttft_s != ()


def test_point_sums_the_workers_and_the_gateways_of_all_ports() -> None:
    other_port = GatewayStatus(id="f" * 32, num_open=4)
    new = status(worker("decode-0", num_waiting=1), worker("decode-1"), gateways=(other_port,))
    gateway = counts("g0")
    gateway.num_open = 3
    point = change([gateway], [gateway], new=new).point()
    assert point.pages == {"free": 32, "cached": 64, "active": 32}
    assert (point.num_running, point.num_waiting, point.num_queued, point.num_open) == (6, 1, 7, 7)


def test_transfers_are_rates_by_the_receiving_worker() -> None:
    to, other = id_of("decode-0"), id_of("decode-1")
    old = status(worker("prefill-0", kv_bytes=100, kv_bytes_to={to: 100, other: 7}))
    new = status(worker("prefill-0", kv_bytes=300, kv_bytes_to={to: 300, other: 7}))
    row = snapshot([counts()], new, old).workers[0]
    assert (row.sent_bytes_per_s, row.sent_to) == (100.0, {to: 100.0})


def test_tenants_join_their_counts_at_routers_and_gateways() -> None:
    gateways = [counts("g0"), counts("g1")]
    for gateway in gateways:
        gateway.tenant("acme").calls["answered"] += 2
    gateways[1].tenant("globex").generated_tokens = 9
    found = snapshot(gateways, status()).tenants
    assert [(row.status.tenant, row.status.num_queued) for row in found] == [("acme", 7), ("globex", 0)]
    assert (found[0].counts.calls, found[1].counts.generated_tokens) == ({"answered": 4}, 9)


def test_gateways_of_other_ports_are_known_by_their_reports() -> None:
    here = GatewayStatus(id="a" * 32, node="n0", pid=7, address=Address("127.0.0.1", 8000))
    there = GatewayStatus(id="b" * 32, node="n1", num_open=2)
    gateway = counts("aaaaaaaa", 12)
    gateway.forms.update(refused=3, too_long=1)
    rows = snapshot([gateway], status(gateways=(here, there))).gateways
    assert [(row.name, row.node, row.is_here, row.num_requests) for row in rows] == [
        ("aaaaaaaa", "n0", True, 12),
        ("bbbbbbbb", "n1", False, 0),
    ]
    assert (rows[0].address, rows[0].num_replays, rows[0].num_refused_forms) == ("127.0.0.1:8000", 3, 4)


def test_routers_show_the_requests_that_they_route() -> None:
    row = snapshot([counts()], status(num_routed=30), status(num_routed=10)).routers[0]
    assert (row.num_routed, row.routed_per_s, row.level, row.num_queued) == (30, 10.0, "small_chunks", 7)


def test_snapshot_without_a_status_is_empty() -> None:
    found = snapshot([counts()], Status())
    assert (found.workers, found.tenants, found.routers, found.level) == ([], [], [], "calm")


def test_snapshot_is_read_as_it_was_written() -> None:
    new = status(worker("decode-0", num_tokens=5), gateways=(GatewayStatus(id="a" * 32),))
    found = snapshot([counts("aaaaaaaa", 1)], new)
    assert msgspec.json.decode(msgspec.json.encode(found), type=ClusterSnapshot) == found
