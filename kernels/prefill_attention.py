"""Prefill attention: ragged chunks of new tokens attend causally over their paged context.

One program takes BLOCK_M query rows: consecutive tokens of one sequence times the G query heads that
share a kv head (FlashAttention-2 with packed heads). No row is padded to another sequence's length.

Shapes: T tokens of the batch, B sequences, H query heads, K kv heads, G = H / K, P pages, S page size; D
value dim, E further elements of a key, as in attention_tile.py: D + E is the head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from baton.kernels.kv_rows import (
    LARGEST_CODE,
    as_stored,
    check_paged_kv,
    check_value_dim,
    decode_rows,
    kv_strides,
    row_format,
)
from baton.kernels.triton.attention_tile import (
    LOG2_E,
    attend_keys,
    capped_tile,
    dim_blocks,
    merge,
    owner_of_block,
    tile_options,
    tile_rows,
)
from baton.kernels.triton.kernel import kernel, tl


@kernel(varying=("num_sequences", "page_table_stride"))
def prefill_attention_kernel(
    query_ptr: tl.tensor,  # [T, H, D + E]
    kv_ptr: tl.tensor,  # [P, L, K, S, R]; int8 where rows are codes and their scale
    page_table_ptr: tl.tensor,  # [B, pages] int32
    cu_seqlens_ptr: tl.tensor,  # [B + 1] int32
    context_lens_ptr: tl.tensor,  # [B] int32
    sinks_ptr: tl.tensor,  # [H] fp32, read when HAS_SINKS
    out_ptr: tl.tensor,  # [T, H, D], contiguous
    scale: float,
    num_sequences: int,
    value_dim: int,  # D
    query_stride_token: int,
    query_stride_head: int,
    kv_stride_page: int,
    kv_stride_value: int,
    kv_stride_head: int,
    kv_stride_slot: int,
    page_table_stride: int,
    rest_dim: int,  # E
    WINDOW: tl.constexpr,  # 0: all
    SOFTCAP: tl.constexpr,  # of the scores times log2(e); 0: none
    HAS_SINKS: tl.constexpr,
    ROW_FORMAT: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    GROUP_SIZE: tl.constexpr,  # G
    BLOCK_Q: tl.constexpr,  # tokens of a program: BLOCK_M // G
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    EVEN: tl.constexpr,
) -> None:
    """One program computes one tile of queries of one kv head of one sequence."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # late tokens see the most keys: they start first
    kv_head = tl.program_id(1)
    sequence = owner_of_block(cu_seqlens_ptr, num_sequences, block, BLOCK_Q)
    first_token = tl.load(cu_seqlens_ptr + sequence)
    num_tokens = tl.load(cu_seqlens_ptr + sequence + 1) - first_token
    token = (block - first_token // BLOCK_Q - sequence) * BLOCK_Q  # of this sequence, as all below
    if token >= num_tokens:
        return
    num_computed = tl.load(context_lens_ptr + sequence) - num_tokens

    row_M = tl.arange(0, BLOCK_M)
    dim_D = tl.arange(0, BLOCK_D)
    token_M = token + row_M // GROUP_SIZE
    head_M = kv_head * GROUP_SIZE + row_M % GROUP_SIZE
    inside_M = (row_M < BLOCK_Q * GROUP_SIZE) & (token_M < num_tokens)
    inside_MD = inside_M[:, None] & (dim_D[None, :] < value_dim)
    row_of_batch_M = (first_token + token_M).to(tl.int64)  # T * H * D may pass 2^31
    query_ptr_M = query_ptr + row_of_batch_M * query_stride_token + head_M * query_stride_head
    query_MD = tl.load(query_ptr_M[:, None] + dim_D[None, :], mask=inside_MD, other=0.0)
    query_ME = query_MD
    if BLOCK_E > 0:
        dim_E = tl.arange(0, BLOCK_E)
        inside_ME = inside_M[:, None] & (dim_E[None, :] < rest_dim)
        query_ME = tl.load(query_ptr_M[:, None] + value_dim + dim_E[None, :], mask=inside_ME, other=0.0)

    # Keys [start, stop) are seen by some row, [whole_start, whole_stop) by every row: only the edges
    # on either side of the whole part need a mask.
    position_M = num_computed + token_M
    first_position = num_computed + token
    stop = num_computed + tl.minimum(token + BLOCK_Q, num_tokens)  # not above 0 in padding: no key is read
    start = 0
    whole_start = 0
    if WINDOW > 0:
        start = tl.maximum(first_position - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        whole_start = tl.cdiv(tl.maximum(stop - WINDOW, 0), BLOCK_N) * BLOCK_N
        whole_start = tl.maximum(tl.minimum(whole_start, stop), 0)
    whole_stop = tl.maximum((first_position + 1) // BLOCK_N * BLOCK_N, whole_start)
    bounds = (start, whole_start, whole_stop, stop)

    merged_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    merged_peak_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    merged_total_M = tl.zeros([BLOCK_M], tl.float32)
    acc_MD, peak_M, total_M = merged_MD, merged_peak_M, merged_total_M
    if HAS_SINKS:
        sink_M = tl.load(sinks_ptr + head_M, mask=inside_M, other=0.0)
        merged_peak_M = sink_M * 1.4426950408889634
        merged_total_M = tl.full([BLOCK_M], 1.0, tl.float32)
    for part in tl.static_range(3):
        merged_MD, merged_peak_M, merged_total_M, acc_MD, peak_M, total_M = attend_keys(
            kv_ptr + kv_head * kv_stride_head,
            page_table_ptr + sequence.to(tl.int64) * page_table_stride,
            query_MD,
            query_ME,
            position_M,
            merged_MD,
            merged_peak_M,
            merged_total_M,
            acc_MD,
            peak_M,
            total_M,
            bounds[part],
            bounds[part + 1],
            scale,
            value_dim,
            rest_dim,
            kv_stride_page,
            kv_stride_value,
            kv_stride_slot,
            False,
            part != 1,
            WINDOW,
            SOFTCAP,
            ROW_FORMAT,
            PAGE_SIZE,
            BLOCK_N,
            BLOCK_D,
            BLOCK_E,
            EVEN,
        )
    merged_MD, merged_peak_M, merged_total_M = merge(
        merged_MD, merged_peak_M, merged_total_M, acc_MD, peak_M, total_M
    )
    # Padding saw no key.
    out_MD = merged_MD / tl.where(merged_total_M > 0, merged_total_M, 1.0)[:, None]
    num_heads = tl.num_programs(1) * GROUP_SIZE
    out_ptr_M = out_ptr + (row_of_batch_M * num_heads + head_M) * value_dim
    tl.store(out_ptr_M[:, None] + dim_D[None, :], out_MD.to(out_ptr.dtype.element_ty), mask=inside_MD)


def prefill_attention_triton(
    query_THD: Tensor,
    kv_pages: Tensor,
    page_table_BP: Tensor,
    cu_seqlens_q_B1: Tensor,
    context_lens_B: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
    value_dim: int | None = None,
    max_seqlen_q: int,
    out_THV: Tensor | None = None,
) -> Tensor:
    """Causal attention of every new token over its sequence; returns [T, H, V], out_THV if given.

    query_THD: the new tokens of all sequences end to end; strides over tokens and heads are free.
    kv_pages: one layer, [P, L, K, S, R], see kv_rows.py; the keys of the new tokens are already stored.
    cu_seqlens_q_B1: int32 [B + 1]; sequence b owns the tokens [cu[b], cu[b + 1]), possibly none.
    context_lens_B: int32, new tokens included, so token i of sequence b sits at position
    `context_lens[b] - (cu[b + 1] - cu[b]) + i`. window: the query at p sees keys in (p - window, p].
    max_seqlen_q: an upper bound of the new tokens of one sequence. softcap, sinks_H, value_dim: as in
    `ragged_attention`.
    """
    check_paged_kv(query_THD, kv_pages, page_table_BP, context_lens_B, window)
    _check_cu_seqlens(cu_seqlens_q_B1, context_lens_B)
    num_tokens, num_heads, head_dim = query_THD.shape
    num_kv_heads, page_size = kv_pages.shape[2:4]
    value_dim = check_value_dim(kv_pages, head_dim, value_dim)
    format_of_rows = row_format(kv_pages, query_THD.dtype, head_dim)
    num_sequences = context_lens_B.shape[0]
    if out_THV is None:
        out_THV = query_THD.new_empty((num_tokens, num_heads, value_dim))
    if num_tokens == 0:
        return out_THV
    group_size = num_heads // num_kv_heads
    tile = capped_tile(prefill_tile(query_THD, group_size, max_seqlen_q, format_of_rows, value_dim), softcap)
    # The most blocks that any division of T tokens into B sequences takes; the spare ones return at once.
    num_blocks = num_tokens // tile["BLOCK_Q"] + num_sequences
    prefill_attention_kernel[(num_blocks, num_kv_heads)](
        query_THD,
        as_stored(kv_pages),
        page_table_BP,
        cu_seqlens_q_B1,
        context_lens_B,
        context_lens_B if sinks_H is None else sinks_H,
        out_THV,
        scale * LOG2_E,
        num_sequences,
        value_dim,
        query_THD.stride(0),
        query_THD.stride(1),
        *kv_strides(kv_pages),
        page_table_BP.stride(0),
        head_dim - value_dim,
        WINDOW=window or 0,
        SOFTCAP=(softcap or 0.0) * LOG2_E,
        HAS_SINKS=sinks_H is not None,
        ROW_FORMAT=format_of_rows,
        PAGE_SIZE=page_size,
        GROUP_SIZE=group_size,
        enable_fp_fusion=False,
        **tile,
    )
    return out_THV


def prefill_tile(
    query_THD: Tensor,
    group_size: int,
    max_seqlen_q: int,
    format_of_rows: int = 0,
    value_dim: int | None = None,
) -> dict[str, int]:
    """Compile-time constants: 128 rows where registers and shared memory allow, fewer for short chunks.

    Short chunks over rows of codes keep 128 rows: with fewer warps the kernel needs more registers.
    """
    head_dim, dtype = query_THD.shape[2], query_THD.dtype
    value_dim = value_dim or head_dim
    blocks, rows = dim_blocks(head_dim, value_dim), tile_rows(group_size, dtype, value_dim)
    if (
        dtype != torch.float32
        and blocks["BLOCK_D"] <= 128
        and (format_of_rows or max_seqlen_q * group_size > rows)
    ):
        rows = max(rows, 128)
    return {
        "BLOCK_Q": rows // group_size,
        "BLOCK_M": rows,
        **blocks,
        **tile_options("prefill", rows, group_size, value_dim, dtype, query_THD.device),
    }


def _check_cu_seqlens(cu_seqlens_q_B1: Tensor, context_lens_B: Tensor) -> None:
    expected = (context_lens_B.shape[0] + 1,)
    if cu_seqlens_q_B1.shape != expected or cu_seqlens_q_B1.dtype != torch.int32:
        found = f"{cu_seqlens_q_B1.dtype} {tuple(cu_seqlens_q_B1.shape)}"
        raise ValueError(f"cu_seqlens_q must be int32 {expected}, got {found}")
    if not cu_seqlens_q_B1.is_contiguous() or cu_seqlens_q_B1.device != context_lens_B.device:
        raise ValueError(f"cu_seqlens_q must be contiguous on {context_lens_B.device}")


def prefill_attention_reference(
    query_THD: Tensor,
    kv_pages: Tensor,
    page_table_BP: Tensor,
    cu_seqlens_q_B1: Tensor,
    context_lens_B: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
    value_dim: int | None = None,
) -> Tensor:
    """`prefill_attention_triton` in plain torch, one sequence at a time; a decode is a chunk of one token."""
    value_dim = value_dim or query_THD.shape[2]
    out_THV = query_THD.new_empty((*query_THD.shape[:2], value_dim))
    bounds = cu_seqlens_q_B1.tolist()
    for sequence, context_len in enumerate(context_lens_B.tolist()):
        begin, end = bounds[sequence], bounds[sequence + 1]
        if begin == end:
            continue
        first_position = context_len - (end - begin)
        first = 0 if window is None else max(0, first_position - window + 1)
        key_KND, value_KND = _dense_kv(kv_pages, page_table_BP[sequence], first, context_len, query_THD.dtype)
        position_T1 = torch.arange(first_position, context_len, device=query_THD.device)[:, None]
        key_position_N = torch.arange(first, context_len, device=query_THD.device)
        visible_TN = key_position_N <= position_T1
        if window is not None:
            visible_TN &= key_position_N > position_T1 - window
        out_HTV = _dense_attention(
            query_THD[begin:end].transpose(0, 1),
            key_KND,
            value_KND[..., :value_dim],
            visible_TN,
            scale=scale,
            softcap=softcap,
            sinks_H=sinks_H,
        )
        out_THV[begin:end] = out_HTV.transpose(0, 1)
    return out_THV


def _dense_kv(
    kv_pages: Tensor, page_table_P: Tensor, first: int, last: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(keys, values), each [K, N, D] of `dtype`: contiguous copies of tokens [first, last) of a sequence.

    With one plane, values are the keys; the value dim says which part of them is meant.
    """
    page_size = kv_pages.shape[3]
    first_page = first // page_size
    page_ids = page_table_P[first_page : -(-last // page_size)]
    words = kv_pages.view(torch.uint8) if kv_pages.dtype in LARGEST_CODE else kv_pages
    copy = words.permute(1, 2, 0, 3, 4)[:, :, page_ids].flatten(2, 3)
    if kv_pages.dtype in LARGEST_CODE:
        copy = decode_rows(copy.view(kv_pages.dtype), dtype)
    kept = copy[:, :, first - first_page * page_size : last - first_page * page_size]
    return kept[0], kept[-1]


def _dense_attention(
    query_HTD: Tensor,
    key_KND: Tensor,
    value_KNV: Tensor,
    visible_TN: Tensor | None,
    *,
    scale: float,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """Attention of one sequence in plain torch: [H, T, V]. visible_TN: None means that all keys are seen."""
    if softcap is None and sinks_H is None:
        out_1HTV = functional.scaled_dot_product_attention(
            query_HTD[None],
            key_KND[None],
            value_KNV[None],
            attn_mask=visible_TN,
            scale=scale,
            enable_gqa=True,
        )
        return out_1HTV[0]
    group_size = len(query_HTD) // len(key_KND)
    key_HND, value_HNV = (each.repeat_interleave(group_size, dim=0).float() for each in (key_KND, value_KNV))
    score_HTN = query_HTD.float() @ key_HND.mT * scale
    if softcap is not None:
        score_HTN = softcap * torch.tanh(score_HTN / softcap)
    if visible_TN is not None:
        score_HTN = score_HTN.masked_fill(~visible_TN, float("-inf"))
    num_keys = score_HTN.shape[2]
    if sinks_H is not None:
        sink_HT1 = sinks_H[:, None, None].expand(*score_HTN.shape[:2], 1)
        score_HTN = torch.cat((score_HTN, sink_HT1), dim=2)
    weight_HTN = score_HTN.softmax(dim=2)[:, :, :num_keys]
    return (weight_HTN @ value_HNV).to(query_HTD.dtype)
