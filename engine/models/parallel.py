"""The ranks of a replica: the part of the model that a rank holds, and the tensors that ranks exchange.

A replica is a pipeline of stages with some layers each; the ranks of a stage split its tensors among them.
Rank `stage * tp_size + tp_rank` is tensor-parallel rank `tp_rank` of its stage. Rank 0, in the first stage,
gives the commands.

1. `TensorParallel` is a rank's place in its stage.
2. `Pipeline` is the stage's place among the stages: hidden states go from each stage to the next one, and
   logits from the last stage to rank 0.
3. `ReplicaRank` has both, and the commands of rank 0 to all other ranks.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from typing import Final, NamedTuple, Protocol, TypeAlias, cast

import torch
from torch import Tensor
from torch._C._distributed_c10d import (
    AllreduceOptions,
    BroadcastOptions,
    PrefixStore,
    ProcessGroupGloo,
    Store,
)
from torch.nn import functional

from baton.errors import ConfigError, WorkerLost
from baton.kernels.collectives import share_memory

logger = logging.getLogger(__name__)

JOIN_TIMEOUT: Final = timedelta(seconds=60)  # for all ranks to meet, once their processes are up
STEP_TIMEOUT: Final = timedelta(seconds=60)  # a rank silent this long within a step is lost
HEAD_BYTES: Final = 8192  # of a command's first message; a longer command has a second one
LOAD_TIMEOUT: Final = timedelta(minutes=10)  # between the first and the last rank to have loaded its part
IDLE_TIMEOUT: Final = timedelta(days=365)  # between steps a lost rank shows by its closed connection alone


class PendingCollective(Protocol):
    """A collective that has begun."""

    def wait(self, timeout: timedelta = ..., /) -> bool: ...


class PointToPoint(Protocol):
    """Tensors between two ranks; each direction keeps their order. RuntimeError: the other rank is gone."""

    def send(self, tensors: list[Tensor], dst: int, tag: int, /) -> PendingCollective: ...

    def recv(self, tensors: list[Tensor], src: int, tag: int, /) -> PendingCollective: ...


class Collectives(PointToPoint, Protocol):
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


class PendingTensor(NamedTuple):
    """A tensor that another stage sends."""

    tensor: Tensor  # filled in once `wait` has returned
    arrival: PendingCollective | None = None  # None: it is here
    receiver: str = ""
    on_arrival: Callable[[], None] = lambda: None  # called by `wait`

    def wait(self) -> Tensor:
        """The tensor. WorkerLost when the sender is gone."""
        if self.arrival is not None:
            _wait(self.arrival, self.receiver)
        self.on_arrival()
        return self.tensor


@dataclass(frozen=True, slots=True)
class Pipeline:
    """One stage of a replica, as one of its ranks sees it; the default is the only stage.

    Tensors between two ranks arrive in the order in which they were sent.
    """

    stage: int = 0
    size: int = 1
    tp_size: int = 1  # ranks of each stage
    rank: int = 0  # of the replica
    group: PointToPoint | None = None  # of all ranks
    _sending: deque[tuple[Tensor, PendingCollective]] = field(default_factory=deque)  # kept until received

    @property
    def is_first(self) -> bool:
        """True in the stage that embeds the tokens."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """True in the stage that computes the logits."""
        return self.stage == self.size - 1

    def send_on(self, hidden_TE: Tensor) -> None:
        """Begin to send hidden states to the next stage. Returns before they have arrived."""
        self._send(hidden_TE, self.rank + self.tp_size)

    def receive(self, hidden_TE: Tensor) -> Tensor:
        """Fill in the hidden states of the stage before."""
        return self._receive(hidden_TE, self.rank - self.tp_size).wait()

    @property
    def answers(self) -> bool:
        """True on the one rank that sends results to rank 0. The last stage's other ranks have the same."""
        return self.size > 1 and self.rank == self._last_rank

    def answer(self, result: Tensor) -> None:
        """Begin to send the result of a step, which may be empty, to rank 0."""
        self._send(result if result.numel() else result.new_zeros(1), 0)

    def receive_answer(self, result: Tensor) -> PendingTensor:
        """On rank 0: begin to receive the result of the oldest step that has no receiver yet."""
        pending = self._receive(result if result.numel() else result.new_zeros(1), self._last_rank)
        return pending._replace(tensor=result)

    @property
    def _last_rank(self) -> int:
        return (self.size - 1) * self.tp_size

    @property
    def _name(self) -> str:
        return f"pipeline stage {self.stage} of {self.size}"

    def _send(self, tensor: Tensor, rank: int) -> None:
        assert self.group is not None, "there is one stage"
        while len(self._sending) >= self.size:  # as many steps are in flight as there are stages
            _wait(self._sending.popleft()[1], self._name)
        tensor = tensor.contiguous()
        self._sending.append((tensor, _begin(self.group.send, tensor, rank, self._name)))

    def _receive(self, tensor: Tensor, rank: int) -> PendingTensor:
        assert self.group is not None, "there is one stage"
        return PendingTensor(tensor, _begin(self.group.recv, tensor, rank, self._name), self._name)


@dataclass(frozen=True, slots=True)
class ReplicaRank:
    """One rank of a replica; the default is the only rank."""

    tp: TensorParallel = TensorParallel()
    pp: Pipeline = field(default_factory=Pipeline)
    commands: PointToPoint | None = None  # messages of rank 0, which may be silent for long
    _unsent: deque[tuple[Tensor, PendingCollective]] = field(default_factory=deque)  # parts of commands

    @classmethod
    def join(
        cls,
        index: int,
        store: Store,
        device: torch.device,
        *,
        tp_size: int = 1,
        pp_size: int = 1,
        links: PointToPoint | None = None,
    ) -> "ReplicaRank":
        """Meet the other ranks of this node at `store`. No default group is made.

        links: carry commands and tensors between stages; None: there is one stage, and gloo carries commands.
        The ranks of a stage exchange tensors through NCCL between GPUs, through shared memory between CPUs
        where every rank can map it, and otherwise through gloo. WorkerLost when the ranks do not all come
        within JOIN_TIMEOUT.
        """
        size, (stage, tp_rank) = tp_size * pp_size, divmod(index, tp_size)
        connect = _nccl if device.type == "cuda" else _gloo
        among_tp: StageGroup | None = None
        with _as_worker_lost(f"rank {index} of {size} did not meet the others"):
            commands = links or _gloo(PrefixStore("commands", store), index, size, JOIN_TIMEOUT)
            if tp_size > 1 and device.type == "cpu":
                gather = _Gather(PrefixStore(f"memory {stage}", store), tp_rank, tp_size)
                among_tp = share_memory(tp_rank, tp_size, gather, STEP_TIMEOUT)
                if among_tp is None:
                    logger.warning("tensor-parallel ranks share no memory and sum through gloo, slower")
            if tp_size > 1 and among_tp is None:
                stage_store = PrefixStore(f"stage {stage}", store)
                among_tp = TorchGroup(connect(stage_store, tp_rank, tp_size, STEP_TIMEOUT), tp_size)
        tp = TensorParallel(tp_rank, tp_size, among_tp)
        return cls(tp, Pipeline(stage, pp_size, tp_size, index, links), commands)

    @property
    def index(self) -> int:
        """The number of the rank in its replica."""
        return self.pp.stage * self.tp.size + self.tp.rank

    @property
    def size(self) -> int:
        """The ranks of the replica."""
        return self.pp.size * self.tp.size

    def smallest(self, value: int) -> int:
        """The least of the ranks' values, on every rank."""
        if self.commands is None:
            return value
        least = torch.tensor([value])
        if self.index:
            self._pass_on(self.commands.send, least, 0)
            self._pass_on(self.commands.recv, least, 0)
            return int(least)
        others, other = range(1, self.size), torch.empty_like(least)
        for rank in others:
            self._pass_on(self.commands.recv, other, rank)
            least = torch.minimum(least, other)
        for rank in others:
            self._pass_on(self.commands.send, least, rank)
        return int(least)

    def _pass_on(self, operation: "_Operation", value: Tensor, rank: int) -> None:
        # The others may still be loading, each as much as this one has.
        _wait(_begin(operation, value, rank, self._name), self._name, LOAD_TIMEOUT)

    def send_command(self, message: bytes) -> None:
        """From rank 0 to all others; no-op in a group of one.

        Returns before ranks of other stages have received the message, unless they are far behind.
        """
        if self.commands is None:
            return
        content = torch.frombuffer(bytearray(len(message).to_bytes(8, "little") + message), dtype=torch.uint8)
        head = functional.pad(content[:HEAD_BYTES], (0, max(0, HEAD_BYTES - len(content))))
        parts = [head, content[HEAD_BYTES:]] if len(content) > HEAD_BYTES else [head]
        for rank in range(1, self.size):
            self._unsent.extend((part, _begin(self.commands.send, part, rank, self._name)) for part in parts)
        most = 0 if self.pp.size == 1 else 2 * self.size * self.pp.size
        while len(self._unsent) > most:
            _wait(self._unsent.popleft()[1], self._name, IDLE_TIMEOUT)

    def receive_command(self) -> bytes:
        """The next message of rank 0; waits as long as it takes, WorkerLost when rank 0 is gone."""
        if self.commands is None:
            raise ValueError("a group of one receives no commands")
        content = self._receive_command(HEAD_BYTES)
        stop = 8 + int.from_bytes(content[:8].numpy().tobytes(), "little")
        if stop > HEAD_BYTES:
            content = torch.cat((content, self._receive_command(stop - HEAD_BYTES)))
        return content[8:stop].numpy().tobytes()

    def _receive_command(self, num_bytes: int) -> Tensor:
        assert self.commands is not None
        part = torch.empty(num_bytes, dtype=torch.uint8)
        _wait(_begin(self.commands.recv, part, 0, self._name), self._name, IDLE_TIMEOUT)
        return part

    @property
    def _name(self) -> str:
        return f"rank {self.index} of {self.size}"


# Errors of collectives become WorkerLost here. who: the rank that loses a peer.


_Operation: TypeAlias = Callable[[list[Tensor], int, int], PendingCollective]


def _begin(operation: _Operation, tensor: Tensor, rank: int, who: str) -> PendingCollective:
    """Begin to send the tensor to a rank, or to receive it."""
    with _as_worker_lost(f"{who} lost a peer"):
        return operation([tensor], rank, 0)


def _wait(work: PendingCollective, who: str, timeout: timedelta | None = None) -> None:
    with _as_worker_lost(f"{who} lost a peer"):
        if timeout is None:
            work.wait()
        else:
            work.wait(timeout)


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
