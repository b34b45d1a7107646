"""Rotary position embedding, rotate-half (NeoX) order.

Shapes: T tokens, H query heads, K kv heads, D head dim, M positions of the table, which an engine computes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton.kernels import native
from baton.kernels.triton_import import jit, runs_triton, tl


def rope(query_THD: Tensor, key_TKD: Tensor, cos_sin_MD: Tensor, positions_T: Tensor) -> None:
    """Rotate queries and keys in place to their positions, on a CPU; `rope_and_store` serves GPUs too.

    query_THD, key_TKD: any strides over tokens and heads, so views of one fused projection will do.
    cos_sin_MD: fp32 [M, D]; cosines in the first half of a row, sines in the second.
    positions_T: integers in [0, M); the caller guarantees that. The rotation is fp32, rounded once.
    """
    if runs_triton(query_THD):
        raise ValueError("rope takes tensors of a CPU; rope_and_store takes those of a GPU")
    if _native_handles(query_THD) and _native_handles(key_TKD):
        for heads in (query_THD, key_TKD):
            _rotate_native(heads, cos_sin_MD, positions_T)
    else:
        rope_reference(query_THD, key_TKD, cos_sin_MD, positions_T)


@jit
def rotated(
    x_ptr_HD: tl.tensor,  # [heads, D // 2]: the first halves
    inside_HD: tl.tensor,
    cos_D: tl.tensor,  # [BLOCK_HALF] fp32
    sin_D: tl.tensor,
    half: int,  # D // 2
) -> tuple[tl.tensor, tl.tensor]:
    """(first halves, second halves) of the heads of one token after the rotation, in their own dtype."""
    first_HD = tl.load(x_ptr_HD, mask=inside_HD, other=0.0)
    dtype = first_HD.dtype
    first_HD = first_HD.to(tl.float32)
    second_HD = tl.load(x_ptr_HD + half, mask=inside_HD, other=0.0).to(tl.float32)
    rotated_first_HD = first_HD * cos_D[None, :] - second_HD * sin_D[None, :]
    rotated_second_HD = second_HD * cos_D[None, :] + first_HD * sin_D[None, :]
    return rotated_first_HD.to(dtype), rotated_second_HD.to(dtype)


def check_rope(query_THD: Tensor, key_TKD: Tensor, cos_sin_MD: Tensor, positions_T: Tensor) -> None:
    """Raise ValueError for shapes, strides, dtypes or devices that the GPU kernel does not take."""
    if query_THD.dim() != 3 or query_THD.shape[2] % 2 or query_THD.stride(2) != 1:
        raise ValueError(f"query must be [T, H, D], D even and adjacent, got {tuple(query_THD.shape)}")
    num_tokens, _, head_dim = query_THD.shape
    if key_TKD.dim() != 3 or (key_TKD.shape[0], key_TKD.shape[2]) != (num_tokens, head_dim):
        raise ValueError(f"key must be [{num_tokens}, K, {head_dim}], got {tuple(key_TKD.shape)}")
    if key_TKD.stride(2) != 1 or key_TKD.dtype != query_THD.dtype:
        raise ValueError(f"key must have adjacent D and dtype {query_THD.dtype}, got {key_TKD.dtype}")
    if cos_sin_MD.dtype != torch.float32 or not cos_sin_MD.is_contiguous():
        raise ValueError(f"cos_sin must be contiguous float32, got {cos_sin_MD.dtype}")
    if cos_sin_MD.dim() != 2 or cos_sin_MD.shape[1] != head_dim:
        raise ValueError(f"cos_sin must be [M, {head_dim}], got {tuple(cos_sin_MD.shape)}")
    if positions_T.shape != (num_tokens,) or not positions_T.is_contiguous():
        raise ValueError(f"positions must be contiguous [{num_tokens}], got {tuple(positions_T.shape)}")
    if not query_THD.device == key_TKD.device == cos_sin_MD.device == positions_T.device:
        raise ValueError(f"cos_sin on {cos_sin_MD.device} and the rest must be on {query_THD.device}")


def rope_reference(query_THD: Tensor, key_TKD: Tensor, cos_sin_MD: Tensor, positions_T: Tensor) -> None:
    """`rope` in plain torch."""
    cos_T1D, sin_T1D = cos_sin_MD[positions_T].unsqueeze(1).chunk(2, dim=-1)
    for x_TND in (query_THD, key_TKD):
        first_TND, second_TND = x_TND.float().chunk(2, dim=-1)
        rotated_first_TND = first_TND * cos_T1D - second_TND * sin_T1D
        rotated_second_TND = second_TND * cos_T1D + first_TND * sin_T1D
        x_TND.copy_(torch.cat((rotated_first_TND, rotated_second_TND), dim=-1))


def _native_handles(heads_THD: Tensor) -> bool:
    head_dim = heads_THD.shape[2]
    return native.handles(heads_THD.dtype) and heads_THD.stride()[1:] == (head_dim, 1)


def _rotate_native(heads_THD: Tensor, cos_sin_MD: Tensor, positions_T: Tensor) -> None:
    num_tokens, num_heads, head_dim = heads_THD.shape
    if cos_sin_MD.dtype != torch.float32 or cos_sin_MD.shape[1] != head_dim or not cos_sin_MD.is_contiguous():
        raise ValueError(f"cos_sin must be contiguous float32 [M, {head_dim}], got {tuple(cos_sin_MD.shape)}")
    if (
        positions_T.dtype != torch.int64
        or positions_T.shape != (num_tokens,)
        or not positions_T.is_contiguous()
    ):
        found = f"{positions_T.dtype} {tuple(positions_T.shape)}"
        raise ValueError(f"positions must be contiguous int64 [{num_tokens}], got {found}")
    native.function("baton_rope", "pnnppnni")(
        heads_THD.data_ptr(),
        heads_THD.stride(0) * heads_THD.element_size(),
        num_heads,
        cos_sin_MD.data_ptr(),
        positions_T.data_ptr(),
        num_tokens,
        head_dim,
        native.DTYPE_CODES[heads_THD.dtype],
    )
