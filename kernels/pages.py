"""Copies of pages: whole pages between two pools on one device, and runs of their bytes in CPU memory.

`copy_pages` moves pages of any dtype as rows of machine words. `copy_runs` copies many byte ranges of one
length from one area of CPU memory to another. It releases Python's lock and does not use the thread pool of
the other kernels, so moving pages and computing do not delay each other.

Shapes: P pages of a pool, N pages or runs moved.
"""

from __future__ import annotations

import ctypes
from typing import Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.kernels import native
from baton.kernels.triton.kernel import kernel, tl, triton

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def copy_pages(
    source: Tensor, source_ids_N: Tensor | None, destination: Tensor, destination_ids_N: Tensor | None
) -> None:
    """`destination[destination_ids_N[n]] = source[source_ids_N[n]]`, byte for byte, for any dtype.

    A side without ids is a staging buffer of exactly N pages, in order. Pools: [P, ...] each; the elements of
    a page are adjacent, pages may be strided; destination is modified in place. On a GPU, destination may
    belong to another process, or to another GPU that the source's GPU can write to.
    Ids: int64, on the source's device, in [0, P) of their pools, those of the destination distinct; the
    caller guarantees that.
    """
    if source.is_cuda:
        copy_pages_triton(source, source_ids_N, destination, destination_ids_N)
    else:
        copy_pages_reference(source, source_ids_N, destination, destination_ids_N)


@kernel()
def copy_pages_kernel(
    source_ptr: tl.tensor,  # [P, words]
    source_ids_ptr: tl.tensor,  # [N] int64; not read without HAS_SOURCE_IDS
    destination_ptr: tl.tensor,  # [P, words]
    destination_ids_ptr: tl.tensor,  # [N] int64; not read without HAS_DESTINATION_IDS
    page_words: int,
    source_stride_page: int,
    destination_stride_page: int,
    HAS_SOURCE_IDS: tl.constexpr,
    HAS_DESTINATION_IDS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program copies one block of words of one page."""
    row = tl.program_id(0).to(tl.int64)  # int64, like the ids: offsets of whole pools pass 2^31
    source_id = tl.load(source_ids_ptr + row) if HAS_SOURCE_IDS else row
    destination_id = tl.load(destination_ids_ptr + row) if HAS_DESTINATION_IDS else row
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = word < page_words
    content = tl.load(source_ptr + source_id * source_stride_page + word, mask=inside)
    tl.store(destination_ptr + destination_id * destination_stride_page + word, content, mask=inside)


def copy_pages_triton(
    source: Tensor, source_ids_N: Tensor | None, destination: Tensor, destination_ids_N: Tensor | None
) -> None:
    """`copy_pages` on a GPU."""
    num_pages = _check(source, source_ids_N, destination, destination_ids_N)
    if num_pages == 0 or source[0].numel() == 0:
        return
    source_words, destination_words = _as_words(source, destination)
    page_words = source_words.shape[1]
    block = min(2048, triton.next_power_of_2(page_words))
    grid = (num_pages, triton.cdiv(page_words, block))
    copy_pages_kernel[grid](
        source_words,
        source_words if source_ids_N is None else source_ids_N,
        destination_words,
        destination_words if destination_ids_N is None else destination_ids_N,
        page_words,
        source_words.stride(0),
        destination_words.stride(0),
        HAS_SOURCE_IDS=source_ids_N is not None,
        HAS_DESTINATION_IDS=destination_ids_N is not None,
        BLOCK=block,
        num_warps=8,
    )


def copy_pages_reference(
    source: Tensor, source_ids_N: Tensor | None, destination: Tensor, destination_ids_N: Tensor | None
) -> None:
    """`copy_pages` in plain torch."""
    if destination_ids_N is not None:
        moved = source if source_ids_N is None else torch.index_select(source, 0, source_ids_N)
        destination.index_copy_(0, destination_ids_N, moved)
    elif source_ids_N is not None:
        torch.index_select(source, 0, source_ids_N, out=destination)
    else:
        destination.copy_(source)


def _check(
    source: Tensor, source_ids_N: Tensor | None, destination: Tensor, destination_ids_N: Tensor | None
) -> int:
    """The number of pages to copy. Raises ValueError for sides that do not fit each other."""
    sides = ((source, source_ids_N), (destination, destination_ids_N))
    for ids in (source_ids_N, destination_ids_N):
        if ids is not None:
            check_page_ids(ids, source.device)
    num_pages, num_written = (len(pages if ids is None else ids) for pages, ids in sides)
    if num_pages != num_written:
        raise ValueError(f"{num_pages} pages cannot go to {num_written}")
    if source.dtype != destination.dtype or source.shape[1:] != destination.shape[1:]:
        raise ValueError(
            f"pages must be alike, got {source.dtype} {tuple(source.shape[1:])} "
            f"and {destination.dtype} {tuple(destination.shape[1:])}"
        )
    if source.is_cuda != destination.is_cuda:
        raise ValueError(f"pages cannot go from {source.device} to {destination.device}")
    return num_pages


def check_page_ids(ids_N: Tensor, device: torch.device) -> None:
    """Raise ValueError for ids that a kernel on this device cannot read."""
    if ids_N.dim() != 1 or ids_N.dtype != torch.int64 or not ids_N.is_contiguous():
        raise ValueError(f"page ids must be contiguous int64 [N], got {ids_N.dtype} {tuple(ids_N.shape)}")
    if ids_N.device != device:
        raise ValueError(f"page ids must be on {device} like the pages, got {ids_N.device}")


def _as_words(*pages: Tensor) -> tuple[Tensor, ...]:
    """Each [N, ...] tensor as [N, words per page] over the same memory, in the widest word that all allow.

    Raises ValueError when the elements of one page are not adjacent.
    """
    rows = [_as_bytes(tensor) for tensor in pages]
    alignment = 0
    for row in rows:
        # The lowest set bit of the union is the largest power of two that divides every term.
        alignment |= row.shape[1] | row.stride(0) | int(row.storage_offset()) | row.data_ptr()
    for word in _WORDS:
        if alignment % word.itemsize == 0:
            break
    return tuple(row.view(word) for row in rows)


def _as_bytes(pages: Tensor) -> Tensor:
    if not pages[:1].is_contiguous():
        raise ValueError(f"the elements of a page must be adjacent, got strides {pages.stride()}")
    return pages.view(pages.shape[0], -1).view(torch.uint8)


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
) -> None:
    """`run_bytes` bytes at `source_offset_N[n]` of source go to `destination_offset_N[n]` of destination.

    Offsets are int64, in bytes, in no order; tensors are contiguous and on the CPU. Runs that are written
    must not overlap the bytes that another run reads or writes; the caller guarantees that. ValueError,
    before anything is written, when a run is not within its area.

    keep_in_cache: the written bytes are read again next. Otherwise they bypass the cache, which is faster by
    a third and more when neither side is in the cache yet.
    """
    if len(source_offset_N) != len(destination_offset_N):
        raise ValueError(
            f"every run has two offsets, got {len(source_offset_N)} and {len(destination_offset_N)}"
        )
    source_start = check_runs("source", source, source_offset_N, run_bytes)
    destination_start = check_runs("destination", destination, destination_offset_N, run_bytes)
    if len(source_offset_N) == 0 or run_bytes == 0:
        return
    if native.library() is None:
        arguments = (source_offset_N, destination_offset_N, run_bytes)
        copy_runs_reference(_bytes(source), _bytes(destination), *arguments)
        return
    native.function("baton_copy_runs", "ppppnni")(
        source_start,
        destination_start,
        source_offset_N.ctypes.data,
        destination_offset_N.ctypes.data,
        len(source_offset_N),
        run_bytes,
        int(keep_in_cache),
    )


def copy_runs_reference(
    source: Tensor,
    destination: Tensor,
    source_offset_N: Offsets,
    destination_offset_N: Offsets,
    run_bytes: int,
) -> None:
    """`copy_runs` in plain torch, between two uint8 tensors [bytes]."""
    for begin, end in zip(source_offset_N.tolist(), destination_offset_N.tolist(), strict=True):
        destination[end : end + run_bytes] = source[begin : begin + run_bytes]


def pack_runs(pool: Tensor | Memory, offset_N: Offsets, run_bytes: int, packed: Tensor) -> None:
    """Copy runs of a pool into `packed`, one after another. The copy stays in the cache.

    packed: uint8 [bytes], with room for N runs. Otherwise as `copy_runs`.
    """
    copy_runs(pool, packed, offset_N, _packed_offsets(offset_N, run_bytes), run_bytes, keep_in_cache=True)


def unpack_runs(pool: Tensor | Memory, offset_N: Offsets, run_bytes: int, packed: Tensor) -> None:
    """Copy the runs in `packed` into a pool: the inverse of `pack_runs`."""
    copy_runs(packed, pool, _packed_offsets(offset_N, run_bytes), offset_N, run_bytes)


def _packed_offsets(offset_N: Offsets, run_bytes: int) -> Offsets:
    return np.arange(len(offset_N), dtype=np.int64) * run_bytes


def check_runs(side: str, memory: Tensor | Memory, offset_N: Offsets, run_bytes: int) -> int:
    """Return the address of the memory. Raises ValueError for runs that are not within the memory."""
    if offset_N.dtype != np.int64 or offset_N.ndim != 1 or not offset_N.flags.c_contiguous:
        raise ValueError(
            f"{side} offsets must be contiguous int64 [N], got {offset_N.dtype} {offset_N.shape}"
        )
    if run_bytes < 0:
        raise ValueError(f"a run has at least 0 bytes, got {run_bytes}")
    address, num_bytes = _area(memory)
    # One look finds both ends: as unsigned numbers negative ones are larger than any area.
    if len(offset_N) and int(offset_N.view(np.uint64).max()) + run_bytes > num_bytes:
        lowest, highest = int(offset_N.min()), int(offset_N.max())
        raise ValueError(
            f"{side} runs of {run_bytes} bytes at {lowest} to {highest} are not within {num_bytes} bytes"
        )
    return address


def _area(memory: Tensor | Memory) -> tuple[int, int]:
    if not isinstance(memory, Tensor):
        return memory.address, memory.num_bytes
    if memory.device.type != "cpu" or not memory.is_contiguous():
        raise ValueError(f"runs are copied between contiguous CPU tensors, got one on {memory.device}")
    return memory.data_ptr(), memory.numel() * memory.itemsize


def _bytes(memory: Tensor | Memory) -> Tensor:
    """A uint8 tensor [bytes] over the same memory."""
    if isinstance(memory, Tensor):
        return memory.view(-1).view(torch.uint8)
    mapped = (ctypes.c_char * memory.num_bytes).from_address(memory.address)
    return torch.frombuffer(mapped, dtype=torch.uint8)
