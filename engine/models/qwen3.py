"""Qwen3: RMS norm of queries and keys in each head; sliding windows as in Qwen2."""

from baton.engine.models.decoder import Attention, Decoder, DecoderLayer, GatedMlp
from baton.engine.models.qwen2 import layer_window
from baton.engine.models.registry import ModelConfig
from baton.engine.models.weights import Parameters


class Qwen3(Decoder):
    """Reads `attention_bias` and the sliding windows."""

    fuses_layers = True

    def make_layer(self, config: ModelConfig, parameters: Parameters, index: int) -> DecoderLayer:
        """As `Decoder.make_layer`."""
        bias = config.keys.flag("attention_bias")
        attention = Attention(
            config,
            parameters.scope("self_attn"),
            qkv_bias=bias,
            out_bias=bias,
            qk_norm="head",
            window=layer_window(config, index),
        )
        return DecoderLayer(config, parameters, attention, GatedMlp(config, parameters.scope("mlp")))
