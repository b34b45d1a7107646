"""The SwiGLU gate by the C kernel. Shapes: T tokens, F feed-forward width."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.kernels.silu_mul import silu_mul, silu_mul_reference
from tests.kernels.outcomes import normal

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 2**-7}  # one rounding may fall the other way


@given(num_tokens=st.integers(0, 5), width=st.integers(1, 70), dtype=st.sampled_from(DTYPES))
def test_rows_of_any_width(num_tokens: int, width: int, dtype: torch.dtype) -> None:
    gate_up = normal(num_tokens, 2 * width, dtype=dtype, device=CPU) * 4
    out = silu_mul(gate_up)
    assert out.dtype == dtype and out.shape == (num_tokens, width)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(out, silu_mul_reference(gate_up), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_gates_saturate(dtype: torch.dtype) -> None:
    gate = torch.tensor([-3e38, -1e4, -200.0, -88.5, -87.0, 0.0, 87.0, 88.5, 200.0, 3e38]).to(dtype)
    out = silu_mul(torch.cat((gate, torch.ones_like(gate)))[None])
    expected = torch.where(gate < 0, 0.0, gate).to(dtype)
    torch.testing.assert_close(out[0], expected, atol=1e-30, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    gate_up = normal(200, 2 * 171, dtype=dtype, device=CPU)
    assert torch.equal(silu_mul(gate_up), torch.cat([silu_mul(row) for row in gate_up.split(1)]))


def test_an_element_has_the_same_bits_in_the_tail_of_a_row() -> None:
    gate, up = normal(2, 48, dtype=torch.float32, device=CPU)
    whole = silu_mul(torch.cat((gate, up))[None])[0]
    for width in range(1, 48):  # the last width % 16 elements go one by one
        assert torch.equal(silu_mul(torch.cat((gate[:width], up[:width]))[None])[0], whole[:width])
