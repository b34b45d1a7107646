"""Phi-3, 3.5 and 4-mini: fused projections, heads of which a part may be rotated, and longrope."""

from baton.engine.models.decoder import Decoder, DecoderLayer
from baton.engine.models.layers import Attention, GatedMlp
from baton.engine.models.loading.weights import Parameters
from baton.engine.models.registry import ModelConfig, read_window


class Phi3(Decoder):
    """Reads `sliding_window`."""

    def make_layer(self, config: ModelConfig, parameters: Parameters, index: int) -> DecoderLayer:
        """As `Decoder.make_layer`."""
        window = read_window(config)
        attention = Attention(config, parameters.scope("self_attn"), window=window, fused="qkv_proj")
        mlp = GatedMlp(config, parameters.scope("mlp"), fused="gate_up_proj")
        return DecoderLayer(config, parameters, attention, mlp)
