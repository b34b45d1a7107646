"""Workers with ranks on several nodes of Ray: three nodes on this machine, with addresses of their own."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Final

import pytest

from baton.bench.faults.ray_faults import FIRST, HEAD, SECOND, RayNodes, server_at
from baton.bench.tiny.tasks import recall_cases
from baton.cluster.offline.llm import LLM
from baton.request import SamplingParams
from tests.event_stream import SteadyClients
from tests.served import Served, command_line, served, stop, until

pytest.importorskip("ray")

NUM_CORES: Final = 2  # of each node with ranks
BACK_S: Final = 120.0
BODY: Final = {
    "model": "tiny",
    "prompt": "the sun and the moon and a star; " * 6,
    "max_tokens": 100,
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
}
GROUPS: Final = """
import sys, ray
ray.init(address=sys.argv[1], _node_ip_address=sys.argv[2], logging_level="ERROR")
print(*(group["state"] for group in ray.util.placement_group_table().values()))
"""


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayNodes]:
    found = RayNodes(tmp_path_factory.mktemp("ray"))
    try:
        asyncio.run(found.start(HEAD, num_cpus=0))
        for address in (FIRST, SECOND):
            asyncio.run(found.start(address, num_cpus=NUM_CORES))
        yield found
    finally:
        found.close()


def options(nodes: RayNodes) -> tuple[str, ...]:
    address = f"{HEAD}:{nodes.port}"
    return ("tiny", "--ray-address", address, "--kv-cache-memory", "64MiB", "--drain-timeout", "5")


@pytest.fixture(scope="module")
def cluster(nodes: RayNodes) -> Iterator[Served]:
    """A prefill and a decode worker, each of two stages on two nodes. Nothing of them is left in the end."""
    arguments = (
        *options(nodes),
        "-pp",
        "2",
        "--nnodes",
        "2",
        "--transport",
        "tcp",
        "--router-policy",
        "round-robin",
    )
    environment: dict[str, Any] = nodes.environment | {"BATON_GATEWAY_MAX_WAIT_S": "300"}
    with served(*arguments, program=("-c", server_at(HEAD)), **environment) as found:
        yield found
        assert stop(found.process) == 0
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


def test_tokens_of_two_nodes_are_those_of_one_engine(cluster: Served, nodes: RayNodes) -> None:
    for case in recall_cases(6, 600, seed=5):
        assert cluster.complete(case.prompt, 4) == case.answer
    prompts = [f"{BODY['prompt']}{number}" for number in range(4)]
    with LLM("tiny", cache={"kv_cache_memory_bytes": 64 << 20}) as llm:
        expected = llm.generate(prompts, SamplingParams(max_tokens=40, temperature=0))
    found = [cluster.complete(prompt, 40) for prompt in prompts]
    assert found == [each.outputs[0].text for each in expected]
    until(lambda: sum(entry.load.kv_bytes for entry in cluster.status().values()) > 0)


def test_each_worker_has_a_stage_on_each_node(cluster: Served, nodes: RayNodes) -> None:
    workers = {entry.worker.pid for entry in cluster.status().values()}
    on_nodes = [set(ranks_on(nodes, address)) for address in (FIRST, SECOND)]
    assert workers <= on_nodes[0] | on_nodes[1] and len(workers) == 2
    num_ranks = [sum("tp_worker" in command_line(pid) for pid in pids) for pids in on_nodes]
    assert sum(num_ranks) == 2
    # A node has rank 0 of a worker, or the host and the process of its rank 1.
    assert [len(pids) for pids in on_nodes] == [2 + num for num in num_ranks]


def test_killed_rank_of_another_node_ends_its_worker_which_comes_back(
    cluster: Served, nodes: RayNodes
) -> None:
    clients = SteadyClients(cluster.port, BODY)
    with clients.asking():
        before = {name: entry.worker.id for name, entry in cluster.status().items()}
        rank = next(
            pid
            for address in (FIRST, SECOND)
            for pid in ranks_on(nodes, address)
            if "tp_worker" in command_line(pid)
        )
        os.kill(rank, signal.SIGKILL)
        until(lambda: any(cluster.has_replaced(name, id_) for name, id_ in before.items()), BACK_S)
        clients.until_more()
    until(lambda: len(cluster.status()) == 2, BACK_S)
