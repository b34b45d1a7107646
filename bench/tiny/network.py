"""The tiny model's shape and its files: a Hugging Face Llama directory in bfloat16."""

import json
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from baton.bench.tiny.initial import initialise
from baton.bench.tiny.tasks import END
from baton.bench.tiny.tokenizer import PAD, VOCAB_SIZE, build_tokenizer, special_id, tokenizer_config

MAX_LENGTH: Final = 4096
CONFIG_KEYS: Final = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps"),
    *("attention_bias", "mlp_bias", "max_position_embeddings", "rope_parameters", "tie_word_embeddings"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range"),
)


def build_model() -> LlamaForCausalLM:
    """Random weights in float32, 1.1 M parameters.

    A large rope base leaves half of each head's dimensions nearly unrotated over 2,000 tokens: a head
    needs fast ones to find "the token before" and slow ones to find "the same key, anywhere".
    """
    tokenizer = build_tokenizer()
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=special_id(tokenizer, END),
        pad_token_id=special_id(tokenizer, PAD),
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    initialise(model)
    return model


def export(model: LlamaForCausalLM, folder: Path) -> None:
    """Write config.json, model.safetensors, tokenizer files and generation_config.json into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_config(model.config, folder)
    weights = {name: weight.detach().to(torch.bfloat16) for name, weight in model.named_parameters()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    build_tokenizer().save(str(folder / "tokenizer.json"))
    _write_json(tokenizer_config(MAX_LENGTH), folder / "tokenizer_config.json")
    GenerationConfig(
        do_sample=False, eos_token_id=model.config.eos_token_id, pad_token_id=model.config.pad_token_id
    ).save_pretrained(folder)


def _write_config(config: LlamaConfig, folder: Path) -> None:
    """Both spellings of the rope base and the dtype: that of transformers 5 and the older one."""
    values = config.to_dict()
    shape = {name: values[name] for name in CONFIG_KEYS}
    dtype = {"dtype": "bfloat16", "torch_dtype": "bfloat16"}
    rope = {"rope_theta": config.rope_parameters["rope_theta"]}
    _write_json({"architectures": ["LlamaForCausalLM"], **shape, **dtype, **rope}, folder / "config.json")


def _write_json(values: dict[str, object], path: Path) -> None:
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
