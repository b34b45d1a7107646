"""What no request may ask: refused before anything is kept of it, by a message that names the field."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from baton.engine.scheduler.sequence import check_request
from baton.errors import InvalidRequest
from baton.request import MAX_LOGIT_BIAS, Request, SamplingParams

VOCAB_SIZE, MAX_MODEL_LEN = 50, 20


def check(token_ids: tuple[int, ...] = (1, 2), **sampling: Any) -> None:
    request = Request(request_id="r", token_ids=token_ids, sampling=SamplingParams(**sampling))
    check_request(request, vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN)


BAD: dict[str, tuple[Callable[[], None], str]] = {
    "empty prompt": (lambda: check(()), "the prompt is empty"),
    "prompt as long as the model": (lambda: check((1,) * 20), "the prompt has 20 tokens; the model takes 20"),
    "prompt longer than the model": (lambda: check((1,) * 999), "the prompt has 999 tokens"),
    "token beyond the vocabulary": (lambda: check((1, 50)), "prompt token: token id 50 is outside"),
    "negative token": (lambda: check((-1,)), "prompt token: token id -1 is outside"),
    "max_tokens 0": (lambda: check(max_tokens=0), "max_tokens must be at least 1, got 0"),
    "min_tokens beyond max_tokens": (lambda: check(max_tokens=2, min_tokens=3), "min_tokens must be between"),
    "NaN temperature": (lambda: check(temperature=math.nan), "temperature must be at least 0.0, got nan"),
    "negative temperature": (lambda: check(temperature=-0.1), "temperature must be at least 0.0, got -0.1"),
    "infinite temperature": (lambda: check(temperature=math.inf), "temperature must be"),
    "top_k beyond the vocabulary": (lambda: check(top_k=51), "top_k must be at most the vocabulary of 50"),
    "top_k below -1": (lambda: check(top_k=-2), "top_k must be at least -1"),
    "top_p 0": (lambda: check(top_p=0.0), "top_p must be greater than 0"),
    "top_p NaN": (lambda: check(top_p=math.nan), "top_p must be between"),
    "min_p above 1": (lambda: check(min_p=1.1), "min_p must be between"),
    "repetition_penalty 0": (lambda: check(repetition_penalty=0.0), "repetition_penalty must be greater"),
    "presence_penalty": (lambda: check(presence_penalty=2.1), "presence_penalty must be between"),
    "frequency_penalty": (lambda: check(frequency_penalty=math.nan), "frequency_penalty must be between"),
    "stop id": (lambda: check(stop_token_ids=(3, 77)), "stop_token_ids: token id 77 is outside"),
    "biased id": (lambda: check(logit_bias={50: 1.0}), "logit_bias: token id 50 is outside"),
    "bias": (lambda: check(logit_bias={3: math.inf}), r"logit_bias\[3\] must be between"),
    "biases": (lambda: check(logit_bias=dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 0.0)), r"len\(logit_bias\)"),
    "seed": (lambda: check(seed=-1), "seed must be between"),
    "logprobs": (lambda: check(logprobs=21), "logprobs must be between"),
    "prompt_logprobs": (lambda: check(prompt_logprobs=-1), "prompt_logprobs must be between"),
    "n": (lambda: check(n=0), "n must be between"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_value_is_refused_by_name(name: str) -> None:
    ask, message = BAD[name]
    with pytest.raises(InvalidRequest, match=message):
        ask()


def test_the_edges_of_what_is_allowed() -> None:
    check((0,) * (MAX_MODEL_LEN - 1), max_tokens=10**9, stop_token_ids=(0, 49), logit_bias={49: -100.0})
    check((49,), top_k=VOCAB_SIZE, top_p=1.0, min_p=1.0, temperature=0.0, logprobs=20, seed=2**63 - 1)
    check((0,), top_k=-1)
