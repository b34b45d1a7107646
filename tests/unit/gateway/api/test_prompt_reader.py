from typing import Any

import pytest

from baton.errors import InvalidRequest
from baton.gateway.api.prompt_reader import read_messages

HI = {"role": "user", "content": "Hi"}


def test_messages_of_text_stay_as_they_are() -> None:
    asked = [{"role": "system", "content": ""}, {**HI, "name": "Ann"}]
    assert read_messages(iter(asked)) == asked


def test_parts_become_lines() -> None:
    parts = [{"type": "text", "text": "one"}, "two"]
    assert read_messages([{"role": "user", "content": parts}]) == [{"role": "user", "content": "one\ntwo"}]


def test_a_call_of_tools_needs_no_content() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    assert read_messages([HI, call]) == [HI, call]


def calling(arguments: object) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": function}]}


@pytest.mark.parametrize(
    ("arguments", "read"), [('{"x": "é"}', {"x": "é"}), ("", {}), ({"x": 1}, {"x": 1}), (None, None)]
)
def test_what_was_called_with_is_read_for_the_template(arguments: object, read: object) -> None:
    assert read_messages([calling(arguments)]) == [calling(read)]


@pytest.mark.parametrize("arguments", ["{", "[]", "x", '{"x": 1} {}', "[" * 5000])
def test_what_cannot_have_been_called_with_is_told(arguments: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^message 0: tool_calls\[0\]: arguments: expected the JSON of"):
        read_messages([calling(arguments)])


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("Hi", r"messages: expected a list such as \[{.role.: .*, got 'Hi' \(str\)"),
        (None, r"messages: expected a list .*, got None"),
        (HI, "messages: expected a list of messages .*, got one message"),
        ([], "messages: expected at least one message, got none"),
        (["Hi"], r"message 0: expected a dict such as .*, got 'Hi' \(str\)"),
        ([HI, {"content": "Hi"}], "message 1: role: expected text such as 'user', got nothing"),
        ([{"role": 5, "content": "Hi"}], r"message 0: role: .*, got 5 \(int\)"),
        ([{"role": "user"}], "message 0: content: expected text or a list of text parts, got nothing"),
        ([{"role": "user", "content": None}], "message 0: content: .*, got None"),
        (
            [{"role": "user", "content": ["a", {"type": "image_url", "image_url": {}}]}],
            r'message 0: content\[1\]: expected {"type": "text", .*, got .*image_url',
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], r"message 0: content\[0\]: expected"),
    ],
)
def test_what_is_no_message_is_named(messages: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        read_messages(messages)
