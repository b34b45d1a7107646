"""Qwen2, 2.5 and 3, dense and with experts.

- Qwen2: biased query, key and value projections, and sliding windows from some layer on.
- Qwen3: RMS norm of queries and keys in each head; sliding windows as in Qwen2.
- Qwen2-MoE: Qwen2's attention, and experts beside one that all tokens share.
- Qwen3-MoE: Qwen3's attention, and experts without a shared one.
"""

from baton.engine.models.decoder import Decoder, DecoderLayer
from baton.engine.models.layers import Attention, GatedMlp, SparseMlp, read_experts, read_routing
from baton.engine.models.loading.weights import Parameters
from baton.engine.models.registry import ModelConfig, is_windowed, read_window


class Qwen2(Decoder):
    """Reads the sliding windows."""

    def make_layer(self, config: ModelConfig, parameters: Parameters, index: int) -> DecoderLayer:
        """As `Decoder.make_layer`."""
        window = layer_window(config, index)
        attention = Attention(config, parameters.scope("self_attn"), qkv_bias=True, window=window)
        return DecoderLayer(config, parameters, attention, GatedMlp(config, parameters.scope("mlp")))


def layer_window(config: ModelConfig, index: int) -> int | None:
    """The sliding window of one layer.

    `layer_types` names the layers with windows. Without it, the layers from `max_window_layers` on have
    windows.
    """
    keys = config.keys
    window = read_window(config, default=4096) if keys.flag("use_sliding_window") else None
    if window is None:
        return None
    num_full = keys.get("max_window_layers", int)
    is_late = index >= (28 if num_full is None else num_full)
    return window if is_windowed(config, index, otherwise=is_late) else None


class Qwen3(Decoder):
    """Reads `attention_bias` and the sliding windows."""

    def make_layer(self, config: ModelConfig, parameters: Parameters, index: int) -> DecoderLayer:
        """As `Decoder.make_layer`."""
        bias = config.keys.flag("attention_bias")
        attention = Attention(
            config,
            parameters.scope("self_attn"),
            bias=bias,
            qk_norm="head",
            window=layer_window(config, index),
        )
        return DecoderLayer(config, parameters, attention, GatedMlp(config, parameters.scope("mlp")))


class Qwen2Moe(Decoder):
    """Reads the experts, `qkv_bias`, and `layer_types` for the sliding windows."""

    def make_layer(self, config: ModelConfig, parameters: Parameters, index: int) -> DecoderLayer:
        """As `Decoder.make_layer`."""
        bias = config.keys.flag("qkv_bias", True)
        window = _moe_window(config, index)
        attention = Attention(config, parameters.scope("self_attn"), qkv_bias=bias, window=window)
        shared_inner = config.keys.count("shared_expert_intermediate_size")
        mlp = mlp_of_layer(config, parameters.scope("mlp"), index, shared_inner=shared_inner)
        return DecoderLayer(config, parameters, attention, mlp)


def mlp_of_layer(
    config: ModelConfig, parameters: Parameters, index: int, *, shared_inner: int | None = None
) -> GatedMlp | SparseMlp:
    """A mixture in every `decoder_sparse_step`-th layer that is not in `mlp_only_layers`, else one MLP.

    shared_inner: as in `SparseMlp`.
    """
    keys = config.keys
    if index in (keys.get("mlp_only_layers", list[int]) or ()):
        return GatedMlp(config, parameters)
    if (index + 1) % keys.count("decoder_sparse_step", 1):
        return GatedMlp(config, parameters)
    experts = read_experts(config, parameters, keys.count("moe_intermediate_size"))
    routing = read_routing(config, normalises=keys.flag("norm_topk_prob"))
    return SparseMlp(config, parameters, experts, routing, shared_inner=shared_inner)


def _moe_window(config: ModelConfig, index: int) -> int | None:
    """As transformers: without `layer_types`, every second of the first `max_window_layers` layers."""
    keys = config.keys
    window = read_window(config) if keys.flag("use_sliding_window") else None
    if window is None:
        return None
    num_windowed = keys.get("max_window_layers", int)
    is_early = index < (28 if num_windowed is None else num_windowed)
    return window if is_windowed(config, index, otherwise=is_early and index % 2 == 0) else None


class Qwen3Moe(Decoder):
    """Reads the experts, `attention_bias`, and a sliding window of all layers."""

    def make_layer(self, config: ModelConfig, parameters: Parameters, index: int) -> DecoderLayer:
        """As `Decoder.make_layer`."""
        keys = config.keys
        bias, has_window = keys.flag("attention_bias"), keys.flag("use_sliding_window")
        attention = Attention(
            config,
            parameters.scope("self_attn"),
            bias=bias,
            qk_norm="head",
            window=read_window(config) if has_window else None,
        )
        mlp = mlp_of_layer(config, parameters.scope("mlp"), index)
        return DecoderLayer(config, parameters, attention, mlp)
