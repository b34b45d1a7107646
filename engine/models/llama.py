"""Llama 2 and 3: full attention, biases only where the config asks for them."""

from baton.engine.models.json_file import JsonObject
from baton.engine.models.traits import Traits


def llama(keys: JsonObject, num_layers: int) -> Traits:
    bias = keys.flag("attention_bias")
    return Traits(
        qkv_bias=bias, o_bias=bias, mlp_bias=keys.flag("mlp_bias"), sliding_windows=(None,) * num_layers
    )
