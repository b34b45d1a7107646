"""Copies of whole pages between two pools on one device.

Pages of any dtype move as rows of machine words. Shapes: P pages of a pool, N pages moved.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton.kernels.triton_import import kernel, tl, triton

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def copy_pages(
    source: Tensor, source_ids_N: Tensor | None, destination: Tensor, destination_ids_N: Tensor | None
) -> None:
    """`destination[destination_ids_N[n]] = source[source_ids_N[n]]`, byte for byte, for any dtype.

    A side without ids is a staging buffer of exactly N pages, in order. Pools: [P, ...] each; the elements of
    a page are adjacent, pages may be strided; destination is modified in place. On a GPU, destination may
    belong to another process, or to another GPU that the source's GPU can write to.
    Ids: int64, on the source's device, in [0, P) of their pools, those of the destination distinct; the
    caller guarantees that.
    """
    if source.is_cuda:
        copy_pages_triton(source, source_ids_N, destination, destination_ids_N)
    else:
        copy_pages_reference(source, source_ids_N, destination, destination_ids_N)


@kernel()
def copy_pages_kernel(
    source_ptr: tl.tensor,  # [P, words]
    source_ids_ptr: tl.tensor,  # [N] int64; not read without HAS_SOURCE_IDS
    destination_ptr: tl.tensor,  # [P, words]
    destination_ids_ptr: tl.tensor,  # [N] int64; not read without HAS_DESTINATION_IDS
    page_words: int,
    source_stride_page: int,
    destination_stride_page: int,
    HAS_SOURCE_IDS: tl.constexpr,
    HAS_DESTINATION_IDS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program copies one block of words of one page."""
    row = tl.program_id(0).to(tl.int64)  # int64, like the ids: offsets of whole pools pass 2^31
    source_id = tl.load(source_ids_ptr + row) if HAS_SOURCE_IDS else row
    destination_id = tl.load(destination_ids_ptr + row) if HAS_DESTINATION_IDS else row
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = word < page_words
    content = tl.load(source_ptr + source_id * source_stride_page + word, mask=inside)
    tl.store(destination_ptr + destination_id * destination_stride_page + word, content, mask=inside)


def copy_pages_triton(
    source: Tensor, source_ids_N: Tensor | None, destination: Tensor, destination_ids_N: Tensor | None
) -> None:
    """`copy_pages` on a GPU."""
    num_pages = _check(source, source_ids_N, destination, destination_ids_N)
    if num_pages == 0 or source[0].numel() == 0:
        return
    source_words, destination_words = _as_words(source, destination)
    page_words = source_words.shape[1]
    block = min(2048, triton.next_power_of_2(page_words))
    grid = (num_pages, triton.cdiv(page_words, block))
    copy_pages_kernel[grid](
        source_words,
        source_words if source_ids_N is None else source_ids_N,
        destination_words,
        destination_words if destination_ids_N is None else destination_ids_N,
        page_words,
        source_words.stride(0),
        destination_words.stride(0),
        HAS_SOURCE_IDS=source_ids_N is not None,
        HAS_DESTINATION_IDS=destination_ids_N is not None,
        BLOCK=block,
        num_warps=8,
    )


def copy_pages_reference(
    source: Tensor, source_ids_N: Tensor | None, destination: Tensor, destination_ids_N: Tensor | None
) -> None:
    """`copy_pages` in plain torch."""
    if destination_ids_N is not None:
        moved = source if source_ids_N is None else torch.index_select(source, 0, source_ids_N)
        destination.index_copy_(0, destination_ids_N, moved)
    elif source_ids_N is not None:
        torch.index_select(source, 0, source_ids_N, out=destination)
    else:
        destination.copy_(source)


def _check(
    source: Tensor, source_ids_N: Tensor | None, destination: Tensor, destination_ids_N: Tensor | None
) -> int:
    """The number of pages to copy. Raises ValueError for sides that do not fit each other."""
    sides = ((source, source_ids_N), (destination, destination_ids_N))
    for ids in (source_ids_N, destination_ids_N):
        if ids is None:
            continue
        if ids.dim() != 1 or ids.dtype != torch.int64 or not ids.is_contiguous():
            raise ValueError(f"page ids must be contiguous int64 [N], got {ids.dtype} {tuple(ids.shape)}")
        if ids.device != source.device:
            raise ValueError(f"page ids must be on {source.device} like the source, got {ids.device}")
    num_pages, num_written = (len(pages if ids is None else ids) for pages, ids in sides)
    if num_pages != num_written:
        raise ValueError(f"{num_pages} pages cannot go to {num_written}")
    if source.dtype != destination.dtype or source.shape[1:] != destination.shape[1:]:
        raise ValueError(
            f"pages must be alike, got {source.dtype} {tuple(source.shape[1:])} "
            f"and {destination.dtype} {tuple(destination.shape[1:])}"
        )
    if source.is_cuda != destination.is_cuda:
        raise ValueError(f"pages cannot go from {source.device} to {destination.device}")
    return num_pages


def _as_words(*pages: Tensor) -> tuple[Tensor, ...]:
    """Each [N, ...] tensor as [N, words per page] over the same memory, in the widest word that all allow.

    Raises ValueError when the elements of one page are not adjacent.
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


def _as_bytes(pages: Tensor) -> Tensor:
    if not pages[:1].is_contiguous():
        raise ValueError(f"the elements of a page must be adjacent, got strides {pages.stride()}")
    return pages.view(pages.shape[0], -1).view(torch.uint8)
