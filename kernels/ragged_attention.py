"""Attention of a mixed batch, decodes first, then prefill chunks, over paged keys and values.

On a GPU each part has a kernel; the C kernel of the CPU computes both in one call. A query has the same bits
in either part.

Shapes: T query tokens, B sequences, P pages of the longest sequence, H query heads, K kv heads, D head dim,
V value dim, S page_size, L planes, R elements of a row.
"""

import ctypes
from typing import Final

import torch
from torch import Tensor

from baton.kernels import native
from baton.kernels.kv_rows import kv_strides, row_format
from baton.kernels.paged_attention import new_arrivals, paged_attention_decode_triton
from baton.kernels.prefill_attention import prefill_attention_reference, prefill_attention_triton
from baton.kernels.triton.kernel import runs_triton

LANES: Final = 16  # a multiple of the lanes of any CPU
MAX_GROUP: Final = 16  # query heads a kv head, and
MAX_HEAD_DIM: Final = 576  # head size that the C kernel has room for


class AttentionArguments(ctypes.Structure):
    """`struct attention` of csrc/ops.h, field by field."""

    _fields_ = (
        ("query", ctypes.c_void_p),
        ("query_token", ctypes.c_int64),
        ("query_head", ctypes.c_int64),
        ("pages", ctypes.c_void_p),
        ("page_stride", ctypes.c_int64),
        ("value_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("page_table", ctypes.c_void_p),
        ("table_stride", ctypes.c_int64),
        ("query_starts", ctypes.c_void_p),
        ("context_lens", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("num_sequences", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("page_shift", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("padded_dim", ctypes.c_int64),
        ("value_dim", ctypes.c_int64),
        ("sinks", ctypes.c_void_p),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("is_bf16", ctypes.c_int),
        ("row_format", ctypes.c_int),
    )


class RaggedBatch:
    """The queries of each sequence and the pages of its keys, for every layer.

    cu_seqlens_B1 int32: queries of sequence b are [cu_seqlens[b], cu_seqlens[b + 1]). context_lens_B int32
    counts the keys of each sequence, those of its queries included; 0 marks padding, which outputs
    zeros. page_table_BP int32. The first `num_decodes` sequences have one query each.
    """

    __slots__ = (
        "arguments",
        "arrivals",
        "context_lens_B",
        "cu_seqlens_B1",
        "max_seqlen_q",
        "num_decodes",
        "page_table_BP",
        "prefill_cu_seqlens",
        "scratch",
    )

    def __init__(
        self,
        *,
        cu_seqlens_B1: Tensor,
        context_lens_B: Tensor,
        page_table_BP: Tensor,
        num_decodes: int,
        max_seqlen_q: int,
    ) -> None:
        self.cu_seqlens_B1 = cu_seqlens_B1
        self.context_lens_B = context_lens_B
        self.page_table_BP = page_table_BP
        self.num_decodes = num_decodes
        self.max_seqlen_q = max_seqlen_q
        # For the GPU: made once a step, since every launch counts.
        self.arrivals = torch.empty(0, dtype=torch.int32)
        self.prefill_cu_seqlens = cu_seqlens_B1[num_decodes:]
        # For the C kernel: fields that the layers share are filled in once.
        self.arguments = AttentionArguments()
        self.scratch = torch.empty(0, dtype=torch.int64)
        if not runs_triton(cu_seqlens_B1):
            self._prepare_native()
        elif num_decodes < len(context_lens_B):
            self.prefill_cu_seqlens = self.prefill_cu_seqlens - num_decodes

    def _prepare_native(self) -> None:
        num_sequences = self.context_lens_B.shape[0]
        self.scratch = torch.empty(num_sequences + 1, dtype=torch.int64)
        arguments = self.arguments
        arguments.page_table = self.page_table_BP.data_ptr()
        arguments.table_stride = self.page_table_BP.stride(0)
        arguments.query_starts = self.cu_seqlens_B1.data_ptr()
        arguments.context_lens = self.context_lens_B.data_ptr()
        arguments.num_sequences = num_sequences


def ragged_attention(
    query_THD: Tensor,
    kv_pages: Tensor,
    batch: RaggedBatch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
    value_dim: int | None = None,
) -> Tensor:
    """softmax(scale * q . k) v -> [T, H, V]; a query at position p sees keys (p - window, p], or
    all up to p without a window.

    kv_pages: [num_pages, L, K, S, R], strided over pages, rows as in kv_rows.py; the keys of this batch are
    stored already.
    softcap: a score s becomes softcap * tanh(s / softcap). sinks_H: fp32, for each head a score beside those
    of the keys, whose value is zero. value_dim: V, of pages with one plane; a value is the beginning of its
    key.
    """
    num_heads, head_dim = query_THD.shape[1:]
    options = (scale, window, softcap, sinks_H, value_dim or head_dim)
    if runs_triton(query_THD):
        return _ragged_attention_triton(query_THD, kv_pages, batch, *options)
    several = _as_several_heads(kv_pages, num_heads)
    if native_handles(query_THD.dtype, num_heads // several.shape[2], head_dim):
        return _ragged_attention_native(query_THD, several, batch, *options)
    return prefill_attention_reference(  # decodes are chunks of one token
        query_THD,
        kv_pages,
        batch.page_table_BP,
        batch.cu_seqlens_B1,
        batch.context_lens_B,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks_H=sinks_H,
        value_dim=value_dim,
    )


def _as_several_heads(kv_pages: Tensor, num_heads: int) -> Tensor:
    """The same pages. A single kv head of many query heads stands there several times, for MAX_GROUP each."""
    if kv_pages.shape[2] > 1:
        return kv_pages
    least = -(-num_heads // MAX_GROUP)
    num_copies = next(copies for copies in range(least, num_heads + 1) if num_heads % copies == 0)
    return kv_pages.expand(-1, -1, num_copies, -1, -1)


def native_handles(dtype: torch.dtype, group_size: int, head_dim: int) -> bool:
    """True when the C kernel takes heads of this kind; it has room for so many query heads a kv head."""
    return (
        native.handles(dtype) and head_dim % 2 == 0 and head_dim <= MAX_HEAD_DIM and group_size <= MAX_GROUP
    )


def describe_heads(
    arguments: AttentionArguments,
    num_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    kv_pages: Tensor,
    scale: float,
    value_dim: int,
) -> None:
    """Fill in the fields that are the same for every layer of a model. dtype: of the queries.

    ValueError for pages that do not take heads of this kind.
    """
    _, _, num_kv_heads, page_size, _ = kv_pages.shape
    arguments.num_heads = num_heads
    arguments.num_kv_heads = num_kv_heads
    arguments.head_dim = head_dim
    arguments.padded_dim = -(-head_dim // LANES) * LANES
    arguments.page_shift = page_size.bit_length() - 1
    arguments.value_dim = value_dim
    arguments.scale = scale
    arguments.is_bf16 = native.DTYPE_CODES[dtype]
    arguments.row_format = row_format(kv_pages, dtype, head_dim)


def _ragged_attention_native(
    query_THD: Tensor,
    kv_pages: Tensor,
    batch: RaggedBatch,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks_H: Tensor | None,
    value_dim: int,
) -> Tensor:
    num_tokens, num_heads, head_dim = query_THD.shape
    if query_THD.stride(2) != 1 or kv_pages.stride()[3:] != (kv_pages.shape[4], 1):
        raise ValueError(
            f"ragged_attention: query {query_THD.dtype} strides {query_THD.stride()}, "
            f"kv_pages {kv_pages.dtype} strides {kv_pages.stride()}: heads and page rows must be contiguous"
        )
    out_THV = torch.empty((num_tokens, num_heads, value_dim), dtype=query_THD.dtype)
    element_bytes, page_element_bytes = query_THD.element_size(), kv_pages.element_size()
    arguments = batch.arguments
    arguments.query = query_THD.data_ptr()
    arguments.query_token = query_THD.stride(0) * element_bytes
    arguments.query_head = query_THD.stride(1) * element_bytes
    arguments.pages = kv_pages.data_ptr()
    page_stride, value_stride, head_stride, _ = kv_strides(kv_pages)
    arguments.page_stride = page_stride * page_element_bytes
    arguments.value_stride = value_stride * page_element_bytes
    arguments.head_stride = head_stride * page_element_bytes
    arguments.output = out_THV.data_ptr()
    arguments.window = window or 0
    arguments.softcap = softcap or 0.0
    arguments.sinks = None if sinks_H is None else sinks_H.data_ptr()
    describe_heads(arguments, num_heads, head_dim, query_THD.dtype, kv_pages, scale, value_dim)
    native.function("baton_attention", "pp")(ctypes.addressof(arguments), batch.scratch.data_ptr())
    return out_THV


def _ragged_attention_triton(
    query_THD: Tensor,
    kv_pages: Tensor,
    batch: RaggedBatch,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks_H: Tensor | None,
    value_dim: int,
) -> Tensor:
    if kv_pages.shape[1] == 1:
        kv_pages = _as_several_heads(kv_pages, query_THD.shape[1])
    num_decodes, num_kv_heads = batch.num_decodes, kv_pages.shape[2]
    out_shape = (*query_THD.shape[:2], value_dim)
    out_THV = torch.empty(out_shape, dtype=query_THD.dtype, device=query_THD.device)
    if len(batch.arrivals) < num_decodes * num_kv_heads:
        batch.arrivals = new_arrivals(num_decodes * num_kv_heads, query_THD.device)
    paged_attention_decode_triton(
        query_THD[:num_decodes],
        kv_pages,
        batch.page_table_BP[:num_decodes],
        batch.context_lens_B[:num_decodes],
        scale=scale,
        window=window,
        softcap=softcap,
        sinks_H=sinks_H,
        value_dim=value_dim,
        arrivals=batch.arrivals,
        out_BHV=out_THV[:num_decodes],
    )
    if num_decodes < len(query_THD):
        prefill_attention_triton(
            query_THD[num_decodes:],
            kv_pages,
            batch.page_table_BP[num_decodes:],
            batch.prefill_cu_seqlens,
            batch.context_lens_B[num_decodes:],
            scale=scale,
            window=window,
            softcap=softcap,
            sinks_H=sinks_H,
            value_dim=value_dim,
            max_seqlen_q=batch.max_seqlen_q,
            out_THV=out_THV[num_decodes:],
        )
    return out_THV
