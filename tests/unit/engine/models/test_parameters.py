from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from baton.engine.models.parameters import check_parameters, parameter_shapes
from baton.engine.models.registry import read_model_config
from baton.engine.models.weights import open_checkpoint
from baton.errors import ModelError

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}
CONFIGS = [
    LlamaConfig(**SMALL),
    LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True, tie_word_embeddings=True, head_dim=16),
    MistralConfig(**SMALL, head_dim=16),
    Qwen2Config(**SMALL, tie_word_embeddings=True),
    Qwen3Config(**SMALL, head_dim=16, attention_bias=True),
]


def save(directory: Path, config: PreTrainedConfig) -> None:
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
def test_the_shapes_are_those_of_transformers(tmp_path: Path, config: PreTrainedConfig) -> None:
    save(tmp_path, config)
    checkpoint, ours = open_checkpoint(tmp_path), read_model_config(tmp_path)
    check_parameters(checkpoint, ours)
    assert {name: checkpoint.shape(name) for name in checkpoint.names()} == parameter_shapes(ours)


def rewritten(directory: Path, change: dict[str, torch.Tensor], without: str = "") -> None:
    tensors = load_file(directory / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if name != without}
    save_file(kept | change, directory / "model.safetensors")


def check(directory: Path) -> None:
    check_parameters(open_checkpoint(directory), read_model_config(directory))


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    save(tmp_path, LlamaConfig(**SMALL))
    rewritten(tmp_path, {}, without="model.norm.weight")
    with pytest.raises(ModelError, match=r"lacks tensor 'model.norm.weight' of shape \[32\]"):
        check(tmp_path)


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    save(tmp_path, LlamaConfig(**SMALL))
    rewritten(tmp_path, {"lm_head.weight": torch.zeros(65, 32)})
    with pytest.raises(ModelError, match=r"'lm_head.weight' should have shape \[64, 32\], got \[65, 32\]"):
        check(tmp_path)


def test_a_bias_that_the_config_does_not_mention_is_refused(tmp_path: Path) -> None:
    save(tmp_path, LlamaConfig(**SMALL))
    rewritten(tmp_path, {"model.layers.1.mlp.up_proj.bias": torch.zeros(48)})
    with pytest.raises(ModelError, match="'model.layers.1.mlp.up_proj.bias' is not part of LlamaForCausalLM"):
        check(tmp_path)


def test_derived_and_tied_tensors_may_be_there(tmp_path: Path) -> None:
    save(tmp_path, LlamaConfig(**SMALL, tie_word_embeddings=True))
    rewritten(
        tmp_path,
        {
            "lm_head.weight": torch.zeros(64, 32),
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4),
        },
    )
    check(tmp_path)
