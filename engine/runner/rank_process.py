"""The process of a rank other than 0, as the process that starts it sees it.

1. The starter runs engine/runner/tp_worker.py and writes a TpAssignment, one line, to its standard input.
2. A rank that fails says why, in a TpWorkerFailure, over a pipe of its own: nothing that the process prints
   is taken for that.
3. Rank 0 starts the ranks of its own node. On other nodes a process of `RankNodes` starts them, keeps their
   standard input open, and ends them.

This module needs no torch.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Final, Protocol

import msgspec

from baton.config.engine import EngineConfig, RankSidecar
from baton.errors import BatonError, ConfigError, ModelError, WorkerLost
from baton.rpc.auth import Generations
from baton.rpc.connection import RankNetwork

# For all ranks of a replica to start and connect: importing torch takes a minute from a cold disk.
START_TIMEOUT_S: Final = 120.0
ERROR_OUTPUT: Final = 2  # of the starter, for everything that a TP worker prints


class TpAssignment(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of one TP worker process."""

    config: EngineConfig
    rank: int
    rendezvous: str  # path of the file where the ranks of a node find each other's groups for sums
    num_threads: int
    host_fd: int = -1  # of the memory of its host pages, which rank 0 maps too; -1: memory of its own
    sidecar: RankSidecar | None = None
    network: RankNetwork
    # The starter keeps stdin open: lines go to the sidecar, and the rank ends when stdin closes.
    has_guardian: bool = False


class TpWorkerFailure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The error that ended a TP worker."""

    kind: str  # name of the error's class
    message: str


class TpWorker(Protocol):
    """Rank 0's end of one TP worker."""

    rank: int

    def failure(self) -> BatonError | None:
        """The error that the TP worker has reported."""

    def check(self) -> None:
        """Raise the TP worker's own error, or WorkerLost, if its process has ended. Returns at once."""


class RankNodes(Protocol):
    """Starts the ranks of one replica on nodes other than rank 0's. The engine's caller implements it."""

    @property
    def host(self) -> str:
        """The address of rank 0's node, which ranks of the other nodes reach."""

    @property
    def keys(self) -> Generations:
        """The keys that prove the ranks to each other."""

    @property
    def link_timeout_s(self) -> float:
        """The link timeout of the connections between ranks, in seconds; see `Connection`."""

    def start(self, config: EngineConfig, num_threads: int, network: RankNetwork) -> Sequence[TpWorker]:
        """Start the ranks of all other nodes. Raises WorkerLost when a node cannot be reached.

        config: of the replica. num_threads: of each rank. network: of rank 0. ConfigError: the replica needs
        another number of nodes.
        """

    def failure(self) -> BatonError | None:
        """The error that a rank of another node has reported.

        Waits a moment for the report: it may come after the end of the rank's other connections.
        """

    def close(self, timeout_s: float = 0.0) -> None:
        """Wait for the ranks that still run, kill them after the timeout, and leave the nodes."""


class TpWorkerProcess:
    """A TP worker in a process of this machine: its process and its channel."""

    def __init__(self, assignment: TpAssignment) -> None:
        """Start the process. Owns the assignment's `host_fd`, also when the start fails with an OSError."""
        self.rank = assignment.rank
        self.host_fd = assignment.host_fd
        self._failure: BatonError | None = None
        with ExitStack() as unless_started:
            unless_started.callback(self._close_host_fd)
            self._reader, writer = Pipe(duplex=False)
            unless_started.enter_context(self._reader)
            with writer:  # the process then has the only writer: its end closes the pipe
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "baton.engine.runner.tp_worker", str(writer.fileno())],
                    stdin=subprocess.PIPE,
                    stdout=ERROR_OUTPUT,
                    pass_fds=(writer.fileno(), *((self.host_fd,) if self.host_fd >= 0 else ())),
                    cwd=_import_root(),
                    # Ctrl-C in the terminal is for rank 0, which then sends STOP_COMMAND.
                    process_group=0,
                )
            unless_started.pop_all()
        self.tell(msgspec.json.encode(assignment))  # `check` reports a process that died
        if not assignment.has_guardian:
            self._close_stdin()

    def tell(self, line: bytes) -> None:
        """Write a line to the standard input of a process that still runs. Does nothing after its end."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError, ValueError):  # ValueError: stdin is closed
            self.process.stdin.write(line + b"\n")
            self.process.stdin.flush()

    def failure(self) -> BatonError | None:
        """As `TpWorker`."""
        with suppress(EOFError, OSError):  # it was killed, perhaps in the middle of an answer
            if self._failure is None and self._reader.poll():
                self._failure = error_of(self.rank, self._reader.recv_bytes())
        return self._failure

    def check(self) -> None:
        """As `TpWorker`."""
        status = self.process.poll()
        if (failure := self.failure()) is not None:
            raise failure
        if status is not None:
            raise ended(self.rank, status)

    def watch(self, on_answer: Callable[[bytes], None]) -> int:
        """Call the function with each answer until the process has ended; return its status."""
        with suppress(EOFError, OSError):
            while True:
                on_answer(self._reader.recv_bytes())
        return self.process.wait()

    def end(self, timeout_s: float) -> None:
        """Wait for the process; kill it after the timeout."""
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def close(self, timeout_s: float) -> None:
        """Wait for the process; kill it after the timeout. No thread may be in `watch`."""
        self.end(timeout_s)
        self._close_stdin()
        self._reader.close()
        self._close_host_fd()

    def _close_host_fd(self) -> None:
        if self.host_fd >= 0:
            os.close(self.host_fd)
            self.host_fd = -1

    def _close_stdin(self) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()


def ended(rank: int, status: int) -> WorkerLost:
    """Return the error of a rank: its process ended without an answer that says why."""
    return WorkerLost(f"rank {rank} ended with status {status}")


def error_of(rank: int, answer: bytes) -> BatonError:
    """Return the error that an answer reports."""
    try:
        failure = msgspec.json.decode(answer, type=TpWorkerFailure)
    except msgspec.DecodeError as error:
        return WorkerLost(f"rank {rank} gave an answer that is no TpWorkerFailure: {error}")
    known = {kind.__name__: kind for kind in (ConfigError, ModelError)}
    kind = known.get(failure.kind, WorkerLost)
    return kind(f"rank {rank}: {failure.message}")


def _import_root() -> Path:
    """The folder that holds the `baton` package, installed or not."""
    return Path(sys.modules["baton.errors"].__file__ or "").resolve().parents[1]
