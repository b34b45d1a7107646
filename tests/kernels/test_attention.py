"""Attention over pages, on the CPU, against float64 softmax over a dense copy and against torch's own."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from baton.kernels.paged_attention import paged_attention_decode, paged_attention_decode_reference
from baton.kernels.prefill_attention import prefill_attention, prefill_attention_reference
from tests.kernels.attention_cases import DECODE_LENS, PREFILL_CHUNKS, SHAPES, Shape, paged_kv
from tests.kernels.outcomes import DTYPES, normal

CPU = torch.device("cpu")
TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}

decodes = pytest.mark.parametrize("decode", [paged_attention_decode, paged_attention_decode_reference])
# The bound on the chunk lengths only sizes the GPU's tiles; the reference does without.
prefills = pytest.mark.parametrize(
    "prefill", [partial(prefill_attention, max_seqlen_q=70), prefill_attention_reference]
)
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def attend(query_THD: Tensor, dense: Tensor, shape: Shape) -> Tensor:
    """Float64, one query at a time, written from the definition; query t is the (n - T + t)-th token."""
    out = torch.empty(query_THD.shape, dtype=torch.float64)
    for token in range(len(query_THD)):
        position = len(dense) - len(query_THD) + token
        first = 0 if shape.window is None else max(0, position - shape.window + 1)
        for head in range(shape.num_heads):
            keys, values = dense[first : position + 1, :, head // shape.group_size].double().unbind(1)
            weights = torch.softmax(keys @ query_THD[token, head].double() * shape.scale, dim=0)
            out[token, head] = weights @ values
    return out


@decodes
@dtypes
@shapes
@pytest.mark.parametrize("lens", DECODE_LENS.values(), ids=DECODE_LENS)
def test_decode_is_the_softmax_over_the_context(
    decode: partial[Tensor], dtype: torch.dtype, shape: Shape, lens: list[int]
) -> None:
    kv = paged_kv(lens, shape, dtype, CPU)
    query = normal(len(lens), shape.num_heads + 3, shape.head_dim, dtype=dtype, device=CPU)
    query = query[:, : shape.num_heads]
    out = decode(query, kv.pages, kv.page_table, kv.context_lens, scale=shape.scale, window=shape.window)
    expected = torch.zeros(out.shape, dtype=torch.float64)
    for sequence, dense in enumerate(kv.dense):
        if len(dense):
            expected[sequence] = attend(query[sequence : sequence + 1], dense, shape)[0]
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@prefills
@dtypes
@shapes
@pytest.mark.parametrize("chunks", PREFILL_CHUNKS.values(), ids=PREFILL_CHUNKS)
def test_prefill_is_the_causal_softmax_over_each_sequence(
    prefill: partial[Tensor], dtype: torch.dtype, shape: Shape, chunks: list[tuple[int, int]]
) -> None:
    kv = paged_kv([before + new for before, new in chunks], shape, dtype, CPU)
    new_tokens = [new for _, new in chunks]
    cu_seqlens = torch.tensor([0, *new_tokens]).cumsum(0).to(torch.int32)
    query = normal(sum(new_tokens), shape.num_heads + 3, shape.head_dim, dtype=dtype, device=CPU)
    query = query[:, : shape.num_heads]
    out = prefill(
        query,
        kv.pages,
        kv.page_table,
        cu_seqlens,
        kv.context_lens,
        scale=shape.scale,
        window=shape.window,
    )
    parts = zip(torch.split(query, new_tokens), kv.dense, strict=True) if chunks else ()
    expected = [attend(part, dense, shape) for part, dense in parts]
    assert out.dtype == dtype and out.shape == query.shape
    torch.testing.assert_close(
        out.double(),
        torch.cat([query[:0].double(), *expected]),
        atol=TOLERANCES[dtype],
        rtol=TOLERANCES[dtype],
    )


@prefills
def test_prefill_of_a_whole_prompt_is_torchs_causal_attention(prefill: partial[Tensor]) -> None:
    shape = Shape(page_size=16, num_kv_heads=2, group_size=3, head_dim=32)
    kv = paged_kv([45], shape, torch.float32, CPU)
    query = normal(45, shape.num_heads, shape.head_dim, dtype=torch.float32, device=CPU)
    cu_seqlens = torch.tensor([0, 45], dtype=torch.int32)
    out = prefill(query, kv.pages, kv.page_table, cu_seqlens, kv.context_lens, scale=1 / math.sqrt(32))
    keys, values = kv.dense[0].permute(1, 2, 0, 3).repeat_interleave(shape.group_size, dim=1)
    expected = F.scaled_dot_product_attention(query.transpose(0, 1), keys, values, is_causal=True)
    torch.testing.assert_close(out, expected.transpose(0, 1), atol=2e-6, rtol=2e-6)


@decodes
def test_decode_equals_the_last_row_of_prefill(decode: partial[Tensor]) -> None:
    shape = Shape(page_size=4, num_kv_heads=2, group_size=4, head_dim=24, window=11)
    kv = paged_kv([30], shape, torch.float32, CPU)
    query = normal(30, shape.num_heads, shape.head_dim, dtype=torch.float32, device=CPU)
    cu_seqlens = torch.tensor([0, 30], dtype=torch.int32)
    whole = prefill_attention_reference(
        query, kv.pages, kv.page_table, cu_seqlens, kv.context_lens, scale=0.2, window=11
    )
    last = decode(query[-1:], kv.pages, kv.page_table, kv.context_lens, scale=0.2, window=11)
    torch.testing.assert_close(last, whole[-1:], atol=2e-6, rtol=2e-6)
