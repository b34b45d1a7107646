"""Root-mean-square normalisation, alone or fused with the residual addition before it.

Shapes: T tokens, H heads, E normalised width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton.kernels import native
from baton.kernels.triton.kernel import kernel, runs_triton, tl, triton


def rms_norm(x_TE: Tensor, weight_E: Tensor, eps: float, residual_TE: Tensor | None = None) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension, rounded as Hugging Face's Llama does.

    x_TE: [T, E], or [T, H, E] to normalise every head by itself; rows may be strided. Mean and
    quotient are fp32; the quotient is rounded to the dtype of x before the product with the weight, except
    with a weight in fp32.
    residual_TE: `residual += x` comes first, in place, rounded to its dtype; the sum is normalised.
    Returns a new contiguous tensor of the shape of x.
    """
    if runs_triton(x_TE):
        return rms_norm_triton(x_TE, weight_E, eps, residual_TE)
    if _native_handles(x_TE, weight_E, residual_TE):
        return _rms_norm_native(x_TE, weight_E, eps, residual_TE)
    return rms_norm_reference(x_TE, weight_E, eps, residual_TE)


@kernel(varying=("num_rows",))
def rms_norm_kernel(
    x_ptr: tl.tensor,  # [T, H, E]; row r is token r // H, head r % H
    residual_ptr: tl.tensor,  # [T, H, E], read and written when HAS_RESIDUAL
    weight_ptr: tl.tensor,  # [E]
    out_ptr: tl.tensor,  # [T * H, E], contiguous
    num_rows: int,
    num_heads: int,
    width: int,
    eps: float,
    x_stride_token: int,
    x_stride_head: int,
    residual_stride_token: int,
    residual_stride_head: int,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
) -> None:
    """One program norms one row, after adding it to the residual where there is one."""
    row_R = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column_E = tl.arange(0, BLOCK_E)
    inside_RE = (row_R[:, None] < num_rows) & (column_E[None, :] < width)
    # int64: rows times width may pass 2^31.
    token_R = (row_R // num_heads).to(tl.int64)
    head_R = row_R % num_heads
    x_offset_R = token_R * x_stride_token + head_R * x_stride_head
    x_RE = tl.load(x_ptr + x_offset_R[:, None] + column_E[None, :], mask=inside_RE, other=0.0)
    dtype = x_RE.dtype
    x_RE = x_RE.to(tl.float32)
    if HAS_RESIDUAL:
        residual_offset_R = token_R * residual_stride_token + head_R * residual_stride_head
        residual_ptr_RE = residual_ptr + residual_offset_R[:, None] + column_E[None, :]
        residual_RE = tl.load(residual_ptr_RE, mask=inside_RE, other=0.0).to(tl.float32)
        rounded_RE = (x_RE + residual_RE).to(dtype)
        tl.store(residual_ptr_RE, rounded_RE, mask=inside_RE)
        x_RE = rounded_RE.to(tl.float32)
    mean_square_R = tl.sum(x_RE * x_RE, axis=1) / width
    normed_RE = x_RE * tl.rsqrt(mean_square_R + eps)[:, None]
    if weight_ptr.dtype.element_ty != tl.float32:
        normed_RE = normed_RE.to(dtype).to(tl.float32)
    weight_E = tl.load(weight_ptr + column_E, mask=column_E < width, other=0.0)
    scaled_RE = (normed_RE * weight_E.to(tl.float32)[None, :]).to(dtype)
    out_offset_R = row_R.to(tl.int64) * width
    tl.store(out_ptr + out_offset_R[:, None] + column_E[None, :], scaled_RE, mask=inside_RE)


def rms_norm_triton(x_TE: Tensor, weight_E: Tensor, eps: float, residual_TE: Tensor | None = None) -> Tensor:
    """`rms_norm` on a GPU."""
    residual = x_TE if residual_TE is None else residual_TE
    _check(x_TE, residual, weight_E)
    out_TE = torch.empty(x_TE.shape, dtype=x_TE.dtype, device=x_TE.device)
    if out_TE.numel() == 0:
        return out_TE
    width = x_TE.shape[-1]
    num_heads = x_TE.shape[1] if x_TE.dim() == 3 else 1
    num_rows = x_TE.shape[0] * num_heads
    block_E = triton.next_power_of_2(width)
    block_rows = max(1, 1024 // block_E)
    rms_norm_kernel[(triton.cdiv(num_rows, block_rows),)](
        x_TE,
        residual,
        weight_E,
        out_TE,
        num_rows,
        num_heads,
        width,
        eps,
        *_row_strides(x_TE),
        *_row_strides(residual),
        HAS_RESIDUAL=residual_TE is not None,
        BLOCK_ROWS=block_rows,
        BLOCK_E=block_E,
        num_warps=min(16, max(4, block_E // 512)),
    )
    return out_TE


def _row_strides(x_TE: Tensor) -> tuple[int, int]:
    return x_TE.stride(0), x_TE.stride(1) if x_TE.dim() == 3 else 0


def _check(x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor) -> None:
    if x_TE.dim() not in (2, 3) or x_TE.stride(-1) != 1:
        raise ValueError(f"x must be [T, E] or [T, H, E] with adjacent E, got {tuple(x_TE.shape)}")
    if residual_TE.shape != x_TE.shape or residual_TE.stride(-1) != 1:
        raise ValueError(f"residual must be {tuple(x_TE.shape)} like x, got {tuple(residual_TE.shape)}")
    if weight_E.shape != x_TE.shape[-1:] or not weight_E.is_contiguous():
        raise ValueError(f"weight must be [{x_TE.shape[-1]}], got {tuple(weight_E.shape)}")
    if x_TE.dtype != residual_TE.dtype or weight_E.dtype not in (x_TE.dtype, torch.float32):
        found = (x_TE.dtype, residual_TE.dtype, weight_E.dtype)
        raise ValueError(f"x, residual and weight must share a dtype, got {found}")
    if not x_TE.device == residual_TE.device == weight_E.device:
        raise ValueError(f"devices differ: {x_TE.device}, {residual_TE.device}, {weight_E.device}")


def rms_norm_reference(
    x_TE: Tensor, weight_E: Tensor, eps: float, residual_TE: Tensor | None = None
) -> Tensor:
    """`rms_norm` in plain torch."""
    wide_TE = (x_TE if residual_TE is None else residual_TE.add_(x_TE)).float()
    mean_square_T1 = wide_TE.square().mean(-1, keepdim=True)
    normed_TE = wide_TE * torch.rsqrt(mean_square_T1 + eps)
    if weight_E.dtype == torch.float32:
        return (normed_TE * weight_E).to(x_TE.dtype)
    return normed_TE.to(x_TE.dtype) * weight_E


def _native_handles(x_TE: Tensor, weight_E: Tensor, residual_TE: Tensor | None) -> bool:
    return (
        native.handles(x_TE.dtype)
        and weight_E.dtype in (x_TE.dtype, torch.float32)
        and x_TE.shape[-1] == weight_E.shape[0]
        and x_TE.stride(-1) == 1
        and x_TE.dim() in (2, 3)
        and (residual_TE is None or (x_TE.is_contiguous() and residual_TE.is_contiguous()))
    )


def _rms_norm_native(x_TE: Tensor, weight_E: Tensor, eps: float, residual_TE: Tensor | None) -> Tensor:
    rows_TE, shape, element_bytes = x_TE, x_TE.shape, x_TE.element_size()
    if residual_TE is not None:  # contiguous as x: it has the strides of x
        if residual_TE.shape != shape or residual_TE.dtype != x_TE.dtype:
            raise ValueError(f"residual must be {x_TE.dtype} {tuple(shape)} like x")
        rows_TE = residual_TE
    num_heads, row_bytes = shape[1] if len(shape) == 3 else 1, shape[-1] * element_bytes
    out_TE = torch.empty(shape, dtype=x_TE.dtype)
    native.function("baton_rms_norm", "ppnnppnnnnnfii")(
        None if residual_TE is None else x_TE.data_ptr(),
        rows_TE.data_ptr(),
        x_TE.stride(0) * element_bytes,
        x_TE.stride(1) * element_bytes,
        weight_E.data_ptr(),
        out_TE.data_ptr(),
        num_heads * row_bytes,
        row_bytes,
        shape[0],
        num_heads,
        shape[-1],
        eps,
        native.DTYPE_CODES[x_TE.dtype],
        native.DTYPE_CODES[weight_E.dtype],
    )
    return out_TE
