"""GPT-2: learned positions instead of rotations, layer norms, and transposed weights with biases."""

from torch import Tensor
from torch.nn import functional

from baton.engine.models.decoder import Decoder, DecoderLayer, DecoderNames
from baton.engine.models.layers import Attention, ColumnParallelLinear, Norm, RowParallelLinear
from baton.engine.models.loading.weights import Parameters
from baton.engine.models.registry import ModelConfig, RopeConfig
from baton.engine.runner.step_inputs import ModelInput
from baton.kernels.gated import gelu_tanh
from baton.kernels.linear import embedding

NO_ROPE = RopeConfig(rotated_share=0.0)


class LayerNorm:
    """Layer norm with a weight and a bias, by torch: its rows do not depend on each other."""

    def __init__(self, parameters: Parameters, name: str, size: int, eps: float) -> None:
        self.weight_E = parameters.whole(f"{name}.weight", (size,))
        self.bias_E = parameters.whole(f"{name}.bias", (size,))
        self.eps = eps

    def __call__(self, x_TE: Tensor) -> Tensor:
        return functional.layer_norm(x_TE, self.weight_E.shape, self.weight_E, self.bias_E, self.eps)

    def add(self, x_TE: Tensor, residual_TE: Tensor) -> Tensor:
        """As `Norm.add`."""
        return self(residual_TE.add_(x_TE))


class Gpt2Mlp:
    """c_proj(gelu(c_fc(x)))."""

    def __init__(self, config: ModelConfig, parameters: Parameters) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        self.up = ColumnParallelLinear(parameters, {"c_fc": inner}, hidden, bias=True)
        self.down = RowParallelLinear(parameters, "c_proj", hidden, inner, bias=True)

    def __call__(self, x_TE: Tensor) -> Tensor:
        return self.down(gelu_tanh(self.up(x_TE)))


class Gpt2(Decoder):
    """Reads `scale_attn_weights` and `scale_attn_by_inverse_layer_idx`."""

    names = DecoderNames("transformer", "wte", "h", "ln_f")

    def __init__(self, config: ModelConfig, parameters: Parameters, max_model_len: int) -> None:
        super().__init__(config, parameters, max_model_len)
        shape = (config.max_position_embeddings, config.hidden_size)
        if self.is_first:
            self.position_ME = parameters.scope(self.names.model).whole("wpe.weight", shape)

    def make_layer(self, config: ModelConfig, parameters: Parameters, index: int) -> DecoderLayer:
        """As `Decoder.make_layer`."""
        keys = config.keys
        scale = config.head_dim**-0.5 if keys.flag("scale_attn_weights", True) else 1.0
        attention = Attention(
            config,
            parameters.transposed("attn"),
            bias=True,
            scale=scale / (index + 1) if keys.flag("scale_attn_by_inverse_layer_idx") else scale,
            rope=NO_ROPE,
            fused="c_attn",
            out_name="c_proj",
        )
        return DecoderLayer(
            config,
            parameters,
            attention,
            Gpt2Mlp(config, parameters.transposed("mlp")),
            input_norm=self.make_norm(config, parameters, "ln_1"),
            post_norm=self.make_norm(config, parameters, "ln_2"),
        )

    def make_norm(self, config: ModelConfig, parameters: Parameters, name: str) -> Norm:
        """As `Decoder.make_norm`."""
        return LayerNorm(parameters, name, config.hidden_size, config.rms_norm_eps)

    def embed(self, step: ModelInput) -> Tensor:
        """As `Decoder.embed`: tokens and positions."""
        return self.embedding(step.token_ids_T).add_(embedding(step.positions_T, self.position_ME))
