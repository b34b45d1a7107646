"""Qwen2 and 2.5: biased query, key and value projections, and sliding windows from some layer on."""

from baton.engine.models.decoder import Attention, Decoder, DecoderLayer, GatedMlp
from baton.engine.models.registry import ModelConfig, read_layer_types
from baton.engine.models.weights import Parameters


class Qwen2(Decoder):
    """Reads the sliding windows."""

    fuses_layers = True

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
    if not keys.flag("use_sliding_window") or keys.is_null("sliding_window"):
        return None
    window = keys.count("sliding_window", 4096)
    layer_types = read_layer_types(config)
    if layer_types is None:
        num_full = keys.get("max_window_layers", int)
        return window if index >= (28 if num_full is None else num_full) else None
    return window if layer_types[index] == "sliding_attention" else None
