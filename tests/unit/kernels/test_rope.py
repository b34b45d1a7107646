"""Rotary embedding on the CPU, and its table against transformers' own frequencies.

Shapes: T tokens, H query heads, K kv heads, D head dim, M positions.
"""

import math
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from baton.kernels.rope import RopeScaling, rope, rope_reference, rope_table
from tests.kernels.outcomes import DTYPES, normal

CPU = torch.device("cpu")
NATIVE_DTYPES = (torch.float32, torch.bfloat16)
# A fused multiply-add may move one rounding.
TOLERANCES = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 2**-7}
MAX_POSITIONS = 50


def table(head_dim: int) -> torch.Tensor:
    return rope_table(head_dim, MAX_POSITIONS, 100.0, RopeScaling())


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


# The table.

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
PARAMETERS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": LLAMA3,
    "llama3_wide": LLAMA3 | {"high_freq_factor": 16.0, "factor": 32.0},
    "yarn": YARN,
    "yarn_attention_factor": YARN | {"attention_factor": 0.8},
    "yarn_betas": YARN | {"beta_fast": 16.0, "beta_slow": 2.0},
    "yarn_mscale": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn_without_truncation": YARN | {"truncate": False},
}


def scaling_of(parameters: dict[str, Any]) -> RopeScaling:
    renamed = dict(parameters)
    renamed["original_max_positions"] = renamed.pop("original_max_position_embeddings", 0)
    return RopeScaling(**renamed)


@pytest.mark.parametrize("head_dim", [32, 80, 128])
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("parameters", PARAMETERS.values(), ids=PARAMETERS)
def test_table_is_transformers(parameters: dict[str, Any], theta: float, head_dim: int) -> None:
    config = transformers.LlamaConfig(
        hidden_size=head_dim * 2,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=2048,
        rope_theta=theta,
        rope_parameters=parameters | {"rope_theta": theta},
        rope_scaling=parameters | {"rope_theta": theta},  # the name before transformers 5
    )
    compute: Any = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[parameters["rope_type"]]
    frequency, attention_factor = compute(config, CPU)
    angle = torch.arange(2048, dtype=torch.float32)[:, None] * frequency.float()
    expected = torch.cat((angle.cos(), angle.sin()), dim=1) * attention_factor
    made = rope_table(head_dim, 2048, theta, scaling_of(parameters))
    assert made.dtype == torch.float32 and made.is_contiguous()
    torch.testing.assert_close(made, expected, atol=1e-4, rtol=0)  # fp32 angles of up to 2,048 radians


def test_default_table_is_the_plain_formula() -> None:
    made = rope_table(8, 100, 10000.0, RopeScaling()).double()
    angle = torch.arange(100).double()[:, None] / 10000 ** (torch.arange(0, 8, 2).double() / 8)
    torch.testing.assert_close(made, torch.cat((angle.cos(), angle.sin()), dim=1), atol=1e-5, rtol=0)


YARN_TO_INFINITY: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": math.e**10,
    "original_max_positions": 64,
    "mscale": 1.0,
    "mscale_all_dim": -1.0,
}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_type": "dynamic"}, "rope_type must be"),
        ({"rope_type": "linear", "factor": 0.0}, "factor must be positive"),
        ({"rope_type": "llama3", "factor": 8.0}, "llama3 rope needs original_max_positions"),
        (YARN_TO_INFINITY, "make the attention factor inf"),
    ],
)
def test_bad_scaling_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RopeScaling(**fields)


def test_odd_head_dim_is_refused() -> None:
    with pytest.raises(ValueError, match="head_dim must be even"):
        rope_table(7, 16, 10000.0, RopeScaling())
