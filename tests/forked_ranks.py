"""Ranks that are forked from a process that has imported torch: a start saves two to three seconds of a core.

A forked rank runs `main` of tp_worker.py as `python -m` does. test_tp_worker.py starts ranks as Baton does.
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest

from baton.engine.runner import rank_process, tp_worker
from tests.remote import CONTEXT


@pytest.fixture(scope="module")
def ranks_are_forked() -> Iterator[None]:
    """Fork the ranks of the engines that a file's tests load."""
    forkserver.ensure_running()  # before a test that looks at the children of its process
    with forked_ranks():
        yield


@contextmanager
def forked_ranks() -> Iterator[None]:
    """Fork the ranks of engines that are loaded in this context."""
    names = SimpleNamespace(**vars(subprocess) | {"Popen": _start_rank})
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(rank_process, "subprocess", names)
        yield


class ForkedRank:
    """The part of subprocess.Popen that rank_process.py uses."""

    def __init__(self, channel: int, folder: os.PathLike[str]) -> None:
        """channel: the rank writes its answers to a duplicate of this descriptor."""
        reader, writer = os.pipe()
        self.stdin = open(writer, "wb")  # noqa: SIM115  # closed by its user
        stdin, answers = Connection(reader, writable=False), Connection(os.dup(channel), readable=False)
        with stdin, answers:
            self._process = CONTEXT.Process(target=_run_rank, args=(stdin, answers, folder))
            self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def wait(self, timeout_s: float | None = None) -> int:
        """Return the exit status. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout_s)
        if self._process.exitcode is None:
            assert timeout_s is not None
            raise subprocess.TimeoutExpired("rank", timeout_s)
        return self._process.exitcode

    def poll(self) -> int | None:
        """Return the exit status; None: it runs."""
        self._process.join(0)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


def _start_rank(command: Sequence[str], *, pass_fds: Sequence[int], **settings: Any) -> Any:
    channel, *others = pass_fds
    if others:  # memory of host pages, which the rank knows by the number of its descriptor
        return subprocess.Popen(command, pass_fds=pass_fds, **settings)
    return ForkedRank(channel, settings["cwd"])


def _run_rank(stdin: Connection, answers: Connection, folder: os.PathLike[str]) -> None:
    os.setpgid(0, 0)
    os.chdir(folder)
    os.dup2(rank_process.ERROR_OUTPUT, sys.stdout.fileno())
    sys.stdin = open(stdin.fileno(), closefd=False)  # noqa: SIM115
    sys.argv = [tp_worker.__name__, str(answers.fileno())]
    tp_worker.main()
