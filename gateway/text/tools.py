"""Calls of tools, and the forms in which models write them, which their chat templates tell.

- hermes: <tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>, as Hermes and Qwen
- llama: {"name": "weather", "parameters": {"city": "Paris"}}, as Llama 3
"""

import re
import secrets
from collections.abc import Callable
from typing import Annotated, Any, Final, Literal, Protocol, TypeAlias

import msgspec
from msgspec import Meta

from baton.gateway.api.errors import invalid, unsupported
from baton.gateway.text.detokenizer import overlap

ToolForm: TypeAlias = Literal["hermes", "llama"]
OPENING: Final = "<tool_call>"
LLAMAS_WORDS: Final = '"parameters": dictionary of argument name'


class ToolCall(msgspec.Struct, frozen=True):
    index: int  # in its choice
    id: str
    name: str
    arguments: str  # JSON


class ToolCallReader(Protocol):
    """Of one choice: `push` its text, then `finish`. Both return text to be shown, and add to `found`."""

    @property
    def found(self) -> list[ToolCall]: ...
    def push(self, text: str) -> str: ...
    def finish(self) -> str: ...


class _Written(msgspec.Struct, frozen=True):
    name: str
    arguments: dict[str, object] | None = None
    parameters: dict[str, object] | None = None  # Llama's word for it


class FoundCalls:
    """The calls of one choice."""

    def __init__(
        self, *, is_parallel: bool = True, new_id: Callable[[], str] = lambda: f"call_{secrets.token_hex(12)}"
    ) -> None:
        """Unless `is_parallel`, calls after the first come to nothing."""
        self.calls: list[ToolCall] = []
        self._is_parallel = is_parallel
        self._new_id = new_id

    def add(self, written: list[str]) -> bool:
        """Whether each of them is the JSON of a call; nothing is added otherwise."""
        try:
            read = [msgspec.json.decode(each, type=_Written) for each in written]
            arguments = [msgspec.json.encode(each.arguments or each.parameters or {}) for each in read]
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return False
        for call, given in zip(read, arguments, strict=True):
            if self._is_parallel or not self.calls:
                self.calls.append(ToolCall(len(self.calls), self._new_id(), call.name, given.decode()))
        return True


def form_of(template: str) -> ToolForm | None:
    """That a chat template has its model call tools in; None: it tells of no tools, or in another form."""
    if "tools" not in template:
        return None
    # With tags of functions as well, arguments are in tags of their own, not in JSON.
    if OPENING in template and "<function=" not in template:
        return "hermes"
    return "llama" if LLAMAS_WORDS in template else None


MAX_TOOLS: Final = 128
MAX_TOOL_BYTES: Final = 64 * 2**10
MAX_DEPTH: Final = 32
Tool: TypeAlias = dict[str, Any]


class Function(msgspec.Struct, frozen=True):
    """The tools that a chat may call, as clients name them: checked, and given to the chat template as is."""

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


# Calls of tools in what a model of Hermes' and Qwen's form writes:
#
# <tool_call>
# {"name": "weather", "arguments": {"city": "Paris"}}
# </tool_call>
#
# 1. Text outside is given out as it comes, but for what may become a tag, and for white space before one.
# 2. Inside, everything is held until the closing tag, and is then one call. A closing tag within a string of
# the JSON is none: more is waited for, MAX_TRIES times.
# 3. What is no call after all, or has no end that can be read, is given out as the text that it is.
#
# How the text is cut into parts changes nothing.

CLOSING: Final = "</tool_call>"
MAX_TRIES: Final = 16  # closing tags that are looked at for one call: each reads all of it
UNENDED: Final = "Input data was truncated"  # as msgspec says of JSON that goes on


class HermesCalls:
    """See ToolCallReader."""

    def __init__(self, calls: FoundCalls) -> None:
        self._calls = calls
        self._held = ""
        self._is_inside = False  # `_held` is what follows the opening tag
        self._opening = ""  # that tag, with the white space before it
        self._num_tried = 0  # characters of `_held` up to the last closing tag that was none
        self._num_tries = 0

    @property
    def found(self) -> list[ToolCall]:
        return self._calls.calls

    def push(self, text: str) -> str:
        self._held += text
        shown = ""
        while True:
            more = self._inside() if self._is_inside else self._outside()
            if more is None:
                return shown
            shown += more

    def finish(self) -> str:
        """The text has ended."""
        held, self._held = self._held, ""
        if not self._is_inside:
            return held
        self._is_inside = False
        return "" if self._calls.add([held]) else self._opening + held

    def _outside(self) -> str | None:
        """What may be shown; None: no more of it for now."""
        before, tag, after = self._held.partition(OPENING)
        if tag:
            self._held, self._is_inside = after, True
            self._num_tried = self._num_tries = 0
            shown = before.rstrip()
            self._opening = before[len(shown) :] + OPENING
            return shown
        certain = before[: len(before) - overlap(before, OPENING)].rstrip()
        self._held = before[len(certain) :]
        return certain or None

    def _inside(self) -> str | None:
        end = self._held.find(CLOSING, self._num_tried)
        if end < 0:
            self._num_tried = max(self._num_tried, len(self._held) - len(CLOSING) + 1)
            return None
        written, after = self._held[:end], end + len(CLOSING)
        self._num_tries += 1
        is_call = self._calls.add([written])
        if not is_call and self._num_tries < MAX_TRIES and _goes_on(written):
            self._num_tried = after
            return ""
        self._held, self._is_inside = self._held[after:], False
        return "" if is_call else f"{self._opening}{written}{CLOSING}"


def _goes_on(written: str) -> bool:
    """Whether it may be the beginning of JSON."""
    try:
        msgspec.json.decode(written, type=msgspec.Raw)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        return str(error).startswith(UNENDED)
    return False


# Calls of tools in what a model of Llama 3's form writes:
#
# {"name": "weather", "parameters": {"city": "Paris"}}
#
# An answer is calls from its first character on, or text: what begins as JSON does is held until the end.
# Several calls are apart by semicolons. What is no call after all is given out as the text that it is.

TAG: Final = "<|python_tag|>"  # may stand before calls
BETWEEN: Final = re.compile(r"\}\s*;\s*\{")


class LlamaCalls:
    """See ToolCallReader."""

    def __init__(self, calls: FoundCalls) -> None:
        self._calls = calls
        self._held = ""
        self._is_text = False  # for the rest of it

    @property
    def found(self) -> list[ToolCall]:
        return self._calls.calls

    def push(self, text: str) -> str:
        if self._is_text:
            return text
        self._held += text
        begun = self._held.lstrip()
        if begun.startswith("{") or begun.startswith(TAG) or TAG.startswith(begun):
            return ""
        self._is_text = True
        return self.finish()

    def finish(self) -> str:
        """The text has ended."""
        held, self._held = self._held, ""
        written = held.strip().removeprefix(TAG)
        if self._is_text or not written:
            return held
        return "" if self._calls.add(_apart(written)) else held


def _apart(written: str) -> list[str]:
    """Semicolons within strings are taken for such between calls only where braces stand around them: then
    nothing of it is JSON, and it is text.
    """
    return BETWEEN.sub("}\0{", written).split("\0")


def reader_of(form: ToolForm, *, is_parallel: bool, new_id: Callable[[], str]) -> ToolCallReader:
    """Which reader finds the calls of tools in a choice."""
    calls = FoundCalls(is_parallel=is_parallel, new_id=new_id)
    return HermesCalls(calls) if form == "hermes" else LlamaCalls(calls)
