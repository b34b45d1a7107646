"""Granite: Llama with multipliers of the embedding, the residual, the scores and the logits."""

from torch import Tensor

from baton.engine.models.decoder import Decoder, DecoderLayer, then
from baton.engine.models.layers import Attention, GatedMlp
from baton.engine.models.loading.weights import Parameters
from baton.engine.models.registry import ModelConfig
from baton.engine.runner.step_inputs import ModelInput


class Granite(Decoder):
    """Reads the four multipliers, `attention_bias` and `mlp_bias`."""

    def make_layer(self, config: ModelConfig, parameters: Parameters, index: int) -> DecoderLayer:
        """As `Decoder.make_layer`."""
        keys = config.keys
        bias, multiplier = keys.flag("attention_bias"), keys.positive("residual_multiplier", 1.0)
        attention = Attention(
            config,
            parameters.scope("self_attn"),
            bias=bias,
            scale=keys.positive("attention_multiplier", 1.0),
        )
        mlp = GatedMlp(config, parameters.scope("mlp"), bias=keys.flag("mlp_bias"))

        def multiplied(x_TE: Tensor) -> Tensor:
            return x_TE.mul_(multiplier)

        return DecoderLayer(
            config, parameters, attention, then(mlp, multiplied), out=then(attention.out, multiplied)
        )

    def embed(self, step: ModelInput) -> Tensor:
        """As `Decoder.embed`."""
        multiplier = self.config.keys.positive("embedding_multiplier", 1.0)
        return self.embedding(step.token_ids_T).mul_(multiplier)

    def logits(self, hidden_RE: Tensor) -> Tensor:
        """As `Model.logits`."""
        return super().logits(hidden_RE).div_(self.config.keys.positive("logits_scaling", 1.0))
