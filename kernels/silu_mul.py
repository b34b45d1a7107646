"""The gate of a SwiGLU feed-forward layer. Shapes: T tokens, F feed-forward width."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.kernels import native
from baton.kernels.triton_import import jit, kernel, runs_triton, tl, triton


def silu_mul(gate_up_T2F: Tensor) -> Tensor:
    """`silu(gate) * up`, where the gate is the first half of the last dimension.

    gate_up_T2F: [T, 2 * F], rows may be strided. silu is fp32, rounded to the dtype before the
    product. Returns a new contiguous [T, F].
    """
    if runs_triton(gate_up_T2F):
        return silu_mul_triton(gate_up_T2F)
    if native.handles(gate_up_T2F.dtype) and gate_up_T2F.is_contiguous():
        return _silu_mul_native(gate_up_T2F)
    return silu_mul_reference(gate_up_T2F)


@jit
def silu_times(gate: tl.tensor, up: tl.tensor) -> tl.tensor:
    """silu(gate) * up, fp32; silu is rounded to the dtype of the gate."""
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    return silu.to(tl.float32) * up.to(tl.float32)


@kernel()
def silu_mul_kernel(
    gate_up_ptr: tl.tensor,  # [T, 2 * F]
    out_ptr: tl.tensor,  # [T, F], contiguous
    width: int,  # F
    stride_token: int,
    BLOCK_F: tl.constexpr,
) -> None:
    """One program computes one block of columns of one token."""
    token = tl.program_id(0).to(tl.int64)  # T * 2F may pass 2^31
    column_F = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    inside_F = column_F < width
    gate_ptr_F = gate_up_ptr + token * stride_token + column_F
    gate_F = tl.load(gate_ptr_F, mask=inside_F, other=0.0)
    up_F = tl.load(gate_ptr_F + width, mask=inside_F, other=0.0)
    product_F = silu_times(gate_F, up_F).to(gate_F.dtype)
    tl.store(out_ptr + token * width + column_F, product_F, mask=inside_F)


def silu_mul_triton(gate_up_T2F: Tensor) -> Tensor:
    """`silu_mul` on a GPU."""
    _check(gate_up_T2F)
    num_tokens, width = gate_up_T2F.shape[0], gate_up_T2F.shape[1] // 2
    out_TF = gate_up_T2F.new_empty(num_tokens, width)
    if out_TF.numel() == 0:
        return out_TF
    block_F = min(1024, triton.next_power_of_2(width))
    grid = (num_tokens, triton.cdiv(width, block_F))
    silu_mul_kernel[grid](gate_up_T2F, out_TF, width, gate_up_T2F.stride(0), BLOCK_F=block_F)
    return out_TF


def _check(gate_up_T2F: Tensor) -> None:
    if gate_up_T2F.dim() != 2 or gate_up_T2F.shape[1] % 2 or gate_up_T2F.stride(1) != 1:
        raise ValueError(f"gate_up must be [T, 2 * F] with adjacent columns, got {tuple(gate_up_T2F.shape)}")


def silu_mul_reference(gate_up_T2F: Tensor) -> Tensor:
    """`silu_mul` in plain torch."""
    gate_TF, up_TF = gate_up_T2F.chunk(2, dim=-1)
    return torch.mul(F.silu(gate_TF), up_TF)


def _silu_mul_native(gate_up_T2F: Tensor) -> Tensor:
    num_tokens, width = gate_up_T2F.shape[0], gate_up_T2F.shape[1] // 2
    out_TF = torch.empty((num_tokens, width), dtype=gate_up_T2F.dtype)
    native.function("baton_silu_mul", "ppnni")(
        gate_up_T2F.data_ptr(), out_TF.data_ptr(), num_tokens, width, native.DTYPE_CODES[gate_up_T2F.dtype]
    )
    return out_TF
