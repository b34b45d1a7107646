"""Mistral: every layer has a sliding window, unless the config turns the window off."""

from baton.engine.models.decoder import Attention, Decoder, DecoderLayer, GatedMlp
from baton.engine.models.registry import ModelConfig
from baton.engine.models.weights import Parameters


class Mistral(Decoder):
    """Reads `sliding_window`; null turns it off."""

    fuses_layers = True

    def make_layer(self, config: ModelConfig, parameters: Parameters, index: int) -> DecoderLayer:
        """As `Decoder.make_layer`."""
        keys = config.keys
        window = None if keys.is_null("sliding_window") else keys.count("sliding_window", 4096)
        attention = Attention(config, parameters.scope("self_attn"), window=window)
        return DecoderLayer(config, parameters, attention, GatedMlp(config, parameters.scope("mlp")))
