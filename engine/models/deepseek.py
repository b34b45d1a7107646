"""DeepSeek V2, V3 and R1, and Kimi K2: multi-head latent attention, and experts beside shared ones.

Attention is absorbed (arXiv 2405.04434, section 2.1): all heads share one key, the token's latent vector
beside a rotated part, and the latent vector is the value, too. A head projects its query to the latent space
before attention, and its output out of this space after it. So pages hold one row a token and layer.

Shapes: T tokens, E hidden, H query heads of the rank; D dims of a query head that are not rotated, R that
are, L of the latent vector, V of a head's output.
"""

import math
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from baton.engine.models.decoder import Decoder, DecoderLayer
from baton.engine.models.layers import (
    ColumnParallelLinear,
    GatedMlp,
    RmsNorm,
    RowParallelLinear,
    SparseMlp,
    read_experts,
    read_routing,
)
from baton.engine.models.loading.weights import Parameters
from baton.engine.models.registry import ModelConfig, yarn_mscale
from baton.engine.runner.step_inputs import ModelInput
from baton.errors import ModelError
from baton.kernels.experts import Routing
from baton.kernels.ragged_attention import ragged_attention
from baton.kernels.store_kv import rope_and_store

NORM_EPS: Final = 1e-6  # latent vectors are normed with this epsilon, all others with `rms_norm_eps`


class LatentAttention:
    """`self_attn` of a layer. Reads the sizes of heads and latent vectors, `attention_bias` and
    `rope_interleave`.
    """

    window = None

    def __init__(self, config: ModelConfig, parameters: Parameters) -> None:
        keys, hidden, bias = config.keys, config.hidden_size, config.keys.flag("attention_bias")
        self.plain_dim, self.rope_dim = keys.count("qk_nope_head_dim"), keys.count("qk_rope_head_dim")
        self.latent_dim, value_dim = keys.count("kv_lora_rank"), keys.count("v_head_dim")
        self.query_rank = keys.count("q_lora_rank") if "q_lora_rank" in keys else 0  # 0: of full rank
        self.num_heads = config.num_heads // parameters.tp.size
        self.rope = config.rope
        head_dim = self.plain_dim + self.rope_dim
        self.scale = _scale(config, head_dim)
        latent_width = self.latent_dim + self.rope_dim
        is_interleaved = keys.flag("rope_interleave", True)

        def reorder(width: int, rows: Tensor) -> Tensor:
            return _pair_up(rows, width, self.rope_dim) if is_interleaved else rows

        # Every rank computes the same latent vectors.
        down = {"q_a_proj": self.query_rank} if self.query_rank else {}
        down["kv_a_proj_with_mqa"] = latent_width
        self.down = ColumnParallelLinear(
            parameters,
            down,
            hidden,
            bias=bias,
            num_shards=dict.fromkeys(down, 1),
            reorder=lambda name, rows: rows if name == "q_a_proj" else reorder(latent_width, rows),
        )
        self.query_norm: RmsNorm | None = None
        if self.query_rank:
            self.query_norm = RmsNorm(parameters, "q_a_layernorm", self.query_rank, NORM_EPS)
        self.query = ColumnParallelLinear(
            parameters,
            {"q_b_proj" if self.query_rank else "q_proj": config.num_heads * head_dim},
            self.query_rank or hidden,
            reorder=lambda _, rows: reorder(head_dim, rows),
        )
        self.latent_norm = RmsNorm(parameters, "kv_a_layernorm", self.latent_dim, NORM_EPS)
        up_shape = config.num_heads * (self.plain_dim + value_dim), self.latent_dim
        up = parameters.dequantised(parameters.matrix("kv_b_proj", up_shape, 0))
        up_HNL = up.view(self.num_heads, self.plain_dim + value_dim, self.latent_dim)
        key_HDL, value_HVL = up_HNL.split((self.plain_dim, value_dim), dim=1)
        self.to_latent, self.from_latent = map(parameters.pack_heads, (key_HDL.mT, value_HVL))
        self.out = RowParallelLinear(parameters, "o_proj", hidden, config.num_heads * value_dim, bias=bias)

    def attend(self, x_TE: Tensor, step: ModelInput, kv_pages: Tensor, cos_sin_MD: Tensor) -> Tensor:
        """Store the step's latent vectors, then attend over all of them: [T, H * V], before `out`."""
        sizes = (self.query_rank, self.latent_dim, self.rope_dim)
        query_input, latent_TL, key_TR = self.down(x_TE).split_with_sizes(sizes, dim=1)
        query_input = x_TE if self.query_norm is None else self.query_norm(query_input)
        head_dims, latent_dim = (self.plain_dim, self.rope_dim), self.latent_dim
        heads = self.query(query_input).view(len(x_TE), self.num_heads, sum(head_dims))
        plain_THD, rotated_THR = heads.split_with_sizes(head_dims, dim=2)
        query = x_TE.new_empty((len(x_TE), self.num_heads, latent_dim + self.rope_dim))
        query[..., :latent_dim] = self.to_latent(plain_THD)
        query[..., latent_dim:] = rotated_THR
        rope_and_store(
            query[..., latent_dim:],
            key_TR.unsqueeze(1),
            self.latent_norm(latent_TL).unsqueeze(1),
            cos_sin_MD,
            step.positions_T,
            kv_pages,
            step.slots_T,
        )
        out_THL = ragged_attention(query, kv_pages, step.attention, scale=self.scale, value_dim=latent_dim)
        return self.from_latent(out_THL).flatten(1)


def _scale(config: ModelConfig, head_dim: int) -> float:
    """The scale of the scores, which yarn raises where `mscale_all_dim` is given."""
    scaling = config.rope.scaling
    mscale = yarn_mscale(scaling.factor, scaling.mscale_all_dim) if scaling.mscale_all_dim else 1.0
    return mscale**2 / math.sqrt(head_dim)


def _pair_up(rows: Tensor, width: int, rope_dim: int) -> Tensor:
    """The last `rope_dim` of each `width` rows in the order of `rope_table`, which turns i with i + R / 2.

    In the checkpoint neighbours turn together. Scores do not depend on the order.
    """
    plain, rotated = rows.unflatten(0, (-1, width)).split((width - rope_dim, rope_dim), dim=1)
    return torch.cat((plain, rotated[:, ::2], rotated[:, 1::2]), dim=1).flatten(0, 1)


class SharedExperts:
    """The sum of a mixture and of the experts that every token goes through."""

    def __init__(self, routed: SparseMlp, shared: GatedMlp) -> None:
        self.routed, self.shared = routed, shared

    def __call__(self, x_TE: Tensor) -> Tensor:
        return self.routed(x_TE).add_(self.shared(x_TE))


class Deepseek(Decoder):
    """Reads `first_k_dense_replace`, `moe_layer_freq`, `mlp_bias`, `n_shared_experts`, and what
    `read_grouped_routing` and attention read.
    """

    def make_layer(self, config: ModelConfig, parameters: Parameters, index: int) -> DecoderLayer:
        """As `Decoder.make_layer`."""
        keys, mlp = config.keys, parameters.scope("mlp")
        attention, bias = LatentAttention(config, parameters.scope("self_attn")), keys.flag("mlp_bias")
        num_dense, every = keys.require("first_k_dense_replace", int), keys.count("moe_layer_freq", 1)
        if not config.has_experts or index < num_dense or index % every:
            return DecoderLayer(config, parameters, attention, GatedMlp(config, mlp, bias=bias))
        inner = keys.count("moe_intermediate_size")
        routing = read_grouped_routing(config, mlp)
        routed = SparseMlp(config, mlp, read_experts(config, mlp, inner), routing)
        if not keys.get("n_shared_experts", int):
            return DecoderLayer(config, parameters, attention, routed)
        shared_inner = keys.count("n_shared_experts") * inner
        shared = GatedMlp(config, mlp.scope("shared_experts"), inner=shared_inner, bias=bias)
        return DecoderLayer(config, parameters, attention, SharedExperts(routed, shared))


# architecture -> its scores, and the ways to choose experts by them
ROUTINGS: Final = {
    "DeepseekV2ForCausalLM": ("softmax", ("greedy", "group_limited_greedy")),
    "DeepseekV3ForCausalLM": ("sigmoid", ("noaux_tc",)),
}


def read_grouped_routing(config: ModelConfig, parameters: Parameters) -> Routing:
    """Read how experts are scored, grouped and chosen. ModelError for a way that is not supported."""
    keys, (scores, methods) = config.keys, ROUTINGS[config.architecture]
    scoring, method = keys.get("scoring_func", str) or scores, keys.get("topk_method", str) or methods[0]
    if scoring != scores or method not in methods:
        raise ModelError(
            f"{keys.source}: 'scoring_func' should be {scores!r} and 'topk_method' one of "
            f"{', '.join(methods)}, got {scoring!r} and {method!r}"
        )
    uses_sigmoid = scores == "sigmoid"
    normalises = keys.flag("norm_topk_prob", uses_sigmoid)
    if normalises and not uses_sigmoid:  # published code disagrees on whether the scale applies then
        raise ModelError(f"{keys.source}: 'norm_topk_prob' should be false, got true")
    routing = replace(
        read_routing(config, normalises=normalises),
        uses_sigmoid=uses_sigmoid,
        scale=keys.positive("routed_scaling_factor", 2.5 if uses_sigmoid else 1.0),
    )
    if uses_sigmoid:
        bias_X = parameters.in_fp32().whole("gate.e_score_correction_bias", (config.num_experts,))
        routing = replace(routing, bias_X=bias_X)
    if method == "greedy":
        return routing
    num_groups, num_chosen = keys.count("n_group"), keys.count("topk_group")
    size = config.num_experts // num_groups
    least = 2 if uses_sigmoid else 1  # experts that the score of a group is made of
    if config.num_experts % num_groups or size < least or num_chosen > num_groups:
        raise ModelError(
            f"{keys.source}: {num_chosen} groups ('topk_group') cannot be chosen from {config.num_experts} "
            f"experts in {num_groups} groups ('n_group')"
        )
    if routing.top_k > num_chosen * size:
        raise ModelError(
            f"{keys.source}: {routing.top_k} experts of a token cannot be chosen from {num_chosen} groups "
            f"of {size}"
        )
    return replace(routing, num_groups=num_groups, num_chosen_groups=num_chosen)
