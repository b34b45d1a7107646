"""A cluster of the tiny model whose processes a suite watches and hurts."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

from baton.bench.processes import SERVE, START_S, serve
from baton.cluster.cluster_record import find_record
from baton.cluster.operator_node import Operator, connected
from baton.cluster.runtimes.base import descendants
from baton.errors import PeerGone, WorkerLost
from baton.messages.operations import Status

LOOK_S: Final = 0.2
HELD: Final = ("active", "leased", "quarantined")  # states of pages that an idle cluster has none of


class WatchedCluster:
    """The processes of a cluster, as its routers list them."""

    def __init__(self, url: str, operator: Operator, num_processes: int, serve_pid: int = 0) -> None:
        """num_processes: workers, routers and gateways together."""
        self.url = url
        self._operator = operator
        self._num_processes = num_processes
        self._serve_pid = serve_pid

    async def status(self) -> Status | None:
        """Return what the routers know; None where no router answers."""
        try:
            return await self._operator.status()
        except (PeerGone, TimeoutError):
            return None

    async def pids(self) -> dict[str, int]:
        """Return process ids by name, `serve` and `redis` included."""
        found = {"serve": self._serve_pid, "redis": _redis_pid(self._serve_pid)}
        if (status := await self.status()) is not None:
            found |= {each.worker.name: each.worker.pid for each in status.workers}
            found |= {f"router-{n}": pid for n, pid in enumerate(sorted(each.pid for each in status.routers))}
            found |= {
                f"gateway-{n}": pid for n, pid in enumerate(sorted(each.pid for each in status.gateways))
            }
        return {name: pid for name, pid in found.items() if pid}

    async def worker_id(self, name: str) -> str | None:
        """Return the id of the worker of this name; a worker that was started again has another."""
        status = await self.status()
        workers = status.workers if status is not None else ()
        return next((each.worker.id for each in workers if each.worker.name == name), None)

    async def seconds_until(self, is_so: Callable[[Status], bool], timeout_s: float) -> float | None:
        """Return how long until a status says so; None: longer than `timeout_s`."""
        begin_s = time.perf_counter()
        while time.perf_counter() < begin_s + timeout_s:
            status = await self.status()
            if status is not None and is_so(status):
                return time.perf_counter() - begin_s
            await asyncio.sleep(LOOK_S)
        return None

    def is_whole(self, status: Status) -> bool:
        """Return whether every process is there and every worker has met its peers."""
        num_processes = len(status.workers) + len(status.routers) + len(status.gateways)
        return num_processes == self._num_processes and status.num_met == len(status.workers)

    def is_at_rest(self, status: Status) -> bool:
        """Return whether every process is there and no worker holds a page for a request."""
        pages = [each.load.pages for each in status.workers]
        return self.is_whole(status) and all(
            each and not any(each[state] for state in HELD) for each in pages
        )


@asynccontextmanager
async def served_cluster(
    folder: Path,
    options: Sequence[str],
    *,
    prefill: int = 2,
    decode: int = 2,
    routers: int = 1,
    gateways: int = 1,
    command: Sequence[str] = SERVE,
    environment: Mapping[str, str] | None = None,
) -> AsyncIterator[WatchedCluster]:
    """Run `baton serve`; WorkerLost when the cluster does not come up."""
    counts = {"--prefill": prefill, "--decode": decode, "--routers": routers, "--gateways": gateways}
    numbers = [word for flag, count in counts.items() for word in (flag, str(count))]
    words = [*numbers, "--drain-timeout", "5", *options]
    async with serve(folder, words, command=command, environment=environment) as served:
        record = find_record(served.port)
        async with connected(record.routers, record.keys) as operator:
            cluster = WatchedCluster(served.url, operator, sum(counts.values()), served.pid)
            if await cluster.seconds_until(cluster.is_whole, START_S) is None:
                raise WorkerLost("the cluster has not come together")
            yield cluster


def _redis_pid(root: int) -> int:
    """Return the redis-server among the descendants of a process; 0: there is none."""
    for pid in descendants(root) if root else ():
        with suppress(OSError):
            program = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
            if b"redis-server" in program or b"valkey-server" in program:
                return pid
    return 0
