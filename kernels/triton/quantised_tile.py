"""Weights of 8 or 4 bits on a GPU: the layout of their codes, the inner loop of `linear_kernel` for codes,
and the rounding of inputs.

Codes become elements of the activation's dtype in registers, which is exact, and matrix units multiply them.
The sum of a group's products is multiplied by the scale of the group, and groups are added in ascending
order. A group has the inputs that it has on a CPU, except for unrounded fp32 inputs, where it has at most 32,
or 64 with 4 bits. Where inputs are rounded, too, matrix units multiply integers: the sum of a group is the
integer that a CPU computes.

Shapes: T tokens, M tokens of a tile, N outputs, K inputs, G groups, V vectors: scales, and zeros if there are
any.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from baton.kernels.quantised import FP8_AS_HALF, MAX_GROUP, QuantisedMatrix, WeightFormat
from baton.kernels.triton.codes import fp8_as_half, scaled_to_int8
from baton.kernels.triton.kernel import has_large_shared_memory, jit, kernel, tl, triton

WIDE_BLOCK: Final = 32  # inputs of a product in fp32: without matrix units, registers hold both operands


def largest_group(weight_format: WeightFormat, dtype: torch.dtype) -> int:
    """The most inputs of a group, for inputs of `dtype`; a group is one step of the inner loop."""
    is_wide = dtype == torch.float32 and not weight_format.rounds_inputs
    return WIDE_BLOCK * 8 // weight_format.num_bits if is_wide else MAX_GROUP


def lay_out_codes(matrix: QuantisedMatrix) -> tuple[Tensor, Tensor]:
    """(codes [N, bytes of K inputs] int8, vectors [G, V, N] fp32), contiguous.

    With 4 bits, byte i of a group has input i in its lower half, and input i + group / 2 in its upper half.
    """
    codes_NK, factor = matrix.codes_NK.view(torch.int8), 1.0
    if matrix.format.num_bits == 4:
        low, high = codes_NK.unflatten(1, (-1, 2, matrix.group // 2)).unbind(2)
        codes_NK = ((low & 15) | (high << 4)).flatten(1)
    if matrix.format is WeightFormat.FP8:
        factor = FP8_AS_HALF
    elif matrix.format is WeightFormat.MXFP4:
        factor = 0.5  # the kernel reads twice the value of E2M1, an integer
    vectors = [matrix.scales_NG.T * factor]
    if matrix.zeros_NG is not None:
        vectors.append(matrix.zeros_NG.T)
    return codes_NK.contiguous(), torch.stack(vectors, dim=1).contiguous()


def code_constants(weight_format: WeightFormat, group: int) -> dict[str, int | bool]:
    """The compile-time constants of `sum_groups`; group: 0 of a plain weight."""
    return {
        "GROUP": group,
        "BITS": 4 if group and weight_format.num_bits == 4 else 8,
        "IS_FLOAT": weight_format in (WeightFormat.FP8, WeightFormat.MXFP4),
        "NUM_VECTORS": 2 if weight_format is WeightFormat.INT4_ZEROS else 1,
        "ROUNDS_INPUTS": weight_format.rounds_inputs,
    }


def code_tile(x_TK: Tensor, weight_format: WeightFormat, group: int) -> dict[str, int]:
    """Compile-time constants, as in `linear_tile`. x_TK: int8 where inputs are rounded."""
    least = 32 if weight_format.rounds_inputs else 16  # inputs of a matrix instruction
    block_k = max(least, triton.next_power_of_2(group * weight_format.num_bits // 8))
    if x_TK.dtype == torch.float32:
        return {"BLOCK_M": 32, "BLOCK_N": 16, "BLOCK_K": block_k, "num_warps": 8, "num_stages": 2}
    rows = 64 if len(x_TK) <= 64 else 128
    return {
        "BLOCK_M": rows,
        "BLOCK_N": 64,  # the sum of a group and the codes of a step take registers, too
        "BLOCK_K": block_k,
        "num_warps": rows // 16,
        "num_stages": 4 if has_large_shared_memory(x_TK.device) else 2,
    }


@jit
def sum_groups(
    x_ptr_M: tl.tensor,  # rows of x, int8 when ROUNDS_INPUTS
    x_scale_ptr_M: tl.tensor,  # rows of [T, G] fp32, read when ROUNDS_INPUTS
    codes_ptr_N: tl.tensor,  # rows of codes
    vectors_ptr_N: tl.tensor,  # columns of [G, V, N] fp32
    num_outputs: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,  # of a code
    IS_FLOAT: tl.constexpr,  # E4M3, or E2M1 with 4 bits
    NUM_VECTORS: tl.constexpr,  # V
    ROUNDS_INPUTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # at least the bytes of a group
) -> tl.tensor:
    """The products of inputs [first, last), which are whole groups, summed: [M, N] fp32."""
    HALVES: tl.constexpr = 8 // BITS
    NUM_BYTES: tl.constexpr = GROUP // HALVES
    acc_MN = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    byte_K = tl.arange(0, BLOCK_K)
    inside_K = byte_K < NUM_BYTES
    for group in range(first // GROUP, last // GROUP):
        vector_ptr_N = vectors_ptr_N + group * NUM_VECTORS * num_outputs
        codes_ptr_KN = codes_ptr_N[None, :] + (group * NUM_BYTES + byte_K)[:, None]
        if NUM_BYTES == BLOCK_K:
            codes_KN = tl.load(codes_ptr_KN)
        else:
            codes_KN = tl.load(codes_ptr_KN, mask=inside_K[:, None], other=0)
        sum_MN = tl.zeros([BLOCK_M, BLOCK_N], tl.int32 if ROUNDS_INPUTS else tl.float32)
        for half in tl.static_range(HALVES):
            x_ptr_MK = x_ptr_M[:, None] + (group * GROUP + half * NUM_BYTES + byte_K)[None, :]
            if NUM_BYTES == BLOCK_K:
                x_MK = tl.load(x_ptr_MK)
            else:
                x_MK = tl.load(x_ptr_MK, mask=inside_K[None, :], other=0)
            values_KN = _values(codes_KN, half, BITS, IS_FLOAT)
            if ROUNDS_INPUTS:
                sum_MN = tl.dot(x_MK, values_KN, sum_MN, out_dtype=tl.int32)
            else:
                values_KN = values_KN.to(tl.float32)
                if NUM_VECTORS == 2:
                    values_KN -= tl.load(vector_ptr_N + num_outputs)[None, :]
                sum_MN = tl.dot(x_MK, values_KN.to(x_MK.dtype), sum_MN, input_precision="ieee")
        factor_MN = tl.load(vector_ptr_N)[None, :]
        if ROUNDS_INPUTS:
            factor_MN *= tl.load(x_scale_ptr_M + group)[:, None]
        acc_MN = tl.fma(sum_MN.to(tl.float32), factor_MN, acc_MN)
    return acc_MN


@jit
def _values(codes_KN: tl.tensor, HALF: tl.constexpr, BITS: tl.constexpr, IS_FLOAT: tl.constexpr) -> tl.tensor:
    """The values that `sum_groups` multiplies, of bytes or of one half of each: int8, or fp16 of E4M3."""
    if BITS == 8:
        values_KN = fp8_as_half(codes_KN) if IS_FLOAT else codes_KN
    else:
        values_KN = codes_KN >> 4 if HALF == 1 else codes_KN << 4 >> 4
        if IS_FLOAT:  # a sign, two bits of exponent, one of mantissa
            exponent_KN = (values_KN >> 1) & 3
            mantissa_KN = values_KN & 1
            twice_KN = tl.where(exponent_KN == 0, mantissa_KN, (mantissa_KN + 2) << exponent_KN >> 1)
            values_KN = tl.where(values_KN < 0, -twice_KN, twice_KN)
    return values_KN


# Rounding of inputs, as csrc/linear_rounded.c rounds them.


@kernel()
def round_inputs_kernel(
    x_ptr: tl.tensor,  # [T, K]
    codes_ptr: tl.tensor,  # [T, K] int8, contiguous
    scales_ptr: tl.tensor,  # [T, G] fp32, contiguous
    num_groups: int,
    x_stride: int,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_K: tl.constexpr,  # >= GROUP
) -> None:
    """One program rounds BLOCK_G groups of one token."""
    token = tl.program_id(0).to(tl.int64)  # T * K may pass 2^31
    group_G = tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)
    input_K = tl.arange(0, BLOCK_K)
    inside_G = group_G < num_groups
    inside_GK = inside_G[:, None] & (input_K < GROUP)[None, :]
    place_GK = (group_G * GROUP)[:, None] + input_K[None, :]
    x_GK = tl.load(x_ptr + token * x_stride + place_GK, mask=inside_GK, other=0.0).to(tl.float32)
    magnitude_GK = x_GK.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # ordered as the values, NaN last
    largest_bits_G = tl.max(magnitude_GK, axis=1)
    is_finite_G = largest_bits_G < 0x7F800000
    largest_G = largest_bits_G.to(tl.float32, bitcast=True)
    inverse_G = tl.where(is_finite_G & (largest_G > 0), tl.div_rn(127.0, largest_G), 0.0)
    finite_GK = tl.where(is_finite_G[:, None], x_GK, 0.0)
    codes_GK = scaled_to_int8(finite_GK, inverse_G[:, None])
    tl.store(codes_ptr + token * num_groups * GROUP + place_GK, codes_GK, mask=inside_GK)
    scale_G = tl.where(is_finite_G, tl.div_rn(largest_G, 127.0), float("nan"))
    tl.store(scales_ptr + token * num_groups + group_G, scale_G, mask=inside_G)


def round_inputs_triton(x_TK: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """(codes [T, K] int8, scales [T, G] fp32): each group of a token rounded as by `round_groups`."""
    num_tokens, num_inputs = x_TK.shape
    if x_TK.stride(1) != 1 or num_inputs % group:
        raise ValueError(f"round_inputs: {list(x_TK.shape)} has no groups of {group} adjacent inputs")
    num_groups = num_inputs // group
    codes_TK = torch.empty((num_tokens, num_inputs), dtype=torch.int8, device=x_TK.device)
    scales_TG = torch.empty((num_tokens, num_groups), dtype=torch.float32, device=x_TK.device)
    block_k = triton.next_power_of_2(group)
    block_g = min(triton.next_power_of_2(num_groups), max(1, 1024 // block_k))
    if num_tokens:
        round_inputs_kernel[(num_tokens, triton.cdiv(num_groups, block_g))](
            x_TK,
            codes_TK,
            scales_TG,
            num_groups,
            x_TK.stride(0),
            GROUP=group,
            BLOCK_G=block_g,
            BLOCK_K=block_k,
        )
    return codes_TK, scales_TG
