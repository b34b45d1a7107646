"""The interface of runtimes: a runtime starts processes, watches them and ends them."""

import os
import select
import signal
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from baton.cluster.cluster_key import Keys
from baton.cluster.process_spec import Loading, ProcessSpec
from baton.messages.workers import Address


class ManagedProcess(Protocol):
    """One life of a process. Its calls may be repeated, and come from one asyncio loop."""

    async def ready(self) -> Address:
        """Wait until the process serves, and return its address. ConfigError or WorkerLost: it failed."""

    async def loading(self) -> Loading | None:
        """Return the progress of loading weights; None: unknown."""

    async def watch(self) -> str:
        """Wait for the end of the process, and return its cause; "": it was drained, or told to by `stop`."""

    def stop(self) -> None:
        """Ask the process to drain and end."""

    def kill(self) -> None:
        """End the process now, and all processes that it has started."""

    def give_up(self) -> None:
        """End a process that may not answer, as on a machine that hangs; wait for nothing.

        The next process of its name is placed on another machine if one has room.
        """

    async def silent_s(self) -> float:
        """Return the seconds since the event loop of a router or a gateway last ran; 0: unknown."""


class Runtime(Protocol):
    """Starts processes on one kind of machines."""

    @property
    def num_gpus(self) -> int:
        """GPUs for all workers together, once the runtime is open."""

    @property
    def host(self) -> str:
        """The address of this machine that the cluster's processes connect to."""

    @property
    def worker_host(self) -> str:
        """The address that workers listen on; "": that of the machine of each."""

    @property
    def head_away_s(self) -> float:
        """Seconds since Ray's head last answered; 0 while it answers, and without Ray.

        Meanwhile running processes go on, and none can be started.
        """

    async def open(self) -> None:
        """Prepare the machines. Raises ConfigError."""

    async def place(self, specs: list[ProcessSpec]) -> None:
        """Reserve resources for all of these before any is started. ConfigError: there are too few."""

    async def spawn(self, spec: ProcessSpec) -> ManagedProcess:
        """Start a process; do not wait for `ready`."""

    def use_keys(self, keys: Keys) -> None:
        """Give these cluster keys to all running and later processes. Returns at once."""

    async def close(self) -> None:
        """End all processes that still run."""


# Process trees of this machine, from /proc: Linux alone.


def descendants(pid: int) -> list[int]:
    """Return the ids of the processes that `pid` has started, and of their descendants, parents first."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()  # the name may contain ")"
        except OSError:  # it has ended meanwhile
            continue
        children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found = [pid]
    for parent in found:
        found += children.get(parent, ())
    return found[1:]


def kill_tree(pid: int) -> None:
    """Send SIGKILL to `pid` and its descendants, such as a worker's ranks; stopped processes die too.

    Nothing happens when `pid` has ended.
    """
    for each in (*reversed(descendants(pid)), pid):
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def started_at(pid: int) -> int:
    """Return the clock ticks at the process's start, which identify it with its id; 0: it has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return 0


def wait_for_end(pid: int, started: int) -> None:
    """Return when the process has ended for which `started_at` returned `started`."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if started_at(pid) == started:
            select.select([descriptor], [], [])
    finally:
        os.close(descriptor)
