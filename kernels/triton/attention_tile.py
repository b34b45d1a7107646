"""The inner loop of both attention kernels: one tile of queries meets a range of paged keys.

Softmax is online (FlashAttention-2, arXiv 2307.08691) in base 2, everything but the operands of the two
products is fp32.

The result of a query has the same bits in both kernels, in any batch and for any chunk and page size. Keys
are cut into splits at fixed positions; each split is attended apart, block by block, and then merged into
the state of the splits before it, in order. Blocks that a query does not see leave its state unchanged.
Tiles have at least 64 rows, so that both kernels use the same matrix instructions on an H100 or H200; on
other GPUs this has not been checked. The kernels are compiled without fused multiply-add, which a compiler
may use in one kernel and not in the other.

Shapes: M query rows of one kv head, N keys of a block, D value dim, E further elements of a key (none with
two planes), R elements of a row, L planes, see kv_rows.py.
"""

from __future__ import annotations

import math
from typing import Final

import torch

from baton.kernels.kv_rows import row_elements
from baton.kernels.triton.kernel import (
    TileKey,
    TileKind,
    has_large_shared_memory,
    jit,
    tl,
    triton,
    tuned_tile,
)

LOG2_E: Final = math.log2(math.e)  # kernels compute powers of 2
# With five of Triton's pipeline stages, keys and values have two or three buffers; page ids, which are loaded
# first, take two of the stages. With fewer than five, each product waits for the loads of its own block. Five
# stages need up to 150 KB of shared memory.
NUM_STAGES: Final = 5
STAGES_OF_SMALL_GPUS: Final = 3
TUNED_ROWS: Final = 64  # the least rows of the tiles that are tuned: groups of up to 64 query heads a kv head


def num_stages(device: torch.device) -> int:
    """The pipeline stages that fit in the shared memory of a multiprocessor of the device."""
    return NUM_STAGES if has_large_shared_memory(device) else STAGES_OF_SMALL_GPUS


# Splits are short where the context is short, because a step of few sequences needs many programs, and longer
# further on, because each split costs a merge: 16 of 256 keys, 16 of 512, 16 of 1,024 and so on.
FIRST_SPLIT: Final = 256
SPLITS_OF_ONE_LENGTH: Final = 16


def num_splits(num_keys: int) -> int:
    """The splits that begin before `num_keys`."""
    count, length = 0, FIRST_SPLIT
    while num_keys > length * SPLITS_OF_ONE_LENGTH:
        count += SPLITS_OF_ONE_LENGTH
        num_keys -= length * SPLITS_OF_ONE_LENGTH
        length *= 2
    return count + -(-num_keys // length)


def tile_rows(group_size: int, dtype: torch.dtype, value_dim: int) -> int:
    """The fewest rows of a tile that holds a token's query heads of one kv head.

    The sums of 64 rows of more than 256 elements do not fit into registers.
    """
    least = 16 if dtype == torch.float32 or value_dim > 256 else 64
    return max(least, 1 << (group_size - 1).bit_length())


def tile_warps(num_rows: int, head_dim: int, dtype: torch.dtype) -> int:
    """The number of warps: a tile's sums fit into their registers. Small blocks of keys need fewer warps."""
    has_whole_blocks = head_dim == max(16, triton.next_power_of_2(head_dim))  # see key_block
    is_wide = head_dim > 128 or (dtype == torch.float32 and has_whole_blocks)
    return 8 if num_rows > 64 or is_wide else 4


def key_block(head_dim: int, dtype: torch.dtype) -> int:
    """The keys of a block: half as many where the head dim is no power of 2, since masks take registers."""
    block_D = max(16, triton.next_power_of_2(head_dim))
    row_bytes = block_D * dtype.itemsize
    num_keys = 64 if row_bytes <= 256 else 32 if row_bytes <= 512 else 16
    return num_keys if head_dim == block_D else max(16, num_keys // 2)


def tile_options(
    kind: TileKind,
    num_rows: int,
    group_size: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, int]:
    """BLOCK_N, num_warps and num_stages of a kernel with tiles of `num_rows`, tuned where the table has them.

    BLOCK_N depends on the head dim, the dtype and the group size alone: both kernels meet the same blocks.
    """
    if has_large_shared_memory(device) and tile_rows(group_size, dtype, head_dim) == TUNED_ROWS:
        tuned = tuned_tile(TileKey(kind, dtype, head_dim, num_rows))
        if tuned is not None:
            return {
                "BLOCK_N": tuned.block_n,
                "num_warps": tuned.num_warps,
                "num_stages": tuned.num_stages,
            }
    return {
        "BLOCK_N": key_block(head_dim, dtype),
        "num_warps": tile_warps(num_rows, head_dim, dtype),
        "num_stages": 2 if kind == "prefill" and dtype == torch.float32 else num_stages(device),
    }


def dim_blocks(head_dim: int, value_dim: int) -> dict[str, int]:
    """BLOCK_D, BLOCK_E and EVEN of a kernel: powers of 2 that hold a value and the rest of a key."""
    block_D = max(16, triton.next_power_of_2(value_dim))
    rest = head_dim - value_dim
    block_E = max(16, triton.next_power_of_2(rest)) if rest else 0
    return {"BLOCK_D": block_D, "BLOCK_E": block_E, "EVEN": (value_dim, rest) == (block_D, block_E)}


def capped_tile(tile: dict[str, int], softcap: float | None) -> dict[str, int]:
    """The tile, with half the keys of a block where scores are capped: the caps take registers."""
    return tile if softcap is None else tile | {"BLOCK_N": max(16, tile["BLOCK_N"] // 2)}


@jit
def split_start(split: tl.tensor) -> tl.tensor:
    """The first key of a split."""
    doubling = split // 16
    return 256 * (16 * ((1 << doubling) - 1) + (split % 16 << doubling))


@jit
def split_of(key: tl.tensor) -> tl.tensor:
    """The split that holds a key; keys are below 536 million."""
    doubling = 0
    for step in tl.static_range(1, 17):
        doubling += (key >= 4096 * ((1 << step) - 1)).to(tl.int32)
    return 16 * doubling + (key - 4096 * ((1 << doubling) - 1)) // (256 << doubling)


@jit
def owner_of_block(
    starts_ptr: tl.tensor,  # [B + 1] int32, ascending
    num_owners: tl.tensor,
    block: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The owner (sequence, or expert) of a block of BLOCK rows; owner b owns rows [starts[b], starts[b + 1]).

    Blocks are numbered so that owner b starts at starts[b] // BLOCK + b, which leaves every owner at least
    the blocks it needs; the last b that starts at or before `block` is found by bisection.
    """
    low = 0
    high = num_owners
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(starts_ptr + middle) // BLOCK + middle <= block:
            low = middle
        else:
            high = middle
    return low


@jit
def merge(
    acc_MD: tl.tensor,
    peak_M: tl.tensor,
    total_M: tl.tensor,
    next_acc_MD: tl.tensor,
    next_peak_M: tl.tensor,
    next_total_M: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The state after the splits so far and the next one. A split without visible keys changes no bit."""
    new_peak_M = tl.maximum(peak_M, next_peak_M)
    base_M = tl.where(new_peak_M == float("-inf"), 0.0, new_peak_M)
    scale_M = tl.exp2(peak_M - base_M)
    next_scale_M = tl.exp2(next_peak_M - base_M)
    acc_MD = acc_MD * scale_M[:, None] + next_acc_MD * next_scale_M[:, None]
    return acc_MD, new_peak_M, total_M * scale_M + next_total_M * next_scale_M


@jit
def attend_keys(
    kv_ptr: tl.tensor,  # [P, L, K, S, R] at the kv head of the query rows
    page_table_ptr: tl.tensor,  # [pages] int32, the row of one sequence
    query_MD: tl.tensor,
    query_ME: tl.tensor,  # read when BLOCK_E > 0
    position_M: tl.tensor,
    merged_MD: tl.tensor,  # acc, peak and total of the splits before the one that holds the first key
    merged_peak_M: tl.tensor,
    merged_total_M: tl.tensor,
    acc_MD: tl.tensor,  # running sum of weight * value in that split
    peak_M: tl.tensor,  # running maximum of its scores, -inf before the first visible key
    total_M: tl.tensor,  # running sum of its weights
    first: tl.tensor,  # keys [first, last) are met; first is a multiple of BLOCK_N
    last: tl.tensor,
    scale: float,  # of the scores, times log2(e)
    value_dim: int,  # D
    rest_dim: int,  # E
    kv_stride_page: int,
    kv_stride_value: int,  # 0 with one plane
    kv_stride_slot: int,
    ONE_SPLIT: tl.constexpr,  # True promises that the range lies in one split: nothing is merged
    MASKED: tl.constexpr,  # False promises that every row sees every key of the range
    WINDOW: tl.constexpr,  # keys a query sees, itself included; 0: all
    SOFTCAP: tl.constexpr,  # s becomes SOFTCAP * tanh(s / SOFTCAP), s times log2(e); 0: none
    ROW_FORMAT: tl.constexpr,  # as in row_format in kv_rows.py
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,  # 0: there are two planes; otherwise a value is the beginning of its key
    EVEN: tl.constexpr,  # value_dim == BLOCK_D and rest_dim == BLOCK_E
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The merged state and the state of the last split after the keys [first, last)."""
    dim_D = tl.arange(0, BLOCK_D)
    if BLOCK_E > 0:
        dim_E = tl.arange(0, BLOCK_E)
    split_end = split_start(split_of(first) + 1)
    for start in range(first, last, BLOCK_N):
        key_N = start + tl.arange(0, BLOCK_N)
        exists_N = key_N < last
        page_N = tl.load(page_table_ptr + key_N // PAGE_SIZE, mask=exists_N, other=0)
        # int64: page * kv_stride_page passes 2^31 in any pool worth having.
        token_N = page_N.to(tl.int64) * kv_stride_page + (key_N % PAGE_SIZE) * kv_stride_slot
        if ROW_FORMAT > 0:
            token_N = tl.multiple_of(token_N, 2)  # rows of codes begin at even addresses
        key_ptr_DN = kv_ptr + token_N[None, :] + dim_D[:, None]
        value_ptr_ND = kv_ptr + kv_stride_value + token_N[:, None] + dim_D[None, :]
        # Loads mask the slots past the last key: memory never written may hold NaN.
        if MASKED or not EVEN:
            inside_N = exists_N if MASKED else key_N >= 0
            inside_D = dim_D < value_dim
            if BLOCK_E == 0:
                keys_DN = tl.load(key_ptr_DN, mask=inside_N[None, :] & inside_D[:, None], other=0.0)
            values_ND = tl.load(value_ptr_ND, mask=inside_N[:, None] & inside_D[None, :], other=0.0)
        else:
            if BLOCK_E == 0:
                keys_DN = tl.load(key_ptr_DN)
            values_ND = tl.load(value_ptr_ND)
        if BLOCK_E > 0:
            keys_DN = tl.trans(values_ND)
            rest_ptr_EN = kv_ptr + value_dim + token_N[None, :] + dim_E[:, None]
            if MASKED or not EVEN:
                inside_EN = inside_N[None, :] & (dim_E < rest_dim)[:, None]
                rest_EN = tl.load(rest_ptr_EN, mask=inside_EN, other=0.0)
            else:
                rest_EN = tl.load(rest_ptr_EN)
        if ROW_FORMAT > 0:
            scale_ptr_N = kv_ptr + token_N + (BLOCK_D if EVEN else value_dim)
            scale_ptr_N = scale_ptr_N.to(tl.pointer_type(tl.bfloat16))
            value_scale_ptr_N = scale_ptr_N + kv_stride_value // 2
            if MASKED:
                key_scale_N = tl.load(scale_ptr_N, mask=exists_N, other=0.0)
                value_scale_N = tl.load(value_scale_ptr_N, mask=exists_N, other=0.0)
            else:
                key_scale_N, value_scale_N = tl.load(scale_ptr_N), tl.load(value_scale_ptr_N)
            keys_DN = row_elements(keys_DN, key_scale_N[None, :], ROW_FORMAT).to(query_MD.dtype)
            values_ND = row_elements(values_ND, value_scale_N[:, None], ROW_FORMAT).to(query_MD.dtype)
        score_MN = tl.dot(query_MD, keys_DN, input_precision="ieee")
        if BLOCK_E > 0:
            score_MN = tl.dot(query_ME, rest_EN, score_MN, input_precision="ieee")
        score_MN *= scale
        if SOFTCAP > 0:  # tanh(x) is 1 - 2 / (1 + exp(2 x))
            exponential_MN = tl.exp2(score_MN * (2 * 1.4426950408889634 / SOFTCAP))
            score_MN = SOFTCAP * (1.0 - 2.0 / (1.0 + exponential_MN))
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
        if not ONE_SPLIT and start + BLOCK_N == split_end:
            merged_MD, merged_peak_M, merged_total_M = merge(
                merged_MD, merged_peak_M, merged_total_M, acc_MD, peak_M, total_M
            )
            acc_MD = tl.zeros_like(acc_MD)
            peak_M = tl.full(peak_M.shape, float("-inf"), tl.float32)
            total_M = tl.zeros_like(total_M)
            split_end = split_start(split_of(split_end) + 1)
    return merged_MD, merged_peak_M, merged_total_M, acc_MD, peak_M, total_M
