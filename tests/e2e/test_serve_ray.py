"""`baton serve tiny` on a Ray that it starts itself."""

import os
import re
import signal
import socket
from collections.abc import Iterator

import psutil
import pytest

from baton.bench.tiny.tasks import recall_cases
from baton.cluster.cluster_record import find_record
from baton.cluster.redis_server import find_program
from baton.cluster.runtimes.base import descendants
from tests.event_stream import BODY, SteadyClients
from tests.served import BATON, Served, are_gone, command_line, served, stop, until

pytest.importorskip("ray")

OPTIONS = ("tiny", "--kv-cache-memory", "64MiB", "--drain-timeout", "5")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Served]:
    """All that it has started ends with it, Ray too."""
    with served(
        *OPTIONS, "--prefill", "2", "--router-policy", "prefix", "--routers", "2", program=BATON
    ) as found:
        yield found
        pids = descendants(found.process.pid)
        assert any("raylet" in command_line(pid) for pid in pids)
        assert stop(found.process) == 0
        until(lambda: are_gone(pids))


def test_prompts_go_from_prefill_to_decode_actors(cluster: Served) -> None:
    assert "2 prefill and 1 decode worker, on Ray" in cluster.banner
    for case in recall_cases(6, 600, seed=5):
        assert cluster.complete(case.prompt, 4) == case.answer
    assert set(cluster.status()) == {"prefill-0", "prefill-1", "decode-0"}
    until(lambda: sum(entry.load.kv_bytes for entry in cluster.status().values()) > 0)


def test_an_actor_that_is_killed_is_started_again(cluster: Served) -> None:
    before = cluster.status()["decode-0"].worker.id
    os.kill(cluster.pid_of("decode-0"), signal.SIGKILL)
    until(lambda: cluster.has_replaced("decode-0", before), 60.0)
    until(cluster.answers)
    assert cluster.complete("copy(sun moon star)=") == "sun moon star"
    assert any("decode-0 ended: " in line and "started again" in line for line in cluster.said)


def test_a_router_that_is_killed_is_started_again_beside_another(cluster: Served) -> None:
    before = {router.id for router in cluster.routers()}
    os.kill(cluster.listening_on(find_record(cluster.port).routers[0].port), signal.SIGKILL)
    assert cluster.complete("copy(sun moon star)=") == "sun moon star"
    until(lambda: len({router.id for router in cluster.routers()} | before) == 3, 60.0)
    state = "up" if find_program() else "none"
    until(lambda: [router.redis for router in cluster.routers()] == [state] * 2)


def test_nothing_listens_without_a_token_or_a_key(cluster: Served) -> None:
    for pid in descendants(cluster.process.pid):
        assert "--dashboard-host=0.0.0.0" not in command_line(pid)
        environment = psutil.Process(pid).environ()
        assert environment.get("RAY_AUTH_MODE", "token") == "token"


def test_status_tells_nodes_and_processes_which_show_their_names(cluster: Served) -> None:
    for name, entry in cluster.status().items():
        assert re.fullmatch(re.escape(socket.gethostname()) + r"/[0-9a-f]{8}", entry.worker.node)
        assert command_line(entry.worker.pid).startswith(f"ray::baton-{name}")
        assert psutil.Process(entry.worker.pid).nice() == psutil.Process().nice()


def test_a_worker_that_is_drained_ends_and_stays_away(cluster: Served) -> None:
    assert "drains" in cluster.baton("drain", "prefill-1", "--port", str(cluster.port))
    until(lambda: any("prefill-1 has drained and stays away" in line for line in cluster.said))
    until(lambda: set(cluster.status()) == {"prefill-0", "decode-0"})
    assert cluster.complete("copy(red green blue)=") == "red green blue"


def test_it_scales_under_load(cluster: Served) -> None:
    clients, port = SteadyClients(cluster.port, BODY), str(cluster.port)
    with clients.asking():
        for layout in ("1P2D", "2P1D"):
            assert f"{layout} serves" in cluster.baton("scale", layout, "--port", port)
            clients.until_more()
    assert set(cluster.status()) == {"prefill-0", "prefill-1", "decode-0"}
