"""Which rotary position embedding a model uses, as its `config.json` says."""

import msgspec

from baton.engine.json_file import JsonObject
from baton.errors import ModelError
from baton.kernels.rope_scaling import ROPE_TYPES, RopeScaling


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    theta: float = 10000.0
    scaling: RopeScaling = RopeScaling()


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
    try:
        return RopeConfig(theta=theta, scaling=_scaling(kind, rope, keys))
    except ValueError as error:
        raise ModelError(f"{rope.source}: {error}") from None


def _scaling(kind: str, rope: JsonObject, keys: JsonObject) -> RopeScaling:
    match kind:
        case "linear":
            return RopeScaling(rope_type="linear", factor=rope.positive("factor"))
        case "llama3":
            return _llama3(rope, keys)
        case "yarn":
            return _yarn(rope, keys)
        case _:
            return RopeScaling()


def _original_context(rope: JsonObject, keys: JsonObject) -> int:
    name = "original_max_position_embeddings"  # at the top level it wins over the one inside
    return keys.count(name, rope.count(name, keys.count("max_position_embeddings")))


def _llama3(rope: JsonObject, keys: JsonObject) -> RopeScaling:
    low, high = rope.positive("low_freq_factor"), rope.positive("high_freq_factor")
    if high <= low:
        raise ModelError(f"{rope.source}: 'high_freq_factor' {high} should exceed 'low_freq_factor' {low}")
    return RopeScaling(
        rope_type="llama3",
        factor=rope.positive("factor"),
        original_max_positions=_original_context(rope, keys),
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(rope: JsonObject, keys: JsonObject) -> RopeScaling:
    original = _original_context(rope, keys)
    factor = rope.positive("factor", keys.count("max_position_embeddings") / original)
    beta_fast, beta_slow = rope.positive("beta_fast", 32.0), rope.positive("beta_slow", 1.0)
    if beta_fast < beta_slow:
        raise ModelError(f"{rope.source}: 'beta_fast' {beta_fast} should be at least 'beta_slow' {beta_slow}")
    given = rope.get("attention_factor", float)
    return RopeScaling(
        rope_type="yarn",
        factor=factor,
        original_max_positions=original,
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        attention_factor=None if given is None else rope.positive("attention_factor"),
        mscale=rope.get("mscale", float),
        mscale_all_dim=rope.get("mscale_all_dim", float),
        truncate=rope.flag("truncate", True),
    )
