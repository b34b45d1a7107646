"""A decoder-only transformer: the frame around its layers, and the fused CPU stack.

An architecture composes its layers from those of layers.py.

Shapes: T tokens, R rows with wanted logits, E hidden, H query heads, D head dim, M positions.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, NamedTuple, TypeGuard

import torch
from torch import Tensor

from baton.engine.models.layers import (
    NUM_SPLITS,
    Attention,
    AttentionLayer,
    GatedMlp,
    NoNorm,
    Norm,
    RmsNorm,
    SparseMlp,
    VocabParallelEmbedding,
    VocabParallelHead,
    rope_table,
)
from baton.engine.models.loading.weights import Parameters
from baton.engine.models.registry import ModelConfig, RopeConfig
from baton.engine.runner.step_inputs import ModelInput
from baton.errors import ModelError
from baton.kernels.decoder_stack import DecoderStack, LayerGroups, StackLayer, StackShape, can_stack
from baton.kernels.gated import SILU


def then(first: Callable[[Tensor], Tensor], second: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The function second(first(x))."""
    return lambda x: second(first(x))


class DecoderLayer:
    """Norm, attention, norm, feed-forward."""

    def __init__(
        self,
        config: ModelConfig,
        parameters: Parameters,
        attention: AttentionLayer,
        mlp: Callable[[Tensor], Tensor],
        *,
        out: Callable[[Tensor], Tensor] | None = None,
        input_norm: Norm | None = None,
        post_norm: Norm | None = None,
    ) -> None:
        """mlp: the feed-forward part, [T, E] -> [T, E]. out: the projection after attention, `attention.out`
        by default. input_norm, post_norm: before attention and before mlp, RMS norms by default.
        """
        eps, hidden = config.rms_norm_eps, config.hidden_size
        self.input_norm = input_norm or RmsNorm(parameters, "input_layernorm", hidden, eps)
        self.attention = attention
        self.out = out or attention.out
        self.post_norm = post_norm or RmsNorm(parameters, "post_attention_layernorm", hidden, eps)
        self.mlp = mlp


class DecoderNames(NamedTuple):
    """The names of a decoder's parts in a checkpoint."""

    model: str = "model"
    embedding: str = "embed_tokens"
    layers: str = "layers"
    norm: str = "norm"


class Decoder(ABC):
    """A `Model` of decoder layers between an embedding and a head; an architecture makes the layers.

    On a CPU, layers of plain attention, RMS norms, and SwiGLU as a `GatedMlp` or a `SparseMlp` run in one
    native call where the kernels allow it, with the same bits as layer by layer.

    A pipeline stage has some of the layers: the first stage has the embedding, the last one norm and head.
    """

    names: ClassVar[DecoderNames] = DecoderNames()

    def __init__(self, config: ModelConfig, parameters: Parameters, max_model_len: int) -> None:
        model = parameters.scope(self.names.model)
        self.config = config
        stage = parameters.layers or range(config.num_layers)
        self.is_first, self.is_last = stage.start == 0, stage.stop == config.num_layers
        tied, shape = config.tie_word_embeddings, (config.vocab_size, config.hidden_size)
        if self.is_first or (self.is_last and tied):
            self.embedding = VocabParallelEmbedding(model, self.names.embedding, *shape)
        self.layers = [
            self.make_layer(config, model.scope(f"{self.names.layers}.{index}"), index) for index in stage
        ]
        if self.is_last:
            self.norm = self.make_norm(config, model, self.names.norm)
            head_VE = self.embedding.table_VE if tied else parameters.rows("lm_head.weight", shape)
            self.head = VocabParallelHead(parameters, head_VE, config.vocab_size)
        ropes = [(layer.attention.rope_dim, layer.attention.rope) for layer in self.layers]
        tables = {
            rope: _rope_table(*rope, max_model_len).to(parameters.device) for rope in dict.fromkeys(ropes)
        }
        self.cos_sin_MD = [tables[rope] for rope in ropes]
        self.adapters = parameters.adapters
        self.stack = self._fused_stack(parameters.dtype) if parameters.tp.size == 1 else None

    @abstractmethod
    def make_layer(self, config: ModelConfig, parameters: Parameters, index: int) -> DecoderLayer:
        """Layer `index`, with weights from `parameters`, which are scoped to the layer."""

    def make_norm(self, config: ModelConfig, parameters: Parameters, name: str) -> Norm:
        """The norm after the last layer."""
        return RmsNorm(parameters, name, config.hidden_size, config.rms_norm_eps)

    def embed(self, step: ModelInput) -> Tensor:
        """The input of the first layer, [T, E]."""
        return self.embedding(step.token_ids_T)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """As `Model.windows`."""
        return tuple(layer.attention.window for layer in self.layers)

    def forward(
        self,
        step: ModelInput,
        kv_pool: Tensor,
        groups: LayerGroups | None = None,
        received_TE: Tensor | None = None,
    ) -> Tensor:
        """As `SupportsPipeline.forward`."""
        residual_TE = self.embed(step) if received_TE is None else received_TE
        adapters = None if self.adapters is None or self.adapters.rows is None else self.adapters
        if self.stack is not None and adapters is None:
            return self.stack.run(
                residual_TE,
                step.logit_rows_R,
                step.positions_T,
                step.slots_T,
                step.attention,
                kv_pool,
                groups,
            )
        ends = {stop: first for first, stop in groups.ranges} if groups else {}
        x_TE = self.layers[0].input_norm(residual_TE)
        next_norms = [layer.input_norm for layer in self.layers[1:]] + [
            self.norm if self.is_last else NoNorm()
        ]
        for index, (layer, next_norm) in enumerate(zip(self.layers, next_norms, strict=True)):
            x_TE = layer.attention.attend(x_TE, step, kv_pool[:, index], self.cos_sin_MD[index])
            if index == len(self.layers) - 1 and self.is_last and len(step.logit_rows_R) < len(x_TE):
                # After the last layer's keys and values, only the rows that yield logits matter.
                x_TE, residual_TE = x_TE[step.logit_rows_R], residual_TE[step.logit_rows_R]
                if adapters is not None:
                    adapters.rows = adapters.logit_rows
            x_TE = layer.post_norm.add(layer.out(x_TE), residual_TE)
            x_TE = next_norm.add(layer.mlp(x_TE), residual_TE)
            if groups and index + 1 in ends:
                groups.on_layers(ends[index + 1], index + 1)
        return x_TE

    def logits(self, hidden_RE: Tensor) -> Tensor:
        """As `Model.logits`."""
        return self.head(hidden_RE)

    def _fused_stack(self, dtype: torch.dtype) -> DecoderStack | None:
        """The layers in one native call; None where csrc/decoder.c cannot compute a part of them."""
        config = self.config
        layers = [stacked for layer in self.layers if (stacked := _stack_layer(layer, config, dtype))]
        norm = self.norm if self.is_last else None
        has_one_table = all(cos_sin_MD is self.cos_sin_MD[0] for cos_sin_MD in self.cos_sin_MD)
        if len(layers) < len(self.layers) or not has_one_table:
            return None
        if norm is not None and not _is_plain(norm, config, dtype):
            return None
        shape = StackShape(
            hidden=config.hidden_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            intermediate=max(layer.down[0].num_inputs if layer.down else 0 for layer in layers),
            eps=config.rms_norm_eps,
            num_splits=NUM_SPLITS,
        )
        if not can_stack(layers, shape):
            return None
        return DecoderStack(layers, None if norm is None else norm.weight_E, self.cos_sin_MD[0], shape)


def _stack_layer(layer: DecoderLayer, config: ModelConfig, dtype: torch.dtype) -> StackLayer | None:
    """The layer for a `DecoderStack`; None where csrc/decoder.c cannot compute a part of it.

    Types are compared exactly, because a subclass may compute anything.
    """
    attention, mlp = layer.attention, layer.mlp
    if type(attention) is not Attention or not attention.is_plain(config) or layer.out is not attention.out:
        return None
    sparse = mlp if type(mlp) is SparseMlp else None
    dense = mlp if sparse is None else sparse.shared
    if dense is not None and not (type(dense) is GatedMlp and dense.activation == SILU):
        return None
    if not (_is_plain(layer.input_norm, config, dtype) and _is_plain(layer.post_norm, config, dtype)):
        return None
    head_norms = attention.query_norm, attention.key_norm
    if not all(norm is None or _is_plain(norm, config, dtype) for norm in head_norms):
        return None
    query_norm_D, key_norm_D = (None if norm is None else norm.weight_E for norm in head_norms)
    return StackLayer(
        input_norm_E=layer.input_norm.weight_E,
        post_norm_E=layer.post_norm.weight_E,
        query_norm_D=query_norm_D,
        key_norm_D=key_norm_D,
        qkv=(attention.qkv.weight, attention.qkv.bias_N),
        out=(attention.out.weight, attention.out.bias_N),
        gate_up=None if dense is None else (dense.gate_up.weight, dense.gate_up.bias_N),
        down=None if dense is None else (dense.down.weight, dense.down.bias_N),
        window=attention.window,
        router=None if sparse is None else (sparse.router, sparse.router_bias_X),
        experts=None if sparse is None else sparse.mixture,
    )


def _is_plain(norm: Norm, config: ModelConfig, dtype: torch.dtype) -> TypeGuard[RmsNorm]:
    """True for an RMS norm with a weight in the dtype of the model and the config's epsilon."""
    return type(norm) is RmsNorm and norm.weight_E.dtype == dtype and norm.eps == config.rms_norm_eps


def _rope_table(head_dim: int, rope: RopeConfig, max_model_len: int) -> Tensor:
    try:
        return rope_table(head_dim, max_model_len, rope)
    except (ValueError, ArithmeticError) as error:
        raise ModelError(f"config.json: the rotary embedding cannot be computed: {error}") from error
