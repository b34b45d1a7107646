"""Qwen2 and 2.5: biased query, key and value projections, and sliding windows from some layer on."""

from typing import Literal

from baton.engine.models.decoder import Attention, Decoder, DecoderLayer, SwiGlu
from baton.engine.models.registry import ModelConfig
from baton.engine.models.weights import Parameters
from baton.errors import ModelError


class Qwen2(Decoder):
    """Reads the sliding windows."""

    fuses_layers = True

    def make_layer(self, config: ModelConfig, parameters: Parameters, index: int) -> DecoderLayer:
        """As `Decoder.make_layer`."""
        window = layer_window(config, index)
        attention = Attention(config, parameters.scope("self_attn"), qkv_bias=True, window=window)
        return DecoderLayer(config, parameters, attention, SwiGlu(config, parameters.scope("mlp")))


def layer_window(config: ModelConfig, index: int) -> int | None:
    """The sliding window of one layer.

    `layer_types` names the layers with windows. Without it, the layers from `max_window_layers` on have
    windows.
    """
    keys = config.keys
    if not keys.flag("use_sliding_window") or keys.is_null("sliding_window"):
        return None
    window = keys.count("sliding_window", 4096)
    layer_types = keys.get("layer_types", list[Literal["full_attention", "sliding_attention"]])
    if layer_types is None:
        num_full = keys.get("max_window_layers", int)
        return window if index >= (28 if num_full is None else num_full) else None
    if len(layer_types) != config.num_layers:
        raise ModelError(
            f"{keys.source}: 'layer_types' should have {config.num_layers} entries, got {len(layer_types)}"
        )
    return window if layer_types[index] == "sliding_attention" else None
