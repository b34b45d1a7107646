"""The ranks of a replica, and what they send each other.

A replica is a pipeline of stages with some layers each; the ranks of a stage split its tensors among them.
Rank `stage * tp_size + tp_rank` is tensor-parallel rank `tp_rank` of its stage. Rank 0, in the first stage,
gives the commands.

1. `TensorParallel` (engine/models/parallel.py) is a rank's place in its stage.
2. `Pipeline` is the stage's place among the stages: hidden states go from each stage to the next one, and
   logits from the last stage to rank 0.
3. `ReplicaRank` has both, and the commands of rank 0 to all other ranks.

Commands, hidden states and logits go over the links of rank_links.py. A lost peer is a WorkerLost.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from baton.engine.models.parallel import TensorParallel, join_stage
from baton.engine.runner.rank_links import PendingReceive, RankLinks

LOAD_TIMEOUT_S: Final = 600.0  # between the first and the last rank to have loaded its part
NUMBER: Final = struct.Struct("<q")


class PendingTensor(NamedTuple):
    """A tensor that another stage sends."""

    tensor: Tensor  # filled in once `wait` has returned
    arrival: PendingReceive | None = None  # None: it is here
    on_arrival: Callable[[], None] = lambda: None  # called by `wait`

    def wait(self) -> Tensor:
        """The tensor. WorkerLost when the sender is gone."""
        if self.arrival is not None:
            self.arrival.wait()
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
    links: RankLinks | None = None  # None: there are no other ranks

    @property
    def is_first(self) -> bool:
        """True in the stage that embeds the tokens."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """True in the stage that computes the logits."""
        return self.stage == self.size - 1

    def send_on(self, hidden_TE: Tensor) -> None:
        """Send hidden states to the next stage. Returns before they have arrived."""
        assert self.links is not None, "there is one stage"
        self.links.send(self.rank + self.tp_size, hidden_TE)

    def receive(self, hidden_TE: Tensor) -> Tensor:
        """Fill in the hidden states of the stage before."""
        assert self.links is not None, "there is one stage"
        self.links.receive(self.rank - self.tp_size, hidden_TE).wait()
        return hidden_TE

    @property
    def answers(self) -> bool:
        """True on the one rank that sends results to rank 0. The last stage's other ranks have the same."""
        return self.size > 1 and self.rank == self._last_rank

    def answer(self, result: Tensor) -> None:
        """Send the result of a step, which may be empty, to rank 0. Returns before it has arrived."""
        assert self.links is not None, "there is one stage"
        self.links.send(0, result)

    def receive_answer(self, result: Tensor) -> PendingTensor:
        """On rank 0: begin to receive the result of the oldest step that has no receiver yet."""
        assert self.links is not None, "there is one stage"
        return PendingTensor(result, self.links.receive(self._last_rank, result))

    @property
    def _last_rank(self) -> int:
        return (self.size - 1) * self.tp_size


@dataclass(frozen=True, slots=True)
class ReplicaRank:
    """One rank of a replica; the default is the only rank."""

    tp: TensorParallel = field(default_factory=TensorParallel)
    pp: Pipeline = Pipeline()

    @classmethod
    def join(
        cls,
        index: int,
        store: Store,
        device: torch.device,
        links: RankLinks,
        *,
        tp_size: int = 1,
        pp_size: int = 1,
    ) -> "ReplicaRank":
        """Meet the other ranks of the stage, as in `join_stage`. links: to ranks of the replica."""
        stage, tp_rank = divmod(index, tp_size)
        tp = join_stage(store, stage, tp_rank, tp_size, device)
        return cls(tp, Pipeline(stage, pp_size, tp_size, index, links))

    @property
    def index(self) -> int:
        """The number of the rank in its replica."""
        return self.pp.stage * self.tp.size + self.tp.rank

    @property
    def size(self) -> int:
        """The ranks of the replica."""
        return self.pp.size * self.tp.size

    @property
    def links(self) -> RankLinks | None:
        """The links to other ranks; None: there are none."""
        return self.pp.links

    def smallest(self, value: int) -> int:
        """The least of the ranks' values, on every rank. Waits while other ranks load their parts."""
        if self.links is None:
            return value
        if self.index:
            self.links.send_bytes(0, NUMBER.pack(value))
            return self._receive_number(self.links, 0)
        others = range(1, self.size)
        least = min(value, *(self._receive_number(self.links, rank) for rank in others))
        for rank in others:
            self.links.send_bytes(rank, NUMBER.pack(least))
        return least

    @staticmethod
    def _receive_number(links: RankLinks, rank: int) -> int:
        (number,) = NUMBER.unpack(links.receive_bytes(rank, LOAD_TIMEOUT_S))
        return int(number)

    def send_command(self, message: bytes) -> None:
        """From rank 0 to all others; no-op in a group of one. Returns before they have received it."""
        if self.links is not None:
            for rank in range(1, self.size):
                self.links.send_bytes(rank, message)

    def receive_command(self) -> bytes:
        """The next message of rank 0; waits as long as it takes, WorkerLost when rank 0 is gone."""
        if self.links is None:
            raise ValueError("a group of one receives no commands")
        return self.links.receive_bytes(0, None)
