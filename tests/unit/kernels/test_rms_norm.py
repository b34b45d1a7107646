"""Root-mean-square normalisation on the CPU. Shapes: T tokens, H heads, E normalised width."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from baton.kernels.rms_norm import rms_norm, rms_norm_reference
from tests.kernels.outcomes import DTYPES, normal

CPU = torch.device("cpu")
NATIVE_DTYPES = (torch.float32, torch.bfloat16)
# The C kernel rounds as the reference does; its mean is summed in another order, which may move one rounding.
TOLERANCES = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 2**-7}


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return normal(*shape, dtype=dtype, device=CPU)


def close(got: Tensor, expected: Tensor, scale: float = 1.0) -> None:
    assert got.shape == expected.shape and got.is_contiguous()
    tolerance = scale * TOLERANCES[got.dtype]
    torch.testing.assert_close(got.double(), expected.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 40), (0, 8), (1, 1), (2, 5, 24)], ids=str)
def test_reference_is_the_definition(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, residual = random(*shape, dtype=dtype), random(*shape, dtype=dtype).flip(-1)
    weight, added = random(shape[-1], dtype=dtype), x + residual
    outputs = rms_norm_reference(x, weight, 1e-3), rms_norm_reference(x, weight, 1e-3, residual)
    assert torch.equal(residual, added)
    for normed, rows in zip(outputs, (x.double(), added.double()), strict=True):
        quotient = rows / (rows.square().mean(-1, keepdim=True) + 1e-3).sqrt()
        close(normed, quotient * weight.double(), scale=4)


@given(
    num_tokens=st.integers(0, 9),
    num_heads=st.integers(0, 3),
    width=st.integers(1, 140),
    dtype=st.sampled_from(NATIVE_DTYPES),
)
def test_native_kernel_agrees_with_the_reference(
    num_tokens: int, num_heads: int, width: int, dtype: torch.dtype
) -> None:
    """Rows of a wider tensor: some heads of a fused projection, or whole rows."""
    shape = (num_tokens, num_heads + 2, width) if num_heads else (num_tokens, width)
    x, weight = random(*shape, dtype=dtype), random(width, dtype=dtype)
    rows = x[:, :num_heads] if num_heads else x
    close(rms_norm(rows, weight, 1e-5), rms_norm_reference(rows, weight, 1e-5))
    residual = rows.flip(0).contiguous()
    expected_residual = residual.clone()
    expected = rms_norm_reference(rows, weight, 1e-6, expected_residual)
    close(rms_norm(rows, weight, 1e-6, residual), expected)
    assert torch.equal(residual, expected_residual)


@pytest.mark.parametrize("dtype", NATIVE_DTYPES, ids=str)
def test_row_has_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    x, weight = random(300, 333, dtype=dtype), random(333, dtype=dtype)  # enough for several threads
    together = rms_norm(x, weight, 1e-5)
    assert torch.equal(together, torch.cat([rms_norm(row, weight, 1e-5) for row in x.split(1)]))
    residual = x.flip(0).contiguous()
    parts = zip(x.split(1), residual.clone().split(1), strict=True)
    alone = torch.cat([rms_norm(row, weight, 1e-5, row_residual) for row, row_residual in parts])
    assert torch.equal(rms_norm(x, weight, 1e-5, residual), alone)
    assert torch.equal(rms_norm(residual, weight, 1e-5), alone)


def test_residual_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"residual must be torch.float32 \(2, 8\)"):
        rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-5, torch.zeros(3, 8))
