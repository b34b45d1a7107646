"""Spread a contiguous staging buffer over scattered pages. Shapes: P pages, N pages moved."""

from __future__ import annotations

from torch import Tensor

from baton.kernels.page_words import as_words, check_transfer
from baton.kernels.triton_import import kernel, tl, triton


def scatter_pages(staging: Tensor, page_ids_N: Tensor, pool: Tensor) -> None:
    """`pool[page_ids_N[n]] = staging[n]`, byte for byte, for any dtype; the inverse of `gather_pages`.

    staging: contiguous [N, ...]. page_ids_N: int64 in [0, P), distinct; the caller owns that.
    pool: [P, ...]; the elements of a page are adjacent, pages may be strided; modified in place.
    """
    if pool.is_cuda:
        scatter_pages_triton(staging, page_ids_N, pool)
    else:
        scatter_pages_reference(staging, page_ids_N, pool)


@kernel()
def scatter_pages_kernel(
    staging_ptr: tl.tensor,  # [N, words], contiguous
    page_ids_ptr: tl.tensor,  # [N] int64
    pool_ptr: tl.tensor,  # [P, words]
    page_words: int,
    pool_stride_page: int,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)  # int64, like page_id: offsets of whole pools pass 2^31
    page_id = tl.load(page_ids_ptr + row)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = word < page_words
    content = tl.load(staging_ptr + row * page_words + word, mask=inside)
    tl.store(pool_ptr + page_id * pool_stride_page + word, content, mask=inside)


def scatter_pages_triton(staging: Tensor, page_ids_N: Tensor, pool: Tensor) -> None:
    check_transfer(pool, page_ids_N, staging)
    if staging.numel() == 0:
        return
    staging_words, pool_words = as_words(staging, pool)
    page_words = staging_words.shape[1]
    block = min(2048, triton.next_power_of_2(page_words))
    grid = (page_ids_N.shape[0], triton.cdiv(page_words, block))
    scatter_pages_kernel[grid](
        staging_words, page_ids_N, pool_words, page_words, pool_words.stride(0), BLOCK=block, num_warps=8
    )


def scatter_pages_reference(staging: Tensor, page_ids_N: Tensor, pool: Tensor) -> None:
    pool.index_copy_(0, page_ids_N, staging.view(-1, *pool.shape[1:]))
