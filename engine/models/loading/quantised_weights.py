"""The tensors of quantised linear layers in a checkpoint, and the weights that they stand for.

Shapes: N outputs, K inputs, G groups of inputs.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import gcd
from typing import Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from baton.engine.models.loading.checkpoint import Layout, Quantization
from baton.errors import ConfigError, ModelError
from baton.kernels.quantised import FP8, QuantisedMatrix, WeightFormat

WORD_BITS: Final = 32
AWQ_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)  # of the outputs in a word, from its lowest bits


class Axis(NamedTuple):
    """The dimension of a stored tensor that runs along the outputs or the inputs of its weight."""

    dim: int
    items: int = 1  # outputs or inputs of one element
    is_word: bool = False  # an element cannot be cut


class Stored(NamedTuple):
    """One tensor of a layer. Without an axis it is the same for all outputs, or inputs."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None  # None: of any float
    outputs: Axis | None
    inputs: Axis | None

    def stacked(self, count: int) -> "Stored":
        """The tensors of so many layers in one."""
        outputs, inputs = (axis and axis._replace(dim=axis.dim + 1) for axis in (self.outputs, self.inputs))
        return Stored((count, *self.shape), self.dtype, outputs, inputs)


Span: TypeAlias = tuple[int, int]  # [start, stop)
Parts: TypeAlias = Mapping[str, Tensor]


def stored_tensors(scheme: Quantization, shape: tuple[int, int]) -> dict[str, Stored]:
    """The tensors of a layer with a weight of shape (N, K), by the last part of their names."""
    return LAYOUTS[scheme.layout][0](scheme, shape)


def read_matrix(scheme: Quantization, parts: Parts, spans: tuple[Span, Span]) -> QuantisedMatrix | Tensor:
    """The weight of the outputs and inputs in `spans`, from the parts of the tensors that cover them.

    A tensor, in fp32, where no format holds it. ModelError: a value is a NaN or an infinity.
    """
    weight = LAYOUTS[scheme.layout][1](scheme, parts, spans)
    scales = weight if isinstance(weight, Tensor) else weight.scales_NG
    if isinstance(weight, QuantisedMatrix) and _has_fp8_nan(weight):
        raise ModelError("an FP8 value is a NaN")
    if not bool(scales.isfinite().all()):
        raise ModelError("a scale is a NaN or an infinity")
    return weight


def _has_fp8_nan(matrix: QuantisedMatrix) -> bool:
    bits = matrix.codes_NK.view(torch.uint8)
    return matrix.format is WeightFormat.FP8 and bool((bits & 127 == 127).any())


def stored_span(name: str, tensor: Stored, axis: Axis, span: Span) -> Span:
    """The elements along an axis that cover [start, stop). ConfigError: the span cuts a word."""
    (start, stop), num_elements = span, tensor.shape[axis.dim]
    first, last = start // axis.items, -(-stop // axis.items)
    if axis.is_word and (start % axis.items or (stop % axis.items and last < num_elements)):
        raise ConfigError(f"{name}: {axis.items} values share a word and cannot be split over ranks")
    return first, last


# The axes of scales and zeros.


def _group_axis(scheme: Quantization, dim: int) -> Axis | None:
    """None: of all inputs, or in an order of its own, which needs all groups."""
    return None if scheme.group_size is None or scheme.has_order else Axis(dim, scheme.group_size)


def _num_groups(scheme: Quantization, num_inputs: int) -> int:
    return 1 if scheme.group_size is None else -(-num_inputs // scheme.group_size)


def _in_groups(scheme: Quantization, vector_NG: Tensor, spans: tuple[Span, Span]) -> Tensor:
    """One value for each output of the span and each group of inputs; the span cuts no group."""
    (first_output, last_output), (first, last) = spans
    if scheme.block_outputs is None:
        vector_NG = vector_NG.reshape(1, 1).expand(last_output - first_output, 1)
    elif scheme.block_outputs > 1:
        vector_NG = vector_NG.repeat_interleave(scheme.block_outputs, 0)
        vector_NG = vector_NG.narrow(0, first_output % scheme.block_outputs, last_output - first_output)
    if scheme.group_size is None:
        return vector_NG.reshape(-1, 1)
    size = gcd(scheme.group_size, first, last)
    fine_NG = vector_NG.repeat_interleave(scheme.group_size // size, 1)
    return fine_NG.narrow(1, first % scheme.group_size // size, (last - first) // size)


# Values as they are.


def _stored_values(scheme: Quantization, shape: tuple[int, int]) -> dict[str, Stored]:
    num_outputs, num_inputs = shape
    scale = Stored((1,), None, None, None)
    if scheme.block_outputs is not None:
        scale_shape = (-(-num_outputs // scheme.block_outputs), _num_groups(scheme, num_inputs))
        scale = Stored(scale_shape, None, Axis(0, scheme.block_outputs), _group_axis(scheme, 1))
    dtype = FP8 if scheme.is_float else torch.int8
    tensors = {"weight": Stored(shape, dtype, Axis(0), Axis(1)), scheme.scale_name: scale}
    if scheme.has_zeros:
        tensors["weight_zero_point"] = scale._replace(dtype=torch.int8)
    return tensors


def _read_values(scheme: Quantization, parts: Parts, spans: tuple[Span, Span]) -> QuantisedMatrix | Tensor:
    codes_NK = parts["weight"]
    scales_NG = _in_groups(scheme, parts[scheme.scale_name].float(), spans).contiguous()
    weight_format = WeightFormat.INT8_ROUNDED if scheme.rounds_inputs else WeightFormat.INT8
    matrix = QuantisedMatrix(WeightFormat.FP8 if scheme.is_float else weight_format, codes_NK, scales_NG)
    if "weight_zero_point" not in parts:
        return matrix
    zeros_NG = _in_groups(scheme, parts["weight_zero_point"].float(), spans)
    return replace(matrix, zeros_NG=zeros_NG).dequantised() if bool(zeros_NG.any()) else matrix


# Values that share words.


def _unpack(words: Tensor, num_bits: int, dim: int, order: tuple[int, ...] | None = None) -> Tensor:
    """The unsigned values in int32 words, int16; `dim` grows."""
    positions = order or tuple(range(WORD_BITS // num_bits))
    values = [(words >> position * num_bits & (1 << num_bits) - 1).to(torch.int16) for position in positions]
    return torch.stack(values, dim=dim + 1).flatten(dim, dim + 1)


def _from_unsigned(
    scheme: Quantization,
    values_NK: Tensor,
    scales_NG: Tensor,
    zeros_NG: Tensor | None,
    spans: tuple[Span, Span],
    order_K: Tensor | None,
) -> QuantisedMatrix | Tensor:
    """The weight of unsigned values; zeros_NG None: half of their range. order_K: the group of each input."""
    half = 1 << scheme.num_bits - 1
    codes_NK = (values_NK - half).to(torch.int8)
    zeros_NG = None if zeros_NG is None else zeros_NG.float() - half
    if zeros_NG is not None and not bool(zeros_NG.any()):
        zeros_NG = None
    scales_NG = scales_NG.float()
    if order_K is not None and scheme.has_order:
        group_K = order_K.long()
        zeros_NK = 0 if zeros_NG is None else zeros_NG[:, group_K]
        return (codes_NK - zeros_NK) * scales_NG[:, group_K]
    scales_NG = _in_groups(scheme, scales_NG, spans).contiguous()
    if zeros_NG is not None:
        zeros_NG = _in_groups(scheme, zeros_NG, spans).contiguous()
    if scheme.num_bits == 8:
        weight_format = WeightFormat.INT8_ROUNDED if scheme.rounds_inputs else WeightFormat.INT8
        matrix = QuantisedMatrix(weight_format, codes_NK, scales_NG, zeros_NG)
        return matrix if zeros_NG is None else matrix.dequantised()
    if zeros_NG is not None:
        return QuantisedMatrix(WeightFormat.INT4_ZEROS, codes_NK, scales_NG, zeros_NG)
    weight_format = WeightFormat.INT4_ROUNDED if scheme.rounds_inputs else WeightFormat.INT4
    return QuantisedMatrix(weight_format, codes_NK, scales_NG)


def _stored_packed(scheme: Quantization, shape: tuple[int, int]) -> dict[str, Stored]:
    num_outputs, num_inputs = shape
    items, groups = WORD_BITS // scheme.num_bits, _group_axis(scheme, 1)
    num_groups = _num_groups(scheme, num_inputs)
    packed = Stored(
        (num_outputs, -(-num_inputs // items)), torch.int32, Axis(0), Axis(1, items, is_word=True)
    )
    tensors = {
        "weight_packed": packed,
        "weight_scale": Stored((num_outputs, num_groups), None, Axis(0), groups),
        "weight_shape": Stored((2,), torch.int64, None, None),
    }
    if scheme.has_zeros:
        zeros_shape = (-(-num_outputs // items), num_groups)
        tensors["weight_zero_point"] = Stored(zeros_shape, torch.int32, Axis(0, items, is_word=True), groups)
    if scheme.has_order:
        tensors["weight_g_idx"] = Stored((num_inputs,), torch.int32, None, Axis(0))
    return tensors


def _read_packed(scheme: Quantization, parts: Parts, spans: tuple[Span, Span]) -> QuantisedMatrix | Tensor:
    zeros = None
    if "weight_zero_point" in parts:
        zeros = _unpack(parts["weight_zero_point"], scheme.num_bits, 0)[: spans[0][1] - spans[0][0]]
    values_NK = _unpack(parts["weight_packed"], scheme.num_bits, 1)[:, : spans[1][1] - spans[1][0]]
    return _from_unsigned(scheme, values_NK, parts["weight_scale"], zeros, spans, parts.get("weight_g_idx"))


def _stored_awq(scheme: Quantization, shape: tuple[int, int]) -> dict[str, Stored]:
    num_outputs, num_inputs = shape
    items, groups = WORD_BITS // scheme.num_bits, _group_axis(scheme, 0)
    words, num_groups = num_outputs // items, _num_groups(scheme, num_inputs)
    outputs = Axis(1, items, is_word=True)
    return {
        "qweight": Stored((num_inputs, words), torch.int32, outputs, Axis(0)),
        "qzeros": Stored((num_groups, words), torch.int32, outputs, groups),
        "scales": Stored((num_groups, num_outputs), None, Axis(1), groups),
    }


def _read_awq(scheme: Quantization, parts: Parts, spans: tuple[Span, Span]) -> QuantisedMatrix | Tensor:
    values_KN, zeros_GN = (
        _unpack(parts[name], scheme.num_bits, 1, AWQ_ORDER) for name in ("qweight", "qzeros")
    )
    zeros_NG = zeros_GN.T if scheme.has_zeros else None
    return _from_unsigned(scheme, values_KN.T.contiguous(), parts["scales"].T, zeros_NG, spans, None)


def _stored_gptq(scheme: Quantization, shape: tuple[int, int]) -> dict[str, Stored]:
    num_outputs, num_inputs = shape
    items, groups = WORD_BITS // scheme.num_bits, _group_axis(scheme, 0)
    num_groups = _num_groups(scheme, num_inputs)
    word_outputs = Axis(1, items, is_word=True)
    return {
        "qweight": Stored(
            (num_inputs // items, num_outputs), torch.int32, Axis(1), Axis(0, items, is_word=True)
        ),
        "qzeros": Stored((num_groups, num_outputs // items), torch.int32, word_outputs, groups),
        "scales": Stored((num_groups, num_outputs), None, Axis(1), groups),
        "g_idx": Stored((num_inputs,), torch.int32, None, Axis(0)),
    }


def _read_gptq(scheme: Quantization, parts: Parts, spans: tuple[Span, Span]) -> QuantisedMatrix | Tensor:
    values_NK = _unpack(parts["qweight"], scheme.num_bits, 0).T.contiguous()
    zeros_NG = _unpack(parts["qzeros"], scheme.num_bits, 1).T + scheme.zero_offset
    return _from_unsigned(scheme, values_NK, parts["scales"].T, zeros_NG, spans, parts["g_idx"])


# Experts in MXFP4.

SCALE_BIAS: Final = 127  # of the exponents


def _stored_mxfp4(scheme: Quantization, shape: tuple[int, int]) -> dict[str, Stored]:
    assert scheme.group_size is not None
    groups = shape[0], shape[1] // scheme.group_size
    axes = Axis(0), Axis(1, scheme.group_size, is_word=True)
    return {
        "blocks": Stored((*groups, scheme.group_size // 2), torch.uint8, *axes),
        "scales": Stored(groups, torch.uint8, *axes),
    }


def _read_mxfp4(scheme: Quantization, parts: Parts, spans: tuple[Span, Span]) -> QuantisedMatrix:
    """A byte holds two values, the first in its lower bits. Scales are exponents of two with a bias."""
    blocks, exponents = parts["blocks"], parts["scales"].int() - SCALE_BIAS
    codes_NK = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(1)
    scales_NG = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)
    return QuantisedMatrix(WeightFormat.MXFP4, codes_NK, scales_NG)


Declare: TypeAlias = Callable[[Quantization, tuple[int, int]], dict[str, Stored]]
Read: TypeAlias = Callable[[Quantization, Parts, tuple[Span, Span]], QuantisedMatrix | Tensor]
LAYOUTS: Final[dict[Layout, tuple[Declare, Read]]] = {
    "awq": (_stored_awq, _read_awq),
    "gptq": (_stored_gptq, _read_gptq),
    "mxfp4": (_stored_mxfp4, _read_mxfp4),
    "pack-quantized": (_stored_packed, _read_packed),
    "values": (_stored_values, _read_values),
}
