import json
from typing import Any

import pytest

from baton.gateway.api.errors import ApiError
from baton.gateway.api.types import (
    WITHOUT_MEANING,
    AnyBody,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    decode_body,
)

CHAT = {"messages": [{"role": "user", "content": "a"}]}


def decode(kind: type[AnyBody], **fields: Any) -> AnyBody:
    return decode_body(json.dumps(fields).encode(), kind)[0]


@pytest.mark.parametrize(
    ("kind", "needed"),
    [
        (ChatBody, CHAT),
        (CompletionBody, {"prompt": "a"}),
        (TokenizeBody, {}),
        (DetokenizeBody, {"tokens": []}),
    ],
)
def test_every_optional_field_may_be_null(kind: type[AnyBody], needed: dict[str, Any]) -> None:
    absent = decode(kind, **needed)
    fields = dict.fromkeys(kind.__struct_fields__, None)
    assert decode(kind, **{**fields, **needed}) == absent


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": "7"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"stop": [1]}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": "a" * 257}, "stop"),
        ({"messages": []}, "messages"),
        ({"messages": [CHAT["messages"][0]] * 2049}, "messages"),
        ({"messages": None}, "messages"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"logit_bias": {"5": "x"}}, "logit_bias"),
        ({"priority": 2**40}, "priority"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        decode(ChatBody, **{**CHAT, **fields})
    assert refused.value.status == 400
    assert refused.value.param is not None and refused.value.param.startswith(param)


def test_a_missing_field_is_named() -> None:
    with pytest.raises(ApiError) as refused:
        decode(CompletionBody)
    assert refused.value.param == "prompt"


@pytest.mark.parametrize(
    "data", [b"", b"{", b"\xff", b'{"prompt": "a", "\xff": 1}', b"[" * 100_000, b"{} {}"]
)
def test_what_is_no_json_is_refused(data: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        decode_body(data, CompletionBody)
    assert refused.value.status == 400


def test_unknown_keys_are_told_and_ignored() -> None:
    data = json.dumps({"prompt": "a", "kv_transfer_params": {}, "user": "me", "x": 1, "n": 2}).encode()
    body, unknown = decode_body(data, CompletionBody)
    assert unknown == ["kv_transfer_params", "x"] and body.n == 2
    assert "user" in WITHOUT_MEANING


@pytest.mark.parametrize("value", [True, 3, {"type": "object"}, ["a"], "x"])
def test_what_would_change_the_answer_is_not_ignored(value: object) -> None:
    with pytest.raises(ApiError, match="not supported") as refused:
        decode(CompletionBody, prompt="a", guided_json=value)
    assert (refused.value.code, refused.value.param) == ("unsupported", "guided_json")


@pytest.mark.parametrize("value", [None, False, 0, {}, [], ""])
def test_what_asks_for_none_of_it_is(value: object) -> None:
    assert decode(CompletionBody, prompt="a", guided_json=value, prompt_logprobs=None).prompt == "a"
