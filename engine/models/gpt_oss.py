"""gpt-oss: attention with sinks, windows in every second layer, and experts with biases and a clamped SwiGLU.

Experts in MXFP4, as published, are dequantised when they are read.
"""

import torch
from torch import Tensor

from baton.engine.models.decoder import (
    Attention,
    Decoder,
    DecoderLayer,
    ExpertTensors,
    Norm,
    RmsNorm,
    SparseMlp,
)
from baton.engine.models.registry import ModelConfig, read_layer_types
from baton.engine.models.weights import Parameters
from baton.kernels.gated import clamped_swiglu

GROUP = 32  # values that share a scale in MXFP4
# The values of 4 bits: a sign, two bits of exponent, one of mantissa.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
SCALE_BIAS = 127  # of the exponents


class GptOss(Decoder):
    """Reads `layer_types`, `sliding_window`, `attention_bias`, `swiglu_alpha` and `swiglu_limit`."""

    def make_layer(self, config: ModelConfig, parameters: Parameters, index: int) -> DecoderLayer:
        """As `Decoder.make_layer`."""
        keys, layer_types = config.keys, read_layer_types(config)
        is_windowed = layer_types[index] == "sliding_attention" if layer_types else index % 2 == 0
        bias = keys.flag("attention_bias", True)
        attention = Attention(
            config,
            parameters.scope("self_attn"),
            qkv_bias=bias,
            out_bias=bias,
            window=keys.count("sliding_window", 128) if is_windowed else None,
            has_sinks=True,
        )
        mlp = parameters.scope("mlp")
        experts = SparseMlp(
            config,
            mlp,
            read_experts(config, mlp.scope("experts")),
            normalises=True,
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
    if "quantization_config" in config.keys:
        gate_up_XNK = _read_mxfp4(parameters, "gate_up_proj", (num_experts, 2 * inner, hidden), 1)
        down_XNK = _read_mxfp4(parameters, "down_proj", (num_experts, hidden, inner), 2)
    else:
        gate_up_XNK = parameters.shard("gate_up_proj", (num_experts, hidden, 2 * inner), 2).mT
        down_XNK = parameters.shard("down_proj", (num_experts, inner, hidden), 1).mT
    bias_XN = parameters.shard("gate_up_proj_bias", (num_experts, 2 * inner), 1).float()
    return ExpertTensors(
        [parameters.join([rows[::2], rows[1::2]]) for rows in gate_up_XNK],
        list(down_XNK),
        torch.stack((bias_XN[:, ::2], bias_XN[:, 1::2]), dim=1).flatten(1),
        parameters.whole("down_proj_bias", (num_experts, hidden)).float(),
    )


def _read_mxfp4(parameters: Parameters, name: str, shape: tuple[int, int, int], dim: int) -> Tensor:
    """This rank's part along `dim` of a tensor of this shape, in the dtype of the model."""
    num_experts, num_rows, num_columns = shape
    groups = (num_experts, num_rows, num_columns // GROUP)
    blocks = parameters.shard(f"{name}_blocks", (*groups, GROUP // 2), dim)
    scales = parameters.shard(f"{name}_scales", groups, dim)
    return dequantised_mxfp4(blocks.to(torch.int32), scales.to(torch.int32)).to(parameters.dtype)


def dequantised_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Values in fp32, [..., 32 * groups].

    blocks: int [..., groups, 16]; a byte holds two values, the first in its lower bits. scales: int [...,
    groups], exponents of two with a bias of 127.
    """
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    values = torch.tensor(E2M1, device=blocks.device)[codes]
    return torch.ldexp(values, scales[..., None] - SCALE_BIAS).flatten(-2)
