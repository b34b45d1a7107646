"""Ends a stream of text at the first stop string, of which nothing is ever shown.

    text    |-- given out --|-- held: the longest ending that some stop string starts with --|

What is held is given out once the text goes on otherwise. How the text is cut into parts changes nothing.
"""

from collections.abc import Sequence

from baton.errors import InvalidRequest


class StopStrings:
    """The text of one stream: `push` its parts until `matched` is set, or `finish` when they end first."""

    def __init__(self, stops: Sequence[str] = ()) -> None:
        """Raises InvalidRequest on an empty stop string, which would match before any text."""
        if not all(stops):
            raise InvalidRequest("stop: a stop string must not be empty")
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that is certain not to belong to a stop string; nothing after a match."""
        if self.matched is not None:
            return ""
        text = self._held + text
        match = self._first_match(text)
        if match is not None:
            start, self.matched = match
            self._held = ""
            return text[:start]
        num_certain = len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[num_certain:]
        return text[:num_certain]

    def finish(self) -> str:
        """What was held: the text ended before a stop string was whole."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        """Where the first stop string that becomes whole starts, and which; the longest of several."""
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        return min(found)[1:] if found else None


def _overlap(text: str, stop: str) -> int:
    """Length of the longest ending of `text` that `stop` starts with; `stop` is not in `text`."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
