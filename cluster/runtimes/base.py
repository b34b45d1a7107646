"""The seam between what the cluster runs and where: a runtime starts processes, watches and ends them."""

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
        """Where it serves. ConfigError or WorkerLost: it ended before it did; the message says why."""

    async def loading(self) -> Loading | None:
        """How far it has come before it serves; None where it has not said."""

    async def watch(self) -> str:
        """Waits until it is gone, and says how it ended; "" when it was drained, or told to by `stop`."""

    def stop(self) -> None:
        """Ask it to drain and end."""

    def kill(self) -> None:
        """End it now, with all that it has started."""

    def give_up(self) -> None:
        """End it though it may not answer, as on a machine that stands still; waits for nothing.

        Its successor, the next spawn of its name, is placed elsewhere where there is room.
        """

    async def silent_s(self) -> float:
        """Seconds since its event loop last ran, of a router or a gateway that serves; 0 where unknown."""


class Runtime(Protocol):
    @property
    def num_gpus(self) -> int:
        """That workers could have, once it is open."""

    @property
    def host(self) -> str:
        """The address of this machine that the cluster's processes connect to."""

    @property
    def worker_host(self) -> str:
        """What workers listen on; "": the address of the machine that each is started on."""

    @property
    def head_away_s(self) -> float:
        """Seconds since Ray's head last answered; 0 while it does, and where there is no Ray.

        Meanwhile what runs goes on, and nothing can be started.
        """

    async def open(self) -> None:
        """ConfigError when there is nothing to run processes on."""

    async def place(self, specs: list[ProcessSpec]) -> None:
        """Have room for all of these, before any is started. ConfigError: there is none, and why."""

    async def spawn(self, spec: ProcessSpec) -> ManagedProcess:
        """Start it, and return at once."""

    def use_keys(self, keys: Keys) -> None:
        """Hand these cluster keys to every process from now on, also to those that run; returns at once."""

    async def close(self) -> None:
        """End everything that was started and is still there."""


# Processes of this machine with all that they have started, as /proc tells: Linux alone.


def descendants(pid: int) -> list[int]:
    """Returns the ids of the processes that `pid` has started, and of theirs, parents first."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()  # the name may hold anything, also ")"
        except OSError:  # it has ended meanwhile
            continue
        children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found = [pid]
    for parent in found:
        found += children.get(parent, ())
    return found[1:]


def kill_tree(pid: int) -> None:
    """SIGKILL `pid` and its descendants, such as a worker's ranks, which have process groups of their own.

    A process that SIGSTOP has stopped dies of it, too; nothing happens where `pid` has ended.
    """
    for each in (*reversed(descendants(pid)), pid):
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def started_at(pid: int) -> int:
    """Clock ticks at the process's start, which tell it from others of its id; 0: it has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return 0


def wait_for_end(pid: int, started: int) -> None:
    """Returns when the process has ended that `started_at` gave `started` for; at once if there is none."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if started_at(pid) == started:
            select.select([descriptor], [], [])
    finally:
        os.close(descriptor)
