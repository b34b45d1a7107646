"""The rows of pages of keys and values, and what every op checks of such pages.

A row of a page is the key, or the value, of one token and head. In pools of int8 and float8_e4m3fn a row is D
codes and SCALE_BYTES of their scale in bf16; an element is code * scale. Codes and scales have the same bytes
on every device.

Pages have two planes, of keys and of values; those of latent attention have one. There a row is the value,
which is also a part of the key, and the rotated part of the key after it.

Shapes: B sequences, H query heads, K kv heads, D head dim, V value dim (D with two planes), P pages, S page
size, L planes, R elements of a row: D, D + SCALE_BYTES, or V + D with one plane.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from baton.kernels.triton.codes import float_to_fp8, fp8_as_half, scaled_to_int8
from baton.kernels.triton.kernel import jit, tl

SCALE_BYTES: Final = 2
SMALLEST_SCALE: Final = 2.0**-126  # bf16 has fewer bits below
LARGEST_CODE: Final = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
ROW_FORMATS: Final = {torch.int8: 1, torch.float8_e4m3fn: 2}  # as `enum row_format` in csrc/kv_rows.h


def encode_rows(heads: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., D] -> [..., D + SCALE_BYTES] uint8: codes of `dtype`, then their scale.

    The largest element gets the largest code, so a row that was decoded in bf16 or fp32 is not rounded any
    further. A row whose scale would be below SMALLEST_SCALE decodes to zeros, and one with an element that is
    not finite to NaN.
    """
    heads = heads.float()
    quotient = heads.abs().amax(dim=-1, keepdim=True) / LARGEST_CODE[dtype]
    scale = ((quotient.view(torch.int32) + 0x8000) >> 16 << 16).view(torch.float32)
    scale = scale.where(quotient >= SMALLEST_SCALE, 0)
    scale = scale.where(heads.isfinite().all(dim=-1, keepdim=True), torch.nan)
    codes = (heads / scale).where(scale > 0, 0)
    codes = (codes.round() if dtype == torch.int8 else codes).to(dtype)
    return torch.cat((codes.view(torch.uint8), scale.bfloat16().view(torch.uint8)), dim=-1)


def decode_rows(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., D + SCALE_BYTES] rows of codes -> [..., D] elements of `dtype`."""
    head_dim = rows.shape[-1] - SCALE_BYTES
    scale = rows[..., head_dim:].contiguous().view(torch.bfloat16)
    return (rows[..., :head_dim].float() * scale.float()).to(dtype)


def round_rows(rows: Tensor, codes: torch.dtype) -> Tensor:
    """[..., D] -> the same shape and dtype: the rows as they are after `encode_rows` and `decode_rows`."""
    return decode_rows(encode_rows(rows, codes).view(codes), rows.dtype)


def row_format(kv_pages: Tensor, dtype: torch.dtype, head_dim: int) -> int:
    """The `enum row_format` of csrc/kv_rows.h of pages that take heads of `dtype` and `head_dim`.

    ValueError for pages of other heads.
    """
    width = head_dim + SCALE_BYTES if kv_pages.dtype in ROW_FORMATS else head_dim
    if kv_pages.shape[-1] != width or kv_pages.dtype not in (dtype, *ROW_FORMATS):
        found = f"{kv_pages.dtype} {tuple(kv_pages.shape)}"
        raise ValueError(f"kv_pages {found} do not take heads of {dtype} and {head_dim} elements")
    return ROW_FORMATS.get(kv_pages.dtype, 0)


@jit
def store_rows(
    row_ptr_K1: tl.tensor,
    first_KD: tl.tensor,  # the first halves of the heads, in their own dtype
    second_KD: tl.tensor,
    dim_D: tl.tensor,
    inside_K1: tl.tensor,
    inside_KD: tl.tensor,
    half: int,  # D // 2
    ROW_FORMAT: tl.constexpr,
) -> None:
    """Write keys, or values, as rows of a page; the codes are those of `encode_rows`."""
    if ROW_FORMAT > 0:
        IS_INT8: tl.constexpr = ROW_FORMAT == 1
        first_KD, second_KD = first_KD.to(tl.float32), second_KD.to(tl.float32)
        # Magnitudes as integers are ordered as the values, NaN last.
        first_bits_KD = first_KD.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        second_bits_KD = second_KD.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        largest_K1 = tl.max(tl.maximum(first_bits_KD, second_bits_KD), axis=1, keep_dims=True)
        is_finite_K1 = largest_K1 < 0x7F800000
        quotient_K1 = tl.div_rn(largest_K1.to(tl.float32, bitcast=True), 127.0 if IS_INT8 else 448.0)
        quotient_bits_K1 = quotient_K1.to(tl.int32, bitcast=True)
        has_codes_K1 = is_finite_K1 & (quotient_bits_K1 >= 0x800000)  # SMALLEST_SCALE
        scale_bits_K1 = tl.where(has_codes_K1, (quotient_bits_K1 + 0x8000) >> 16, 0)  # bf16
        divisor_K1 = tl.where(has_codes_K1, (scale_bits_K1 << 16).to(tl.float32, bitcast=True), 1.0)
        first_KD = tl.div_rn(tl.where(has_codes_K1, first_KD, 0.0), divisor_K1)
        second_KD = tl.div_rn(tl.where(has_codes_K1, second_KD, 0.0), divisor_K1)
        if IS_INT8:
            first_KD, second_KD = scaled_to_int8(first_KD, 1.0), scaled_to_int8(second_KD, 1.0)
        else:
            first_KD, second_KD = float_to_fp8(first_KD), float_to_fp8(second_KD)
        scale_ptr_K1 = (row_ptr_K1 + 2 * half).to(tl.pointer_type(tl.int16))
        tl.store(scale_ptr_K1, tl.where(is_finite_K1, scale_bits_K1, 0x7FC0).to(tl.int16), mask=inside_K1)
    row_ptr_KD = row_ptr_K1 + dim_D[None, :]
    tl.store(row_ptr_KD, first_KD, mask=inside_KD)
    tl.store(row_ptr_KD + half, second_KD, mask=inside_KD)


@jit
def row_elements(codes: tl.tensor, scales: tl.tensor, ROW_FORMAT: tl.constexpr) -> tl.tensor:
    """The elements, fp32, of rows of codes and their scales."""
    IS_FP8: tl.constexpr = ROW_FORMAT == 2
    scales = scales.to(tl.float32)
    if IS_FP8:
        return fp8_as_half(codes).to(tl.float32) * (scales * 256.0)  # FP8_AS_HALF
    else:
        return codes.to(tl.float32) * scales


def as_stored(kv_pages: Tensor) -> Tensor:
    """The pages as Triton reads them: codes of either format are int8."""
    return kv_pages.view(torch.int8) if kv_pages.dtype in ROW_FORMATS else kv_pages


def check_paged_kv(
    query_XHD: Tensor, kv_pages: Tensor, page_table_BP: Tensor, context_lens_B: Tensor, window: int | None
) -> None:
    """ValueError where attention would read past a tensor or misread it; `row_format` checks the rows."""
    if query_XHD.dim() != 3 or query_XHD.stride(2) != 1:
        raise ValueError(f"query must be [_, H, D] with adjacent D, got {tuple(query_XHD.shape)}")
    _, num_heads, head_dim = query_XHD.shape
    if kv_pages.dim() != 5 or kv_pages.stride(4) != 1 or kv_pages.shape[1] not in (1, 2):
        raise ValueError(f"kv_pages must be [P, L, K, S, R] with adjacent R, got {tuple(kv_pages.shape)}")
    _, _, num_kv_heads, page_size, _ = kv_pages.shape
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads of {head_dim} cannot attend over {num_kv_heads} kv heads")
    if page_size & (page_size - 1):
        raise ValueError(f"page size must be a power of two, got {page_size}")
    if page_table_BP.dim() != 2 or page_table_BP.stride(1) != 1 or page_table_BP.dtype != torch.int32:
        found = f"{page_table_BP.dtype} {tuple(page_table_BP.shape)}"
        raise ValueError(f"page_table must be int32 [B, pages] with adjacent pages, got {found}")
    if context_lens_B.shape != page_table_BP.shape[:1] or context_lens_B.dtype != torch.int32:
        found = f"{context_lens_B.dtype} {tuple(context_lens_B.shape)}"
        raise ValueError(f"context_lens must be int32 [{page_table_BP.shape[0]}], got {found}")
    if not query_XHD.device == kv_pages.device == page_table_BP.device == context_lens_B.device:
        raise ValueError(f"kv_pages on {kv_pages.device} and the rest must be on {query_XHD.device}")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1 key or None, got {window}")


def check_value_dim(kv_pages: Tensor, head_dim: int, value_dim: int | None) -> int:
    """The value dim that a GPU kernel works with: D with two planes, less with one. ValueError for others."""
    value_dim = value_dim or head_dim
    if (kv_pages.shape[1] == 2) != (value_dim == head_dim) or value_dim > head_dim:
        raise ValueError(
            f"pages {tuple(kv_pages.shape)} do not have values of {value_dim} and keys of {head_dim} elements"
        )
    if kv_pages.shape[1] == 1 and kv_pages.dtype in ROW_FORMATS:
        raise ValueError(f"pages of one plane hold no codes, got {kv_pages.dtype}")
    return value_dim


def kv_strides(kv_pages: Tensor) -> tuple[int, int, int, int]:
    """The strides of pages, values, heads and slots; that of values is 0 with one plane."""
    page, value, head, slot, _ = kv_pages.stride()
    return page, value if kv_pages.shape[1] == 2 else 0, head, slot
