"""The parameters that a model must have, by their Hugging Face names, and whether a checkpoint has them."""

import math
import re
from collections.abc import Mapping
from typing import Final

from baton.engine.hf_config import ModelConfig
from baton.engine.weights import Checkpoint
from baton.errors import ModelError
from baton.layout import DTYPE_BYTES

Shape = tuple[int, ...]
# Older exports saved the rotary frequencies, which are derived from the config.
DERIVED: Final = re.compile(r"(.*\.)?rotary_emb\.inv_freq")
EMBEDDING: Final = "model.embed_tokens.weight"
HEAD: Final = "lm_head.weight"


def parameter_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Name -> shape of every parameter, in the order that a forward pass meets them."""
    shapes: dict[str, Shape] = {EMBEDDING: (config.vocab_size, config.hidden_size)}
    for layer in range(config.num_layers):
        for name, shape in _layer_shapes(config).items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    shapes["model.norm.weight"] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, config.hidden_size)
    return shapes


def parameter_bytes(config: ModelConfig, dtype: str) -> int:
    """Bytes of all parameters in `dtype`."""
    return sum(math.prod(shape) for shape in parameter_shapes(config).values()) * DTYPE_BYTES[dtype]


def attention_parity(config: ModelConfig) -> float:
    """Tokens before a token that cost as much to attend to as all that the layers' weights do with it, by
    operations; inf where attention is over windows alone.
    """
    matrices = [shape for name, shape in parameter_shapes(config).items() if ".layers." in name and shape[1:]]
    num_weights = sum(map(math.prod, matrices))
    num_full = sum(window is None for window in config.sliding_windows)
    return num_weights / (2 * config.num_heads * config.head_dim * num_full) if num_full else math.inf


def check_parameters(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Raise ModelError naming the first tensor that is missing, of another shape, or not in the model.

    A tensor too many is an error as well: a bias that the config does not mention would change the tokens.
    """
    shapes = parameter_shapes(config)
    names = set(checkpoint.names())
    for name, expected in shapes.items():
        if name not in names:
            raise ModelError(f"the checkpoint lacks tensor {name!r} of shape {list(expected)}")
        got = checkpoint.shape(name)
        if got != expected:
            raise ModelError(f"tensor {name!r} should have shape {list(expected)}, got {list(got)}")
    ignored = {HEAD} if config.tie_word_embeddings else set()
    for name in sorted(names - shapes.keys() - ignored):
        if not DERIVED.fullmatch(name):
            raise ModelError(
                f"tensor {name!r} is not part of {config.architecture} as config.json describes it"
            )


def _layer_shapes(config: ModelConfig) -> Mapping[str, Shape]:
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, Shape] = {"input_layernorm.weight": (hidden,)}
    shapes |= _linear("self_attn.q_proj", (q_size, hidden), config.qkv_bias)
    shapes |= _linear("self_attn.k_proj", (kv_size, hidden), config.qkv_bias)
    shapes |= _linear("self_attn.v_proj", (kv_size, hidden), config.qkv_bias)
    if config.qk_norm:
        shapes |= {f"self_attn.{name}_norm.weight": (config.head_dim,) for name in ("q", "k")}
    shapes |= _linear("self_attn.o_proj", (hidden, q_size), config.o_bias)
    shapes["post_attention_layernorm.weight"] = (hidden,)
    shapes |= _linear("mlp.gate_proj", (inner, hidden), config.mlp_bias)
    shapes |= _linear("mlp.up_proj", (inner, hidden), config.mlp_bias)
    shapes |= _linear("mlp.down_proj", (hidden, inner), config.mlp_bias)
    return shapes


def _linear(name: str, weight: tuple[int, int], bias: bool) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {f"{name}.weight": weight}
    return shapes | {f"{name}.bias": weight[:1]} if bias else shapes
