"""DeepSeek's configs: the sizes of published models, and the values that are refused by name."""

import json
import math
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from baton.config.engine import engine_config
from baton.engine.models.loading.dummy_weights import DummyCheckpoint
from baton.engine.models.model import check_parameters, parameter_shapes
from baton.engine.models.registry import ModelConfig, check_supported, read_model_config
from baton.errors import ConfigError, ModelError
from baton.pages import PageLayout

# Keys of the published config.json.
V3: Final[dict[str, Any]] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
K2: Final[dict[str, Any]] = V3 | {
    "model_type": "kimi_k2",
    "first_k_dense_replace": 1,
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "topk_group": 1,
    "vocab_size": 163840,
}
V2: Final[dict[str, Any]] = V3 | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "first_k_dense_replace": 1,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 160,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 60,
    "num_nextn_predict_layers": None,
    "routed_scaling_factor": 16.0,
    "scoring_func": "softmax",
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
    "vocab_size": 102400,
}
V2_LITE: Final[dict[str, Any]] = V2 | {
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "q_lora_rank": None,
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
    "topk_method": "greedy",
}


def read(directory: Path, keys: dict[str, Any], **changes: Any) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(keys | changes))
    return read_model_config(directory)


@pytest.mark.parametrize(
    ("keys", "billions"),
    [(V3, 671.0), (K2, 1026.4), (V2, 235.7), (V2_LITE, 15.71)],
    ids=["V3", "K2", "V2", "Lite"],
)
def test_parameters_are_as_many_as_published(tmp_path: Path, keys: dict[str, Any], billions: float) -> None:
    shapes = parameter_shapes(read(tmp_path, keys))
    assert sum(map(math.prod, shapes.values())) / 1e9 == pytest.approx(billions, rel=1e-3)


def test_token_of_the_largest_model_takes_70_kilobytes(tmp_path: Path) -> None:
    model = read(tmp_path, V3)
    layout = PageLayout(
        tp_size=8,
        page_size=16,
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        num_planes=model.num_kv_planes,
        dtype=model.dtype,
    )
    assert layout.token_bytes == 61 * (512 + 64) * 2 == 70_272


@pytest.mark.parametrize(
    ("keys", "changes", "message"),
    [
        (V3, {"scoring_func": "softmax"}, "'scoring_func' should be 'sigmoid' .* got 'softmax'"),
        (V3, {"topk_method": "greedy"}, "'topk_method' one of noaux_tc, got 'sigmoid' and 'greedy'"),
        (
            V2,
            {"topk_method": "noaux_tc"},
            "one of greedy, group_limited_greedy, got 'softmax' and 'noaux_tc'",
        ),
        (V2, {"norm_topk_prob": True}, "'norm_topk_prob' should be false, got true"),
        (V3, {"n_group": 7}, "cannot be chosen from 256 experts in 7 groups"),
        (V3, {"n_group": 256}, "cannot be chosen from 256 experts in 256 groups"),
        (V3, {"topk_group": 9}, "9 groups .* cannot be chosen from 256 experts in 8 groups"),
        (V3, {"n_group": None}, "key 'n_group' is missing"),
        (V3, {"n_group": 64, "topk_group": 1}, "8 experts of a token cannot be chosen from 1 groups of 4"),
        (V2_LITE, {"num_experts_per_tok": 65}, "65 experts of a token cannot be chosen from 64"),
        (V3, {"n_shared_experts": -1}, "'n_shared_experts' should be 1 to .*, got -1"),
        (V3, {"kv_lora_rank": 511}, "'kv_lora_rank' should be even, got 511"),
        (V3, {"qk_rope_head_dim": 63}, "'qk_rope_head_dim' should be even, got 63"),
        (V3, {"hidden_act": "gelu"}, "'hidden_act' should be 'silu', got 'gelu'"),
        (V3, {"rope_scaling": {"type": "dynamic", "factor": 2}}, "type 'dynamic' is not known"),
    ],
)
def test_value_that_is_not_supported_is_refused_by_name(
    tmp_path: Path, keys: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        parameter_shapes(read(tmp_path, keys, num_hidden_layers=4, **changes))


SMALL: Final = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "vocab_size": 64,
    "num_attention_heads": 2,
    "first_k_dense_replace": 2,
}


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    model = read(tmp_path, V3, **SMALL)
    shapes = parameter_shapes(model)
    further = shapes | {"model.layers.2.eh_proj.weight": (32, 64), "model.layers.2.mlp.x.weight": (3, 3)}
    check_parameters(_checkpoint(further), model)
    with pytest.raises(ModelError, match=r"'model.layers.3.eh_proj.weight' is not part of DeepseekV3"):
        check_parameters(_checkpoint(further | {"model.layers.3.eh_proj.weight": (32, 64)}), model)
    with pytest.raises(ModelError, match=r"'model.layers.2.eh_proj.weight' is not part of DeepseekV3"):
        check_parameters(_checkpoint(further), read(tmp_path, V3, **SMALL, num_nextn_predict_layers=0))


def _checkpoint(shapes: dict[str, tuple[int, ...]]) -> DummyCheckpoint:
    return DummyCheckpoint(shapes, dtype=torch.float32, deviation=0.1, seed=0)


def test_experts_are_in_every_layer_after_the_dense_ones_that_the_frequency_names(tmp_path: Path) -> None:
    keys = {"num_hidden_layers": 8, "first_k_dense_replace": 3, "moe_layer_freq": 2}
    shapes = parameter_shapes(read(tmp_path, V3, **keys))
    assert [i for i in range(8) if f"model.layers.{i}.mlp.gate.weight" in shapes] == [4, 6]
    assert not any(
        ".gate.weight" in name for name in parameter_shapes(read(tmp_path, V3, n_routed_experts=None))
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"cache": {"kv_cache_dtype": "int8"}},
            "cache.kv_cache_dtype: DeepseekV3.* supports 'auto', got 'int8'",
        ),
        ({"cache": {"kv_transfer_dtype": "fp8"}}, "cache.kv_transfer_dtype: .* got 'fp8'"),
        ({"enable_lora": True}, "enable_lora: DeepseekV3ForCausalLM takes no adapters"),
    ],
)
def test_settings_that_latent_attention_does_not_support(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    model = read(tmp_path, V3)
    check_supported(model, engine_config({"model": str(tmp_path)}))
    with pytest.raises(ConfigError, match=message):
        check_supported(model, engine_config({"model": str(tmp_path), **settings}))
