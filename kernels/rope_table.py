"""Cosines and sines of every position, with the ways models stretch them to longer contexts.

The formulas are those of transformers' `modeling_rope_utils`; yarn is arXiv 2309.00071.
Shapes: M positions, D head dim.
"""

import math
from dataclasses import dataclass
from typing import Final, Literal, get_args

import torch
from torch import Tensor

RopeType = Literal["default", "linear", "llama3", "yarn"]
ROPE_TYPES: Final[tuple[RopeType, ...]] = get_args(RopeType)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How the frequencies of a model differ from the plain ones; names as in its `config.json`.

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


def attention_factor(scaling: RopeScaling) -> float:
    """What cosines and sines are multiplied by: 1 except for yarn."""
    if scaling.rope_type != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        divisor = _mscale(scaling.factor, scaling.mscale_all_dim)
        return _mscale(scaling.factor, scaling.mscale) / divisor if divisor else math.inf
    return _mscale(scaling.factor, 1.0)


def _llama3(frequency_D: Tensor, scaling: RopeScaling) -> Tensor:
    """Long waves are stretched by the factor, short ones kept, those between blended."""
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


def _mscale(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
