"""Each rank's part of a layer: two ranks compute the same bits as one. Rotary tables against transformers."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from baton.engine.models.layers import ColumnParallelLinear, rope_table
from baton.engine.models.loading.checkpoint import JsonObject
from baton.engine.models.parallel import TensorParallel
from baton.engine.models.registry import RopeConfig, RopeScaling, read_rope_config
from baton.engine.runner.replica_rank import ReplicaRank
from baton.errors import ConfigError
from baton.kernels.linear import linear
from baton.kernels.quantised import WeightFormat
from tests.kernels.quantised_cases import random_matrix
from tests.tensor_parallel_peer import DTYPES, JOBS, Pair
from tests.tiny_models import dummy_parameters

dtypes = pytest.mark.parametrize("dtype", DTYPES)


@dtypes
@pytest.mark.parametrize("job", ["embedding", "head", "columns", "rows"])
def test_two_ranks_give_the_bits_of_one(pair: Pair, tiny_model: Path, job: str, dtype: str) -> None:
    together, alone = pair.run(job, tiny_model, dtype), JOBS[job](ReplicaRank(), tiny_model, dtype)
    assert together.dtype == alone.dtype and torch.equal(together, alone)


def test_heads_that_cannot_be_split_are_refused_by_name(tiny_model: Path) -> None:
    parameters = dummy_parameters(tiny_model, TensorParallel(0, 5)).scope("model.layers.0.self_attn")
    with pytest.raises(ConfigError, match=r"q_proj.weight: 64 cannot be split over 5"):
        ColumnParallelLinear(parameters, {"q_proj": 64}, 32)


def test_experts_in_different_formats_are_dequantised(tiny_model: Path) -> None:
    """A checkpoint may give zeros for some experts only."""
    parameters = dummy_parameters(tiny_model, TensorParallel(0, 1))
    formats = (WeightFormat.INT4, WeightFormat.INT4_ZEROS)
    matrices = [random_matrix(each, 5, 32, 16) for each in formats]
    packed = parameters.pack_experts(matrices).weights
    assert [weight.format for weight in packed] == 2 * [WeightFormat.PLAIN]
    x = torch.eye(32)
    for weight, matrix in zip(packed, matrices, strict=True):
        torch.testing.assert_close(linear(x, weight), matrix.dequantised().T)


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


@pytest.mark.parametrize(("head_dim", "theta"), [(80, 10000.0), (128, 500000.0)])
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
    frequency, attention_factor = compute(config, torch.device("cpu"))
    angle = torch.arange(2048, dtype=torch.float32)[:, None] * frequency.float()
    expected = torch.cat((angle.cos(), angle.sin()), dim=1) * attention_factor
    made = rope_table(head_dim, 2048, RopeConfig(theta=theta, scaling=scaling_of(parameters)))
    assert made.dtype == torch.float32 and made.is_contiguous()
    torch.testing.assert_close(made, expected, atol=1e-4, rtol=0)  # fp32 angles of up to 2,048 radians


@pytest.mark.parametrize(("max_positions", "seq_len"), [(1024, 1000), (2048, 2048)], ids=["short", "long"])
def test_longrope_of_a_part_of_each_head_is_transformers(max_positions: int, seq_len: int) -> None:
    factors = {"short_factor": [1.0, 1.5, 2.0], "long_factor": [1.5, 4.0, 9.0]}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75, **factors}
    oracle = transformers.Phi3Config(
        hidden_size=32,
        num_attention_heads=4,
        max_position_embeddings=2048,
        original_max_position_embeddings=1024,
        rope_parameters=dict(rope),
        pad_token_id=None,
    )
    compute: Any = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["longrope"]
    frequency, attention_factor = compute(oracle, torch.device("cpu"), seq_len=seq_len)
    angle = torch.arange(max_positions, dtype=torch.float32)[:, None] * frequency
    keys = {"max_position_embeddings": 2048, "original_max_position_embeddings": 1024}
    config = read_rope_config(JsonObject({**keys, "rope_parameters": rope}, "config.json"))
    cos, sin = rope_table(8, max_positions, config).chunk(2, dim=1)
    torch.testing.assert_close(cos[:, :3], angle.cos() * attention_factor, atol=1e-4, rtol=0)
    torch.testing.assert_close(sin[:, :3], angle.sin() * attention_factor, atol=1e-4, rtol=0)
    assert (cos[:, 3] == 1).all() and (sin[:, 3] == 0).all()


def test_default_table_is_the_plain_formula() -> None:
    made = rope_table(8, 100, RopeConfig()).double()
    angle = torch.arange(100).double()[:, None] / 10000 ** (torch.arange(0, 8, 2).double() / 8)
    torch.testing.assert_close(made, torch.cat((angle.cos(), angle.sin()), dim=1), atol=1e-5, rtol=0)


YARN_TO_INFINITY: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": math.e**10,
    "original_max_positions": 64,
    "mscale": 1.0,
    "mscale_all_dim": -1.0,
}


def test_scaling_to_infinity_is_refused() -> None:
    with pytest.raises(ValueError, match="make the attention factor inf"):
        RopeScaling(**YARN_TO_INFINITY)
