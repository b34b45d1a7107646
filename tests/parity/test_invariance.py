"""The same tokens, and in both dtypes the same log probabilities to the bit, whatever happens on the way.

Chunk sizes, page sizes, the company in the batch, prefix hits, preemption at every turn, pages that come
back from the host, several ranks and the width of the CPU's vectors are compared with one plain run.
"""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet

from tests.parity.runs import (
    GREEDY,
    SEEDED,
    PreemptInTurn,
    check_settings,
    engine,
    essence,
    plain,
    prompts,
    run,
    tokens,
)

Directory = Callable[..., Path]
FAST = ("llama-gqa7-biased", "mistral-window")
SLOW = (
    *(
        "llama2",
        "llama3-rope",
        "llama-odd-head",
        "qwen2-window",
        "qwen3",
        "mixtral",
        "qwen2-moe",
        "qwen3-moe",
    ),
    *("gemma2", "gemma3", "gpt2", "gpt-oss", "granite", "olmo2", "phi3"),
    *("deepseek2", "deepseek3"),
)
DTYPES = [torch.float32, torch.bfloat16]

ASYNC = {"async_scheduling": True}
NGRAM = {"method": "ngram", "prompt_lookup_min": 1}  # finds something at almost every step
MODES = {"sync": {}, "async": ASYNC}

SETTINGS: dict[str, dict[str, Any]] = {
    "chunk-1": {"scheduler": {"max_num_batched_tokens": 1}},
    "chunk-7": {"scheduler": {"max_num_batched_tokens": 7}},
    "chunk-64": {"scheduler": {"max_num_batched_tokens": 64}},
    "alone": {"scheduler": {"max_num_seqs": 1}},
    "page-1": {"cache": {"page_size": 1}},
    "page-64": {"cache": {"page_size": 64}},
    "no-prefix-cache": {"cache": {"enable_prefix_caching": False}},
    "few-pages": {"cache": {"page_size": 4}, "max_model_len": 140, "num_kv_tokens": 160},
    "static": {"scheduler": {"policy": "static"}},
    "dynamic": {"scheduler": {"policy": "dynamic"}},
    "tensor-parallel-2": {"tensor_parallel_size": 2},
    "async": {"scheduler": ASYNC},
    "async-chunk-7": {"scheduler": {"max_num_batched_tokens": 7, **ASYNC}},
    "async-few-pages": {
        "cache": {"page_size": 4},
        "max_model_len": 140,
        "num_kv_tokens": 160,
        "scheduler": ASYNC,
    },
    "async-tensor-parallel-2": {"tensor_parallel_size": 2, "scheduler": ASYNC},
    "pipeline-2": {"pipeline_parallel_size": 2},
    "pipeline-2-chunk-7": {"pipeline_parallel_size": 2, "scheduler": {"max_num_batched_tokens": 7}},
    "pipeline-2-few-pages": {
        "pipeline_parallel_size": 2,
        "cache": {"page_size": 4},
        "max_model_len": 140,
        "num_kv_tokens": 160,
    },
    "pipeline-2-tensor-parallel-2": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
    "pipeline-2-ngram": {"pipeline_parallel_size": 2, "speculative": NGRAM},
    "pipeline-2-ngram-few-pages": {
        "pipeline_parallel_size": 2,
        "cache": {"page_size": 4},
        "max_model_len": 140,
        "num_kv_tokens": 160,
        "scheduler": {"max_num_batched_tokens": 24},
        "speculative": NGRAM,
    },
    "pipeline-2-tensor-parallel-2-ngram": {
        "pipeline_parallel_size": 2,
        "tensor_parallel_size": 2,
        "speculative": NGRAM,
    },
    "ngram": {"speculative": NGRAM},
    "ngram-few-pages": {
        "cache": {"page_size": 4},
        "max_model_len": 140,
        "num_kv_tokens": 160,
        "scheduler": {"max_num_batched_tokens": 24},
        "speculative": NGRAM,
    },
}


# Each starts processes: `make test` runs it with one model.
DEAR = {
    "tensor-parallel-2": "llama-gqa7-biased",
    "async-tensor-parallel-2": "mistral-window",
    "pipeline-2": "mistral-window",
    "pipeline-2-few-pages": "llama-gqa7-biased",
    "pipeline-2-ngram": "mistral-window",
    "pipeline-2-ngram-few-pages": "llama-gqa7-biased",
}
# These start two to four processes, and test_pipeline.py has such engines too: `make parity` runs them.
DEAREST = ("pipeline-2-chunk-7", "pipeline-2-tensor-parallel-2", "pipeline-2-tensor-parallel-2-ngram")


def cases(*axes: Iterable[Any], names: Sequence[str] = (*FAST, *SLOW)) -> list[ParameterSet]:
    """Return every combination of a model, a dtype and values of the axes.

    `make test` runs each combination of values with each model of FAST, in one dtype by turns; `make parity`
    runs all.
    """
    made = []
    for turn, values in enumerate(product(*axes)):
        models = {DEAR[value] for value in values if value in DEAR} or FAST
        if any(value in DEAREST for value in values):
            models = set()
        for name, dtype in product(names, DTYPES):
            is_fast = name in models and (FAST.index(name) + DTYPES.index(dtype) + turn) % 2 == 0
            marks = () if is_fast else pytest.mark.slow
            made.append(
                pytest.param(name, dtype, *values, marks=marks, id="-".join(map(str, (name, dtype, *values))))
            )
    return made


QUANTISED = {FAST[0]: "int8", FAST[1]: "int4", "llama2": "fp8", "mixtral": "int4", "deepseek3": "int8"}
QUANTISED_PAGES = {FAST[0]: "int8", FAST[1]: "fp8", "gemma2": "int8", "gpt-oss": "fp8", "phi3": "int8"}


@pytest.mark.parametrize(("name", "dtype", "setting"), cases(SETTINGS))
def test_no_setting_changes_a_bit(
    name: str, dtype: torch.dtype, setting: str, model_directory: Directory
) -> None:
    check_settings(model_directory(name, dtype), SETTINGS[setting])


@pytest.mark.parametrize(
    ("name", "dtype", "setting"),
    cases(["chunk-1", "chunk-7", "alone", "page-1", "tensor-parallel-2", "ngram"], names=tuple(QUANTISED)),
)
def test_no_setting_changes_a_bit_with_quantised_weights(
    name: str, dtype: torch.dtype, setting: str, model_directory: Directory
) -> None:
    check_settings(model_directory(name, dtype), SETTINGS[setting], quantization=QUANTISED[name])


@pytest.mark.parametrize(
    ("name", "dtype", "setting"), cases(["chunk-7", "few-pages", "ngram"], names=tuple(QUANTISED_PAGES))
)
def test_no_setting_changes_a_bit_with_quantised_pages(
    name: str, dtype: torch.dtype, setting: str, model_directory: Directory
) -> None:
    check_settings(model_directory(name, dtype), SETTINGS[setting], cache_dtype=QUANTISED_PAGES[name])


# A preempted sequence computes all its tokens again, or gets full pages back from the host tier.
PREEMPTED = ("recomputed", "from-host")


@pytest.mark.parametrize(("name", "dtype", "way"), cases(PREEMPTED, names=tuple(QUANTISED_PAGES)))
def test_preemption_changes_no_bit_with_quantised_pages(
    name: str, dtype: torch.dtype, way: str, model_directory: Directory
) -> None:
    directory = model_directory(name, dtype)
    greedy, _ = plain(directory, cache_dtype=QUANTISED_PAGES[name])
    cache = {"page_size": 8, "kv_cache_dtype": QUANTISED_PAGES[name]}
    preempt = PreemptInTurn(evicts=way == "from-host")
    with engine(directory, cache=cache | kept_pages(way)) as made:
        assert essence(run(made, prompts(), GREEDY, preempt)) == essence(greedy)
    assert preempt.num_preemptions > 20


def test_two_ranks_that_share_a_kv_head_change_no_bit(model_directory: Directory) -> None:
    directory = model_directory("llama-gqa4-tied", torch.float32)
    greedy, _ = plain(directory)
    with engine(directory, tensor_parallel_size=2) as made:
        assert essence(run(made, prompts(), GREEDY)) == essence(greedy)


def kept_pages(way: str) -> dict[str, Any]:
    """The settings of the cache in which preempted sequences come back in this way."""
    return {"enable_prefix_caching": way == "from-host", "host_cache_memory_bytes": 2**22}


@pytest.mark.parametrize(("name", "dtype", "way", "mode"), cases(PREEMPTED, MODES))
def test_preemption_changes_no_bit(
    name: str, dtype: torch.dtype, way: str, mode: str, model_directory: Directory
) -> None:
    directory = model_directory(name, dtype)
    greedy, seeded = plain(directory)
    preempt = PreemptInTurn(evicts=way == "from-host")
    cache_settings = {"page_size": 8} | kept_pages(way)
    with engine(directory, cache=cache_settings, scheduler=MODES[mode]) as made:
        assert essence(run(made, prompts(), GREEDY, preempt)) == essence(greedy)
        assert essence(run(made, prompts(1), SEEDED, preempt)) == essence(seeded)
    assert preempt.num_preemptions > 100


@pytest.mark.parametrize(("name", "dtype"), cases())
def test_answer_that_is_cut_anywhere_goes_on_to_the_bit(
    name: str, dtype: torch.dtype, model_directory: Directory
) -> None:
    directory = model_directory(name, dtype)
    cuts = (1, 16, 33, 62, 63)  # one a prompt
    with engine(directory, scheduler={"max_num_batched_tokens": 64}) as made:
        for sampling, token_lists, answers in zip(
            (GREEDY, SEEDED), (prompts(), prompts(1)), plain(directory), strict=True
        ):
            begun = [
                [token for token in answer[:cut] if token is not None]
                for answer, cut in zip(tokens(answers), cuts, strict=True)
            ]
            rest = run(made, token_lists, sampling, begun=begun)
            expected = [answer[cut:] for answer, cut in zip(answers, cuts, strict=True)]
            assert essence(rest) == essence(expected)
            assert [of_one[0].index for of_one in rest] == list(cuts)


@pytest.mark.parametrize(("name", "dtype", "mode"), cases(MODES))
def test_prefix_hits_change_no_bit(
    name: str, dtype: torch.dtype, mode: str, model_directory: Directory
) -> None:
    directory = model_directory(name, dtype)
    greedy, _ = plain(directory)
    with engine(directory, cache={"page_size": 4}, scheduler=MODES[mode]) as made:
        run(made, prompts(), GREEDY)
        again = run(made, prompts(), GREEDY)
        longer = [
            prompt + [token for token in answer[:30] if token is not None]
            for prompt, answer in zip(prompts(), tokens(greedy), strict=True)
        ]
        continued = run(made, longer, GREEDY)
    assert essence(again) == essence(greedy)
    assert [of_one[0].num_cached_tokens for of_one in again] == [
        (len(prompt) - 1) // 4 * 4 for prompt in prompts()
    ]
    for first, rest in zip(tokens(greedy), tokens(continued), strict=True):
        assert rest[:34] == first[30:]


def answers_of_process(directory: Path, settings: dict[str, Any], *flags: str) -> str:
    """Return the answers of an engine with kernels of its own; a process loads them once."""
    command = [sys.executable, "-m", "tests.parity.narrow_vectors", str(directory), json.dumps(settings)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ended = subprocess.run(
        [*command, *flags], stdout=subprocess.PIPE, encoding="utf-8", env=environment, timeout=280, check=True
    )
    return ended.stdout


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flags are those of x86")
@pytest.mark.parametrize("flag", ["-mno-avx512f", "-mno-avx2"])
@pytest.mark.parametrize(
    ("name", "dtype", "settings"),
    [
        *((name, dtype, {}) for name in (*FAST, "gpt-oss", "gemma2") for dtype in DTYPES),
        *((FAST[0], torch.bfloat16, {"quantization": method}) for method in ("int8", "int4", "fp8")),
        *((FAST[0], torch.bfloat16, {"cache": {"kv_cache_dtype": codes}}) for codes in ("int8", "fp8")),
    ],
)
def test_narrower_vectors_change_no_bit(
    name: str, dtype: torch.dtype, settings: dict[str, Any], flag: str, model_directory: Directory
) -> None:
    directory = model_directory(name, dtype)
    answers = answers_of_process(directory, settings)
    assert len(answers) > 1000
    assert answers_of_process(directory, settings, flag) == answers
