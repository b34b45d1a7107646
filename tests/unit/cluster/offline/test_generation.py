import array
from typing import Any

import numpy as np
import pytest
import torch

from baton.cluster.offline.generation import (
    OfflinePrompt,
    list_sampling,
    naming,
    prompts_in,
    read_prompt,
)
from baton.errors import InvalidRequest
from baton.request import SamplingParams


def read(prompts: object) -> list[OfflinePrompt]:
    return [read_prompt(prompt) for prompt in prompts_in(prompts)]


@pytest.mark.parametrize(
    "prompt",
    [
        [1, 2],
        (1, 2),
        range(1, 3),
        {"prompt_token_ids": [1, 2]},
        {"prompt_token_ids": [1, 2], "prompt": None},
        np.array([1, 2]),
        [np.int64(1), 2],
        torch.tensor([1, 2]),
        array.array("i", [1, 2]),
    ],
)
def test_one_prompt_of_token_ids_alone_and_among_others(prompt: Any) -> None:
    assert read(prompt) == [(None, (1, 2))]
    assert read([prompt, "x", prompt]) == [(None, (1, 2)), ("x", None), (None, (1, 2))]


def test_text_alone_in_a_dict_and_beside_ids() -> None:
    assert read("x") == read({"prompt": "x"}) == read("x" for _ in range(1)) == [("x", None)]
    assert read({"prompt": "x", "prompt_token_ids": [7]}) == [("x", (7,))]
    assert read([]) == [] and read([[]]) == [(None, ())] and read("") == [("", None)]


def test_rows_are_prompts() -> None:
    assert read(torch.tensor([[1], [2]])) == read(np.array([[1], [2]])) == [(None, (1,)), (None, (2,))]


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (None, "prompts: expected text, token ids, or a dict .*, got None"),
        (5, r"prompts: expected text.*, got 5 \(int\)"),
        (b"sun", r"prompts: .*, got b'sun' \(bytes\)"),
        ([b"sun"], r"expected text, .*, got b'sun' \(bytes\)"),
        ([True], r"expected text, .*, got True \(bool\)"),
        ([1, True], r"token id 1: expected an integer, got True \(bool\)"),
        ([1, 2.5], r"token id 1: expected an integer, got 2.5 \(float\)"),
        ([[1, "x"]], r"token id 1: expected an integer, got 'x' \(str\)"),
        (["x", 1], r"expected text, .*, got 1 \(int\)"),
        ({}, r"expected text, .*, got {} \(dict\)"),
        ({"prompt": 5}, r"prompt: expected text, got 5 \(int\)"),
        ({"prompt": "x", "multi_modal_data": {}}, "unknown key 'multi_modal_data'; known are 'prompt' and"),
        ({"prompt_token_ids": "x"}, r"expected prompt_token_ids: token ids, got 'x' \(str\)"),
    ],
)
def test_invalid_prompt_is_shown(prompts: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        read(prompts)


def test_sampling() -> None:
    own = SamplingParams(n=2)
    assert list_sampling(None, 2) == [SamplingParams()] * 2
    assert list_sampling(own, 2) == list_sampling((own, own), 2) == [own, own]
    for wrong in ({"temperature": 0}, "greedy", 0, [own, None], [{"n": 2}]):
        with pytest.raises(InvalidRequest, match=r"sampling_params: expected SamplingParams\(...\), or"):
            list_sampling(wrong, 2)
    with pytest.raises(InvalidRequest, match="expected one, or 2 for as many prompts, got 1"):
        list_sampling([own], 2)


def test_only_one_of_several_is_named() -> None:
    for num_prompts, message in ((1, "^wrong"), (2, "^prompt 0: wrong")):
        with pytest.raises(InvalidRequest, match=message), naming(0, num_prompts):
            raise InvalidRequest("wrong")
