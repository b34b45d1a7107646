"""CPU memory in 2 MiB pages: reads of large tensors miss the address cache far less often."""

import math
import mmap
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

CHUNK_BYTES: Final = 2**26
ALIGNMENT: Final = 64  # bytes, a cache line


def huge_zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros of `shape`, in huge pages where the system grants them; untouched parts take no memory."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes == 0:
        return torch.zeros(tuple(shape), dtype=dtype)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # freed with the tensor
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(tuple(shape))


class HugeArena:
    """Memory for many tensors that live and die together, small ones too: weights.

    Each tensor keeps its chunk alive. Untouched parts of a chunk take no memory.
    """

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._num_used = 0

    def empty(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """A tensor [num_elements] with arbitrary contents."""
        num_bytes = num_elements * dtype.itemsize
        if self._num_used + num_bytes > len(self._chunk):
            self._chunk = huge_zeros((max(CHUNK_BYTES, num_bytes),), torch.uint8)
            self._num_used = 0
        piece = self._chunk[self._num_used : self._num_used + num_bytes]
        self._num_used += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        return piece.view(dtype)
