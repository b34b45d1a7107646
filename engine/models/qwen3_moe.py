"""Qwen3-MoE: Qwen3's attention, and experts without a shared one."""

from baton.engine.models.decoder import Attention, Decoder, DecoderLayer
from baton.engine.models.qwen2_moe import mlp_of_layer
from baton.engine.models.registry import ModelConfig
from baton.engine.models.weights import Parameters


class Qwen3Moe(Decoder):
    """Reads the experts, `attention_bias`, and a sliding window of all layers."""

    fuses_layers = True

    def make_layer(self, config: ModelConfig, parameters: Parameters, index: int) -> DecoderLayer:
        """As `Decoder.make_layer`."""
        keys = config.keys
        bias, has_window = keys.flag("attention_bias"), keys.flag("use_sliding_window")
        attention = Attention(
            config,
            parameters.scope("self_attn"),
            qkv_bias=bias,
            out_bias=bias,
            qk_norm="head",
            window=keys.count("sliding_window") if has_window and "sliding_window" in keys else None,
        )
        mlp = mlp_of_layer(config, parameters.scope("mlp"), index)
        return DecoderLayer(config, parameters, attention, mlp)
