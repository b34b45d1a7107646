"""A rank among the ranks of its stage: its part of each tensor of the layers, and the sums of all parts.

engine/runner/replica_rank.py has the place of a stage among the stages of a replica.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import Final, Protocol, cast

import torch
from torch import Tensor
from torch._C._distributed_c10d import (
    AllreduceOptions,
    BroadcastOptions,
    PrefixStore,
    ProcessGroupGloo,
    Store,
)

from baton.errors import ConfigError, WorkerLost
from baton.kernels.collectives import share_memory

logger = logging.getLogger(__name__)

JOIN_TIMEOUT: Final = timedelta(seconds=60)  # for all ranks to meet, once their processes are up
STEP_TIMEOUT: Final = timedelta(seconds=60)  # a rank silent this long within a step is lost


class PendingCollective(Protocol):
    """A collective that has begun."""

    def wait(self) -> bool: ...


class Collectives(Protocol):
    """The used part of torch's process groups, for gloo and NCCL."""

    def allreduce(self, tensors: list[Tensor], opts: AllreduceOptions = ...) -> PendingCollective: ...

    def allgather(
        self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor]
    ) -> PendingCollective: ...

    def broadcast(self, tensors: list[Tensor], opts: BroadcastOptions) -> PendingCollective: ...


class StageGroup(Protocol):
    """The ranks of a stage, which call the same collectives in the same order. RuntimeError: one is gone."""

    def all_reduce(self, x: Tensor) -> None:
        """Replace x, contiguous and not empty, by the sum over all ranks, the same bits on each.

        No rank returns before all ranks have called.
        """

    def all_gather(self, x_TN: Tensor) -> Tensor:
        """[T, N] of every rank side by side: [T, size * N]."""

    def broadcast(self, x: Tensor) -> None:
        """Replace x, contiguous, by rank 0's tensor."""


@dataclass(frozen=True, slots=True)
class TorchGroup:
    """A StageGroup over a torch process group (gloo or NCCL)."""

    group: Collectives
    size: int

    def all_reduce(self, x: Tensor) -> None:
        """As `StageGroup`."""
        self.group.allreduce([x]).wait()

    def all_gather(self, x_TN: Tensor) -> Tensor:
        """As `StageGroup`."""
        parts = [torch.empty_like(x_TN) for _ in range(self.size)]
        self.group.allgather([parts], [x_TN.contiguous()]).wait()
        return torch.cat(parts, dim=1)

    def broadcast(self, x: Tensor) -> None:
        """As `StageGroup`."""
        options = BroadcastOptions()
        options.rootRank = 0
        options.timeout = STEP_TIMEOUT
        self.group.broadcast([x], options).wait()


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """One rank of a stage; the default is alone in its stage, where every exchange is a no-op."""

    rank: int = 0
    size: int = 1
    group: StageGroup | None = None  # tensors of a step

    def shard(self, size: int, *, what: str) -> tuple[int, int]:
        """The rank's [start, stop) of `size` equal items. ConfigError when they cannot be split evenly."""
        if size % self.size:
            raise ConfigError(f"{what}: {size} cannot be split over {self.size} tensor-parallel ranks")
        part = size // self.size
        return self.rank * part, (self.rank + 1) * part

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, in place, the same bits on every rank.

        No rank returns before all ranks have called, even for an empty tensor. A step without logits ends
        with such a sum, so that one rank's report about the step holds for the pages of all ranks.
        """
        if self.group is not None:
            with _as_worker_lost(f"{self._name} lost a peer"):
                self.group.all_reduce(x if x.numel() else x.new_zeros(1))
        return x

    def all_gather(self, x_TN: Tensor) -> Tensor:
        """[T, N] of every rank side by side: [T, size * N]."""
        if self.group is None:
            return x_TN
        with _as_worker_lost(f"{self._name} lost a peer"):
            return self.group.all_gather(x_TN)

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's tensor, in place on the other ranks."""
        if self.group is not None:
            with _as_worker_lost(f"{self._name} lost a peer"):
                self.group.broadcast(x)
        return x

    @property
    def _name(self) -> str:
        return f"tensor-parallel rank {self.rank} of {self.size}"


def join_stage(store: Store, stage: int, rank: int, size: int, device: torch.device) -> TensorParallel:
    """Meet the other ranks of the stage at `store`, which all ranks of a node use. No default group is made.

    The ranks exchange tensors through NCCL between GPUs, through shared memory between CPUs where every rank
    can map it, and otherwise through gloo. WorkerLost when the ranks do not all come within JOIN_TIMEOUT.
    """
    if size == 1:
        return TensorParallel()
    with _as_worker_lost(f"tensor-parallel rank {rank} of {size} did not meet the others"):
        if device.type == "cpu":
            gather = _Gather(PrefixStore(f"memory {stage}", store), rank, size)
            group = share_memory(rank, size, gather, STEP_TIMEOUT)
            if group is not None:
                return TensorParallel(rank, size, group)
            logger.warning("tensor-parallel ranks share no memory and sum through gloo, slower")
        connect = _nccl if device.type == "cuda" else _gloo
        torch_group = connect(PrefixStore(f"stage {stage}", store), rank, size)
        return TensorParallel(rank, size, TorchGroup(torch_group, size))


@contextmanager
def _as_worker_lost(what: str) -> Iterator[None]:
    """Raise WorkerLost for a library's error; the library's message, about its sockets, goes to the log."""
    try:
        yield
    except RuntimeError as error:
        logger.info("%s: %s", what, error)
        raise WorkerLost(what) from error


class _Gather:
    """Exchanges numbers between the ranks of a stage, through their store. All ranks make the same calls."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store = store
        self._rank, self._size = rank, size
        self._calls = count()
        store.set_timeout(JOIN_TIMEOUT)

    def __call__(self, numbers: list[int]) -> list[list[int]]:
        """Return the numbers of each rank, in order. RuntimeError when one does not call in time."""
        name = f"call {next(self._calls)} of rank"
        self._store.set(f"{name} {self._rank}", " ".join(str(int(number)) for number in numbers))
        answers = [self._store.get(f"{name} {rank}") for rank in range(self._size)]
        return [[int(number) for number in answer.split()] for answer in answers]


def _gloo(store: Store, rank: int, size: int) -> Collectives:
    """Gloo has no authentication: its sockets listen on loopback only."""
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # missing from torch's stubs
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = STEP_TIMEOUT
    return cast(Collectives, ProcessGroupGloo(store, rank, size, options))


def _nccl(store: Store, rank: int, size: int) -> Collectives:
    from torch._C._distributed_c10d import ProcessGroupNCCL  # absent from CPU builds

    options = ProcessGroupNCCL.Options()
    options._timeout = STEP_TIMEOUT
    return cast(Collectives, ProcessGroupNCCL(store, rank, size, options))
