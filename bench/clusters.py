"""Clusters on this machine, by `baton serve` or supervised by the present process, and their state."""

import asyncio
import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import yaml
from msgspec import to_builtins

from baton.bench.processes import HOST
from baton.cluster.cluster_record import find_record
from baton.cluster.model_directory import resolve_model
from baton.cluster.operator_node import Operator, connected
from baton.cluster.runtimes.base import descendants
from baton.cluster.runtimes.local import COMMAND, LocalRuntime
from baton.cluster.serve import Cluster
from baton.config.cluster import ServeConfig
from baton.config.engine import EngineSettings
from baton.config.environment import environment_of_child
from baton.errors import PeerGone, WorkerLost
from baton.messages.operations import Status
from baton.messages.workers import WorkerRole
from baton.tenants import Sla

MODEL: Final = "tiny"
SERVE: Final = (sys.executable, "-m", "baton")
BANNER: Final = re.compile(rb"http://127\.0\.0\.1:(\d+)/v1")
START_S: Final = 180.0
STOP_S: Final = 60.0
LOOK_S: Final = 0.05
HELD: Final = ("active", "leased", "quarantined")  # states of pages that an idle cluster has none of


async def _port(process: asyncio.subprocess.Process, log: Path) -> int:
    assert process.stdout is not None
    port = 0
    async for line in process.stdout:
        found = BANNER.search(line)
        port = int(found[1]) if found else port
        if line.startswith(b"curl"):
            return port
    raise WorkerLost(f"baton serve ended before it served: {log.read_text()[-2000:]}")


async def _stop(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(STOP_S):
            await process.communicate()
    except TimeoutError:
        process.kill()
        await process.communicate()


def tenants_yaml(keys: Mapping[str, str], slas: Mapping[str, Sla] | None = None) -> str:
    """Return a tenants file: equal weights, and no quotas."""
    tenants: dict[str, object] = {}
    for name, key in keys.items():
        sla = (slas or {}).get(name, Sla())
        limits = {"ttft_ms": sla.ttft_ms, "tpot_ms": sla.tpot_ms}
        digest = sha256(key.encode()).hexdigest()
        tenants[name] = {
            "keys": [f"sha256:{digest}"],
            "sla": {limit: limit_ms for limit, limit_ms in limits.items() if limit_ms is not None},
        }
    return yaml.safe_dump({"tenants": tenants}, sort_keys=False)


def copy_tiny(directory: Path, max_context: int) -> Path:
    """Copy the model tiny into a new folder, for contexts of so many tokens; return the folder."""
    shutil.copytree(resolve_model(MODEL), directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"max_position_embeddings": max_context}))
    return directory


class WatchedCluster:
    """The processes of a cluster, as its routers list them."""

    def __init__(self, url: str, operator: Operator, num_processes: int, serve_pid: int = 0) -> None:
        """num_processes: workers, routers and gateways together."""
        self.url = url
        self._operator = operator
        self._num_processes = num_processes
        self.serve_pid = serve_pid

    async def status(self) -> Status | None:
        """Return what the routers know; None where no router answers."""
        try:
            return await self._operator.status()
        except (PeerGone, TimeoutError):
            return None

    async def pids(self) -> dict[str, int]:
        """Return process ids by name, with `serve` and `redis`; routers and gateways are numbered by pid."""
        found = {"serve": self.serve_pid, "redis": _redis_pid(self.serve_pid)}
        if (status := await self.status()) is not None:
            found |= {each.worker.name: each.worker.pid for each in status.workers}
            found |= {f"router-{n}": pid for n, pid in enumerate(sorted(each.pid for each in status.routers))}
            found |= {
                f"gateway-{n}": pid for n, pid in enumerate(sorted(each.pid for each in status.gateways))
            }
        return {name: pid for name, pid in found.items() if pid}

    async def kill(self, name: str) -> bool:
        """Send SIGKILL to the process of this name; return False where there is none now."""
        pid = (await self.pids()).get(name)
        if pid is None:
            return False
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:  # it has ended, and routers do not know yet
            return False
        return True

    async def worker_id(self, name: str) -> str | None:
        """Return the id of the worker of this name; a worker that was started again has another."""
        status = await self.status()
        workers = status.workers if status is not None else ()
        return next((each.worker.id for each in workers if each.worker.name == name), None)

    async def migrate(self, worker: str) -> int:
        """Move the requests of a decode worker elsewhere, and return how many have moved."""
        return (await self._operator.migrate(worker=worker)).num_moved

    async def flip(self, worker: str, role: WorkerRole) -> float:
        """Have a worker take the other role, and return the seconds until it serves in that role.

        WorkerLost after START_S.
        """
        former, begin_s = await self.worker_id(worker), time.perf_counter()
        await self._operator.flip(worker, role)

        def has_flipped(status: Status) -> bool:
            found = [each.worker for each in status.workers if each.worker.name == worker]
            return self.is_whole(status) and all(each.role is role and each.id != former for each in found)

        if await self.seconds_until(has_flipped, START_S) is None:
            raise WorkerLost(f"{worker} has not become a {role} worker")
        return time.perf_counter() - begin_s

    async def seconds_until(self, is_so: Callable[[Status], bool], timeout_s: float) -> float | None:
        """Return how long until a status says so; None: longer than `timeout_s`."""
        begin_s = time.perf_counter()
        while time.perf_counter() < begin_s + timeout_s:
            status = await self.status()
            if status is not None and is_so(status):
                return time.perf_counter() - begin_s
            await asyncio.sleep(LOOK_S)
        return None

    async def come_together(self) -> "WatchedCluster":
        """Wait until routers list every process and workers are connected. WorkerLost after START_S."""
        if await self.seconds_until(self.is_whole, START_S) is None:
            raise WorkerLost("the cluster has not come together")
        return self

    def is_whole(self, status: Status) -> bool:
        """Return whether every process runs and every worker is connected to its peers."""
        num_processes = len(status.workers) + len(status.routers) + len(status.gateways)
        return num_processes == self._num_processes and status.num_ready == len(status.workers)

    def is_at_rest(self, status: Status) -> bool:
        """Return whether every process is there and no worker holds a page for a request."""
        pages = [each.load.pages for each in status.workers]
        return self.is_whole(status) and all(
            each and not any(each[state] for state in HELD) for each in pages
        )


def _redis_pid(root: int) -> int:
    """Return the redis-server among the descendants of a process; 0: there is none."""
    for pid in descendants(root) if root else ():
        with suppress(OSError):
            program = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
            if b"redis-server" in program or b"valkey-server" in program:
                return pid
    return 0


@asynccontextmanager
async def watched_cluster(port: int, num_processes: int, serve_pid: int) -> AsyncIterator[WatchedCluster]:
    """Watch the cluster that this machine serves at the port, once it is whole."""
    record = find_record(port)
    async with connected(record.routers, record.keys) as operator:
        cluster = WatchedCluster(f"http://{HOST}:{port}", operator, num_processes, serve_pid)
        yield await cluster.come_together()


@asynccontextmanager
async def served_cluster(
    options: Sequence[str],
    *,
    prefill: int = 2,
    decode: int = 2,
    routers: int = 1,
    gateways: int = 1,
    command: Sequence[str] = SERVE,
    environment: Mapping[str, str] | None = None,
    model: str = MODEL,
    engine: EngineSettings | None = None,
    tenants: str | None = None,
) -> AsyncIterator[WatchedCluster]:
    """Run `baton serve MODEL` on a free port. engine: settings beside the options. tenants: a file's text.

    Every process computes with one thread, for on few cores more would get in each other's way. WorkerLost:
    it does not come up, and these are the last lines of its stderr.
    """
    counts = {"--prefill": prefill, "--decode": decode, "--routers": routers, "--gateways": gateways}
    words = [word for flag, count in counts.items() for word in (flag, str(count))]
    with TemporaryDirectory() as name:
        folder = Path(name)
        if engine is not None:
            words += [
                "--config",
                _write(folder / "settings.yaml", yaml.safe_dump({"engine": to_builtins(engine)})),
            ]
        if tenants is not None:
            words += ["--tenants", _write(folder / "tenants.yaml", tenants)]
        log_path = folder / "serve.log"
        with log_path.open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *(*command, "serve", model, "--port", "0", *words, "--drain-timeout", "5", *options),
                stdin=DEVNULL,
                stdout=PIPE,
                stderr=log,
                env=environment or environment_of_child(num_threads=1),
            )
        try:
            async with asyncio.timeout(START_S):
                port = await _port(process, log_path)
            async with watched_cluster(port, sum(counts.values()), process.pid) as cluster:
                yield cluster
        finally:
            await _stop(process)


def _write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


@asynccontextmanager
async def local_cluster(
    config: ServeConfig, command: Sequence[str] = COMMAND
) -> AsyncIterator[WatchedCluster]:
    """Run a cluster that the present process supervises. ConfigError or WorkerLost: it does not come up.

    command: starts each process, see LocalRuntime.
    """
    key = secrets.token_bytes(32)
    cluster = Cluster(config, LocalRuntime(key, command=command), key, say=lambda text: None)
    try:
        topology = await cluster.start()
        async with connected(topology.routers, key) as operator:
            num_processes = config.num_workers + config.routers + config.gateways
            url = f"http://{HOST}:{topology.port}"
            yield await WatchedCluster(url, operator, num_processes).come_together()
    finally:
        await cluster.close()
