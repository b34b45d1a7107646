"""Rotary embedding by the C kernel. Shapes: T tokens, H query heads, K kv heads, D head dim, M positions."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from baton.kernels.rope import RopeScaling, rope, rope_reference, rope_table
from tests.kernels.outcomes import normal

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 2**-7}  # a fused multiply-add may move one rounding
MAX_POSITIONS = 50


def table(head_dim: int) -> Tensor:
    return rope_table(head_dim, MAX_POSITIONS, 100.0, RopeScaling())


@given(
    positions=st.lists(st.integers(0, MAX_POSITIONS - 1), max_size=6),
    num_heads=st.integers(1, 7),
    num_kv_heads=st.integers(1, 3),
    half=st.integers(1, 40),
    dtype=st.sampled_from(DTYPES),
)
def test_a_fused_projection_turns_in_place(
    positions: list[int], num_heads: int, num_kv_heads: int, half: int, dtype: torch.dtype
) -> None:
    num_rotated = num_heads + num_kv_heads
    qkv = normal(len(positions), num_rotated + num_kv_heads, 2 * half, dtype=dtype, device=CPU)
    expected, cos_sin = qkv.clone(), table(2 * half)
    for turn, heads in ((rope, qkv), (rope_reference, expected)):
        turn(heads[:, :num_heads], heads[:, num_heads:num_rotated], cos_sin, torch.tensor(positions).long())
    torch.testing.assert_close(qkv, expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])
    assert torch.equal(qkv[:, num_rotated:], expected[:, num_rotated:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_token_has_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    query, key = (normal(200, heads, 64, dtype=dtype, device=CPU) for heads in (8, 2))
    positions = torch.arange(200) % MAX_POSITIONS
    alone = [heads.clone() for heads in (query, key)]
    for token in range(200):
        one = slice(token, token + 1)
        rope(alone[0][one], alone[1][one], table(64), positions[one])
    rope(query, key, table(64), positions)
    assert torch.equal(query, alone[0]) and torch.equal(key, alone[1])


def test_a_table_or_positions_that_do_not_fit_are_refused() -> None:
    query, key, positions = torch.zeros(2, 1, 8), torch.zeros(2, 1, 8), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"cos_sin must be contiguous float32 \[M, 8\]"):
        rope(query, key, table(16), positions)
    with pytest.raises(ValueError, match=r"positions must be contiguous int64 \[2\]"):
        rope(query, key, table(8), positions.int())
    with pytest.raises(ValueError, match=r"positions must be contiguous int64 \[2\]"):
        rope(query, key, table(8), torch.zeros(4, dtype=torch.int64)[::2])
