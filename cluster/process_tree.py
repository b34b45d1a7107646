"""Processes of this machine with all that they have started, as /proc tells: Linux alone."""

import os
import select
import signal
from contextlib import suppress
from pathlib import Path


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
