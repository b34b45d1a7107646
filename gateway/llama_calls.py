"""Calls of tools in what a model of Llama 3's form writes:

    {"name": "weather", "parameters": {"city": "Paris"}}

An answer is calls from its first character on, or text: what begins as JSON does is held until the end.
Several calls are apart by semicolons. What is no call after all is given out as the text that it is.
"""

import re
from typing import Final

from baton.gateway.tool_forms import FoundCalls, ToolCall

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
