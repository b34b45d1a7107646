"""A tensor-parallel rank other than 0: a process that repeats the steps that rank 0 plans.

1. Rank 0 starts one process for each other rank and writes its Assignment to the process's input.
2. The follower says on its TpWorkerChannel that it is ready once nothing but the others keeps it from meeting
   them: rank 0 learns at once of one that died before, and in time of one that hangs.
3. The ranks meet, load their parts of the weights and agree on the size of the pool. A follower that cannot
   says why on the channel.
4. If the engine's caller has a companion for it, that is started beside it (companions.py).
5. The follower runs every step it is sent; a closed connection or STOP_COMMAND ends it.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
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
from baton.engine.cache.step_marks import StepMarks
from baton.engine.models.parallel import TensorParallel
from baton.engine.models.registry import read_model_config
from baton.engine.runner.model_runner import ModelRunner, choose_device
from baton.engine.runner.step_inputs import decode
from baton.errors import BatonError, ConfigError, ModelError, WorkerLost
from baton.kernels import native

# What a follower says to rank 0 before the ranks are a group, and why it went away.
#
# The pipe is the follower's alone, so that nothing it prints is taken for an answer. Rank 0 hears:
#
# 1. READY, or a Failure, or the end of a process that died; silence for START_TIMEOUT_S is a hang.
# 2. A Failure of loading, after which the group is broken. It is written before the group's connections
#    close, so whoever sees those close finds it here.

START_TIMEOUT_S: Final = 120.0  # to import torch, from a cold disk and on a busy machine, takes a minute
READY: Final = b"ready"


class TpWorkerFailure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    kind: str  # name of the error's class
    message: str


class TpWorkerChannel:
    """Rank 0's end for one follower."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._reader, self._writer = Pipe(duplex=False)

    @property
    def descriptor(self) -> int:
        """For the process to inherit; call `handed_over` once it has."""
        return self._writer.fileno()

    def handed_over(self) -> None:
        self._writer.close()  # the follower's is the only one now: its end is the end of the pipe

    def wait_until_ready(self) -> None:
        """Raises the follower's own error, WorkerLost on a hang, EOFError when it died without a word."""
        if not self._reader.poll(START_TIMEOUT_S):
            raise WorkerLost(
                f"tensor-parallel rank {self.rank} was not ready within {START_TIMEOUT_S:g} s: it is ended"
            )
        answer = self._reader.recv_bytes()
        if answer != READY:
            raise self._error(answer)

    def failure(self) -> BatonError | None:
        """What the follower has said about its end, if it has; asked after it was ready."""
        try:
            return self._error(self._reader.recv_bytes()) if self._reader.poll() else None
        except EOFError:
            return None

    def close(self) -> None:
        self._reader.close()
        self._writer.close()

    def _error(self, answer: bytes) -> BatonError:
        failure = msgspec.json.decode(answer, type=TpWorkerFailure)
        known = {kind.__name__: kind for kind in (ConfigError, ModelError)}
        kind = known.get(failure.kind, WorkerLost)
        return kind(f"tensor-parallel rank {self.rank}: {failure.message}")


class RankZero:
    """The follower's end."""

    def __init__(self, descriptor: int) -> None:
        self._writer = Connection(descriptor, readable=False)

    def close(self) -> None:
        self._writer.close()

    def say_ready(self) -> None:
        self._writer.send_bytes(READY)

    def say_failure(self, error: Exception) -> None:
        """Nothing is raised when rank 0 is gone: nobody is left to tell."""
        own = isinstance(error, BatonError)
        message = str(error) if own else f"{type(error).__name__}: {error}"
        failure = TpWorkerFailure(kind=type(error).__name__, message=message)
        try:
            self._writer.send_bytes(msgspec.json.encode(failure))
        except OSError:
            return


# What runs beside the steps of a rank that is a process of its own, by the will of the engine's caller.
#
# The life of a companion, in the rank's process:
#
# 1. It is made before the pool. On a CPU `zeros_on_cpu` gives the pool's memory.
# 2. `start` is given the pool, which steps fill from then on. It returns at once, and has threads of its own.
# 3. `close` comes after the last step, unless the process is killed.
#
# It may read and write pages that no step uses: whose they are is the business of whoever owns the ledger.


class RunningSidecar(Protocol):
    """What a Companion's factory makes. What it raises ends the rank, and rank 0 is told why."""

    def zeros_on_cpu(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor: ...

    def start(self, rank: int, pool: Tensor, steps: StepMarks) -> None:
        """pool: [num_pages, num_layers, 2, heads_per_rank, page_size, head_dim] of this rank.

        steps: how far this rank has written it.
        """

    def close(self) -> None: ...


def make_sidecar(sidecar: RankSidecar) -> RunningSidecar:
    """ConfigError when there is no such factory."""
    module, _, name = sidecar.factory.partition(":")
    try:
        factory = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"companion: there is no {sidecar.factory}: {error}") from error
    return cast(RunningSidecar, factory(sidecar.arguments))


STOP_COMMAND: Final = b"stop"
ERROR_OUTPUT: Final = 2  # rank 0's, for whatever a follower prints


class TpAssignment(msgspec.Struct, frozen=True, kw_only=True):
    config: EngineConfig
    rank: int
    rendezvous: str  # path of the file where the ranks find each other
    num_threads: int
    sidecar: RankSidecar | None = None


class TpWorkers:
    """The processes of ranks 1 and up, and rank 0's place in their group."""

    def __init__(self, config: EngineConfig, sidecar: RankSidecar | None = None) -> None:
        """companion: runs beside each of them, from the moment they have their pools."""
        size = config.tensor_parallel_size
        self._folder = tempfile.TemporaryDirectory(prefix="baton-ranks-")  # readable by this user alone
        self._processes: list[subprocess.Popen[bytes]] = []
        self._channels: list[TpWorkerChannel] = []
        rendezvous = str(Path(self._folder.name) / "store")
        self._num_threads = native.num_threads()
        share = max(1, self._num_threads // size)  # ranks that fight over cores stand still
        native.set_num_threads(share)
        try:
            for rank in range(1, size):
                assignment = TpAssignment(
                    config=config, rank=rank, rendezvous=rendezvous, num_threads=share, sidecar=sidecar
                )
                self._channels.append(TpWorkerChannel(rank))
                self._processes.append(_start(assignment, self._channels[-1]))
            for channel, process in zip(self._channels, self._processes, strict=True):
                _wait_until_ready(channel, process)
            store = FileStore(rendezvous, size)
            with self.telling_why():
                self.tp = TensorParallel.join(0, size, store, choose_device(config.device, 0))
        except BaseException:
            self.close(timeout_s=0.0)
            raise

    @contextmanager
    def telling_why(self) -> Iterator[None]:
        """A follower lost meanwhile is told in its own words, when it had any: its ModelError is raised."""
        try:
            yield
        except WorkerLost as error:
            failures = filter(None, (channel.failure() for channel in self._channels))
            failure = next(failures, None)
            if failure is None:
                raise
            raise failure from error

    def close(self, timeout_s: float = 10.0) -> None:
        """Wait for the processes, which have been told to stop; end those that do not."""
        for process in self._processes:
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for channel in self._channels:
            channel.close()
        self._folder.cleanup()
        native.set_num_threads(self._num_threads)


def run_tp_worker(assignment: TpAssignment, rank_0: RankZero) -> None:
    """Serve as one rank until rank 0 says stop or goes away."""
    config, size = assignment.config, assignment.config.tensor_parallel_size
    native.keep_builds_in(cache_directory())
    native.set_num_threads(assignment.num_threads)
    device = choose_device(config.device, assignment.rank)
    store = FileStore(assignment.rendezvous, size)
    rank_0.say_ready()
    tp = TensorParallel.join(assignment.rank, size, store, device)
    runner = ModelRunner(config, read_model_config(Path(config.model)), tp)
    runner.load()
    if assignment.sidecar is None:
        runner.allocate()
        _run_steps(runner)
        return
    with closing(make_sidecar(assignment.sidecar)) as sidecar:
        runner.allocate(sidecar.zeros_on_cpu)
        sidecar.start(assignment.rank, runner.pool.device, runner.steps)
        tp.smallest(0)  # rank 0 waits here for all companions
        _run_steps(runner)


def _run_steps(runner: ModelRunner) -> None:
    while (command := runner.tp.receive_command()) != STOP_COMMAND:
        runner.execute(decode(command))


def _start(assignment: TpAssignment, channel: TpWorkerChannel) -> "subprocess.Popen[bytes]":
    # A group of its own: Ctrl-C in the terminal is for rank 0, which then says stop.
    process = subprocess.Popen(
        [sys.executable, "-m", "baton.engine.runner.tp_worker", str(channel.descriptor)],
        stdin=subprocess.PIPE,
        stdout=ERROR_OUTPUT,
        pass_fds=(channel.descriptor,),
        cwd=_import_root(),
        process_group=0,
    )
    channel.handed_over()
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin:  # whoever waits for it reports a process that is gone
        process.stdin.write(msgspec.json.encode(assignment))
    return process


def _wait_until_ready(channel: TpWorkerChannel, process: "subprocess.Popen[bytes]") -> None:
    try:
        channel.wait_until_ready()
    except EOFError:
        raise WorkerLost(
            f"tensor-parallel rank {channel.rank} ended with status {process.wait()} before it was ready"
        ) from None


def _import_root() -> Path:
    """The folder that holds the `baton` package, installed or not."""
    return Path(sys.modules["baton.errors"].__file__ or "").resolve().parents[1]


def main() -> None:
    torch.set_grad_enabled(False)
    rank_0 = RankZero(int(sys.argv[1]))
    try:
        run_tp_worker(msgspec.json.decode(sys.stdin.buffer.read(), type=TpAssignment), rank_0)
    except (WorkerLost, BrokenPipeError):
        sys.exit(0)  # rank 0 is gone, and with it whoever would read an error
    except BatonError as error:
        rank_0.say_failure(error)
        sys.exit(1)
    except Exception as error:
        rank_0.say_failure(error)
        raise  # a bug of ours: where it happened is told on the error output


if __name__ == "__main__":
    main()
