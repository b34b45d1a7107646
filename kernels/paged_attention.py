"""Decode attention over paged keys and values: one query token a sequence.

A long context is cut into splits that run side by side (flash-decoding); the last program of a kv head to
finish merges them. Where the splits lie depends on the positions of the keys alone. How many programs share
them depends on shapes alone, so one captured graph serves any context lengths.

Shapes: B sequences, H query heads, K kv heads, G = H / K, P pages, S page size; D value dim, E further
elements of a key, as in attention_tile.py: D + E is the head dim.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from baton.kernels.kv_rows import as_stored, check_paged_kv, check_value_dim, kv_strides, row_format
from baton.kernels.triton.attention_tile import (
    LOG2_E,
    attend_keys,
    capped_tile,
    dim_blocks,
    merge,
    num_splits,
    split_of,
    split_start,
    tile_options,
    tile_rows,
)
from baton.kernels.triton.kernel import jit, kernel, tl, triton

# An estimate; no GPU has measured it: sixteen programs in turn on each of the 132 multiprocessors of an H100
# or H200. More turns shrink the cost of a part-filled last one and of the longest sequence.
TARGET_PROGRAMS: Final = 2112


@jit
def _store_out(out_ptr_GD: tl.tensor, acc_GD: tl.tensor, total_G: tl.tensor, inside_GD: tl.tensor) -> None:
    out_GD = acc_GD / tl.where(total_G > 0, total_G, 1.0)[:, None]
    tl.store(out_ptr_GD, out_GD.to(out_ptr_GD.dtype.element_ty), mask=inside_GD)


@kernel(varying=("page_table_stride", "max_splits"))
def paged_attention_kernel(
    query_ptr: tl.tensor,  # [B, H, D + E]
    kv_ptr: tl.tensor,  # [P, L, K, S, R]; int8 where rows are codes and their scale
    page_table_ptr: tl.tensor,  # [B, pages] int32
    context_lens_ptr: tl.tensor,  # [B] int32
    sinks_ptr: tl.tensor,  # [H] fp32, read when HAS_SINKS
    out_ptr: tl.tensor,  # [B, H, D], contiguous
    partial_ptr: tl.tensor,  # [B, max_splits, H, D] fp32: acc of each split, where a sequence has several
    peak_total_ptr: tl.tensor,  # [B, max_splits, 2, H] fp32: peak and total of each split
    arrivals_ptr: tl.tensor,  # [B, K] int32, zeros before and after: programs that have computed their splits
    scale: float,
    group_size: int,  # G
    value_dim: int,  # D
    query_stride_sequence: int,
    query_stride_head: int,
    kv_stride_page: int,
    kv_stride_value: int,
    kv_stride_head: int,
    kv_stride_slot: int,
    page_table_stride: int,
    max_splits: int,
    rest_dim: int,  # E
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,  # of the scores times log2(e); 0: none
    HAS_SINKS: tl.constexpr,
    ROW_FORMAT: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    EVEN: tl.constexpr,
) -> None:
    """One program attends over every num_programs-th split of one kv head of one sequence."""
    sequence, kv_head, program = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    context_len = tl.load(context_lens_ptr + sequence)
    window_start = 0
    if WINDOW > 0:
        window_start = tl.maximum(context_len - WINDOW, 0) // BLOCK_N * BLOCK_N
    first_split = split_of(window_start)
    end_split = split_of(tl.maximum(context_len - 1, 0)) + 1
    # Program 0 also writes the zeros of padding.
    if first_split + program >= end_split:
        return
    row_G = tl.arange(0, BLOCK_G)
    dim_D = tl.arange(0, BLOCK_D)
    inside_G = row_G < group_size
    inside_GD = inside_G[:, None] & (dim_D[None, :] < value_dim)
    head_G = kv_head * group_size + row_G
    cell_GD = head_G[:, None] * value_dim + dim_D[None, :]
    query_ptr_G1 = query_ptr + sequence.to(tl.int64) * query_stride_sequence
    query_ptr_G1 += head_G[:, None] * query_stride_head
    query_GD = tl.load(query_ptr_G1 + dim_D[None, :], mask=inside_GD, other=0.0)
    query_GE = query_GD
    if BLOCK_E > 0:
        dim_E = tl.arange(0, BLOCK_E)
        inside_GE = inside_G[:, None] & (dim_E[None, :] < rest_dim)
        query_GE = tl.load(query_ptr_G1 + value_dim + dim_E[None, :], mask=inside_GE, other=0.0)
    num_heads = tl.num_programs(1) * group_size
    first_row = sequence.to(tl.int64) * max_splits  # int64: B * max_splits * H * D may pass 2^31
    zeros_GD = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    nothing_G = tl.full([BLOCK_G], float("-inf"), tl.float32)
    zeros_G = tl.zeros([BLOCK_G], tl.float32)
    first_peak_G, first_total_G = nothing_G, zeros_G
    if HAS_SINKS:
        first_peak_G = tl.load(sinks_ptr + head_G, mask=inside_G, other=0.0) * 1.4426950408889634
        first_total_G = tl.full([BLOCK_G], 1.0, tl.float32)
    out_ptr_GD = out_ptr + sequence.to(tl.int64) * num_heads * value_dim + cell_GD
    for split in range(first_split + program, end_split, tl.num_programs(2)):
        _, _, _, acc_GD, peak_G, total_G = attend_keys(
            kv_ptr + kv_head * kv_stride_head,
            page_table_ptr + sequence.to(tl.int64) * page_table_stride,
            query_GD,
            query_GE,
            tl.full([BLOCK_G], 0, tl.int32) + context_len - 1,
            zeros_GD,
            nothing_G,
            zeros_G,
            zeros_GD,
            nothing_G,
            zeros_G,
            tl.maximum(split_start(split), window_start),
            tl.minimum(split_start(split + 1), context_len),
            scale,
            value_dim,
            rest_dim,
            kv_stride_page,
            kv_stride_value,
            kv_stride_slot,
            True,
            True,
            WINDOW,
            SOFTCAP,
            ROW_FORMAT,
            PAGE_SIZE,
            BLOCK_N,
            BLOCK_D,
            BLOCK_E,
            EVEN,
        )
        if end_split - first_split == 1:
            merged_GD, _, merged_total_G = merge(
                zeros_GD, first_peak_G, first_total_G, acc_GD, peak_G, total_G
            )
            _store_out(out_ptr_GD, merged_GD, merged_total_G, inside_GD)
        else:
            row = first_row + split
            tl.store(partial_ptr + row * num_heads * value_dim + cell_GD, acc_GD, mask=inside_GD)
            tl.store(peak_total_ptr + 2 * row * num_heads + head_G, peak_G, mask=inside_G)
            tl.store(peak_total_ptr + (2 * row + 1) * num_heads + head_G, total_G, mask=inside_G)
    if end_split - first_split > 1:
        tl.debug_barrier()  # all threads have stored before one of them reports
        num_arriving = tl.minimum(end_split - first_split, tl.num_programs(2))
        arrival_ptr = arrivals_ptr + sequence * tl.num_programs(1) + kv_head
        if tl.atomic_add(arrival_ptr, 1) == num_arriving - 1:
            tl.store(arrival_ptr, 0)
            merged_GD, merged_peak_G, merged_total_G = zeros_GD, first_peak_G, first_total_G
            for split in range(first_split, end_split):
                row = first_row + split
                acc_ptr_GD = partial_ptr + row * num_heads * value_dim + cell_GD
                peak_ptr_G = peak_total_ptr + 2 * row * num_heads + head_G
                merged_GD, merged_peak_G, merged_total_G = merge(
                    merged_GD,
                    merged_peak_G,
                    merged_total_G,
                    tl.load(acc_ptr_GD, mask=inside_GD, other=0.0),
                    tl.load(peak_ptr_G, mask=inside_G, other=float("-inf")),
                    tl.load(peak_ptr_G + num_heads, mask=inside_G, other=0.0),
                )
            _store_out(out_ptr_GD, merged_GD, merged_total_G, inside_GD)


def paged_attention_decode_triton(
    query_BHD: Tensor,
    kv_pages: Tensor,
    page_table_BP: Tensor,
    context_lens_B: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
    value_dim: int | None = None,
    arrivals: Tensor | None = None,
    out_BHV: Tensor | None = None,
) -> Tensor:
    """Attention of each sequence's newest token over its context; returns [B, H, V], out_BHV if given.

    query_BHD: strides over sequences and heads are free. kv_pages: a layer, [P, L, K, S, R], see kv_rows.py.
    page_table_BP: int32; entries past the context are never followed. context_lens_B: int32, the
    newest token included; 0 (padding) gives zeros. window: the query at p sees keys in (p - window, p].
    softcap, sinks_H, value_dim: as in `ragged_attention`.
    arrivals: int32 zeros, B * K at least, which are zeros again afterwards; made anew by default.
    """
    check_paged_kv(query_BHD, kv_pages, page_table_BP, context_lens_B, window)
    num_sequences, num_heads, head_dim = query_BHD.shape
    num_kv_heads, page_size = kv_pages.shape[2:4]
    if page_table_BP.shape[0] != num_sequences:
        raise ValueError(f"query has {num_sequences} sequences, page_table {page_table_BP.shape[0]}")
    value_dim = check_value_dim(kv_pages, head_dim, value_dim)
    if out_BHV is None:
        out_BHV = query_BHD.new_empty((num_sequences, num_heads, value_dim))
    if num_sequences == 0:
        return out_BHV
    if arrivals is None:
        arrivals = new_arrivals(num_sequences * num_kv_heads, query_BHD.device)
    group_size = num_heads // num_kv_heads
    max_splits = num_splits(page_table_BP.shape[1] * page_size)
    partial = out_BHV.new_empty((num_sequences, max_splits, num_heads, value_dim), dtype=torch.float32)
    peak_total = partial.new_empty((num_sequences, max_splits, 2, num_heads))
    num_programs = decode_programs(num_sequences * num_kv_heads, max_splits)
    rows, blocks = tile_rows(group_size, query_BHD.dtype, value_dim), dim_blocks(head_dim, value_dim)
    paged_attention_kernel[(num_sequences, num_kv_heads, num_programs)](
        query_BHD,
        as_stored(kv_pages),
        page_table_BP,
        context_lens_B,
        context_lens_B if sinks_H is None else sinks_H,
        out_BHV,
        partial,
        peak_total,
        arrivals,
        scale * LOG2_E,
        group_size,
        value_dim,
        query_BHD.stride(0),
        query_BHD.stride(1),
        *kv_strides(kv_pages),
        page_table_BP.stride(0),
        max_splits,
        head_dim - value_dim,
        WINDOW=window or 0,
        SOFTCAP=(softcap or 0.0) * LOG2_E,
        HAS_SINKS=sinks_H is not None,
        ROW_FORMAT=row_format(kv_pages, query_BHD.dtype, head_dim),
        PAGE_SIZE=page_size,
        BLOCK_G=rows,
        **blocks,
        enable_fp_fusion=False,
        **capped_tile(
            tile_options("decode", rows, group_size, value_dim, query_BHD.dtype, query_BHD.device), softcap
        ),
    )
    return out_BHV


def new_arrivals(num_heads: int, device: torch.device) -> Tensor:
    """Counters of programs for as many kv heads of all sequences together."""
    return torch.zeros(num_heads, dtype=torch.int32, device=device)


def decode_programs(num_heads: int, max_splits: int) -> int:
    """The programs that share the splits of a kv head, for as many kv heads of all sequences together."""
    most: int = triton.next_power_of_2(triton.cdiv(TARGET_PROGRAMS, num_heads))
    return min(max_splits, most)
