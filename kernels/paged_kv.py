"""What the ops that read paged keys and values share outside Triton.

Shapes: B sequences, H query heads, K kv heads, D head dim, P pages, S page size, N keys.
"""

import torch
from torch import Tensor


def check_paged_kv(
    query_XHD: Tensor, kv_pages: Tensor, page_table_BP: Tensor, context_lens_B: Tensor, window: int | None
) -> None:
    """Raises ValueError where an attention over pages would read past a tensor or misread it."""
    if query_XHD.dim() != 3 or query_XHD.stride(2) != 1:
        raise ValueError(f"query must be [_, H, D] with adjacent D, got {tuple(query_XHD.shape)}")
    _, num_heads, head_dim = query_XHD.shape
    if kv_pages.dim() != 5 or kv_pages.stride(4) != 1 or kv_pages.shape[1] != 2:
        raise ValueError(f"kv_pages must be [P, 2, K, S, D] with adjacent D, got {tuple(kv_pages.shape)}")
    _, _, num_kv_heads, page_size, kv_head_dim = kv_pages.shape
    if kv_head_dim != head_dim or num_heads % num_kv_heads:
        got = f"{num_kv_heads} kv heads of {kv_head_dim}"
        raise ValueError(f"{num_heads} query heads of {head_dim} cannot attend over {got}")
    if page_size & (page_size - 1):
        raise ValueError(f"page size must be a power of two, got {page_size}")
    if page_table_BP.dim() != 2 or page_table_BP.stride(1) != 1 or page_table_BP.dtype != torch.int32:
        found = f"{page_table_BP.dtype} {tuple(page_table_BP.shape)}"
        raise ValueError(f"page_table must be int32 [B, pages] with adjacent pages, got {found}")
    if context_lens_B.shape != page_table_BP.shape[:1] or context_lens_B.dtype != torch.int32:
        found = f"{context_lens_B.dtype} {tuple(context_lens_B.shape)}"
        raise ValueError(f"context_lens must be int32 [{page_table_BP.shape[0]}], got {found}")
    if query_XHD.dtype != kv_pages.dtype:
        raise ValueError(f"query and kv_pages must share a dtype, got {query_XHD.dtype}, {kv_pages.dtype}")
    if not query_XHD.device == kv_pages.device == page_table_BP.device == context_lens_B.device:
        raise ValueError(f"kv_pages on {kv_pages.device} and the rest must be on {query_XHD.device}")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1 key or None, got {window}")


def dense_kv(kv_pages: Tensor, page_table_P: Tensor, first: int, last: int) -> tuple[Tensor, Tensor]:
    """(keys, values), each [K, N, D]: a contiguous copy of the tokens [first, last) of one sequence."""
    page_size = kv_pages.shape[3]
    first_page = first // page_size
    page_ids = page_table_P[first_page : -(-last // page_size)]
    copy = kv_pages.permute(1, 2, 0, 3, 4)[:, :, page_ids].flatten(2, 3)
    kept = copy[:, :, first - first_page * page_size : last - first_page * page_size]
    return kept[0], kept[1]
