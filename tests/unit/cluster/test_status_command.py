from baton.cluster.listeners import Listener
from baton.cluster.status_command import table
from baton.operating import Status
from baton.router_status import RouterStatus
from baton.worker import Load, WorkerStatus
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
    status = Status(
        workers=(
            WorkerStatus(worker=a_worker("decode-0"), load=load, num_attempts=4, beat_age_s=0.1),
            WorkerStatus(
                worker=a_worker("prefill-0"), load=Load(), num_attempts=0, beat_age_s=0.1, is_draining=True
            ),
        ),
        num_gateways=2,
        num_attempts=4,
    )
    here = a_worker("decode-0").address
    lines = table(status, {Listener(here.host, here.port): 4711}).splitlines()
    assert lines[0].split()[:5] == ["worker", "role", "pid", "tp", "running"]
    assert lines[1].split()[:10] == ["decode-0", "decode", "4711", "1", "3", "1", "0", "0", "4", "1234"]
    assert lines[1].endswith("25%   free 60 active 4 of 64 x 16 tokens")  # states without pages are left out
    assert lines[2].startswith("prefill-0 (draining)  prefill  -  ")
    assert lines[3] == "2 gateways, 4 requests under way"


def test_workers_are_in_the_order_of_their_names_and_numbers() -> None:
    names = ("prefill-0", "decode-10", "lone", "decode-2")
    workers = tuple(
        WorkerStatus(worker=a_worker(name), load=Load(), num_attempts=0, beat_age_s=0.1) for name in names
    )
    first_words = [line.split()[0] for line in table(Status(workers=workers), {}).splitlines()]
    assert first_words == ["worker", "decode-2", "decode-10", "lone", "prefill-0", "0"]


def test_a_cluster_without_workers_has_a_table() -> None:
    assert table(Status(), {}).endswith("\n0 gateways, 0 requests under way")


def test_each_router_has_a_line() -> None:
    routing = (0, 98, 0, 2, *[0] * 9)
    counters = {"decisions": 200, "blind_decisions": 1}
    routers = (
        RouterStatus(id=id_of("a"), redis="up", routing_counts=routing, counters=counters),
        RouterStatus(id=id_of("b"), redis="down"),
        RouterStatus(id=id_of("c")),
    )
    lines = table(Status(routers=routers), {}).splitlines()
    assert lines[1:] == [
        f"router {id_of('a')[:8]}: 100 routed, 99% of them in 1 ms, 0.5% blindly, Redis is up",
        f"router {id_of('b')[:8]}: 0 routed, REDIS IS DOWN",
        f"router {id_of('c')[:8]}: 0 routed",
        "0 gateways, 0 requests under way",
    ]
