"""Paged keys and values with scattered pages, unwritten slots and padded tables.

Shapes: B sequences, H query heads, K kv heads, D head dim, P pages, S page size.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, Final

import torch
from torch import Tensor

from baton.kernels.kv_rows import SCALE_BYTES, encode_rows
from baton.kernels.paged_attention import paged_attention_decode_triton
from baton.kernels.prefill_attention import prefill_attention_reference, prefill_attention_triton
from tests.kernels.outcomes import DTYPES, Outcome, normal, short

NO_PAGE: Final = 2**30  # far outside the pool: a kernel that reads there fails


@dataclass(frozen=True)
class Shape:
    page_size: int
    num_kv_heads: int
    group_size: int
    head_dim: int
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    codes: torch.dtype | None = None  # of pages of one byte
    value_dim: int | None = None  # of pages with one plane

    def options(self, device: torch.device) -> dict[str, Any]:
        """The arguments of attention."""
        sinks = normal(self.num_heads, dtype=torch.float32, device=device) if self.has_sinks else None
        return {
            "scale": self.scale,
            "window": self.window,
            "softcap": self.softcap,
            "sinks_H": sinks,
            "value_dim": self.value_dim,
        }

    @property
    def num_planes(self) -> int:
        return 2 if self.value_dim is None else 1

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.group_size

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.head_dim)


@dataclass(frozen=True)
class PagedKv:
    pages: Tensor  # [P, L, K, S, R], one layer of a larger pool; NaN where no token was stored
    page_table: Tensor  # [B, pages] int32, NO_PAGE past the pages of a sequence
    context_lens: Tensor  # [B] int32
    dense: list[Tensor]  # [n, L, K, D] of each sequence


def paged_kv(lens: list[int], shape: Shape, dtype: torch.dtype, device: torch.device) -> PagedKv:
    """Random keys and values of sequences of these lengths."""
    rows = shape.num_planes, shape.num_kv_heads, shape.head_dim
    kvs = [normal(length + 1, *rows, dtype=dtype, device=device)[:length] for length in lens]
    return store_pages(kvs, shape, dtype, device)


def store_pages(kvs: list[Tensor], shape: Shape, dtype: torch.dtype, device: torch.device) -> PagedKv:
    """kvs: as `PagedKv.dense`. The pages of a sequence are scattered."""
    counts = [-(-len(kv) // shape.page_size) for kv in kvs]
    num_pages = sum(counts) + 2
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(num_pages))
    layer = (num_pages, 2, shape.num_planes, shape.num_kv_heads, shape.page_size)
    if shape.codes is None:
        pages = torch.full((*layer, shape.head_dim), math.nan, dtype=dtype, device=device)[:, 1]
    else:  # 255 twice is a NaN in bf16
        rows = (*layer, shape.head_dim + SCALE_BYTES)
        pages = torch.full(rows, 255, dtype=torch.uint8, device=device)[:, 1]
    table = torch.full((len(kvs), max(counts, default=0) + 2), NO_PAGE, dtype=torch.int32)
    for sequence, (kv, count) in enumerate(zip(kvs, counts, strict=True)):
        table[sequence, :count] = order[sum(counts[:sequence]) :][:count]
        token = torch.arange(len(kv))
        page = table[sequence].long()[token // shape.page_size]
        rows_of_kv = kv if shape.codes is None else encode_rows(kv, shape.codes)
        pages[page.to(device), :, :, (token % shape.page_size).to(device)] = rows_of_kv
    pages = pages if shape.codes is None else pages.view(shape.codes)
    lens = torch.tensor([len(kv) for kv in kvs], dtype=torch.int32, device=device)
    return PagedKv(pages, table.to(device), lens, kvs)


def decode_outcome(lens: list[int], shape: Shape, dtype: torch.dtype, device: torch.device) -> Outcome:
    kv = paged_kv(lens, shape, dtype, device)
    query = normal(len(lens), shape.num_heads + 3, shape.head_dim, dtype=dtype, device=device)
    arguments = (query[:, : shape.num_heads], kv.pages, kv.page_table)
    options, starts = shape.options(device), torch.arange(len(lens) + 1)
    kernel = paged_attention_decode_triton(*arguments, kv.context_lens, **options)
    return Outcome(kernel, prefill_attention_reference(*arguments, starts, kv.context_lens, **options))


def prefill_outcome(
    chunks: list[tuple[int, int]], shape: Shape, dtype: torch.dtype, device: torch.device
) -> Outcome:
    """chunks: (tokens computed before, new tokens) of each sequence."""
    kv = paged_kv([before + new for before, new in chunks], shape, dtype, device)
    new_tokens = [new for _, new in chunks]
    cu_seqlens = torch.tensor([0, *new_tokens]).cumsum(0).to(torch.int32).to(device)
    query = normal(sum(new_tokens), shape.num_heads + 3, shape.head_dim, dtype=dtype, device=device)
    arguments = (query[:, : shape.num_heads], kv.pages, kv.page_table, cu_seqlens, kv.context_lens)
    options = shape.options(device)
    kernel = prefill_attention_triton(*arguments, **options, max_seqlen_q=max(new_tokens, default=0))
    return Outcome(kernel, prefill_attention_reference(*arguments, **options))


SHAPES = (
    Shape(page_size=1, num_kv_heads=1, group_size=1, head_dim=16),
    Shape(page_size=4, num_kv_heads=2, group_size=7, head_dim=40),
    Shape(page_size=16, num_kv_heads=1, group_size=4, head_dim=64, window=9),
    Shape(page_size=64, num_kv_heads=2, group_size=1, head_dim=80, window=70),
    Shape(page_size=16, num_kv_heads=1, group_size=4, head_dim=96, window=1),
    Shape(page_size=8, num_kv_heads=2, group_size=2, head_dim=16, window=8, softcap=1.5, has_sinks=True),
    Shape(page_size=4, num_kv_heads=1, group_size=5, head_dim=28, value_dim=20),
    Shape(page_size=16, num_kv_heads=1, group_size=2, head_dim=48, value_dim=32, window=40),
)
RAGGED_LENS = [5, 0, 130, 1]
RAGGED_CHUNKS = [(0, 5), (7, 0), (60, 70), (0, 0), (20, 1)]
DECODE_LENS = {"one": [1], "padding": [0, 0], "empty": [], "full_pages": [64]}
PREFILL_CHUNKS = {"one": [(0, 1)], "empty": [], "prefix": [(64, 3)]}

NamedRun = tuple[str, Callable[[torch.device], Outcome]]


def attention_cases() -> Iterator[NamedRun]:
    for dtype in DTYPES:
        for shape in SHAPES:
            label = f"page{shape.page_size}-group{shape.group_size}-window{shape.window}-{short(dtype)}"
            yield f"decode-ragged-{label}", partial(decode_outcome, RAGGED_LENS, shape, dtype)
            yield f"prefill-ragged-{label}", partial(prefill_outcome, RAGGED_CHUNKS, shape, dtype)
    for codes, dtype in product((torch.int8, torch.float8_e4m3fn), (torch.float32, torch.bfloat16)):
        shape = replace(SHAPES[5 if dtype is torch.float32 else 1], codes=codes)
        label = f"{short(codes)}-page{shape.page_size}-{short(dtype)}"
        yield f"decode-{label}", partial(decode_outcome, RAGGED_LENS, shape, dtype)
        yield f"prefill-{label}", partial(prefill_outcome, RAGGED_CHUNKS, shape, dtype)
    for name, lens in DECODE_LENS.items():
        yield f"decode-{name}", partial(decode_outcome, lens, SHAPES[1], torch.float32)
    for name, chunks in PREFILL_CHUNKS.items():
        yield f"prefill-{name}", partial(prefill_outcome, chunks, SHAPES[1], torch.float32)
