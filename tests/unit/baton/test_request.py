from typing import Any

import msgspec
import pytest

from baton.errors import InvalidRequest
from baton.request import Request, SamplingParams, StructuredOutputs, TokenIds


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n": 0}, "n must be between 1 and 128, got 0"),
        ({"n": 129}, "n must be between 1 and 128, got 129"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"min_tokens": 17}, "min_tokens must be between 0 and 16, got 17"),
        ({"temperature": -0.1}, "temperature must be at least 0.0, got -0.1"),
        ({"temperature": float("nan")}, "temperature must be at least 0.0, got nan"),
        ({"temperature": float("inf")}, "temperature must be finite, got inf"),
        ({"top_p": 0.0}, "top_p must be greater than 0, got 0.0"),
        ({"top_p": 1.1}, "top_p must be between 0.0 and 1.0, got 1.1"),
        ({"top_p": float("nan")}, "top_p must be between"),
        ({"top_k": -2}, "top_k must be at least -1, got -2"),
        ({"min_p": 1.5}, "min_p must be between"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be greater than 0, got 0.0"),
        ({"presence_penalty": 2.5}, "presence_penalty must be between -2.0 and 2.0, got 2.5"),
        ({"frequency_penalty": -2.5}, "frequency_penalty must be between"),
        ({"logit_bias": {5: 101.0}}, r"logit_bias\[5\] must be between -100.0 and 100.0, got 101.0"),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, r"len\(logit_bias\) must be between 0 and 1024"),
        ({"seed": -1}, "seed must be between 0 and"),
        ({"seed": 2**63}, "seed must fit 64 bits"),
        ({"logprobs": 21}, "logprobs must be between 0 and 20, got 21"),
        ({"prompt_logprobs": -1}, "prompt_logprobs must be between 0 and 20, got -1"),
    ],
)
def test_sampling_out_of_range(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        SamplingParams(**change)


def test_the_edges_of_every_range_are_allowed() -> None:
    SamplingParams(n=8, min_tokens=16, temperature=0.0, top_p=1.0, top_k=-1, min_p=1.0, seed=0, logprobs=20)
    SamplingParams(presence_penalty=-2.0, frequency_penalty=2.0, seed=2**63 - 1, logit_bias={0: -100.0})


@pytest.mark.parametrize(
    "change", [{"repetition_penalty": 1.1}, {"presence_penalty": 1.0}, {"frequency_penalty": -1.0}]
)
def test_penalties_are_noticed(change: dict[str, float]) -> None:
    assert SamplingParams(**change).has_penalties  # type: ignore[arg-type]
    assert not SamplingParams().has_penalties


@pytest.mark.parametrize("priority", [2**63, -(2**63)])
def test_a_priority_is_one_that_queues_can_hold(priority: int) -> None:
    with pytest.raises(InvalidRequest, match="priority must fit 64 bits"):
        Request(request_id="r", token_ids=TokenIds.of((1,)), priority=priority)


def test_the_largest_numbers_survive_the_wire() -> None:
    most = 2**63 - 1
    sampling = SamplingParams(
        max_tokens=most,
        min_tokens=most,
        top_k=most,
        seed=most,
        stop_token_ids=(most,),
        logit_bias={most: 1.0},
    )
    request = Request(request_id="0" * 32, token_ids=TokenIds.of((1,)), sampling=sampling)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=Request) == request


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": "0.7"}, "temperature must be a number, got '0.7'"),
        ({"temperature": None}, "temperature must be a number, got None"),
        ({"max_tokens": 10**400}, "max_tokens must fit 64 bits"),
        ({"max_tokens": 2**64}, "max_tokens must fit 64 bits"),
        ({"max_tokens": 2**63}, "max_tokens must fit 64 bits"),
        ({"min_tokens": 2**63, "max_tokens": None}, "min_tokens must fit 64 bits"),
        ({"top_k": 2**63}, "top_k must fit 64 bits"),
        ({"stop_token_ids": (2**63,)}, "must fit 64 bits"),
        ({"logit_bias": {2**63: 1.0}}, "must fit 64 bits"),
        ({"temperature": 2**64}, "temperature must fit 64 bits"),
        ({"n": 1.5}, "n must be an integer, got 1.5"),
        ({"top_k": True}, "top_k must be an integer, got True"),
        ({"logit_bias": {"5": 1.0}}, "must be an integer, got '5'"),
        ({"logit_bias": 5}, "logit_bias must map token ids"),
        ({"stop_token_ids": 5}, "stop_token_ids must be token ids, got 5"),
        ({"stop": 5}, "stop: expected text or a list of texts, got 5"),
        ({"stop": ["a", None]}, "stop: expected text or a list of texts"),
        ({"stop": [""]}, "stop: a stop string must not be empty"),
        ({"bad_words": [" "]}, "bad_words: each of them needs a character that is no space"),
        ({"ignore_eos": None}, "ignore_eos: expected True or False, got None"),
        ({"include_stop_str_in_output": "no"}, "include_stop_str_in_output: expected True or False"),
        ({"skip_special_tokens": "no"}, "skip_special_tokens: expected True or False, got 'no'"),
        (
            {"structured_outputs": {"regex": "1"}},
            r"structured_outputs: expected baton.StructuredOutputs\(...\)",
        ),
    ],
)
def test_sampling_of_the_wrong_type(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        SamplingParams(**change)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("temprature", "Unexpected keyword argument 'temprature'; did you mean 'temperature'?"),
        ("zzz", "'zzz'; known are n, max_tokens, "),
    ],
)
def test_an_unknown_argument_is_answered_with_what_was_meant(name: str, message: str) -> None:
    with pytest.raises(TypeError) as error:
        SamplingParams(**{name: 1})  # type: ignore[arg-type]
    assert message in str(error.value)


def test_the_number_of_tokens_may_be_left_to_the_model() -> None:
    endless = SamplingParams(max_tokens=None, min_tokens=1000)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(endless), type=SamplingParams) == endless


def test_stop_strings_may_be_one_text_or_several() -> None:
    assert SamplingParams().stops == SamplingParams(stop=[]).stops == ()
    assert SamplingParams(stop="x").stops == SamplingParams(stop=("x",)).stops == ("x",)


def test_an_engine_gets_no_text() -> None:
    sampling = SamplingParams(top_k=3, stop="x", bad_words=["y"], skip_special_tokens=False)
    assert sampling.of_tokens() == SamplingParams(top_k=3)


def test_structured_outputs_take_a_list_and_a_mapping() -> None:
    choice: Any = ["a", "b"]
    schema: Any = {"type": "integer"}
    assert StructuredOutputs(choice=choice) == StructuredOutputs(choice=("a", "b"))
    assert StructuredOutputs(json=schema).json == '{"type":"integer"}'
    assert len({StructuredOutputs(choice=choice), StructuredOutputs(json=schema)}) == 2
