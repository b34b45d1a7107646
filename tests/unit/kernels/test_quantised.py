"""Weights of 8 and 4 bits on the CPU. Shapes: T tokens, N outputs, K inputs, G groups."""

from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from baton.kernels import native
from baton.kernels.linear import LinearWeight, linear, pack_linear, pack_quantised
from baton.kernels.quantised import (
    Method,
    QuantisedMatrix,
    WeightFormat,
    join_rows,
    linear_quantised_reference,
    quantise,
)
from tests.kernels.outcomes import normal
from tests.kernels.quantised_cases import FORMATS, random_matrix

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)
ERRORS: dict[Method, float] = {"int8": 0.02, "fp8": 0.05, "int4": 0.2}  # of random weights, relative
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
formats = pytest.mark.parametrize("weight_format", FORMATS, ids=lambda each: each.name.lower())


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return normal(*shape, dtype=dtype, device=CPU)


def packed(made: QuantisedMatrix, dtype: torch.dtype, num_splits: int = 1) -> LinearWeight:
    weight = pack_quantised(made, dtype, num_splits=num_splits)
    assert weight.is_packed and weight.format is made.format
    return weight


def made_of(weight: Tensor, method: Method, num_splits: int = 1) -> LinearWeight:
    rounded = quantise(weight, method, num_splits=num_splits)
    assert rounded is not None
    return packed(rounded, weight.dtype, num_splits)


@given(
    weight_format=st.sampled_from(FORMATS),
    num_tokens=st.integers(0, 40),
    num_outputs=st.integers(1, 100),
    groups=st.sampled_from(((8, 1), (8, 5), (32, 3), (40, 9), (128, 1), (136, 2), (512, 1), (96, 8))),
    num_splits=st.sampled_from((1, 2)),
    dtype=st.sampled_from(DTYPES),
    has_bias=st.booleans(),
)
def test_product_is_that_of_dequantised_weights(
    weight_format: WeightFormat,
    num_tokens: int,
    num_outputs: int,
    groups: tuple[int, int],
    num_splits: int,
    dtype: torch.dtype,
    has_bias: bool,
) -> None:
    group, num_groups = groups
    num_inputs = group * num_groups * num_splits
    made = random_matrix(weight_format, num_outputs, num_inputs, group)
    x = random(num_tokens, num_inputs, dtype=dtype)
    bias = random(num_outputs, dtype=torch.float32) if has_bias else None
    out = linear(x, packed(made, dtype, num_splits), bias, num_splits=num_splits, out_dtype=torch.float32)
    with patch.object(native, "handles", lambda dtype: False):
        plain = pack_quantised(made, dtype, num_splits=num_splits)
    reference = linear(x, plain, bias, num_splits=num_splits, out_dtype=torch.float32)
    exact = x.double() @ made.dequantised().double().T + (0 if bias is None else bias.double())
    largest = float((x.double().abs() @ made.dequantised().double().abs().T).max()) if out.numel() else 0.0
    torch.testing.assert_close(out, reference, rtol=1e-5, atol=1e-6 * largest)
    tolerance = 1e-2 if weight_format.rounds_inputs else 2e-6
    torch.testing.assert_close(out.double(), exact, rtol=tolerance, atol=tolerance * largest)


@dtypes
@formats
@pytest.mark.parametrize("num_splits", [1, 2])
def test_row_has_the_same_bits_in_any_batch(
    weight_format: WeightFormat, dtype: torch.dtype, num_splits: int
) -> None:
    """The C kernels sum several groups of one row at once, and one group of many rows.

    Groups of 184 inputs become groups of 92, 8 or 4.
    """
    weight = packed(random_matrix(weight_format, 75, 368, 184), dtype, num_splits)
    x, bias = random(230, 368, dtype=dtype), random(75, dtype=torch.float32)
    alone = torch.cat([linear(row, weight, bias, num_splits=num_splits) for row in x.split(1)])
    for num_rows in [*range(1, 26), 191, 193, 230]:
        together = linear(x[-num_rows:], weight, bias, num_splits=num_splits)
        assert torch.equal(together, alone[-num_rows:]), f"{num_rows} rows"


@dtypes
@formats
@pytest.mark.parametrize("half", [8, 136, 352])
def test_two_splits_equal_the_sum_of_two_ranks(
    weight_format: WeightFormat, dtype: torch.dtype, half: int
) -> None:
    """One group lies in both halves: it is cut."""
    made, x = random_matrix(weight_format, 50, 2 * half, 2 * half), random(13, 2 * half, dtype=dtype)
    halves = [
        linear(part, packed(rank, dtype), out_dtype=torch.float32)
        for part, rank in zip(x.split(half, 1), made.chunk_inputs(2), strict=True)
    ]
    split = linear(x, packed(made, dtype, 2), num_splits=2, out_dtype=torch.float32)
    assert torch.equal(split, halves[0] + halves[1])


@formats
def test_outputs_of_two_matrices_lie_side_by_side(weight_format: WeightFormat) -> None:
    parts = [random_matrix(weight_format, rows, 64, 64 // rows, seed=rows) for rows in (2, 4)]
    joined = join_rows(parts)
    assert joined is not None and joined.group == 16
    assert torch.equal(joined.dequantised(), torch.cat([part.dequantised() for part in parts]))
    assert join_rows([parts[0], random_matrix(weight_format, 2, 32, 32)]) is None


def test_groups_that_the_kernel_does_not_take_are_multiplied_all_the_same() -> None:
    made, x = random_matrix(WeightFormat.INT4, 9, 60, 20), random(3, 60, dtype=torch.float32)
    weight = pack_quantised(made, torch.float32)
    assert weight.format is WeightFormat.PLAIN
    torch.testing.assert_close(linear(x, weight), x @ made.dequantised().T)


# Weights that are rounded as they are loaded.


@dtypes
@pytest.mark.parametrize("method", ERRORS)
def test_rounded_weights_are_near(method: Method, dtype: torch.dtype) -> None:
    for num_inputs, num_splits in ((40, 1), (704, 2), (1024, 2)):
        weight, x = random(70, num_inputs, dtype=dtype), random(6, num_inputs, dtype=dtype)
        weight[3] = 0
        out = linear(x, made_of(weight, method, num_splits), num_splits=num_splits, out_dtype=torch.float32)
        exact = linear(x, pack_linear(weight), out_dtype=torch.float32)
        assert (out - exact).norm() <= ERRORS[method] * exact.norm()
        assert not out[:, 3].any()


@pytest.mark.parametrize("method", ERRORS)
def test_weight_that_is_rounded_in_parts_has_all_outputs(method: Method) -> None:
    weight, x = random(32 * 64 + 40, 64, dtype=torch.float32), random(3, 64, dtype=torch.float32)
    parts = [linear(x, made_of(rows, method)) for rows in weight.split(1000)]
    assert torch.equal(linear(x, made_of(weight, method)), torch.cat(parts, dim=1))


@pytest.mark.parametrize("method", ERRORS)
@pytest.mark.parametrize("half", [8, 136, 352])
def test_two_ranks_round_as_one_does(method: Method, half: int) -> None:
    weight, x = random(50, 2 * half, dtype=torch.float32), random(13, 2 * half, dtype=torch.float32)
    halves = [
        linear(part, made_of(rank, method))
        for part, rank in zip(x.split(half, 1), weight.split(half, 1), strict=True)
    ]
    assert torch.equal(linear(x, made_of(weight, method, 2), num_splits=2), halves[0] + halves[1])


@dtypes
@pytest.mark.parametrize("method", ERRORS)
def test_row_that_is_not_finite_is_alone(method: Method, dtype: torch.dtype) -> None:
    weight, x = made_of(random(40, 256, dtype=dtype), method), random(3, 256, dtype=dtype)
    expected = linear(x, weight)
    for value in (float("nan"), float("inf")):
        broken = x.clone()
        broken[1, 200] = value
        out = linear(broken, weight)
        assert not out[1].isfinite().any() and torch.equal(out[::2], expected[::2])


def test_inputs_that_form_no_groups_are_not_rounded() -> None:
    assert quantise(random(5, 6, dtype=torch.float32), "int8") is None
    assert quantise(random(5, 12, dtype=torch.float32), "int4") is None


def test_reference_sums_rounded_inputs_exactly() -> None:
    made = random_matrix(WeightFormat.INT8_ROUNDED, 3, 8, 8)
    x = torch.tensor([[127.0, -127, 1, 2, 3, 4, 5, 0.4]])
    out = linear_quantised_reference(x, made, None, num_splits=1, out_dtype=torch.float32)
    torch.testing.assert_close(out, (x.round() @ made.dequantised().T), rtol=1e-6, atol=1e-5)
