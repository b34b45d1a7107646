"""Root-mean-square normalisation by the C kernel. Shapes: T tokens, H heads, E normalised width."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from baton.kernels.rms_norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from tests.kernels.outcomes import normal

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)
# The reference rounds where we do; the mean is summed in another order, which may move one rounding.
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 2**-7}
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return normal(*shape, dtype=dtype, device=CPU)


def close(got: Tensor, expected: Tensor) -> None:
    assert got.dtype == expected.dtype and got.is_contiguous()
    tolerance = TOLERANCES[got.dtype]
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@given(num_tokens=st.integers(0, 9), width=st.integers(1, 70), dtype=st.sampled_from(DTYPES))
def test_rows_of_any_width(num_tokens: int, width: int, dtype: torch.dtype) -> None:
    x, weight = random(num_tokens, width, dtype=dtype), random(width, dtype=dtype)
    close(rms_norm(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5))


@given(num_tokens=st.integers(0, 9), width=st.integers(1, 70), dtype=st.sampled_from(DTYPES))
def test_the_sum_is_kept_and_normed(num_tokens: int, width: int, dtype: torch.dtype) -> None:
    x, residual = random(num_tokens, width, dtype=dtype), random(num_tokens, 2 * width, dtype=dtype)
    residual, weight = residual[:, :width].contiguous(), random(width, dtype=dtype)
    expected_residual = residual.clone()
    expected = add_rms_norm_reference(x, expected_residual, weight, 1e-6)
    close(add_rms_norm(x, residual, weight, 1e-6), expected)
    assert torch.equal(residual, expected_residual)


@dtypes
@pytest.mark.parametrize("head_dim", [16, 24, 128])
def test_heads_of_a_fused_projection(dtype: torch.dtype, head_dim: int) -> None:
    qkv, weight = random(5, 7, head_dim, dtype=dtype), random(head_dim, dtype=dtype)
    before = qkv.clone()
    for heads in (slice(0, 4), slice(4, 5)):
        close(rms_norm(qkv[:, heads], weight, 1e-5), rms_norm_reference(qkv[:, heads], weight, 1e-5))
    assert torch.equal(qkv, before)


@dtypes
def test_a_row_has_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    x, weight = random(300, 333, dtype=dtype), random(333, dtype=dtype)  # enough for several threads
    together = rms_norm(x, weight, 1e-5)
    assert torch.equal(together, torch.cat([rms_norm(row, weight, 1e-5) for row in x.split(1)]))
    x, residual = x.clone(), x.flip(0).contiguous()
    parts = zip(x.split(1), residual.clone().split(1), strict=True)
    alone = torch.cat([add_rms_norm(row, row_residual, weight, 1e-5) for row, row_residual in parts])
    assert torch.equal(add_rms_norm(x, residual, weight, 1e-5), alone)


@dtypes
def test_norming_after_the_sum_is_norming_the_sum(dtype: torch.dtype) -> None:
    x, residual, weight = (random(6, 40, dtype=dtype), random(6, 80, dtype=dtype), random(40, dtype=dtype))
    residual = residual[:, 40:].contiguous()
    normed = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(normed, rms_norm(residual, weight, 1e-5))


def test_a_residual_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"residual must be torch.float32 \(2, 8\)"):
        add_rms_norm(torch.zeros(2, 8), torch.zeros(3, 8), torch.ones(8), 1e-5)
