"""Rank 1 of a group of two, in a process of its own, doing the jobs that rank 0 commands.

A job is a function of a ReplicaRank that both ranks run; its results are compared on rank 0.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from baton.engine.models.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
)
from baton.engine.runner.rank_links import RankListener, connect_ranks
from baton.engine.runner.replica_rank import ReplicaRank
from baton.messages.workers import RankZero
from baton.rpc.connection import RankNetwork
from tests.remote import CONTEXT
from tests.tiny_models import VOCAB_SIZE, dummy_parameters
from tests.transfer_ends import RING

CPU: Final = torch.device("cpu")
DTYPES: Final = ("float32", "bfloat16")
Job = Callable[[ReplicaRank, Path, str], Tensor]  # (group, directory of the model, dtype)


def values(seed: int, *shape: int, dtype: str) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(getattr(torch, dtype))


def reduce(rank: ReplicaRank, _: Path, dtype: str) -> Tensor:
    return rank.tp.all_reduce(values(rank.tp.rank, 5, 7, dtype=dtype))


def gather(rank: ReplicaRank, _: Path, dtype: str) -> Tensor:
    return rank.tp.all_gather(values(rank.tp.rank, 5, 14, dtype=dtype)[:, ::2])


def embedding(rank: ReplicaRank, directory: Path, dtype: str) -> Tensor:
    parameters = dummy_parameters(directory, rank.tp, dtype).scope("model")
    layer = VocabParallelEmbedding(parameters, "embed_tokens", VOCAB_SIZE, 32)
    return layer(torch.arange(VOCAB_SIZE))


def head(rank: ReplicaRank, directory: Path, dtype: str) -> Tensor:
    parameters = dummy_parameters(directory, rank.tp, dtype)
    layer = VocabParallelHead(parameters, parameters.rows("lm_head.weight", (VOCAB_SIZE, 32)), VOCAB_SIZE)
    return layer(values(3, 5, 32, dtype=dtype))


def columns(rank: ReplicaRank, directory: Path, dtype: str) -> Tensor:
    mlp = dummy_parameters(directory, rank.tp, dtype).scope("model.layers.0.mlp")
    layer = ColumnParallelLinear(mlp, {"gate_proj": 48}, 32, bias=True)
    return rank.tp.all_gather(layer(values(3, 5, 32, dtype=dtype)))


def rows(rank: ReplicaRank, directory: Path, dtype: str) -> Tensor:
    mlp = dummy_parameters(directory, rank.tp, dtype).scope("model.layers.0.mlp")
    layer = RowParallelLinear(mlp, "down_proj", 32, 48, bias=True)
    start, stop = rank.tp.shard(48, what="inputs")
    return layer(values(3, 5, 48, dtype=dtype)[:, start:stop])


JOBS: Final[dict[str, Job]] = {job.__name__: job for job in (reduce, gather, embedding, head, columns, rows)}


class Pair:
    """Rank 0 here, rank 1 in a process. `close` ends the process, which must not have been killed."""

    def __init__(self, folder: Path) -> None:
        listener = RankListener("127.0.0.1", RING, b"pair")
        rank_zero = RankZero(address=listener.address, replica=b"pair")
        network = RankNetwork(rank_zero=rank_zero, own_host="127.0.0.1", keys=RING.generations)
        self.process = CONTEXT.Process(target=_do_jobs, args=(folder, network))
        self.process.start()
        self.rank = join_pair(0, folder, network, listener)

    def run(self, job: str, directory: Path, dtype: str = "float32") -> Tensor:
        """The result of the job, which must have the same bits on both ranks."""
        self.rank.send_command(f"{job} {dtype} {directory}".encode())
        result = JOBS[job](self.rank, directory, dtype)
        mine, other = self.rank.tp.all_gather(result.float()).chunk(2, dim=1)
        assert torch.equal(mine, other), "the ranks disagree"
        return result

    def close(self) -> None:
        self.rank.send_command(b"stop")
        self.process.join(30)
        assert self.rank.links is not None
        self.rank.links.close()
        assert self.process.exitcode == 0


def join_pair(
    rank: int, folder: Path, network: RankNetwork, listener: RankListener | None = None
) -> ReplicaRank:
    """One of two tensor-parallel ranks that meet in a file `store`. listener: of rank 0."""
    links = connect_ranks(rank, network, listener, model="", tp_size=2, pp_size=1)
    return ReplicaRank.join(rank, FileStore(str(folder / "store"), 2), CPU, links, tp_size=2)


def _do_jobs(folder: Path, network: RankNetwork) -> None:
    torch.set_grad_enabled(False)
    rank = join_pair(1, folder, network)
    while (command := rank.receive_command()) != b"stop":
        job, dtype, directory = command.decode().split(" ", 2)
        rank.tp.all_gather(JOBS[job](rank, Path(directory), dtype).float())
