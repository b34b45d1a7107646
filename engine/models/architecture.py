"""What an architecture is: the traits of its layers, read from a model's `config.json`.

Every architecture runs as the shared decoder (engine/models/decoder.py). What sets one apart is in a module
of its own beside this one, which engine/models/registry.py lists.
"""

from collections.abc import Callable

import msgspec

from baton.engine.models.json_file import JsonObject


class Traits(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of ModelConfig that an architecture decides."""

    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_windows: tuple[int | None, ...]  # one a layer; w: position p sees (p - w, p]; None: all before it


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the registry."""

    model_type: str  # names the architecture in a config.json without `architectures`
    read_traits: Callable[[JsonObject, int], Traits]  # config.json, number of layers; raises ModelError
