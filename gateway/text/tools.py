"""Tools that clients offer, and the calls of tools in a model's text. The chat template tells their form.

- hermes: <tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>, as Hermes and Qwen
- llama: {"name": "weather", "parameters": {"city": "Paris"}}, as Llama 3
"""

import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from baton.gateway.api.errors import invalid, unsupported
from baton.gateway.text.detokenizer import overlap

ToolForm: TypeAlias = Literal["hermes", "llama"]
OPENING: Final = "<tool_call>"
LLAMAS_WORDS: Final = '"parameters": dictionary of argument name'


class ToolCall(msgspec.Struct, frozen=True):
    """One call that the model has written."""

    index: int  # in its choice
    id: str
    name: str
    arguments: str  # JSON


class _Written(msgspec.Struct, frozen=True):
    name: str
    arguments: dict[str, object] | None = None
    parameters: dict[str, object] | None = None  # Llama's word for it


class ToolCallReader(ABC):
    """Finds the tool calls in the text of one choice: `push` the text, then `finish`.

    Both return the text to be shown. Text that is no call after all is shown. Cutting the text into other
    parts changes nothing.
    """

    def __init__(
        self, *, is_parallel: bool = True, new_id: Callable[[], str] = lambda: f"call_{secrets.token_hex(12)}"
    ) -> None:
        """is_parallel: False drops the calls after the first."""
        self.found: list[ToolCall] = []
        self._is_parallel = is_parallel
        self._new_id = new_id
        self._held = ""

    @abstractmethod
    def push(self, text: str) -> str:
        """Return the text that is certain to belong to no call."""

    @abstractmethod
    def finish(self) -> str:
        """Return the rest of the text: it has ended."""

    def _add(self, written: list[str]) -> bool:
        """Add calls to `found` if each text is the JSON of one; else return False and add none."""
        try:
            read = [msgspec.json.decode(each, type=_Written) for each in written]
            arguments = [msgspec.json.encode(each.arguments or each.parameters or {}) for each in read]
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return False
        for call, given in zip(read, arguments, strict=True):
            if self._is_parallel or not self.found:
                self.found.append(ToolCall(len(self.found), self._new_id(), call.name, given.decode()))
        return True


def form_of(template: str) -> ToolForm | None:
    """Return the form of tool calls in a chat template; None when Baton does not read it."""
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
    """A tool as clients offer it. It is checked and given to the chat template unchanged."""

    name: Annotated[str, Meta(pattern=r"\A[a-zA-Z0-9_.-]{1,64}\Z")]
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None  # no schema constrains the model's text


class _Tool(msgspec.Struct, frozen=True):
    type: Literal["function"]
    function: Function


def usable_tools(tools: list[Tool] | None, tool_choice: object) -> list[Tool] | None:
    """Return the tools for the model, or None. Raises ApiError that names the wrong field."""
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


CLOSING: Final = "</tool_call>"
MAX_TRIES: Final = 16  # closing tags that are tried for one call: each try reads the whole call
UNENDED: Final = "Input data was truncated"  # the wording of msgspec


class HermesCalls(ToolCallReader):
    """Reads calls between tags.

    1. Text outside is shown as it comes, except for white space and for text that may become a tag.
    2. Text inside is held until the closing tag, and is then one call. A closing tag within a string of the
       JSON ends nothing: MAX_TRIES more tags are awaited.
    """

    _is_inside = False  # `_held` follows the opening tag
    _opening = ""  # that tag, with the white space before it
    _num_tried = 0  # characters of `_held` up to the last closing tag that ended nothing
    _num_tries = 0

    def push(self, text: str) -> str:
        """See ToolCallReader."""
        self._held += text
        shown = ""
        while True:
            more = self._inside() if self._is_inside else self._outside()
            if more is None:
                return shown
            shown += more

    def finish(self) -> str:
        """See ToolCallReader."""
        held, self._held = self._held, ""
        if not self._is_inside:
            return held
        self._is_inside = False
        return "" if self._add([held]) else self._opening + held

    def _outside(self) -> str | None:
        """Return text to be shown; None when more text is needed."""
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
        is_call = self._add([written])
        if not is_call and self._num_tries < MAX_TRIES and _goes_on(written):
            self._num_tried = after
            return ""
        self._held, self._is_inside = self._held[after:], False
        return "" if is_call else f"{self._opening}{written}{CLOSING}"


def _goes_on(written: str) -> bool:
    """The text may be the beginning of JSON."""
    try:
        msgspec.json.decode(written, type=msgspec.Raw)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        return str(error).startswith(UNENDED)
    return False


TAG: Final = "<|python_tag|>"  # may precede calls
BETWEEN: Final = re.compile(r"\}\s*;\s*\{")


class LlamaCalls(ToolCallReader):
    """Reads an answer that is calls from its first character on, or text.

    An answer that begins as JSON is held until its end. Semicolons separate calls. A semicolon between braces
    within a string is taken for a separator as well: then nothing is JSON, and all of it is text.
    """

    _is_text = False  # the rest of the answer

    def push(self, text: str) -> str:
        """See ToolCallReader."""
        if self._is_text:
            return text
        self._held += text
        begun = self._held.lstrip()
        if begun.startswith("{") or begun.startswith(TAG) or TAG.startswith(begun):
            return ""
        self._is_text = True
        return self.finish()

    def finish(self) -> str:
        """See ToolCallReader."""
        held, self._held = self._held, ""
        written = held.strip().removeprefix(TAG)
        if self._is_text or not written:
            return held
        return "" if self._add(BETWEEN.sub("}\0{", written).split("\0")) else held


def reader_of(form: ToolForm, *, is_parallel: bool, new_id: Callable[[], str]) -> ToolCallReader:
    """Return the reader of a choice's tool calls. is_parallel: False drops the calls after the first."""
    return (HermesCalls if form == "hermes" else LlamaCalls)(is_parallel=is_parallel, new_id=new_id)
