"""Mixtral: Mistral's attention, and a mixture of experts in every layer."""

from baton.engine.models.decoder import Attention, Decoder, DecoderLayer, SparseMlp
from baton.engine.models.registry import ModelConfig
from baton.engine.models.weights import Parameters


class Mixtral(Decoder):
    """Reads `num_local_experts`, `num_experts_per_tok` and `sliding_window`."""

    def make_layer(self, config: ModelConfig, parameters: Parameters, index: int) -> DecoderLayer:
        """As `Decoder.make_layer`."""
        keys = config.keys
        window = keys.count("sliding_window") if "sliding_window" in keys else None
        experts = SparseMlp(
            config,
            parameters.scope("block_sparse_moe"),
            config.intermediate_size,
            normalises=True,
            names=("w1", "w3", "w2"),
        )
        attention = Attention(config, parameters.scope("self_attn"), window=window)
        return DecoderLayer(config, parameters, attention, experts)
