"""Collect scattered pages into one contiguous staging buffer. Shapes: P pages, N pages moved."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.kernels.page_words import as_words, check_transfer
from baton.kernels.triton_import import kernel, tl, triton


def gather_pages(pool: Tensor, page_ids_N: Tensor, out: Tensor) -> None:
    """`out[n] = pool[page_ids_N[n]]`, byte for byte, for any dtype.

    pool: [P, ...]; the elements of a page are adjacent, pages may be strided (`pool[:, layer]`).
    page_ids_N: int64 in [0, P); the caller owns that. out: contiguous [N, ...], as many elements a page.
    """
    if pool.is_cuda:
        gather_pages_triton(pool, page_ids_N, out)
    else:
        gather_pages_reference(pool, page_ids_N, out)


@kernel()
def gather_pages_kernel(
    pool_ptr: tl.tensor,  # [P, words]
    page_ids_ptr: tl.tensor,  # [N] int64
    out_ptr: tl.tensor,  # [N, words], contiguous
    page_words: int,
    pool_stride_page: int,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)  # int64, like page_id: offsets of whole pools pass 2^31
    page_id = tl.load(page_ids_ptr + row)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = word < page_words
    content = tl.load(pool_ptr + page_id * pool_stride_page + word, mask=inside)
    tl.store(out_ptr + row * page_words + word, content, mask=inside)


def gather_pages_triton(pool: Tensor, page_ids_N: Tensor, out: Tensor) -> None:
    check_transfer(pool, page_ids_N, out)
    if out.numel() == 0:
        return
    pool_words, out_words = as_words(pool, out)
    page_words = out_words.shape[1]
    block = min(2048, triton.next_power_of_2(page_words))
    grid = (page_ids_N.shape[0], triton.cdiv(page_words, block))
    gather_pages_kernel[grid](
        pool_words, page_ids_N, out_words, page_words, pool_words.stride(0), BLOCK=block, num_warps=8
    )


def gather_pages_reference(pool: Tensor, page_ids_N: Tensor, out: Tensor) -> None:
    torch.index_select(pool, 0, page_ids_N, out=out.view(-1, *pool.shape[1:]))
