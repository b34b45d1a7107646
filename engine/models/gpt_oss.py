"""gpt-oss: attention with sinks, windows in every second layer, and experts with biases and a clamped SwiGLU.

Experts are published in MXFP4.
"""

from operator import itemgetter

import torch

from baton.engine.models.decoder import Decoder, DecoderLayer
from baton.engine.models.layers import Attention, ExpertTensors, Norm, RmsNorm, SparseMlp, read_routing
from baton.engine.models.loading.weights import Matrix, Parameters, change_rows
from baton.engine.models.registry import ModelConfig, is_windowed
from baton.kernels.gated import clamped_swiglu

GATES, UPS = (itemgetter(slice(first, None, 2)) for first in (0, 1))  # rows of gate and up in turn


class GptOss(Decoder):
    """Reads `layer_types`, `sliding_window`, `attention_bias`, `swiglu_alpha` and `swiglu_limit`."""

    def make_layer(self, config: ModelConfig, parameters: Parameters, index: int) -> DecoderLayer:
        """As `Decoder.make_layer`."""
        keys = config.keys
        has_window = is_windowed(config, index, otherwise=index % 2 == 0)
        bias = keys.flag("attention_bias", True)
        attention = Attention(
            config,
            parameters.scope("self_attn"),
            bias=bias,
            window=keys.count("sliding_window", 128) if has_window else None,
            has_sinks=True,
        )
        mlp = parameters.scope("mlp")
        experts = SparseMlp(
            config,
            mlp,
            read_experts(config, mlp.scope("experts")),
            read_routing(config, normalises=True),
            activation=clamped_swiglu(
                keys.positive("swiglu_alpha", 1.702), keys.positive("swiglu_limit", 7.0)
            ),
            router="router",
            router_bias=True,
        )
        return DecoderLayer(
            config,
            parameters,
            attention,
            experts,
            input_norm=self.make_norm(config, parameters, "input_layernorm"),
            post_norm=self.make_norm(config, parameters, "post_attention_layernorm"),
        )

    def make_norm(self, config: ModelConfig, parameters: Parameters, name: str) -> Norm:
        """As `Decoder.make_norm`."""
        return RmsNorm(parameters, name, config.hidden_size, config.rms_norm_eps, offset=0.0)


def read_experts(config: ModelConfig, parameters: Parameters) -> ExpertTensors:
    """Read the experts of a layer: all in one tensor, rows of gate and up in turn."""
    num_experts, hidden, inner = config.num_experts, config.hidden_size, config.intermediate_size
    if config.quantization is None:
        gate_up: list[Matrix] = [
            *parameters.stacked_parameter("gate_up_proj", (num_experts, hidden, 2 * inner), 2).mT
        ]
        down: list[Matrix] = [*parameters.stacked_parameter("down_proj", (num_experts, inner, hidden), 1).mT]
    else:
        gate_up = parameters.stacked_matrices("gate_up_proj", num_experts, (2 * inner, hidden), 0)
        down = parameters.stacked_matrices("down_proj", num_experts, (hidden, inner), 1)
    bias_XN = parameters.stacked_parameter("gate_up_proj_bias", (num_experts, 2 * inner), 1).float()
    return ExpertTensors(
        [
            parameters.join_matrices([change_rows(rows, every_second) for every_second in (GATES, UPS)])
            for rows in gate_up
        ],
        down,
        torch.stack((bias_XN[:, ::2], bias_XN[:, 1::2]), dim=1).flatten(1),
        parameters.stacked_parameter("down_proj_bias", (num_experts, hidden), None).float(),
    )
