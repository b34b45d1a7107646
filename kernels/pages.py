"""A pool of pages seen as rows of machine words, so that pages of any dtype move alike."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.kernels.triton_import import kernel, tl, triton

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def as_words(*pages: Tensor) -> tuple[Tensor, ...]:
    """Each [N, ...] tensor as [N, words per page] over the same memory, in the widest word all allow.

    Elements of one page must be adjacent; pages may be strided. Raises ValueError otherwise.
    """
    rows = [_as_bytes(tensor) for tensor in pages]
    alignment = 0
    for row in rows:
        # The lowest set bit of the union is the largest power of two that divides every term.
        alignment |= row.shape[1] | row.stride(0) | int(row.storage_offset()) | row.data_ptr()
    for word in _WORDS:
        if alignment % word.itemsize == 0:
            break
    return tuple(row.view(word) for row in rows)


def check_transfer(pool: Tensor, page_ids_N: Tensor, staging: Tensor) -> None:
    """Raises ValueError unless staging can hold exactly the pages that page_ids_N names."""
    num_pages = page_ids_N.shape[0]
    if page_ids_N.dim() != 1 or page_ids_N.dtype != torch.int64 or not page_ids_N.is_contiguous():
        raise ValueError(f"page_ids must be contiguous int64 [N], got {page_ids_N.dtype} {page_ids_N.shape}")
    if staging.dtype != pool.dtype:
        raise ValueError(f"staging must be {pool.dtype} like the pool, got {staging.dtype}")
    page_elements = pool[0].numel()
    if not staging.is_contiguous() or staging.shape[0] != num_pages:
        raise ValueError(f"staging must be contiguous [{num_pages}, ...], got {tuple(staging.shape)}")
    if num_pages and staging[0].numel() != page_elements:
        raise ValueError(f"a page is {page_elements} elements, staging holds {staging[0].numel()} each")
    if not pool.device == page_ids_N.device == staging.device:
        raise ValueError(f"devices differ: {pool.device}, {page_ids_N.device}, {staging.device}")


def _as_bytes(pages: Tensor) -> Tensor:
    if not pages[:1].is_contiguous():
        raise ValueError(f"the elements of a page must be adjacent, got strides {pages.stride()}")
    return pages.view(pages.shape[0], -1).view(torch.uint8)


# Pages from one pool straight into another on a GPU. Shapes: P pages, N pages moved.


def copy_pages(source: Tensor, source_ids_N: Tensor, destination: Tensor, destination_ids_N: Tensor) -> None:
    """`destination[destination_ids_N[n]] = source[source_ids_N[n]]`, byte for byte, for any dtype.

    Pools: [P, ...] each; the elements of a page are adjacent, pages may be strided; destination is modified
    in place. It may be another process's, or another GPU's that the source's can write to.
    Ids: int64, on the source's device, in [0, P) of their pools, those of the destination distinct; the
    caller owns that.
    """
    if source.is_cuda:
        copy_pages_triton(source, source_ids_N, destination, destination_ids_N)
    else:
        copy_pages_reference(source, source_ids_N, destination, destination_ids_N)


@kernel()
def copy_pages_kernel(
    source_ptr: tl.tensor,  # [P, words]
    source_ids_ptr: tl.tensor,  # [N] int64
    destination_ptr: tl.tensor,  # [P, words]
    destination_ids_ptr: tl.tensor,  # [N] int64
    page_words: int,
    source_stride_page: int,
    destination_stride_page: int,
    BLOCK: tl.constexpr,
) -> None:
    """One program copies one block of words of one page."""
    row = tl.program_id(0)
    source_id = tl.load(source_ids_ptr + row)  # int64: offsets of whole pools pass 2^31
    destination_id = tl.load(destination_ids_ptr + row)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = word < page_words
    content = tl.load(source_ptr + source_id * source_stride_page + word, mask=inside)
    tl.store(destination_ptr + destination_id * destination_stride_page + word, content, mask=inside)


def copy_pages_triton(
    source: Tensor, source_ids_N: Tensor, destination: Tensor, destination_ids_N: Tensor
) -> None:
    """`copy_pages` on a GPU."""
    _check(source, source_ids_N, destination, destination_ids_N)
    num_pages = len(source_ids_N)
    if num_pages == 0 or source[0].numel() == 0:
        return
    source_words, destination_words = as_words(source, destination)
    page_words = source_words.shape[1]
    block = min(2048, triton.next_power_of_2(page_words))
    grid = (num_pages, triton.cdiv(page_words, block))
    copy_pages_kernel[grid](
        source_words,
        source_ids_N,
        destination_words,
        destination_ids_N,
        page_words,
        source_words.stride(0),
        destination_words.stride(0),
        BLOCK=block,
        num_warps=8,
    )


def copy_pages_reference(
    source: Tensor, source_ids_N: Tensor, destination: Tensor, destination_ids_N: Tensor
) -> None:
    """`copy_pages` in plain torch."""
    destination.index_copy_(0, destination_ids_N, torch.index_select(source, 0, source_ids_N))


def _check(source: Tensor, source_ids_N: Tensor, destination: Tensor, destination_ids_N: Tensor) -> None:
    for ids in (source_ids_N, destination_ids_N):
        if ids.dim() != 1 or ids.dtype != torch.int64 or not ids.is_contiguous():
            raise ValueError(f"page ids must be contiguous int64 [N], got {ids.dtype} {tuple(ids.shape)}")
        if ids.device != source.device:
            raise ValueError(f"page ids must be on {source.device} like the source, got {ids.device}")
    if len(source_ids_N) != len(destination_ids_N):
        raise ValueError(f"{len(source_ids_N)} pages cannot go to {len(destination_ids_N)}")
    if source.dtype != destination.dtype or source.shape[1:] != destination.shape[1:]:
        raise ValueError(
            f"pages must be alike, got {source.dtype} {tuple(source.shape[1:])} "
            f"and {destination.dtype} {tuple(destination.shape[1:])}"
        )
    if source.is_cuda != destination.is_cuda:
        raise ValueError(f"pages cannot go from {source.device} to {destination.device}")


# Collect scattered pages into one contiguous staging buffer. Shapes: P pages, N pages moved.


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
    """One program copies one block of words of one page."""
    row = tl.program_id(0).to(tl.int64)  # int64, like page_id: offsets of whole pools pass 2^31
    page_id = tl.load(page_ids_ptr + row)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = word < page_words
    content = tl.load(pool_ptr + page_id * pool_stride_page + word, mask=inside)
    tl.store(out_ptr + row * page_words + word, content, mask=inside)


def gather_pages_triton(pool: Tensor, page_ids_N: Tensor, out: Tensor) -> None:
    """`gather_pages` on a GPU."""
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
    """`gather_pages` in plain torch."""
    torch.index_select(pool, 0, page_ids_N, out=out.view(-1, *pool.shape[1:]))


# Spread a contiguous staging buffer over scattered pages. Shapes: P pages, N pages moved.


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
    """One program copies one block of words of one page."""
    row = tl.program_id(0).to(tl.int64)  # int64, like page_id: offsets of whole pools pass 2^31
    page_id = tl.load(page_ids_ptr + row)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = word < page_words
    content = tl.load(staging_ptr + row * page_words + word, mask=inside)
    tl.store(pool_ptr + page_id * pool_stride_page + word, content, mask=inside)


def scatter_pages_triton(staging: Tensor, page_ids_N: Tensor, pool: Tensor) -> None:
    """`scatter_pages` on a GPU."""
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
    """`scatter_pages` in plain torch."""
    pool.index_copy_(0, page_ids_N, staging.view(-1, *pool.shape[1:]))
