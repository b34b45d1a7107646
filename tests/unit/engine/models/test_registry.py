"""The oracle is `transformers`: what its configs mean is what we must read from the files it writes."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from baton.config.engine import EngineSettings
from baton.engine.models.loading.checkpoint import MAX_COUNT, JsonObject, read_json
from baton.engine.models.registry import (
    ARCHITECTURES,
    ModelConfig,
    RopeConfig,
    RopeScaling,
    attention_factor,
    choose_max_model_len,
    read_model_config,
    read_rope_config,
)
from baton.errors import ConfigError, ModelError

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 256,
}
OLD_LLAMA: dict[str, Any] = SMALL | {
    "architectures": ["LlamaForCausalLM"],
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def read_keys(tmp_path: Path, keys: dict[str, Any]) -> ModelConfig:
    (tmp_path / "config.json").write_text(json.dumps(keys))
    return read_model_config(tmp_path)


def test_config_of_transformers_is_read(tmp_path: Path) -> None:
    oracle = transformers.LlamaConfig(**SMALL, rms_norm_eps=1e-5, dtype="bfloat16", tie_word_embeddings=True)
    oracle.save_pretrained(tmp_path)
    config = read_model_config(tmp_path)
    assert config.architecture == "LlamaForCausalLM"
    assert (config.hidden_size, config.intermediate_size, config.num_layers) == (32, 48, 4)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 8)
    assert (config.vocab_size, config.max_position_embeddings) == (64, 256)
    assert (config.rms_norm_eps, config.tie_word_embeddings, config.dtype) == (1e-5, True, "bfloat16")
    assert config.eos_token_ids == (oracle.eos_token_id,)


def test_head_dim_is_the_key_or_the_default_of_the_architecture(tmp_path: Path) -> None:
    keys = OLD_LLAMA | {"architectures": ["Qwen3ForCausalLM"]}
    assert read_keys(tmp_path, keys).head_dim == transformers.Qwen3Config().head_dim
    assert read_keys(tmp_path, keys | {"head_dim": 16}).head_dim == 16


def test_older_spelling(tmp_path: Path) -> None:
    config = read_keys(tmp_path, OLD_LLAMA)
    assert config.rope.theta == 5000.0
    assert config.rope.scaling.rope_type == "default"
    assert config.dtype == "bfloat16"
    assert config.initializer_range == 0.02


def test_absent_kv_heads_mean_one_for_every_head(tmp_path: Path) -> None:
    keys = {key: value for key, value in OLD_LLAMA.items() if key != "num_key_value_heads"}
    assert read_keys(tmp_path, keys).num_kv_heads == 4
    assert read_keys(tmp_path, keys | {"num_key_value_heads": None}).num_kv_heads == 4


@pytest.mark.parametrize(("found", "expected"), [([3, 5], (3, 5)), (None, (7,))])
def test_generation_config_decides_the_end_tokens_unless_they_are_null(
    tmp_path: Path, found: list[int] | None, expected: tuple[int, ...]
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": found}))
    assert read_keys(tmp_path, OLD_LLAMA | {"eos_token_id": 7}).eos_token_ids == expected


@pytest.mark.parametrize(
    ("tokenizer_config", "expected"),
    [
        ({"eos_token": "<|im_end|>", "added_tokens_decoder": {"9": {"content": "<|im_end|>"}}}, (7, 9)),
        ({"eos_token": {"__type": "AddedToken", "content": "<|im_end|>"}}, (7, 8)),  # of tokenizer.json
        ({"eos_token": "</s>", "added_tokens_decoder": {"7": {"content": "</s>"}}}, (7,)),
        ({"eos_token": "</s>"}, (7,)),  # no file has its id
        ({"eos_token": "</s>", "added_tokens_decoder": {"64": {"content": "</s>"}}}, (7,)),  # never sampled
        ({"eos_token": None}, (7,)),
    ],
)
def test_end_token_of_the_tokenizer_is_one_of_the_model(
    tokenizer_config: dict[str, Any], expected: tuple[int, ...], tmp_path: Path
) -> None:
    """Fine-tunes for chats keep the generation_config.json of a base model that ends at another token."""
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    added = {"added_tokens": [{"id": 8, "content": "<|im_end|>", "special": True}], "model": {"vocab": {}}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(added))
    assert read_keys(tmp_path, OLD_LLAMA).eos_token_ids == expected


@pytest.mark.parametrize("text", ['{"eos_token": 3}', '{"eos_token"', "[" * 100_000])
def test_damaged_tokenizer_config_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(ModelError, match="tokenizer_config.json: "):
        read_keys(tmp_path, OLD_LLAMA)


def test_unknown_architecture_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="OPTForCausalLM.*not known") as error:
        read_keys(tmp_path, OLD_LLAMA | {"architectures": ["OPTForCausalLM"]})
    assert all(name in str(error.value) for name in ARCHITECTURES)


@pytest.mark.parametrize(
    "key",
    [
        "architectures",
        "hidden_size",
        "intermediate_size",
        "max_position_embeddings",
        "num_attention_heads",
        "num_hidden_layers",
        "rms_norm_eps",
        "vocab_size",
    ],
)
def test_missing_key_is_named_with_its_file(tmp_path: Path, key: str) -> None:
    keys = {name: value for name, value in OLD_LLAMA.items() if name != key}
    with pytest.raises(ModelError, match=f"config.json: key '{key}' is missing"):
        read_keys(tmp_path, keys)


COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "strategy": "channel"}}},
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 0}, "'hidden_size' should be 1 to"),
        ({"num_hidden_layers": -1}, "'num_hidden_layers' should be 1 to 4096, got -1"),
        ({"num_hidden_layers": 10**9}, "'num_hidden_layers' should be 1 to 4096"),
        ({"vocab_size": "64"}, "'vocab_size' should be int, got '64'"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3"),
        ({"hidden_size": 30}, "'hidden_size' 30 is not a multiple of 4"),
        ({"head_dim": 7}, "even head dimension, got 7"),
        ({"rms_norm_eps": 0.0}, "'rms_norm_eps' should be a number above 0, got 0"),
        ({"torch_dtype": "float8"}, "'dtype' should be one of float32, bfloat16, float16, got 'float8'"),
        ({"eos_token_id": 64}, r"'eos_token_id' should be in \[0, 64\), got 64"),
        ({"eos_token_id": "end"}, "'eos_token_id' should be int"),
        ({"hidden_act": "gelu"}, "'hidden_act' should be 'silu', got 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "key 'quant_method' is missing"),
        (
            {"quantization_config": {"quant_method": "bitsandbytes"}},
            "quant_method 'bitsandbytes' is not supported; supported are awq, compressed-tensors, fp8, gptq",
        ),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "'mxfp4' is not supported"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 3}}, "4 or 8 bits is supported, got 3"),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4, "dynamic": {"lm_head": {}}}},
            "'dynamic' is not supported",
        ),
        (
            {"quantization_config": {"quant_method": "awq", "bits": 4, "version": "gemv"}},
            "got 'gemv', 4 bits",
        ),
        (
            {"quantization_config": COMPRESSED | {"format": "marlin-24"}},
            "format 'marlin-24' with int weights",
        ),
        ({"quantization_config": COMPRESSED | {"config_groups": {"a": {}, "b": {}}}}, "got a, b"),
    ],
)
def test_invalid_key_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_keys(tmp_path, OLD_LLAMA | change)


# The rotary embedding.

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


def read_rope(**keys: Any) -> RopeConfig:
    return read_rope_config(JsonObject({"max_position_embeddings": MAX_POSITIONS} | keys, "config.json"))


def assert_means_the_same(rope: RopeConfig, oracle: "transformers.LlamaConfig") -> None:
    meant, scaling = oracle.rope_parameters, rope.scaling
    assert (scaling.rope_type, rope.theta) == (meant["rope_type"], meant["rope_theta"])
    assert {name: getattr(scaling, name) for name in FIELDS if name in meant} == {
        name: meant[name] for name in FIELDS if name in meant
    }
    if scaling.rope_type in ("llama3", "yarn"):
        assert scaling.original_max_positions == meant["original_max_position_embeddings"]
    if scaling.rope_type != "default":
        _, expected = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[scaling.rope_type](oracle, "cpu")
        assert attention_factor(scaling) == pytest.approx(expected)


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: scaling["rope_type"])
@pytest.mark.parametrize("spelling", ["rope_type", "type"])
def test_every_rope_type_in_the_older_spelling(scaling: dict[str, Any], spelling: str) -> None:
    oracle = transformers.LlamaConfig(
        max_position_embeddings=MAX_POSITIONS, rope_parameters=scaling | {"rope_theta": THETA}
    )
    old = {spelling if name == "rope_type" else name: value for name, value in scaling.items()}
    assert_means_the_same(read_rope(rope_theta=THETA, rope_scaling=old), oracle)


@pytest.mark.parametrize("scaling", [{"rope_type": "default"}, *SCALINGS], ids=lambda s: s["rope_type"])
def test_every_rope_type_as_transformers_writes_it(tmp_path: Path, scaling: dict[str, Any]) -> None:
    oracle = transformers.LlamaConfig(
        max_position_embeddings=MAX_POSITIONS, rope_parameters=scaling | {"rope_theta": THETA}
    )
    oracle.save_pretrained(tmp_path)
    assert "rope_parameters" in json.loads((tmp_path / "config.json").read_text())
    assert_means_the_same(read_rope_config(read_json(tmp_path / "config.json")), oracle)


@pytest.mark.parametrize("keys", [{}, {"rope_scaling": None}, {"rope_parameters": {}}])
def test_absent_keys_mean_the_plain_embedding(keys: dict[str, Any]) -> None:
    assert read_rope(**keys) == RopeConfig(theta=10000.0, scaling=RopeScaling(rope_type="default"))


def test_yarn_without_a_factor_derives_it_from_the_contexts() -> None:
    rope = read_rope(rope_scaling={"type": "yarn", "original_max_position_embeddings": 64})
    assert rope.scaling.factor == MAX_POSITIONS / 64


@pytest.mark.parametrize(
    ("further", "factor"),
    [
        ({}, 1.0),
        ({"mscale": 0.7, "mscale_all_dim": 1.3}, 0.8164),
        ({"attention_factor": 1.5}, 1.5),  # goes before
    ],
)
def test_attn_factor_of_yarn_multiplies_the_attention_factor(further: dict[str, Any], factor: float) -> None:
    """The keys of DeepSeek-R1-0528-Qwen3-8B, whose cosines are not scaled. transformers ignores the key."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "attn_factor": 0.8782488562869419, **further}
    assert attention_factor(read_rope(rope_scaling=scaling).scaling) == pytest.approx(factor, abs=1e-4)


@pytest.mark.parametrize(
    ("scaling", "length", "most"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024, 1024),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256, 256),
        (
            {"rope_type": "yarn", "factor": 1e308, "original_max_position_embeddings": 256},
            MAX_COUNT,
            MAX_COUNT,
        ),
        ({"rope_type": "linear", "factor": 4.0}, 256, 1024),  # the length may have the factor already
        ({"rope_type": "linear", "factor": 0.5}, 256, 256),
        (SCALINGS[1], 256, 256),  # llama3
    ],
)
def test_stretched_context_may_be_longer_than_max_position_embeddings(
    scaling: dict[str, Any], length: int, most: int, tmp_path: Path
) -> None:
    """The cards of Qwen2.5 and Qwen3 say to add yarn to a config.json and to leave its length."""
    model = read_keys(tmp_path, OLD_LLAMA | {"rope_scaling": scaling})
    assert choose_max_model_len(EngineSettings(), model) == length
    assert choose_max_model_len(EngineSettings(max_model_len=most), model) == most
    message = f"positions for {most} tokens, got {most + 1}; config.json has max_position_embeddings 256"
    with pytest.raises(ConfigError, match=message):
        choose_max_model_len(EngineSettings(max_model_len=most + 1), model)


def test_outer_original_context_wins() -> None:
    scaling = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    rope = read_rope(rope_scaling=scaling, original_max_position_embeddings=32)
    assert rope.scaling.original_max_positions == 32


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rope_theta": -1.0}, "'rope_theta' should be a number above 0"),
        ({"rope_theta": "much"}, "'rope_theta' should be float, got 'much'"),
        ({"partial_rotary_factor": 1.5}, "'partial_rotary_factor' should be at most 1, got 1.5"),
        ({"rope_scaling": {"type": "dynamic"}}, "'dynamic' is not known; known are default, lin"),
        ({"rope_scaling": {"type": "longrope"}}, "key 'short_factor' is missing"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: key 'factor' is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "'factor' should be a number above 0, got 0"),
        ({"rope_scaling": 8}, "'rope_scaling' should be dict, got 8"),
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
            {"rope_scaling": {"type": "yarn", "factor": 2, "attn_factor": 0}},
            "'attn_factor' should be a number above 0, got 0",
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2, "extrapolation_factor": 0.5}},
            "'extrapolation_factor' other than 1 is not supported",
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2, "mscale": -20, "mscale_all_dim": 1}},
            "rope_scaling: mscale -20.0 and mscale_all_dim 1.0 make the attention factor -0.36",
        ),
    ],
)
def test_unsupported_rotary_embedding_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_rope(**keys)
