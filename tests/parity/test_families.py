"""Random small configs of every family, against transformers and against themselves in other settings."""

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, Final

import pytest
import torch

from baton.request import SamplingParams
from tests.parity.models import COMMON, Case, Oracle, save_model
from tests.parity.runs import PreemptInTurn, engine, essence, forward_logits, prompts, run, tokens

NUM_CONFIGS: Final = 20
NUM_TOKENS: Final = 24
GREEDY: Final = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1)
Keys = dict[str, Any]


def _heads(source: Random) -> Keys:
    num_kv_heads = source.choice((2, 4))
    num_heads = num_kv_heads * source.choice((1, 2, 3))
    return {
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": source.choice((8, 16, 24)),
        "hidden_size": source.choice((40, 64, 72)),
        "intermediate_size": source.choice((48, 96)),
        "num_hidden_layers": source.choice((2, 3)),
        "tie_word_embeddings": source.random() < 0.3,
    }


def _experts(source: Random) -> Keys:
    num_experts = source.choice((3, 8, 13))
    return {"num_experts_per_tok": source.randint(1, 3), "num_experts": num_experts}


def _mixtral(source: Random) -> Keys:
    keys = _experts(source)
    window = source.choice((None, 7))
    return {**keys, "num_local_experts": keys.pop("num_experts"), "sliding_window": window}


def _qwen2_moe(source: Random) -> Keys:
    head_dim = source.choice((8, 16))
    num_heads = source.choice((4, 8))
    return {
        **_qwen_experts(source),
        "num_attention_heads": num_heads,
        "hidden_size": num_heads * head_dim,
        "num_key_value_heads": source.choice((2, 4)),
        "head_dim": head_dim,
        "shared_expert_intermediate_size": source.choice((24, 56)),
        "qkv_bias": source.random() < 0.5,
        "max_window_layers": source.choice((1, 2)),
    }


def _qwen_experts(source: Random) -> Keys:
    return {
        **_experts(source),
        "moe_intermediate_size": source.choice((16, 20, 44)),
        "norm_topk_prob": source.random() < 0.5,
        "decoder_sparse_step": source.choice((1, 1, 2)),
        "mlp_only_layers": source.choice(([], [0])),
        "use_sliding_window": source.random() < 0.4,
        "sliding_window": source.choice((5, 18)),
    }


def _layer_types(source: Random, keys: Keys) -> Keys:
    types = ("full_attention", "sliding_attention")
    return {"layer_types": [source.choice(types) for _ in range(keys["num_hidden_layers"])]}


def _gemma(source: Random) -> Keys:
    layers = {"num_hidden_layers": source.choice((2, 3))}
    return {
        **layers,
        **_layer_types(source, layers),
        "hidden_size": source.choice((48, 96)),
        "sliding_window": source.choice((5, 18)),
        "query_pre_attn_scalar": source.choice((8, 30)),
        "attention_bias": source.random() < 0.3,
        "tie_word_embeddings": source.random() < 0.7,
        "final_logit_softcapping": source.choice((None, 6.0)),
    }


def _gemma2(source: Random) -> Keys:
    return {**_gemma(source), "attn_logit_softcapping": source.choice((None, 2.0, 50.0))}


def _gemma3(source: Random) -> Keys:
    full: Keys = {"rope_type": "default", "rope_theta": 1e6}
    if source.random() < 0.5:
        full = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    sliding = {"rope_type": "default", "rope_theta": 1e4}
    return {
        **_gemma(source),
        "rope_parameters": {"full_attention": full, "sliding_attention": sliding},
    }


def _plain(source: Random) -> Keys:
    """Heads that fill the hidden size, for classes without a key for the size of a head."""
    num_heads, head_dim = source.choice((4, 8)), source.choice((8, 16))
    return {
        "num_attention_heads": num_heads,
        "num_key_value_heads": source.choice((2, 4)),
        "hidden_size": num_heads * head_dim,
        "head_dim": head_dim,
        "attention_bias": source.random() < 0.3,
    }


def _phi3(source: Random) -> Keys:
    plain, share = _plain(source), source.choice((1.0, 0.75, 0.5))
    rope: Keys = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": share}
    if source.random() < 0.6:
        num_factors = int(plain["head_dim"] * share) // 2
        for name in ("short_factor", "long_factor"):
            rope[name] = [round(source.uniform(1, 4), 3) for _ in range(num_factors)]
        rope["rope_type"] = "longrope"
    window = source.choice((None, 9))
    return {
        **plain,
        "rope_parameters": rope,
        "original_max_position_embeddings": 256,
        "sliding_window": window,
    }


def _granite(source: Random) -> Keys:
    return {
        **_plain(source),
        "attention_multiplier": source.uniform(0.1, 0.5),
        "residual_multiplier": source.uniform(0.2, 1.2),
        "embedding_multiplier": source.uniform(1, 12),
        "logits_scaling": source.uniform(0.5, 8),
        "mlp_bias": source.random() < 0.5,
    }


def _gpt2(source: Random) -> Keys:
    num_heads, head_dim = source.choice((4, 6)), source.choice((8, 16))
    return {
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "hidden_size": num_heads * head_dim,
        "head_dim": head_dim,
        "n_inner": source.choice((None, 72)),
        "scale_attn_by_inverse_layer_idx": source.random() < 0.3,
        "tie_word_embeddings": True,
    }


def _gpt_oss(source: Random) -> Keys:
    keys = _experts(source)
    return {
        **keys,
        "num_local_experts": keys.pop("num_experts"),
        "sliding_window": source.choice((5, 18)),
        "swiglu_limit": source.choice((0.5, 7.0)),
        "attention_bias": source.random() < 0.7,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "rope_theta": 1e4,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
    }


def _latent(source: Random) -> Keys:
    num_groups, group_size = source.choice((1, 2, 4)), source.choice((2, 3))
    num_chosen = source.randint(1, num_groups)
    num_heads, rope_dim = source.choice((2, 4, 34)), source.choice((2, 4, 16))
    keys: Keys = {
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "hidden_size": source.choice((68, 136)),
        "kv_lora_rank": source.choice((8, 20, 64)),
        "q_lora_rank": source.choice((None, 12, 40)),
        "qk_nope_head_dim": source.choice((4, 10, 32)),
        "qk_rope_head_dim": rope_dim,
        "head_dim": rope_dim,
        "v_head_dim": source.choice((6, 16)),
        "first_k_dense_replace": source.randint(0, 2),
        "n_routed_experts": num_groups * group_size,
        "n_group": num_groups,
        "topk_group": num_chosen,
        "num_experts_per_tok": source.randint(1, min(4, num_chosen * group_size)),
        "n_shared_experts": source.choice((1, 2)),
        "moe_intermediate_size": source.choice((16, 20)),
        "routed_scaling_factor": source.uniform(0.5, 3),
        "attention_bias": source.random() < 0.3,
    }
    if source.random() < 0.5:
        keys["rope_parameters"] = {
            "rope_type": "yarn",
            "factor": 4.0,
            "rope_theta": 1e4,
            "original_max_position_embeddings": 64,
            "mscale": source.choice((0.7, 1.0)),
            "mscale_all_dim": source.choice((0.7, 1.0)),
        }
    return keys


def _deepseek2(source: Random) -> Keys:
    return {**_latent(source), "topk_method": source.choice(("greedy", "group_limited_greedy"))}


def _deepseek3(source: Random) -> Keys:
    return {
        **_latent(source),
        "norm_topk_prob": source.random() < 0.7,
        "rope_interleave": source.random() < 0.7,
    }


FAMILIES: Final[dict[str, Callable[[Random], Keys]]] = {
    "DeepseekV2": _deepseek2,
    "DeepseekV3": _deepseek3,
    "Mixtral": _mixtral,
    "Qwen2Moe": _qwen2_moe,
    "Gemma2": _gemma2,
    "Gemma3": _gemma3,
    "Olmo2": _plain,
    "Phi3": _phi3,
    "Granite": _granite,
    "GPT2": _gpt2,
    "GptOss": _gpt_oss,
    "Qwen3Moe": lambda source: {**_qwen_experts(source), "attention_bias": source.random() < 0.5},
}


def _cases() -> Iterator[Any]:
    for kind, make in FAMILIES.items():
        for seed in range(NUM_CONFIGS):
            source = Random(f"{kind} {seed}")
            case = Case(f"{kind}-{seed}", kind, {**COMMON, **_heads(source), **make(source)})
            yield pytest.param(case, id=case.name, marks=pytest.mark.slow)


@pytest.mark.parametrize("case", list(_cases()))
def test_random_config_is_right_in_every_setting(case: Case, tmp_path: Path) -> None:
    save_model(case, tmp_path)
    oracle = Oracle(tmp_path)
    with engine(tmp_path) as made:
        logits = forward_logits(made, prompts()[-1])
        torch.testing.assert_close(logits, oracle.logits(prompts()[-1]), atol=1e-4, rtol=1e-4)
        plain = run(made, prompts(), GREEDY)
    assert tokens(plain) == [oracle.greedy(*asked) for asked in zip(prompts(), tokens(plain), strict=True)]
    small_steps: Keys = {
        "scheduler": {"max_num_batched_tokens": 7},
        "num_kv_tokens": 160,
        "max_model_len": 140,
    }
    with engine(tmp_path, cache={"page_size": 4}, **small_steps) as made:
        assert essence(run(made, prompts(), GREEDY)) == essence(plain)
    with engine(tmp_path, cache={"page_size": 8, "enable_prefix_caching": False}) as made:
        preempted = run(made, prompts(), GREEDY, PreemptInTurn())
        assert essence(preempted) == essence(plain)
    if case.name.endswith(("-0", "-1")):  # a process each
        with engine(tmp_path, tensor_parallel_size=2) as made:
            assert essence(run(made, prompts(), GREEDY)) == essence(plain)
