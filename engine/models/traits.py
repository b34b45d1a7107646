"""What the layers of one architecture have that those of another lack."""

import msgspec


class Traits(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of ModelConfig that an architecture decides; one file beside this one for each."""

    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_windows: tuple[int | None, ...]
