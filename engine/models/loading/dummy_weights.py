"""Random weights for a config without a checkpoint."""

import hashlib
import math
from typing import Final

import torch
from torch import Tensor

from baton.engine.models.loading.checkpoint import Shape

# Elements made at a time: they fit a core's cache, or keep a GPU busy in 128 MiB of scratch.
CPU_CHUNK: Final = 2**17
GPU_CHUNK: Final = 2**24
# The sum of four independent 16-bit uniforms: mean and standard deviation.
LANES_MEAN: Final = 4 * (2**16 - 1) / 2
LANES_STD: Final = math.sqrt(4 * (2**32 - 1) / 12)


class DummyCheckpoint:
    """Random weights: norm weights are 1, all others are nearly normal with standard deviation `deviation`.

    Every element is a function of (seed, tensor name, index) in integer arithmetic, so a slice for one rank
    equals the same slice of the whole tensor, and a GPU makes the same values as a CPU. Tensors are made anew
    at each call.
    """

    def __init__(
        self,
        shapes: dict[str, Shape],
        *,
        dtype: torch.dtype,
        deviation: float,
        seed: int,
        device: torch.device | None = None,
    ) -> None:
        self._shapes = shapes
        self._deviation = deviation
        self._seed = seed
        self._dtype = dtype
        self._device = device or torch.device("cpu")

    def names(self) -> tuple[str, ...]:
        """As `Checkpoint.names`."""
        return tuple(self._shapes)

    def shape(self, name: str) -> Shape:
        """As `Checkpoint.shape`."""
        return self._shapes[name]

    def num_bytes(self, name: str) -> int:
        """As `Checkpoint.num_bytes`."""
        return math.prod(self.shape(name)) * self._dtype.itemsize

    def slice(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """As `Checkpoint.slice`, in memory of its own."""
        shape = self.shape(name)
        kept = [range(start, stop) if axis == dim else range(size) for axis, size in enumerate(shape)]
        result = torch.empty([len(part) for part in kept], dtype=self._dtype, device=self._device)
        if name.endswith("norm.weight"):
            return result.fill_(1.0)
        rows, columns = kept[0], kept[-1] if len(kept) > 1 else range(1)
        if len(kept) <= 2:
            self._fill(result.view(len(rows), len(columns)), name, rows, columns)
            return result
        for index, part in zip(rows, result, strict=True):  # a matrix of each expert
            first, num_rows = index * math.prod(shape[1:-1]), math.prod(map(len, kept[1:-1]))
            flat = range(first + kept[1].start, first + kept[1].start + num_rows)
            self._fill(part.view(num_rows, len(columns)), name, flat, columns)
        return result

    def _fill(self, out: Tensor, name: str, rows: range, columns: range) -> None:
        row_length = self._shapes[name][-1] if len(self._shapes[name]) > 1 else 1
        digest = hashlib.blake2b(f"{self._seed} {name}".encode(), digest_size=8).digest()
        key = int.from_bytes(digest, "little", signed=True)
        column_index = torch.arange(columns.start, columns.stop, device=self._device)
        chunk_elements = CPU_CHUNK if self._device.type == "cpu" else GPU_CHUNK
        rows_a_chunk = max(1, chunk_elements // max(1, len(columns)))
        for first in range(0, len(rows), rows_a_chunk):
            chunk = rows[first : first + rows_a_chunk]
            row_index = torch.arange(chunk.start, chunk.stop, device=self._device)
            index = row_index[:, None] * row_length + column_index
            out[first : first + len(chunk)] = _normal(index, key) * self._deviation


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
    """The logical shift; torch's own shift repeats the sign."""
    return bits >> count & (1 << 64 - count) - 1


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
