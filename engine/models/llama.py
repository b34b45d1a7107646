"""Llama 2 and 3: full attention, and biases only where the config asks for them."""

from baton.engine.models.architecture import Architecture, Traits
from baton.engine.models.json_file import JsonObject


def read_traits(keys: JsonObject, num_layers: int) -> Traits:
    """Read `attention_bias` and `mlp_bias`."""
    bias = keys.flag("attention_bias")
    return Traits(
        qkv_bias=bias, o_bias=bias, mlp_bias=keys.flag("mlp_bias"), sliding_windows=(None,) * num_layers
    )


LLAMA = Architecture(model_type="llama", read_traits=read_traits)
