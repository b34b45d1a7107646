"""Rotary position embedding, rotate-half (NeoX) order.

Shapes: T tokens, H query heads, K kv heads, D head dim, M positions of the table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal, get_args

import torch
from torch import Tensor

from baton.kernels import native
from baton.kernels.triton_import import jit, runs_triton, tl


def rope(query_THD: Tensor, key_TKD: Tensor, cos_sin_MD: Tensor, positions_T: Tensor) -> None:
    """Rotate queries and keys in place to their positions, on a CPU; `rope_and_store` serves GPUs too.

    query_THD, key_TKD: any strides over tokens and heads, so views of one fused projection will do.
    cos_sin_MD: fp32 [M, D] from `rope_table`; cosines in the first half of a row, sines in the second.
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


# The ways models stretch rotary embeddings to longer contexts, as numbers; rope_table.py computes them.
#
# No torch here: a model's `config.json` is read where there is none.

RopeType = Literal["default", "linear", "llama3", "yarn"]
ROPE_TYPES: Final[tuple[RopeType, ...]] = get_args(RopeType)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """The difference of a model's frequencies from the plain ones; names as in its `config.json`.

    `original_max_positions` is the context the model was trained on before it was stretched; llama3 and
    yarn need it. Fields that the type does not use are ignored.
    """

    rope_type: RopeType = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    attention_factor: float | None = None  # yarn; None: from factor and mscale
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn: whole dimensions bound the ramp

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES:
            raise ValueError(f"rope_type must be one of {', '.join(ROPE_TYPES)}, got {self.rope_type!r}")
        if self.factor <= 0:
            raise ValueError(f"rope factor must be positive, got {self.factor}")
        if self.rope_type in ("llama3", "yarn") and self.original_max_positions < 1:
            raise ValueError(f"{self.rope_type} rope needs original_max_positions of at least 1")
        if not 0 < attention_factor(self) < math.inf:
            raise ValueError(
                f"mscale {self.mscale} and mscale_all_dim {self.mscale_all_dim} make the attention factor "
                f"{attention_factor(self)}, which must be positive and finite"
            )


def attention_factor(scaling: RopeScaling) -> float:
    """The factor of cosines and sines: 1 except for yarn."""
    if scaling.rope_type != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        divisor = _mscale(scaling.factor, scaling.mscale_all_dim)
        return _mscale(scaling.factor, scaling.mscale) / divisor if divisor else math.inf
    return _mscale(scaling.factor, 1.0)


def _mscale(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


# Cosines and sines of every position, with the ways models stretch them to longer contexts.
#
# The formulas are those of transformers' `modeling_rope_utils`; yarn is arXiv 2309.00071.
# Shapes: M positions, D head dim.


def rope_table(head_dim: int, max_positions: int, theta: float, scaling: RopeScaling) -> Tensor:
    """fp32 [M, D] on the CPU: cosines in the first half of a row, sines in the second.

    Positions are [0, max_positions). Angles are fp32, as in the models' training code. yarn's attention
    factor is already multiplied in.
    """
    if head_dim % 2 or head_dim < 2:
        raise ValueError(f"head_dim must be even, got {head_dim}")
    frequency_D = scaled_frequencies(head_dim, theta, scaling)
    position_M = torch.arange(max_positions, dtype=torch.float32)
    angle_MD = torch.outer(position_M, frequency_D)
    return torch.cat((angle_MD.cos(), angle_MD.sin()), dim=-1) * attention_factor(scaling)


def scaled_frequencies(head_dim: int, theta: float, scaling: RopeScaling) -> Tensor:
    """Radians per position of each pair of dimensions, fp32 [D / 2]."""
    exponent_D = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequency_D = 1.0 / (theta**exponent_D)
    match scaling.rope_type:
        case "default":
            return frequency_D
        case "linear":
            return frequency_D / scaling.factor
        case "llama3":
            return _llama3(frequency_D, scaling)
        case "yarn":
            return _yarn(frequency_D, head_dim, theta, scaling)


def _llama3(frequency_D: Tensor, scaling: RopeScaling) -> Tensor:
    """Stretch long waves by the factor, keep short ones, and blend the waves between."""
    wavelength_D = 2 * math.pi / frequency_D
    longest_kept = scaling.original_max_positions / scaling.high_freq_factor
    shortest_stretched = scaling.original_max_positions / scaling.low_freq_factor
    band = scaling.high_freq_factor - scaling.low_freq_factor
    kept_share_D = (scaling.original_max_positions / wavelength_D - scaling.low_freq_factor) / band
    blend_D = (1 - kept_share_D) * frequency_D / scaling.factor + kept_share_D * frequency_D
    stretched_D = torch.where(wavelength_D > shortest_stretched, frequency_D / scaling.factor, blend_D)
    return torch.where(wavelength_D < longest_kept, frequency_D, stretched_D)


def _yarn(frequency_D: Tensor, head_dim: int, theta: float, scaling: RopeScaling) -> Tensor:
    """A linear ramp over the dimensions from kept to stretched frequencies."""
    low = _dimension_of(scaling.beta_fast, head_dim, theta, scaling.original_max_positions)
    high = _dimension_of(scaling.beta_slow, head_dim, theta, scaling.original_max_positions)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a division by zero
    ramp_D = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)
    stretched_share_D = ramp_D.clamp(0, 1)
    return frequency_D / scaling.factor * stretched_share_D + frequency_D * (1 - stretched_share_D)


def _dimension_of(num_rotations: float, head_dim: int, theta: float, max_positions: int) -> float:
    """The pair of dimensions that turns `num_rotations` times over the original context."""
    return head_dim * math.log(max_positions / (num_rotations * 2 * math.pi)) / (2 * math.log(theta))
