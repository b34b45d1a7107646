"""The KV caches of models that people serve, by name; only their shapes matter to a transfer."""

from typing import Final

from baton.errors import ConfigError
from baton.layout import PageLayout

# name -> layers, KV heads, head dim, all in bf16
_SHAPES: Final = {
    "tiny": (4, 2, 64),  # the model that comes with Baton
    "qwen3-0.6b": (28, 8, 128),
    "llama-3.1-8b": (32, 8, 128),
}
SHAPE_NAMES: Final = tuple(_SHAPES)


def layout_of(shape: str, *, page_size: int, tp_size: int = 1) -> PageLayout:
    """ConfigError lists the known names."""
    if shape not in _SHAPES:
        raise ConfigError(f"shape: expected one of {', '.join(SHAPE_NAMES)}, got {shape!r}")
    num_layers, num_kv_heads, head_dim = _SHAPES[shape]
    return PageLayout(
        tp_size=tp_size,
        page_size=page_size,
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype="bfloat16",
    )
