"""Moves of pages: whole pages between two pools on one device, and runs of their bytes in CPU memory.

`copy_pages` moves pages of any dtype as rows of machine words. `copy_runs` copies many byte ranges of one
length from one area of CPU memory to another. It releases Python's lock and does not use the thread pool of
the other kernels, so moving pages and computing do not delay each other.

Transfers may carry one byte an element: `encode_runs` and `decode_runs`, `encode_pages` and `decode_pages`
turn each row of a page (kernels/kv_rows.py) into codes and their scale, and back.

Shapes: P pages of a pool, N pages or runs moved, R rows of a page, D elements of a row.
"""

from __future__ import annotations

import ctypes
from typing import Final, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.kernels import native
from baton.kernels.kv_rows import ROW_FORMATS, SCALE_BYTES, decode_rows, encode_rows, row_elements, store_rows
from baton.kernels.triton.kernel import Kernel, kernel, tl, triton

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


# Rows of pages as codes, for transfers of one byte an element.


class CodedRows(NamedTuple):
    """Rows of `head_dim` elements of `dtype`, and the type of their codes: int8 or float8_e4m3fn."""

    head_dim: int
    dtype: torch.dtype
    codes: torch.dtype

    @property
    def plain_bytes(self) -> int:
        """Bytes of a row in a page."""
        return self.head_dim * self.dtype.itemsize

    @property
    def coded_bytes(self) -> int:
        """Bytes of a row's codes and their scale."""
        return self.head_dim + SCALE_BYTES


def encode_runs(
    pool: Tensor | Memory, offset_N: Offsets, run_bytes: int, rows: CodedRows, packed: Tensor
) -> None:
    """Turn runs of a pool into codes, one row after another.

    packed: uint8 [bytes], contiguous, with room for exactly the codes of N runs of whole rows. Otherwise as
    `copy_runs`.
    """
    if not _coded_natively("baton_encode_runs", pool, offset_N, run_bytes, rows, packed):
        plain = torch.empty(len(offset_N) * run_bytes, dtype=torch.uint8)
        pack_runs(pool, offset_N, run_bytes, plain)
        packed.copy_(encode_rows(plain.view(rows.dtype).view(-1, rows.head_dim), rows.codes).view(-1))


def decode_runs(
    pool: Tensor | Memory, offset_N: Offsets, run_bytes: int, rows: CodedRows, packed: Tensor
) -> None:
    """Write the rows that `packed` stands for into runs of a pool: the inverse of `encode_runs`."""
    if not _coded_natively("baton_decode_runs", pool, offset_N, run_bytes, rows, packed):
        coded = packed.view(rows.codes).view(-1, rows.coded_bytes)
        unpack_runs(pool, offset_N, run_bytes, decode_rows(coded, rows.dtype).view(-1).view(torch.uint8))


def _coded_natively(
    name: str, pool: Tensor | Memory, offset_N: Offsets, run_bytes: int, rows: CodedRows, packed: Tensor
) -> bool:
    """Call the C kernel, if there is one for these rows. Raises ValueError for codes of other runs."""
    address = check_runs("pool", pool, offset_N, run_bytes)
    num_rows, rest = divmod(run_bytes, rows.plain_bytes)  # of a run
    num_bytes = len(offset_N) * num_rows * rows.coded_bytes
    if rest or packed.dtype != torch.uint8 or packed.numel() != num_bytes or not packed.is_contiguous():
        raise ValueError(
            f"{len(offset_N)} runs of {run_bytes} bytes, in rows of {rows.plain_bytes}, have codes of "
            f"{num_bytes} bytes, got {packed.dtype} {tuple(packed.shape)}"
        )
    if not native.handles(rows.dtype):
        return False
    native.function(name, "ppnnniip")(
        address,
        offset_N.ctypes.data,
        len(offset_N),
        num_rows,
        rows.head_dim,
        int(rows.dtype == torch.bfloat16),
        ROW_FORMATS[rows.codes],
        packed.data_ptr(),
    )
    return True


def encode_pages(pages: Tensor, ids_N: Tensor, codes: torch.dtype, packed: Tensor) -> None:
    """`packed[n]` = the rows of `pages[ids_N[n]]` as codes of type `codes`.

    pages: [P, R, D], contiguous, D even. ids_N: int64 in [0, P); the caller guarantees the range. packed:
    uint8 [N, R, D + SCALE_BYTES], contiguous. All on one device.
    """
    if pages.is_cuda:
        encode_pages_triton(pages, ids_N, codes, packed)
    else:
        _check_coded(pages, ids_N, codes, packed)
        packed.copy_(encode_rows(pages[ids_N], codes))


def decode_pages(pages: Tensor, ids_N: Tensor, codes: torch.dtype, packed: Tensor) -> None:
    """Write the rows that `packed` stands for into `pages`: the inverse of `encode_pages`.

    The ids are distinct; the caller guarantees that.
    """
    if pages.is_cuda:
        decode_pages_triton(pages, ids_N, codes, packed)
    else:
        _check_coded(pages, ids_N, codes, packed)
        pages[ids_N] = decode_rows(packed.view(codes), pages.dtype)


BLOCK_ROWS: Final = 16  # that one program encodes or decodes


@kernel()
def encode_pages_kernel(
    pages_ptr: tl.tensor,  # [P, R, D]
    ids_ptr: tl.tensor,  # [N] int64
    packed_ptr: tl.tensor,  # [N, R, D + SCALE_BYTES] int8
    num_rows: int,  # R
    half: int,  # D // 2
    ROW_FORMAT: tl.constexpr,  # as in row_format in kv_rows.py
    BLOCK_K: tl.constexpr,
    BLOCK_HALF: tl.constexpr,  # >= D // 2
) -> None:
    """One program encodes one block of rows of one page. Suffix K: rows."""
    entry = tl.program_id(0).to(tl.int64)  # int64, like the ids: offsets of whole pools pass 2^31
    row_K1 = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)[:, None]
    dim_D = tl.arange(0, BLOCK_HALF)
    inside_K1 = row_K1 < num_rows
    inside_KD = inside_K1 & (dim_D < half)[None, :]
    page = tl.load(ids_ptr + entry)
    from_ptr_KD = pages_ptr + (page * num_rows + row_K1) * 2 * half + dim_D[None, :]
    first_KD = tl.load(from_ptr_KD, mask=inside_KD, other=0.0)
    second_KD = tl.load(from_ptr_KD + half, mask=inside_KD, other=0.0)
    to_ptr_K1 = packed_ptr + (entry * num_rows + row_K1) * (2 * half + 2)
    store_rows(to_ptr_K1, first_KD, second_KD, dim_D, inside_K1, inside_KD, half, ROW_FORMAT)


@kernel()
def decode_pages_kernel(
    pages_ptr: tl.tensor,  # [P, R, D]
    ids_ptr: tl.tensor,  # [N] int64
    packed_ptr: tl.tensor,  # [N, R, D + SCALE_BYTES] int8
    num_rows: int,  # R
    half: int,  # D // 2
    ROW_FORMAT: tl.constexpr,  # as in row_format in kv_rows.py
    BLOCK_K: tl.constexpr,
    BLOCK_HALF: tl.constexpr,  # >= D // 2
) -> None:
    """One program decodes one block of rows of one page. Suffix K: rows."""
    entry = tl.program_id(0).to(tl.int64)
    row_K1 = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)[:, None]
    dim_D = tl.arange(0, BLOCK_HALF)
    inside_K1 = row_K1 < num_rows
    inside_KD = inside_K1 & (dim_D < half)[None, :]
    from_ptr_K1 = packed_ptr + (entry * num_rows + row_K1) * (2 * half + 2)
    scale_ptr_K1 = (from_ptr_K1 + 2 * half).to(tl.pointer_type(tl.bfloat16))
    scale_K1 = tl.load(scale_ptr_K1, mask=inside_K1, other=0.0)
    from_ptr_KD = from_ptr_K1 + dim_D[None, :]
    first_KD = row_elements(tl.load(from_ptr_KD, mask=inside_KD, other=0), scale_K1, ROW_FORMAT)
    second_KD = row_elements(tl.load(from_ptr_KD + half, mask=inside_KD, other=0), scale_K1, ROW_FORMAT)
    page = tl.load(ids_ptr + entry)
    to_ptr_KD = pages_ptr + (page * num_rows + row_K1) * 2 * half + dim_D[None, :]
    dtype = pages_ptr.dtype.element_ty
    tl.store(to_ptr_KD, first_KD.to(dtype), mask=inside_KD)
    tl.store(to_ptr_KD + half, second_KD.to(dtype), mask=inside_KD)


def encode_pages_triton(pages: Tensor, ids_N: Tensor, codes: torch.dtype, packed: Tensor) -> None:
    """`encode_pages` on a GPU."""
    _launch_coded(encode_pages_kernel, pages, ids_N, codes, packed)


def decode_pages_triton(pages: Tensor, ids_N: Tensor, codes: torch.dtype, packed: Tensor) -> None:
    """`decode_pages` on a GPU."""
    _launch_coded(decode_pages_kernel, pages, ids_N, codes, packed)


def _launch_coded(run: Kernel, pages: Tensor, ids_N: Tensor, codes: torch.dtype, packed: Tensor) -> None:
    _check_coded(pages, ids_N, codes, packed)
    _, num_rows, head_dim = pages.shape
    if len(ids_N) == 0 or num_rows == 0:
        return
    run[(len(ids_N), triton.cdiv(num_rows, BLOCK_ROWS))](
        pages,
        ids_N,
        packed.view(torch.int8),
        num_rows,
        head_dim // 2,
        ROW_FORMAT=ROW_FORMATS[codes],
        BLOCK_K=BLOCK_ROWS,
        BLOCK_HALF=triton.next_power_of_2(head_dim // 2),
    )


def _check_coded(pages: Tensor, ids_N: Tensor, codes: torch.dtype, packed: Tensor) -> None:
    if pages.dim() != 3 or not pages.is_contiguous() or pages.shape[2] % 2 or codes not in ROW_FORMATS:
        raise ValueError(f"pages must be contiguous [P, R, D], D even, got {tuple(pages.shape)} as {codes}")
    check_page_ids(ids_N, pages.device)
    expected = (len(ids_N), pages.shape[1], pages.shape[2] + SCALE_BYTES)
    if packed.shape != expected or packed.dtype != torch.uint8 or not packed.is_contiguous():
        found = f"{packed.dtype} {tuple(packed.shape)}"
        raise ValueError(f"codes must be contiguous uint8 {expected}, got {found}")
    if packed.device != pages.device:
        raise ValueError(f"codes must be on {pages.device} like the pages, got {packed.device}")
