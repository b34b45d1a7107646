"""`tools` and `tool_choice` of a body."""

from typing import Any

import pytest

from baton.gateway.api.errors import ApiError
from baton.gateway.api.tool_choice import (
    MAX_TOOL_BYTES,
    MAX_TOOL_DEPTH,
    MAX_TOOLS,
    read_tool_choice,
)

EMPTY: dict[str, Any] = {"type": "object", "additionalProperties": False}


def tool(name: object = "weather", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.parametrize("choice", [None, "auto"])
def test_tools_reach_the_template_unchanged(choice: object) -> None:
    given = [
        tool(description="of a city", strict=True, parameters={"type": "object"}, mine=1),
        tool("a.b-c_1", parameters=nested(MAX_TOOL_DEPTH - 2)),
        *[tool()] * (MAX_TOOLS - 2),
    ]
    calls = read_tool_choice(given, choice)
    assert calls is not None and calls.shown == given


@pytest.mark.parametrize(("tools", "choice"), [(None, None), ([], "auto"), ([tool()], "none")])
def test_chat_without_read_tool_choice(tools: Any, choice: object) -> None:
    assert read_tool_choice(tools, choice) is None


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ([{}], r"tools\[0\]: .*missing required field `type`"),
        ([tool(), {"type": "function"}], r"tools\[1\]: .*missing required field `function`"),
        ([{"type": "web_search", "function": {"name": "a"}}], r"tools\[0\].type: .*expected one of function"),
        ([tool("")], r"tools\[0\].function.name: "),
        ([tool("a b")], r"tools\[0\].function.name: "),
        ([tool("a" * 65)], r"tools\[0\].function.name: "),
        ([tool(parameters=[])], r"tools\[0\].function.parameters: "),
        ([tool(parameters=nested(MAX_TOOL_DEPTH))], r"tools\[0\]: it is nested more than 32 deep"),
        ([tool(description="a" * MAX_TOOL_BYTES)], r"tools\[0\]: at most 65536 bytes"),
        ([tool()] * (MAX_TOOLS + 1), "tools: at most 128, got 129"),
    ],
)
@pytest.mark.parametrize("choice", [None, "none"])
def test_wrong_tool_is_named(tools: list[dict[str, Any]], message: str, choice: object) -> None:
    with pytest.raises(ApiError, match=f"^{message}") as refused:
        read_tool_choice(tools, choice)
    assert refused.value.status == 400


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


NAMED: Any = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize("choice", ["auto", "required", NAMED, 5])
def test_choice_without_tools_is_refused(choice: object) -> None:
    with pytest.raises(ApiError, match="no tools to choose from"):
        read_tool_choice(None, choice)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (5, "tool_choice: expected none, auto, required or"),
        ("sometimes", "tool_choice: expected"),
        ({"type": "function"}, "tool_choice: expected"),
        (
            {"type": "function", "function": {"name": "wether"}},
            "tool_choice: 'wether' is not among the tools",
        ),
        ({"type": "custom"}, 'tool_choice = {"type": "custom"} is not supported'),
        ({"type": "allowed_tools", "allowed_tools": {}}, "tool_choice.allowed_tools: .*mode"),
        (allowed("auto", "weather", "wether"), "tool_choice: 'wether' is not among the tools"),
        (allowed("auto"), "tool_choice.allowed_tools.tools: Expected"),
        (allowed("none", "weather"), "tool_choice.allowed_tools.mode: Invalid"),
    ],
)
def test_wrong_choice_is_named(choice: object, message: str) -> None:
    with pytest.raises(ApiError, match=message) as refused:
        read_tool_choice([tool()], choice)
    assert refused.value.status == 400 and (param := refused.value.param) is not None
    assert param.partition(".")[0] == "tool_choice" and str(refused.value).startswith(param)


@pytest.mark.parametrize(
    ("choice", "strict", "parallel", "expected"),
    [
        (None, None, None, (["weather", "time"], [None, None], False, True)),
        ("auto", True, False, (["weather", "time"], [{"type": "object"}, None], False, False)),
        ("required", None, True, (["weather", "time"], [{"type": "object"}, EMPTY], True, True)),
        (NAMED, False, True, (["weather"], [{"type": "object"}], True, False)),
    ],
)
def test_calls_that_are_asked_for(choice: object, strict: object, parallel: Any, expected: object) -> None:
    tools = [tool(strict=strict, parameters={"description": "of a city"}), tool("time")]
    calls = read_tool_choice(tools, choice, parallel)
    assert calls is not None
    names, schemas = [each.name for each in calls.tools], [each.schema for each in calls.tools]
    assert (names, schemas, calls.is_required, calls.is_parallel) == expected


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_some_of_the_tools_may_be_called(mode: str) -> None:
    tools = [tool(), tool("time")]
    calls = read_tool_choice(tools, allowed(mode, "time"))
    assert calls is not None and calls.shown == tools
    assert [each.name for each in calls.tools] == ["time"]
    assert (calls.is_required, calls.is_limited, calls.is_constrained) == (mode == "required", True, True)
    calls = read_tool_choice(tools, allowed("auto", "time", "weather"))
    assert calls is not None and not calls.is_constrained


def test_parameters_that_are_no_object_are_named() -> None:
    with pytest.raises(ApiError, match="expected the schema of an object") as refused:
        read_tool_choice([tool(), tool("time", parameters={"type": "array"})], "required")
    assert refused.value.param == "tools[1].function.parameters"
