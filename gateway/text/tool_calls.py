"""The calls of tools in a model's text. The model's chat template tells their form.

- hermes: <tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>, as Hermes and Qwen
- llama: {"name": "weather", "parameters": {"city": "Paris"}}, as Llama 3
"""

import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final, Literal, TypeAlias

import msgspec

from baton.gateway.text.tokenizer import overlap

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
