import msgspec

from baton.cluster.cli.commands.status import table
from baton.messages.operations import GatewayStatus, Status
from baton.messages.status import RouterStatus
from baton.messages.workers import Address, Load, WorkerStatus
from tests.node_peers import a_worker, id_of


def test_the_table_has_a_line_a_worker() -> None:
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
            WorkerStatus(worker=placed, load=load, num_attempts=4, beat_age_s=0.1),
            WorkerStatus(
                worker=a_worker("prefill-0"), load=Load(), num_attempts=0, beat_age_s=0.1, is_draining=True
            ),
        ),
        num_gateways=2,
        num_attempts=4,
    )
    lines = table(status).splitlines()
    assert lines[0].split()[:6] == ["worker", "role", "node", "pid", "tp", "running"]
    assert lines[1].split()[:5] == ["decode-0", "decode", "host-7/0123abcd", "4711", "1"]
    assert lines[1].split()[5:11] == ["3", "1", "0", "0", "4", "1234"]
    assert lines[1].endswith("25%   free 60 active 4 of 64 x 16 tokens")  # states without pages are left out
    assert lines[2].startswith("prefill-0 (draining)  prefill  -                -  ")
    assert lines[3] == "2 gateways, 4 requests under way"


def test_workers_are_in_the_order_of_their_names_and_numbers() -> None:
    names = ("prefill-0", "decode-10", "lone", "decode-2")
    workers = tuple(
        WorkerStatus(worker=a_worker(name), load=Load(), num_attempts=0, beat_age_s=0.1) for name in names
    )
    first_words = [line.split()[0] for line in table(Status(workers=workers)).splitlines()]
    assert first_words == ["worker", "decode-2", "decode-10", "lone", "prefill-0", "0"]


def test_a_cluster_without_workers_has_a_table() -> None:
    assert table(Status()).endswith("\n0 gateways, 0 requests under way")


def test_each_router_has_a_line() -> None:
    routing = (0, 98, 0, 2, *[0] * 9)
    counters = {"decisions": 200, "blind_decisions": 1}
    routers = (
        RouterStatus(id=id_of("a"), redis="up", routing_counts=routing, counters=counters),
        RouterStatus(id=id_of("b"), redis="down"),
        RouterStatus(id=id_of("c")),
    )
    lines = table(Status(routers=routers)).splitlines()
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
    lines = table(Status(routers=(router,), gateways=(gateway,), num_gateways=1)).splitlines()
    assert lines[1:3] == [
        f"router {id_of('b')[:8]} on host-2, pid 13: 0 routed",
        f"gateway {id_of('a')[:8]} on host-1, pid 12, clients at 0.0.0.0:8000: 3 calls open, 317 refused",
    ]
