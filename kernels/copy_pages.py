"""Pages from one pool straight into another on a GPU. Shapes: P pages, N pages moved."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.kernels.page_words import as_words
from baton.kernels.triton_import import kernel, tl, triton


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
