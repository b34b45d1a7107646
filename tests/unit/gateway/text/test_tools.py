from typing import Any

import pytest

from baton.gateway.api.errors import ApiError
from baton.gateway.text.tools import (
    MAX_DEPTH,
    MAX_TOOL_BYTES,
    MAX_TOOLS,
    LlamaCalls,
    ToolForm,
    form_of,
    reader_of,
    usable_tools,
)


def tool(name: object = "weather", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = {"a": value}
    return value


def test_tools_are_handed_on_as_they_are() -> None:
    given = [
        tool(description="of a city", strict=True, parameters={"type": "object"}, mine=1),
        tool("a.b-c_1"),
    ]
    assert usable_tools(given, None) == given
    assert usable_tools(given, "auto") == given


def test_there_may_be_none() -> None:
    assert usable_tools(None, None) is None
    assert usable_tools([], "auto") is None
    assert usable_tools([tool()], "none") is None


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ([{}], r"tools\[0\]: .*missing required field `type`"),
        ([tool(), {"type": "function"}], r"tools\[1\]: .*missing required field `function`"),
        ([{"type": "web_search", "function": {"name": "a"}}], r"tools\[0\].type: Invalid enum value"),
        ([tool("")], r"tools\[0\].function.name: "),
        ([tool("a b")], r"tools\[0\].function.name: "),
        ([tool("a" * 65)], r"tools\[0\].function.name: "),
        ([tool(parameters=[])], r"tools\[0\].function.parameters: "),
        ([tool(parameters=nested(MAX_DEPTH))], r"tools\[0\]: nested more than 32 deep"),
        ([tool(description="a" * MAX_TOOL_BYTES)], r"tools\[0\]: at most 65536 bytes"),
        ([tool()] * (MAX_TOOLS + 1), "tools: at most 128, got 129"),
    ],
)
def test_what_is_no_tool_is_named(tools: list[dict[str, Any]], message: str) -> None:
    for choice in (None, "none"):
        with pytest.raises(ApiError, match=f"^{message}") as refused:
            usable_tools(tools, choice)
        assert refused.value.status == 400


def test_the_deepest_and_the_longest_pass() -> None:
    assert usable_tools([tool(parameters=nested(MAX_DEPTH - 2))], None)
    assert usable_tools([tool()] * MAX_TOOLS, None)


def test_a_choice_without_tools_is_wrong() -> None:
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        with pytest.raises(ApiError, match="no tools to choose from"):
            usable_tools(None, choice)


def test_nobody_is_promised_a_call() -> None:
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}, 5):
        with pytest.raises(ApiError, match="not supported"):
            usable_tools([tool()], choice)


TOLD = "{% if tools %}{{ tools | tojson }}{% endif %}"


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (TOLD + '<tool_call>{"name": ..., "arguments": ...}</tool_call>', "hermes"),
        (TOLD + '{"name": function name, "parameters": dictionary of argument name and its value}', "llama"),
        (TOLD + "<tool_call><function=name></function></tool_call>", None),
        (TOLD + "[TOOL_CALLS]", None),
        ("<tool_call>", None),
        ("{{ messages }}", None),
    ],
)
def test_the_template_tells_the_form(template: str, form: ToolForm | None) -> None:
    assert form_of(template) == form


def test_tool_calls_are_all_or_none() -> None:
    one, other = '{"name": "a", "arguments": {"x": 1}}', '{"name": "b", "parameters": {"x": 1}}'
    broken, calls = LlamaCalls(), LlamaCalls()
    assert broken.push(f"{one};{{") + broken.finish() == f"{one};{{" and not broken.found
    assert calls.push(f"{one};{other}") + calls.finish() == ""
    assert [call.arguments for call in calls.found] == ['{"x":1}'] * 2
    assert len({call.id for call in calls.found}) == 2


@pytest.mark.parametrize(
    ("form", "text"),
    [("hermes", '<tool_call>{"name": "a"}</tool_call>' * 2), ("llama", '{"name": "a"};{"name": "b"}')],
)
def test_calls_beside_each_other_may_be_unwanted(form: ToolForm, text: str) -> None:
    for is_parallel in (True, False):
        reader = reader_of(form, is_parallel=is_parallel, new_id=lambda: "call_1")
        assert reader.push(text) + reader.finish() == ""
        assert len(reader.found) == (2 if is_parallel else 1)
