"""Copies many byte ranges of one length from one area of memory to another. Shapes: N runs.

A copy releases Python's lock and does not use the thread pool of the other kernels, so moving pages and
computing do not delay each other.
"""

import ctypes
from typing import Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.kernels import native

Offsets: TypeAlias = NDArray[np.int64]


class Memory(Protocol):
    """Memory that is mapped here: [address, address + num_bytes)."""

    @property
    def address(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...


def copy_runs(
    source: Tensor | Memory,
    destination: Tensor | Memory,
    source_offset_N: Offsets,
    destination_offset_N: Offsets,
    run_bytes: int,
    *,
    keep_in_cache: bool = False,
    num_threads: int = 1,
) -> None:
    """`run_bytes` bytes at `source_offset_N[n]` of source go to `destination_offset_N[n]` of destination.

    Offsets are int64, in bytes, in no order; tensors are contiguous and on the CPU. Runs that are written
    must not overlap the bytes that another run reads or writes; the caller guarantees that. ValueError,
    before anything is written, when a run is not within its area.

    keep_in_cache: the written bytes are read again next. Otherwise they bypass the cache, which is faster by
    a third and more when neither side is in the cache yet. num_threads: threads that share the work; all but
    the caller's live for this call alone.
    """
    source_start, source_bytes = _area(source)
    destination_start, destination_bytes = _area(destination)
    if len(source_offset_N) != len(destination_offset_N):
        raise ValueError(
            f"every run has two offsets, got {len(source_offset_N)} and {len(destination_offset_N)}"
        )
    _check("source", source_offset_N, run_bytes, source_bytes)
    _check("destination", destination_offset_N, run_bytes, destination_bytes)
    if len(source_offset_N) == 0 or run_bytes == 0:
        return
    if native.library() is None:
        arguments = (source_offset_N, destination_offset_N, run_bytes)
        copy_runs_reference(_bytes(source), _bytes(destination), *arguments)
        return
    native.function("baton_copy_runs", "ppppnnii")(
        source_start,
        destination_start,
        source_offset_N.ctypes.data,
        destination_offset_N.ctypes.data,
        len(source_offset_N),
        run_bytes,
        int(keep_in_cache),
        num_threads,
    )


def copy_runs_reference(
    source: Tensor,
    destination: Tensor,
    source_offset_N: Offsets,
    destination_offset_N: Offsets,
    run_bytes: int,
) -> None:
    """The same between two uint8 tensors [bytes]."""
    for begin, end in zip(source_offset_N.tolist(), destination_offset_N.tolist(), strict=True):
        destination[end : end + run_bytes] = source[begin : begin + run_bytes]


def _area(memory: Tensor | Memory) -> tuple[int, int]:
    if not isinstance(memory, Tensor):
        return memory.address, memory.num_bytes
    if memory.device.type != "cpu" or not memory.is_contiguous():
        raise ValueError(f"runs are copied between contiguous CPU tensors, got one on {memory.device}")
    return memory.data_ptr(), memory.numel() * memory.itemsize


def _check(side: str, offset_N: Offsets, run_bytes: int, num_bytes: int) -> None:
    if offset_N.dtype != np.int64 or offset_N.ndim != 1 or not offset_N.flags.c_contiguous:
        raise ValueError(
            f"{side} offsets must be contiguous int64 [N], got {offset_N.dtype} {offset_N.shape}"
        )
    if run_bytes < 0:
        raise ValueError(f"a run has at least 0 bytes, got {run_bytes}")
    if len(offset_N) == 0:
        return
    # One look finds both ends: as unsigned numbers negative ones are larger than any area.
    if int(offset_N.view(np.uint64).max()) + run_bytes > num_bytes:
        lowest, highest = int(offset_N.min()), int(offset_N.max())
        raise ValueError(
            f"{side} runs of {run_bytes} bytes at {lowest} to {highest} are not within {num_bytes} bytes"
        )


def _bytes(memory: Tensor | Memory) -> Tensor:
    """A uint8 tensor [bytes] over the same memory."""
    if isinstance(memory, Tensor):
        return memory.view(-1).view(torch.uint8)
    mapped = (ctypes.c_char * memory.num_bytes).from_address(memory.address)
    return torch.frombuffer(mapped, dtype=torch.uint8)
