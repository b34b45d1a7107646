"""Tensor parallelism: which part of a tensor a rank holds, and the sums and gathers between ranks."""

import logging
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, Protocol, cast

import torch
from torch import Tensor
from torch._C._distributed_c10d import (
    AllreduceOptions,
    BroadcastOptions,
    PrefixStore,
    ProcessGroupGloo,
    ReduceOp,
    Store,
)

from baton.errors import ConfigError, WorkerLost

logger = logging.getLogger(__name__)

JOIN_TIMEOUT: Final = timedelta(seconds=60)  # for all ranks to meet, once their processes are up
STEP_TIMEOUT: Final = timedelta(seconds=60)  # a rank silent this long within a step is lost
LOAD_TIMEOUT: Final = timedelta(minutes=10)  # between the first and the last rank to have loaded its part
IDLE_TIMEOUT: Final = timedelta(days=365)  # between steps a lost rank shows by its closed connection alone


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


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """One rank of a group; the default is a group of one, where every exchange is a no-op."""

    rank: int = 0
    size: int = 1
    group: Collectives | None = None  # tensors of a step
    commands: Collectives | None = None  # messages of rank 0, which may be silent for long

    @classmethod
    def join(cls, rank: int, size: int, store: Store, device: torch.device) -> "TensorParallel":
        """Meet the other ranks at `store`: NCCL between GPUs, gloo between CPUs. No default group is made.

        WorkerLost when they do not all come within JOIN_TIMEOUT.
        """
        try:
            commands = _gloo(PrefixStore("commands", store), rank, size, JOIN_TIMEOUT)
            prefixed = PrefixStore("step", store)
            if device.type == "cuda":
                return cls(rank, size, _nccl(prefixed, rank, size, STEP_TIMEOUT), commands)
            return cls(rank, size, _gloo(prefixed, rank, size, STEP_TIMEOUT), commands)
        except RuntimeError as error:
            raise _lost(f"tensor-parallel rank {rank} of {size} did not meet the others", error) from error

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
            self._wait(self.group.allreduce([x if x.numel() else x.new_zeros(1)]))
        return x

    def all_gather(self, x_TN: Tensor) -> Tensor:
        """[T, N] of every rank side by side: [T, size * N]."""
        if self.group is None:
            return x_TN
        parts = [torch.empty_like(x_TN) for _ in range(self.size)]
        self._wait(self.group.allgather([parts], [x_TN.contiguous()]))
        return torch.cat(parts, dim=1)

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's tensor, in place on the other ranks."""
        if self.group is not None:
            self._wait(_from_rank_0(self.group, x, STEP_TIMEOUT))
        return x

    def smallest(self, value: int) -> int:
        """The least of the ranks' values, on every rank."""
        if self.commands is None:
            return value
        least = torch.tensor([value])
        options = AllreduceOptions()
        options.reduceOp = ReduceOp(ReduceOp.MIN)
        options.timeout = LOAD_TIMEOUT  # the others may still be loading, each as much as this one has
        self._wait(self.commands.allreduce([least], options))
        return int(least)

    def send_command(self, message: bytes) -> None:
        """From rank 0 to all others; no-op in a group of one."""
        if self.commands is not None:
            self._wait(_from_rank_0(self.commands, torch.tensor([len(message)])))
            content = torch.frombuffer(bytearray(message), dtype=torch.uint8)
            self._wait(_from_rank_0(self.commands, content))

    def receive_command(self) -> bytes:
        """The next message of rank 0; waits as long as it takes, WorkerLost when rank 0 is gone."""
        if self.commands is None:
            raise ValueError("a group of one receives no commands")
        length = torch.zeros(1, dtype=torch.int64)
        self._wait(_from_rank_0(self.commands, length))
        message = torch.empty(int(length), dtype=torch.uint8)
        self._wait(_from_rank_0(self.commands, message))
        return message.numpy().tobytes()

    def _wait(self, work: PendingCollective) -> None:  # foreign errors are translated at this border
        try:
            work.wait()
        except RuntimeError as error:
            raise _lost(f"tensor-parallel rank {self.rank} of {self.size} lost a peer", error) from error


def _lost(what: str, error: RuntimeError) -> WorkerLost:
    """The WorkerLost for a library error; the library's message, about its sockets, goes to the log."""
    logger.info("%s: %s", what, error)
    return WorkerLost(what)


def _from_rank_0(group: Collectives, tensor: Tensor, timeout: timedelta = IDLE_TIMEOUT) -> PendingCollective:
    options = BroadcastOptions()
    options.rootRank = 0
    options.timeout = timeout
    return group.broadcast([tensor], options)


def _gloo(store: Store, rank: int, size: int, timeout: timedelta) -> Collectives:
    """Gloo has no authentication: its sockets listen on loopback only."""
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # missing from torch's stubs
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timeout
    return cast(Collectives, ProcessGroupGloo(store, rank, size, options))


def _nccl(store: Store, rank: int, size: int, timeout: timedelta) -> Collectives:
    from torch._C._distributed_c10d import ProcessGroupNCCL  # absent from CPU builds

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    return cast(Collectives, ProcessGroupNCCL(store, rank, size, options))
