"""The layers that tensor parallelism cuts: each loads its rank's part and computes with it.

Shapes: T tokens, E hidden, N outputs, K inputs, V vocabulary.
"""

from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from baton.engine.models.parallel import TensorParallel
from baton.engine.models.weights import Checkpoint
from baton.errors import ModelError
from baton.kernels.embedding import LinearWeight, embedding, linear, pack_linear
from baton.kernels.huge_pages import HugeArena

# Outputs that are summed over ranks are summed in this many parts on a single rank too, so that two ranks
# add the same numbers in the same order.
NUM_SPLITS: Final = 2


class Parameters:
    """Reads parameters of one rank in the dtype and on the device of the model.

    Raises ModelError for a tensor with a NaN or an infinity, also one that only the model's dtype makes so:
    the model would answer nothing, and not say why.
    """

    def __init__(
        self, checkpoint: Checkpoint, tp: TensorParallel, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.checkpoint = checkpoint
        self.tp = tp
        self.dtype = dtype
        self.device = device
        self.packed_memory = HugeArena()

    def whole(self, name: str) -> Tensor:
        return self._place(name, self.checkpoint.tensor(name))

    def shard(self, name: str, dim: int) -> Tensor:
        """This rank's part along `dim`."""
        start, stop = self.tp.shard(self.checkpoint.shape(name)[dim], what=name)
        return self._place(name, self.checkpoint.slice(name, dim, start, stop))

    def rows(self, name: str) -> Tensor:
        """This rank's rows of a table: as many on every rank, zeros past the end of what splits unevenly."""
        size = self.checkpoint.shape(name)[0]
        num_rows = -(-size // self.tp.size)
        start, stop = (min(size, (self.tp.rank + i) * num_rows) for i in (0, 1))
        rows = self._place(name, self.checkpoint.slice(name, 0, start, stop))
        return functional.pad(rows, (0, 0, 0, num_rows - len(rows))) if len(rows) < num_rows else rows

    def has(self, name: str) -> bool:
        return name in self.checkpoint.names()

    def _place(self, name: str, tensor: Tensor) -> Tensor:
        # The checkpoint's tensors are views of a mapped file; a model keeps its own copy.
        placed = tensor.to(device=self.device, dtype=self.dtype)
        if placed.numel() and not all(bound.isfinite() for bound in placed.aminmax()):
            raise ModelError(f"tensor {name!r} has a NaN or an infinity in {self.dtype}")
        return placed.clone() if placed.data_ptr() == tensor.data_ptr() else placed


class ColumnParallelLinear:
    """Several projections of the same input as one: their outputs, of this rank, side by side."""

    def __init__(self, parameters: Parameters, names: tuple[str, ...]) -> None:
        weight_NK = torch.cat([parameters.shard(f"{name}.weight", 0) for name in names])
        self.weight: LinearWeight = pack_linear(weight_NK, parameters.packed_memory)
        self.bias_N: Tensor | None = None
        if parameters.has(f"{names[0]}.bias"):
            self.bias_N = torch.cat([parameters.shard(f"{name}.bias", 0) for name in names]).float()

    def __call__(self, x_TK: Tensor) -> Tensor:
        return linear(x_TK, self.weight, self.bias_N)


class RowParallelLinear:
    """A projection whose inputs are spread over the ranks; every rank gets the whole output."""

    def __init__(self, parameters: Parameters, name: str) -> None:
        self.tp = parameters.tp
        self.weight = pack_linear(parameters.shard(f"{name}.weight", 1), parameters.packed_memory)
        self.bias_N = parameters.whole(f"{name}.bias").float() if parameters.has(f"{name}.bias") else None

    def __call__(self, x_TK: Tensor) -> Tensor:
        if self.tp.size == 1:
            return linear(x_TK, self.weight, self.bias_N, num_splits=NUM_SPLITS)
        num_splits = max(1, NUM_SPLITS // self.tp.size)
        partial_TN = linear(x_TK, self.weight, num_splits=num_splits, out_dtype=torch.float32)
        sum_TN = self.tp.all_reduce(partial_TN)
        if self.bias_N is not None:
            sum_TN += self.bias_N
        return sum_TN.to(x_TK.dtype)


class VocabParallelEmbedding:
    """Token ids -> hidden states; each rank holds a range of the vocabulary."""

    def __init__(self, parameters: Parameters, name: str) -> None:
        self.tp = parameters.tp
        self.table_VE = parameters.rows(name)
        self.first_id = self.tp.rank * len(self.table_VE)

    def __call__(self, token_ids_T: Tensor) -> Tensor:
        if self.tp.size == 1:
            return embedding(token_ids_T, self.table_VE)
        local_T = token_ids_T - self.first_id
        is_mine_T = (local_T >= 0) & (local_T < len(self.table_VE))
        hidden_TE = embedding(local_T.where(is_mine_T, 0), self.table_VE)
        return self.tp.all_reduce(hidden_TE.mul_(is_mine_T[:, None]))  # one rank adds to zeros: exact


class VocabParallelHead:
    """Hidden states -> fp32 logits of the whole vocabulary, on every rank.

    table_VE: this rank's rows, as of `Parameters.rows`; shared, not copied, where the device multiplies
    with them as they lie.
    """

    def __init__(self, parameters: Parameters, table_VE: Tensor, vocab_size: int) -> None:
        self.tp = parameters.tp
        self.vocab_size = vocab_size
        self.weight = pack_linear(table_VE, parameters.packed_memory)

    def __call__(self, hidden_TE: Tensor) -> Tensor:
        logits_TV = self.tp.all_gather(linear(hidden_TE, self.weight, out_dtype=torch.float32))
        return logits_TV[:, : self.vocab_size]
