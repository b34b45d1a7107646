"""Qwen3: queries and keys are normed head by head; windows as in Qwen2."""

from baton.engine.models.json_file import JsonObject
from baton.engine.models.qwen2 import qwen_windows
from baton.engine.models.traits import Traits


def qwen3(keys: JsonObject, num_layers: int) -> Traits:
    bias = keys.flag("attention_bias")
    return Traits(qkv_bias=bias, o_bias=bias, qk_norm=True, sliding_windows=qwen_windows(keys, num_layers))
