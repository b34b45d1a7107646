"""A rank other than 0: a process that computes its part of the steps that rank 0 plans.

1. Rank 0 starts one process for each other rank and writes a TpAssignment to its standard input.
2. The TP worker says READY on its channel before it meets the other ranks, so that rank 0 learns at once of a
   process that died, and after START_TIMEOUT_S of a process that hangs.
3. The ranks meet, load their parts of the weights and agree on the size of the pool. A TP worker that fails
   writes its error to the channel before its connections close, so that rank 0 finds the error when it sees
   them close.
4. If the caller of the engine has a sidecar for the rank, the sidecar starts beside it.
5. The TP worker runs every step that it receives; a closed connection or STOP_COMMAND ends it.

The channel is a pipe of its own, so that nothing that the process prints is taken for an answer.
"""

import math
import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Final, Protocol, cast

import msgspec
import torch
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from baton.config.engine import EngineConfig, RankSidecar
from baton.config.environment import cache_directory
from baton.engine.cache.page_pool import StepMarks
from baton.engine.models.parallel import ReplicaRank
from baton.engine.models.registry import read_model_config
from baton.engine.runner.model_runner import ModelRunner, choose_device
from baton.engine.runner.step_inputs import decode
from baton.errors import BatonError, ConfigError, ModelError, WorkerLost
from baton.kernels import native

START_TIMEOUT_S: Final = 120.0  # importing torch takes a minute from a cold disk on a busy machine
READY: Final = b"ready"
STOP_COMMAND: Final = b"stop"
ERROR_OUTPUT: Final = 2  # of rank 0, for everything that a TP worker prints


class RunningSidecar(Protocol):
    """Made by a RankSidecar's factory in the rank's process; an exception ends the rank and is reported to
    rank 0.

    1. The sidecar is made before the pool. On a CPU `zeros_on_cpu` gives the pool's memory.
    2. `start` gets the pool, which steps fill from then on. It returns at once; the sidecar has its own
       threads.
    3. `close` comes after the last step, unless the process is killed.

    The sidecar may read and write pages that no step uses; the owner of the ledger decides which.
    """

    def zeros_on_cpu(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Zeros for the pool of this rank."""

    def start(self, rank: int, pool: Tensor, steps: StepMarks) -> None:
        """pool: [num_pages, num_layers, 2, heads_per_rank, page_size, head_dim] of this rank.

        steps: how far this rank has written the pool.
        """

    def close(self) -> None:
        """End the sidecar's threads."""


def make_sidecar(sidecar: RankSidecar) -> RunningSidecar:
    """Call the sidecar's factory; ConfigError when it does not exist."""
    module, _, name = sidecar.factory.partition(":")
    try:
        factory = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"sidecar: there is no {sidecar.factory}: {error}") from error
    return cast(RunningSidecar, factory(sidecar.arguments))


class TpAssignment(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of one TP worker process."""

    config: EngineConfig
    rank: int
    rendezvous: str  # path of the file where the ranks find each other
    num_threads: int
    host_fd: int = -1  # of the memory of its host pages, which rank 0 maps too; -1: memory of its own
    sidecar: RankSidecar | None = None


class TpWorkerFailure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The error that ended a TP worker."""

    kind: str  # name of the error's class
    message: str


class _TpWorker:
    """Rank 0's end of one TP worker: its process and its channel."""

    def __init__(self, assignment: TpAssignment) -> None:
        self.rank = assignment.rank
        self.host_fd = assignment.host_fd
        self._reader, writer = Pipe(duplex=False)
        # A process group of its own: Ctrl-C in the terminal is for rank 0, which then sends STOP_COMMAND.
        self.process = subprocess.Popen(
            [sys.executable, "-m", "baton.engine.runner.tp_worker", str(writer.fileno())],
            stdin=subprocess.PIPE,
            stdout=ERROR_OUTPUT,
            pass_fds=(writer.fileno(), *((self.host_fd,) if self.host_fd >= 0 else ())),
            cwd=_import_root(),
            process_group=0,
        )
        writer.close()  # the process has the only writer now: its end closes the pipe
        assert self.process.stdin is not None
        with suppress(BrokenPipeError), self.process.stdin:  # `wait_until_ready` reports a process that died
            self.process.stdin.write(msgspec.json.encode(assignment))

    def wait_until_ready(self) -> None:
        """Raises the TP worker's own error, or WorkerLost when its process hangs or dies."""
        if not self._reader.poll(START_TIMEOUT_S):
            raise WorkerLost(f"rank {self.rank} was not ready within {START_TIMEOUT_S:g} s: it is ended")
        try:
            answer = self._reader.recv_bytes()
        except EOFError:
            raise WorkerLost(
                f"rank {self.rank} ended with status {self.process.wait()} before it was ready"
            ) from None
        if answer != READY:
            raise self._error(answer)

    def failure(self) -> BatonError | None:
        """The error that the TP worker has reported since it was ready."""
        try:
            return self._error(self._reader.recv_bytes()) if self._reader.poll() else None
        except EOFError:
            return None

    def close(self, timeout_s: float) -> None:
        """Wait for the process; kill it after the timeout."""
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.close()
        if self.host_fd >= 0:
            os.close(self.host_fd)
            self.host_fd = -1

    def _error(self, answer: bytes) -> BatonError:
        failure = msgspec.json.decode(answer, type=TpWorkerFailure)
        known = {kind.__name__: kind for kind in (ConfigError, ModelError)}
        kind = known.get(failure.kind, WorkerLost)
        return kind(f"rank {self.rank}: {failure.message}")


class TpWorkers:
    """The processes of ranks 1 and up, and rank 0's place among them, `rank`."""

    def __init__(self, config: EngineConfig, sidecar: RankSidecar | None = None) -> None:
        """sidecar: runs in each process from the moment the rank has its pool."""
        size = config.num_ranks
        self._folder = tempfile.TemporaryDirectory(prefix="baton-ranks-")  # readable by this user alone
        self._workers: list[_TpWorker] = []
        rendezvous = str(Path(self._folder.name) / "store")
        self._num_threads = native.num_threads()
        share = max(
            1, self._num_threads // size
        )  # ranks that compete for cores run slower than with fewer threads
        native.set_num_threads(share)
        try:
            for rank in range(1, size):
                assignment = TpAssignment(
                    config=config,
                    rank=rank,
                    rendezvous=rendezvous,
                    num_threads=share,
                    host_fd=os.memfd_create("kv-host") if config.cache.kv_disk_path is not None else -1,
                    sidecar=sidecar,
                )
                self._workers.append(_TpWorker(assignment))
            for worker in self._workers:
                worker.wait_until_ready()
            store = FileStore(rendezvous, size)
            with self.explains_loss():
                self.rank = _join(0, store, config)
        except BaseException:
            self.close(timeout_s=0.0)
            raise

    @contextmanager
    def explains_loss(self) -> Iterator[None]:
        """Raise the error that a TP worker reported in place of the WorkerLost that its end causes."""
        try:
            yield
        except WorkerLost as error:
            failure = next(filter(None, (worker.failure() for worker in self._workers)), None)
            if failure is None:
                raise
            raise failure from error

    def host_pools(self, own: Tensor) -> list[Tensor]:
        """The host pages of the other ranks, by rank, of a replica with a disk tier. own: rank 0's."""
        return [shared_zeros(worker.host_fd, own.shape, own.dtype) for worker in self._workers]

    def close(self, timeout_s: float = 10.0) -> None:
        """Wait for the processes, which have received STOP_COMMAND; kill them after the timeout."""
        for worker in self._workers:
            worker.close(timeout_s)
        self._folder.cleanup()
        native.set_num_threads(self._num_threads)


def shared_zeros(fd: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros in the memory of `fd`, which every process that has it shares."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if not num_bytes:
        return torch.zeros(tuple(shape), dtype=dtype)
    os.ftruncate(fd, num_bytes)
    return torch.frombuffer(mmap.mmap(fd, num_bytes), dtype=dtype).view(tuple(shape))


def _join(index: int, store: FileStore, config: EngineConfig) -> ReplicaRank:
    tp_size, pp_size = config.tensor_parallel_size, config.pipeline_parallel_size
    device = choose_device(config.device, index)
    return ReplicaRank.join(index, store, device, tp_size=tp_size, pp_size=pp_size)


def _import_root() -> Path:
    """The folder that holds the `baton` package, installed or not."""
    return Path(sys.modules["baton.errors"].__file__ or "").resolve().parents[1]


# In the process of the TP worker.


def run_tp_worker(assignment: TpAssignment, channel: Connection) -> None:
    """Serve as one rank until rank 0 sends STOP_COMMAND or its connection closes."""
    config = assignment.config
    native.keep_builds_in(cache_directory())
    native.set_num_threads(assignment.num_threads)
    choose_device(config.device, assignment.rank)  # raises an error before the rank is READY
    store = FileStore(assignment.rendezvous, config.num_ranks)
    host_zeros = partial(shared_zeros, assignment.host_fd) if assignment.host_fd >= 0 else None
    channel.send_bytes(READY)
    rank = _join(assignment.rank, store, config)
    runner = ModelRunner(config, read_model_config(Path(config.model)), rank)
    runner.load()
    if assignment.sidecar is None:
        runner.allocate(host_zeros=host_zeros)
        _run_steps(runner)
        return
    with closing(make_sidecar(assignment.sidecar)) as sidecar:
        runner.allocate(sidecar.zeros_on_cpu, host_zeros)
        sidecar.start(assignment.rank, runner.pool.device, runner.steps)
        rank.smallest(0)  # rank 0 waits here for all sidecars
        _run_steps(runner)


def _run_steps(runner: ModelRunner) -> None:
    while (command := runner.rank.receive_command()) != STOP_COMMAND:
        runner.execute(decode(command))


def _report(channel: Connection, error: Exception) -> None:
    is_ours = isinstance(error, BatonError)
    message = str(error) if is_ours else f"{type(error).__name__}: {error}"
    with suppress(OSError):  # rank 0 is gone
        channel.send_bytes(msgspec.json.encode(TpWorkerFailure(type(error).__name__, message)))


def main() -> None:
    """Read a TpAssignment from standard input and run its TP worker."""
    torch.set_grad_enabled(False)
    channel = Connection(int(sys.argv[1]), readable=False)
    try:
        run_tp_worker(msgspec.json.decode(sys.stdin.buffer.read(), type=TpAssignment), channel)
    except (WorkerLost, BrokenPipeError):
        sys.exit(0)  # rank 0 is gone: there is no reader for an error
    except BatonError as error:
        _report(channel, error)
        sys.exit(1)
    except Exception as error:
        _report(channel, error)
        raise  # a bug: the traceback goes to the error output


if __name__ == "__main__":
    main()
