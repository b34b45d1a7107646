"""Weights of 8 or 4 bits: their formats, how they are made from plain weights, and how a CPU lays them out.

triton/quantised_tile.py lays them out for a GPU.

A weight is (value - zero) * scale. Inputs come in groups; each output has a scale, and perhaps a zero, in
each group. A checkpoint brings such a weight, or `quantise` makes one.

Shapes: T tokens, N outputs, K inputs, G groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from math import gcd
from operator import itemgetter
from typing import Final, Literal

import torch
from torch import Tensor
from torch.nn import functional

PANEL: Final = 32  # outputs, as in csrc/panels.h
MAX_GROUP: Final = 128  # inputs that share a scale in a product
UNIT: Final = 4  # neighbouring inputs of an output that lie together
FP8: Final = torch.float8_e4m3fn
FP8_LARGEST: Final = 448.0
FP8_AS_HALF: Final = 256.0  # kernels read E4M3 as half precision, which is the value divided by this
OFFSET: Final = 128  # csrc/linear_rounded.c adds this to inputs of 8 bits
HALF_BYTES: Final = 16  # and multiplies values of 4 bits as if they were so many times larger
# The values of E2M1: a sign, two bits of exponent, one of mantissa.
E2M1: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
QUANTISED_PANELS: Final = 64  # rounded or laid out at a time: both take ten times the memory of the result


class WeightFormat(IntEnum):
    """The codes of a weight's elements. csrc/ops.h has the same numbers."""

    PLAIN = 0
    INT8 = 1
    INT4 = 2
    INT4_ZEROS = 3  # as INT4, with zeros
    FP8 = 4  # E4M3
    MXFP4 = 5  # E2M1
    INT8_ROUNDED = 6  # as INT8, and inputs are rounded to 8 bits, with a scale for each token and group
    INT4_ROUNDED = 7

    @property
    def rounds_inputs(self) -> bool:
        """True when inputs are rounded to 8 bits before they are multiplied."""
        return self >= WeightFormat.INT8_ROUNDED

    @property
    def num_bits(self) -> int:
        """Bits of an element."""
        return 8 if self in (WeightFormat.INT8, WeightFormat.FP8, WeightFormat.INT8_ROUNDED) else 4

    @property
    def group_unit(self) -> int:
        """A group has a multiple of so many inputs, on a CPU and on a GPU."""
        return UNIT if self is WeightFormat.INT8_ROUNDED else 2 * UNIT


Method = Literal["int8", "fp8", "int4"]


FORMAT_OF: Final[Mapping[Method, WeightFormat]] = {
    "int8": WeightFormat.INT8_ROUNDED,
    "int4": WeightFormat.INT4_ROUNDED,
    "fp8": WeightFormat.FP8,
}


@dataclass(frozen=True, slots=True)
class QuantisedMatrix:
    """A weight of a linear layer.

    codes_NK: int8 values; float8_e4m3fn of FP8; uint8 indices of `E2M1` of MXFP4. scales_NG: fp32; K is a
    multiple of G. zeros_NG: fp32, of INT4_ZEROS.
    """

    format: WeightFormat
    codes_NK: Tensor
    scales_NG: Tensor
    zeros_NG: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.codes_NK.shape[0], self.codes_NK.shape[1]

    @property
    def group(self) -> int:
        """Inputs of a group."""
        return self.codes_NK.shape[1] // self.scales_NG.shape[1]

    def change_rows(self, change: Callable[[Tensor], Tensor]) -> QuantisedMatrix:
        """The outputs that `change` makes of tensors [N, ...]."""
        zeros = None if self.zeros_NG is None else change(self.zeros_NG)
        return replace(self, codes_NK=change(self.codes_NK), scales_NG=change(self.scales_NG), zeros_NG=zeros)

    def regrouped(self, group: int) -> QuantisedMatrix:
        """The same weight in groups of so many inputs, which divides the size of its groups."""
        times = self.group // group
        if times == 1:
            return self
        zeros = None if self.zeros_NG is None else self.zeros_NG.repeat_interleave(times, 1)
        return replace(self, scales_NG=self.scales_NG.repeat_interleave(times, 1), zeros_NG=zeros)

    def chunk_inputs(self, num_parts: int) -> tuple[QuantisedMatrix, ...]:
        """Equal parts along the inputs; `num_parts` divides K."""
        part = self.shape[1] // num_parts
        finer = self.regrouped(gcd(self.group, part))
        groups = part // finer.group
        zeros = [None] * num_parts if finer.zeros_NG is None else finer.zeros_NG.split(groups, 1)
        codes, scales = finer.codes_NK.split(part, 1), finer.scales_NG.split(groups, 1)
        return tuple(
            replace(self, codes_NK=code, scales_NG=scale, zeros_NG=zero)
            for code, scale, zero in zip(codes, scales, zeros, strict=True)
        )

    def values(self) -> Tensor:
        """[N, G, inputs of a group] fp32, without zeros and scales."""
        codes_NK = self.codes_NK
        if self.format is WeightFormat.MXFP4:
            codes_NK = torch.tensor(E2M1, device=codes_NK.device)[codes_NK.int()]
        values_NGK: Tensor = codes_NK.float().unflatten(1, (-1, self.group))
        return values_NGK if self.zeros_NG is None else values_NGK - self.zeros_NG[..., None]

    def dequantised(self) -> Tensor:
        """[N, K] fp32."""
        return (self.values() * self.scales_NG[..., None]).flatten(1)


def join_rows(parts: list[QuantisedMatrix]) -> QuantisedMatrix | None:
    """The parts one after another along the outputs; None where they differ in more than values."""
    first = parts[0]
    if any(part.format is not first.format or part.shape[1] != first.shape[1] for part in parts):
        return None
    group = gcd(*(part.group for part in parts))
    finer = [part.regrouped(group) for part in parts]
    zeros = [part.zeros_NG for part in finer if part.zeros_NG is not None]
    return replace(
        first,
        codes_NK=torch.cat([part.codes_NK for part in finer]),
        scales_NG=torch.cat([part.scales_NG for part in finer]),
        zeros_NG=torch.cat(zeros) if zeros else None,
    )


def group_of(
    num_inputs: int, multiple_of: int, group: int, num_splits: int, most: int = MAX_GROUP
) -> int | None:
    """The largest divisor of `group`, at most `most` and a multiple of `multiple_of`, that no split cuts.

    num_splits: equal parts of the inputs, such as those of tensor-parallel ranks, which then round as one
    rank does.
    """
    part, rest = divmod(num_inputs, num_splits)
    common = gcd(part, group)
    sizes = (size for size in range(most, 0, -1) if common % size == 0 and size % multiple_of == 0)
    return None if rest else next(sizes, None)


def quantise(weight_NK: Tensor, method: Method, *, num_splits: int = 1) -> QuantisedMatrix | None:
    """Round a weight to the nearest values, with a scale for each output and each group of inputs.

    fp8 has one scale for each output and split. None: the inputs of a split cannot be cut into groups.
    """
    weight_format, num_inputs = FORMAT_OF[method], weight_NK.shape[1]
    group = group_of(num_inputs, weight_format.group_unit, num_inputs, num_splits)
    if group is None:
        return None
    group = num_inputs // num_splits if method == "fp8" else group
    parts = [
        _quantise_rows(rows_NK, weight_format, group) for rows_NK in weight_NK.split(PANEL * QUANTISED_PANELS)
    ]
    return join_rows(parts)


def _quantise_rows(weight_NK: Tensor, weight_format: WeightFormat, group: int) -> QuantisedMatrix:
    groups_NGK = weight_NK.float().unflatten(1, (-1, group))
    if weight_format is WeightFormat.FP8:
        scales_NG = groups_NGK.abs().amax(-1) / FP8_LARGEST
        scales_NG = torch.where(scales_NG == 0, 1.0, scales_NG)
        codes_NGK = (groups_NGK / scales_NG[..., None]).clamp(-FP8_LARGEST, FP8_LARGEST).to(FP8)
        return QuantisedMatrix(weight_format, codes_NGK.flatten(1), scales_NG)
    rounds = _round_to_4_bits if weight_format.num_bits == 4 else round_groups
    scales_NG, rounded_NGK = rounds(groups_NGK)
    return QuantisedMatrix(weight_format, rounded_NGK.flatten(1), scales_NG)


def _round_to_4_bits(groups: Tensor) -> tuple[Tensor, Tensor]:
    """As `round_groups`, to values from -8 to 7.

    The element of the largest magnitude becomes -8, so all values are used and a scale may be negative.
    """
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)).squeeze(-1)
    scales = torch.where(largest == 0, 1.0, largest / -8)
    scales = torch.where(groups.isfinite().all(-1), scales, float("nan"))
    return scales, (groups / scales[..., None]).round().clamp(-8, 7).nan_to_num().to(torch.int8)


def round_groups(groups: Tensor) -> tuple[Tensor, Tensor]:
    """The scales of groups along the last dimension, and the groups as int8 up to 127.

    The scale of a group with an element that is not finite is NaN.
    """
    largest = groups.abs().amax(-1)
    is_finite = largest.isfinite()
    inverse = torch.where(is_finite & (largest > 0), largest.new_tensor(127) / largest, 0.0)
    # The products are exact: csrc/linear_rounded.c rounds them once, too.
    exact = torch.where(is_finite[..., None], groups, 0.0).double() * inverse[..., None]
    return torch.where(is_finite, largest / 127, float("nan")), exact.round().to(torch.int8)


def panels(matrix: QuantisedMatrix, out: Callable[[int], Tensor]) -> Tensor:
    """The panels of csrc/linear_codes.c, or csrc/linear_rounded.c, in int8 memory of `out` (bytes).

    A group has a multiple of `WeightFormat.group_unit` inputs.
    """
    group, weight_format = matrix.group, matrix.format
    num_vectors = 2 if weight_format.rounds_inputs or matrix.zeros_NG is not None else 1
    group_bytes = PANEL * (group * weight_format.num_bits // 8 + 4 * num_vectors)
    panel_bytes = group_bytes * (matrix.shape[1] // group)
    packed = out(-(-matrix.shape[0] // PANEL) * panel_bytes)
    rest = packed
    for first in range(0, matrix.shape[0], PANEL * QUANTISED_PANELS):
        stop = first + PANEL * QUANTISED_PANELS
        laid_out = _lay_out(matrix.change_rows(itemgetter(slice(first, stop))))
        rest[: len(laid_out)] = laid_out
        rest = rest[len(laid_out) :]
    return packed


def _lay_out(matrix: QuantisedMatrix) -> Tensor:
    weight_format, missing = matrix.format, -matrix.shape[0] % PANEL
    codes_NK = functional.pad(matrix.codes_NK.view(torch.int8), (0, 0, 0, missing))
    codes_PCGK = codes_NK.view(-1, PANEL, codes_NK.shape[1] // matrix.group, matrix.group)
    vectors = [matrix.scales_NG * _scale_factor(weight_format)]
    if matrix.zeros_NG is not None:
        vectors.append(matrix.zeros_NG)
    parts = [functional.pad(vector_NG, (0, 0, 0, missing)) for vector_NG in vectors]
    views = [
        part.view(-1, PANEL, part.shape[1]).transpose(1, 2).contiguous().view(torch.int8) for part in parts
    ]
    if weight_format.rounds_inputs:
        sums_PCG = -OFFSET * codes_PCGK.sum(3, dtype=torch.int32)
        sums_PCG *= HALF_BYTES if weight_format.num_bits == 4 else 1
        views.insert(0, sums_PCG.transpose(1, 2).contiguous().view(torch.int8))
    return torch.cat((_units(codes_PCGK, weight_format), *views), dim=-1).flatten()


def _scale_factor(weight_format: WeightFormat) -> float:
    if weight_format is WeightFormat.FP8:
        return FP8_AS_HALF
    return 1 / HALF_BYTES if weight_format is WeightFormat.INT4_ROUNDED else 1.0


def _units(codes_PCGK: Tensor, weight_format: WeightFormat) -> Tensor:
    """The codes of panels, [panels, G, bytes]."""
    if weight_format is WeightFormat.FP8:
        return codes_PCGK.permute(0, 2, 3, 1).flatten(2)
    # [panels, G, units, PANEL, UNIT]
    units: Tensor = codes_PCGK.unflatten(3, (-1, UNIT)).permute(0, 2, 3, 1, 4)
    if weight_format.num_bits == 4:
        bits = units.view(torch.uint8) & 15
        units = (bits[:, :, ::2] | bits[:, :, 1::2] << 4).view(torch.int8)
    return units.flatten(2)


def linear_quantised_reference(
    x_TK: Tensor, matrix: QuantisedMatrix, bias_N: Tensor | None, *, num_splits: int, out_dtype: torch.dtype
) -> Tensor:
    """`linear` in plain torch. Rounded inputs have the groups of the weight."""
    values_NGK, x_TGK = matrix.values().double(), x_TK.float().unflatten(1, (-1, matrix.group))
    scales_TG = None
    if matrix.format.rounds_inputs:
        scales_TG, x_TGK = round_groups(x_TGK)
    sums_GTN = torch.einsum("tgk,ngk->gtn", x_TGK.double(), values_NGK).float()
    scales_GTN = matrix.scales_NG.T[:, None, :]
    if scales_TG is not None:
        scales_GTN = scales_GTN * scales_TG.T[:, :, None]
    parts = (sums_GTN * scales_GTN).chunk(num_splits)
    out_TN = torch.stack([part.sum(0) for part in parts]).sum(0)
    return (out_TN if bias_N is None else out_TN + bias_N).to(out_dtype)
