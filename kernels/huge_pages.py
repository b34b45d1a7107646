"""CPU memory in 2 MiB pages: scattered reads of a large tensor miss the address cache far less often."""

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor


def huge_zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros of `shape`, in huge pages where the system grants them; untouched parts take no memory."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes == 0:
        return torch.zeros(tuple(shape), dtype=dtype)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # freed with the tensor
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(tuple(shape))
