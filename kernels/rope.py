"""Rotary position embedding, rotate-half (NeoX) order.

Shapes: T tokens, H query heads, K kv heads, D head dim, M positions of the table.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton.kernels import native
from baton.kernels.triton_import import jit, kernel, tl, triton


def rope(query_THD: Tensor, key_TKD: Tensor, cos_sin_MD: Tensor, positions_T: Tensor) -> None:
    """Rotate queries and keys in place to their positions.

    query_THD, key_TKD: any strides over tokens and heads, so views of one fused projection will do.
    cos_sin_MD: fp32 [M, D] from `rope_table`; cosines in the first half of a row, sines in the second.
    positions_T: integers in [0, M); the caller owns that. The rotation is fp32, rounded once.
    """
    if query_THD.is_cuda:
        rope_triton(query_THD, key_TKD, cos_sin_MD, positions_T)
    elif _native_handles(query_THD) and _native_handles(key_TKD):
        for heads in (query_THD, key_TKD):
            _rotate_native(heads, cos_sin_MD, positions_T)
    else:
        rope_reference(query_THD, key_TKD, cos_sin_MD, positions_T)


@kernel()
def rope_kernel(
    query_ptr: tl.tensor,  # [T, H, D], in place
    key_ptr: tl.tensor,  # [T, K, D], in place
    cos_sin_ptr: tl.tensor,  # [M, D] fp32, contiguous
    positions_ptr: tl.tensor,  # [T]
    num_query_heads: int,
    num_kv_heads: int,
    half: int,  # D // 2
    query_stride_token: int,
    query_stride_head: int,
    key_stride_token: int,
    key_stride_head: int,
    BLOCK_H: tl.constexpr,  # >= H
    BLOCK_K: tl.constexpr,  # >= K
    BLOCK_HALF: tl.constexpr,  # >= D // 2
) -> None:
    token = tl.program_id(0).to(tl.int64)  # T * H * D may pass 2^31
    dim_D = tl.arange(0, BLOCK_HALF)
    row_ptr = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * 2 * half
    cos_D = tl.load(row_ptr + dim_D, mask=dim_D < half, other=0.0)
    sin_D = tl.load(row_ptr + half + dim_D, mask=dim_D < half, other=0.0)
    query_ptr += token * query_stride_token
    key_ptr += token * key_stride_token
    _rotate(query_ptr, cos_D, sin_D, num_query_heads, half, query_stride_head, BLOCK_H)
    _rotate(key_ptr, cos_D, sin_D, num_kv_heads, half, key_stride_head, BLOCK_K)


@jit
def _rotate(
    x_ptr: tl.tensor,  # [heads, D] of one token, in place
    cos_D: tl.tensor,  # [BLOCK_HALF] fp32
    sin_D: tl.tensor,
    num_heads: int,
    half: int,
    stride_head: int,
    BLOCK_HEADS: tl.constexpr,
) -> None:
    head_H = tl.arange(0, BLOCK_HEADS)
    dim_D = tl.arange(0, cos_D.shape[0])
    inside_HD = (head_H[:, None] < num_heads) & (dim_D[None, :] < half)
    ptr_HD = x_ptr + head_H[:, None] * stride_head + dim_D[None, :]
    first_HD = tl.load(ptr_HD, mask=inside_HD, other=0.0)
    dtype = first_HD.dtype
    first_HD = first_HD.to(tl.float32)
    second_HD = tl.load(ptr_HD + half, mask=inside_HD, other=0.0).to(tl.float32)
    rotated_first_HD = first_HD * cos_D[None, :] - second_HD * sin_D[None, :]
    rotated_second_HD = second_HD * cos_D[None, :] + first_HD * sin_D[None, :]
    tl.store(ptr_HD, rotated_first_HD.to(dtype), mask=inside_HD)
    tl.store(ptr_HD + half, rotated_second_HD.to(dtype), mask=inside_HD)


def rope_triton(query_THD: Tensor, key_TKD: Tensor, cos_sin_MD: Tensor, positions_T: Tensor) -> None:
    _check(query_THD, key_TKD, cos_sin_MD, positions_T)
    num_tokens, num_query_heads, head_dim = query_THD.shape
    num_kv_heads = key_TKD.shape[1]
    if num_tokens == 0:
        return
    rope_kernel[(num_tokens,)](
        query_THD,
        key_TKD,
        cos_sin_MD,
        positions_T,
        num_query_heads,
        num_kv_heads,
        head_dim // 2,
        query_THD.stride(0),
        query_THD.stride(1),
        key_TKD.stride(0),
        key_TKD.stride(1),
        BLOCK_H=triton.next_power_of_2(num_query_heads),
        BLOCK_K=triton.next_power_of_2(num_kv_heads),
        BLOCK_HALF=triton.next_power_of_2(head_dim // 2),
    )


def _check(query_THD: Tensor, key_TKD: Tensor, cos_sin_MD: Tensor, positions_T: Tensor) -> None:
    if query_THD.dim() != 3 or query_THD.shape[2] % 2 or query_THD.stride(2) != 1:
        raise ValueError(f"query must be [T, H, D], D even and adjacent, got {tuple(query_THD.shape)}")
    num_tokens, _, head_dim = query_THD.shape
    if key_TKD.dim() != 3 or (key_TKD.shape[0], key_TKD.shape[2]) != (num_tokens, head_dim):
        raise ValueError(f"key must be [{num_tokens}, K, {head_dim}], got {tuple(key_TKD.shape)}")
    if key_TKD.stride(2) != 1 or key_TKD.dtype != query_THD.dtype:
        raise ValueError(f"key must have adjacent D and dtype {query_THD.dtype}, got {key_TKD.dtype}")
    if cos_sin_MD.dtype != torch.float32 or not cos_sin_MD.is_contiguous():
        raise ValueError(f"cos_sin must be contiguous float32, got {cos_sin_MD.dtype}")
    if cos_sin_MD.dim() != 2 or cos_sin_MD.shape[1] != head_dim:
        raise ValueError(f"cos_sin must be [M, {head_dim}], got {tuple(cos_sin_MD.shape)}")
    if positions_T.shape != (num_tokens,) or not positions_T.is_contiguous():
        raise ValueError(f"positions must be contiguous [{num_tokens}], got {tuple(positions_T.shape)}")
    if not query_THD.device == key_TKD.device == cos_sin_MD.device == positions_T.device:
        raise ValueError(f"cos_sin on {cos_sin_MD.device} and the rest must be on {query_THD.device}")


def rope_reference(query_THD: Tensor, key_TKD: Tensor, cos_sin_MD: Tensor, positions_T: Tensor) -> None:
    cos_T1D, sin_T1D = cos_sin_MD[positions_T].unsqueeze(1).chunk(2, dim=-1)
    for x_TND in (query_THD, key_TKD):
        first_TND, second_TND = x_TND.float().chunk(2, dim=-1)
        rotated_first_TND = first_TND * cos_T1D - second_TND * sin_T1D
        rotated_second_TND = second_TND * cos_T1D + first_TND * sin_T1D
        x_TND.copy_(torch.cat((rotated_first_TND, rotated_second_TND), dim=-1))


def _native_handles(heads_THD: Tensor) -> bool:
    head_dim = heads_THD.shape[2]
    return native.handles(heads_THD.dtype) and heads_THD.stride()[1:] == (head_dim, 1)


def _rotate_native(heads_THD: Tensor, cos_sin_MD: Tensor, positions_T: Tensor) -> None:
    num_tokens, num_heads, head_dim = heads_THD.shape
    if cos_sin_MD.dtype != torch.float32 or cos_sin_MD.shape[1] != head_dim or not cos_sin_MD.is_contiguous():
        raise ValueError(f"cos_sin must be contiguous float32 [M, {head_dim}], got {tuple(cos_sin_MD.shape)}")
    if (
        positions_T.dtype != torch.int64
        or positions_T.shape != (num_tokens,)
        or not positions_T.is_contiguous()
    ):
        found = f"{positions_T.dtype} {tuple(positions_T.shape)}"
        raise ValueError(f"positions must be contiguous int64 [{num_tokens}], got {found}")
    native.function("baton_rope", "pnnppnni")(
        heads_THD.data_ptr(),
        heads_THD.stride(0) * heads_THD.element_size(),
        num_heads,
        cos_sin_MD.data_ptr(),
        positions_T.data_ptr(),
        num_tokens,
        head_dim,
        native.DTYPE_CODES[heads_THD.dtype],
    )
