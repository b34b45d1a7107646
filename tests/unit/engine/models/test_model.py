"""Architectures: the parameters of `transformers`' models, and an architecture from outside the tree."""

import json
from contextlib import closing
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from baton.engine.models.decoder import Decoder, DecoderLayer, then
from baton.engine.models.layers import Attention, GatedMlp, Norm, RmsNorm
from baton.engine.models.loading.checkpoint import METHODS, JsonObject, SafetensorsCheckpoint
from baton.engine.models.loading.dummy_weights import DummyCheckpoint
from baton.engine.models.loading.quantised_weights import read_matrix
from baton.engine.models.loading.weights import Parameters, ParameterSurvey
from baton.engine.models.model import (
    attention_mlp_crossover,
    build_model,
    check_parameters,
    parameter_shapes,
)
from baton.engine.models.parallel import TensorParallel
from baton.engine.models.registry import (
    ARCHITECTURES,
    Architecture,
    ModelConfig,
    RopeConfig,
    read_model_config,
)
from baton.errors import ModelError
from baton.kernels.gated import GELU_TANH
from baton.kernels.quantised import QuantisedMatrix
from tests.tiny_models import generate, tiny_engine, token_ids, write_config

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}
EXPERTS: dict[str, Any] = SMALL | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
WINDOWED: dict[str, Any] = SMALL | {"use_sliding_window": True, "sliding_window": 8}
LATENT: dict[str, Any] = SMALL | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
KINDS = ["sliding_attention", "full_attention"] * 2
# (class of transformers, its keys, windows of the layers)
CONFIGS: list[tuple[str, dict[str, Any], tuple[int | None, ...]]] = [
    ("LlamaConfig", SMALL, (None,) * 4),
    (
        "LlamaConfig",
        SMALL | dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=True, head_dim=16),
        (None,) * 4,
    ),
    ("DeepseekV2Config", LATENT | dict(n_shared_experts=2, mlp_bias=True), (None,) * 4),
    (
        "DeepseekV3Config",
        LATENT | dict(q_lora_rank=24, n_group=2, topk_group=1, attention_bias=True),
        (None,) * 4,
    ),
    ("MistralConfig", SMALL | dict(head_dim=16, sliding_window=8), (8,) * 4),
    ("MistralConfig", SMALL | dict(sliding_window=None), (None,) * 4),
    ("Qwen2Config", SMALL | dict(tie_word_embeddings=True), (None,) * 4),
    ("Qwen2Config", WINDOWED | dict(max_window_layers=0), (8,) * 4),
    ("Qwen2Config", WINDOWED | dict(max_window_layers=2), (None, None, 8, 8)),
    ("Qwen2Config", WINDOWED | dict(max_window_layers=4), (None,) * 4),
    ("Qwen3Config", SMALL | dict(head_dim=16, attention_bias=True), (None,) * 4),
    ("Qwen3Config", WINDOWED | dict(layer_types=KINDS), (8, None, 8, None)),
    ("MixtralConfig", SMALL | dict(num_local_experts=3), (None,) * 4),
    ("Qwen2MoeConfig", EXPERTS | dict(mlp_only_layers=[2], qkv_bias=False), (None,) * 4),
    (
        "Qwen2MoeConfig",
        EXPERTS | dict(use_sliding_window=True, sliding_window=8, max_window_layers=3),
        (8, None, 8, None),
    ),
    ("Gemma2Config", SMALL | dict(head_dim=16, sliding_window=8), (8, None, 8, None)),
    ("Gemma3TextConfig", SMALL | dict(head_dim=16, sliding_window=8, layer_types=KINDS), (8, None, 8, None)),
    ("Olmo2Config", SMALL | dict(eos_token_id=1), (None,) * 4),
    ("Phi3Config", SMALL | dict(pad_token_id=None, eos_token_id=1, sliding_window=8), (8,) * 4),
    ("GraniteConfig", SMALL | dict(attention_bias=True, mlp_bias=True), (None,) * 4),
    ("GPT2Config", dict(n_embd=32, n_layer=2, n_head=4, vocab_size=64, eos_token_id=1), (None,) * 2),
    ("GptOssConfig", SMALL | dict(head_dim=16, num_local_experts=4, sliding_window=8), (8, None, 8, None)),
    (
        "Qwen3MoeConfig",
        EXPERTS | dict(decoder_sparse_step=2, use_sliding_window=True, sliding_window=8),
        (8,) * 4,
    ),
]


def save(directory: Path, config: "transformers.PreTrainedConfig") -> None:
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)


def windows(directory: Path) -> tuple[int | None, ...]:
    return build_model(read_model_config(directory), ParameterSurvey(), 1).windows


@pytest.mark.parametrize(("name", "given", "expected"), CONFIGS, ids=[name for name, *_ in CONFIGS])
def test_parameters_and_windows_are_those_of_transformers(
    tmp_path: Path, name: str, given: dict[str, Any], expected: tuple[int | None, ...]
) -> None:
    config = getattr(transformers, name)(**given)
    save(tmp_path, config)
    checkpoint, ours = SafetensorsCheckpoint(tmp_path), read_model_config(tmp_path)
    check_parameters(checkpoint, ours)
    assert {name: checkpoint.shape(name) for name in checkpoint.names()} == parameter_shapes(ours)
    assert windows(tmp_path) == expected
    keys = json.loads((tmp_path / "config.json").read_text())
    if "max_window_layers" in keys and config.layer_types != KINDS:
        del keys["layer_types"]  # older files have none
        (tmp_path / "config.json").write_text(json.dumps(keys))
        assert windows(tmp_path) == expected


def test_mistral_without_the_key_has_the_published_window(tmp_path: Path) -> None:
    assert windows(write_config(tmp_path, architectures=["MistralForCausalLM"])) == (4096,) * 2


def test_wrong_number_of_layer_types_is_refused(tmp_path: Path) -> None:
    keys = {"use_sliding_window": True, "layer_types": ["full_attention"]}
    with pytest.raises(ModelError, match="'layer_types' should have 2 entries, got 1"):
        windows(write_config(tmp_path, architectures=["Qwen2ForCausalLM"], **keys))


@pytest.mark.parametrize(
    ("change", "without", "message"),
    [
        ({}, "model.norm.weight", r"lacks tensor 'model.norm.weight' of shape \[32\]"),
        (
            {"lm_head.weight": torch.zeros(65, 32)},
            "",
            r"'lm_head.weight' should have shape \[64, 32\], got \[65, 32\]",
        ),
        (
            {"model.layers.1.mlp.up_proj.bias": torch.zeros(48)},
            "",
            "'model.layers.1.mlp.up_proj.bias' is not part of LlamaForCausalLM",
        ),
    ],
    ids=["missing", "shape", "extra"],
)
def test_wrong_tensor_is_named(
    tmp_path: Path, change: dict[str, torch.Tensor], without: str, message: str
) -> None:
    save(tmp_path, transformers.LlamaConfig(**SMALL))
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if name != without}
    save_file(kept | change, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=message):
        check_parameters(SafetensorsCheckpoint(tmp_path), read_model_config(tmp_path))


def test_derived_and_tied_tensors_may_be_there(tmp_path: Path) -> None:
    save(tmp_path, transformers.LlamaConfig(**SMALL, tie_word_embeddings=True))
    extra = {
        "lm_head.weight": torch.zeros(64, 32),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
    }
    save_file(load_file(tmp_path / "model.safetensors") | extra, tmp_path / "model.safetensors")
    check_parameters(SafetensorsCheckpoint(tmp_path), read_model_config(tmp_path))


def test_gpt2_without_the_prefix_of_its_names_is_read(tmp_path: Path) -> None:
    """The published files hold the base model, and masks that follow from the config."""
    save(
        tmp_path,
        transformers.GPT2Config(
            n_embd=32, n_layer=2, n_head=4, n_positions=16, vocab_size=64, eos_token_id=1
        ),
    )
    tensors = load_file(tmp_path / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    save_file(bare | {"h.0.attn.bias": torch.ones(1, 1, 16, 16)}, tmp_path / "model.safetensors")
    checkpoint = SafetensorsCheckpoint(tmp_path, "transformer.")
    check_parameters(checkpoint, read_model_config(tmp_path))
    name = "transformer.h.1.mlp.c_fc.weight"
    assert torch.equal(checkpoint.slice(name, 0, 0, 32), tensors[name])
    assert len(checkpoint.sample(name, 8)) == 32


def test_mxfp4_is_dequantised_as_in_transformers() -> None:
    scheme, source = METHODS["mxfp4"](JsonObject({}, "")), torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (2, 6, 3, 16), generator=source)
    scales = torch.randint(118, 132, (2, 6, 3), generator=source)
    expected = transformers.integrations.mxfp4.convert_moe_packed_tensors(
        blocks.byte(), scales.byte(), dtype=torch.float32
    )
    for expert, expected_KN in enumerate(expected):  # transformers has the inputs first
        parts = {"blocks": blocks[expert].byte(), "scales": scales[expert].byte()}
        made = read_matrix(scheme, parts, ((0, 6), (0, 96)))
        assert isinstance(made, QuantisedMatrix) and torch.equal(made.dequantised().T, expected_KN)


def test_crossover_counts_operations_of_layers_with_full_attention(tmp_path: Path) -> None:
    config = read_model_config(write_config(tmp_path))
    weights = config.num_layers * (
        2 * config.hidden_size * config.head_dim * (config.num_heads + config.num_kv_heads)
        + 3 * config.hidden_size * config.intermediate_size
    )
    operations_a_context_token = 4 * config.num_layers * config.num_heads * config.head_dim
    assert attention_mlp_crossover(config) == 2 * weights / operations_a_context_token
    windowed = read_model_config(write_config(tmp_path, architectures=["MistralForCausalLM"]))
    assert attention_mlp_crossover(windowed) == inf


class Outside(Decoder):
    """An architecture from outside the tree: every second layer slides over two tokens."""

    def make_layer(self, config: ModelConfig, parameters: Parameters, index: int) -> DecoderLayer:
        window = 2 if index % 2 else None
        attention = Attention(
            config, parameters.scope("self_attn"), qkv_bias=True, qk_norm="head", window=window
        )
        return DecoderLayer(config, parameters, attention, GatedMlp(config, parameters.scope("mlp")))


def answer(directory: Path, **keys: object) -> list[int | None]:
    with closing(tiny_engine(write_config(directory, **keys))) as engine:
        return token_ids(generate(engine, [5, 9, 2, 7, 1, 8, 3], max_tokens=12, ignore_eos=True))


def test_outside_architecture_generates_by_name_and_by_model_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ARCHITECTURES, "OutsideForCausalLM", Architecture("outside", f"{__name__}:Outside"))
    named = answer(tmp_path, architectures=["OutsideForCausalLM"], model_type="llama")
    assert len(named) == 12
    assert answer(tmp_path, architectures=None, model_type="outside") == named
    assert answer(tmp_path, architectures=["LlamaForCausalLM"], model_type="outside") != named
    with monkeypatch.context() as layer_by_layer:
        layer_by_layer.setattr("baton.engine.models.decoder.can_stack", lambda *_: False)
        assert answer(tmp_path, architectures=["OutsideForCausalLM"]) == named


class Halved(GatedMlp):
    """A part of a layer that an architecture from outside has changed."""

    def __call__(self, x_TE: torch.Tensor) -> torch.Tensor:
        return super().__call__(x_TE) / 2


NORMS = {"input_norm": "input_layernorm", "post_norm": "post_attention_layernorm"}


def model_of(directory: Path, parts: dict[str, Any]) -> Decoder:
    """A model in bf16 of the usual layers, with other parts or other arguments of parts."""

    class Varied(Decoder):
        def make_layer(self, config: ModelConfig, parameters: Parameters, index: int) -> DecoderLayer:
            arguments = parts.get("attention", {})
            if "ropes" in parts:
                arguments = {"rope": parts["ropes"][index]}
            attention = Attention(config, parameters.scope("self_attn"), **arguments)
            mlp = parts.get("mlp", GatedMlp)(config, parameters.scope("mlp"))
            norms = {
                each: RmsNorm(parameters, NORMS[each], config.hidden_size, **parts[each])
                for each in NORMS.keys() & parts
            }
            out = then(attention.out, parts["out"]) if "out" in parts else None
            return DecoderLayer(config, parameters, attention, mlp, out=out, **norms)

        def make_norm(self, config: ModelConfig, parameters: Parameters, name: str) -> Norm:
            return RmsNorm(parameters, name, config.hidden_size, **parts.get("last_norm", {"eps": 1e-5}))

    config, survey = read_model_config(directory), ParameterSurvey()
    Varied(config, survey, 1)
    dtype = torch.bfloat16
    checkpoint = DummyCheckpoint(survey.shapes, dtype=dtype, deviation=0.2, seed=1)
    return Varied(config, Parameters(checkpoint, TensorParallel(), dtype, torch.device("cpu")), 8)


def test_usual_layers_run_in_one_native_call(tiny_model: Path) -> None:
    assert model_of(tiny_model, {}).stack is not None
    assert model_of(tiny_model, {"attention": {"qk_norm": "head", "window": 2}}).stack is not None


@pytest.mark.parametrize(
    "parts",
    [
        {"attention": {"scale": 1.0}},
        {"attention": {"softcap": 5.0}},
        {"attention": {"has_sinks": True}},
        {"attention": {"qk_norm": "projection"}},
        {"attention": {"qk_norm": "head", "norm_offset": 1.0}},
        {"ropes": [RopeConfig(theta=1e4), RopeConfig(theta=1e6)]},
        {"out": torch.neg},
        {"mlp": partial(GatedMlp, activation=GELU_TANH)},
        {"mlp": Halved},
        {"input_norm": {"eps": 1e-5, "offset": 1.0}},
        {"post_norm": {"eps": 1e-3}},
        {"last_norm": {"eps": 1e-5, "offset": 1.0}},
        {"last_norm": {"eps": 1e-3}},
    ],
)
def test_layers_that_the_native_call_cannot_compute_run_one_by_one(
    tiny_model: Path, parts: dict[str, Any]
) -> None:
    assert model_of(tiny_model, parts).stack is None
