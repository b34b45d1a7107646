from collections.abc import Mapping

import msgspec

from baton.cluster.cli import output
from baton.cluster.cli.commands.status import MAX_LINES, parts_of, queue_parts, refusals
from baton.messages.operations import GatewayStatus, Status
from baton.messages.status import (
    OverloadLevel,
    QueueStatus,
    RouterStatus,
    RoutingTimes,
    TenantStatus,
)
from baton.messages.workers import Address, Load
from baton.tenants import Refusal
from tests.node_peers import a_worker, a_worker_status, id_of

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


def lines_of(status: Status) -> list[str]:
    return output.rendered(*parts_of(status)).splitlines()


def queue_lines(queue: QueueStatus, refused: Mapping[str, Mapping[str, int]] | None = None) -> list[str]:
    return output.rendered(*queue_parts(queue, refused or {})).splitlines()


def test_each_worker_has_a_line() -> None:
    load = Load(
        num_running=3,
        num_waiting=1,
        pages={"free": 60, "active": 4, "leased": 0},
        prefix_queries_tokens=200,
        prefix_hits_tokens=50,
        num_tokens=1234,
    )
    placed = msgspec.structs.replace(a_worker("decode-0"), node="host-7/0123abcd", pid=4711)
    status = Status(
        workers=(
            a_worker_status(placed, load, num_attempts=4),
            a_worker_status("prefill-0", is_draining=True),
        ),
        num_gateways=2,
        num_attempts=4,
    )
    lines = lines_of(status)
    assert lines[0].split()[:7] == ["worker", "role", "node", "pid", "tp", "pp", "running"]
    assert lines[1].split()[:6] == ["decode-0", "decode", "host-7/0123abcd", "4711", "1", "1"]
    assert lines[1].split()[6:12] == ["3", "1", "0", "0", "4", "1234"]
    assert lines[1].endswith("25%   free 60 active 4 of 64 x 16 tokens")  # states without pages are left out
    assert lines[2].startswith("prefill-0 (draining)  prefill  -                -  ")
    assert lines[3] == "2 gateways, 4 requests under way"


def test_workers_of_several_models_have_their_model_in_a_column() -> None:
    workers = tuple(a_worker_status(a_worker(f"{model}-decode-0", model=model)) for model in ("a", "b"))
    lines = lines_of(Status(workers=workers))
    assert [line.split()[:3] for line in lines[:3]] == [
        ["worker", "model", "role"],
        ["a-decode-0", "a", "decode"],
        ["b-decode-0", "b", "decode"],
    ]


def test_workers_are_in_the_order_of_their_names_and_numbers() -> None:
    names = ("prefill-0", "decode-10", "lone", "decode-2")
    workers = tuple(map(a_worker_status, names))
    first_words = [line.split()[0] for line in lines_of(Status(workers=workers))]
    assert first_words == ["worker", "decode-2", "decode-10", "lone", "prefill-0", "0"]


def test_each_router_has_a_line() -> None:
    routing = RoutingTimes([0, 98, 0, 2])
    counters = {"decisions": 200, "blind_decisions": 1}
    routers = (
        RouterStatus(id=id_of("a"), redis="up", routing=routing, counters=counters),
        RouterStatus(id=id_of("b"), redis="down"),
        RouterStatus(id=id_of("c")),
    )
    lines = lines_of(Status(routers=routers))
    assert lines[1:] == [
        f"router {id_of('a')[:8]}: 100 routed, 99% of them in 1 ms, 0.5% blindly, Redis is up",
        f"router {id_of('b')[:8]}: 0 routed, REDIS IS DOWN",
        f"router {id_of('c')[:8]}: 0 routed",
        "0 gateways, 0 requests under way",
    ]


def test_gateways_and_routers_have_a_line_with_their_node_and_process() -> None:
    gateway = GatewayStatus(
        id=id_of("a"), node="host-1", pid=12, address=Address("0.0.0.0", 8000), num_open=3, num_refused=317
    )
    router = RouterStatus(id=id_of("b"), node="host-2", pid=13)
    lines = lines_of(Status(routers=(router,), gateways=(gateway,), num_gateways=1))
    assert lines[1:3] == [
        f"router {id_of('b')[:8]} on host-2, pid 13: 0 routed",
        f"gateway {id_of('a')[:8]} on host-1, pid 12, clients at 0.0.0.0:8000: 3 calls open, 317 refused",
    ]


def test_calm_cluster_without_tenants_shows_no_queue() -> None:
    nameless = TenantStatus(tenant="", work_tokens=9)
    assert queue_lines(QueueStatus(tenants=(nameless,))) == []


def test_overload_level_and_waiting_requests_are_shown() -> None:
    queue = QueueStatus(level=OverloadLevel.SMALL_CHUNKS, num_queued=12, oldest_wait_s=3.44)
    status = Status(routers=(RouterStatus(id="e" * 32, queue=queue),))
    assert lines_of(status)[1] == "overload: small chunks, 12 wait, the oldest 3.4 s"


def test_each_tenant_has_a_line_with_its_share_of_all_work() -> None:
    nameless, quiet = TenantStatus(tenant="", work_tokens=100), TenantStatus(tenant="quiet")
    first, *lines = queue_lines(
        QueueStatus(tenants=(ACME, nameless, quiet)), {"acme": {"shed": 7, "tokens_per_s": 2}}
    )
    assert first == "overload: calm, no request waits"
    assert [line.split()[0] for line in lines] == ["tenant", "acme", "quiet"]
    assert lines[1].split() == (
        ["acme", "2", "75%", "3", "1.2", "s", "4", "99.0%", "5", "shed", "7", "tokens_per_s", "2"]
    )
    assert lines[2].split() == ["quiet", "1", "0%", "0", "-", "0", "-", "0", "0"]


def test_first_of_many_tenants_are_shown() -> None:
    many = tuple(TenantStatus(tenant=f"t{number}") for number in range(MAX_LINES + 3))
    *lines, further, left_out = queue_lines(QueueStatus(tenants=many, num_left_out=7))
    assert len(lines) == MAX_LINES + 2 and further == "and 3 more tenants, see --json"
    assert left_out.startswith("and 7 more tenants, for which")


def test_entries_without_room_are_counted() -> None:
    lines = lines_of(Status(left_out={"counters": 3, "workers": 2}))
    assert lines[-2] == "the status has no room for: 3 counters, 2 workers"


def test_refusals_of_all_gateways_are_summed() -> None:
    one = GatewayStatus(id="a" * 32, refused={"acme": {"shed": 2}, "new": {"max_concurrent_requests": 5}})
    other = GatewayStatus(id="b" * 32, refused={"acme": {"shed": 1, "tokens_per_s": 4}})
    refused = refusals([one, other])
    assert refused == {"acme": {"shed": 3, "tokens_per_s": 4}, "new": {"max_concurrent_requests": 5}}
    lines = queue_lines(QueueStatus(tenants=(ACME,)), refused)
    assert lines[-1].split() == ["new", "1", "0%", "0", "-", "0", "-", "0", "max_concurrent_requests", "5"]
