"""OLMo 2: norms after each part instead of before, and norms of queries and keys over all heads."""

from baton.engine.models.decoder import Decoder, DecoderLayer, then
from baton.engine.models.layers import Attention, GatedMlp, NoNorm
from baton.engine.models.loading.weights import Parameters
from baton.engine.models.registry import ModelConfig


class Olmo2(Decoder):
    """Reads `attention_bias`."""

    def make_layer(self, config: ModelConfig, parameters: Parameters, index: int) -> DecoderLayer:
        """As `Decoder.make_layer`."""
        bias = config.keys.flag("attention_bias")
        attention = Attention(
            config,
            parameters.scope("self_attn"),
            bias=bias,
            qk_norm="projection",
            norm_offset=0.0,
        )
        mlp = GatedMlp(config, parameters.scope("mlp"))
        return DecoderLayer(
            config,
            parameters,
            attention,
            then(mlp, self.make_norm(config, parameters, "post_feedforward_layernorm")),
            out=then(attention.out, self.make_norm(config, parameters, "post_attention_layernorm")),
            input_norm=NoNorm(),
            post_norm=NoNorm(),
        )
