"""The tools that a chat may call, as clients name them: checked, and given to the chat template as is."""

from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from baton.gateway.api_errors import invalid, unsupported

MAX_TOOLS: Final = 128
MAX_TOOL_BYTES: Final = 64 * 2**10
MAX_DEPTH: Final = 32

Tool: TypeAlias = dict[str, Any]


class Function(msgspec.Struct, frozen=True):
    name: Annotated[str, Meta(pattern=r"\A[a-zA-Z0-9_.-]{1,64}\Z")]
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None  # what a model writes is not held to a schema


class _Tool(msgspec.Struct, frozen=True):
    type: Literal["function"]
    function: Function


def usable_tools(tools: list[Tool] | None, tool_choice: object) -> list[Tool] | None:
    """Those that the model is told of; None for none. Raises ApiError that names what is wrong."""
    if not tools:
        if tool_choice not in (None, "none", "auto"):
            raise invalid("tool_choice: there are no tools to choose from", param="tool_choice")
        return None
    if len(tools) > MAX_TOOLS:
        raise invalid(f"tools: at most {MAX_TOOLS}, got {len(tools)}", param="tools")
    for index, tool in enumerate(tools):
        _check(tool, f"tools[{index}]")
    if tool_choice == "none":
        return None
    if tool_choice not in (None, "auto"):  # "required", or one by its name
        raise unsupported("a tool_choice other than auto and none", param="tool_choice")
    return tools


def _check(tool: Tool, name: str) -> None:
    if _depth_is_over(tool, MAX_DEPTH):
        raise invalid(f"{name}: nested more than {MAX_DEPTH} deep", param=name)
    num_bytes = len(msgspec.json.encode(tool))
    if num_bytes > MAX_TOOL_BYTES:
        raise invalid(f"{name}: at most {MAX_TOOL_BYTES} bytes, got {num_bytes}", param=name)
    try:
        msgspec.convert(tool, _Tool)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        raise invalid(f"{name}{path.rstrip('`')}: {message}", param=name) from None


def _depth_is_over(value: object, limit: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    items = value.values() if isinstance(value, dict) else value
    return limit == 0 or any(_depth_is_over(item, limit - 1) for item in items)
