"""Qwen2 and 2.5: biased query, key and value projections, and sliding windows from some layer on."""

from typing import Literal

from baton.engine.models.architecture import Architecture, Traits
from baton.engine.models.json_file import JsonObject
from baton.errors import ModelError


def read_traits(keys: JsonObject, num_layers: int) -> Traits:
    """Read the sliding windows; query, key and value projections always have biases."""
    return Traits(qkv_bias=True, sliding_windows=read_windows(keys, num_layers))


def read_windows(keys: JsonObject, num_layers: int) -> tuple[int | None, ...]:
    """The sliding window of each layer.

    `layer_types` names the layers that slide. Without it, the layers from `max_window_layers` on do.
    """
    if not keys.flag("use_sliding_window") or keys.is_null("sliding_window"):
        return (None,) * num_layers
    window = keys.count("sliding_window", 4096)
    layer_types = keys.get("layer_types", list[Literal["full_attention", "sliding_attention"]])
    if layer_types is None:
        num_full = keys.get("max_window_layers", int)
        first = 28 if num_full is None else num_full
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if len(layer_types) != num_layers:
        raise ModelError(
            f"{keys.source}: 'layer_types' should have {num_layers} entries, got {len(layer_types)}"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


QWEN2 = Architecture(model_type="qwen2", read_traits=read_traits)
