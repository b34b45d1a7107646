"""Which rotary position embedding a model uses, as its `config.json` says."""

import math
from typing import Final, Literal, get_args

import msgspec

from baton.engine.json_file import JsonObject
from baton.errors import ModelError

RopeType = Literal["default", "linear", "llama3", "yarn"]
ROPE_TYPES: Final[tuple[RopeType, ...]] = get_args(RopeType)


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position embedding; which fields matter depends on `type` (see the comments)."""

    type: RopeType = "default"
    theta: float = 10000.0
    factor: float = 1.0  # linear, llama3, yarn: the context grows by this much
    original_max_position_embeddings: int = 0  # llama3, yarn: the context before it grew
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float = 1.0  # yarn: scales cos and sin; already derived from mscale and factor
    truncate: bool = True  # yarn: round the correction range to whole dimensions


def read_rope_config(keys: JsonObject) -> RopeConfig:
    """The embedding that `config.json` asks for, in its older or its newer spelling."""
    name = "rope_parameters" if "rope_parameters" in keys else "rope_scaling"
    rope = keys.section(name)
    kind = rope.get("rope_type", str) or rope.get("type", str) or "default"
    if kind not in ROPE_TYPES:
        raise ModelError(f"{rope.source}: type {kind!r} is not known; known are {', '.join(ROPE_TYPES)}")
    if any(layer_type in rope for layer_type in ("full_attention", "sliding_attention")):
        raise ModelError(f"{rope.source}: a different rotary embedding for each layer type is not supported")
    if rope.positive("partial_rotary_factor", keys.positive("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelError(f"{rope.source}: 'partial_rotary_factor' other than 1 is not supported")
    theta = rope.positive("rope_theta", keys.positive("rope_theta", 10000.0))
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(type="linear", theta=theta, factor=rope.positive("factor"))
    return _llama3(rope, keys, theta) if kind == "llama3" else _yarn(rope, keys, theta)


def _original_context(rope: JsonObject, keys: JsonObject) -> int:
    name = "original_max_position_embeddings"  # at the top level it wins over the one inside
    return keys.count(name, rope.count(name, keys.count("max_position_embeddings")))


def _llama3(rope: JsonObject, keys: JsonObject, theta: float) -> RopeConfig:
    low, high = rope.positive("low_freq_factor"), rope.positive("high_freq_factor")
    if high <= low:
        raise ModelError(f"{rope.source}: 'high_freq_factor' {high} should exceed 'low_freq_factor' {low}")
    return RopeConfig(
        type="llama3",
        theta=theta,
        factor=rope.positive("factor"),
        original_max_position_embeddings=_original_context(rope, keys),
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(rope: JsonObject, keys: JsonObject, theta: float) -> RopeConfig:
    original = _original_context(rope, keys)
    factor = rope.positive("factor", keys.count("max_position_embeddings") / original)
    beta_fast, beta_slow = rope.positive("beta_fast", 32.0), rope.positive("beta_slow", 1.0)
    if beta_fast < beta_slow:
        raise ModelError(f"{rope.source}: 'beta_fast' {beta_fast} should be at least 'beta_slow' {beta_slow}")
    return RopeConfig(
        type="yarn",
        theta=theta,
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        attention_factor=_attention_factor(rope, factor),
        truncate=rope.flag("truncate", True),
    )


def _attention_factor(rope: JsonObject, factor: float) -> float:
    """YaRN's temperature, arXiv:2309.00071 section 3.4: 0.1 ln(factor) + 1 unless the file says otherwise."""

    def temperature(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    mscale, mscale_all = rope.get("mscale", float), rope.get("mscale_all_dim", float)
    divisor = temperature(mscale_all) if mscale and mscale_all else 1.0
    if not divisor:
        raise ModelError(f"{rope.source}: 'mscale_all_dim' {mscale_all} makes the attention factor infinite")
    derived = temperature(mscale) / divisor if mscale and mscale_all else temperature(1.0)
    return rope.positive("attention_factor", derived)
