"""Mistral, and Mixtral with a mixture of experts in every layer.

Every layer of Mistral has a sliding window, unless the config turns the window off.
"""

from baton.engine.models.decoder import Decoder, DecoderLayer
from baton.engine.models.layers import Attention, GatedMlp, SparseMlp, read_experts, read_routing
from baton.engine.models.loading.weights import Parameters
from baton.engine.models.registry import ModelConfig, read_window


class Mistral(Decoder):
    """Reads `sliding_window`; null turns it off."""

    def make_layer(self, config: ModelConfig, parameters: Parameters, index: int) -> DecoderLayer:
        """As `Decoder.make_layer`."""
        window = read_window(config, default=4096)
        attention = Attention(config, parameters.scope("self_attn"), window=window)
        return DecoderLayer(config, parameters, attention, GatedMlp(config, parameters.scope("mlp")))


class Mixtral(Decoder):
    """Reads `num_local_experts`, `num_experts_per_tok` and `sliding_window`."""

    def make_layer(self, config: ModelConfig, parameters: Parameters, index: int) -> DecoderLayer:
        """As `Decoder.make_layer`."""
        moe = parameters.scope("block_sparse_moe")
        experts = read_experts(config, moe, config.intermediate_size, ("w1", "w3", "w2"))
        attention = Attention(config, parameters.scope("self_attn"), window=read_window(config))
        mlp = SparseMlp(config, moe, experts, read_routing(config, normalises=True))
        return DecoderLayer(config, parameters, attention, mlp)
