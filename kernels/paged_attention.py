"""Decode attention over paged keys and values: one query token a sequence.

A long context is cut into splits that run side by side; a second kernel joins them (flash-decoding).
How many splits there are depends on shapes alone, and each sequence divides its own length among them
on the device, so one captured graph serves any context lengths.

Shapes: B sequences, H query heads, K kv heads, G = H / K, D head dim, P pages, S page size.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.kernels.attention_tile import attend_keys, num_stages
from baton.kernels.store_kv import check_paged_kv, dense_kv
from baton.kernels.triton_import import jit, kernel, tl, triton

LOG2_E = math.log2(math.e)
# Estimates; no GPU has measured them. Four waves of four programs on each of the 132 multiprocessors of an
# H100 or H200: more waves shrink the cost of a part-filled last wave and of the longest sequence.
TARGET_PROGRAMS = 2112
MAX_SPLITS = 64
# Bounds of the fewest keys in a split. Small batches leave multiprocessors idle, so shorter splits pay.
LEAST_KEYS = 64
MOST_KEYS = 512


def paged_attention_decode(
    query_BHD: Tensor,
    kv_pages: Tensor,
    page_table_BP: Tensor,
    context_lens_B: Tensor,
    *,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Attention of each sequence's newest token over its context; returns a new [B, H, D].

    query_BHD: strides over sequences and heads are free. kv_pages: one layer, [P, 2, K, S, D].
    page_table_BP: int32; entries past the context are never followed. context_lens_B: int32, the
    newest token included; 0 (padding) gives zeros. window: the query at p sees keys in (p - window, p].
    """
    if query_BHD.is_cuda:
        return paged_attention_decode_triton(
            query_BHD, kv_pages, page_table_BP, context_lens_B, scale=scale, window=window
        )
    return paged_attention_decode_reference(
        query_BHD, kv_pages, page_table_BP, context_lens_B, scale=scale, window=window
    )


@jit
def _split_shape(
    context_len: tl.tensor,
    min_keys: int,
    NUM_SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """(first key that is read, keys per split), both multiples of BLOCK_N."""
    first = 0
    if WINDOW > 0:
        first = tl.maximum(context_len - WINDOW, 0) // BLOCK_N * BLOCK_N
    per_split = tl.maximum(tl.cdiv(context_len - first, NUM_SPLITS), min_keys)
    return first, tl.cdiv(per_split, BLOCK_N) * BLOCK_N


@kernel(varying=("page_table_stride", "min_keys"))
def paged_attention_kernel(
    query_ptr: tl.tensor,  # [B, H, D]
    kv_ptr: tl.tensor,  # [P, 2, K, S, D]
    page_table_ptr: tl.tensor,  # [B, pages] int32
    context_lens_ptr: tl.tensor,  # [B] int32
    out_ptr: tl.tensor,  # [B, H, D]: written where a sequence has one split
    partial_ptr: tl.tensor,  # [B, H, NUM_SPLITS, D] fp32: written where it has several
    log_total_ptr: tl.tensor,  # [B, H, NUM_SPLITS] fp32, base 2: logarithm of the softmax denominator
    scale: float,
    group_size: int,  # G
    head_dim: int,
    query_stride_sequence: int,
    query_stride_head: int,
    kv_stride_page: int,
    kv_stride_value: int,
    kv_stride_head: int,
    kv_stride_slot: int,
    page_table_stride: int,
    min_keys: int,  # in a split
    NUM_SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_G: tl.constexpr,  # >= G, and 16 at least, the smallest tile of the matrix unit
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EVEN_D: tl.constexpr,
) -> None:
    """One program attends over one split of the keys of one kv head of one sequence."""
    sequence = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    context_len = tl.load(context_lens_ptr + sequence)
    first, per_split = _split_shape(context_len, min_keys, NUM_SPLITS, WINDOW, BLOCK_N)
    is_only = first + per_split >= context_len
    first += split * per_split
    # Split 0 also writes the zeros of padding. The join reads no split without keys.
    if split > 0 and first >= context_len:
        return
    last = tl.minimum(first + per_split, context_len)
    row_G = tl.arange(0, BLOCK_G)
    dim_D = tl.arange(0, BLOCK_D)
    inside_GD = (row_G[:, None] < group_size) & (dim_D[None, :] < head_dim)
    head_G = kv_head * group_size + row_G
    query_ptr += sequence.to(tl.int64) * query_stride_sequence
    query_GD = tl.load(
        query_ptr + head_G[:, None] * query_stride_head + dim_D[None, :], mask=inside_GD, other=0.0
    )
    acc_GD, peak_G, total_G = attend_keys(
        kv_ptr + kv_head * kv_stride_head,
        page_table_ptr + sequence.to(tl.int64) * page_table_stride,
        query_GD,
        tl.full([BLOCK_G], 0, tl.int32) + context_len - 1,
        tl.zeros([BLOCK_G, BLOCK_D], tl.float32),
        tl.full([BLOCK_G], float("-inf"), tl.float32),
        tl.zeros([BLOCK_G], tl.float32),
        first,
        last,
        scale,
        head_dim,
        kv_stride_page,
        kv_stride_value,
        kv_stride_slot,
        True,
        WINDOW,
        PAGE_SIZE,
        BLOCK_N,
        BLOCK_D,
        EVEN_D,
    )
    out_GD = acc_GD / tl.where(total_G > 0, total_G, 1.0)[:, None]
    # int64: B * H * NUM_SPLITS * D may pass 2^31.
    head_G = sequence.to(tl.int64) * tl.num_programs(1) * group_size + head_G
    if NUM_SPLITS == 1 or is_only:
        out_ptr_GD = out_ptr + head_G[:, None] * head_dim + dim_D[None, :]
        tl.store(out_ptr_GD, out_GD.to(out_ptr.dtype.element_ty), mask=inside_GD)
    else:
        cell_G = head_G * NUM_SPLITS + split
        tl.store(partial_ptr + cell_G[:, None] * head_dim + dim_D[None, :], out_GD, mask=inside_GD)
        tl.store(log_total_ptr + cell_G, peak_G + tl.log2(total_G), mask=row_G < group_size)


@kernel(varying=("min_keys",))
def join_splits_kernel(
    partial_ptr: tl.tensor,  # [B, H, NUM_SPLITS, D] fp32
    log_total_ptr: tl.tensor,  # [B, H, NUM_SPLITS] fp32
    context_lens_ptr: tl.tensor,  # [B] int32
    out_ptr: tl.tensor,  # [B, H, D], contiguous
    head_dim: int,
    min_keys: int,  # in a split
    NUM_SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """One program joins the splits of one query head of one sequence, if it has several."""
    sequence = tl.program_id(0)
    cell = sequence.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    context_len = tl.load(context_lens_ptr + sequence)
    first, per_split = _split_shape(context_len, min_keys, NUM_SPLITS, WINDOW, BLOCK_N)
    if first + per_split >= context_len:
        return
    split_S = tl.arange(0, NUM_SPLITS)
    dim_D = tl.arange(0, BLOCK_D)
    ran_S = first + split_S * per_split < context_len
    log_total_S = tl.load(log_total_ptr + cell * NUM_SPLITS + split_S, mask=ran_S, other=float("-inf"))
    peak = tl.max(log_total_S, axis=0)
    weight_S = tl.exp2(log_total_S - tl.where(peak == float("-inf"), 0.0, peak))
    total = tl.sum(weight_S, axis=0)
    weight_S = weight_S / tl.where(total > 0, total, 1.0)
    partial_ptr_SD = partial_ptr + (cell * NUM_SPLITS + split_S[:, None]) * head_dim + dim_D[None, :]
    inside_D = dim_D < head_dim
    partial_SD = tl.load(partial_ptr_SD, mask=ran_S[:, None] & inside_D[None, :], other=0.0)
    out_D = tl.sum(partial_SD * weight_S[:, None], axis=0)
    tl.store(out_ptr + cell * head_dim + dim_D, out_D.to(out_ptr.dtype.element_ty), mask=inside_D)


def paged_attention_decode_triton(
    query_BHD: Tensor,
    kv_pages: Tensor,
    page_table_BP: Tensor,
    context_lens_B: Tensor,
    *,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """`paged_attention_decode` on a GPU."""
    check_paged_kv(query_BHD, kv_pages, page_table_BP, context_lens_B, window)
    num_sequences, num_heads, head_dim = query_BHD.shape
    num_kv_heads, page_size = kv_pages.shape[2:4]
    if page_table_BP.shape[0] != num_sequences:
        raise ValueError(f"query has {num_sequences} sequences, page_table {page_table_BP.shape[0]}")
    out_BHD = torch.empty(query_BHD.shape, dtype=query_BHD.dtype, device=query_BHD.device)
    if num_sequences == 0:
        return out_BHD
    group_size = num_heads // num_kv_heads
    min_keys = least_keys(query_BHD.shape[0] * num_kv_heads)
    tile = decode_tile(query_BHD, kv_pages, page_table_BP, window)
    num_splits = tile["NUM_SPLITS"]
    partial, log_total = _partial_results(out_BHD, num_splits)  # of sequences with several splits
    paged_attention_kernel[(num_sequences, num_kv_heads, num_splits)](
        query_BHD,
        kv_pages,
        page_table_BP,
        context_lens_B,
        out_BHD,
        partial,
        log_total,
        scale * LOG2_E,
        group_size,
        head_dim,
        query_BHD.stride(0),
        query_BHD.stride(1),
        *kv_pages.stride()[:4],
        page_table_BP.stride(0),
        min_keys,
        PAGE_SIZE=page_size,
        BLOCK_G=max(16, triton.next_power_of_2(group_size)),
        EVEN_D=head_dim == tile["BLOCK_D"],
        num_warps=8 if query_BHD.dtype == torch.float32 else 4,
        num_stages=num_stages(query_BHD.device),
        **tile,
    )
    if num_splits > 1:
        grid = (num_sequences, num_heads)
        join_splits_kernel[grid](partial, log_total, context_lens_B, out_BHD, head_dim, min_keys, **tile)
    return out_BHD


def least_keys(num_programs: int) -> int:
    """The fewest keys in a split, by the number of programs without splits."""
    return min(MOST_KEYS, max(LEAST_KEYS, 1 << (num_programs - 1).bit_length()))


def decode_tile(
    query_BHD: Tensor, kv_pages: Tensor, page_table_BP: Tensor, window: int | None
) -> dict[str, int]:
    """The compile-time constants that both kernels share, from shapes and dtypes alone."""
    block_D = max(16, triton.next_power_of_2(query_BHD.shape[2]))
    block_N = 64 if block_D * query_BHD.element_size() <= 256 else 32
    num_programs = query_BHD.shape[0] * kv_pages.shape[2]
    max_keys = page_table_BP.shape[1] * kv_pages.shape[3]
    min_keys = least_keys(num_programs)
    fill = triton.next_power_of_2(triton.cdiv(TARGET_PROGRAMS, num_programs))
    num_splits = min(fill, MAX_SPLITS, triton.next_power_of_2(max(1, triton.cdiv(max_keys, min_keys))))
    return {
        "NUM_SPLITS": num_splits,
        "WINDOW": window or 0,
        "BLOCK_N": block_N,
        "BLOCK_D": block_D,
    }


def _partial_results(out_BHD: Tensor, num_splits: int) -> tuple[Tensor, Tensor]:
    """Buffers for each split's (output, logarithm of the denominator), unused by a single split."""
    if num_splits == 1:
        return out_BHD, out_BHD
    num_sequences, num_heads, head_dim = out_BHD.shape
    partial = out_BHD.new_empty((num_sequences, num_heads, num_splits, head_dim), dtype=torch.float32)
    return partial, partial.new_empty(partial.shape[:3])


def paged_attention_decode_reference(
    query_BHD: Tensor,
    kv_pages: Tensor,
    page_table_BP: Tensor,
    context_lens_B: Tensor,
    *,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """`paged_attention_decode` in plain torch."""
    out_BHD = torch.zeros(query_BHD.shape, dtype=query_BHD.dtype, device=query_BHD.device)
    num_kv_heads = kv_pages.shape[2]
    for sequence, context_len in enumerate(context_lens_B.tolist()):
        if context_len == 0:
            continue
        first = 0 if window is None else max(0, context_len - window)
        key_KND, value_KND = dense_kv(kv_pages, page_table_BP[sequence], first, context_len)
        query_1KGD = query_BHD[sequence].reshape(1, num_kv_heads, -1, query_BHD.shape[2])
        out_1KGD = F.scaled_dot_product_attention(query_1KGD, key_KND[None], value_KND[None], scale=scale)
        out_BHD[sequence] = out_1KGD.flatten(0, 2)
    return out_BHD
