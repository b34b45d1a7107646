"""The oracle is `transformers`: what its configs mean is what we must read from the files it writes."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, Qwen3Config

from baton.engine.models.registry import ARCHITECTURES, ModelConfig, read_model_config
from baton.errors import ModelError

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
    oracle = LlamaConfig(**SMALL, rms_norm_eps=1e-5, dtype="bfloat16", tie_word_embeddings=True)
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
    assert read_keys(tmp_path, keys).head_dim == Qwen3Config().head_dim
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


def test_generation_config_decides_the_end_tokens(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 5]}')
    assert read_keys(tmp_path, OLD_LLAMA).eos_token_ids == (3, 5)


def test_null_end_tokens_of_the_generation_config_keep_those_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": null}')
    assert read_keys(tmp_path, OLD_LLAMA | {"eos_token_id": 7}).eos_token_ids == (7,)


def test_unknown_architecture_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="GPT2LMHeadModel.*not known") as error:
        read_keys(tmp_path, OLD_LLAMA | {"architectures": ["GPT2LMHeadModel"]})
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
def test_a_missing_key_is_named_with_its_file(tmp_path: Path, key: str) -> None:
    keys = {name: value for name, value in OLD_LLAMA.items() if name != key}
    with pytest.raises(ModelError, match=f"config.json: key '{key}' is missing"):
        read_keys(tmp_path, keys)


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
        ({"quantization_config": {"bits": 4}}, "quantised weights"),
    ],
)
def test_nonsense_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_keys(tmp_path, OLD_LLAMA | change)
