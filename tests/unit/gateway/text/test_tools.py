from typing import Any

import pytest

from baton.gateway.api.errors import ApiError
from baton.gateway.text.tools import MAX_DEPTH, MAX_TOOL_BYTES, MAX_TOOLS, usable_tools


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
