"""A tensor-parallel rank other than 0: a process that repeats the steps that rank 0 plans.

1. Rank 0 starts one process for each other rank and writes its Assignment to the process's input.
2. The follower says READY on its output once nothing but the others keeps it from meeting them: rank 0
   learns at once of one that died before.
3. The ranks meet, load their parts of the weights and agree on the size of the pool.
4. The follower runs every step it is sent; a closed connection or STOP_COMMAND ends it.
"""

import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
import torch
from torch._C._distributed_c10d import FileStore

from baton.config import EngineConfig, cache_directory
from baton.engine.hf_config import read_model_config
from baton.engine.model_runner import ModelRunner, choose_device
from baton.engine.parallel import TensorParallel
from baton.engine.step_arrays import decode
from baton.errors import BatonError, WorkerLost
from baton.kernels import native

STOP_COMMAND: Final = b"stop"
READY: Final = b"ready"


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    config: EngineConfig
    rank: int
    rendezvous: str  # path of the file where the ranks find each other
    num_threads: int


class Followers:
    """The processes of ranks 1 and up, and rank 0's place in their group."""

    def __init__(self, config: EngineConfig) -> None:
        size = config.tensor_parallel_size
        self._folder = tempfile.TemporaryDirectory(prefix="baton-ranks-")  # readable by this user alone
        self._processes: list[subprocess.Popen[bytes]] = []
        rendezvous = str(Path(self._folder.name) / "store")
        self._num_threads = native.num_threads()
        share = max(1, self._num_threads // size)  # ranks that fight over cores stand still
        native.set_num_threads(share)
        try:
            for rank in range(1, size):
                assignment = Assignment(config=config, rank=rank, rendezvous=rendezvous, num_threads=share)
                self._processes.append(_start(assignment))
            for rank, process in enumerate(self._processes, start=1):
                _wait_until_ready(rank, process)
            store = FileStore(rendezvous, size)
            self.tp = TensorParallel.join(0, size, store, choose_device(config.device, 0))
        except BaseException:
            self.close(timeout_s=0.0)
            raise

    def close(self, timeout_s: float = 10.0) -> None:
        """Wait for the processes, which have been told to stop; end those that do not."""
        for process in self._processes:
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()
        self._folder.cleanup()
        native.set_num_threads(self._num_threads)


def follow(assignment: Assignment) -> None:
    """Serve as one rank until rank 0 says stop or goes away."""
    config, size = assignment.config, assignment.config.tensor_parallel_size
    native.keep_builds_in(cache_directory())
    native.set_num_threads(assignment.num_threads)
    device = choose_device(config.device, assignment.rank)
    store = FileStore(assignment.rendezvous, size)
    _say_ready()
    tp = TensorParallel.join(assignment.rank, size, store, device)
    runner = ModelRunner(config, read_model_config(Path(config.model)), tp)
    runner.load()
    runner.allocate()
    while (command := tp.receive_command()) != STOP_COMMAND:
        runner.execute(decode(command))


def _start(assignment: Assignment) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "baton.engine.follower"]
    # A group of its own: Ctrl-C in the terminal is for rank 0, which then says stop.
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=_import_root(), process_group=0
    )
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin:  # whoever waits for READY reports a process that is gone
        process.stdin.write(msgspec.json.encode(assignment))
    return process


def _wait_until_ready(rank: int, process: "subprocess.Popen[bytes]") -> None:
    """WorkerLost when the process ends before it is ready."""
    assert process.stdout is not None
    with process.stdout:
        answer = process.stdout.read()  # until the follower lets go of its output, or dies
    if answer != READY:
        raise WorkerLost(
            f"tensor-parallel rank {rank} ended with status {process.wait()} before it was ready"
        )


def _say_ready() -> None:
    """From here on, whatever is printed goes to the error output: nobody reads the other one any more."""
    sys.stdout.buffer.write(READY)
    sys.stdout.flush()
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())


def _import_root() -> Path:
    """The folder that holds the `baton` package, installed or not."""
    return Path(sys.modules["baton.errors"].__file__ or "").resolve().parents[1]


def main() -> None:
    torch.set_grad_enabled(False)
    try:
        follow(msgspec.json.decode(sys.stdin.buffer.read(), type=Assignment))
    except (WorkerLost, BrokenPipeError):
        sys.exit(0)  # rank 0 is gone, and with it whoever would read an error
    except BatonError as error:
        sys.exit(f"baton: a tensor-parallel rank cannot start: {error}")


if __name__ == "__main__":
    main()
