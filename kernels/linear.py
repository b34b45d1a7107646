"""y = x @ weight^T + bias, and rows of a table by token id. Both read weights laid out for their device.

A CPU has a C kernel, a GPU a Triton kernel. Both sum every output in one fixed order, so a token's values do
not depend on how many tokens share the step (batch invariance), nor on whether one or two tensor-parallel
ranks compute it.
A weight may be quantised: `pack_quantised`. Without batch invariance a GPU multiplies plain weights with
torch; quantised weights always use the Triton kernel.

Shapes: T tokens, N outputs, K inputs, F gated outputs (N = 2 * F).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from baton.kernels import native
from baton.kernels.gated import SILU, Activation, constants, gated, gated_product
from baton.kernels.quantised import (
    MAX_GROUP,
    PANEL,
    QuantisedMatrix,
    WeightFormat,
    group_of,
    linear_quantised_reference,
    panels,
)
from baton.kernels.triton.attention_tile import owner_of_block
from baton.kernels.triton.kernel import (
    TileKey,
    has_large_shared_memory,
    jit,
    kernel,
    runs_triton,
    tl,
    triton,
    tuned_tile,
)
from baton.kernels.triton.quantised_tile import (
    code_constants,
    code_tile,
    largest_group,
    lay_out_codes,
    round_inputs_triton,
    sum_groups,
)

# Multiprocessors of an H100 or H200. On another GPU the results are the same and the speed differs.
NUM_MULTIPROCESSORS: Final = 132
MAX_PARTS: Final = 4  # of the inputs of a split
LEAST_PART: Final = 1024  # inputs of a part, except the last one


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """A weight ready to multiply. `data` is one of: [N, K] as loaded; the packed units of the C kernel; the
    codes of the Triton kernel, with their `vectors` (`lay_out_codes`).

    arrivals: for each tile of outputs, how many programs of the Triton kernel have summed their part. All are
    zero except during a product, and two products with one weight must not overlap. None: the kernel is not
    used.
    """

    data: Tensor
    num_outputs: int
    num_inputs: int
    dtype: torch.dtype
    is_packed: bool
    arrivals: Tensor | None = None
    group: int = 0  # inputs that share a scale; 0: a weight that is not quantised
    format: WeightFormat = WeightFormat.PLAIN  # of the codes in data; PLAIN when matrix is set
    matrix: QuantisedMatrix | None = None  # of a quantised weight that no kernel takes
    vectors: Tensor | None = None


def pack_linear(
    weight_NK: Tensor, memory: native.HugeArena | None = None, *, batch_invariant: bool = True
) -> LinearWeight:
    """Lay the weight out for its device. A packed weight is a copy: the original may be freed.

    In huge pages, from `memory`, one to eight rows are multiplied a fifth faster than in small ones.
    batch_invariant: matters on a GPU alone, see the top of this module.
    """
    num_outputs, num_inputs = weight_NK.shape
    plain = LinearWeight(weight_NK, num_outputs, num_inputs, weight_NK.dtype, is_packed=False)
    if runs_triton(weight_NK):
        if not batch_invariant:
            return plain
        return replace(plain, data=weight_NK.contiguous(), arrivals=new_arrivals(weight_NK.device))
    if weight_NK.device.type != "cpu" or not native.handles(weight_NK.dtype):
        return plain
    unit_elements = 4 // weight_NK.element_size()
    if num_inputs % unit_elements:
        return plain
    weight_NK = weight_NK.contiguous()
    num_units = num_inputs // unit_elements
    packed = (memory or native.HugeArena()).empty(-(-num_outputs // PANEL) * PANEL * num_units, torch.int32)
    pack = native.function("baton_pack_linear", "pnpnn")
    pack(weight_NK.data_ptr(), num_units, packed.data_ptr(), num_outputs, num_units)
    return LinearWeight(packed, num_outputs, num_inputs, weight_NK.dtype, is_packed=True)


def linear(
    x_TK: Tensor,
    weight: LinearWeight,
    bias_N: Tensor | None = None,
    *,
    num_splits: int = 1,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """x @ weight^T + bias -> [T, N] in `out_dtype` (default: the dtype of x), summed in fp32.

    bias_N is fp32. num_splits (1 or 2) cuts K into equal parts that are summed apart and then added:
    the order in which that many tensor-parallel ranks would sum.
    """
    if x_TK.shape[-1] != weight.num_inputs or x_TK.dtype != weight.dtype:
        raise ValueError(
            f"linear: the weight takes {weight.num_inputs} inputs of {weight.dtype}, "
            f"got {list(x_TK.shape)} {x_TK.dtype}"
        )
    out_dtype = out_dtype or x_TK.dtype
    if weight.arrivals is not None:
        return linear_triton(x_TK, weight, bias_N, num_splits=num_splits, out_dtype=out_dtype)
    if weight.matrix is not None:
        return linear_quantised_reference(
            x_TK, weight.matrix, bias_N, num_splits=num_splits, out_dtype=out_dtype
        )
    if not weight.is_packed:
        return linear_reference(x_TK, weight.data, bias_N, out_dtype=out_dtype)
    if x_TK.stride(-1) != 1:
        x_TK = x_TK.contiguous()
    num_tokens = x_TK.shape[0]
    out_TN = torch.empty((num_tokens, weight.num_outputs), dtype=out_dtype)
    native.function("baton_linear", "pnpppnnnnniiii")(
        x_TK.data_ptr(),
        x_TK.stride(0) * x_TK.element_size(),
        weight.data.data_ptr(),
        None if bias_N is None else bias_N.data_ptr(),
        out_TN.data_ptr(),
        weight.num_outputs * out_TN.element_size(),
        num_tokens,
        weight.num_outputs,
        weight.num_inputs,
        weight.group,
        weight.format,
        num_splits,
        native.DTYPE_CODES[x_TK.dtype],
        native.DTYPE_CODES[out_dtype],
    )
    return out_TN


def linear_gated(
    x_TK: Tensor, weight: LinearWeight, bias_N: Tensor | None = None, activation: Activation = SILU
) -> Tensor:
    """`gated(linear(x, weight, bias), activation)`: [T, F]. The first F outputs are the gate."""
    if weight.arrivals is not None:
        return linear_triton(x_TK, weight, bias_N, gate=activation)
    return gated(linear(x_TK, weight, bias_N), activation)


def linear_reference(
    x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None, *, out_dtype: torch.dtype | None = None
) -> Tensor:
    """`linear` by the library's multiplication, in the dtype of x."""
    bias = None if bias_N is None else bias_N.to(x_TK.dtype)
    return functional.linear(x_TK, weight_NK, bias).to(out_dtype or x_TK.dtype)


def pack_quantised(
    matrix: QuantisedMatrix,
    dtype: torch.dtype,
    memory: native.HugeArena | None = None,
    *,
    num_splits: int = 1,
) -> LinearWeight:
    """Lay out a weight of 8 or 4 bits for its device and inputs of `dtype`.

    num_splits: of later calls of `linear`. A weight with groups that no kernel takes becomes a plain one.
    """
    num_outputs, num_inputs = matrix.shape
    is_for_triton = runs_triton(matrix.codes_NK)
    most = largest_group(matrix.format, dtype) if is_for_triton else MAX_GROUP
    group = group_of(num_inputs, matrix.format.group_unit, matrix.group, num_splits, most)
    if group is None:
        return pack_linear(matrix.dequantised().to(dtype), memory)
    matrix = matrix.regrouped(group)
    unpacked = LinearWeight(
        matrix.codes_NK, num_outputs, num_inputs, dtype, is_packed=False, group=group, matrix=matrix
    )
    if is_for_triton:
        codes, vectors = lay_out_codes(matrix)
        arrivals, laid_out = new_arrivals(codes.device), matrix.format
        return replace(unpacked, data=codes, vectors=vectors, arrivals=arrivals, format=laid_out, matrix=None)
    if not native.handles(dtype):
        return unpacked
    arena = memory or native.HugeArena()
    packed = panels(matrix, lambda num_bytes: arena.empty(num_bytes, torch.int8))
    return replace(unpacked, data=packed, is_packed=True, format=matrix.format, matrix=None)


# The Triton kernel.
#
# How an output is summed depends on K, the groups of the weight and the number of splits alone: parts of the
# inputs are summed apart, then added in order, in fp32. triton/quantised_tile.py sums groups. Programs share
# the parts of a tile when there are few tiles (decode), and the last one to arrive adds them; otherwise one
# program computes all parts of its tile (prefill). The bits are the same. The height of a tile depends on the
# number of tokens; the matrix instruction of an H100 or H200 takes 64 rows at either height. On other GPUs
# this has not been checked.


@jit
def _tile_of(
    tile: tl.tensor, num_rows: tl.tensor, num_columns: tl.tensor, GROUP: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """(row, column) of a tile: GROUP rows at a time, so that tiles in flight share tokens and weights."""
    tiles_a_group = GROUP * num_columns
    first = tile // tiles_a_group * GROUP
    height = tl.minimum(num_rows - first, GROUP)
    return first + tile % tiles_a_group % height, tile % tiles_a_group // height


@jit
def _sum_part(
    x_ptr_M: tl.tensor,
    x_scale_ptr_M: tl.tensor,
    weight_ptr_N: tl.tensor,
    vector_ptr_N: tl.tensor,
    num_outputs: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    NUM_VECTORS: tl.constexpr,
    ROUNDS_INPUTS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tl.tensor:
    """The products of inputs [first, last), summed: [M, N] fp32."""
    if GROUP > 0:
        acc_MN = sum_groups(
            x_ptr_M,
            x_scale_ptr_M,
            weight_ptr_N,
            vector_ptr_N,
            num_outputs,
            first,
            last,
            GROUP,
            BITS,
            IS_FLOAT,
            NUM_VECTORS,
            ROUNDS_INPUTS,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
        )
    else:
        acc_MN = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(first, last, BLOCK_K):
            input_K = start + tl.arange(0, BLOCK_K)
            x_ptr_MK = x_ptr_M[:, None] + input_K[None, :]
            weight_ptr_KN = weight_ptr_N[None, :] + input_K[:, None]
            if EVEN_K:
                x_MK, weight_KN = tl.load(x_ptr_MK), tl.load(weight_ptr_KN)
            else:
                inside_K = input_K < last
                x_MK = tl.load(x_ptr_MK, mask=inside_K[None, :], other=0.0)
                weight_KN = tl.load(weight_ptr_KN, mask=inside_K[:, None], other=0.0)
            acc_MN = tl.dot(x_MK, weight_KN, acc_MN, input_precision="ieee")
    return acc_MN


@jit
def _part_bounds(
    part: tl.tensor,
    num_inputs: tl.tensor,
    split_inputs: tl.tensor,
    part_inputs: tl.tensor,
    num_parts: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:
    """The inputs [first, last) of a part; the parts of all splits are numbered one after another."""
    split = part // num_parts
    split_end = tl.minimum((split + 1) * split_inputs, num_inputs)
    first = tl.minimum(split * split_inputs + part % num_parts * part_inputs, split_end)
    return first, tl.minimum(first + part_inputs, split_end)


@kernel(varying=("num_tokens", "num_parts"))
def linear_kernel(
    x_ptr: tl.tensor,  # [T, K]
    x_scales_ptr: tl.tensor,  # [T, K / GROUP] fp32, contiguous, read when ROUNDS_INPUTS
    weight_ptr: tl.tensor,  # [N, K] or codes, contiguous; of each expert when NUM_EXPERTS is above 0
    vectors_ptr: tl.tensor,  # [K / GROUP, NUM_VECTORS, N] fp32, of each expert, too; read with codes
    bias_ptr: tl.tensor,  # [N] fp32, of each expert, too; read when HAS_BIAS
    starts_ptr: tl.tensor,  # [NUM_EXPERTS + 1] int32: the tokens of each expert
    rows_ptr: tl.tensor,  # [T] int64: the row of x of each token, used when HAS_ROWS
    out_ptr: tl.tensor,  # [T, N], or [T, F] when IS_GATED; contiguous
    partial_ptr: tl.tensor,  # [tiles, NUM_SPLITS * num_parts, BLOCK_M, BLOCK_N] fp32, used when IS_SHARED
    arrivals_ptr: tl.tensor,  # [tiles] int32, zeros before and after; used when IS_SHARED
    num_tokens: int,
    num_outputs: int,
    num_inputs: int,
    x_stride: int,
    split_inputs: int,
    part_inputs: int,  # a multiple of BLOCK_K, or of GROUP
    num_parts: int,  # of a split
    NUM_EXPERTS: tl.constexpr,  # 0: one weight for all tokens
    HAS_ROWS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    IS_GATED: tl.constexpr,
    KIND: tl.constexpr,  # of the gate, with ALPHA and LIMIT: see gated_product
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GROUP: tl.constexpr,  # 0: a plain weight. With the next four: see sum_groups
    BITS: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    NUM_VECTORS: tl.constexpr,
    ROUNDS_INPUTS: tl.constexpr,
    IS_SHARED: tl.constexpr,  # a unit of work is one part of a tile, otherwise a whole tile
    EVEN_K: tl.constexpr,  # all parts of a plain weight are multiples of BLOCK_K
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """A program computes every num_programs-th unit of work."""
    num_rows = num_tokens // BLOCK_M + NUM_EXPERTS if NUM_EXPERTS > 0 else tl.cdiv(num_tokens, BLOCK_M)
    num_columns = tl.cdiv(num_outputs, BLOCK_N)
    units_a_tile = NUM_SPLITS * num_parts if IS_SHARED else 1
    row_M, column_N = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    for unit in range(tl.program_id(0), num_rows * num_columns * units_a_tile, tl.num_programs(0)):
        tile = unit // units_a_tile
        tile_row, tile_column = _tile_of(tile, num_rows, num_columns, 8)
        last_token = num_tokens
        summed_inputs = num_inputs
        expert = tl.cast(0, tl.int64)
        if NUM_EXPERTS > 0:
            owner = owner_of_block(starts_ptr, NUM_EXPERTS, tile_row, BLOCK_M)
            first_token = tl.load(starts_ptr + owner)
            last_token = tl.load(starts_ptr + owner + 1)
            first_token += (tile_row - first_token // BLOCK_M - owner) * BLOCK_M
            token_M = first_token + row_M
            summed_inputs = tl.where(first_token < last_token, num_inputs, 0)  # spare tiles read no weight
            expert = tl.cast(owner, tl.int64)
        else:
            token_M = tile_row * BLOCK_M + row_M
        inside_M = token_M < last_token
        # Rows and columns past the end repeat the last one and are not stored. int64: T * K may pass 2^31.
        x_row_M = tl.minimum(token_M, num_tokens - 1).to(tl.int64)
        if HAS_ROWS:
            x_row_M = tl.load(rows_ptr + x_row_M)
        x_ptr_M = x_ptr + x_row_M * x_stride
        output_N = tl.minimum(tile_column * BLOCK_N + column_N, num_outputs - 1)
        if IS_GATED:  # a gate and its value lie side by side in the tile
            output_N = output_N // 2 + output_N % 2 * (num_outputs // 2)
        row_N = expert * num_outputs + output_N
        if GROUP > 0:
            num_groups = num_inputs // GROUP
            x_scale_ptr_M = x_scales_ptr + x_row_M * num_groups
            weight_ptr_N = weight_ptr + row_N * num_groups * (GROUP * BITS // 8)
            vector_ptr_N = vectors_ptr + expert * num_groups * NUM_VECTORS * num_outputs + output_N
        else:
            weight_ptr_N = weight_ptr + row_N * num_inputs
            x_scale_ptr_M, vector_ptr_N = x_ptr_M, weight_ptr_N  # not read
        is_last = True
        if IS_SHARED:
            part = unit % units_a_tile
            first, last = _part_bounds(part, summed_inputs, split_inputs, part_inputs, num_parts)
            acc_MN = _sum_part(
                x_ptr_M,
                x_scale_ptr_M,
                weight_ptr_N,
                vector_ptr_N,
                num_outputs,
                first,
                last,
                GROUP,
                BITS,
                IS_FLOAT,
                NUM_VECTORS,
                ROUNDS_INPUTS,
                EVEN_K,
                BLOCK_M,
                BLOCK_N,
                BLOCK_K,
            )
            # int64: partial sums of all tiles may pass 2^31 bytes.
            cell_MN = (row_M * BLOCK_N)[:, None] + column_N[None, :]
            sums_ptr = partial_ptr + tl.cast(tile, tl.int64) * units_a_tile * BLOCK_M * BLOCK_N
            tl.store(sums_ptr + part * BLOCK_M * BLOCK_N + cell_MN, acc_MN, mask=inside_M[:, None])
            tl.debug_barrier()  # all threads have stored before one of them reports
            is_last = tl.atomic_add(arrivals_ptr + tile, 1) == units_a_tile - 1
        if is_last:
            total_MN = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for split in tl.static_range(NUM_SPLITS):
                sum_MN = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
                for part in range(split * num_parts, (split + 1) * num_parts):
                    if IS_SHARED:
                        sum_ptr_MN = sums_ptr + part * BLOCK_M * BLOCK_N + cell_MN
                        sum_MN += tl.load(sum_ptr_MN, mask=inside_M[:, None], other=0.0)
                    else:
                        first, last = _part_bounds(part, summed_inputs, split_inputs, part_inputs, num_parts)
                        sum_MN += _sum_part(
                            x_ptr_M,
                            x_scale_ptr_M,
                            weight_ptr_N,
                            vector_ptr_N,
                            num_outputs,
                            first,
                            last,
                            GROUP,
                            BITS,
                            IS_FLOAT,
                            NUM_VECTORS,
                            ROUNDS_INPUTS,
                            EVEN_K,
                            BLOCK_M,
                            BLOCK_N,
                            BLOCK_K,
                        )
                total_MN += sum_MN
            if IS_SHARED:
                tl.store(arrivals_ptr + tile, 0)
            if HAS_BIAS:
                total_MN += tl.load(bias_ptr + expert * num_outputs + output_N)[None, :]
            dtype = out_ptr.dtype.element_ty
            # int64: T * N may pass 2^31.
            if IS_GATED:
                width = num_outputs // 2
                gate_MF, up_MF = tl.split(tl.reshape(total_MN, [BLOCK_M, BLOCK_N // 2, 2]))
                result_MN = gated_product(gate_MF.to(dtype), up_MF.to(dtype), KIND, ALPHA, LIMIT)
                out_N = tile_column * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
            else:
                width = num_outputs
                result_MN = total_MN
                out_N = tile_column * BLOCK_N + column_N
            out_ptr_MN = out_ptr + token_M.to(tl.int64)[:, None] * width + out_N[None, :]
            tl.store(out_ptr_MN, result_MN.to(dtype), mask=inside_M[:, None] & (out_N < width)[None, :])


def linear_triton(
    x_TK: Tensor,
    weight: LinearWeight,
    bias_N: Tensor | None = None,
    *,
    num_splits: int = 1,
    out_dtype: torch.dtype | None = None,
    gate: Activation | None = None,
) -> Tensor:
    """`linear` on a GPU, batch-invariant; with `gate` `linear_gated`."""
    if weight.arrivals is None:
        raise ValueError("linear_triton: the weight was not packed for it")
    x_TK = x_TK if x_TK.stride(-1) == 1 else x_TK.contiguous()
    width = weight.num_outputs if gate is None else weight.num_outputs // 2
    out_TN = torch.empty((len(x_TK), width), dtype=out_dtype or x_TK.dtype, device=x_TK.device)
    if not out_TN.numel():
        return out_TN
    return launch_linear(x_TK, weight, bias_N, out_TN, weight.arrivals, num_splits=num_splits, gate=gate)


def launch_linear(
    x_TK: Tensor,
    weight: LinearWeight,
    bias_N: Tensor | None,
    out_RN: Tensor,
    placeholder: Tensor,
    *,
    num_splits: int = 1,
    gate: Activation | None = None,
    starts_X1: Tensor | None = None,
    row_of_R: Tensor | None = None,
) -> Tensor:
    """Launch `linear_kernel` and return `out_RN`, not empty, which gets the product.

    placeholder: any int32 tensor, in place of those that are not given. starts_X1, row_of_R: of stacked
    experts, see `linear_experts_triton`; their programs share no tile.
    """
    num_rows, num_outputs, num_inputs = len(out_RN), weight.num_outputs, weight.num_inputs
    split_inputs = -(-num_inputs // num_splits)
    x_TK, x_scales_TG, tile = kernel_inputs(x_TK, weight, split_inputs)
    part_inputs, num_parts = part_sizes(split_inputs, weight.group or tile["BLOCK_K"])
    num_experts = 0 if starts_X1 is None else len(weight.data)
    block_m = tile["BLOCK_M"]
    num_row_tiles = num_rows // block_m + num_experts if num_experts else triton.cdiv(num_rows, block_m)
    num_tiles = num_row_tiles * triton.cdiv(num_outputs, tile["BLOCK_N"])
    units_a_tile, arrivals, partial = num_splits * num_parts, weight.arrivals, placeholder
    is_shared = arrivals is not None and units_a_tile > 1 and num_tiles <= len(arrivals) and not num_experts
    if is_shared:
        shape = (num_tiles, units_a_tile, block_m, tile["BLOCK_N"])
        partial = torch.empty(shape, dtype=torch.float32, device=x_TK.device)
    num_units = num_tiles * units_a_tile if is_shared else num_tiles
    # Programs for each multiprocessor.
    most_programs = NUM_MULTIPROCESSORS * (1 if block_m == 128 and not num_experts else 2)
    linear_kernel[(min(num_units, most_programs),)](
        x_TK,
        x_scales_TG,
        weight.data,
        weight.data if weight.vectors is None else weight.vectors,
        placeholder if bias_N is None else bias_N,
        placeholder if starts_X1 is None else starts_X1,
        placeholder if row_of_R is None else row_of_R,
        out_RN,
        partial,
        placeholder if arrivals is None else arrivals,
        num_rows,
        num_outputs,
        num_inputs,
        x_TK.stride(0),
        split_inputs,
        part_inputs,
        num_parts,
        NUM_EXPERTS=num_experts,
        HAS_ROWS=row_of_R is not None,
        NUM_SPLITS=num_splits,
        IS_GATED=gate is not None,
        **constants(gate or SILU),
        HAS_BIAS=bias_N is not None,
        **code_constants(weight.format, weight.group),
        IS_SHARED=is_shared,
        EVEN_K=split_inputs % tile["BLOCK_K"] == 0 and split_inputs * num_splits == num_inputs,
        **tile,
    )
    return out_RN


def kernel_inputs(
    x_TK: Tensor, weight: LinearWeight, split_inputs: int
) -> tuple[Tensor, Tensor, dict[str, int]]:
    """(x and its scales as `linear_kernel` reads them, the tile of the product)."""
    if not weight.group:
        return x_TK, x_TK, linear_tile(x_TK, split_inputs)
    x_scales_TG = x_TK  # not read
    if weight.format.rounds_inputs:
        x_TK, x_scales_TG = round_inputs_triton(x_TK, weight.group)
    return x_TK, x_scales_TG, code_tile(x_TK, weight.format, weight.group)


def part_sizes(split_inputs: int, multiple_of: int) -> tuple[int, int]:
    """(inputs of a part, parts): the inputs of a split are summed in so many parts."""
    least = max(LEAST_PART, -(-split_inputs // MAX_PARTS))
    part_inputs = -(-least // multiple_of) * multiple_of
    return part_inputs, -(-split_inputs // part_inputs)


def linear_tile(x_TK: Tensor, split_inputs: int) -> dict[str, int]:
    """Compile-time constants: 64 tokens at a time in decode steps, 128 in larger ones.

    BLOCK_N and BLOCK_K depend on the dtype and on `split_inputs` alone, since they order the sums. The number
    of outputs is no part of it: ranks divide the outputs of a weight among them.
    """
    if x_TK.dtype == torch.float32:  # no matrix units: both operands of a product sit in registers
        return {"BLOCK_M": 32, "BLOCK_N": 16, "BLOCK_K": 32, "num_warps": 8, "num_stages": 2}
    rows = 64 if len(x_TK) <= 64 else 128
    if not has_large_shared_memory(x_TK.device):
        return default_tile(rows, split_inputs, num_stages=2)
    tuned = tuned_tile(TileKey("linear", x_TK.dtype, split_inputs, rows))
    if tuned is None:
        return default_tile(rows, split_inputs, num_stages=4)
    return {
        "BLOCK_M": rows,
        "BLOCK_N": tuned.block_n,
        "BLOCK_K": tuned.block_k,
        "num_warps": tuned.num_warps,
        "num_stages": tuned.num_stages,
    }


def default_tile(rows: int, split_inputs: int, num_stages: int) -> dict[str, int]:
    """The tile of a width that the table of tuned tiles lacks, and of small GPUs."""
    return {
        "BLOCK_M": rows,
        "BLOCK_N": 128 if split_inputs % 64 == 0 else 64,  # masks of inputs take registers
        "BLOCK_K": 64,
        "num_warps": rows // 16,
        "num_stages": num_stages,
    }


def new_arrivals(device: torch.device) -> Tensor:
    """The counters of a weight."""
    return torch.zeros(NUM_MULTIPROCESSORS, dtype=torch.int32, device=device)


# Rows of a table by token id.
#
# torch's own lookup wakes its thread pool, which then spins beside ours for the rest of the step. With two
# cores, the lookup took up to 10 ms of a prefill step, instead of 0.1 ms.
#
# Shapes: T tokens, V rows, E hidden.


def embedding(token_ids_T: Tensor, table_VE: Tensor) -> Tensor:
    """A new [T, E]: row `token_ids_T[t]` of the table for each t.

    token_ids_T: int64, each in [0, V). The caller guarantees that; the native lookup checks nothing.
    """
    if token_ids_T.dtype != torch.int64 or token_ids_T.dim() != 1 or table_VE.dim() != 2:
        raise ValueError(
            f"embedding takes int64 ids [T] and a table [V, E], "
            f"got {token_ids_T.dtype} {list(token_ids_T.shape)} and {list(table_VE.shape)}"
        )
    are_contiguous = token_ids_T.is_contiguous() and table_VE.is_contiguous()
    if table_VE.is_cuda or native.library() is None or not are_contiguous:
        return functional.embedding(token_ids_T, table_VE)
    num_tokens, width = len(token_ids_T), table_VE.shape[1]
    out_TE = torch.empty((num_tokens, width), dtype=table_VE.dtype)
    native.function("baton_embedding", "pppnn")(
        token_ids_T.data_ptr(),
        table_VE.data_ptr(),
        out_TE.data_ptr(),
        num_tokens,
        width * table_VE.element_size(),
    )
    return out_TE
