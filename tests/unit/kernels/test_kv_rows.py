"""Rows of pages as codes and their scale."""

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.kernels.kv_rows import LARGEST_CODE, SMALLEST_SCALE, decode_rows, encode_rows
from tests.kernels.outcomes import DTYPES

codes = pytest.mark.parametrize("codes", [torch.int8, torch.float8_e4m3fn], ids=str)


@codes
@given(data=st.data())
def test_rounding_is_bounded_by_the_largest_element(codes: torch.dtype, data: st.DataObject) -> None:
    seed, magnitude = data.draw(st.integers(0, 2**32)), 10.0 ** data.draw(st.integers(-38, 20))
    heads = torch.randn(50, 24, generator=torch.Generator().manual_seed(seed)) * magnitude
    rounded = decode_rows(encode_rows(heads, codes).view(codes), torch.float32)
    exact = heads.double()
    error, largest = (rounded - exact).abs(), exact.abs().amax(dim=-1, keepdim=True)
    # Half a step: of int8 half the scale, within 1/256 of largest / 127; of E4M3 1/16 of the element.
    half_step = (
        largest / 127 * (1 + 1 / 256) / 2 if codes is torch.int8 else exact.abs() / 16 + largest / 2**17
    )
    has_scale = (heads.abs().amax(dim=-1, keepdim=True) / LARGEST_CODE[codes]) >= SMALLEST_SCALE
    assert bool((error <= half_step * (1 + 1e-5)).where(has_scale, rounded == 0).all())


@codes
@pytest.mark.parametrize(
    ("dtype", "magnitude"),
    [
        *product(DTYPES, (1.0,)),
        *product((torch.float32, torch.bfloat16), (1e-33, 1e-35, 3e-36, 1e-36, 1e-37)),
    ],
    ids=str,
)
def test_rows_that_were_rounded_stay_as_they_are(
    codes: torch.dtype, dtype: torch.dtype, magnitude: float
) -> None:
    largest = torch.linspace(1, 2, 4096)[:, None] * magnitude  # every mantissa of a scale
    heads = torch.cat((largest, largest * (torch.rand(len(largest), 63) * 2 - 1)), dim=1).to(dtype)
    rounded = decode_rows(encode_rows(heads, codes).view(codes), dtype)
    again = decode_rows(encode_rows(rounded, codes).view(codes), dtype)
    assert torch.equal(again, rounded)
