"""A tensor-parallel rank other than 0: a process that repeats the steps that rank 0 plans.

1. Rank 0 starts one process for each other rank and writes its Assignment to the process's input.
2. The follower says on its FollowerChannel that it is ready once nothing but the others keeps it from meeting
   them: rank 0 learns at once of one that died before, and in time of one that hangs.
3. The ranks meet, load their parts of the weights and agree on the size of the pool. A follower that cannot
   says why on the channel.
4. If the engine's caller has a companion for it, that is started beside it (companions.py).
5. The follower runs every step it is sent; a closed connection or STOP_COMMAND ends it.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec
import torch
from torch._C._distributed_c10d import FileStore

from baton.companion import Companion
from baton.config import EngineConfig, cache_directory
from baton.engine.companions import make_companion
from baton.engine.follower_channel import FollowerChannel, RankZero
from baton.engine.hf_config import read_model_config
from baton.engine.model_runner import ModelRunner, choose_device
from baton.engine.parallel import TensorParallel
from baton.engine.step_arrays import decode
from baton.errors import BatonError, WorkerLost
from baton.kernels import native

STOP_COMMAND: Final = b"stop"
ERROR_OUTPUT: Final = 2  # rank 0's, for whatever a follower prints


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    config: EngineConfig
    rank: int
    rendezvous: str  # path of the file where the ranks find each other
    num_threads: int
    companion: Companion | None = None


class Followers:
    """The processes of ranks 1 and up, and rank 0's place in their group."""

    def __init__(self, config: EngineConfig, companion: Companion | None = None) -> None:
        """companion: runs beside each of them, from the moment they have their pools."""
        size = config.tensor_parallel_size
        self._folder = tempfile.TemporaryDirectory(prefix="baton-ranks-")  # readable by this user alone
        self._processes: list[subprocess.Popen[bytes]] = []
        self._channels: list[FollowerChannel] = []
        rendezvous = str(Path(self._folder.name) / "store")
        self._num_threads = native.num_threads()
        share = max(1, self._num_threads // size)  # ranks that fight over cores stand still
        native.set_num_threads(share)
        try:
            for rank in range(1, size):
                assignment = Assignment(
                    config=config, rank=rank, rendezvous=rendezvous, num_threads=share, companion=companion
                )
                self._channels.append(FollowerChannel(rank))
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


def follow(assignment: Assignment, rank_0: RankZero) -> None:
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
    if assignment.companion is None:
        runner.allocate()
        _run_steps(runner)
        return
    with closing(make_companion(assignment.companion)) as companion:
        runner.allocate(companion.zeros_on_cpu)
        companion.start(assignment.rank, runner.pool.device, runner.steps)
        tp.smallest(0)  # rank 0 waits here for all companions
        _run_steps(runner)


def _run_steps(runner: ModelRunner) -> None:
    while (command := runner.tp.receive_command()) != STOP_COMMAND:
        runner.execute(decode(command))


def _start(assignment: Assignment, channel: FollowerChannel) -> "subprocess.Popen[bytes]":
    # A group of its own: Ctrl-C in the terminal is for rank 0, which then says stop.
    process = subprocess.Popen(
        [sys.executable, "-m", "baton.engine.follower", str(channel.descriptor)],
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


def _wait_until_ready(channel: FollowerChannel, process: "subprocess.Popen[bytes]") -> None:
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
        follow(msgspec.json.decode(sys.stdin.buffer.read(), type=Assignment), rank_0)
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
