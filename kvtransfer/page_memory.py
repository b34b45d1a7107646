"""Where the pages of a rank lie, and pools that other processes on the host can map.

A shared pool is a file that has a descriptor but never a name: it goes when the last process that holds it
is gone, however that one died. Beside the pages it has a table of generations, one word a page, which only
the owner can write: a writer in another process looks a page up there before it writes it (see shm.py).
"""

import contextlib
import ctypes
import fcntl
import math
import mmap
import os
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.errors import ConfigError

REVOKED: Final = 0  # no page that was ever handed out has generation 0
_WORD_BYTES: Final = 4
_SEALS: Final = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


class PageMemory:
    """Page p is the bytes [address + p * page_bytes, address + (p + 1) * page_bytes) of this process."""

    def __init__(self, address: int, num_pages: int, page_bytes: int, owner: object) -> None:
        """owner: what keeps the memory mapped; it lives as long as this."""
        self.address = address
        self.num_pages = num_pages
        self.page_bytes = page_bytes
        self._owner = owner

    @classmethod
    def of(cls, pool: Tensor) -> "PageMemory":
        """The pages of a contiguous CPU tensor [num_pages, ...]."""
        if pool.device.type != "cpu" or not pool.is_contiguous() or pool.dim() < 2:
            raise ValueError(f"pages must be contiguous on the CPU, got {pool.device} {tuple(pool.shape)}")
        return cls(pool.data_ptr(), len(pool), pool[0].numel() * pool.itemsize, pool)

    @property
    def num_bytes(self) -> int:
        return self.num_pages * self.page_bytes

    def view(self) -> memoryview:
        """All pages as bytes, good for as long as this lives."""
        return memoryview((ctypes.c_char * self.num_bytes).from_address(self.address)).cast("B")

    def has(self, pages: Sequence[int]) -> bool:
        """Whether all these pages are within the pool; empty lists are."""
        return not pages or (min(pages) >= 0 and max(pages) < self.num_pages)


class SharedFile:
    """Anonymous shared memory of a fixed size, zeros at first; untouched parts take no memory."""

    def __init__(self, name: str, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, num_bytes)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)  # a peer cannot cut it under our feet
        except OSError:
            self.close()
            raise

    def read_only(self) -> int:
        """Another descriptor of the same memory, through which nobody can write. The caller closes it."""
        return os.open(f"/proc/self/fd/{self.descriptor}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Give up the descriptor; what is mapped stays mapped."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class SharedPool:
    """A pool of pages that other processes can be given; `zeros` makes it, once.

    Everything is freed by `close` and the end of the tensor, or by the end of the processes.
    """

    def __init__(self) -> None:
        self.file: SharedFile
        self.memory: PageMemory
        self.generations: PageGenerations

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The pool's tensor [num_pages, ...]; it fits where an engine takes memory for its KV pool."""
        page_bytes = math.prod(shape[1:]) * dtype.itemsize
        num_bytes = shape[0] * page_bytes
        if num_bytes == 0:
            raise ConfigError(f"a shared pool needs at least one page, got the shape {tuple(shape)}")
        self.file = SharedFile("baton-kv", num_bytes)
        mapped = map_shared(self.file.descriptor, num_bytes)
        tensor = torch.frombuffer(mapped, dtype=dtype).view(tuple(shape))
        self.memory = PageMemory(tensor.data_ptr(), shape[0], page_bytes, tensor)
        self.generations = PageGenerations(shape[0])
        return tensor

    def close(self) -> None:
        """Hand the pool to nobody any more; the tensor and other processes keep what they have mapped."""
        if hasattr(self, "file"):
            self.file.close()
            self.generations.file.close()


class PageGenerations:
    """A shared table: page -> the generation whose writers may write it, REVOKED when nobody may.

    The owner of the pool writes it; words are written whole, so readers see old or new, nothing between.
    """

    def __init__(self, num_pages: int) -> None:
        self.file = SharedFile("baton-kv-generations", num_pages * _WORD_BYTES)
        self._words: NDArray[np.uint32] = np.frombuffer(
            map_shared(self.file.descriptor, self.file.num_bytes), dtype=np.uint32
        )

    def grant(self, pages: Sequence[int], generations: Sequence[int]) -> None:
        self._words[list(pages)] = as_words(generations)

    def revoke(self, pages: Sequence[int]) -> None:
        """From now on writers stop at their next look. One that looked before may still be writing."""
        self._words[list(pages)] = REVOKED


class PeerGenerations:
    """Another process's table, mapped for reading."""

    def __init__(self, descriptor: int, num_pages: int) -> None:
        mapped = map_shared(descriptor, num_pages * _WORD_BYTES, prot=mmap.PROT_READ)
        self._words: NDArray[np.uint32] = np.frombuffer(mapped, dtype=np.uint32)

    def match(self, pages: NDArray[np.int64], words: NDArray[np.uint32]) -> bool:
        return bool((self._words[pages] == words).all())


class PeerPages:
    """Another process's pool, mapped for writing; `close` unmaps it."""

    def __init__(self, descriptor: int, num_pages: int, page_bytes: int) -> None:
        self._mapped: mmap.mmap | None = map_shared(descriptor, num_pages * page_bytes)
        self._mapped.madvise(mmap.MADV_DONTFORK)  # when this process is dead nobody writes on its behalf
        self.memory = PageMemory(_address(self._mapped), num_pages, page_bytes, self._mapped)

    def close(self) -> None:
        """Unmap. Nobody may be writing; `memory` means nothing afterwards."""
        if self._mapped is not None:
            self._mapped.close()
            self._mapped = None


def as_words(generations: Sequence[int]) -> NDArray[np.uint32]:
    """Generations as the table has them: 32 bits, never REVOKED."""
    wrapped = np.asarray(generations, dtype=np.int64) % (2**32 - 1) + 1
    return wrapped.astype(np.uint32)


def map_shared(descriptor: int, num_bytes: int, prot: int = mmap.PROT_READ | mmap.PROT_WRITE) -> mmap.mmap:
    """Map a file for all to see, in huge pages where the system grants them to shared memory."""
    mapped = mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_SHARED, prot=prot)
    with contextlib.suppress(OSError):  # a kernel without them: small pages serve as well
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped


def _address(mapped: mmap.mmap) -> int:
    return int(np.frombuffer(mapped, dtype=np.uint8).ctypes.data)  # the view ends here, so close() can
