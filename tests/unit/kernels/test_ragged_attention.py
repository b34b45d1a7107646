"""Attention by the C kernel: right, and a query's bits depend on nothing but its own sequence.

Shapes: T query tokens, N keys of a sequence, H query heads, K kv heads, D head dim, S page size.
"""

from collections.abc import Sequence as Ordered
from dataclasses import dataclass, replace
from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from baton.kernels import native
from baton.kernels.kv_rows import decode_rows, encode_rows
from baton.kernels.ragged_attention import RaggedBatch, ragged_attention
from tests.kernels.attention_cases import PagedKv, Shape, store_pages
from tests.kernels.outcomes import normal

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)
TOLERANCES = {torch.float32: 3e-6, torch.bfloat16: 2e-2}
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@dataclass(frozen=True)
class Heads(Shape):
    page_size: int = 16
    num_kv_heads: int = 2
    group_size: int = 4
    head_dim: int = 32
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Part:
    """Queries [start, stop) of a sequence with stored keys [0, stop)."""

    sequence: int
    start: int
    stop: int


class Sequences:
    """Queries, keys and values of whole sequences: what every arrangement of parts must agree on."""

    def __init__(self, lengths: Ordered[int], heads: Heads) -> None:
        self.heads = heads
        self.qkv = [self._random(index, length) for index, length in enumerate(lengths)]

    def _random(self, index: int, length: int) -> Tensor:
        heads = self.heads
        num_heads = heads.num_heads + heads.num_planes * heads.num_kv_heads
        # One more token than asked and a width that differs with the index: different values each.
        fused = normal(length + 1, num_heads, heads.head_dim + index, dtype=heads.dtype, device=CPU)
        return fused[:length, :, : heads.head_dim].contiguous()

    def run(self, parts: Ordered[Part], page_size: int) -> list[Tensor]:
        """[T, H, V] of each part, all computed in one call; pages are scattered and hold NaN outside the
        keys."""
        heads = self.heads
        num_tokens = [part.stop - part.start for part in parts]
        num_decodes = next((i for i, count in enumerate(num_tokens) if count != 1), len(parts))
        kv = self.stored(parts, page_size)
        batch = RaggedBatch(
            cu_seqlens_B1=torch.tensor([0, *accumulate(num_tokens)], dtype=torch.int32),
            context_lens_B=kv.context_lens,
            page_table_BP=kv.page_table,
            num_decodes=num_decodes,
            max_seqlen_q=max(num_tokens, default=0),
        )
        fused = torch.cat([self.qkv[0][:0], *(self.qkv[p.sequence][p.start : p.stop] for p in parts)])
        query = fused[:, : heads.num_heads]  # strided, as the decoder's
        out = ragged_attention(query, kv.pages, batch, **heads.options(CPU))
        assert out.shape == (*query.shape[:2], heads.value_dim or heads.head_dim) and out.dtype == heads.dtype
        return list(out.split(num_tokens))

    def stored(self, parts: Ordered[Part], page_size: int) -> PagedKv:
        """The keys and values of each part."""
        heads = self.heads
        rows = [self.qkv[part.sequence][: part.stop, heads.num_heads :] for part in parts]
        kvs = [each.unflatten(1, (heads.num_planes, heads.num_kv_heads)) for each in rows]
        return store_pages(kvs, replace(heads, page_size=page_size), heads.dtype, CPU)

    def decoded(self, page_size: int = 16) -> list[Tensor]:
        """Every query alone, in a call of its own."""
        return [
            torch.cat([self.run([Part(index, t, t + 1)], page_size)[0] for t in range(len(qkv))])
            for index, qkv in enumerate(self.qkv)
        ]

    def expected(self, index: int) -> Tensor:
        """float64, one head and one query at a time."""
        heads, qkv = self.heads, self.qkv[index].double()
        sinks_H = heads.options(CPU)["sinks_H"]
        if heads.codes is not None:
            rows = encode_rows(self.qkv[index][:, heads.num_heads :], heads.codes).view(heads.codes)
            qkv[:, heads.num_heads :] = decode_rows(rows, heads.dtype).double()
        width = heads.value_dim or heads.head_dim
        out = torch.zeros(len(qkv), heads.num_heads, width, dtype=torch.float64)
        for position in range(len(qkv)):
            first = 0 if heads.window is None else max(0, position - heads.window + 1)
            for head in range(heads.num_heads):
                kv_head = heads.num_heads + head // heads.group_size
                keys = qkv[first : position + 1, kv_head]
                value_head = kv_head + (heads.num_planes - 1) * heads.num_kv_heads
                values = qkv[first : position + 1, value_head, :width]
                scores = keys @ qkv[position, head] * heads.head_dim**-0.5
                if heads.softcap is not None:
                    scores = heads.softcap * torch.tanh(scores / heads.softcap)
                if sinks_H is not None:
                    scores = torch.cat((scores, sinks_H[head, None].double()))
                out[position, head] = torch.softmax(scores, dim=0)[: len(values)] @ values
        return out


def close(got: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCES[got.dtype]
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)


PAGE_SIZES, GROUP_SIZES, WINDOWS = (1, 4, 16, 64), (1, 4, 7, 16), (None, 1, 9, 40)


@dtypes
@pytest.mark.parametrize(  # every pair of two of the three
    ("page_size", "group_size", "window"),
    [(PAGE_SIZES[i], GROUP_SIZES[j], WINDOWS[(i + j) % 4]) for i in range(4) for j in range(4)],
)
def test_whole_prompt_is_the_causal_softmax(
    dtype: torch.dtype, page_size: int, group_size: int, window: int | None
) -> None:
    heads = Heads(num_kv_heads=1, group_size=group_size, head_dim=16, window=window, dtype=dtype)
    sequences = Sequences([71], heads)
    close(sequences.run([Part(0, 0, 71)], page_size)[0], sequences.expected(0))


@dtypes
@pytest.mark.parametrize("head_dim", [2, 16, 24, 42, 64, 80, 128, 250, 256, 576])
@pytest.mark.parametrize("page_size", [4, 16])
def test_heads_of_any_size_the_kernel_has_room_for(dtype: torch.dtype, head_dim: int, page_size: int) -> None:
    sequences = Sequences([35], Heads(group_size=3, head_dim=head_dim, dtype=dtype))
    close(sequences.run([Part(0, 0, 35)], page_size)[0], sequences.expected(0))


CODES = (torch.int8, torch.float8_e4m3fn)


@dtypes
@pytest.mark.parametrize("codes", CODES, ids=str)
@pytest.mark.parametrize("head_dim", [2, 42, 64])
@pytest.mark.parametrize("page_size", [4, 16])
def test_codes_are_read_with_their_scales(
    dtype: torch.dtype, codes: torch.dtype, head_dim: int, page_size: int
) -> None:
    sequences = Sequences([35], Heads(group_size=3, head_dim=head_dim, window=20, dtype=dtype, codes=codes))
    close(sequences.run([Part(0, 0, 35)], page_size)[0], sequences.expected(0))


LATENT_HEADS = [
    Heads(num_kv_heads=1, group_size=16, head_dim=576, value_dim=512),
    Heads(num_kv_heads=1, group_size=40, head_dim=36, value_dim=20),  # more query heads than a tile has rows
    Heads(num_kv_heads=1, group_size=17, head_dim=24, value_dim=16, window=20),
    Heads(num_kv_heads=2, group_size=4, head_dim=48, value_dim=40),
]


@dtypes
@pytest.mark.parametrize("heads", LATENT_HEADS, ids=str)
@pytest.mark.parametrize("page_size", [4, 16])
def test_values_that_are_a_part_of_the_keys(dtype: torch.dtype, heads: Heads, page_size: int) -> None:
    sequences = Sequences([35], replace(heads, dtype=dtype))
    whole = sequences.run([Part(0, 0, 35)], page_size)[0]
    close(whole, sequences.expected(0))
    assert torch.equal(whole, sequences.decoded(page_size)[0])


REFERENCE_HEADS = [
    Heads(head_dim=578),
    Heads(num_kv_heads=1, group_size=20, head_dim=36, value_dim=20, dtype=torch.float16),
    Heads(group_size=17, window=9),
    Heads(head_dim=40, group_size=7, dtype=torch.float16),
    Heads(window=1, dtype=torch.float16),
    Heads(num_kv_heads=1, head_dim=96, window=30, dtype=torch.float16),
    Heads(group_size=17, codes=torch.int8),
    Heads(window=9, dtype=torch.float16, codes=torch.float8_e4m3fn),
]


@pytest.mark.parametrize("page_size", [1, 4, 64])
@pytest.mark.parametrize("heads", REFERENCE_HEADS, ids=str)
def test_unsupported_heads_are_computed_by_the_references(heads: Heads, page_size: int) -> None:
    """Decodes and chunks in one batch; the last chunk is a whole prompt."""
    sequences = Sequences([20, 1, 33, 40], heads)
    parts = [Part(0, 19, 20), Part(1, 0, 1), Part(2, 7, 33), Part(3, 0, 40)]
    tolerance = 2e-3 if heads.dtype is torch.float16 else 3e-6
    for part, got in zip(parts, sequences.run(parts, page_size), strict=True):
        expected = sequences.expected(part.sequence)[part.start : part.stop]
        torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)


@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=3),
    heads=st.builds(
        Heads,
        num_kv_heads=st.sampled_from((1, 2)),
        group_size=st.sampled_from((1, 4, 7)),
        head_dim=st.sampled_from((16, 24, 32)),
        value_dim=st.sampled_from((None, None, 14)),
        window=st.sampled_from((None, 1, 17, 40)),
        dtype=st.sampled_from(DTYPES),
        codes=st.sampled_from((None, *CODES)),
    ).filter(lambda heads: heads.value_dim is None or heads.codes is None),
    page_size=st.sampled_from((1, 4, 16, 64)),
    chunk_size=st.integers(2, 50),
)
def test_query_has_the_same_bits_in_any_chunk_page_size_and_batch(
    lengths: list[int], heads: Heads, page_size: int, chunk_size: int
) -> None:
    sequences = Sequences(lengths, heads)
    decoded = sequences.decoded()
    num_rounds = -(-max(lengths) // chunk_size)
    for start in (turn * chunk_size for turn in range(num_rounds)):
        parts = [
            Part(index, start, min(start + chunk_size, length))
            for index, length in enumerate(lengths)
            if start < length
        ]
        # Those that finished before decode their last token again, beside the others' chunks.
        decodes = [Part(i, length - 1, length) for i, length in enumerate(lengths) if start >= length]
        parts = decodes + sorted(parts, key=lambda part: part.stop - part.start > 1)
        for part, got in zip(parts, sequences.run(parts, page_size), strict=True):
            assert torch.equal(got, decoded[part.sequence][part.start : part.stop]), part


@dtypes
@pytest.mark.parametrize("group_size", [1, 4, 7])
def test_many_decodes_together_have_the_bits_of_each_alone(dtype: torch.dtype, group_size: int) -> None:
    num_sequences = 2 * native.num_threads() + 3  # enough that threads need not share a sequence
    lengths = [1 + 13 * index % 70 for index in range(num_sequences)]
    sequences = Sequences(lengths, Heads(num_kv_heads=4, group_size=group_size, dtype=dtype))
    parts = [Part(index, length - 1, length) for index, length in enumerate(lengths)]
    for part, got in zip(parts, sequences.run(parts, 16), strict=True):
        assert torch.equal(got, sequences.run([part], 16)[0]), part


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
def test_sequence_without_context_is_padding_and_yields_zeros(dtype: torch.dtype) -> None:
    sequences = Sequences([40, 0], Heads(dtype=dtype))
    alone = sequences.run([Part(0, 39, 40)], 16)[0]
    query = normal(29, 8, 32, dtype=dtype, device=CPU)
    query[0] = sequences.qkv[0][39, :8]
    kv = sequences.stored([Part(0, 39, 40), Part(1, 0, 0), Part(1, 0, 0)], 16)
    batch = RaggedBatch(
        cu_seqlens_B1=torch.tensor([0, 1, 2, 29], dtype=torch.int32),
        context_lens_B=kv.context_lens,
        page_table_BP=kv.page_table,
        num_decodes=2,
        max_seqlen_q=27,
    )
    for window in (None, 5):
        out = ragged_attention(query, kv.pages, batch, scale=sequences.heads.scale, window=window)
        assert not out[1:].any()
    out = ragged_attention(query, kv.pages, batch, scale=sequences.heads.scale)
    assert torch.equal(out[:1], alone)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
def test_empty_batch_yields_nothing(dtype: torch.dtype) -> None:
    assert Sequences([0], Heads(dtype=dtype)).run([], 16) == []


def test_scores_far_apart_neither_overflow_nor_vanish() -> None:
    sequences = Sequences([50], Heads())
    sequences.qkv[0][:, :10] *= 60.0  # queries and keys
    out = sequences.run([Part(0, 0, 50)], 16)[0]
    # A score of thousands carries an error of 1e-4, and its exponential the same, relative.
    torch.testing.assert_close(out.double(), sequences.expected(0), atol=1e-3, rtol=1e-3)


@dtypes
@pytest.mark.parametrize("window", [None, 9])
def test_soft_cap_and_sinks(dtype: torch.dtype, window: int | None) -> None:
    sequences = Sequences([70, 3], Heads(window=window, softcap=1.5, has_sinks=True, dtype=dtype))
    alone = sequences.decoded()
    for cut in (0, 33):
        parts = [Part(1, 2, 3), Part(0, cut, 70)]
        out = sequences.run(parts, 4)
        assert torch.equal(out[0], alone[1][2:]) and torch.equal(out[1], alone[0][cut:])
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(alone[0].double(), sequences.expected(0), atol=tolerance, rtol=tolerance)


def test_strides_that_the_kernel_cannot_follow_are_refused() -> None:
    sequences = Sequences([4], Heads())
    kv = sequences.stored([Part(0, 3, 4)], 16)
    batch = RaggedBatch(
        cu_seqlens_B1=torch.tensor([0, 1], dtype=torch.int32),
        context_lens_B=kv.context_lens,
        page_table_BP=kv.page_table,
        num_decodes=1,
        max_seqlen_q=1,
    )
    with pytest.raises(ValueError, match="heads and page rows must be contiguous"):
        ragged_attention(torch.zeros(1, 8, 64)[:, :, ::2], kv.pages, batch, scale=1.0)
    with pytest.raises(ValueError, match="kv_pages torch.bfloat16"):
        ragged_attention(torch.zeros(1, 8, 32), kv.pages.bfloat16(), batch, scale=1.0)
