"""Quantised checkpoints of every scheme against transformers with the same weights in fp32."""

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from baton.errors import ConfigError, ModelError
from tests.parity.models import COMMON, GPT_OSS_ROPE, Case, Oracle, save_model
from tests.parity.quantised_models import SCHEMES, write_model
from tests.parity.runs import engine, essence, forward_logits, prompts, run, tokens
from tests.parity.test_families import GREEDY
from tests.parity.topologies import Side, Topology, check

NUM_CONFIGS: Final = 20
KINDS: Final = ("Llama", "Qwen2", "Qwen3", "Mistral", "Mixtral", "Qwen3Moe", "DeepseekV3")
PLAIN: Final = Case("llama", "Llama", {**COMMON, "num_attention_heads": 4, "num_key_value_heads": 2})
SMALL: Final[dict[str, Any]] = {
    "cache": {"page_size": 4},
    "scheduler": {"max_num_batched_tokens": 7},
    "num_kv_tokens": 160,
    "max_model_len": 140,
}


def _random_case(scheme: str, seed: int) -> Case:
    """Sizes of which groups of 32 inputs and words of 8 outputs can be made."""
    source = Random(f"{scheme} {seed}")
    if scheme == "mxfp4":
        return _gpt_oss(source, seed)
    # The experts of transformers are no linear layers.
    kinds = KINDS[:4] if SCHEMES[scheme].rounds_inputs else KINDS
    kind = kinds[seed % len(kinds)]
    num_kv_heads = source.choice((2, 4))
    keys: dict[str, Any] = {
        "num_key_value_heads": num_kv_heads,
        "num_attention_heads": num_kv_heads * source.choice((1, 2)),
        "head_dim": source.choice((16, 32)),
        "hidden_size": source.choice((32, 64, 96)),
        "intermediate_size": source.choice((64, 96, 160)),
        "num_local_experts": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": source.choice((32, 96)),
        "mlp_only_layers": [0],
    }
    if kind == "DeepseekV3":
        keys |= _latent(source) | {"num_key_value_heads": keys["num_attention_heads"]}
    if kind == "Qwen2":
        keys["hidden_size"] = keys["num_attention_heads"] * keys["head_dim"]
    return Case(f"{kind}-{seed}", kind, {**COMMON, **keys})


def _latent(source: Random) -> dict[str, Any]:
    return {
        "head_dim": 16,
        "kv_lora_rank": source.choice((32, 64)),
        "q_lora_rank": source.choice((None, 32)),
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 16,
        "v_head_dim": source.choice((32, 64)),
        "num_local_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
    }


def _gpt_oss(source: Random, seed: int) -> Case:
    keys = {
        "num_key_value_heads": 2,
        "num_attention_heads": source.choice((2, 4)),
        "head_dim": source.choice((16, 24)),
        "hidden_size": source.choice((32, 96)),
        "intermediate_size": source.choice((64, 128)),
        "num_local_experts": source.choice((3, 5)),
        "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 9,
        **GPT_OSS_ROPE,
    }
    return Case(f"GptOss-{seed}", "GptOss", {**COMMON, **keys})


def _cases() -> Iterator[Any]:
    for scheme in SCHEMES:
        first = _random_case(scheme, NUM_CONFIGS) if scheme == "mxfp4" else PLAIN
        yield pytest.param(scheme, first, id=scheme)
        if scheme == "fp8-block":
            seed = NUM_CONFIGS * len(KINDS) + KINDS.index("DeepseekV3")
            yield pytest.param(scheme, _random_case(scheme, seed), id=f"{scheme}-deepseek")
        for seed in range(NUM_CONFIGS):
            case = _random_case(scheme, seed)
            yield pytest.param(scheme, case, id=f"{scheme}-{case.name}", marks=pytest.mark.slow)


def exact_logits(oracle: Oracle, prompt: list[int]) -> tuple[Tensor, float]:
    """Return the logits computed in fp64, and the largest error of transformers in fp32.

    A few random configs have an error above 1e-4 with plain weights too. The experts of
    transformers do not run in fp64: mixtures are compared in fp32.
    """
    single = oracle.logits(prompt)
    if any("experts" in name for name, _ in oracle.model.named_parameters()):
        return single, 0.0
    oracle.model.double()
    exact = oracle.logits(prompt).float()
    oracle.model.float()  # the weights have been fp32, so nothing is lost
    return exact, float((single - exact).abs().max())


def round_inputs(oracle: Oracle) -> None:
    """Have linear layers round their inputs to 8 bits: a scale for each token and group.

    Groups have at most 128 inputs, and lie in one half of the inputs where ranks would have the halves.
    """

    def rounded(x: Tensor, num_parts: int) -> tuple[Tensor]:
        part = x.shape[-1] // num_parts
        group = next(size for size in range(min(part, 128), 0, -1) if part % size == 0)
        groups = x.unflatten(-1, (-1, group))
        scales = groups.abs().amax(-1, keepdim=True) / 127
        return (((groups / scales).round() * scales).flatten(-2),)

    for name, module in oracle.model.named_modules():
        if name.endswith("_proj"):
            num_parts = 2 if name.endswith(("o_proj", "down_proj")) else 1
            module.register_forward_pre_hook(lambda _, args, n=num_parts: rounded(args[0], n))


@pytest.mark.parametrize(("scheme", "case"), list(_cases()))
def test_checkpoint_is_read_as_the_weights_that_it_stands_for(
    scheme: str, case: Case, tmp_path: Path
) -> None:
    plain, quantised, dense = tmp_path / "plain", tmp_path / "quantised", tmp_path / "dense"
    save_model(case, plain)
    write_model(plain, quantised, dense, SCHEMES[scheme])
    oracle, rounds_inputs = Oracle(dense), SCHEMES[scheme].rounds_inputs
    if rounds_inputs:
        round_inputs(oracle)
    with engine(quantised) as made:
        logits, (expected, error) = forward_logits(made, prompts()[-1]), exact_logits(oracle, prompts()[-1])
        if rounds_inputs:  # an input between two values may be rounded to either
            assert (logits - expected).norm() <= 2e-2 * expected.norm()
        else:
            torch.testing.assert_close(logits, expected, atol=max(1e-4, 2 * error), rtol=1e-4)
        whole = run(made, prompts(), GREEDY)
    if not rounds_inputs:
        answers = zip(prompts(), tokens(whole), strict=True)
        assert tokens(whole) == [oracle.greedy(*asked) for asked in answers]
    with engine(quantised, **SMALL) as made:
        assert essence(run(made, prompts(), GREEDY)) == essence(whole)
    if case.name.endswith(("-0", "-4")) or (case is PLAIN and scheme == "awq"):  # a process each
        with engine(quantised, tensor_parallel_size=2) as made:
            assert essence(run(made, prompts(), GREEDY)) == essence(whole)


@pytest.fixture(scope="module")
def awq(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that the tests may not change."""
    folder = tmp_path_factory.mktemp("awq")
    save_model(PLAIN, folder / "plain")
    write_model(folder / "plain", folder / "awq", folder / "dense", SCHEMES["awq"])
    return folder / "awq"


@pytest.mark.parametrize(
    "topology",
    [
        Topology(Side(num=2, pages=64), Side(num=2), "tcp"),
        pytest.param(Topology(Side(tp=2)), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_cluster_with_quantised_weights_gives_the_tokens_of_one_engine(topology: Topology, awq: Path) -> None:
    with engine(awq) as alone:
        check(topology, alone, awq)


def test_quantised_checkpoint_is_not_quantised_again(awq: Path) -> None:
    with (
        pytest.raises(ConfigError, match="int8 was asked for, but the weights are in awq"),
        engine(awq, quantization="int8"),
    ):
        pass


def test_quantised_weights_are_not_made_up(awq: Path) -> None:
    with (
        pytest.raises(ConfigError, match="weights in awq cannot be made up"),
        engine(awq, load_format="dummy"),
    ):
        pass


def test_scale_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    save_model(PLAIN, tmp_path / "plain")
    scheme = SCHEMES["w8a16"]

    def broken(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        tensors, dense = scheme.write(weight)
        tensors["weight_scale"][3] = float("inf")
        return tensors, dense

    write_model(
        tmp_path / "plain", tmp_path / "broken", tmp_path / "dense", type(scheme)(scheme.config, broken)
    )
    with pytest.raises(ModelError, match="a scale is a NaN or an infinity"), engine(tmp_path / "broken"):
        pass


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_gptq_bias_that_the_model_lacks_is_refused_unless_all_zeros(value: float, tmp_path: Path) -> None:
    """Checkpoints such as those of Qwen2 and Llama 3.1 have a bias for each quantised layer."""
    save_model(PLAIN, tmp_path / "plain")
    scheme = SCHEMES["gptq"]

    def biased(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        tensors, dense = scheme.write(weight)
        return tensors | {"bias": torch.full(weight.shape[:1], value)}, dense

    write_model(
        tmp_path / "plain", tmp_path / "biased", tmp_path / "dense", type(scheme)(scheme.config, biased)
    )
    if value:
        message = "'model.layers.0.mlp.down_proj.bias' is not part of LlamaForCausalLM"
        with pytest.raises(ModelError, match=message), engine(tmp_path / "biased"):
            pass
        return
    oracle = Oracle(tmp_path / "dense")
    with engine(tmp_path / "biased") as made:
        found = tokens(run(made, prompts(), GREEDY))
    assert found == [oracle.greedy(*asked) for asked in zip(prompts(), found, strict=True)]
