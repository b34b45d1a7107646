"""Calls of tools in what a model of Hermes' and Qwen's form writes:

    <tool_call>
    {"name": "weather", "arguments": {"city": "Paris"}}
    </tool_call>

1. Text outside is given out as it comes, but for what may become a tag, and for white space before one.
2. Inside, everything is held until the closing tag, and is then one call. A closing tag within a string of
   the JSON is none: more is waited for, MAX_TRIES times.
3. What is no call after all, or has no end that can be read, is given out as the text that it is.

How the text is cut into parts changes nothing.
"""

from typing import Final

import msgspec

from baton.gateway.tool_forms import OPENING, FoundCalls, ToolCall

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
        certain = before[: len(before) - _overlap(before, OPENING)].rstrip()
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


def _overlap(text: str, tag: str) -> int:
    """Length of the longest ending of `text` that `tag` starts with."""
    longest = min(len(text), len(tag) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(tag[:size])), 0)
