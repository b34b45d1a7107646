"""The SwiGLU gate on the CPU. Shapes: T tokens, F feed-forward width."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.kernels.gated import gated, gated_reference, soft_cap
from tests.kernels.outcomes import DTYPES, normal

CPU = torch.device("cpu")
NATIVE_DTYPES = (torch.float32, torch.bfloat16)
TOLERANCES = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 2**-6}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reference_is_the_definition(dtype: torch.dtype) -> None:
    gate_up = normal(3, 41, dtype=dtype, device=CPU)[:, :38]
    gate, up = gate_up.double().chunk(2, dim=1)
    expected, tolerance = gate / (1 + torch.exp(-gate)) * up, TOLERANCES[dtype]
    torch.testing.assert_close(gated_reference(gate_up).double(), expected, rtol=tolerance, atol=tolerance)


@given(num_tokens=st.integers(0, 5), width=st.integers(1, 70), dtype=st.sampled_from(NATIVE_DTYPES))
def test_native_kernel_agrees_with_the_reference(num_tokens: int, width: int, dtype: torch.dtype) -> None:
    gate_up = normal(num_tokens, 2 * width, dtype=dtype, device=CPU) * 4
    out, tolerance = gated(gate_up), TOLERANCES[dtype] / 2  # one rounding may fall the other way
    torch.testing.assert_close(out, gated_reference(gate_up), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", NATIVE_DTYPES, ids=str)
def test_large_gates_saturate(dtype: torch.dtype) -> None:
    gate = torch.tensor([-3e38, -1e4, -200.0, -88.5, -87.0, 0.0, 87.0, 88.5, 200.0, 3e38]).to(dtype)
    out = gated(torch.cat((gate, torch.ones_like(gate)))[None])
    expected = torch.where(gate < 0, 0.0, gate).to(dtype)
    torch.testing.assert_close(out[0], expected, atol=1e-30, rtol=1e-6)


@pytest.mark.parametrize("dtype", NATIVE_DTYPES, ids=str)
def test_element_has_the_same_bits_in_any_batch_and_column(dtype: torch.dtype) -> None:
    gate_up = normal(200, 2 * 171, dtype=dtype, device=CPU)
    whole = gated(gate_up)
    assert torch.equal(whole, torch.cat([gated(row) for row in gate_up.split(1)]))
    gate, up = gate_up[0].chunk(2)
    for width in range(1, 48):  # the last width % 16 elements go one by one
        assert torch.equal(gated(torch.cat((gate[:width], up[:width]))[None])[0], whole[0, :width])


def test_exponential_of_any_nan_is_nan() -> None:
    payloads = torch.tensor([0, 1, 0x1FF, 0x3FFFFF], dtype=torch.int32)
    nans = torch.cat((payloads + 0x7FC00000, payloads - 0x400000)).view(torch.float32)
    assert nans.isnan().all()
    assert soft_cap(nans, 5.0).isnan().all()
