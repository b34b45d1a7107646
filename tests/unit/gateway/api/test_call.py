import json
from typing import Any

import pytest

from baton.errors import InvalidRequest
from baton.gateway.api.call import Call, Prompt, RequestPolicy, chat_call, completion_call, num_answer_entries
from baton.gateway.api.errors import ApiError
from baton.gateway.api.types import ChatBody, CompletionBody, decode_body
from baton.gateway.tenants.tenants import Tenant
from baton.gateway.text.tools import usable_tools

TERMS = RequestPolicy(tenant=Tenant(name="acme", cache_salt=b"s"), model="tiny", seed=11, tool_form="llama")
TOOL = {"type": "function", "function": {"name": "weather"}}
PROMPT = Prompt("a", (5, 6))


def chat(**fields: Any) -> Call:
    data = json.dumps({"messages": [{"role": "user", "content": "a"}], **fields}).encode()
    body = decode_body(data, ChatBody)[0]
    has_tools = bool(usable_tools(body.tools, body.tool_choice))
    return chat_call(body, PROMPT, TERMS, has_tools=has_tools)


def completion(**fields: Any) -> Call:
    data = json.dumps({"prompt": "a", **fields}).encode()
    return completion_call(decode_body(data, CompletionBody)[0], (PROMPT,), TERMS)


def test_defaults_are_openais() -> None:
    assert chat().sampling.max_tokens is None and completion().sampling.max_tokens == 16
    assert chat().sampling.temperature == 1.0 and chat().num_choices == 1
    assert not chat().is_streamed and chat().is_chat and not completion().is_chat
    assert chat().tenant.name == "acme" and chat().model == "tiny"


def test_max_completion_tokens_wins() -> None:
    assert chat(max_tokens=5).sampling.max_tokens == 5
    assert chat(max_tokens=5, max_completion_tokens=3).sampling.max_tokens == 3


def test_a_seed_is_drawn_where_none_is_given() -> None:
    assert (chat().sampling.seed, chat(seed=3).sampling.seed) == (11, 3)
    assert chat(seed=-1).sampling.seed == 2**63 - 1


def test_choices_are_requests_of_their_own() -> None:
    call = chat(n=4)
    assert (call.num_choices, call.sampling.n) == (4, 1)
    for wrong in (0, -1, 9):
        with pytest.raises(ApiError, match="n must be between 1 and 8"):
            chat(n=wrong)


def test_logprobs() -> None:
    assert chat(logprobs=False).sampling.logprobs is None
    assert chat(logprobs=True).sampling.logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).sampling.logprobs == 20
    for fields in ({"top_logprobs": 2}, {"logprobs": True, "top_logprobs": 21}):
        with pytest.raises(ApiError, match="logprobs"):
            chat(**fields)
    echoed = completion(echo=True, logprobs=2).sampling
    assert (echoed.logprobs, echoed.prompt_logprobs) == (2, 2)
    assert completion(logprobs=2).sampling.prompt_logprobs is None


def test_no_token_may_be_asked_for_in_a_completion() -> None:
    call = completion(max_tokens=0, echo=True)
    assert call.hides_tokens and call.sampling.max_tokens == 1
    with pytest.raises(InvalidRequest, match="max_tokens"):
        chat(max_tokens=0)


def test_stops() -> None:
    assert chat(stop="a").stops == ("a",) and chat(stop=["a", "b"]).stops == ("a", "b")
    with pytest.raises(InvalidRequest, match="stop"):
        chat(stop=["a", ""])


def test_token_ids_of_biases() -> None:
    assert chat(logit_bias={"7": 1}).sampling.logit_bias == {7: 1.0}
    with pytest.raises(ApiError, match="token ids"):
        chat(logit_bias={"seven": 1})


def test_usage_in_streams() -> None:
    assert not chat(stream=True).has_usage
    assert chat(stream=True, stream_options={"include_usage": True}).has_usage
    both = {"include_usage": True, "continuous_usage_stats": True}
    assert chat(stream=True, stream_options=both).has_running_usage
    assert not chat(stream=True, stream_options={"continuous_usage_stats": True}).has_running_usage


@pytest.mark.parametrize(
    "fields",
    [
        {"functions": [{}]},
        {"response_format": {"type": "json_object"}},
        {"tool_choice": "required", "tools": [TOOL]},
        {"tool_choice": {"type": "function", "function": {"name": "weather"}}, "tools": [TOOL]},
    ],
)
def test_what_is_not_supported_is_said_plainly(fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match="not supported") as refused:
        chat(**fields)
    assert (refused.value.status, refused.value.code) == (400, "unsupported")
    assert refused.value.param == next(iter(fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": []},
        {"tools": [TOOL], "tool_choice": "none"},
        {"response_format": {"type": "text"}},
        {"tool_choice": "auto"},
    ],
)
def test_what_asks_for_nothing_special_passes(fields: dict[str, Any]) -> None:
    assert chat(**fields).is_chat and chat(**fields).tool_form is None


def test_tools_may_be_called() -> None:
    of_no_matter: tuple[dict[str, Any], ...] = ({}, {"tool_choice": "auto"}, {"parallel_tool_calls": None})
    for fields in of_no_matter:
        call = chat(tools=[TOOL], **fields)
        assert call.tool_form == "llama" and call.has_parallel_calls and not call.skips_special_tokens
    assert not chat(tools=[TOOL], parallel_tool_calls=False).has_parallel_calls


def test_completions_of_other_kinds_are_refused() -> None:
    assert completion(best_of=2, n=2).num_choices == 2
    for fields in ({"best_of": 2}, {"suffix": "b"}):
        with pytest.raises(ApiError, match="not supported"):
            completion(**fields)


@pytest.mark.parametrize(
    ("fields", "num_entries"),
    [
        ({}, 0),  # what is only generated, and only text, comes as slowly as it is computed
        ({"n": 8}, 0),
        ({"echo": True}, 2),
        ({"echo": True, "n": 8}, 16),
        ({"logprobs": 0, "max_tokens": 10}, 10),
        ({"logprobs": 20, "max_tokens": 10, "n": 8}, 10 * 8 * 21),
        ({"logprobs": 20, "max_tokens": 10_000}, 98 * 21),  # the model has no room for more
        ({"logprobs": 4, "max_tokens": 3, "n": 2, "echo": True}, (2 + 3) * 2 * 5),
    ],
)
def test_entries_of_an_answer(fields: dict[str, Any], num_entries: int) -> None:
    assert num_answer_entries(completion(**fields), 100) == num_entries


def test_entries_of_a_chat_reach_to_the_models_end() -> None:
    assert num_answer_entries(chat(logprobs=True, top_logprobs=3, n=2), 100) == 98 * 2 * 4
    assert num_answer_entries(chat(n=2), 100) == 0
