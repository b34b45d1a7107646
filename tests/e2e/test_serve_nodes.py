"""Workers with ranks on several nodes of Ray: three nodes on this machine, with addresses of their own."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from baton.bench.faults.ray_faults import FIRST, HEAD, SECOND, RayNodes, server_at
from baton.bench.tiny.tasks import recall_cases
from baton.cluster.offline.llm import LLM
from baton.cluster.runtimes.base import descendants
from baton.request import SamplingParams
from tests.event_stream import BODY, Refused, SteadyClients
from tests.served import Served, are_gone, command_line, served, stop, until

pytest.importorskip("ray")

NUM_CORES: Final = 8  # of each node with ranks, for Ray
BACK_S: Final = 120.0
HUNG_S: Final = 240.0
THIRD: Final = "127.0.0.6"
GROUPS: Final = """
import sys, ray
ray.init(address=sys.argv[1], _node_ip_address=sys.argv[2], logging_level="ERROR")
print(*(group["state"] for group in ray.util.placement_group_table().values()))
"""


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    folder = tempfile.TemporaryDirectory(prefix="baton-ray-", ignore_cleanup_errors=True)
    found = RayNodes(Path(folder.name))  # pytest's own folders are too long for Ray's sockets
    try:
        asyncio.run(found.start(HEAD, num_cpus=0))
        for address in (FIRST, SECOND):
            asyncio.run(found.start(address, num_cpus=NUM_CORES))
        yield found
    finally:
        found.close()
        folder.cleanup()


@contextmanager
def serving(nodes: RayNodes, *arguments: str) -> Iterator[Served]:
    """A prefill and a decode worker of the model tiny; every prompt goes from one to the other."""
    # fmt: off
    arguments = (
        "tiny", "--ray-address", f"{HEAD}:{nodes.port}", "--kv-cache-memory", "64MiB", "--drain-timeout", "5",
        "--router-policy", "round-robin", "--transport", "tcp", *arguments,
    )
    # fmt: on
    environment: dict[str, Any] = nodes.environment | {
        "BATON_GATEWAY_MAX_WAIT_S": "300",
        "BATON_PREFILL_CORES_PER_RANK": "1",
        "BATON_DECODE_CORES_PER_RANK": "1",
    }
    with served(*arguments, program=("-c", server_at(HEAD)), **environment) as found:
        yield found
        assert stop(found.process) == 0


@pytest.fixture(scope="module")
def cluster(nodes: RayNodes) -> Iterator[Served]:
    """Workers of two stages on two nodes. Nothing of them is left in the end."""
    with serving(nodes, "-pp", "2", "--nnodes", "2", "--step-timeout", "10") as found:
        yield found
    until(lambda: not any(ranks_on(nodes, address) for address in (FIRST, SECOND)))
    until(lambda: set(states_of_groups(nodes)) == {"REMOVED"})


def ranks_on(nodes: RayNodes, address: str) -> list[int]:
    """The processes of a node that have a rank, and the actors that start them."""
    names = ("baton.engine.runner.tp_worker", "ray::baton-")
    return [pid for pid in nodes.pids(address) if any(name in command_line(pid) for name in names)]


def states_of_groups(nodes: RayNodes) -> list[str]:
    address = f"{HEAD}:{nodes.port}"
    command = [sys.executable, "-c", GROUPS, address, HEAD]
    return subprocess.check_output(command, env=nodes.environment, text=True).split()


def assert_tokens_of_one_engine(cluster: Served) -> None:
    for case in recall_cases(6, 600, seed=5):
        assert cluster.complete(case.prompt, 4) == case.answer
    prompts = [f"{BODY['prompt']}{number}" for number in range(4)]
    with LLM("tiny", cache={"kv_cache_memory_bytes": 64 << 20}) as llm:
        expected = llm.generate(prompts, SamplingParams(max_tokens=40, temperature=0))
    found = [cluster.complete(prompt, 40) for prompt in prompts]
    assert found == [each.outputs[0].text for each in expected]
    until(lambda: cluster.status()["decode-0"].load.counters.get("transfers_adopted", 0) >= 6)


def test_tokens_of_two_nodes_are_those_of_one_engine(cluster: Served) -> None:
    assert_tokens_of_one_engine(cluster)
    decode = cluster.status()["decode-0"].load.counters
    assert decode["verified_shards"] == 2 * decode["transfers_adopted"], "one from stage to stage"


def test_each_worker_has_a_stage_on_each_node(cluster: Served, nodes: RayNodes) -> None:
    workers = [entry.worker for entry in cluster.status().values()]
    assert len(workers) == 2 and len(workers[0].nodes) == 2 and workers[0].nodes == workers[1].nodes
    on_nodes = [set(ranks_on(nodes, address)) for address in (FIRST, SECOND)]
    assert {worker.pid for worker in workers} <= on_nodes[0] | on_nodes[1]
    num_ranks = [sum("tp_worker" in command_line(pid) for pid in pids) for pids in on_nodes]
    assert sum(num_ranks) == 2
    # A node has rank 0 of a worker, or the host and the process of its rank 1.
    assert [len(pids) for pids in on_nodes] == [2 + num for num in num_ranks]


def of_rank_1(nodes: RayNodes, name: str) -> tuple[int, int]:
    """The host and the process of the rank 1 of a worker."""
    pids = [pid for address in (FIRST, SECOND) for pid in ranks_on(nodes, address)]
    host = next(pid for pid in pids if f"baton-{name}-node-1" in command_line(pid))
    rank = next(pid for pid in descendants(host) if "tp_worker" in command_line(pid))
    return host, rank


@pytest.mark.parametrize("struck", ["rank", pytest.param("host", marks=pytest.mark.slow)])
def test_killed_process_of_another_node_ends_its_worker_which_comes_back(
    cluster: Served, nodes: RayNodes, struck: str
) -> None:
    clients = SteadyClients(cluster.port, BODY)
    with clients.asking():
        before = cluster.status()["decode-0"].worker.id
        host, rank = of_rank_1(nodes, "decode-0")
        os.kill(rank if struck == "rank" else host, signal.SIGKILL)
        until(lambda: cluster.has_replaced("decode-0", before), BACK_S)
        clients.until_more()
    until(lambda: are_gone((host, rank)))


@pytest.mark.slow
def test_rank_of_another_node_that_hangs_is_killed_with_its_worker(cluster: Served, nodes: RayNodes) -> None:
    before = cluster.status()["decode-0"].worker.id
    _, rank = of_rank_1(nodes, "decode-0")
    os.kill(rank, signal.SIGSTOP)
    assert cluster.complete("copy(red green blue)=") == "red green blue"
    assert cluster.has_replaced("decode-0", before)
    until(lambda: are_gone((rank,)))


@pytest.mark.slow
def test_killed_node_ends_its_workers_which_come_back_with_it(cluster: Served, nodes: RayNodes) -> None:
    """Both workers are lost at once: their requests end with an error, or are replayed."""
    expected = answer(cluster)
    with ThreadPoolExecutor(4) as threads:
        answers = [threads.submit(answer, cluster) for _ in range(4)]
        until(lambda: sum(entry.num_attempts for entry in cluster.status().values()) > 0)
        before = {name: entry.worker.id for name, entry in cluster.status().items()}
        pids = ranks_on(nodes, SECOND)
        nodes.kill(SECOND)
        until(lambda: are_gone(pids))
        asyncio.run(nodes.start(SECOND, num_cpus=NUM_CORES))
        assert {each.result(BACK_S) for each in answers} <= {expected, "worker_crash"}
    until(lambda: len(cluster.status()) == 2, BACK_S)
    assert all(cluster.has_replaced(name, id_) for name, id_ in before.items())
    assert answer(cluster) == expected


@pytest.mark.slow
def test_workers_of_a_node_that_hangs_move_to_another_and_keep_their_other_node(
    cluster: Served, nodes: RayNodes
) -> None:
    """Ray takes the hung node for dead after a minute."""
    expected = answer(cluster)
    asyncio.run(nodes.start(THIRD, num_cpus=NUM_CORES))
    before = {name: entry.worker.id for name, entry in cluster.status().items()}
    for pid in nodes.pids(SECOND):
        os.kill(pid, signal.SIGSTOP)
    try:
        until(lambda: all(cluster.has_replaced(name, id_) for name, id_ in before.items()), HUNG_S)
        assert answer(cluster) == expected
        assert ranks_on(nodes, FIRST) and ranks_on(nodes, THIRD)
    finally:
        nodes.kill(SECOND)  # a raylet that Ray takes for dead ends when it goes on
    asyncio.run(nodes.start(SECOND, num_cpus=NUM_CORES))
    nodes.kill(THIRD)  # other tests use two nodes
    until(lambda: answer(cluster) == expected, BACK_S)


def answer(cluster: Served) -> str:
    """The text of a stream, or the code of its error."""
    text = ""
    try:
        for chunk in cluster.stream(BODY["prompt"], max_tokens=100, ignore_eos=True):
            if "error" in chunk:
                return str(chunk["error"]["code"])
            text += chunk["choices"][0]["text"] if chunk["choices"] else ""
    except Refused as error:
        return str(error.error["code"])
    return text


@pytest.mark.slow
def test_two_stages_of_two_ranks_give_the_tokens_of_one_engine(nodes: RayNodes) -> None:
    with serving(nodes, "-pp", "2", "-tp", "2", "--nnodes", "2") as cluster:
        assert_tokens_of_one_engine(cluster)
        assert sum("tp_worker" in command_line(pid) for pid in ranks_on(nodes, SECOND)) >= 2


@pytest.mark.slow
def test_worker_without_enough_nodes_says_what_is_missing(nodes: RayNodes) -> None:
    arguments = ("-pp", "3", "--nnodes", "3", "--start-timeout", "10")
    with pytest.raises(AssertionError, match="3 nodes for one worker .nnodes."), serving(nodes, *arguments):
        pytest.fail("the cluster serves")
    until(lambda: "PENDING" not in states_of_groups(nodes))
