"""The layers that architectures are composed of. Each layer reads its rank's part and computes with it.

Shapes: T tokens, E hidden, N outputs, K inputs, V vocabulary, H query heads, D head dim. A rank has its share
of N, H and V.
"""

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from baton.engine.models.registry import ModelConfig
from baton.engine.models.weights import Parameters
from baton.engine.runner.model_input import ModelInput
from baton.kernels import rms_norm as norm_kernels
from baton.kernels.embedding import LinearWeight, embedding, linear, pack_linear
from baton.kernels.ragged_attention import ragged_attention
from baton.kernels.rope import rope
from baton.kernels.silu_mul import silu_mul
from baton.kernels.store_kv import store_kv

# Outputs that are summed over ranks are summed in this many parts on a single rank too, so that two ranks
# add the same numbers in the same order.
NUM_SPLITS: Final = 2


class RmsNorm:
    """Root mean square norm with a learned weight."""

    def __init__(self, parameters: Parameters, name: str, size: int, eps: float) -> None:
        self.weight_E = parameters.whole(f"{name}.weight", (size,))
        self.eps = eps

    def __call__(self, x_TE: Tensor) -> Tensor:
        return norm_kernels.rms_norm(x_TE, self.weight_E, self.eps)

    def add(self, x_TE: Tensor, residual_TE: Tensor) -> Tensor:
        """Add x to the residual in place, and return the normed sum."""
        return norm_kernels.add_rms_norm(x_TE, residual_TE, self.weight_E, self.eps)


class ColumnParallelLinear:
    """Several projections of one input in one multiplication; their outputs of this rank lie side by side."""

    def __init__(
        self, parameters: Parameters, num_outputs: Mapping[str, int], num_inputs: int, *, bias: bool = False
    ) -> None:
        """num_outputs: name of each projection -> outputs on all ranks together."""
        weights = [parameters.shard(f"{name}.weight", (n, num_inputs), 0) for name, n in num_outputs.items()]
        self.weight: LinearWeight = pack_linear(parameters.join(weights), parameters.packed_memory)
        self.bias_N: Tensor | None = None
        if bias:
            biases = [parameters.shard(f"{name}.bias", (n,), 0) for name, n in num_outputs.items()]
            self.bias_N = parameters.join(biases).float()

    def __call__(self, x_TK: Tensor) -> Tensor:
        return linear(x_TK, self.weight, self.bias_N)


class RowParallelLinear:
    """A projection of inputs that are spread over the ranks; every rank gets the whole output."""

    def __init__(
        self, parameters: Parameters, name: str, num_outputs: int, num_inputs: int, *, bias: bool = False
    ) -> None:
        """num_inputs: of all ranks together."""
        self.tp = parameters.tp
        weight_NK = parameters.shard(f"{name}.weight", (num_outputs, num_inputs), 1)
        self.weight = pack_linear(weight_NK, parameters.packed_memory)
        self.bias_N = parameters.whole(f"{name}.bias", (num_outputs,)).float() if bias else None

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
    """Token ids -> hidden states [T, E]; each rank holds a range of the vocabulary."""

    def __init__(self, parameters: Parameters, name: str, vocab_size: int, hidden_size: int) -> None:
        self.tp = parameters.tp
        self.table_VE = parameters.rows(f"{name}.weight", (vocab_size, hidden_size))
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


class Attention:
    """Rotary attention with grouped heads over paged keys and values: `self_attn` of a decoder layer."""

    def __init__(
        self,
        config: ModelConfig,
        parameters: Parameters,
        *,
        qkv_bias: bool = False,
        out_bias: bool = False,
        qk_norm: bool = False,
        window: int | None = None,
    ) -> None:
        """qk_norm: RMS norm of queries and keys in each head. window: position p sees (p - window, p]."""
        hidden, head_dim = config.hidden_size, config.head_dim
        q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
        self.head_dim = head_dim
        self.num_heads = config.num_heads // parameters.tp.size
        self.num_kv_heads = config.num_kv_heads // parameters.tp.size
        self.window = window
        self.qkv = ColumnParallelLinear(
            parameters, {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}, hidden, bias=qkv_bias
        )
        eps = config.rms_norm_eps
        self.query_norm = RmsNorm(parameters, "q_norm", head_dim, eps) if qk_norm else None
        self.key_norm = RmsNorm(parameters, "k_norm", head_dim, eps) if qk_norm else None
        self.out = RowParallelLinear(parameters, "o_proj", hidden, q_size, bias=out_bias)

    def attend(self, x_TE: Tensor, step: ModelInput, kv_pages: Tensor, cos_sin_MD: Tensor) -> Tensor:
        """Store the step's keys and values, then attend over all of them: [T, H * D], before `out`."""
        heads_THD = self.qkv(x_TE).view(len(x_TE), -1, self.head_dim)
        query_THD, key_TKD, value_TKD = heads_THD.split_with_sizes(
            (self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1
        )
        if self.query_norm is not None and self.key_norm is not None:
            query_THD, key_TKD = self.query_norm(query_THD), self.key_norm(key_TKD)
        rope(query_THD, key_TKD, cos_sin_MD, step.positions_T)
        store_kv(key_TKD, value_TKD, kv_pages, step.slots_T)
        scale = self.head_dim**-0.5
        out_THD = ragged_attention(query_THD, kv_pages, step.attention, scale=scale, window=self.window)
        return out_THD.flatten(1)


class SwiGlu:
    """The feed-forward part of a decoder layer: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, parameters: Parameters, *, bias: bool = False) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_up = ColumnParallelLinear(
            parameters, {"gate_proj": inner, "up_proj": inner}, hidden, bias=bias
        )
        self.down = RowParallelLinear(parameters, "down_proj", hidden, inner, bias=bias)

    def __call__(self, x_TE: Tensor) -> Tensor:
        return self.down(silu_mul(self.gate_up(x_TE)))
