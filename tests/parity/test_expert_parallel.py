"""Ranks that have whole experts give the bits of one rank, which are those of ranks that split every expert.

Clusters with such ranks: tests/parity/test_cluster.py.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from _pytest.mark import ParameterSet

from tests.parity.models import EVEN_EXPERTS, Case, save_model
from tests.parity.quantised_models import SCHEMES, write_model
from tests.parity.runs import GREEDY, SEEDED, check_settings, engine, essence, prompts, run

Directory = Callable[..., Path]
DTYPES: Final = (torch.float32, torch.bfloat16)
EP: Final[dict[str, Any]] = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
SETTINGS: Final[dict[str, dict[str, Any]]] = {
    "whole-experts": EP,
    "pipeline-2": {**EP, "pipeline_parallel_size": 2},
    "chunk-7": {**EP, "scheduler": {"max_num_batched_tokens": 7}},
    "async": {**EP, "scheduler": {"async_scheduling": True}},
    "few-pages": {**EP, "cache": {"page_size": 4}, "max_model_len": 140, "num_kv_tokens": 160},
    "drafts": {**EP, "speculative": {"method": "ngram", "prompt_lookup_min": 1}},
    "split-experts": {"tensor_parallel_size": 2},
    "one-rank": {"enable_expert_parallel": True},
}
# Each starts processes: `make test` runs a part.
FAST: Final = {
    ("mixtral-even", torch.bfloat16, "pipeline-2"),
    ("qwen2-moe-even", torch.bfloat16, "whole-experts"),
    ("qwen3-moe-even", torch.float32, "drafts"),
    ("gpt-oss-even", torch.bfloat16, "whole-experts"),
}


def answers(directory: Path, **settings: Any) -> list[list[Any]]:
    with engine(directory, **settings) as made:
        return essence(run(made, prompts(), GREEDY)) + essence(run(made, prompts(1), SEEDED))


def _cases() -> Iterator[ParameterSet]:
    for case in EVEN_EXPERTS:
        for dtype in DTYPES:
            for setting in SETTINGS:
                marks = () if (case.name, dtype, setting) in FAST else pytest.mark.slow
                name = f"{case.name}-{dtype}-{setting}"
                yield pytest.param(case.name, dtype, SETTINGS[setting], marks=marks, id=name)


@pytest.mark.parametrize(("name", "dtype", "settings"), list(_cases()))
def test_ranks_with_whole_experts_change_no_bit(
    name: str, dtype: torch.dtype, settings: dict[str, Any], model_directory: Directory
) -> None:
    check_settings(model_directory(name, dtype), settings)


def _wide(name: str) -> Case:
    """The case with experts of which groups of 32 inputs and words of 8 outputs can be made."""
    case = next(case for case in EVEN_EXPERTS if case.name == name)
    widths = {"moe_intermediate_size": 96, "shared_expert_intermediate_size": 64}
    latent = {"q_lora_rank": 32, "v_head_dim": 16} if case.kind == "DeepseekV3" else {}
    return Case(case.name, case.kind, case.keys | widths | latent)


@pytest.mark.parametrize(
    ("name", "quantization"),
    [
        ("mixtral-even", "int4"),
        *(
            pytest.param(case.name, method, marks=pytest.mark.slow)
            for case in EVEN_EXPERTS
            for method in ("int8", "int4", "fp8")
        ),
    ],
)
def test_weights_that_are_rounded_as_they_load_change_no_bit(
    name: str, quantization: str, tmp_path: Path
) -> None:
    save_model(_wide(name), tmp_path, torch.bfloat16)
    expected = answers(tmp_path, quantization=quantization)
    assert answers(tmp_path, quantization=quantization, **EP) == expected


@pytest.mark.parametrize(
    "scheme",
    [
        pytest.param(scheme, marks=() if scheme in ("mxfp4", "awq") else pytest.mark.slow)
        for scheme in SCHEMES
    ],
)
def test_quantised_checkpoint_changes_no_bit(scheme: str, tmp_path: Path) -> None:
    plain, quantised, dense = tmp_path / "plain", tmp_path / "quantised", tmp_path / "dense"
    save_model(_wide("gpt-oss-even" if scheme == "mxfp4" else "qwen3-moe-even"), plain)
    write_model(plain, quantised, dense, SCHEMES[scheme])
    assert answers(quantised, **EP) == answers(quantised)


def test_experts_too_narrow_for_splits_change_no_bit(tmp_path: Path) -> None:
    """Half of 22 inputs is no whole number of pairs, so an expert is summed in one split."""
    case = next(case for case in EVEN_EXPERTS if case.name == "qwen3-moe-even")
    save_model(Case(case.name, case.kind, {**case.keys, "moe_intermediate_size": 22}), tmp_path)
    assert answers(tmp_path, **EP) == answers(tmp_path)
