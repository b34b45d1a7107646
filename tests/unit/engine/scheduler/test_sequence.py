"""Sequences made of requests, and requests that the loaded model cannot run."""

from collections.abc import Callable
from typing import Any

import pytest

from baton.engine.scheduler.sequence import Sequence, check_request
from baton.errors import InvalidRequest
from baton.request import Request, SamplingParams, TokenIds


def sequence_of(
    sampling: SamplingParams, *, choice: int = 1, num_prompt_tokens: int = 3, max_model_len: int = 100
) -> Sequence:
    request = Request(
        request_id="r", token_ids=TokenIds.of(range(num_prompt_tokens)), sampling=sampling, priority=2
    )
    return Sequence.from_request(request, choice, max_model_len=max_model_len, eos_token_ids=(9,))


def test_sequence_starts_from_its_request() -> None:
    sequence = sequence_of(SamplingParams(max_tokens=5, min_tokens=2, stop_token_ids=(4,)))
    assert (sequence.request_id, sequence.choice, sequence.rank[:2]) == ("r", 1, (0, 2))
    assert (sequence.num_tokens, sequence.num_uncomputed_tokens, sequence.num_generated_tokens) == (3, 3, 0)
    assert (sequence.min_num_tokens, sequence.max_num_tokens) == (5, 8)
    assert sequence.stop_ids == {4, 9}


def test_ignored_eos_does_not_stop_but_stop_ids_do() -> None:
    assert sequence_of(SamplingParams(ignore_eos=True, stop_token_ids=(4,))).stop_ids == {4}


@pytest.mark.parametrize(("max_tokens", "expected"), [(5, 8), (50, 10), (None, 10)])
def test_model_length_caps_the_answer(max_tokens: int | None, expected: int) -> None:
    assert sequence_of(SamplingParams(max_tokens=max_tokens), max_model_len=10).max_num_tokens == expected


def test_prompt_logprobs_are_needed_until_the_first_token() -> None:
    sequence = sequence_of(SamplingParams(prompt_logprobs=0), choice=0)
    assert sequence.needs_prompt_logprobs
    sequence.token_ids.append(1)
    assert not sequence.needs_prompt_logprobs


def test_prompt_logprobs_are_the_first_choices_alone() -> None:
    sampling = SamplingParams(n=3, prompt_logprobs=0)
    assert [sequence_of(sampling, choice=choice).needs_prompt_logprobs for choice in range(3)] == [
        True,
        False,
        False,
    ]


# Checks against the model.

VOCAB_SIZE, MAX_MODEL_LEN = 50, 20


def check(token_ids: tuple[int, ...] = (1, 2), **sampling: Any) -> None:
    request = Request(request_id="r", token_ids=TokenIds.of(token_ids), sampling=SamplingParams(**sampling))
    check_request(request, vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN)


BAD: dict[str, tuple[Callable[[], None], str]] = {
    "empty prompt": (lambda: check(()), "the prompt is empty"),
    "prompt as long as the model": (lambda: check((1,) * 20), "the prompt has 20 tokens; the model takes 20"),
    "prompt longer than the model": (lambda: check((1,) * 999), "the prompt has 999 tokens"),
    "token beyond the vocabulary": (lambda: check((1, 50)), "prompt token: token id 50 is outside"),
    "negative token": (lambda: check((-1,)), "token id -1: expected an integer from 0"),
    "top_k beyond the vocabulary": (lambda: check(top_k=51), "top_k must be at most the vocabulary of 50"),
    "stop id": (lambda: check(stop_token_ids=(3, 77)), "stop_token_ids: token id 77 is outside"),
    "biased id": (lambda: check(logit_bias={50: 1.0}), "logit_bias: token id 50 is outside"),
}


@pytest.mark.parametrize("name", BAD)
def test_value_that_the_model_cannot_use_is_refused_by_name(name: str) -> None:
    ask, message = BAD[name]
    with pytest.raises(InvalidRequest, match=message):
        ask()


def test_edges_of_the_allowed_values_pass() -> None:
    check((0,) * (MAX_MODEL_LEN - 1), max_tokens=10**9, stop_token_ids=(0, 49), logit_bias={49: -100.0})
    check((49,), top_k=VOCAB_SIZE, top_p=1.0, min_p=1.0, temperature=0.0, logprobs=20, seed=2**63 - 1)
    check((0,), top_k=-1)
