"""A cluster of real processes, with a Frontend in the test's process. All are forked (tests/forked_baton.py).

Tests may kill processes; the supervisor restarts them, and `wait_until_whole` waits for that.
"""

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Final, Self, TypeVar

import psutil

from baton.cluster.operator_node import Operator, connected
from baton.cluster.runtimes.local import COMMAND, LocalProcess
from baton.cluster.serve import Cluster
from baton.cluster.serve_plan import Topology
from baton.config.cluster import ServeConfig
from baton.messages.operations import Status
from tests.cluster_threads import KEY, GatewayThread, wait_for
from tests.forked_baton import ForkingRuntime, StartedTemplate, fork_by_server
from tests.new_status import new_status

START_S: Final = 60.0
ResultT = TypeVar("ResultT")


class ProcessCluster:
    def __init__(self, config: ServeConfig, *, command: Sequence[str] = COMMAND) -> None:
        """command: `python -m MODULE ...`, which each process runs after its fork."""
        self.config = config
        self._command = command
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="cluster", daemon=True)
        self._thread.start()
        self.topology: Topology
        self._cluster = self._wait(self._start())
        self._gateway = gateway = GatewayThread(self.topology.routers)
        self.frontend, self.begin, self.cancel = gateway.frontend, gateway.begin, gateway.cancel
        self.call = gateway.call
        self.wait_until_whole()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._gateway.close()
        self._wait(self._cluster.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def decode_name(self, request_id: str) -> str:
        """Return the name of the worker that streams this request now."""
        worker = self.frontend.decode_worker(request_id)
        return next(each.name for each in self.frontend.workers if each.id == worker)

    def order(self, ask: Callable[[Operator], Coroutine[Any, Any, ResultT]]) -> ResultT:
        """Ask the routers as an operator does."""

        async def asked() -> ResultT:
            async with connected(self.topology.routers, KEY) as operator:
                return await ask(operator)

        return self._wait(asked())

    def kill(self, name: str) -> None:
        """Send SIGKILL to the process of that name."""
        os.kill(self.pid(name), signal.SIGKILL)

    def pid(self, name: str) -> int:
        process = next(p for p in self._cluster._processes if p.name == name)._process
        assert isinstance(process, LocalProcess)
        return process.pid

    def wait_until_whole(self, timeout_s: float = START_S) -> None:
        """Wait until all workers are connected and idle."""
        new = new_status(self.frontend)

        def is_whole() -> bool:
            status = new()
            return not self.frontend.why_not_ready and status is not None and self._is_whole(status)

        wait_for(is_whole, timeout_s)

    def _is_whole(self, status: Status) -> bool:
        expected = self.config.num_workers
        connected = self.frontend._peer_registry.connected()
        if len(status.workers) != expected or len(connected) != expected or status.num_attempts:
            return False
        return all(_is_at_rest(worker.load.pages) for worker in status.workers)

    async def _start(self) -> Cluster:
        template = StartedTemplate(self._command[2:], fork_by_server)
        runtime = ForkingRuntime(template, KEY, command=self._command)
        cluster = Cluster(self.config, runtime, KEY, lambda text: None)
        try:
            self.topology = await cluster.start()
        except BaseException:
            await cluster.close()
            raise
        return cluster

    def _wait(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(START_S)


def children(is_wanted: Callable[[list[str]], bool]) -> list[psutil.Process]:
    """Return the descendants of this process whose command line is wanted."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has ended, and may not have been waited for
            if is_wanted(child.cmdline()):
                found.append(child)
    return found


def templates() -> list[psutil.Process]:
    """Return the templates that this process's clusters fork workers from."""
    return children(lambda command: command[:1] == ["baton template"])


def _is_at_rest(pages: dict[str, int]) -> bool:
    return bool(pages) and not any(pages[state] for state in ("active", "leased", "quarantined"))
