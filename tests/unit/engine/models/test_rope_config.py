"""The oracle is `transformers`: its parameters and its attention factor for the same settings."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from baton.engine.models.checkpoint import JsonObject, read_json
from baton.engine.models.registry import RopeConfig, read_rope_config
from baton.errors import ModelError
from baton.kernels.rope import RopeScaling, attention_factor

THETA = 5000.0
MAX_POSITIONS = 256
SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.2, "beta_fast": 16.0},
    {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5, "truncate": False},
    {"rope_type": "yarn", "factor": 0.5},
]
FIELDS = ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "truncate")


def read(**keys: Any) -> RopeConfig:
    return read_rope_config(JsonObject({"max_position_embeddings": MAX_POSITIONS} | keys, "config.json"))


def assert_means_the_same(rope: RopeConfig, oracle: LlamaConfig) -> None:
    meant, scaling = oracle.rope_parameters, rope.scaling
    assert (scaling.rope_type, rope.theta) == (meant["rope_type"], meant["rope_theta"])
    assert {name: getattr(scaling, name) for name in FIELDS if name in meant} == {
        name: meant[name] for name in FIELDS if name in meant
    }
    if scaling.rope_type in ("llama3", "yarn"):
        assert scaling.original_max_positions == meant["original_max_position_embeddings"]
    if scaling.rope_type != "default":
        _, expected = ROPE_INIT_FUNCTIONS[scaling.rope_type](oracle, "cpu")
        assert attention_factor(scaling) == pytest.approx(expected)


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: scaling["rope_type"])
@pytest.mark.parametrize("spelling", ["rope_type", "type"])
def test_every_type_in_the_older_spelling(scaling: dict[str, Any], spelling: str) -> None:
    oracle = LlamaConfig(
        max_position_embeddings=MAX_POSITIONS, rope_parameters=scaling | {"rope_theta": THETA}
    )
    old = {spelling if name == "rope_type" else name: value for name, value in scaling.items()}
    assert_means_the_same(read(rope_theta=THETA, rope_scaling=old), oracle)


@pytest.mark.parametrize("scaling", [{"rope_type": "default"}, *SCALINGS], ids=lambda s: s["rope_type"])
def test_every_type_as_transformers_writes_it(tmp_path: Path, scaling: dict[str, Any]) -> None:
    oracle = LlamaConfig(
        max_position_embeddings=MAX_POSITIONS, rope_parameters=scaling | {"rope_theta": THETA}
    )
    oracle.save_pretrained(tmp_path)
    assert "rope_parameters" in json.loads((tmp_path / "config.json").read_text())
    assert_means_the_same(read_rope_config(read_json(tmp_path / "config.json")), oracle)


@pytest.mark.parametrize("keys", [{}, {"rope_scaling": None}, {"rope_parameters": {}}])
def test_absent_keys_mean_the_plain_embedding(keys: dict[str, Any]) -> None:
    assert read(**keys) == RopeConfig(theta=10000.0, scaling=RopeScaling(rope_type="default"))


def test_yarn_without_a_factor_derives_it_from_the_contexts() -> None:
    rope = read(rope_scaling={"type": "yarn", "original_max_position_embeddings": 64})
    assert rope.scaling.factor == MAX_POSITIONS / 64


def test_the_outer_original_context_wins() -> None:
    scaling = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    rope = read(rope_scaling=scaling, original_max_position_embeddings=32)
    assert rope.scaling.original_max_positions == 32


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rope_theta": -1.0}, "'rope_theta' should be a number above 0"),
        ({"rope_theta": "much"}, "'rope_theta' should be float, got 'much'"),
        ({"partial_rotary_factor": 0.5}, "'partial_rotary_factor' other than 1"),
        (
            {"rope_scaling": {"type": "longrope"}},
            "'longrope' is not known; known are default, lin",
        ),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: key 'factor' is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "'factor' should be a number above 0, got 0"),
        ({"rope_scaling": 8}, "'rope_scaling' should be dict, got 8"),
        ({"rope_parameters": {"full_attention": {}}}, "for each layer type is not supported"),
        (
            {"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 1}},
            "'high_freq_factor' 1.0 should exceed 'low_freq_factor' 4.0",
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2, "beta_fast": 0.5}},
            "'beta_fast' 0.5 should be at least 'beta_slow' 1.0",
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2, "attention_factor": -1}},
            "'attention_factor' should be a number above 0, got -1",
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2, "mscale": -20, "mscale_all_dim": 1}},
            "rope_scaling: mscale -20.0 and mscale_all_dim 1.0 make the attention factor -0.36",
        ),
    ],
)
def test_nonsense_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read(**keys)
