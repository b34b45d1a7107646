"""The forward pass of every architecture we know: a Llama-shaped decoder, as its ModelConfig says.

Shapes: T tokens, R rows whose logits are wanted, E hidden, H query heads, K kv heads, D head dim,
F intermediate, V vocabulary; H, K, F of this tensor-parallel rank.
"""

from torch import Tensor

from baton.engine.models.layers import (
    NUM_SPLITS,
    ColumnParallelLinear,
    Parameters,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
)
from baton.engine.models.parameters import EMBEDDING, HEAD
from baton.engine.models.registry import ModelConfig
from baton.engine.runner.model_input import ModelInput
from baton.errors import ModelError
from baton.kernels.decoder_stack import DecoderStack, LayerGroups, StackLayer, StackShape, can_stack
from baton.kernels.ragged_attention import ragged_attention
from baton.kernels.rms_norm import add_rms_norm, rms_norm
from baton.kernels.rope import rope, rope_table
from baton.kernels.silu_mul import silu_mul
from baton.kernels.store_kv import store_kv


class Decoder:
    """One rank's part of the model. `forward` writes the KV of the step into the pool it is given."""

    def __init__(self, config: ModelConfig, parameters: Parameters, max_model_len: int) -> None:
        self.config = config
        self.embedding = VocabParallelEmbedding(parameters, EMBEDDING)
        self.layers = [DecoderLayer(config, parameters, index) for index in range(config.num_layers)]
        self.norm_E = parameters.whole("model.norm.weight")
        tied = config.tie_word_embeddings
        head_VE = self.embedding.table_VE if tied else parameters.rows(HEAD)
        self.head = VocabParallelHead(parameters, head_VE, config.vocab_size)
        self.cos_sin_MD = _rope_table(config, max_model_len).to(parameters.device)
        self.stack = self._native_stack() if parameters.tp.size == 1 else None

    def forward(self, step: ModelInput, kv_pool: Tensor, groups: LayerGroups | None = None) -> Tensor:
        """Final hidden states of the wanted rows, normed: [R, E].

        kv_pool: [num_pages, num_layers, 2, K, page_size, D]. groups: told of layers as they are written.
        """
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
        eps = self.config.rms_norm_eps
        x_TE = rms_norm(residual_TE, self.layers[0].input_norm_E, eps)
        next_norms = [layer.input_norm_E for layer in self.layers[1:]] + [self.norm_E]
        for index, (layer, next_norm_E) in enumerate(zip(self.layers, next_norms, strict=True)):
            x_TE = layer.attend(x_TE, step, kv_pool[:, index], self.cos_sin_MD)
            if index == len(self.layers) - 1 and len(step.logit_rows_R) < len(x_TE):
                # Past the last layer's keys and values only the rows that yield logits matter.
                x_TE, residual_TE = x_TE[step.logit_rows_R], residual_TE[step.logit_rows_R]
            x_TE = add_rms_norm(layer.out(x_TE), residual_TE, layer.post_norm_E, eps)
            x_TE = add_rms_norm(layer.mlp(x_TE), residual_TE, next_norm_E, eps)
            if groups and index + 1 in ends:
                groups.on_layers(ends[index + 1], index + 1)
        return x_TE

    def _native_stack(self) -> DecoderStack | None:
        """The same layers as one call, where the native kernels take all of them."""
        layers, config = [layer.for_stack() for layer in self.layers], self.config
        shape = StackShape(
            hidden=config.hidden_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            intermediate=config.intermediate_size,
            eps=config.rms_norm_eps,
            num_splits=NUM_SPLITS,
        )
        return DecoderStack(layers, self.norm_E, self.cos_sin_MD, shape) if can_stack(layers, shape) else None

    def logits(self, hidden_RE: Tensor) -> Tensor:
        """[R, V] fp32."""
        return self.head(hidden_RE)


class DecoderLayer:
    def __init__(self, config: ModelConfig, parameters: Parameters, index: int) -> None:
        prefix = f"model.layers.{index}"
        attention = f"{prefix}.self_attn"
        self.eps = config.rms_norm_eps
        self.head_dim = config.head_dim
        self.num_heads = config.num_heads // parameters.tp.size
        self.num_kv_heads = config.num_kv_heads // parameters.tp.size
        self.window = config.sliding_windows[index]
        self.scale = config.head_dim**-0.5
        self.input_norm_E = parameters.whole(f"{prefix}.input_layernorm.weight")
        self.post_norm_E = parameters.whole(f"{prefix}.post_attention_layernorm.weight")
        self.qkv = ColumnParallelLinear(
            parameters, (f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj")
        )
        self.out = RowParallelLinear(parameters, f"{attention}.o_proj")
        self.query_norm_D = parameters.whole(f"{attention}.q_norm.weight") if config.qk_norm else None
        self.key_norm_D = parameters.whole(f"{attention}.k_norm.weight") if config.qk_norm else None
        self.gate_up = ColumnParallelLinear(parameters, (f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj"))
        self.down = RowParallelLinear(parameters, f"{prefix}.mlp.down_proj")

    def attend(self, x_TE: Tensor, step: ModelInput, kv_pages: Tensor, cos_sin_MD: Tensor) -> Tensor:
        """Store the step's keys and values, attend over all of them: [T, H * D], not yet projected."""
        heads_THD = self.qkv(x_TE).view(len(x_TE), -1, self.head_dim)
        query_THD, key_TKD, value_TKD = heads_THD.split_with_sizes(
            (self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1
        )
        if self.query_norm_D is not None and self.key_norm_D is not None:
            query_THD = rms_norm(query_THD, self.query_norm_D, self.eps)
            key_TKD = rms_norm(key_TKD, self.key_norm_D, self.eps)
        rope(query_THD, key_TKD, cos_sin_MD, step.positions_T)
        store_kv(key_TKD, value_TKD, kv_pages, step.slots_T)
        out_THD = ragged_attention(query_THD, kv_pages, step.attention, scale=self.scale, window=self.window)
        return out_THD.flatten(1)

    def mlp(self, x_TE: Tensor) -> Tensor:
        return self.down(silu_mul(self.gate_up(x_TE)))

    def for_stack(self) -> StackLayer:
        return StackLayer(
            input_norm_E=self.input_norm_E,
            post_norm_E=self.post_norm_E,
            query_norm_D=self.query_norm_D,
            key_norm_D=self.key_norm_D,
            qkv=(self.qkv.weight, self.qkv.bias_N),
            out=(self.out.weight, self.out.bias_N),
            gate_up=(self.gate_up.weight, self.gate_up.bias_N),
            down=(self.down.weight, self.down.bias_N),
            window=self.window,
        )


def _rope_table(config: ModelConfig, max_model_len: int) -> Tensor:
    try:
        return rope_table(config.head_dim, max_model_len, config.rope.theta, config.rope.scaling)
    except (ValueError, ArithmeticError) as error:
        raise ModelError(f"config.json: the rotary embedding cannot be computed: {error}") from error
