"""The parameters that a model must have, by their Hugging Face names, and whether a checkpoint has them."""

import hashlib
import math
import re
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from baton.engine.models.registry import ModelConfig
from baton.engine.models.weights import TORCH_DTYPES, Checkpoint, check_slice
from baton.errors import ModelError
from baton.pages import DTYPE_BYTES

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


def attention_mlp_crossover(config: ModelConfig) -> float:
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


# Random weights for a config without a checkpoint (`load_format="dummy"`).
#
# Every element is a function of (seed, tensor name, its index) in integer arithmetic, so that a slice for one
# rank equals the same slice of the whole tensor, and a GPU makes the very values that a CPU makes.

# Elements made at a time: what fits a core's cache, and what keeps a GPU busy in 128 MiB of scratch.
CPU_CHUNK: Final = 2**17
GPU_CHUNK: Final = 2**24
# The sum of four independent 16-bit uniforms: mean and standard deviation.
LANES_MEAN: Final = 4 * (2**16 - 1) / 2
LANES_STD: Final = math.sqrt(4 * (2**32 - 1) / 12)


class DummyCheckpoint:
    """Norm weights are 1, everything else nearly normal with the config's `initializer_range`.

    Tensors are made anew at each call, in the config's dtype, on `device`.
    """

    def __init__(self, config: ModelConfig, seed: int, *, device: str = "cpu") -> None:
        self._shapes = parameter_shapes(config)
        self._std = config.initializer_range
        self._seed = seed
        self._dtype = TORCH_DTYPES[config.dtype]
        self._device = torch.device(device)

    def names(self) -> tuple[str, ...]:
        return tuple(self._shapes)

    def shape(self, name: str) -> Shape:
        if name not in self._shapes:
            raise ModelError(f"the checkpoint has no tensor {name!r}")
        return self._shapes[name]

    def num_bytes(self, name: str) -> int:
        return math.prod(self.shape(name)) * self._dtype.itemsize

    def tensor(self, name: str) -> Tensor:
        return self.slice(name, 0, 0, self.shape(name)[0])

    def slice(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        shape = self.shape(name)
        check_slice(name, shape, dim, start, stop)
        kept = [range(start, stop) if axis == dim else range(size) for axis, size in enumerate(shape)]
        result = torch.empty([len(part) for part in kept], dtype=self._dtype, device=self._device)
        if name.endswith("norm.weight"):
            return result.fill_(1.0)
        rows, columns = kept if len(kept) == 2 else (kept[0], range(1))
        self._fill(result.view(len(rows), len(columns)), name, rows, columns)
        return result

    def _fill(self, out: Tensor, name: str, rows: range, columns: range) -> None:
        row_length = self._shapes[name][1] if len(self._shapes[name]) == 2 else 1
        key = _key(self._seed, name)
        column_index = torch.arange(columns.start, columns.stop, device=self._device)
        chunk_elements = CPU_CHUNK if self._device.type == "cpu" else GPU_CHUNK
        rows_a_chunk = max(1, chunk_elements // max(1, len(columns)))
        for first in range(0, len(rows), rows_a_chunk):
            chunk = rows[first : first + rows_a_chunk]
            row_index = torch.arange(chunk.start, chunk.stop, device=self._device)
            index = row_index[:, None] * row_length + column_index
            out[first : first + len(chunk)] = _normal(index, key) * self._std


def _key(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _normal(index: Tensor, key: int) -> Tensor:
    """Nearly normal float32 of mean 0 and deviation 1, never past 3.5, for each int64 counter.

    SplitMix64 (Steele, Lea, Flood 2014) makes 64 bits; the sum of their four 16-bit lanes is nearly normal.
    Products wrap modulo 2^64.
    """
    bits = index * _signed(0x9E3779B97F4A7C15) + key
    bits = (bits ^ _shift_right(bits, 30)) * _signed(0xBF58476D1CE4E5B9)
    bits = (bits ^ _shift_right(bits, 27)) * _signed(0x94D049BB133111EB)
    bits = bits ^ _shift_right(bits, 31)
    lanes = (bits & 0xFFFF) + (bits >> 16 & 0xFFFF) + (bits >> 32 & 0xFFFF) + (bits >> 48 & 0xFFFF)
    return (lanes - LANES_MEAN) / LANES_STD


def _shift_right(bits: Tensor, count: int) -> Tensor:
    """The logical shift; torch's own repeats the sign."""
    return bits >> count & (1 << 64 - count) - 1


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
