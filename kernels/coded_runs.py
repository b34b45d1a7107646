"""Rows of pages as codes, for transfers that carry one byte an element, and back.

A row is the key, or the value, of one token and head. It becomes codes and their scale (kernels/kv_rows.py).
`encode_runs` and `decode_runs` take runs of a pool in CPU memory, `encode_pages` and `decode_pages` take
pages on any device.

Shapes: P pages of a pool, N pages or runs, R rows of a page, D elements of a row.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from baton.kernels import native
from baton.kernels.kv_rows import ROW_FORMATS, SCALE_BYTES, decode_rows, encode_rows, row_elements, store_rows
from baton.kernels.pages import Memory, Offsets, check_page_ids, check_runs, pack_runs, unpack_runs
from baton.kernels.triton.kernel import Kernel, kernel, tl, triton


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
    if not _run_native("baton_encode_runs", pool, offset_N, run_bytes, rows, packed):
        plain = torch.empty(len(offset_N) * run_bytes, dtype=torch.uint8)
        pack_runs(pool, offset_N, run_bytes, plain)
        packed.copy_(encode_rows(plain.view(rows.dtype).view(-1, rows.head_dim), rows.codes).view(-1))


def decode_runs(
    pool: Tensor | Memory, offset_N: Offsets, run_bytes: int, rows: CodedRows, packed: Tensor
) -> None:
    """Write the rows that `packed` stands for into runs of a pool: the inverse of `encode_runs`."""
    if not _run_native("baton_decode_runs", pool, offset_N, run_bytes, rows, packed):
        coded = packed.view(rows.codes).view(-1, rows.coded_bytes)
        unpack_runs(pool, offset_N, run_bytes, decode_rows(coded, rows.dtype).view(-1).view(torch.uint8))


def _run_native(
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
        _check_pages(pages, ids_N, codes, packed)
        packed.copy_(encode_rows(pages[ids_N], codes))


def decode_pages(pages: Tensor, ids_N: Tensor, codes: torch.dtype, packed: Tensor) -> None:
    """Write the rows that `packed` stands for into `pages`: the inverse of `encode_pages`.

    The ids are distinct; the caller guarantees that.
    """
    if pages.is_cuda:
        decode_pages_triton(pages, ids_N, codes, packed)
    else:
        _check_pages(pages, ids_N, codes, packed)
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
    _launch(encode_pages_kernel, pages, ids_N, codes, packed)


def decode_pages_triton(pages: Tensor, ids_N: Tensor, codes: torch.dtype, packed: Tensor) -> None:
    """`decode_pages` on a GPU."""
    _launch(decode_pages_kernel, pages, ids_N, codes, packed)


def _launch(run: Kernel, pages: Tensor, ids_N: Tensor, codes: torch.dtype, packed: Tensor) -> None:
    _check_pages(pages, ids_N, codes, packed)
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


def _check_pages(pages: Tensor, ids_N: Tensor, codes: torch.dtype, packed: Tensor) -> None:
    if pages.dim() != 3 or not pages.is_contiguous() or pages.shape[2] % 2 or codes not in ROW_FORMATS:
        raise ValueError(f"pages must be contiguous [P, R, D], D even, got {tuple(pages.shape)} as {codes}")
    check_page_ids(ids_N, pages.device)
    expected = (len(ids_N), pages.shape[1], pages.shape[2] + SCALE_BYTES)
    if packed.shape != expected or packed.dtype != torch.uint8 or not packed.is_contiguous():
        found = f"{packed.dtype} {tuple(packed.shape)}"
        raise ValueError(f"codes must be contiguous uint8 {expected}, got {found}")
    if packed.device != pages.device:
        raise ValueError(f"codes must be on {pages.device} like the pages, got {packed.device}")
