"""The gate of a feed-forward layer. Shapes: T tokens, F feed-forward width."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.kernels import native
from baton.kernels.triton.kernel import jit, kernel, runs_triton, tl, triton


class Activation(NamedTuple):
    """The function of gate and up; `kind` as `enum activation_kind` in csrc/ops.h."""

    kind: int
    alpha: float = 1.0
    limit: float = 0.0


SILU: Final = Activation(0)
GELU_TANH: Final = Activation(1)


def clamped_swiglu(alpha: float, limit: float) -> Activation:
    """gate * sigmoid(alpha * gate) * (up + 1), with the gate at most `limit` and up in [-limit, limit]."""
    return Activation(2, alpha, limit)


def gated(gate_up_T2F: Tensor, activation: Activation = SILU) -> Tensor:
    """`activation(gate) * up`, where the gate is the first half of the last dimension.

    gate_up_T2F: [T, 2 * F], rows may be strided. SiLU and GELU are fp32, rounded to the dtype before the
    product. Returns a new contiguous [T, F].
    """
    if runs_triton(gate_up_T2F):
        return gated_triton(gate_up_T2F, activation)
    if native.handles(gate_up_T2F.dtype) and gate_up_T2F.is_contiguous():
        out_TF = torch.empty((len(gate_up_T2F), gate_up_T2F.shape[1] // 2), dtype=gate_up_T2F.dtype)
        return _run_native(gate_up_T2F, out_TF, activation, has_up=True)
    return gated_reference(gate_up_T2F, activation)


@jit
def gated_product(
    gate: tl.tensor, up: tl.tensor, KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr
) -> tl.tensor:
    """activation(gate) * up, fp32; SiLU and GELU are rounded to the dtype of the gate."""
    wide = gate.to(tl.float32)
    if KIND == 2:
        wide = tl.minimum(wide, LIMIT)
        clamped = tl.minimum(tl.maximum(up.to(tl.float32), -LIMIT), LIMIT)
        product = wide / (1.0 + tl.exp(-ALPHA * wide)) * (clamped + 1.0)
    else:
        # GELU is approximated by tanh: (1 + tanh(z)) / 2 is sigmoid(2 z).
        z2 = 1.5957691216057308 * (wide + 0.044715 * wide * wide * wide) if KIND == 1 else wide
        activated = (wide / (1.0 + tl.exp(-z2))).to(gate.dtype)
        product = activated.to(tl.float32) * up.to(tl.float32)
    return product


@kernel()
def gated_kernel(
    gate_up_ptr: tl.tensor,  # [T, 2 * F]
    out_ptr: tl.tensor,  # [T, F], contiguous
    width: int,  # F
    stride_token: int,
    KIND: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_F: tl.constexpr,
) -> None:
    """One program computes one block of columns of one token."""
    token = tl.program_id(0).to(tl.int64)  # T * 2F may pass 2^31
    column_F = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    inside_F = column_F < width
    gate_ptr_F = gate_up_ptr + token * stride_token + column_F
    gate_F = tl.load(gate_ptr_F, mask=inside_F, other=0.0)
    up_F = tl.load(gate_ptr_F + width, mask=inside_F, other=0.0)
    product_F = gated_product(gate_F, up_F, KIND, ALPHA, LIMIT).to(gate_F.dtype)
    tl.store(out_ptr + token * width + column_F, product_F, mask=inside_F)


def gated_triton(gate_up_T2F: Tensor, activation: Activation = SILU) -> Tensor:
    """`gated` on a GPU."""
    _check(gate_up_T2F)
    num_tokens, width = gate_up_T2F.shape[0], gate_up_T2F.shape[1] // 2
    out_TF = gate_up_T2F.new_empty(num_tokens, width)
    if out_TF.numel() == 0:
        return out_TF
    block_F = min(1024, triton.next_power_of_2(width))
    grid = (num_tokens, triton.cdiv(width, block_F))
    gated_kernel[grid](
        gate_up_T2F, out_TF, width, gate_up_T2F.stride(0), **constants(activation), BLOCK_F=block_F
    )
    return out_TF


def constants(activation: Activation) -> dict[str, float]:
    """The compile-time constants of `gated_product`."""
    return {"KIND": activation.kind, "ALPHA": activation.alpha, "LIMIT": activation.limit}


def _check(gate_up_T2F: Tensor) -> None:
    if gate_up_T2F.dim() != 2 or gate_up_T2F.shape[1] % 2 or gate_up_T2F.stride(1) != 1:
        raise ValueError(f"gate_up must be [T, 2 * F] with adjacent columns, got {tuple(gate_up_T2F.shape)}")


def gated_reference(gate_up_T2F: Tensor, activation: Activation = SILU) -> Tensor:
    """`gated` in plain torch."""
    gate_TF, up_TF = gate_up_T2F.chunk(2, dim=-1)
    kind, alpha, limit = activation
    if kind == GELU_TANH.kind:
        return F.gelu(gate_TF, approximate="tanh") * up_TF
    if kind == SILU.kind:
        return F.silu(gate_TF) * up_TF
    gate_TF, up_TF = gate_TF.float().clamp(max=limit), up_TF.float().clamp(-limit, limit)
    return (gate_TF * torch.sigmoid(alpha * gate_TF) * (up_TF + 1)).to(gate_up_T2F.dtype)


def _run_native(x: Tensor, out_TF: Tensor, activation: Activation, *, has_up: bool) -> Tensor:
    native.function("baton_gated", "ppnniiffi")(
        x.data_ptr(), out_TF.data_ptr(), *out_TF.shape, has_up, *activation, native.DTYPE_CODES[x.dtype]
    )
    return out_TF


# Without up, and without a gate. The native ops are there because torch computes the last elements of a
# tensor in another way than the others on a CPU: a token's values would depend on its batch.


def gelu_tanh(x_TF: Tensor) -> Tensor:
    """GELU by its approximation with tanh; x_TF: contiguous."""
    if x_TF.is_cuda or not native.handles(x_TF.dtype):
        return F.gelu(x_TF, approximate="tanh")
    return _run_native(x_TF, torch.empty_like(x_TF), GELU_TANH, has_up=False)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap), in place. x: fp32."""
    if x.is_cuda or not native.handles(x.dtype) or not x.is_contiguous():
        return x.div_(cap).tanh_().mul_(cap)
    native.function("baton_soft_cap", "pnf")(x.data_ptr(), x.numel(), cap)
    return x
