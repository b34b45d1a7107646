"""Ranks that are forked from a process that has imported torch: a start saves two to three seconds of a core.

A forked rank runs `main` of tp_worker.py as `python -m` does. test_tp_worker.py starts ranks as Baton does.
"""

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any, Final

import pytest

from baton.engine.runner import rank_process, tp_worker
from tests.remote import Forked

FIRST_OWN: Final = 512  # of the descriptors of a forked rank; tests have fewer open


@pytest.fixture(scope="module")
def ranks_are_forked() -> Iterator[None]:
    """Fork the ranks of the engines that a file's tests load."""
    with forked_ranks():
        yield


@contextmanager
def forked_ranks() -> Iterator[None]:
    """Fork the ranks of engines that are loaded in this context."""
    forkserver.ensure_running()  # before a test that looks at the children of its process
    names = SimpleNamespace(**vars(subprocess) | {"Popen": _start_rank})
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(rank_process, "subprocess", names)
        yield


class ForkedRank(Forked):
    """A rank that rank_process.py uses as a subprocess.Popen."""

    def __init__(self, channel: int, memory: Sequence[int], folder: os.PathLike[str]) -> None:
        """channel: the rank writes its answers to a duplicate of this descriptor.

        memory: descriptors of host pages, which the rank knows by their numbers.
        """
        reader, writer = os.pipe()
        self.stdin = open(writer, "wb")  # noqa: SIM115  # closed by its user
        stdin, answers = Connection(reader, writable=False), Connection(os.dup(channel), readable=False)
        with ExitStack() as stack:
            shared = {number: stack.enter_context(Connection(os.dup(number))) for number in memory}
            own = stack.enter_context(stdin), stack.enter_context(answers)
            super().__init__(_run_rank, *own, shared, folder)


def _start_rank(command: Sequence[str], *, pass_fds: Sequence[int], **settings: Any) -> Any:
    channel, *memory = pass_fds
    return ForkedRank(channel, memory, settings["cwd"])


def _run_rank(
    stdin: Connection, answers: Connection, memory: Mapping[int, Connection], folder: os.PathLike[str]
) -> None:
    os.setpgid(0, 0)
    os.chdir(folder)
    os.dup2(rank_process.ERROR_OUTPUT, sys.stdout.fileno())
    # Out of the way of the numbers that the memory gets.
    own = [fcntl.fcntl(each.fileno(), fcntl.F_DUPFD, FIRST_OWN) for each in (stdin, answers)]
    shared = {number: fcntl.fcntl(each.fileno(), fcntl.F_DUPFD, FIRST_OWN) for number, each in memory.items()}
    for number, descriptor in shared.items():
        os.dup2(descriptor, number)
    sys.stdin = open(own[0], closefd=False)  # noqa: SIM115
    sys.argv = [tp_worker.__name__, str(own[1])]
    tp_worker.main()
