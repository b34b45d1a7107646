"""The inner loop of both attention kernels: one tile of queries meets a range of paged keys.

Softmax is online (FlashAttention-2, arXiv 2307.08691) in base 2, everything but the operands of the two
products is fp32. Shapes: M query rows of one kv head, N keys of a block, D head dim.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import torch

from baton.kernels.triton_import import jit, tl

# The loads of a block's page ids take two of Triton's stages. With fewer than five, keys and values have one
# buffer, and each product waits for the loads of its own block. Five need up to 150 KB of shared memory.
NUM_STAGES: Final = 5
STAGES_OF_SMALL_GPUS: Final = 3


@cache
def num_stages(device: torch.device) -> int:
    """The pipeline stages that fit in the shared memory of a multiprocessor of the device."""
    if device.type != "cuda":
        return NUM_STAGES
    capability = torch.cuda.get_device_capability(device)
    has_room = capability == (8, 0) or capability[0] in (9, 10)  # A100, H100, H200, B200: 160 KB and more
    return NUM_STAGES if has_room else STAGES_OF_SMALL_GPUS


@jit
def attend_keys(
    kv_ptr: tl.tensor,  # [P, 2, K, S, D] at the kv head of the query rows
    page_table_ptr: tl.tensor,  # [pages] int32, the row of one sequence
    query_MD: tl.tensor,
    position_M: tl.tensor,
    acc_MD: tl.tensor,  # running sum of weight * value
    peak_M: tl.tensor,  # running maximum of the scores, -inf before the first visible key
    total_M: tl.tensor,  # running sum of the weights
    first: tl.tensor,  # keys [first, last) are met; first is a multiple of BLOCK_N
    last: tl.tensor,
    scale: float,  # of the scores, times log2(e)
    head_dim: int,
    kv_stride_page: int,
    kv_stride_value: int,
    kv_stride_slot: int,
    MASKED: tl.constexpr,  # False promises that every row sees every key of the range
    WINDOW: tl.constexpr,  # keys a query sees, itself included; 0: all
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EVEN_D: tl.constexpr,  # head_dim == BLOCK_D
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The running (acc, peak, total) after the keys [first, last)."""
    dim_D = tl.arange(0, BLOCK_D)
    for start in range(first, last, BLOCK_N):
        key_N = start + tl.arange(0, BLOCK_N)
        exists_N = key_N < last
        page_N = tl.load(page_table_ptr + key_N // PAGE_SIZE, mask=exists_N, other=0)
        # int64: page * kv_stride_page passes 2^31 in any pool worth having.
        token_N = page_N.to(tl.int64) * kv_stride_page + (key_N % PAGE_SIZE) * kv_stride_slot
        key_ptr_DN = kv_ptr + token_N[None, :] + dim_D[:, None]
        value_ptr_ND = kv_ptr + kv_stride_value + token_N[:, None] + dim_D[None, :]
        # Loads mask the slots past the last key: memory never written may hold NaN.
        if MASKED or not EVEN_D:
            inside_N = exists_N if MASKED else key_N >= 0
            inside_D = dim_D < head_dim
            keys_DN = tl.load(key_ptr_DN, mask=inside_N[None, :] & inside_D[:, None], other=0.0)
            values_ND = tl.load(value_ptr_ND, mask=inside_N[:, None] & inside_D[None, :], other=0.0)
        else:
            keys_DN = tl.load(key_ptr_DN)
            values_ND = tl.load(value_ptr_ND)
        score_MN = tl.dot(query_MD, keys_DN, input_precision="ieee") * scale
        if MASKED:
            visible_MN = exists_N[None, :] & (key_N[None, :] <= position_M[:, None])
            if WINDOW > 0:
                visible_MN &= key_N[None, :] > position_M[:, None] - WINDOW
            score_MN = tl.where(visible_MN, score_MN, float("-inf"))
        new_peak_M = tl.maximum(peak_M, tl.max(score_MN, axis=1))
        # -inf minus -inf is NaN: a row that has seen no key yet is measured from 0.
        base_M = tl.where(new_peak_M == float("-inf"), 0.0, new_peak_M)
        weight_MN = tl.exp2(score_MN - base_M[:, None])
        shrink_M = tl.exp2(peak_M - base_M)
        total_M = total_M * shrink_M + tl.sum(weight_MN, axis=1)
        acc_MD = acc_MD * shrink_M[:, None]
        acc_MD = tl.dot(weight_MN.to(values_ND.dtype), values_ND, acc_MD, input_precision="ieee")
        peak_M = new_peak_M
    return acc_MD, peak_M, total_M
