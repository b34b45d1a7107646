"""Small random models of every architecture, saved by transformers, and transformers as their oracle.

`initializer_range` is large: at the default a random model repeats a few tokens and equality proves nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from torch import Tensor

VOCAB_SIZE: Final = 331  # odd, so that vocabulary-parallel parts differ in size
MODEL: Final = "llama-gqa7-biased"  # of clusters: its two KV heads can be split over two ranks
COMMON: Final = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


_WINDOWS: Final = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9}
# Gemma's large embeddings, tied to the head, would repeat the last token.
_UNTIED: Final = {"tie_word_embeddings": False}
_PARTIAL_LONGROPE: Final = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "short_factor": [1.0, 1.2, 1.7, 2.5],
        "long_factor": [1.0, 2.0, 4.0, 8.0],
    }
}
_EXPERTS: Final = {"num_experts": 9, "num_experts_per_tok": 3, "moe_intermediate_size": 24}


# Of multi-head latent attention; the sizes of both parts of a key are no whole vectors.
_LATENT: Final = {
    "num_hidden_layers": 3,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 18,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "routed_scaling_factor": 1.7,
    "first_k_dense_replace": 1,
}


CONFIGS: Final = {"Gemma3": "Gemma3TextConfig"}  # of other names than the models


@dataclass(frozen=True)
class Case:
    """`kind` is the prefix of transformers' config and model classes."""

    name: str
    kind: str
    keys: dict[str, Any]


def _case(name: str, kind: str, heads: int, kv_heads: int, **keys: Any) -> Case:
    head_keys = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    return Case(name, kind, {**COMMON, **head_keys, **keys})


def _rope(rope_type: str, **keys: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0, **keys}}


DEEPSEEK3: Final = _case(
    "deepseek3",
    "DeepseekV3",
    4,
    4,
    **_LATENT,
    q_lora_rank=28,
    n_shared_experts=1,
    n_group=2,
    topk_group=1,
    attention_bias=True,
)
# Of the context of COMMON; the default of transformers is of the published model's.
GPT_OSS_ROPE: Final = _rope("yarn", factor=4.0, original_max_position_embeddings=64, truncate=False)
CASES: Final = (
    _case("llama2", "Llama", 4, 4),
    _case("llama-gqa4-tied", "Llama", 4, 1, tie_word_embeddings=True),
    _case(
        "llama-gqa7-biased", "Llama", 14, 2, hidden_size=56, head_dim=16, attention_bias=True, mlp_bias=True
    ),
    _case("llama-odd-head", "Llama", 4, 2, head_dim=24),
    _case(
        "llama3-rope",
        "Llama",
        8,
        2,
        **_rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    ),
    _case("llama-linear-rope", "Llama", 4, 2, **_rope("linear", factor=4.0)),
    _case("llama-yarn-rope", "Llama", 4, 2, **_rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    _case("mistral-window", "Mistral", 4, 2, sliding_window=9),
    _case("qwen2", "Qwen2", 4, 2, tie_word_embeddings=True),
    _case("qwen2-window", "Qwen2", 4, 2, use_sliding_window=True, sliding_window=11, max_window_layers=1),
    _case("qwen3", "Qwen3", 4, 2, head_dim=32),
    _case(
        "gemma2",
        "Gemma2",
        4,
        2,
        **_WINDOWS,
        **_UNTIED,
        head_dim=16,
        query_pre_attn_scalar=9,
        attn_logit_softcapping=3.0,
    ),
    _case("gemma3", "Gemma3", 4, 2, **_WINDOWS, **_UNTIED, head_dim=24),
    _case("gpt2", "GPT2", 4, 4, head_dim=16),
    _case(
        "gpt-oss",
        "GptOss",
        4,
        2,
        **_WINDOWS,
        **GPT_OSS_ROPE,
        head_dim=16,
        num_local_experts=5,
        num_experts_per_tok=2,
    ),
    _case(
        "granite",
        "Granite",
        4,
        2,
        attention_multiplier=0.2,
        residual_multiplier=0.6,
        embedding_multiplier=5.0,
        logits_scaling=3.0,
    ),
    _case("olmo2", "Olmo2", 4, 2),
    _case("phi3", "Phi3", 4, 2, **_PARTIAL_LONGROPE, original_max_position_embeddings=256),
    _case("mixtral", "Mixtral", 4, 2, num_local_experts=5, num_experts_per_tok=2),
    _case(
        "qwen2-moe",
        "Qwen2Moe",
        4,
        2,
        **(_EXPERTS | {"num_hidden_layers": 3}),
        shared_expert_intermediate_size=40,
        mlp_only_layers=[1],
    ),
    _case("qwen3-moe", "Qwen3Moe", 4, 2, **_EXPERTS, head_dim=32, norm_topk_prob=True),
    _case(
        "deepseek2",
        "DeepseekV2",
        4,
        4,
        **_LATENT,
        **_rope("yarn", factor=4.0, original_max_position_embeddings=64, mscale=0.7, mscale_all_dim=0.9),
        q_lora_rank=None,
        n_shared_experts=2,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
    ),
    DEEPSEEK3,
)

# Mixtures of which two ranks can have as many experts each.
EVEN_EXPERTS: Final = (
    _case("mixtral-even", "Mixtral", 4, 2, num_local_experts=6, num_experts_per_tok=3),
    _case(
        "qwen2-moe-even",
        "Qwen2Moe",
        4,
        2,
        **(_EXPERTS | {"num_experts": 8, "num_hidden_layers": 3}),
        shared_expert_intermediate_size=40,
        mlp_only_layers=[1],
    ),
    DEEPSEEK3,
    _case("qwen3-moe-even", "Qwen3Moe", 4, 2, **(_EXPERTS | {"num_experts": 8}), head_dim=32),
    _case(
        "gpt-oss-even",
        "GptOss",
        4,
        2,
        **_WINDOWS,
        **GPT_OSS_ROPE,
        head_dim=16,
        num_local_experts=6,
        num_experts_per_tok=2,
    ),
)


def save_model(case: Case, directory: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write config.json and safetensors; biases and norms are random too."""
    torch.manual_seed(len(case.name))
    config = getattr(transformers, CONFIGS.get(case.kind, f"{case.kind}Config"))(**case.keys)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        scores = [each for each in model.named_buffers() if each[0].endswith("e_score_correction_bias")]
        for name, parameter in (*model.named_parameters(), *scores):
            if name.endswith("bias") or "norm" in name or "ln_" in name or "sinks" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.to(dtype).save_pretrained(directory)


class Oracle:
    """transformers, one prompt at a time, fp32, eager attention."""

    def __init__(self, directory: Path) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> Tensor:
        """Return the logits of every position, [T, V]."""
        logits: Tensor = self.model(torch.tensor([token_ids])).logits[0]
        return logits

    def greedy(self, prompt: list[int], answer: Sequence[int | None]) -> list[int]:
        """Return the greedy token after the prompt and each part of an answer: of a greedy answer, itself.

        One pass of the model instead of one for each token.
        """
        before = [token_id for token_id in answer[:-1] if token_id is not None]
        greedy: list[int] = self.logits(prompt + before)[len(prompt) - 1 :].argmax(-1).tolist()
        return greedy
