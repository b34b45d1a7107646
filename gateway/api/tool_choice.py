"""Reads the keys of a body about tools: `tools`, `tool_choice`, `parallel_tool_calls`."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from baton.errors import InvalidRequest
from baton.gateway.api.body import check_depth
from baton.gateway.api.errors import invalid, misread, unsupported
from baton.gateway.text.answer_grammar import AskedCalls, CallableTool, arguments_schema, text_arguments

MAX_TOOLS: Final = 128
MAX_TOOL_BYTES: Final = 64 * 2**10
MAX_TOOL_DEPTH: Final = 32

Tool: TypeAlias = dict[str, Any]


class Function(msgspec.Struct, frozen=True):
    """A tool as clients offer it. It is checked and given to the chat template unchanged."""

    name: Annotated[str, Meta(pattern=r"\A[a-zA-Z0-9_.-]{1,64}\Z")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # the arguments of each call follow `parameters`


class _Tool(msgspec.Struct, frozen=True):
    type: Literal["function"]
    function: Function


class _Name(msgspec.Struct, frozen=True):
    name: str


class _Named(msgspec.Struct, frozen=True):
    type: Literal["function"]
    function: _Name


class _AllowedTools(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    mode: Literal["auto", "required"]
    tools: Annotated[list[_Named], Meta(min_length=1, max_length=MAX_TOOLS)]


class _Allowed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["allowed_tools"]
    allowed_tools: _AllowedTools


def read_tool_choice(
    tools: Sequence[Tool] | None, tool_choice: object = None, parallel_tool_calls: bool | None = None
) -> AskedCalls | None:
    """Return the calls that a body asks for or allows; None for no calls and no tools in the prompt.

    With allowed tools the prompt still describes all tools, so that it stays in the prefix cache. Raises
    ApiError that names the wrong field.
    """
    if not tools:
        if tool_choice not in (None, "none") and (tools is None or tool_choice != "auto"):
            raise invalid("tool_choice", "there are no tools to choose from")
        return None
    if len(tools) > MAX_TOOLS:
        raise invalid("tools", f"at most {MAX_TOOLS}, got {len(tools)}")
    functions = [_read(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    if tool_choice == "none":
        return None
    names, is_required, is_named = _chosen(tool_choice)
    if unknown := sorted((names or set()) - {function.name for function in functions}):
        raise invalid("tool_choice", f"{unknown[0][:64]!r} is not among the tools")
    called = [
        _callable(function, f"tools[{index}].function.parameters", is_required=is_required)
        for index, function in enumerate(functions)
        if names is None or function.name in names
    ]
    text = {each.name: text_arguments(each.parameters) for each in functions}
    return AskedCalls(
        tools=called[:1] if is_named else called,  # a name may be repeated
        shown=[*tools],
        is_required=is_required,
        is_named=is_named,
        is_parallel=parallel_tool_calls is not False and not is_named,
        is_limited=len(called) < len(functions),
        text_arguments={name: keys for name, keys in text.items() if keys},
    )


def _callable(function: Function, key: str, *, is_required: bool) -> CallableTool:
    """Return a tool that may be called. Raises ApiError that names `key`, the key of its parameters."""
    is_kept = is_required or function.strict
    try:
        schema = arguments_schema(function.parameters) if is_kept else None
    except InvalidRequest as error:
        raise invalid(key, str(error)) from None
    return CallableTool(name=function.name, schema=schema, key=key)


def _chosen(tool_choice: object) -> tuple[frozenset[str] | None, bool, bool]:
    """Return the names of a choice, None for all; whether it requires a call; whether it names a tool."""
    if tool_choice in (None, "auto", "required"):
        return None, tool_choice == "required", False
    kind = tool_choice.get("type") if isinstance(tool_choice, Mapping) else None
    if kind == "custom":
        raise unsupported("tool_choice", '{"type": "custom"}')
    try:
        if kind == "allowed_tools":
            allowed = msgspec.convert(tool_choice, _Allowed).allowed_tools
            return frozenset(each.function.name for each in allowed.tools), allowed.mode == "required", False
        return frozenset({msgspec.convert(tool_choice, _Named).function.name}), True, True
    except msgspec.ValidationError as error:
        if kind == "allowed_tools":
            raise misread(error, _Allowed, "tool_choice") from None
        forms = 'none, auto, required or {"type": "function", "function": {"name": ...}}'
        raise invalid("tool_choice", f"expected {forms}") from None


def _read(tool: Tool, name: str) -> Function:
    data = msgspec.json.encode(tool)
    if len(data) > MAX_TOOL_BYTES:
        raise invalid(name, f"at most {MAX_TOOL_BYTES} bytes, got {len(data)}")
    try:
        check_depth(data, "it", MAX_TOOL_DEPTH)
        return msgspec.convert(tool, _Tool).function
    except InvalidRequest as error:
        raise invalid(name, str(error)) from None
    except msgspec.ValidationError as error:
        raise misread(error, _Tool, name) from None
