"""Quantised checkpoints in the layouts of each method, and the same weights in fp32 for transformers.

The layouts are written here as their packages describe them, apart from the code that reads them.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]
GROUP: Final = 32
BLOCK: Final = [32, 16]
FP8: Final = torch.float8_e4m3fn
# A layer a weight, and, in gpt-oss, [experts, K, N].
PROJECTIONS: Final = ("_proj.weight", "_proj_with_mqa.weight", ".w1.weight", ".w2.weight", ".w3.weight")
EXPERTS: Final = ("experts.gate_up_proj", "experts.down_proj")
E2M1: Final = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


@dataclass(frozen=True)
class Scheme:
    """`write` turns a weight [N, K] into the tensors of its layer, and the weight that they stand for."""

    config: dict[str, Any]
    write: Callable[[Tensor], tuple[Tensors, Tensor]]
    rounds_inputs: bool = False


def write_model(plain: Path, quantised: Path, dequantised: Path, scheme: Scheme) -> None:
    """Read the fp32 model in `plain`; write it quantised, and what that stands for in fp32."""
    tensors, dense = load_file(plain / "model.safetensors"), {}
    saved: Tensors = {}
    for name, tensor in tensors.items():
        dense[name] = tensor
        is_quantised = EXPERTS if scheme.config["quant_method"] == "mxfp4" else PROJECTIONS
        if not name.endswith(is_quantised):
            saved[name] = tensor
            continue
        parts, dense[name] = scheme.write(tensor)
        saved |= {f"{name.removesuffix('weight')}{part}": each for part, each in parts.items()}
    config = json.loads((plain / "config.json").read_text())
    for directory, content, keys in (
        (quantised, saved, {"quantization_config": scheme.config}),
        (dequantised, dense, {}),
    ):
        directory.mkdir()
        contiguous = {name: tensor.contiguous() for name, tensor in content.items()}
        save_file(contiguous, directory / "model.safetensors", {"format": "pt"})
        (directory / "config.json").write_text(json.dumps(config | keys))


def _rounded(weight: Tensor, group: int, largest: int) -> tuple[Tensor, Tensor]:
    """Values in [-largest, largest] and scales, one for each output and group."""
    groups = weight.unflatten(1, (-1, group))
    scales = groups.abs().amax(-1) / largest
    return (groups / scales[..., None]).round().flatten(1), scales


def _spread(scales: Tensor, width: int) -> Tensor:
    return scales.repeat_interleave(width // scales.shape[1], 1)


def _words(values: Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Unsigned values in int32 words along `dim`; order: of the values in a word, from its lowest bits."""
    items = 32 // bits
    parts = values.long().unflatten(dim, (-1, items)).unbind(dim + 1)
    word = sum(parts[source] << bits * place for place, source in enumerate(order or range(items)))
    assert isinstance(word, Tensor)
    return torch.where(word >= 2**31, word - 2**32, word).to(torch.int32)


def _int8(weight: Tensor) -> tuple[Tensors, Tensor]:
    values, scales = _rounded(weight, weight.shape[1], 127)
    return {"weight": values.to(torch.int8), "weight_scale": scales}, values * scales


def _fp8_channel(weight: Tensor) -> tuple[Tensors, Tensor]:
    scales = weight.abs().amax(1, keepdim=True) / 448
    values = (weight / scales).to(FP8)
    return {"weight": values, "weight_scale": scales}, values.float() * scales


def _fp8_tensor(weight: Tensor) -> tuple[Tensors, Tensor]:
    scale = weight.abs().max() / 448
    values = (weight / scale).to(FP8)
    tensors = {"weight": values, "weight_scale": scale, "input_scale": torch.tensor(1.0)}
    return tensors, values.float() * scale


def _fp8_block(weight: Tensor) -> tuple[Tensors, Tensor]:
    """The last blocks may be smaller."""
    num_outputs, num_inputs = weight.shape
    rows, columns = -(-num_outputs // BLOCK[0]), -(-num_inputs // BLOCK[1])
    scales = torch.linspace(0.5, 2, rows * columns).view(rows, columns) / 100
    spread = scales.repeat_interleave(BLOCK[0], 0).repeat_interleave(BLOCK[1], 1)[:num_outputs, :num_inputs]
    values = (weight / spread).clamp(-448, 448).to(FP8)
    return {"weight": values, "weight_scale_inv": scales}, values.float() * spread


def _packed(bits: int) -> Callable[[Tensor], tuple[Tensors, Tensor]]:
    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        values, scales = _rounded(weight, GROUP, 2 ** (bits - 1) - 1)
        tensors = {
            "weight_packed": _words(values + 2 ** (bits - 1), bits, 1),
            "weight_scale": scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        return tensors, values * _spread(scales, weight.shape[1])

    return write


def _with_zeros(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Values and zeros in [0, 16) and scales."""
    groups = weight.unflatten(1, (-1, GROUP))
    low, high = groups.amin(-1), groups.amax(-1)
    scales = (high - low) / 15
    zeros = (-low / scales).round().clamp(0, 15)
    return (groups / scales[..., None] + zeros[..., None]).round().clamp(0, 15).flatten(1), zeros, scales


def _packed_with_zeros(weight: Tensor) -> tuple[Tensors, Tensor]:
    values, zeros, scales = _with_zeros(weight)
    tensors = {
        "weight_packed": _words(values, 4, 1),
        "weight_scale": scales,
        "weight_zero_point": _words(zeros, 4, 0),
        "weight_shape": torch.tensor(weight.shape),
    }
    width = weight.shape[1]
    return tensors, (values - _spread(zeros, width)) * _spread(scales, width)


def _awq(weight: Tensor) -> tuple[Tensors, Tensor]:
    values, zeros, scales = _with_zeros(weight)
    order, width = (0, 2, 4, 6, 1, 3, 5, 7), weight.shape[1]
    tensors = {
        "qweight": _words(values.T, 4, 1, order),
        "qzeros": _words(zeros.T, 4, 1, order),
        "scales": scales.T,
    }
    return tensors, (values - _spread(zeros, width)) * _spread(scales, width)


def _gptq(
    bits: int, *, is_second: bool = False, has_order: bool = False
) -> Callable[[Tensor], tuple[Tensors, Tensor]]:
    def write(weight: Tensor) -> tuple[Tensors, Tensor]:
        num_outputs, num_inputs = weight.shape
        if bits == 4:
            values, zeros, scales = _with_zeros(weight)
            zeros = zeros.clamp(min=1)  # the first version saves zeros less one
        else:
            values, scales = _rounded(weight, GROUP, 127)
            values, zeros = values + 128, torch.full_like(scales, 128)
        groups = torch.arange(num_inputs) // GROUP
        if has_order:
            groups = groups[torch.randperm(num_inputs, generator=torch.Generator().manual_seed(num_outputs))]
        tensors = {
            "qweight": _words(values, bits, 1).T,
            "qzeros": _words(zeros.T - (0 if is_second else 1), bits, 1),
            "scales": scales.T,
            "g_idx": groups.to(torch.int32),
        }
        return tensors, (values - zeros[:, groups]) * scales[:, groups]

    return write


def _mxfp4(weight_XKN: Tensor) -> tuple[Tensors, Tensor]:
    groups = weight_XKN.mT.unflatten(2, (-1, 32))
    exponents = (groups.abs().amax(-1, keepdim=True) / 6).log2().ceil()
    magnitudes = (groups / 2**exponents).abs()
    codes = (magnitudes[..., None] - E2M1).abs().argmin(-1)
    values = E2M1[codes] * groups.sign() * 2**exponents
    codes += 8 * (groups < 0)
    blocks = (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8)
    scales = (exponents.squeeze(-1) + 127).to(torch.uint8)
    return {"_blocks": blocks, "_scales": scales}, values.flatten(2).mT


def _compressed(saved_as: str, inputs: dict[str, Any] | None = None, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": saved_as,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
    }


_INT4: Final[dict[str, Any]] = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
_INT8: Final[dict[str, Any]] = {"num_bits": 8, "type": "int", "strategy": "channel"}
_GPTQ: Final[dict[str, Any]] = {"quant_method": "gptq", "group_size": GROUP}
_DYNAMIC: Final[dict[str, Any]] = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
SCHEMES: Final = {
    "w8a8": Scheme(_compressed("int-quantized", _DYNAMIC, **_INT8), _int8, rounds_inputs=True),
    "w8a16": Scheme(_compressed("int-quantized", **_INT8), _int8),
    "w8a16-packed": Scheme(_compressed("pack-quantized", **(_INT4 | {"num_bits": 8})), _packed(8)),
    "w4a16": Scheme(_compressed("pack-quantized", **_INT4), _packed(4)),
    "w4a16-zeros": Scheme(_compressed("pack-quantized", **_INT4, symmetric=False), _packed_with_zeros),
    "fp8-channel": Scheme(
        _compressed("float-quantized", num_bits=8, type="float", strategy="channel"), _fp8_channel
    ),
    "fp8-tensor": Scheme({"quant_method": "fp8", "activation_scheme": "static"}, _fp8_tensor),
    "fp8-block": Scheme({"quant_method": "fp8", "weight_block_size": BLOCK}, _fp8_block),
    "awq": Scheme({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, _awq),
    "gptq": Scheme({**_GPTQ, "bits": 4}, _gptq(4)),
    "gptq-v2": Scheme({**_GPTQ, "bits": 4, "checkpoint_format": "gptq_v2"}, _gptq(4, is_second=True)),
    "gptq-8": Scheme({**_GPTQ, "bits": 8}, _gptq(8)),
    "mxfp4": Scheme({"quant_method": "mxfp4"}, _mxfp4),
    "gptq-order": Scheme({**_GPTQ, "bits": 4, "desc_act": True}, _gptq(4, has_order=True)),
}
