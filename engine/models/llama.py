"""Llama 2 and 3: full attention, and biases only where the config asks for them."""

from baton.engine.models.decoder import Decoder, DecoderLayer
from baton.engine.models.layers import Attention, GatedMlp
from baton.engine.models.loading.weights import Parameters
from baton.engine.models.registry import ModelConfig


class Llama(Decoder):
    """Reads `attention_bias` and `mlp_bias`."""

    def make_layer(self, config: ModelConfig, parameters: Parameters, index: int) -> DecoderLayer:
        """As `Decoder.make_layer`."""
        bias = config.keys.flag("attention_bias")
        attention = Attention(config, parameters.scope("self_attn"), bias=bias)
        mlp = GatedMlp(config, parameters.scope("mlp"), bias=config.keys.flag("mlp_bias"))
        return DecoderLayer(config, parameters, attention, mlp)
