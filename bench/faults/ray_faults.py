"""The effect on streams when a node of Ray freezes or dies, or Ray's head dies: four nodes on one machine.

The head, a node without cores where `baton serve` runs, and two nodes for its workers have loopback addresses
of their own. Ray keeps its tables in a Redis of this benchmark. First SIGSTOP freezes every process of the
node that has the only decode worker and a prefill worker, under load. Then the head is killed under load, a
prefill worker while the head is away, and a head comes back. In a second cluster the raylet of the node with
the decode worker is killed, and its actors end one after the other. Every answer is compared with the answer
of one engine.
"""

import asyncio
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager, nullcontext
from pathlib import Path
from typing import Final

import psutil

from baton.bench.clusters import WatchedCluster, served_cluster
from baton.bench.faults.clients import Clients, Question, make_questions
from baton.bench.processes import free_port, redis_on_tcp, stopped
from baton.bench.report import Report, Row, at_most, option, suite
from baton.cluster.runtimes.base import descendants, kill_tree, started_at
from baton.messages.operations import Status

START_S: Final = 180.0
REPLACED_S: Final = 20.0
NOTICED_S: Final = 5.0
BACK_S: Final = 60.0
LOAD_S: Final = 5.0  # of load before and after each fault
HEAD, SERVE, FIRST, SECOND = "127.0.0.2", "127.0.0.3", "127.0.0.4", "127.0.0.5"
# On one machine Ray takes other nodes' raylets for its own, so each program gets the address of its node.
RAY: Final = """
import sys
import ray._private.services as services
services.find_gcs_addresses = lambda: set()
from ray.scripts.scripts import main
sys.exit(main())
"""
SERVER: Final = """
import functools, sys
import ray
ray.init = functools.partial(ray.init, _node_ip_address={address!r})
from baton.cluster.cli.main import main
sys.exit(main())
"""


def server_at(address: str) -> str:
    """Return a program in Python that runs `baton` on the node of that address."""
    return SERVER.format(address=address)


class RayNodes:
    """The nodes of one Ray cluster on this machine, by their addresses."""

    def __init__(self, folder: Path, redis: tuple[str, int] | None = None) -> None:
        """folder: for files of Ray. redis: keeps the head's tables; None: they are lost with the head."""
        self.folder = folder
        self.port = free_port(HEAD)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = os.environ | {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_gcs_rpc_server_reconnect_timeout_s": "3600",
            **({} if redis is None else {"RAY_REDIS_ADDRESS": f"{redis[0]}:{redis[1]}"}),
        }

    async def start(self, address: str, *, num_cpus: int) -> None:
        """Start a node and wait until it runs; the node at HEAD is the head."""
        log = self.folder / f"{address}.log"
        # fmt: off
        where = (
            ["--head", f"--port={self.port}", "--include-dashboard=false", f"--temp-dir={self.folder}/ray"]
            if address == HEAD else [f"--address={HEAD}:{self.port}"]
        )
        command = [
            sys.executable, "-c", RAY, "start", "--block", "--disable-usage-stats",
            f"--node-ip-address={address}", f"--num-cpus={num_cpus}", "--num-gpus=0",
            "--object-store-memory=80000000", "--min-worker-port=0", "--max-worker-port=0", *where,
        ]
        # fmt: on
        with log.open("wb") as output:
            process = self._processes[address] = subprocess.Popen(
                command, env=self.environment, stdout=output, stderr=subprocess.STDOUT, process_group=0
            )
        async with asyncio.timeout(START_S):
            while "Ray runtime started" not in log.read_text():
                if process.poll() is not None:
                    raise RuntimeError(f"Ray at {address} ended: {log.read_text()}")
                await asyncio.sleep(0.1)

    def pids(self, address: str) -> list[int]:
        """Return all processes of a node, its actors included."""
        return [self._processes[address].pid, *descendants(self._processes[address].pid)]

    def node_of(self, pid: int) -> str:
        """Return the address of the node that a process belongs to."""
        return next(address for address in self._processes if pid in self.pids(address))

    def raylet(self, address: str) -> int:
        """Return the process id of the raylet of a node."""
        return next(pid for pid in self.pids(address) if psutil.Process(pid).name() == "raylet")

    def kill(self, address: str) -> None:
        """End a node at once."""
        pid = self._processes[address].pid
        kill_tree(pid, started_at(pid))
        self._processes[address].wait()

    def close(self) -> None:
        """End all nodes."""
        for address in self._processes:
            self.kill(address)


@asynccontextmanager
async def ray_cluster() -> AsyncIterator[tuple[RayNodes, WatchedCluster]]:
    """Run Redis, four nodes, and a cluster of two prefill workers and one decode worker."""
    with ExitStack() as stack:
        folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-ray-", ignore_cleanup_errors=True))
        )
        async with redis_on_tcp(folder) as redis:
            nodes = RayNodes(folder, redis)
            stack.callback(nodes.close)
            for address, num_cpus in ((HEAD, 0), (SERVE, 0), (FIRST, 3), (SECOND, 3)):
                await nodes.start(address, num_cpus=num_cpus)
            options = ["--ray-address", f"{HEAD}:{nodes.port}", "--kv-cache-memory", "64MiB"]
            async with served_cluster(
                options,
                decode=1,
                command=(sys.executable, "-c", server_at(SERVE)),
                environment=nodes.environment,
            ) as cluster:
                yield nodes, cluster
            nodes.close()


async def _seconds_until_replaced(cluster: WatchedCluster, name: str, before: str | None) -> float | None:
    """Return the seconds until a worker of that name has another id; None: more than START_S."""

    def is_replaced(status: Status) -> bool:
        return any(each.worker.name == name and each.worker.id != before for each in status.workers)

    return await cluster.seconds_until(is_replaced, START_S)


async def lost_node(
    nodes: RayNodes, cluster: WatchedCluster, clients: Clients, *, is_frozen: bool
) -> list[Row]:
    """Have the node with the decode worker fail, under load.

    is_frozen: every process of the node stops. Otherwise the raylet dies, and the node's other processes of
    Ray end by themselves.
    """
    name = "frozen node" if is_frozen else "killed node"
    async with clients.asking():
        await asyncio.sleep(LOAD_S)
        before = await cluster.worker_id("decode-0")
        address = nodes.node_of((await cluster.pids())["decode-0"])
        if not is_frozen:
            os.kill(nodes.raylet(address), signal.SIGKILL)
        with stopped(*nodes.pids(address)) if is_frozen else nullcontext():
            replaced_s = await _seconds_until_replaced(cluster, "decode-0", before)
            await asyncio.sleep(LOAD_S)
    return [
        *clients.answer_rows(name),
        at_most(f"{name}: new worker after", replaced_s, "s", REPLACED_S),
    ]


async def head_away(
    nodes: RayNodes, cluster: WatchedCluster, questions: Sequence[Question], num_streams: int, away_s: float
) -> list[Row]:
    """Kill the head, and a prefill worker meanwhile, under load; a head comes back after `away_s`."""
    clients = Clients(cluster.url, questions, 1, num_streams)
    async with clients.asking(LOAD_S):
        await asyncio.to_thread(nodes.kill, HEAD)
        killed_s = time.perf_counter()
        noticed_s = await cluster.seconds_until(lambda status: status.head_away_s > 0, START_S)
        before = await cluster.worker_id("prefill-0")
        await cluster.kill("prefill-0")
        await asyncio.sleep(max(0.0, away_s - (time.perf_counter() - killed_s)))
        await nodes.start(HEAD, num_cpus=0)
        back_s = await _seconds_until_replaced(cluster, "prefill-0", before)
    return [
        *clients.answer_rows(f"head away {away_s:.0f} s"),
        at_most("head away: noticed after", noticed_s, "s", NOTICED_S),
        at_most("killed worker, back after the head", back_s, "s", BACK_S),
    ]


@suite(
    "ray_faults",
    "Nodes of Ray that stand still and die, and a head that is away",
    option("--streams", 30, "clients at once"),
    option("--head-away", 300.0, "seconds"),
    fails_on_miss=True,
)
async def measure(options: Namespace, report: Report) -> None:
    """Freeze a node, kill the head, and kill a node of another cluster."""
    report.extra = {"streams": options.streams}
    questions = make_questions(seed=1)
    report.tell("starting Ray")
    async with ray_cluster() as (nodes, cluster):
        report.tell("a node freezes")
        clients = Clients(cluster.url, questions, 0, options.streams)
        report.rows += await lost_node(nodes, cluster, clients, is_frozen=True)
        report.tell("the head is away")
        report.rows += await head_away(nodes, cluster, questions, options.streams, options.head_away)
    report.tell("starting Ray again")
    async with ray_cluster() as (nodes, cluster):
        report.tell("a node dies")
        clients = Clients(cluster.url, questions, 2, options.streams)
        report.rows += await lost_node(nodes, cluster, clients, is_frozen=False)
