"""Quantised checkpoints: the schemes that `quantization_config` of a config.json may name.

This module imports no torch: `baton serve` reads the config before any worker starts. quantised_weights.py
reads the tensors.
"""

import re
from collections.abc import Callable
from typing import Final, Literal

import msgspec

from baton.engine.models.loading.checkpoint import JsonObject
from baton.errors import ModelError

# The tensors of a linear layer: values as they are, or packed into 32 bits in the order of
# compressed-tensors, AWQ or GPTQ; or experts in MXFP4, which gpt_oss.py reads.
Layout = Literal["values", "pack-quantized", "awq", "gptq", "mxfp4"]


class Quantization(msgspec.Struct, frozen=True, kw_only=True):
    """A scheme, by what its tensors are."""

    method: str  # as config.json names it
    layout: Layout
    num_bits: int = 8
    is_float: bool = False  # E4M3
    group_size: int | None = None  # inputs that share a scale; None: all of them
    block_outputs: int | None = 1  # outputs that share a scale; None: all of them
    has_zeros: bool = False
    has_order: bool = False  # groups are not of neighbouring inputs
    scale_name: str = "weight_scale"
    zero_offset: int = 0  # zeros are saved less by so much
    rounds_inputs: bool = False
    ignored: tuple[
        str, ...
    ] = ()  # modules that are not quantised: names, or parts of names; "re:" an expression

    def covers(self, module: str) -> bool:
        """True when the weight of a linear layer, by its name in the checkpoint, is quantised."""
        return self.layout != "mxfp4" and not any(_matches(module, each) for each in self.ignored)


def _matches(module: str, pattern: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return f".{pattern}." in f".{module}."


def read_quantization(keys: JsonObject, supported: tuple[str, ...]) -> Quantization | None:
    """The scheme of a checkpoint; None when it is not quantised.

    keys: the whole config.json. supported: names of METHODS. ModelError: another method, or a variant of a
    method that has no reader.
    """
    if "quantization_config" not in keys:
        return None
    section = keys.section("quantization_config")
    method = section.require("quant_method", str)
    if method not in supported or method not in METHODS:
        raise ModelError(
            f"{section.source}: quant_method {method!r} is not supported; supported are "
            f"{', '.join(supported) or 'none'}"
        )
    return METHODS[method](section)


def _compressed_tensors(keys: JsonObject) -> Quantization:
    saved_as, groups = keys.require("format", str), keys.section("config_groups")
    names = keys.require("config_groups", dict[str, object])
    if len(names) != 1:
        raise ModelError(f"{keys.source}: one group of 'config_groups' is supported, got {', '.join(names)}")
    group = groups.section(next(iter(names)))
    weights, inputs = group.section("weights"), group.section("input_activations")
    kind, num_bits = weights.require("type", str), weights.count("num_bits")
    formats = {
        ("pack-quantized", "int", 4),
        ("pack-quantized", "int", 8),
        ("int-quantized", "int", 8),
        ("float-quantized", "float", 8),
        ("naive-quantized", "int", 8),
        ("naive-quantized", "float", 8),
    }
    if (saved_as, kind, num_bits) not in formats:
        raise ModelError(
            f"{keys.source}: format {saved_as!r} with {kind} weights of {num_bits} bits is not supported"
        )
    block_outputs, group_size = _compressed_groups(weights)
    is_packed = saved_as == "pack-quantized"
    return Quantization(
        method=f"compressed-tensors {saved_as}",
        layout="pack-quantized" if is_packed else "values",
        num_bits=num_bits,
        is_float=kind == "float",
        group_size=group_size,
        block_outputs=block_outputs,
        has_zeros=not weights.flag("symmetric", True),
        has_order=weights.get("actorder", str) == "group",
        rounds_inputs=kind == "int" and inputs.get("num_bits", int) == 8,
        ignored=tuple(keys.get("ignore", list[str]) or ()),
    )


def _compressed_groups(weights: JsonObject) -> tuple[int | None, int | None]:
    """(outputs, inputs) that share a scale."""
    strategy = weights.get("strategy", str) or "tensor"
    match strategy:
        case "tensor":
            return None, None
        case "channel":
            return 1, None
        case "group":
            return 1, weights.count("group_size")
        case "block":
            outputs, inputs = weights.require("block_structure", tuple[int, int])
            return outputs, inputs
    raise ModelError(f"{weights.source}: strategy {strategy!r} is not supported")


def _fp8(keys: JsonObject) -> Quantization:
    block = keys.get("weight_block_size", tuple[int, int])
    return Quantization(
        method="fp8",
        layout="values",
        is_float=True,
        block_outputs=None if block is None else block[0],
        group_size=None if block is None else block[1],
        scale_name="weight_scale" if block is None else "weight_scale_inv",
        ignored=_not_converted(keys),
    )


def _awq(keys: JsonObject) -> Quantization:
    bits, version = keys.count("bits"), keys.get("version", str) or "gemm"
    if bits != 4 or version.lower() != "gemm":
        raise ModelError(
            f"{keys.source}: AWQ of version 'gemm' with 4 bits is supported, got {version!r}, {bits} bits"
        )
    return Quantization(
        method="awq",
        layout="awq",
        num_bits=4,
        group_size=_group_size(keys),
        has_zeros=keys.flag("zero_point", True),
        scale_name="scales",
        ignored=_not_converted(keys),
    )


def _gptq(keys: JsonObject) -> Quantization:
    bits = keys.count("bits")
    if bits not in (4, 8):
        raise ModelError(f"{keys.source}: GPTQ with 4 or 8 bits is supported, got {bits}")
    for key in ("dynamic", "modules_in_block_to_quantize"):
        if key in keys:
            raise ModelError(f"{keys.source}: {key!r} is not supported: all layers should be quantised alike")
    is_second = keys.get("checkpoint_format", str) == "gptq_v2"
    return Quantization(
        method="gptq",
        layout="gptq",
        num_bits=bits,
        group_size=_group_size(keys),
        has_zeros=True,
        has_order=keys.flag("desc_act"),
        scale_name="scales",
        zero_offset=0 if is_second else 1,
        ignored=_not_converted(keys),
    )


def _mxfp4(keys: JsonObject) -> Quantization:
    return Quantization(method="mxfp4", layout="mxfp4", num_bits=4, group_size=32, is_float=True)


def _group_size(keys: JsonObject) -> int | None:
    """-1 stands for all inputs."""
    return None if keys.get("group_size", int) == -1 else keys.count("group_size", 128)


def _not_converted(keys: JsonObject) -> tuple[str, ...]:
    return ("lm_head", *(keys.get("modules_to_not_convert", list[str]) or ()))


# quant_method -> the scheme by its keys
METHODS: Final[dict[str, Callable[[JsonObject], Quantization]]] = {
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "gptq": _gptq,
    "mxfp4": _mxfp4,
}
DENSE_METHODS: Final = ("awq", "compressed-tensors", "fp8", "gptq")  # of any linear layer
