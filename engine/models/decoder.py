"""The frame of a decoder-only transformer: embedding, layers, norm, head, and the fused CPU stack.

Shapes: T tokens, R rows with wanted logits, E hidden, H query heads, K kv heads, D head dim, V
vocabulary; H and K of this tensor-parallel rank.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Protocol

from torch import Tensor

from baton.engine.models.layers import (
    NUM_SPLITS,
    Attention,
    RmsNorm,
    SwiGlu,
    VocabParallelEmbedding,
    VocabParallelHead,
)
from baton.engine.models.registry import ModelConfig
from baton.engine.models.weights import Parameters
from baton.engine.runner.model_input import ModelInput
from baton.errors import ModelError
from baton.kernels.decoder_stack import DecoderStack, LayerGroups, StackLayer, StackShape, can_stack
from baton.kernels.rope import rope_table


class Mlp(Protocol):
    """The feed-forward part of a layer: [T, E] -> [T, E]."""

    def __call__(self, x_TE: Tensor) -> Tensor: ...


class DecoderLayer:
    """Norm, attention, norm, feed-forward."""

    def __init__(self, config: ModelConfig, parameters: Parameters, attention: Attention, mlp: Mlp) -> None:
        eps, hidden = config.rms_norm_eps, config.hidden_size
        self.input_norm = RmsNorm(parameters, "input_layernorm", hidden, eps)
        self.attention = attention
        self.post_norm = RmsNorm(parameters, "post_attention_layernorm", hidden, eps)
        self.mlp = mlp


class Decoder(ABC):
    """A `Model` of decoder layers between an embedding and a head; an architecture makes the layers.

    An architecture of `Attention` and `SwiGlu` layers sets `fuses_layers`: on a CPU all layers then run in
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
        assert isinstance(mlp, SwiGlu), "only SwiGLU layers can be fused"
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
