"""The cluster of bench/soak.py, as a user starts it, and its processes by their names."""

import asyncio
import contextlib
import re
import secrets
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from baton.bench.tenants_real_world import tenants_yaml
from baton.cluster.cluster_record import find_record
from baton.cluster.operator_node import Operator, connected
from baton.config import environment_of_child
from baton.errors import PeerGone, WorkerLost
from baton.operating import Status

MODEL: Final = "tiny"
TENANTS: Final = ("red", "green", "blue")
NUM_PREFILL, NUM_DECODE, NUM_GATEWAYS, NUM_ROUTERS = 2, 2, 2, 2
NUM_PROCESSES: Final = NUM_PREFILL + NUM_DECODE + NUM_GATEWAYS + NUM_ROUTERS
START_S: Final = 180.0
STOP_S: Final = 60.0
LOOK_S: Final = 0.2
BANNER: Final = re.compile(rb"http://127\.0\.0\.1:(\d+)/v1")
OPTIONS: Final = (
    *("--prefill", str(NUM_PREFILL), "--decode", str(NUM_DECODE), "--gateways", str(NUM_GATEWAYS)),
    *("--routers", str(NUM_ROUTERS), "--router-policy", "cost", "--port", "0"),
    *("--kv-cache-memory", "16MiB", "--drain-timeout", "5"),
)
HELD: Final = ("active", "leased", "quarantined")  # pages that a cluster at rest has none of


class World:
    """pid: of `baton serve`."""

    def __init__(self, url: str, keys: Mapping[str, str], operator: Operator, pid: int) -> None:
        self.url = url
        self.keys = keys
        self._operator = operator
        self._pid = pid

    async def pids(self) -> dict[str, int]:
        """Name -> process id, of those that a router knows; Redis and `serve` are looked up here."""
        status = await self.status()
        found = {"serve": self._pid}
        if (redis := _find_redis(self._pid)) is not None:
            found["redis"] = redis
        if status is None:
            return found
        found |= {each.worker.name: each.worker.pid for each in status.workers}
        found |= {f"router-{n}": pid for n, pid in enumerate(sorted(each.pid for each in status.routers))}
        found |= {f"gateway-{n}": pid for n, pid in enumerate(sorted(each.pid for each in status.gateways))}
        return {name: pid for name, pid in found.items() if pid}

    async def status(self) -> Status | None:
        """None where no router answers."""
        try:
            return await self._operator.status()
        except (PeerGone, TimeoutError):
            return None

    async def is_whole_within(self, seconds: float) -> bool:
        """Whether every process is there again by then."""
        until_s = time.perf_counter() + seconds
        while time.perf_counter() < until_s:
            status = await self.status()
            if status is not None and _num_processes(status) == NUM_PROCESSES:
                return True
            await asyncio.sleep(LOOK_S)
        return False

    async def pages_back_within(self, seconds: float) -> float | None:
        """How long until no worker holds a page for anybody; None: longer."""
        begin_s = time.perf_counter()
        while time.perf_counter() < begin_s + seconds:
            status = await self.status()
            if status is not None and _num_processes(status) == NUM_PROCESSES:
                pages = [each.load.pages for each in status.workers]
                if all(each and not any(each[state] for state in HELD) for each in pages):
                    return time.perf_counter() - begin_s
            await asyncio.sleep(LOOK_S)
        return None


def _num_processes(status: Status) -> int:
    return len(status.workers) + len(status.routers) + len(status.gateways)


@asynccontextmanager
async def open_world(folder: Path, runtime: str) -> AsyncIterator[World]:
    """WorkerLost when the cluster does not come up; its log is in the folder, and shown then."""
    keys = {tenant: secrets.token_hex(16) for tenant in TENANTS}
    tenants, log_path = folder / "tenants.yaml", folder / "serve.log"
    tenants.write_text(tenants_yaml(keys, {}))
    command = [sys.executable, "-m", "baton.cluster.cli", "serve", MODEL, "--runtime", runtime, *OPTIONS]
    with log_path.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *command,
            *("--tenants", str(tenants)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            env=environment_of_child(num_threads=1),
        )
    try:
        async with asyncio.timeout(START_S):
            port = await _port(process, log_path)
        record = find_record(port)
        async with connected(record.routers, record.keys) as operator:
            world = World(f"http://127.0.0.1:{port}", keys, operator, process.pid)
            if not await world.is_whole_within(START_S):
                raise WorkerLost("the cluster has not come together")
            yield world
    finally:
        await _stop(process)


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
    if process.returncode is None:
        process.terminate()
    try:
        async with asyncio.timeout(STOP_S):
            await process.communicate()
    except TimeoutError:
        process.kill()
        await process.communicate()


def resident_mib(pid: int) -> float | None:
    """None: there is no such process any more."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) / 1024
    return None


def _find_redis(root: int) -> int | None:
    """The redis-server among the descendants of this process."""
    for pid in _descendants(root):
        with contextlib.suppress(OSError):
            program = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
            if b"redis-server" in program or b"valkey-server" in program:
                return pid
    return None


def _descendants(root: int) -> Iterator[int]:
    pids = [root]
    while pids:
        for task in Path(f"/proc/{pids.pop()}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                children = list(map(int, task.read_text().split()))
                yield from children
                pids += children
