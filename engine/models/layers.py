"""The layers that architectures compose. Each layer reads and uses its rank's part of the weights.

Shapes: T tokens, E hidden, N outputs, K inputs or kv heads, H query heads, D head dim, V vocabulary, M
positions. A tensor-parallel rank has its share of N, H, V and the kv heads.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from itertools import accumulate
from operator import itemgetter
from typing import Final, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from baton.engine.models.loading.weights import Matrix, Parameters, change_rows, chunk_inputs
from baton.engine.models.registry import ModelConfig, RopeConfig, RopeScaling, attention_factor
from baton.engine.runner.step_inputs import ModelInput
from baton.errors import ModelError
from baton.kernels.experts import Mixture, Routing
from baton.kernels.gated import SILU, Activation, gated
from baton.kernels.linear import LinearWeight, embedding, linear, linear_gated
from baton.kernels.lora import LowRankWeights
from baton.kernels.ragged_attention import ragged_attention
from baton.kernels.rms_norm import rms_norm
from baton.kernels.store_kv import rope_and_store

# Outputs that are summed over ranks are summed in this many parts on a single rank too, so that two ranks
# add the same numbers in the same order.
NUM_SPLITS: Final = 2


class Norm(Protocol):
    """A norm of hidden states, alone or after the sum with the residual."""

    def __call__(self, x_TE: Tensor) -> Tensor:
        """The normed x."""

    def add(self, x_TE: Tensor, residual_TE: Tensor) -> Tensor:
        """Add x to the residual in place, and return the normed sum."""


class RmsNorm:
    """Root mean square norm with a learned weight."""

    def __init__(
        self, parameters: Parameters, name: str, size: int, eps: float, *, offset: float | None = None
    ) -> None:
        """offset: added to the weight in fp32. Then the product alone is rounded, also where offset is 0."""
        self.weight_E = parameters.whole(f"{name}.weight", (size,))
        if offset is not None:
            self.weight_E = self.weight_E.float() + offset
        self.eps = eps

    def __call__(self, x_TE: Tensor) -> Tensor:
        return rms_norm(x_TE, self.weight_E, self.eps)

    def add(self, x_TE: Tensor, residual_TE: Tensor) -> Tensor:
        """Add x to the residual in place, and return the normed sum."""
        return rms_norm(x_TE, self.weight_E, self.eps, residual_TE)


class NoNorm:
    """Stands where other architectures have a norm."""

    def __call__(self, x_TE: Tensor) -> Tensor:
        return x_TE

    def add(self, x_TE: Tensor, residual_TE: Tensor) -> Tensor:
        """As `Norm.add`; shares the memory of the residual."""
        return residual_TE.add_(x_TE)


class ColumnParallelLinear:
    """Several projections of one input in one multiplication; their outputs of this rank lie side by side."""

    def __init__(
        self,
        parameters: Parameters,
        num_outputs: Mapping[str, int],
        num_inputs: int,
        *,
        bias: bool = False,
        fused: str | None = None,
        num_shards: Mapping[str, int] | None = None,
        reorder: Callable[[str, Tensor], Tensor] = lambda _, rows: rows,
    ) -> None:
        """num_outputs: name of each projection -> outputs on all ranks together.

        fused: the name of the one parameter in which the checkpoint has them side by side. num_shards: shards
        of the projections that have fewer than there are ranks. reorder: of a projection's name and this
        rank's outputs [N, ...], the outputs in another order.
        """
        sharded = {
            name: parameters.in_shards((num_shards or {}).get(name, parameters.tp.size))
            for name in num_outputs
        }
        weights = self._read_weights(sharded, num_outputs, num_inputs, fused)
        matrices = [
            change_rows(weight, partial(reorder, name))
            for name, weight in zip(num_outputs, weights, strict=True)
        ]
        self.weight: LinearWeight = parameters.pack(parameters.join_matrices(matrices))
        self.bias_N: Tensor | None = None
        if bias:
            biases = self._read_biases(sharded, num_outputs, fused)
            reordered = [reorder(name, rows) for name, rows in zip(num_outputs, biases, strict=True)]
            self.bias_N = parameters.join(reordered).float()
        self._adapters = parameters.adapters
        first_outputs = accumulate((matrix.shape[0] for matrix in matrices), initial=0)
        self._adapted: list[tuple[int, LowRankWeights]] = []  # the first output of each, its adapters
        for first, (name, n) in zip(first_outputs, num_outputs.items(), strict=False):
            if fused is None and (
                adapted := sharded[name].adapted(name, (n, num_inputs), 0, partial(reorder, name))
            ):
                self._adapted.append((first, adapted.weights))

    @staticmethod
    def _read_weights(
        sharded: Mapping[str, Parameters], num_outputs: Mapping[str, int], num_inputs: int, fused: str | None
    ) -> list[Matrix]:
        """This rank's rows of each projection."""
        if fused is None:
            return [sharded[name].matrix(name, (n, num_inputs), 0) for name, n in num_outputs.items()]
        shape = sum(num_outputs.values()), num_inputs
        whole = next(iter(sharded.values())).matrix(fused, shape, None)
        spans = _fused_spans(sharded, num_outputs, fused)
        return [change_rows(whole, itemgetter(span)) for span in spans]

    @staticmethod
    def _read_biases(
        sharded: Mapping[str, Parameters], num_outputs: Mapping[str, int], fused: str | None
    ) -> list[Tensor]:
        """This rank's part of the bias of each projection."""
        if fused is None:
            return [sharded[name].shard(f"{name}.bias", (n,), 0) for name, n in num_outputs.items()]
        whole = next(iter(sharded.values())).whole(f"{fused}.bias", (sum(num_outputs.values()),))
        return [whole[span] for span in _fused_spans(sharded, num_outputs, fused)]

    def __call__(self, x_TK: Tensor) -> Tensor:
        rows = None if self._adapters is None else self._adapters.rows
        if rows is None:
            return linear(x_TK, self.weight, self.bias_N)
        y_TN = linear(x_TK, self.weight, self.bias_N, out_dtype=torch.float32)
        for first, weights in self._adapted:
            own_TN = y_TN[:, first : first + weights.num_outputs]
            weights.expand(weights.shrink(x_TK, rows), rows, own_TN)
        return y_TN.to(x_TK.dtype)

    def gated(self, x_TK: Tensor, activation: Activation) -> Tensor:
        """The activation of the first half of the outputs times the second half."""
        if self._adapters is None or self._adapters.rows is None:
            return linear_gated(x_TK, self.weight, self.bias_N, activation)
        return gated(self(x_TK), activation)


def _fused_spans(
    sharded: Mapping[str, Parameters], num_outputs: Mapping[str, int], fused: str
) -> list[slice]:
    """This rank's rows of each projection among the rows of the fused parameter."""
    firsts = accumulate(num_outputs.values(), initial=0)
    bounds = [sharded[name].tp.shard(n, what=fused) for name, n in num_outputs.items()]
    return [slice(first + start, first + stop) for first, (start, stop) in zip(firsts, bounds, strict=False)]


class RowParallelLinear:
    """A projection of inputs that are spread over the ranks; every rank gets the whole output."""

    def __init__(
        self, parameters: Parameters, name: str, num_outputs: int, num_inputs: int, *, bias: bool
    ) -> None:
        """num_inputs: of all ranks together."""
        self.tp = parameters.tp
        weight_NK = parameters.matrix(name, (num_outputs, num_inputs), 1)
        self._num_splits = max(1, NUM_SPLITS // self.tp.size)
        self.weight = parameters.pack(weight_NK, num_splits=self._num_splits)
        self.bias_N = parameters.whole(f"{name}.bias", (num_outputs,)).float() if bias else None
        self._adapters = parameters.adapters
        self._adapted = parameters.adapted(name, (num_outputs, num_inputs), 1)

    def __call__(self, x_TK: Tensor) -> Tensor:
        rows = None if self._adapters is None or self._adapted is None else self._adapters.rows
        if self.tp.size == 1 and rows is None:
            return linear(x_TK, self.weight, self.bias_N, num_splits=self._num_splits)
        bias_N = self.bias_N if self.tp.size == 1 else None
        partial_TN = linear(x_TK, self.weight, bias_N, num_splits=self._num_splits, out_dtype=torch.float32)
        sum_TN = self.tp.all_reduce(partial_TN)
        if self.bias_N is not None and bias_N is None:
            sum_TN += self.bias_N
        if self._adapted is not None and rows is not None:
            weights = self._adapted.weights
            hidden_TR = weights.shrink(x_TK, rows, num_splits=self._num_splits)
            weights.expand(self.tp.all_reduce(hidden_TR), rows, sum_TN)
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

    table_VE: this rank's rows, as in `Parameters.rows`; shared, not copied, where the device multiplies
    with them as they lie.
    """

    def __init__(self, parameters: Parameters, table_VE: Tensor, vocab_size: int) -> None:
        self.tp = parameters.tp
        self.vocab_size = vocab_size
        self.weight = parameters.pack_head(table_VE)

    def __call__(self, hidden_TE: Tensor) -> Tensor:
        logits_TV = linear(hidden_TE, self.weight, out_dtype=torch.float32)
        if self.tp.size > 1:
            logits_TV = self.tp.all_gather(logits_TV)
        return logits_TV[:, : self.vocab_size]


class AttentionLayer(Protocol):
    """`self_attn` of a decoder layer."""

    rope: RopeConfig
    out: RowParallelLinear

    @property
    def rope_dim(self) -> int:
        """The width of the table of cosines and sines."""

    @property
    def window(self) -> int | None:
        """See `Model.windows`."""

    def attend(self, x_TE: Tensor, step: ModelInput, kv_pages: Tensor, cos_sin_MD: Tensor) -> Tensor:
        """Store the step's keys and values, then attend over all of them: [T, H * V], before `out`."""


class Attention:
    """Rotary attention with grouped heads over paged keys and values: `self_attn` of a decoder layer."""

    def __init__(
        self,
        config: ModelConfig,
        parameters: Parameters,
        *,
        bias: bool = False,
        qkv_bias: bool = False,
        qk_norm: Literal["head", "projection"] | None = None,
        norm_offset: float | None = None,
        window: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        has_sinks: bool = False,
        rope: RopeConfig | None = None,
        fused: str | None = None,
        out_name: str = "o_proj",
    ) -> None:
        """bias: of all projections. qkv_bias: of all but `out`. norm_offset: see `RmsNorm`.

        qk_norm: RMS norm of queries and keys, in each head or over all heads. window: position p sees
        (p - window, p]. scale: of the scores, head_dim ** -0.5 by default. softcap: as in `ragged_attention`,
        and so are the sinks, which `sinks` holds. rope: `config.rope` by default. fused, out_name: names in
        the checkpoint, see `ColumnParallelLinear`.
        """
        hidden, head_dim = config.hidden_size, config.head_dim
        q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
        self.head_dim = self.rope_dim = head_dim
        self.num_heads = config.num_heads // parameters.tp.size
        # Fewer shards than ranks: some ranks share heads.
        self.num_kv_shards = min(parameters.tp.size, config.num_kv_heads)
        self.num_kv_heads = config.num_kv_heads // self.num_kv_shards
        self.window, self.softcap = window, softcap
        self.scale = head_dim**-0.5 if scale is None else scale
        self.rope = rope or config.rope
        self.qkv = ColumnParallelLinear(
            parameters,
            {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size},
            hidden,
            bias=bias or qkv_bias,
            fused=fused,
            num_shards={"k_proj": self.num_kv_shards, "v_proj": self.num_kv_shards},
            reorder=self._pair_up,
        )
        eps, self.tp = config.rms_norm_eps, parameters.tp
        self.query_norm: RmsNorm | None = None
        self.key_norm: RmsNorm | None = None
        self.norms_projection = qk_norm == "projection"
        if qk_norm is not None:
            sizes = (q_size, kv_size) if self.norms_projection else (head_dim, head_dim)
            self.query_norm = RmsNorm(parameters, "q_norm", sizes[0], eps, offset=norm_offset)
            self.key_norm = RmsNorm(parameters, "k_norm", sizes[1], eps, offset=norm_offset)
        self.sinks_H = parameters.shard("sinks", (config.num_heads,), 0).float() if has_sinks else None
        self.out = RowParallelLinear(parameters, out_name, hidden, q_size, bias=bias)

    def attend(self, x_TE: Tensor, step: ModelInput, kv_pages: Tensor, cos_sin_MD: Tensor) -> Tensor:
        """As `AttentionLayer.attend`."""
        heads_THD = self.qkv(x_TE).view(len(x_TE), -1, self.head_dim)
        query_THD, key_TKD, value_TKD = heads_THD.split_with_sizes(
            (self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1
        )
        if self.query_norm is not None and self.key_norm is not None:
            if self.norms_projection:
                query_THD = self._norm_projection(self.query_norm, query_THD, self.tp.size)
                key_TKD = self._norm_projection(self.key_norm, key_TKD, self.num_kv_shards)
            else:
                query_THD, key_TKD = self.query_norm(query_THD), self.key_norm(key_TKD)
        rope_and_store(query_THD, key_TKD, value_TKD, cos_sin_MD, step.positions_T, kv_pages, step.slots_T)
        out_THD = ragged_attention(
            query_THD,
            kv_pages,
            step.attention,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
            sinks_H=self.sinks_H,
        )
        return out_THD.flatten(1)

    def is_plain(self, config: ModelConfig) -> bool:
        """True for the config's heads, with the default scale, and norms of queries and keys in each head, if
        any: no soft cap, no sinks.
        """
        heads, expected = (self.num_heads, self.num_kv_heads), (config.num_heads, config.num_kv_heads)
        is_usual = self.scale == self.head_dim**-0.5 and not self.norms_projection
        has_more = self.softcap is not None or self.sinks_H is not None
        return heads == expected and self.head_dim == config.head_dim and is_usual and not has_more

    def _norm_projection(self, norm: RmsNorm, heads_THD: Tensor, num_shards: int) -> Tensor:
        """The norm over the heads of all ranks; each rank norms all of them, so that no bit differs."""
        ranks_TRN = self.tp.all_gather(heads_THD.flatten(1)).unflatten(1, (self.tp.size, -1))
        shards_TSN = ranks_TRN[:, :: self.tp.size // num_shards]
        normed_TSN = norm(shards_TSN.flatten(1)).view(shards_TSN.shape)
        return normed_TSN[:, self.tp.rank * num_shards // self.tp.size].view(heads_THD.shape)

    def _pair_up(self, name: str, rows: Tensor) -> Tensor:
        """Queries and keys in the order of `rope_table`, where only a part of each head is rotated.

        The kernels rotate dimension i with i + D / 2. In the checkpoint dimension i < R / 2 turns with
        i + R / 2, and those from R on stay. Scores do not depend on the order.
        """
        rotated, half = self.rope.rotary_dim(self.head_dim), self.head_dim // 2
        if rotated == self.head_dim or name == "v_proj":
            return rows
        still = (self.head_dim - rotated) // 2
        first, second, third, fourth = rows.unflatten(0, (-1, self.head_dim)).split(
            (rotated // 2, rotated // 2, still, still), dim=1
        )
        assert first.shape[1] + third.shape[1] == half
        return torch.cat((first, third, second, fourth), dim=1).flatten(0, 1)


class GatedMlp:
    """The feed-forward part of a decoder layer: down(activation(gate(x)) * up(x)), SwiGLU by default."""

    def __init__(
        self,
        config: ModelConfig,
        parameters: Parameters,
        *,
        bias: bool = False,
        inner: int | None = None,
        activation: Activation = SILU,
        fused: str | None = None,
    ) -> None:
        """inner: width, `intermediate_size` by default. fused: see `ColumnParallelLinear`."""
        hidden, inner = config.hidden_size, inner or config.intermediate_size
        self.activation = activation
        self.gate_up = ColumnParallelLinear(
            parameters, {"gate_proj": inner, "up_proj": inner}, hidden, bias=bias, fused=fused
        )
        self.down = RowParallelLinear(parameters, "down_proj", hidden, inner, bias=bias)

    def __call__(self, x_TE: Tensor) -> Tensor:
        return self.down(self.gate_up.gated(x_TE, self.activation))


class ExpertTensors(NamedTuple):
    """This rank's experts of a layer: whole experts with expert parallelism, otherwise a part of each."""

    gate_up: list[Matrix]  # of each expert, [2 * F, E], the gate first
    down: list[Matrix]  # of each expert, [E, F]
    gate_up_bias_XN: Tensor | None = None  # fp32
    down_bias_XN: Tensor | None = None  # fp32, of all ranks together


def read_experts(
    config: ModelConfig,
    parameters: Parameters,
    inner: int,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> ExpertTensors:
    """Read experts of width `inner`, each with three parameters of its own. names: of gate, up and down."""
    experts, hidden = ExpertTensors([], []), config.hidden_size
    for index in parameters.expert_range(config.num_experts):
        expert = parameters.expert_parameters().scope(f"experts.{index}")
        halves = [expert.matrix(name, (inner, hidden), 0) for name in names[:2]]
        experts.gate_up.append(expert.join_matrices(halves))
        experts.down.append(expert.matrix(names[2], (hidden, inner), 1))
    return experts


def read_routing(config: ModelConfig, *, normalises: bool) -> Routing:
    """Read `num_experts_per_tok`. normalises: the weights of a token's experts sum to 1."""
    top_k, num_experts = config.keys.count("num_experts_per_tok"), config.num_experts
    if top_k > num_experts:
        raise ModelError(
            f"{config.keys.source}: {top_k} experts of a token cannot be chosen from {num_experts}"
        )
    return Routing(top_k=top_k, normalises=normalises)


class SparseMlp:
    """A mixture of experts: a router chooses some feed-forward parts for each token, and weighs them.

    The ranks split every expert, or have whole experts each. In both cases the sums of the ranks are added.
    """

    def __init__(
        self,
        config: ModelConfig,
        parameters: Parameters,
        experts: ExpertTensors,
        routing: Routing,
        *,
        activation: Activation = SILU,
        router: str = "gate",
        router_bias: bool = False,
        shared_inner: int | None = None,
    ) -> None:
        """router: its name. shared_inner: the width of `shared_expert`, which every token goes through, times
        a gate. Reads the number of experts.
        """
        hidden, num_experts = config.hidden_size, config.num_experts
        self.tp = parameters.tp
        routers = [parameters.whole(f"{router}.weight", (num_experts, hidden))]
        self.router_bias_X = (
            parameters.whole(f"{router}.bias", (num_experts,)).float() if router_bias else None
        )
        self.shared: GatedMlp | None = None
        if shared_inner is not None:
            self.shared = GatedMlp(config, parameters.scope("shared_expert"), inner=shared_inner)
            routers.append(parameters.whole("shared_expert_gate.weight", (1, hidden)))
        self.router = parameters.pack_router(parameters.join(routers))
        # The ranks that split one expert; size 1 with expert parallelism.
        expert_tp = parameters.expert_parameters().tp
        num_splits = max(1, NUM_SPLITS // expert_tp.size)
        if experts.down[0].shape[1] % (2 * num_splits):  # the C kernel takes pairs of inputs
            num_splits = 1
        splits = zip(*(chunk_inputs(down, num_splits) for down in experts.down), strict=True)
        biases = [experts.down_bias_XN if expert_tp.rank == 0 else None, None]  # added once
        self.mixture = Mixture(
            parameters.pack_experts(experts.gate_up, experts.gate_up_bias_XN),
            [parameters.pack_experts(list(s), bias) for s, bias in zip(splits, biases, strict=False)],
            routing,
            activation=activation,
            out_dtype=parameters.dtype if self.tp.size == 1 else torch.float32,
            num_experts=num_experts,
            first_expert=parameters.expert_range(num_experts).start,
            keeps_splits=expert_tp.size < self.tp.size,
        )

    def __call__(self, x_TE: Tensor) -> Tensor:
        shared_TE = None if self.shared is None else self.shared(x_TE)
        logits_TX = linear(x_TE, self.router, self.router_bias_X, out_dtype=torch.float32)
        out = self.mixture(x_TE, logits_TX, shared_TE if self.tp.rank == 0 else None)
        if self.tp.size == 1:
            return out
        sum_over_ranks = self.tp.all_reduce(out)
        return (sum_over_ranks.sum(0) if self.mixture.keeps_splits else sum_over_ranks).to(x_TE.dtype)


# Rotary position embeddings, with the ways models stretch them to longer contexts. The formulas are those of
# transformers' `modeling_rope_utils`; yarn is arXiv 2309.00071.


def rope_table(head_dim: int, max_positions: int, rope: RopeConfig) -> Tensor:
    """fp32 [M, D] on the CPU: cosines in the first half of a row, sines in the second.

    head_dim: even. Positions are [0, max_positions). Angles are fp32, as in the models' training code. The
    attention factor is already multiplied in. Where a part of each head is rotated, the last dimensions of
    each half stay.
    """
    rotated = rope.rotary_dim(head_dim)
    cos_sin_MD = torch.zeros((max_positions, head_dim))
    cos_sin_MD[:, : head_dim // 2] = 1.0
    if rotated:
        frequency_D = scaled_frequencies(rotated, rope.theta, rope.scaling, max_positions)
        angle_MD = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequency_D)
        factor = attention_factor(rope.scaling)
        cos_sin_MD[:, : rotated // 2] = angle_MD.cos() * factor
        cos_sin_MD[:, head_dim // 2 :][:, : rotated // 2] = angle_MD.sin() * factor
    return cos_sin_MD


def scaled_frequencies(head_dim: int, theta: float, scaling: RopeScaling, max_positions: int) -> Tensor:
    """Radians per position of each pair of dimensions, fp32 [D / 2]."""
    exponent_D = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequency_D = 1.0 / (theta**exponent_D)
    match scaling.rope_type:
        case "default":
            return frequency_D
        case "linear":
            return frequency_D / scaling.factor
        case "llama3":
            return _llama3(frequency_D, scaling)
        case "yarn":
            return _yarn(frequency_D, head_dim, theta, scaling)
        case "longrope":
            return _longrope(theta**exponent_D, scaling, max_positions)


def _longrope(base_D: Tensor, scaling: RopeScaling, max_positions: int) -> Tensor:
    """The short factors serve the original context, the long ones any longer one.

    The length that the engine allows decides, not that of a sequence: stored keys keep their angles.
    """
    factors = scaling.long_factor if scaling.uses_long_factors(max_positions) else scaling.short_factor
    if len(factors) != len(base_D):
        raise ValueError(f"longrope needs {len(base_D)} factors, got {len(factors)}")
    return 1.0 / (torch.tensor(factors, dtype=torch.float32) * base_D)


def _llama3(frequency_D: Tensor, scaling: RopeScaling) -> Tensor:
    """Stretch long waves by the factor, keep short ones, and blend the waves between."""
    wavelength_D = 2 * math.pi / frequency_D
    longest_kept = scaling.original_max_positions / scaling.high_freq_factor
    shortest_stretched = scaling.original_max_positions / scaling.low_freq_factor
    band = scaling.high_freq_factor - scaling.low_freq_factor
    kept_share_D = (scaling.original_max_positions / wavelength_D - scaling.low_freq_factor) / band
    blend_D = (1 - kept_share_D) * frequency_D / scaling.factor + kept_share_D * frequency_D
    stretched_D = torch.where(wavelength_D > shortest_stretched, frequency_D / scaling.factor, blend_D)
    return torch.where(wavelength_D < longest_kept, frequency_D, stretched_D)


def _yarn(frequency_D: Tensor, head_dim: int, theta: float, scaling: RopeScaling) -> Tensor:
    """A linear ramp over the dimensions from kept to stretched frequencies."""
    low = _dimension_of(scaling.beta_fast, head_dim, theta, scaling.original_max_positions)
    high = _dimension_of(scaling.beta_slow, head_dim, theta, scaling.original_max_positions)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a division by zero
    ramp_D = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)
    stretched_share_D = ramp_D.clamp(0, 1)
    return frequency_D / scaling.factor * stretched_share_D + frequency_D * (1 - stretched_share_D)


def _dimension_of(num_rotations: float, head_dim: int, theta: float, max_positions: int) -> float:
    """The pair of dimensions that turns `num_rotations` times over the original context."""
    return head_dim * math.log(max_positions / (num_rotations * 2 * math.pi)) / (2 * math.log(theta))
