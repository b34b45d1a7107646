"""Rotate queries and keys to their positions, and write new keys and values into their pages.

Rotary position embedding in rotate-half (NeoX) order. kernels/kv_rows.py has the rows of pages.

Shapes: T tokens, H query heads, K kv heads, D head dim, V value dim (D with two planes), P pages, S page
size, M positions of the table, L planes, R elements of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton.kernels import native
from baton.kernels.kv_rows import LARGEST_CODE, ROW_FORMATS, as_stored, encode_rows, row_format, store_rows
from baton.kernels.triton.kernel import jit, kernel, runs_triton, tl, triton


def rope(query_THD: Tensor, key_TKD: Tensor, cos_sin_MD: Tensor, positions_T: Tensor) -> None:
    """Rotate queries and keys in place to their positions, on a CPU; `rope_and_store` serves GPUs too.

    query_THD, key_TKD: any strides over tokens and heads, so views of one fused projection will do.
    cos_sin_MD: fp32 [M, D]; cosines in the first half of a row, sines in the second.
    positions_T: int64 in [0, M); the caller guarantees that. The rotation is fp32, rounded once.
    """
    if runs_triton(query_THD):
        raise ValueError("rope takes tensors of a CPU; rope_and_store takes those of a GPU")
    if _native_handles(query_THD) and _native_handles(key_TKD):
        _check_shapes(query_THD, key_TKD, cos_sin_MD, positions_T)
        rotate, (num_tokens, _, head_dim) = native.function("baton_rope", "pnnnppnni"), query_THD.shape
        table, positions = cos_sin_MD.data_ptr(), positions_T.data_ptr()
        for heads in (query_THD, key_TKD):
            strides = heads.stride(0) * heads.element_size(), heads.stride(1) * heads.element_size()
            sizes, code = (num_tokens, head_dim), native.DTYPE_CODES[heads.dtype]
            rotate(heads.data_ptr(), *strides, heads.shape[1], table, positions, *sizes, code)
    else:
        rope_reference(query_THD, key_TKD, cos_sin_MD, positions_T)


@jit
def rotated(
    x_ptr_HD: tl.tensor,  # [heads, D // 2]: the first halves
    inside_HD: tl.tensor,
    cos_D: tl.tensor,  # [BLOCK_HALF] fp32
    sin_D: tl.tensor,
    half: int,  # D // 2
) -> tuple[tl.tensor, tl.tensor]:
    """(first halves, second halves) of the heads of one token after the rotation, in their own dtype."""
    first_HD = tl.load(x_ptr_HD, mask=inside_HD, other=0.0)
    dtype = first_HD.dtype
    first_HD = first_HD.to(tl.float32)
    second_HD = tl.load(x_ptr_HD + half, mask=inside_HD, other=0.0).to(tl.float32)
    rotated_first_HD = first_HD * cos_D[None, :] - second_HD * sin_D[None, :]
    rotated_second_HD = second_HD * cos_D[None, :] + first_HD * sin_D[None, :]
    return rotated_first_HD.to(dtype), rotated_second_HD.to(dtype)


def _check_rope(query_THD: Tensor, key_TKD: Tensor, cos_sin_MD: Tensor, positions_T: Tensor) -> None:
    """Raise ValueError for shapes, strides, dtypes or devices that the GPU kernel does not take."""
    if query_THD.dim() != 3 or query_THD.shape[2] % 2 or query_THD.stride(2) != 1:
        raise ValueError(f"query must be [T, H, D], D even and adjacent, got {tuple(query_THD.shape)}")
    _check_shapes(query_THD, key_TKD, cos_sin_MD, positions_T)
    if key_TKD.stride(2) != 1 or key_TKD.dtype != query_THD.dtype:
        raise ValueError(f"key must have adjacent D and dtype {query_THD.dtype}, got {key_TKD.dtype}")
    if not query_THD.device == key_TKD.device == cos_sin_MD.device == positions_T.device:
        raise ValueError(f"cos_sin on {cos_sin_MD.device} and the rest must be on {query_THD.device}")


def _check_shapes(query_THD: Tensor, key_TKD: Tensor, cos_sin_MD: Tensor, positions_T: Tensor) -> None:
    num_tokens, _, head_dim = query_THD.shape
    if key_TKD.dim() != 3 or (key_TKD.shape[0], key_TKD.shape[2]) != (num_tokens, head_dim):
        raise ValueError(f"key must be [{num_tokens}, K, {head_dim}], got {tuple(key_TKD.shape)}")
    has_shape = cos_sin_MD.dim() == 2 and cos_sin_MD.shape[1] == head_dim
    if cos_sin_MD.dtype != torch.float32 or not has_shape or not cos_sin_MD.is_contiguous():
        found = f"{cos_sin_MD.dtype} {tuple(cos_sin_MD.shape)}"
        raise ValueError(f"cos_sin must be contiguous float32 [M, {head_dim}], got {found}")
    _check_indices("positions", positions_T, num_tokens)


def _check_indices(name: str, indices_T: Tensor, num_tokens: int) -> None:
    if indices_T.dtype != torch.int64 or indices_T.shape != (num_tokens,) or not indices_T.is_contiguous():
        found = f"{indices_T.dtype} {tuple(indices_T.shape)}"
        raise ValueError(f"{name} must be contiguous int64 [{num_tokens}], got {found}")


def rope_reference(query_THD: Tensor, key_TKD: Tensor, cos_sin_MD: Tensor, positions_T: Tensor) -> None:
    """`rope` in plain torch."""
    cos_T1D, sin_T1D = cos_sin_MD[positions_T].unsqueeze(1).chunk(2, dim=-1)
    for x_TND in (query_THD, key_TKD):
        first_TND, second_TND = x_TND.float().chunk(2, dim=-1)
        rotated_first_TND = first_TND * cos_T1D - second_TND * sin_T1D
        rotated_second_TND = second_TND * cos_T1D + first_TND * sin_T1D
        x_TND.copy_(torch.cat((rotated_first_TND, rotated_second_TND), dim=-1))


def _native_handles(heads_THD: Tensor) -> bool:
    return native.handles(heads_THD.dtype) and heads_THD.stride(2) == 1


def store_kv(key_TKD: Tensor, value_TKV: Tensor, kv_pages: Tensor, slots_T: Tensor) -> None:
    """Write one layer's new keys and values into the pool, on a CPU; `rope_and_store` serves GPUs too.

    kv_pages: [P, L, K, S, R], strided over pages, modified in place. slots_T: int64 `page * S + offset`;
    -1 is skipped (padding). The other slots must be distinct and inside the pool; the caller guarantees that.
    """
    if runs_triton(key_TKD):
        raise ValueError("store_kv takes tensors of a CPU; rope_and_store takes those of a GPU")
    if native.library() is not None and _rows_are_whole(key_TKD, value_TKV, kv_pages):
        _store_kv_native(key_TKD, value_TKV, kv_pages, slots_T)
    else:
        store_kv_reference(key_TKD, value_TKV, kv_pages, slots_T)


def rope_and_store(
    query_THD: Tensor,
    key_TKD: Tensor,
    value_TKV: Tensor,
    cos_sin_MD: Tensor,
    positions_T: Tensor,
    kv_pages: Tensor,
    slots_T: Tensor,
) -> None:
    """Apply `rope`, then `store_kv`. On a GPU one kernel does both and leaves `key_TKD` unrotated."""
    if runs_triton(query_THD):
        rope_and_store_triton(query_THD, key_TKD, value_TKV, cos_sin_MD, positions_T, kv_pages, slots_T)
    else:
        rope(query_THD, key_TKD, cos_sin_MD, positions_T)
        store_kv(key_TKD, value_TKV, kv_pages, slots_T)


@kernel()
def rope_and_store_kernel(
    query_ptr: tl.tensor,  # [T, H, D], in place
    key_ptr: tl.tensor,  # [T, K, D]
    value_ptr: tl.tensor,  # [T, K, V]
    cos_sin_ptr: tl.tensor,  # [M, D] fp32, contiguous
    positions_ptr: tl.tensor,  # [T]
    kv_ptr: tl.tensor,  # [P, K, S, R], where keys go; int8 where rows are codes and their scale
    slots_ptr: tl.tensor,  # [T] int64
    num_query_heads: int,
    num_kv_heads: int,
    half: int,  # D // 2
    value_half: int,  # V // 2
    query_stride_token: int,
    query_stride_head: int,
    key_stride_token: int,
    key_stride_head: int,
    value_stride_token: int,
    value_stride_head: int,
    kv_stride_page: int,
    kv_stride_value: int,  # from a key to the value of the same token, which may come before it
    kv_stride_head: int,
    kv_stride_slot: int,
    ROW_FORMAT: tl.constexpr,  # as in row_format
    PAGE_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,  # >= H
    BLOCK_K: tl.constexpr,  # >= K
    BLOCK_HALF: tl.constexpr,  # >= D // 2
    BLOCK_VALUE_HALF: tl.constexpr,  # >= V // 2
) -> None:
    """One program rotates all heads of one token, and stores its keys and values."""
    token = tl.program_id(0).to(tl.int64)  # T * H * D may pass 2^31
    dim_D = tl.arange(0, BLOCK_HALF)
    inside_D = dim_D < half
    row_ptr = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * 2 * half
    cos_D = tl.load(row_ptr + dim_D, mask=inside_D, other=0.0)
    sin_D = tl.load(row_ptr + half + dim_D, mask=inside_D, other=0.0)
    head_H = tl.arange(0, BLOCK_H)[:, None]
    inside_HD = (head_H < num_query_heads) & inside_D[None, :]
    query_ptr_HD = query_ptr + token * query_stride_token + head_H * query_stride_head + dim_D[None, :]
    first_HD, second_HD = rotated(query_ptr_HD, inside_HD, cos_D, sin_D, half)
    tl.store(query_ptr_HD, first_HD, mask=inside_HD)
    tl.store(query_ptr_HD + half, second_HD, mask=inside_HD)
    slot = tl.load(slots_ptr + token)  # int64: page * kv_stride_page passes 2^31
    if slot < 0:
        return
    head_K = tl.arange(0, BLOCK_K)[:, None]
    inside_K1 = head_K < num_kv_heads
    inside_KD = inside_K1 & inside_D[None, :]
    key_ptr_KD = key_ptr + token * key_stride_token + head_K * key_stride_head + dim_D[None, :]
    first_KD, second_KD = rotated(key_ptr_KD, inside_KD, cos_D, sin_D, half)
    slot_ptr = kv_ptr + (slot // PAGE_SIZE) * kv_stride_page + (slot % PAGE_SIZE) * kv_stride_slot
    row_ptr_K1 = slot_ptr + head_K * kv_stride_head
    store_rows(row_ptr_K1, first_KD, second_KD, dim_D, inside_K1, inside_KD, half, ROW_FORMAT)
    dim_V = tl.arange(0, BLOCK_VALUE_HALF)
    inside_KV = inside_K1 & (dim_V[None, :] < value_half)
    value_ptr_KV = value_ptr + token * value_stride_token + head_K * value_stride_head + dim_V[None, :]
    first_KV = tl.load(value_ptr_KV, mask=inside_KV, other=0.0)
    second_KV = tl.load(value_ptr_KV + value_half, mask=inside_KV, other=0.0)
    row_ptr_K1 += kv_stride_value
    store_rows(row_ptr_K1, first_KV, second_KV, dim_V, inside_K1, inside_KV, value_half, ROW_FORMAT)


def rope_and_store_triton(
    query_THD: Tensor,
    key_TKD: Tensor,
    value_TKV: Tensor,
    cos_sin_MD: Tensor,
    positions_T: Tensor,
    kv_pages: Tensor,
    slots_T: Tensor,
) -> None:
    """`rope_and_store` on a GPU."""
    _check_rope(query_THD, key_TKD, cos_sin_MD, positions_T)
    _check(key_TKD, value_TKV, kv_pages, slots_T)
    num_tokens, num_query_heads, head_dim = query_THD.shape
    num_kv_heads, value_dim = value_TKV.shape[1:]
    keys, values = _planes(kv_pages, value_dim)
    if num_tokens == 0:
        return
    rope_and_store_kernel[(num_tokens,)](
        query_THD,
        key_TKD,
        value_TKV,
        cos_sin_MD,
        positions_T,
        as_stored(keys),
        slots_T,
        num_query_heads,
        num_kv_heads,
        head_dim // 2,
        value_dim // 2,
        query_THD.stride(0),
        query_THD.stride(1),
        key_TKD.stride(0),
        key_TKD.stride(1),
        value_TKV.stride(0),
        value_TKV.stride(1),
        keys.stride(0),
        values.storage_offset() - keys.storage_offset(),
        keys.stride(1),
        keys.stride(2),
        ROW_FORMAT=_format_of_rows(key_TKD, value_TKV, kv_pages),
        PAGE_SIZE=kv_pages.shape[3],
        BLOCK_H=triton.next_power_of_2(num_query_heads),
        BLOCK_K=triton.next_power_of_2(num_kv_heads),
        BLOCK_HALF=triton.next_power_of_2(head_dim // 2),
        BLOCK_VALUE_HALF=triton.next_power_of_2(value_dim // 2),
    )


def _check(key_TKD: Tensor, value_TKV: Tensor, kv_pages: Tensor, slots_T: Tensor) -> None:
    if key_TKD.dim() != 3 or key_TKD.stride(2) != 1:
        raise ValueError(f"key must be [T, K, D] with adjacent D, got {tuple(key_TKD.shape)}")
    num_tokens, num_kv_heads, _ = key_TKD.shape
    value_shape = tuple(value_TKV.shape)
    if value_TKV.dim() != 3 or value_shape[:2] != key_TKD.shape[:2] or value_TKV.stride(2) != 1:
        expected = f"[{num_tokens}, {num_kv_heads}, V]"
        raise ValueError(f"value must be {expected} with adjacent V, got {value_shape}")
    if value_shape[2] % 2:
        raise ValueError(f"value must be [T, K, V], V even, got {value_shape}")
    if kv_pages.dim() != 5 or kv_pages.stride(4) != 1:
        raise ValueError(f"kv_pages must be [P, L, K, S, R] with adjacent R, got {tuple(kv_pages.shape)}")
    if kv_pages.shape[1] not in (1, 2) or kv_pages.shape[2] != num_kv_heads:
        raise ValueError(f"kv_pages must be [P, L, {num_kv_heads}, S, R], got {tuple(kv_pages.shape)}")
    _check_indices("slots", slots_T, num_tokens)
    if key_TKD.dtype != value_TKV.dtype:
        raise ValueError(f"key and value must share a dtype, got {key_TKD.dtype}, {value_TKV.dtype}")
    if not key_TKD.device == value_TKV.device == kv_pages.device == slots_T.device:
        raise ValueError(f"kv_pages on {kv_pages.device} and the rest must be on {key_TKD.device}")


def _planes(kv_pages: Tensor, value_dim: int) -> tuple[Tensor, Tensor]:
    """(rows of keys, rows of values), [P, K, S, _] each."""
    if kv_pages.shape[1] == 2:
        return kv_pages[:, 0], kv_pages[:, 1]
    return kv_pages[:, 0, ..., value_dim:], kv_pages[:, 0, ..., :value_dim]


def _format_of_rows(key_TKD: Tensor, value_TKV: Tensor, kv_pages: Tensor) -> int:
    """As `row_format`. ValueError for pages that do not take such keys and values."""
    key_dim, value_dim = key_TKD.shape[2], value_TKV.shape[2]
    if kv_pages.shape[1] == 2:
        if key_dim != value_dim:
            raise ValueError(f"keys of {key_dim} and values of {value_dim} elements need pages of one plane")
        return row_format(kv_pages, key_TKD.dtype, key_dim)
    if kv_pages.dtype in ROW_FORMATS:
        raise ValueError(f"pages of one plane hold no codes, got {kv_pages.dtype}")
    return row_format(kv_pages, key_TKD.dtype, value_dim + key_dim)


def store_kv_reference(key_TKD: Tensor, value_TKV: Tensor, kv_pages: Tensor, slots_T: Tensor) -> None:
    """`store_kv` in plain torch."""
    kept_T = slots_T >= 0
    if not bool(kept_T.all()):
        key_TKD, value_TKV, slots_T = key_TKD[kept_T], value_TKV[kept_T], slots_T[kept_T]
    keys, values = _planes(kv_pages, value_TKV.shape[2])
    if kv_pages.dtype in LARGEST_CODE:
        key_TKD, value_TKV = (encode_rows(each, kv_pages.dtype) for each in (key_TKD, value_TKV))
        keys, values = keys.view(torch.uint8), values.view(torch.uint8)
    page_size = kv_pages.shape[3]
    page_T = torch.div(slots_T, page_size, rounding_mode="floor")
    offset_T = slots_T % page_size
    keys.transpose(1, 2).index_put_((page_T, offset_T), key_TKD)
    values.transpose(1, 2).index_put_((page_T, offset_T), value_TKV)


def _rows_are_whole(key_TKD: Tensor, value_TKV: Tensor, kv_pages: Tensor) -> bool:
    """True when every token's heads, and every page's rows, are adjacent, and C code knows their dtypes."""
    return (
        all(each.stride()[1:] == (each.shape[2], 1) for each in (key_TKD, value_TKV))
        and kv_pages.stride()[3:] == (kv_pages.shape[4], 1)
        and key_TKD.dtype == value_TKV.dtype
        and (kv_pages.dtype == key_TKD.dtype or native.handles(key_TKD.dtype))
    )


def _store_kv_native(key_TKD: Tensor, value_TKV: Tensor, kv_pages: Tensor, slots_T: Tensor) -> None:
    num_tokens, num_kv_heads, key_dim = key_TKD.shape
    _, num_planes, num_heads_here, page_size, _ = kv_pages.shape
    if num_planes > 2 or num_heads_here != num_kv_heads or value_TKV.shape[:2] != key_TKD.shape[:2]:
        raise ValueError(f"kv_pages {tuple(kv_pages.shape)} do not take keys {tuple(key_TKD.shape)}")
    format_of_rows = _format_of_rows(key_TKD, value_TKV, kv_pages)
    keys, values = _planes(kv_pages, value_TKV.shape[2])
    _check_indices("slots", slots_T, num_tokens)
    head_bytes, page_bytes = key_TKD.element_size(), kv_pages.element_size()
    native.function("baton_store_kv", "pnpnpnnnnpnnnnnni")(
        key_TKD.data_ptr(),
        key_TKD.stride(0) * head_bytes,
        value_TKV.data_ptr(),
        value_TKV.stride(0) * head_bytes,
        keys.data_ptr(),
        keys.stride(0) * page_bytes,
        values.data_ptr() - keys.data_ptr(),
        keys.stride(1) * page_bytes,
        keys.stride(2) * page_bytes,
        slots_T.data_ptr(),
        num_tokens,
        num_kv_heads,
        page_size,
        key_dim,
        value_TKV.shape[2],
        head_bytes,
        format_of_rows,
    )
