"""Qwen3: RMS norm of queries and keys in each head; sliding windows as in Qwen2."""

from baton.engine.models.architecture import Architecture, Traits
from baton.engine.models.json_file import JsonObject
from baton.engine.models.qwen2 import read_windows


def read_traits(keys: JsonObject, num_layers: int) -> Traits:
    """Read `attention_bias` and the sliding windows."""
    bias = keys.flag("attention_bias")
    return Traits(qkv_bias=bias, o_bias=bias, qk_norm=True, sliding_windows=read_windows(keys, num_layers))


QWEN3 = Architecture(model_type="qwen3", read_traits=read_traits)
