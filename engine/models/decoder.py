"""A decoder-only transformer: the layers that architectures compose, then the frame around the layers.

Each layer reads and uses its rank's part of the weights. `Decoder` is the frame: embedding, layers, norm,
head, and the fused CPU stack.

Shapes: T tokens, R rows with wanted logits, E hidden, N outputs, K inputs or kv heads, H query heads, D head
dim, V vocabulary. A tensor-parallel rank has its share of N, H, V and the kv heads.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Final

import torch
from torch import Tensor

from baton.engine.models.registry import ModelConfig
from baton.engine.models.rope_table import rope_table
from baton.engine.models.weights import Parameters
from baton.engine.runner.step_inputs import ModelInput
from baton.errors import ModelError
from baton.kernels import rms_norm as norm_kernels
from baton.kernels.decoder_stack import DecoderStack, LayerGroups, StackLayer, StackShape, can_stack
from baton.kernels.experts import Mixture
from baton.kernels.gated import SILU, Activation
from baton.kernels.linear import LinearWeight, embedding, linear, linear_gated
from baton.kernels.ragged_attention import ragged_attention
from baton.kernels.store_kv import rope_and_store

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
        self.weight: LinearWeight = parameters.pack(parameters.join(weights))
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
        self._num_splits = max(1, NUM_SPLITS // self.tp.size)
        self.weight = parameters.pack(weight_NK, num_splits=self._num_splits)
        self.bias_N = parameters.whole(f"{name}.bias", (num_outputs,)).float() if bias else None

    def __call__(self, x_TK: Tensor) -> Tensor:
        if self.tp.size == 1:
            return linear(x_TK, self.weight, self.bias_N, num_splits=self._num_splits)
        partial_TN = linear(x_TK, self.weight, num_splits=self._num_splits, out_dtype=torch.float32)
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
        self.weight = parameters.pack(table_VE)

    def __call__(self, hidden_TE: Tensor) -> Tensor:
        logits_TV = linear(hidden_TE, self.weight, out_dtype=torch.float32)
        if self.tp.size > 1:
            logits_TV = self.tp.all_gather(logits_TV)
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
        rope_and_store(query_THD, key_TKD, value_TKD, cos_sin_MD, step.positions_T, kv_pages, step.slots_T)
        scale = self.head_dim**-0.5
        out_THD = ragged_attention(query_THD, kv_pages, step.attention, scale=scale, window=self.window)
        return out_THD.flatten(1)


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
    ) -> None:
        """inner: outputs of gate and up; `intermediate_size` by default."""
        hidden, inner = config.hidden_size, inner or config.intermediate_size
        self.activation = activation
        self.gate_up = ColumnParallelLinear(
            parameters, {"gate_proj": inner, "up_proj": inner}, hidden, bias=bias
        )
        self.down = RowParallelLinear(parameters, "down_proj", hidden, inner, bias=bias)

    def __call__(self, x_TE: Tensor) -> Tensor:
        return self.down(linear_gated(x_TE, self.gate_up.weight, self.gate_up.bias_N, self.activation))


class SparseMlp:
    """A mixture of experts: a router chooses `top_k` feed-forward parts for each token, and weighs them.

    The ranks split each expert by its inner size, as they split a `GatedMlp`.
    """

    def __init__(
        self,
        config: ModelConfig,
        parameters: Parameters,
        inner: int,
        *,
        normalises: bool,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
        shared_inner: int | None = None,
    ) -> None:
        """inner: the width of an expert. normalises: the weights of a token's experts sum to 1.

        names: of an expert's gate, up and down. shared_inner: the width of `shared_expert`, which every token
        goes through, times a gate. Reads the number of experts and `num_experts_per_tok`.
        """
        hidden, num_experts = config.hidden_size, config.num_experts
        top_k = config.keys.count("num_experts_per_tok")
        if top_k > num_experts:
            raise ModelError(
                f"{config.keys.source}: {top_k} experts of a token cannot be chosen from {num_experts}"
            )
        self.tp = parameters.tp
        routers = [parameters.whole("gate.weight", (num_experts, hidden))]
        self.shared: GatedMlp | None = None
        if shared_inner is not None:
            self.shared = GatedMlp(config, parameters.scope("shared_expert"), inner=shared_inner)
            routers.append(parameters.whole("shared_expert_gate.weight", (1, hidden)))
        self.router = parameters.pack_router(parameters.join(routers))
        num_parts = max(1, NUM_SPLITS // self.tp.size)
        if inner // self.tp.size % (2 * num_parts):  # the C kernel takes pairs of inputs
            num_parts = 1
        gate_up, down = [], []
        for index in range(num_experts):
            expert = parameters.scope(f"experts.{index}")
            halves = [expert.shard(f"{name}.weight", (inner, hidden), 0) for name in names[:2]]
            gate_up.append(expert.join(halves))
            down.append(expert.shard(f"{names[2]}.weight", (hidden, inner), 1).chunk(num_parts, dim=1))
        self.mixture = Mixture(
            parameters.pack_experts(gate_up),
            [parameters.pack_experts(list(part)) for part in zip(*down, strict=True)],
            top_k=top_k,
            normalises=normalises,
            activation=SILU,
            out_dtype=parameters.dtype if self.tp.size == 1 else torch.float32,
        )

    def __call__(self, x_TE: Tensor) -> Tensor:
        shared_TE = None if self.shared is None else self.shared(x_TE)
        logits_TX = linear(x_TE, self.router, out_dtype=torch.float32)
        out_TE = self.mixture(x_TE, logits_TX, shared_TE if self.tp.rank == 0 else None)
        return out_TE if self.tp.size == 1 else self.tp.all_reduce(out_TE).to(x_TE.dtype)


# The frame.


class DecoderLayer:
    """Norm, attention, norm, feed-forward."""

    def __init__(
        self,
        config: ModelConfig,
        parameters: Parameters,
        attention: Attention,
        mlp: Callable[[Tensor], Tensor],
    ) -> None:
        """mlp: the feed-forward part, [T, E] -> [T, E]."""
        eps, hidden = config.rms_norm_eps, config.hidden_size
        self.input_norm = RmsNorm(parameters, "input_layernorm", hidden, eps)
        self.attention = attention
        self.post_norm = RmsNorm(parameters, "post_attention_layernorm", hidden, eps)
        self.mlp = mlp


class Decoder(ABC):
    """A `Model` of decoder layers between an embedding and a head; an architecture makes the layers.

    An architecture of `Attention` and `GatedMlp` layers sets `fuses_layers`: on a CPU all layers then run in
    one native call where the kernels allow it, with the same bits as layer by layer.
    """

    fuses_layers: ClassVar[bool] = False

    def __init__(self, config: ModelConfig, parameters: Parameters, max_model_len: int) -> None:
        model = parameters.scope("model")
        self.config = config
        self.embedding = VocabParallelEmbedding(model, "embed_tokens", config.vocab_size, config.hidden_size)
        self.layers = [
            self.make_layer(config, model.scope(f"layers.{index}"), index)
            for index in range(config.num_layers)
        ]
        self.norm = RmsNorm(model, "norm", config.hidden_size, config.rms_norm_eps)
        tied, shape = config.tie_word_embeddings, (config.vocab_size, config.hidden_size)
        head_VE = self.embedding.table_VE if tied else parameters.rows("lm_head.weight", shape)
        self.head = VocabParallelHead(parameters, head_VE, config.vocab_size)
        self.cos_sin_MD = _rope_table(config, max_model_len).to(parameters.device)
        self.stack = self._fused_stack() if self.fuses_layers and parameters.tp.size == 1 else None

    @abstractmethod
    def make_layer(self, config: ModelConfig, parameters: Parameters, index: int) -> DecoderLayer:
        """Layer `index`, with weights from `parameters`, which are scoped to the layer."""

    @property
    def windows(self) -> tuple[int | None, ...]:
        """As `Model.windows`."""
        return tuple(layer.attention.window for layer in self.layers)

    def forward(self, step: ModelInput, kv_pool: Tensor, groups: LayerGroups | None = None) -> Tensor:
        """As `Model.forward`."""
        residual_TE = self.embedding(step.token_ids_T)
        if self.stack is not None:
            return self.stack.run(
                residual_TE,
                step.logit_rows_R,
                step.positions_T,
                step.slots_T,
                step.attention,
                kv_pool,
                groups,
            )
        ends = {stop: first for first, stop in groups.ranges(len(self.layers))} if groups else {}
        x_TE = self.layers[0].input_norm(residual_TE)
        next_norms = [layer.input_norm for layer in self.layers[1:]] + [self.norm]
        for index, (layer, next_norm) in enumerate(zip(self.layers, next_norms, strict=True)):
            x_TE = layer.attention.attend(x_TE, step, kv_pool[:, index], self.cos_sin_MD)
            if index == len(self.layers) - 1 and len(step.logit_rows_R) < len(x_TE):
                # After the last layer's keys and values, only the rows that yield logits matter.
                x_TE, residual_TE = x_TE[step.logit_rows_R], residual_TE[step.logit_rows_R]
            x_TE = layer.post_norm.add(layer.attention.out(x_TE), residual_TE)
            x_TE = next_norm.add(layer.mlp(x_TE), residual_TE)
            if groups and index + 1 in ends:
                groups.on_layers(ends[index + 1], index + 1)
        return x_TE

    def logits(self, hidden_RE: Tensor) -> Tensor:
        """As `Model.logits`."""
        return self.head(hidden_RE)

    def _fused_stack(self) -> DecoderStack | None:
        config = self.config
        shape = StackShape(
            hidden=config.hidden_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            intermediate=config.intermediate_size,
            eps=config.rms_norm_eps,
            num_splits=NUM_SPLITS,
        )
        layers = _stack_layers(self.layers)
        if not can_stack(layers, shape):
            return None
        return DecoderStack(layers, self.norm.weight_E, self.cos_sin_MD, shape)


def _stack_layers(layers: Sequence[DecoderLayer]) -> list[StackLayer]:
    stack_layers = []
    for layer in layers:
        attention, mlp = layer.attention, layer.mlp
        assert isinstance(mlp, GatedMlp), "only SwiGLU layers can be fused"
        stack_layers.append(
            StackLayer(
                input_norm_E=layer.input_norm.weight_E,
                post_norm_E=layer.post_norm.weight_E,
                query_norm_D=None if attention.query_norm is None else attention.query_norm.weight_E,
                key_norm_D=None if attention.key_norm is None else attention.key_norm.weight_E,
                qkv=(attention.qkv.weight, attention.qkv.bias_N),
                out=(attention.out.weight, attention.out.bias_N),
                gate_up=(mlp.gate_up.weight, mlp.gate_up.bias_N),
                down=(mlp.down.weight, mlp.down.bias_N),
                window=attention.window,
            )
        )
    return stack_layers


def _rope_table(config: ModelConfig, max_model_len: int) -> Tensor:
    try:
        return rope_table(config.head_dim, max_model_len, config.rope.theta, config.rope.scaling)
    except (ValueError, ArithmeticError) as error:
        raise ModelError(f"config.json: the rotary embedding cannot be computed: {error}") from error
