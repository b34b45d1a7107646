"""The table against transformers' own frequencies, type by type."""

import math
from typing import Any

import pytest
import torch

from baton.kernels.rope import RopeScaling, rope_table

transformers = pytest.importorskip("transformers")

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
    compute = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[parameters["rope_type"]]
    frequency, attention_factor = compute(config, torch.device("cpu"))
    angle = torch.arange(2048, dtype=torch.float32)[:, None] * frequency.float()
    expected = torch.cat((angle.cos(), angle.sin()), dim=1) * attention_factor
    table = rope_table(head_dim, 2048, theta, scaling_of(parameters))
    assert table.dtype == torch.float32 and table.is_contiguous()
    torch.testing.assert_close(table, expected, atol=1e-4, rtol=0)  # fp32 angles of up to 2,048 radians


def test_default_table_is_the_plain_formula() -> None:
    table = rope_table(8, 100, 10000.0, RopeScaling()).double()
    angle = torch.arange(100).double()[:, None] / 10000 ** (torch.arange(0, 8, 2).double() / 8)
    torch.testing.assert_close(table, torch.cat((angle.cos(), angle.sin()), dim=1), atol=1e-5, rtol=0)


def test_bad_scaling_is_refused() -> None:
    with pytest.raises(ValueError, match="rope_type must be"):
        RopeScaling(rope_type="dynamic")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="factor must be positive"):
        RopeScaling(rope_type="linear", factor=0.0)
    with pytest.raises(ValueError, match="llama3 rope needs original_max_positions"):
        RopeScaling(rope_type="llama3", factor=8.0)
    with pytest.raises(ValueError, match="make the attention factor inf"):
        RopeScaling(
            rope_type="yarn", factor=math.e**10, original_max_positions=64, mscale=1.0, mscale_all_dim=-1.0
        )
    with pytest.raises(ValueError, match="head_dim must be even"):
        rope_table(7, 16, 10000.0, RopeScaling())
