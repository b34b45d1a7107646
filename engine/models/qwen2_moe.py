"""Qwen2-MoE: Qwen2's attention, and experts beside one that all tokens share."""

from baton.engine.models.decoder import Attention, Decoder, DecoderLayer, GatedMlp, SparseMlp, read_experts
from baton.engine.models.registry import ModelConfig, read_layer_types
from baton.engine.models.weights import Parameters


class Qwen2Moe(Decoder):
    """Reads the experts, `qkv_bias`, and `layer_types` for the sliding windows."""

    fuses_layers = True

    def make_layer(self, config: ModelConfig, parameters: Parameters, index: int) -> DecoderLayer:
        """As `Decoder.make_layer`."""
        bias = config.keys.flag("qkv_bias", True)
        window = _window(config, index)
        attention = Attention(config, parameters.scope("self_attn"), qkv_bias=bias, window=window)
        shared_inner = config.keys.count("shared_expert_intermediate_size")
        mlp = mlp_of_layer(config, parameters.scope("mlp"), index, shared_inner=shared_inner)
        return DecoderLayer(config, parameters, attention, mlp)


def mlp_of_layer(
    config: ModelConfig, parameters: Parameters, index: int, *, shared_inner: int | None = None
) -> GatedMlp | SparseMlp:
    """A mixture in every `decoder_sparse_step`-th layer that is not in `mlp_only_layers`, else one MLP.

    shared_inner: as of `SparseMlp`.
    """
    keys = config.keys
    if index in (keys.get("mlp_only_layers", list[int]) or ()):
        return GatedMlp(config, parameters)
    if (index + 1) % keys.count("decoder_sparse_step", 1):
        return GatedMlp(config, parameters)
    experts = read_experts(config, parameters, keys.count("moe_intermediate_size"))
    normalises = keys.flag("norm_topk_prob")
    return SparseMlp(config, parameters, experts, normalises=normalises, shared_inner=shared_inner)


def _window(config: ModelConfig, index: int) -> int | None:
    """As transformers: without `layer_types`, every second of the first `max_window_layers` layers."""
    keys = config.keys
    if not keys.flag("use_sliding_window") or "sliding_window" not in keys:
        return None
    window = keys.count("sliding_window")
    layer_types = read_layer_types(config)
    if layer_types is None:
        num_windowed = keys.get("max_window_layers", int)
        return window if index % 2 == 0 and index < (28 if num_windowed is None else num_windowed) else None
    return window if layer_types[index] == "sliding_attention" else None
