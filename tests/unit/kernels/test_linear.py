"""Multiplication with a packed weight, and rows of a table, on the CPU.

Shapes: T tokens, N outputs, K inputs, V rows, E hidden.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from baton.kernels import native
from baton.kernels.linear import embedding, linear, linear_reference, pack_linear
from tests.kernels.outcomes import normal

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)
# Of the largest output: fp32 sums in another order; one rounding to bf16.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2**-8}
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return normal(*shape, dtype=dtype, device=CPU)


def check(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    largest = float((x.double().abs() @ weight.double().abs().T).max()) if out.numel() else 0.0
    tolerance = TOLERANCES[out.dtype]
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=largest * 1e-6)


def test_native_kernels_are_there() -> None:
    """Everything else in this folder would pass on the fallback too, and prove nothing."""
    assert all(native.handles(dtype) for dtype in DTYPES)
    assert not native.handles(torch.float16)
    assert pack_linear(torch.zeros(3, 8)).is_packed


@given(
    num_tokens=st.integers(0, 40),
    num_outputs=st.integers(1, 100),
    num_pairs=st.integers(1, 80),  # of inputs
    dtype=st.sampled_from(DTYPES),
    out_dtype=st.sampled_from((None, *DTYPES)),
    has_bias=st.booleans(),
    num_splits=st.sampled_from((1, 2)),
)
def test_linear_is_the_product_in_float64(
    num_tokens: int,
    num_outputs: int,
    num_pairs: int,
    dtype: torch.dtype,
    out_dtype: torch.dtype | None,
    has_bias: bool,
    num_splits: int,
) -> None:
    num_inputs = 2 * num_pairs - (dtype is torch.float32)  # odd for fp32
    x, weight = random(num_tokens, num_inputs, dtype=dtype), random(num_outputs, num_inputs, dtype=dtype)
    assert pack_linear(weight).is_packed
    bias = random(num_outputs, dtype=torch.float32) if has_bias else None
    out = linear(x, pack_linear(weight), bias, num_splits=num_splits, out_dtype=out_dtype)
    assert out.shape == (num_tokens, num_outputs) and out.dtype == (out_dtype or dtype)
    check(out, x, weight, bias)


@dtypes
@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize("scale", [1.0, 1e-19, 1e-38], ids=["normal", "denormal products", "denormal inputs"])
def test_row_has_the_same_bits_in_any_batch(dtype: torch.dtype, num_splits: int, scale: float) -> None:
    """The C kernel multiplies one row in another way than several."""
    packed = pack_linear(scale * random(75, 148, dtype=dtype))
    bias = scale**2 * random(75, dtype=torch.float32)
    x = scale * random(400, 148, dtype=dtype)  # more than two blocks of rows
    alone = torch.cat([linear(row, packed, bias, num_splits=num_splits) for row in x.split(1)])
    for num_rows in [*range(1, 41), 191, 193, 400]:
        together = linear(x[-num_rows:], packed, bias, num_splits=num_splits)
        assert torch.equal(together, alone[-num_rows:]), f"{num_rows} rows"


@dtypes
def test_column_has_the_same_bits_beside_any_other(dtype: torch.dtype) -> None:
    weight, x = random(100, 64, dtype=dtype), random(5, 64, dtype=dtype)
    whole = linear(x, pack_linear(weight))
    assert torch.equal(linear(x, pack_linear(weight[37:70])), whole[:, 37:70])


@dtypes
@pytest.mark.parametrize("half", [2, 22, 48])
def test_two_splits_equal_the_sum_of_two_ranks(dtype: torch.dtype, half: int) -> None:
    weight, x = random(50, 2 * half, dtype=dtype), random(13, 2 * half, dtype=dtype)
    halves = [
        linear(x[:, part], pack_linear(weight[:, part]), out_dtype=torch.float32)
        for part in (slice(0, half), slice(half, 2 * half))
    ]
    split = linear(x, pack_linear(weight), num_splits=2, out_dtype=torch.float32)
    assert torch.equal(split, halves[0] + halves[1])


@dtypes
def test_rows_may_be_strided_and_weights_a_view(dtype: torch.dtype) -> None:
    x, weight = random(9, 131, dtype=dtype)[::2, 3:103], random(200, 47, dtype=dtype).T[:, ::2]
    check(linear(x, pack_linear(weight)), x, weight, None)
    transposed = random(100, 6, dtype=dtype).T
    check(linear(transposed, pack_linear(weight)), transposed, weight, None)


def test_packed_weight_is_a_copy() -> None:
    weight, x = random(33, 8, dtype=torch.float32), random(2, 8, dtype=torch.float32)
    packed, expected = pack_linear(weight), linear_reference(x, weight)
    weight.zero_()
    torch.testing.assert_close(linear(x, packed), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_widths_that_cannot_be_packed_are_multiplied_all_the_same(dtype: torch.dtype) -> None:
    weight, x = random(5, 7, dtype=dtype), random(3, 7, dtype=dtype)
    packed = pack_linear(weight)
    out = linear(x, packed, random(5, dtype=torch.float32), num_splits=2, out_dtype=torch.float32)
    assert not packed.is_packed and out.dtype == torch.float32
    expected = x.double() @ weight.double().T + random(5, dtype=torch.float32)
    torch.testing.assert_close(out.double(), expected, rtol=2**-6, atol=2**-6)


def test_inputs_of_another_width_or_dtype_are_refused() -> None:
    packed = pack_linear(random(5, 8, dtype=torch.float32))
    with pytest.raises(ValueError, match=r"takes 8 inputs of torch.float32, got \[2, 12\] torch.float32"):
        linear(torch.zeros(2, 12), packed)
    with pytest.raises(ValueError, match="got .* torch.bfloat16"):
        linear(torch.zeros(2, 8, dtype=torch.bfloat16), packed)


@given(
    num_tokens=st.integers(0, 300),
    num_rows=st.integers(1, 40),
    width=st.integers(1, 700),
    dtype=st.sampled_from((*DTYPES, torch.float16)),
    stride=st.sampled_from((1, 1, 2)),
)
def test_each_token_gets_a_copy_of_its_row(
    num_tokens: int, num_rows: int, width: int, dtype: torch.dtype, stride: int
) -> None:
    token_ids = torch.randint(num_rows, (num_tokens,), generator=torch.Generator().manual_seed(width))
    table = random(num_rows, width * stride, dtype=dtype)[:, ::stride]
    before = table.clone()
    found = embedding(token_ids, table)
    assert torch.equal(found, table[token_ids])
    found.add_(1)
    assert torch.equal(table, before)


def test_token_ids_of_other_shapes_and_types_are_refused() -> None:
    for token_ids in (torch.zeros(2, dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int64)):
        with pytest.raises(ValueError, match="embedding takes int64 ids"):
            embedding(token_ids, torch.zeros(3, 8))
