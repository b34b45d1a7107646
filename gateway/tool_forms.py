"""Calls of tools, and the forms in which models write them, which their chat templates tell.

- hermes: <tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>, as Hermes and Qwen
- llama: {"name": "weather", "parameters": {"city": "Paris"}}, as Llama 3
"""

import secrets
from collections.abc import Callable
from typing import Final, Literal, Protocol, TypeAlias

import msgspec

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
