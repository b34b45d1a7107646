"""A pool of pages seen as rows of machine words, so that pages of any dtype move alike."""

import torch
from torch import Tensor

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
