"""Cosines and sines of every position, with the ways models stretch rotary embeddings to longer contexts.

The formulas are those of transformers' `modeling_rope_utils`; yarn is arXiv 2309.00071.
Shapes: M positions, D head dim.
"""

import math

import torch
from torch import Tensor

from baton.engine.models.registry import RopeConfig, RopeScaling, attention_factor


def rope_table(head_dim: int, max_positions: int, rope: RopeConfig) -> Tensor:
    """fp32 [M, D] on the CPU: cosines in the first half of a row, sines in the second.

    head_dim: even. Positions are [0, max_positions). Angles are fp32, as in the models' training code. The
    attention factor is already multiplied in. Where a part of each head is rotated, the last dimensions of
    each half stay.
    """
    rotated = rope.rotary_dim(head_dim)
    cos_sin_MD = torch.zeros((max_positions, head_dim))
    cos_sin_MD[:, : head_dim // 2] = 1.0
    if rotated:
        frequency_D = scaled_frequencies(rotated, rope.theta, rope.scaling, max_positions)
        angle_MD = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequency_D)
        factor = attention_factor(rope.scaling)
        cos_sin_MD[:, : rotated // 2] = angle_MD.cos() * factor
        cos_sin_MD[:, head_dim // 2 :][:, : rotated // 2] = angle_MD.sin() * factor
    return cos_sin_MD


def scaled_frequencies(head_dim: int, theta: float, scaling: RopeScaling, max_positions: int) -> Tensor:
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
        case "longrope":
            return _longrope(theta**exponent_D, scaling, max_positions)


def _longrope(base_D: Tensor, scaling: RopeScaling, max_positions: int) -> Tensor:
    """The short factors serve the original context, the long ones any longer one.

    The length that the engine allows decides, not that of a sequence: stored keys keep their angles.
    """
    factors = scaling.long_factor if scaling.uses_long_factors(max_positions) else scaling.short_factor
    if len(factors) != len(base_D):
        raise ValueError(f"longrope needs {len(base_D)} factors, got {len(factors)}")
    return 1.0 / (torch.tensor(factors, dtype=torch.float32) * base_D)


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
