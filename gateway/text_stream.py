"""From the tokens of one choice to the text that its reader sees."""

from collections.abc import Sequence
from typing import Protocol

from baton.gateway.stop_strings import StopStrings


class Incremental(Protocol):
    """A detokenizer: the parts that it gives out join to the whole text."""

    def push(self, token_id: int) -> str: ...
    def finish(self) -> str: ...


class TextStream:
    """Whole characters only, cut before the first stop string. `push` every token, then `finish`."""

    def __init__(self, detokenizer: Incremental, stops: Sequence[str] = (), *, min_tokens: int = 0) -> None:
        """Text of the first `min_tokens` tokens is shown as it is: no stop string is looked for in it."""
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops)
        self._num_exempt_tokens = min_tokens

    @property
    def stopped_at(self) -> str | None:
        """The stop string that ended the text; the tokens that would follow have none."""
        return self._stops.matched

    def push(self, token_id: int) -> str:
        text = self._detokenizer.push(token_id)
        if self._num_exempt_tokens > 0:
            self._num_exempt_tokens -= 1
            return text
        return self._stops.push(text)

    def finish(self) -> str:
        """What was held back; it may complete a stop string, so `stopped_at` is final only after this."""
        return self._stops.push(self._detokenizer.finish()) + self._stops.finish()
