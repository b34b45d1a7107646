"""Rotary embedding on the CPU.

Shapes: T tokens, H query heads, K kv heads, D head dim, M positions.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.models.layers import rope_table
from baton.engine.models.registry import RopeConfig
from baton.kernels.store_kv import rope, rope_reference
from tests.kernels.outcomes import DTYPES, normal

CPU = torch.device("cpu")
NATIVE_DTYPES = (torch.float32, torch.bfloat16)
# A fused multiply-add may move one rounding.
TOLERANCES = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 2**-7}
MAX_POSITIONS = 50


def table(head_dim: int) -> torch.Tensor:
    return rope_table(head_dim, MAX_POSITIONS, RopeConfig(theta=100.0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reference_turns_each_pair_by_its_angle(dtype: torch.dtype) -> None:
    qkv = normal(3, 9, 20, dtype=dtype, device=CPU)
    before = qkv.clone()
    angle = torch.rand(11, 10, generator=torch.Generator().manual_seed(0)) * 6
    positions = torch.tensor([0, 10, 3])
    rope_reference(qkv[:, :6], qkv[:, 6:8], torch.cat((angle.cos(), angle.sin()), dim=1), positions)
    pairs = torch.complex(*before[:, :8].double().chunk(2, dim=2))
    turned = pairs * torch.polar(torch.ones(3, 1, 10).double(), angle[positions].double()[:, None])
    expected, tolerance = torch.cat((turned.real, turned.imag), dim=2), 4 * TOLERANCES[dtype]
    torch.testing.assert_close(qkv[:, :8].double(), expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(qkv[:, 8], before[:, 8])  # the values in the same buffer


@given(
    positions=st.lists(st.integers(0, MAX_POSITIONS - 1), max_size=6),
    num_heads=st.integers(1, 7),
    num_kv_heads=st.integers(1, 3),
    half=st.integers(1, 40),
    dtype=st.sampled_from(NATIVE_DTYPES),
)
def test_native_kernel_agrees_with_the_reference(
    positions: list[int], num_heads: int, num_kv_heads: int, half: int, dtype: torch.dtype
) -> None:
    num_rotated = num_heads + num_kv_heads
    qkv = normal(len(positions), num_rotated + num_kv_heads, 2 * half, dtype=dtype, device=CPU)
    expected, cos_sin = qkv.clone(), table(2 * half)
    for turn, heads in ((rope, qkv), (rope_reference, expected)):
        turn(heads[:, :num_heads], heads[:, num_heads:num_rotated], cos_sin, torch.tensor(positions).long())
    torch.testing.assert_close(qkv, expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])
    assert torch.equal(qkv[:, num_rotated:], expected[:, num_rotated:])


@pytest.mark.parametrize("dtype", NATIVE_DTYPES, ids=str)
def test_last_part_of_each_head_turns_alone(dtype: torch.dtype) -> None:
    query, key = (normal(5, num_heads, 28, dtype=dtype, device=CPU) for num_heads in (3, 1))
    positions, expected = torch.tensor([4, 0, 9, 2, 2]), [query[..., 20:].clone(), key[..., 20:].clone()]
    before = query[..., :20].clone()
    rope(expected[0], expected[1], table(8), positions)
    rope(query[..., 20:], key[..., 20:], table(8), positions)
    assert torch.equal(query[..., 20:], expected[0]) and torch.equal(key[..., 20:], expected[1])
    assert torch.equal(query[..., :20], before)


@pytest.mark.parametrize("dtype", NATIVE_DTYPES, ids=str)
def test_token_has_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    query, key = (normal(200, heads, 64, dtype=dtype, device=CPU) for heads in (8, 2))
    positions = torch.arange(200) % MAX_POSITIONS
    alone = [heads.clone() for heads in (query, key)]
    for token in range(200):
        one = slice(token, token + 1)
        rope(alone[0][one], alone[1][one], table(64), positions[one])
    rope(query, key, table(64), positions)
    assert torch.equal(query, alone[0]) and torch.equal(key, alone[1])


def test_table_or_positions_that_do_not_fit_are_refused() -> None:
    query, key, positions = torch.zeros(2, 1, 8), torch.zeros(2, 1, 8), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"cos_sin must be contiguous float32 \[M, 8\]"):
        rope(query, key, table(16), positions)
    for wrong in (positions.int(), torch.zeros(4, dtype=torch.int64)[::2]):
        with pytest.raises(ValueError, match=r"positions must be contiguous int64 \[2\]"):
            rope(query, key, table(8), wrong)


@pytest.mark.parametrize("shape", [(1, 1, 8), (2, 1, 4)])
def test_key_of_fewer_tokens_or_elements_is_refused(shape: tuple[int, ...]) -> None:
    positions = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"key must be \[2, K, 8\]"):
        rope(torch.zeros(2, 1, 8), torch.zeros(shape), table(8), positions)


# The table.
