"""A rank other than 0: a process that computes its part of the steps that rank 0 plans.

1. Rank 0 starts one process for each other rank of its node (rank_process.py). Ranks of other nodes are
   started there, by `RankNodes`.
2. The ranks meet over the connections of rank_links.py. Meanwhile rank 0 learns at once of a process that
   died, and after START_TIMEOUT_S of one that hangs.
3. They load their parts of the weights and agree on the size of the pool. A TP worker that fails writes its
   error to its pipe before its connections close, so that rank 0 finds the error when it sees them close.
4. If the caller of the engine has a sidecar for the rank, the sidecar starts beside it.
5. The TP worker runs every step that it receives, until STOP_COMMAND. Only after that its exit status is 0;
   a closed connection ends it, too.
"""

import io
import logging
import math
import mmap
import os
import secrets
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final, Protocol, cast

import msgspec
import torch
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from baton.config.engine import EngineConfig, RankSidecar
from baton.config.environment import cache_directory
from baton.config.loader import import_named
from baton.engine.cache.page_pool import StepMarks
from baton.engine.models.registry import read_model_config
from baton.engine.runner.model_runner import ModelRunner, check_memory, choose_device, model_fingerprint
from baton.engine.runner.rank_links import RankLinks, RankListener, connect_ranks
from baton.engine.runner.rank_process import (
    RankNodes,
    TpAssignment,
    TpWorker,
    TpWorkerFailure,
    TpWorkerProcess,
)
from baton.engine.runner.replica_rank import ReplicaRank
from baton.engine.runner.step_inputs import decode
from baton.errors import FAILED, ORPHANED, BatonError, ConfigError, WorkerLost
from baton.kernels import native
from baton.messages.bounds import LINK_TIMEOUT_S, Kind
from baton.messages.workers import RankZero
from baton.pages import PageLayout
from baton.rpc.auth import Generations, KeyRing
from baton.rpc.connection import RankNetwork

logger = logging.getLogger(__name__)
STOP_COMMAND: Final = b"stop"
REPLICA_BYTES: Final = 16
KEY_BYTES: Final = 32
STOP_TIMEOUT_S: Final = 10.0  # for all ranks together, which may have a step under way
LOOPBACK: Final = "127.0.0.1"


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
        """pool: [num_pages, num_layers, num_planes, heads_per_rank, page_size, head_dim] of this rank.

        steps: how far this rank has written the pool.
        """

    def hear(self, line: bytes) -> None:
        """Take a line that the rank's host has written to its stdin. Called on any thread; only for ranks on
        other nodes.
        """

    def close(self) -> None:
        """End the sidecar's threads."""


def make_sidecar(sidecar: RankSidecar) -> RunningSidecar:
    """Call the sidecar's factory; ConfigError when it does not exist."""
    return cast(RunningSidecar, import_named("sidecar", sidecar.factory)(sidecar.arguments))


class TpWorkers:
    """The processes of ranks 1 and up, and rank 0's place among them, `rank`."""

    def __init__(
        self, config: EngineConfig, sidecar: RankSidecar | None = None, nodes: RankNodes | None = None
    ) -> None:
        """sidecar: runs in each process of this node from the moment the rank has its pool.

        nodes: starts the ranks of other nodes, with sidecars of their own. ConfigError: it is needed.
        """
        if config.nnodes > 1 and nodes is None:
            raise ConfigError(
                f"nnodes: {config.nnodes} nodes for a worker need `baton serve` on a Ray cluster of several"
            )
        self._folder = tempfile.TemporaryDirectory(prefix="baton-ranks-")  # readable by this user alone
        rendezvous = str(Path(self._folder.name) / "store")
        self._processes: list[TpWorkerProcess] = []  # of this node
        self._workers: list[TpWorker] = []  # on all nodes, by rank
        self._nodes = nodes
        self._listener: RankListener | None = None
        self._links: RankLinks | None = None
        num_here = config.ranks_per_node
        self._num_threads = native.num_threads()
        # Ranks that compete for cores run slower than with fewer threads.
        share = max(1, self._num_threads // num_here)
        native.set_num_threads(share)
        try:
            if nodes is not None:
                network = self._listen(nodes.host, nodes.keys, nodes.link_timeout_s)
            else:
                own_key = KeyRing.of(secrets.token_bytes(KEY_BYTES), Kind.WORKER)
                network = self._listen(LOOPBACK, own_key.generations)
            for rank in range(1, num_here):
                assignment = TpAssignment(
                    config=config,
                    rank=rank,
                    rendezvous=rendezvous,
                    num_threads=share,
                    host_fd=os.memfd_create("kv-host") if config.cache.kv_disk_path is not None else -1,
                    sidecar=sidecar,
                    network=network,
                )
                self._processes.append(TpWorkerProcess(assignment))
                self._workers.append(self._processes[-1])
            if nodes is not None:
                self._workers += nodes.start(config, share, network)
            with self.explains_loss():
                self._links = _connect(0, config, network, self._listener)
                self.rank = _join(0, rendezvous, config, self._links)
        except BaseException:
            self.close(timeout_s=0.0)
            raise

    @contextmanager
    def explains_loss(self) -> Iterator[None]:
        """Raise the error that a TP worker reported in place of the WorkerLost that its end causes."""
        try:
            yield
        except WorkerLost as error:
            failures = [failure for worker in self._workers if (failure := worker.failure()) is not None]
            if not failures and self._nodes is not None and (late := self._nodes.failure()) is not None:
                failures.append(late)
            if not failures or error in failures:
                raise
            # A rank that fails may cause others to lose it.
            raise min(failures, key=lambda failure: isinstance(failure, WorkerLost)) from error

    @contextmanager
    def deadline(self, until_s: float) -> Iterator[None]:
        """Kill the ranks if the body still runs at this time.monotonic(): steps then raise WorkerLost."""
        timer = threading.Timer(max(0.0, until_s - time.monotonic()), self._kill)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()

    def _kill(self) -> None:
        for process in self._processes:
            process.close(0.0)
        if self._nodes is not None:
            self._nodes.close()

    def _check(self) -> None:
        for worker in self._workers:
            worker.check()

    def _listen(self, host: str, keys: Generations, link_timeout_s: float = LINK_TIMEOUT_S) -> RankNetwork:
        """Listen for the other ranks. host: the address of this node."""
        replica, ring = secrets.token_bytes(REPLICA_BYTES), KeyRing(Kind.WORKER, keys)
        self._listener = RankListener(host, ring, replica, self._check, link_timeout_s)
        return RankNetwork(
            rank_zero=RankZero(address=self._listener.address, replica=replica),
            own_host=host,
            link_timeout_s=link_timeout_s,
            keys=keys,
        )

    def host_pools(self, own: Tensor, layout: PageLayout) -> list[Tensor]:
        """The host pages of the other ranks, by rank, of a replica with a disk tier. own: rank 0's."""
        num_pages, _, *shape = own.shape  # stages may have other numbers of layers
        return [
            shared_zeros(each.host_fd, (num_pages, len(layout.layers_of(each.rank)), *shape), own.dtype)
            for each in self._processes
        ]

    def stop(self) -> None:
        """Send STOP_COMMAND and wait until the processes have ended; kill those that hang."""
        until_s = time.monotonic() + STOP_TIMEOUT_S
        with suppress(WorkerLost):  # a rank has ended already: others may not have heard of the end
            with self.deadline(until_s):
                self.rank.send_command(STOP_COMMAND)
            self.close(max(0.0, until_s - time.monotonic()))
            return
        self.close(timeout_s=0.0)

    def close(self, timeout_s: float) -> None:
        """Wait for the processes, which have received STOP_COMMAND; kill them after the timeout."""
        until_s = time.monotonic() + timeout_s
        for process in self._processes:
            process.close(max(0.0, until_s - time.monotonic()))
        if self._nodes is not None:
            self._nodes.close(max(0.0, until_s - time.monotonic()))
        if self._listener is not None:
            self._listener.close()
        if self._links is not None:
            self._links.close()
        self._folder.cleanup()
        native.set_num_threads(self._num_threads)


def shared_zeros(fd: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros in the memory of `fd`, which every process that has it shares."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if not num_bytes:
        return torch.zeros(tuple(shape), dtype=dtype)
    os.ftruncate(fd, num_bytes)
    return torch.frombuffer(mmap.mmap(fd, num_bytes), dtype=dtype).view(tuple(shape))


def _connect(
    rank: int, config: EngineConfig, network: RankNetwork, listener: RankListener | None = None
) -> RankLinks:
    """Connect a rank to other ranks. listener: of rank 0."""
    tp_size, pp_size = config.tensor_parallel_size, config.pipeline_parallel_size
    model = model_fingerprint(config) if config.nnodes > 1 else ""
    return connect_ranks(rank, network, listener, model=model, tp_size=tp_size, pp_size=pp_size)


def _join(rank: int, rendezvous: str, config: EngineConfig, links: RankLinks) -> ReplicaRank:
    tp_size, pp_size = config.tensor_parallel_size, config.pipeline_parallel_size
    store, device = FileStore(rendezvous, config.ranks_per_node), choose_device(config.device, rank)
    return ReplicaRank.join(rank, store, device, links, tp_size=tp_size, pp_size=pp_size)


# In the process of the TP worker.


def run_tp_worker(assignment: TpAssignment) -> None:
    """Serve as one rank until rank 0 sends STOP_COMMAND or its connection closes."""
    config = assignment.config
    guardian = _Guardian() if assignment.has_guardian else None
    native.keep_builds_in(cache_directory())
    native.set_num_threads(assignment.num_threads)
    choose_device(config.device, assignment.rank)  # raises an error before the rank connects
    if config.nnodes > 1:
        check_memory(config, read_model_config(Path(config.model)), assignment.rank // config.ranks_per_node)
    links = _connect(assignment.rank, config, assignment.network)
    _run_rank(assignment, _join(assignment.rank, assignment.rendezvous, config, links), guardian)
    links.flush()


def _run_rank(assignment: TpAssignment, rank: ReplicaRank, guardian: "_Guardian | None") -> None:
    config = assignment.config
    runner = ModelRunner(config, read_model_config(Path(config.model)), rank)
    runner.load()
    host_zeros = partial(shared_zeros, assignment.host_fd) if assignment.host_fd >= 0 else None
    if assignment.sidecar is None:
        runner.allocate(host_zeros=host_zeros)
        _run_steps(runner)
        return
    with closing(make_sidecar(assignment.sidecar)) as sidecar:
        if guardian is not None:
            guardian.pass_lines_to(sidecar)
        runner.allocate(sidecar.zeros_on_cpu, host_zeros)
        sidecar.start(assignment.rank, runner.pool.device, runner.steps)
        rank.smallest(0)  # rank 0 waits here for all sidecars
        _run_steps(runner)


class _Guardian:
    """Ends this process when the one that started it closes stdin or dies, and passes lines to the sidecar.

    A thread reads from now on. Lines that come before there is a sidecar are kept for it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sidecar: RunningSidecar | None = None
        self._early: list[bytes] = []
        threading.Thread(target=self._read, name="guardian", daemon=True).start()

    def pass_lines_to(self, sidecar: RunningSidecar) -> None:
        """Give the lines to this sidecar, those that have come and those that will."""
        with self._lock:
            self._sidecar = sidecar
            for line in self._early:
                _pass_on(line, sidecar)

    def _read(self) -> None:
        for line in _stdin():
            with self._lock:
                if self._sidecar is None:
                    self._early.append(line)
                else:
                    _pass_on(line, self._sidecar)
        os._exit(ORPHANED)


def _pass_on(line: bytes, sidecar: RunningSidecar) -> None:
    try:
        sidecar.hear(line)
    except Exception:
        logger.exception("the sidecar of this rank cannot take a line of its host")


def _stdin() -> io.FileIO:
    """Return unbuffered stdin.

    The guardian's thread blocks in a read. A buffered read would hold a lock that the interpreter needs to
    exit.
    """
    return io.FileIO(sys.stdin.fileno(), closefd=False)


def _run_steps(runner: ModelRunner) -> None:
    try:
        while (command := runner.rank.receive_command()) != STOP_COMMAND:
            runner.execute(decode(command))
    except WorkerLost:
        sys.exit(ORPHANED)  # nothing to report: rank 0 is gone, or loses the same rank


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
        run_tp_worker(msgspec.json.decode(_stdin().readline(), type=TpAssignment))
    except BrokenPipeError:
        sys.exit(ORPHANED)  # the starter is gone: there is no reader for an error
    except BatonError as error:
        _report(channel, error)
        sys.exit(FAILED)
    except Exception as error:
        _report(channel, error)
        raise  # a bug: the traceback goes to the error output


if __name__ == "__main__":
    main()
