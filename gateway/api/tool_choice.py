"""Reads the keys of a body about tools: `tools`, `tool_choice`, `parallel_tool_calls`."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from baton.errors import InvalidRequest
from baton.gateway.api.body import check_depth
from baton.gateway.api.errors import invalid, unsupported
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


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The tools of a body and which of them an answer may, or must, call."""

    tools: list[Tool]  # for the chat template; none: the model is told of no tools
    functions: list[Function] = []
    mode: Literal["auto", "required", "named"] = "auto"
    name: str = ""  # of the function, when it is named
    allowed: frozenset[str] | None = None  # names of the functions that may be called; None: all of them
    is_parallel: bool = True

    def calls(self) -> AskedCalls | None:
        """Return the calls that the answer may or must have; None without tools.

        Raises ApiError that names the tool of which the parameters are no schema of an object.
        """
        if not self.functions:
            return None
        asked = []
        for index, function in enumerate(self.functions):
            if self.mode == "named" and function.name != self.name:
                continue
            if self.allowed is not None and function.name not in self.allowed:
                continue
            key = f"tools[{index}].function.parameters"
            is_kept = self.mode != "auto" or function.strict
            try:
                schema = arguments_schema(function.parameters, key) if is_kept else None
            except InvalidRequest as error:
                raise invalid(str(error), param=key) from None
            asked.append(CallableTool(name=function.name, schema=schema, key=key))
            if self.mode == "named":
                break
        is_required, is_parallel = self.mode != "auto", self.is_parallel and self.mode != "named"
        return AskedCalls(
            tools=asked,
            is_required=is_required,
            is_parallel=is_parallel,
            is_limited=len(asked) < len(self.functions),
        )

    def text_arguments(self) -> dict[str, list[str]]:
        """Return, by tool, the arguments that are text."""
        found = {each.name: sorted(text_arguments(each.parameters)) for each in self.functions}
        return {name: keys for name, keys in found.items() if keys}


NO_TOOLS: Final = ToolChoice(tools=[])


def read_tool_choice(
    tools: Sequence[Tool] | None, tool_choice: object = None, parallel_tool_calls: bool | None = None
) -> ToolChoice:
    """Return the choice of tools of a body. Raises ApiError that names the wrong field."""
    if not tools:
        if tool_choice not in (None, "none") and (tools is None or tool_choice != "auto"):
            raise invalid("tool_choice: there are no tools to choose from", param="tool_choice")
        return NO_TOOLS
    if len(tools) > MAX_TOOLS:
        raise invalid(f"tools: at most {MAX_TOOLS}, got {len(tools)}", param="tools")
    functions = [_read(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    if tool_choice == "none":
        return NO_TOOLS
    is_parallel = parallel_tool_calls is not False
    if tool_choice in (None, "auto", "required"):
        mode: Literal["auto", "required"] = "required" if tool_choice == "required" else "auto"
        return ToolChoice(tools=[*tools], functions=functions, mode=mode, is_parallel=is_parallel)
    if isinstance(tool_choice, Mapping) and tool_choice.get("type") == "allowed_tools":
        return _allowed(tools, functions, tool_choice, is_parallel=is_parallel)
    name = _named(tool_choice)
    if name not in {function.name for function in functions}:
        raise invalid(f"tool_choice: {name[:64]!r} is not among the tools", param="tool_choice")
    return ToolChoice(tools=[*tools], functions=functions, mode="named", name=name, is_parallel=False)


def _allowed(
    tools: Sequence[Tool], functions: list[Function], tool_choice: object, *, is_parallel: bool
) -> ToolChoice:
    """Describe all tools to the model, so that the prompt stays in the prefix cache; some may be called."""
    try:
        asked = msgspec.convert(tool_choice, _Allowed).allowed_tools
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        raise invalid(f"tool_choice{path.rstrip('`')}: {message}", param="tool_choice") from None
    allowed = frozenset(each.function.name for each in asked.tools)
    if unknown := sorted(allowed - {function.name for function in functions}):
        raise invalid(f"tool_choice: {unknown[0][:64]!r} is not among the tools", param="tool_choice")
    return ToolChoice(
        tools=[*tools], functions=functions, mode=asked.mode, allowed=allowed, is_parallel=is_parallel
    )


def _named(tool_choice: object) -> str:
    if isinstance(tool_choice, Mapping) and tool_choice.get("type") == "custom":
        raise unsupported("a tool_choice of type custom", param="tool_choice")
    try:
        return msgspec.convert(tool_choice, _Named).function.name
    except msgspec.ValidationError:
        forms = 'none, auto, required or {"type": "function", "function": {"name": ...}}'
        message = f"tool_choice: expected {forms}"
        raise invalid(message, param="tool_choice") from None


def _read(tool: Tool, name: str) -> Function:
    data = msgspec.json.encode(tool)
    if len(data) > MAX_TOOL_BYTES:
        raise invalid(f"{name}: at most {MAX_TOOL_BYTES} bytes, got {len(data)}", param=name)
    try:
        check_depth(data, name, MAX_TOOL_DEPTH)
        return msgspec.convert(tool, _Tool).function
    except InvalidRequest as error:
        raise invalid(str(error), param=name) from None
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        raise invalid(f"{name}{path.rstrip('`')}: {message}", param=name) from None
