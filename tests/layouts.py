"""Layouts of KV pages."""

from typing import Any

from baton.pages import PageLayout


def a_layout(**changes: Any) -> PageLayout:
    """Return the layout of pages of 16 tokens on one rank: two layers, two heads of 8 floats."""
    sizes = {"tp_size": 1, "page_size": 16, "num_layers": 2, "num_kv_heads": 2, "head_dim": 8}
    return PageLayout(**{**sizes, "dtype": "float32", **changes})
