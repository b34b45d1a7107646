"""Token ids to text, one at a time, without ever showing half a character.

Decoding is not additive: a character may span tokens, and a token's text may depend on the one before (a
leading space). So a short window of ids is decoded again at each push:

    ids        ....|-- settled, kept as context --|---- pending ----|
    window          [0, num_settled)               [num_settled, end)
    text            [0, num_sent) has been given out; the rest has not

When the window's text ends in whole characters everything is given out, the settled ids are dropped and the
pending ones become the next context. Otherwise what may still change is held back.
"""

from collections.abc import Callable, Sequence
from typing import Final

Decode = Callable[[Sequence[int]], str]

INCOMPLETE: Final = "\ufffd"  # what decoders write for bytes that are not, or not yet, a character
MAX_PENDING: Final = 64  # tokens; bounds the work on a model that only writes broken bytes


class Detokenizer:
    """The text of one stream: `push` every token id, then `finish`; the parts join to the whole text."""

    def __init__(self, decode: Decode, context: Sequence[int] = ()) -> None:
        """`context`: the last tokens of the prompt, whose text is not repeated."""
        self._decode = decode
        self._window = list(context)
        self._num_settled = len(self._window)
        self._num_sent = len(self._decode(self._window))

    def push(self, token_id: int) -> str:
        """The text that became certain with this token; often "" in scripts with long characters."""
        self._window.append(token_id)
        text = self._decode(self._window)
        is_whole = not text.endswith(INCOMPLETE)
        if is_whole or len(self._window) - self._num_settled >= MAX_PENDING:
            return self._settle(text)
        # All of the trailing run may change: a byte decoder shows a whole run as broken while one byte lacks.
        num_certain = max(self._num_sent, len(text.rstrip(INCOMPLETE)))
        part = text[self._num_sent : num_certain]
        self._num_sent = num_certain
        return part

    def finish(self) -> str:
        """What was held back: a character that never became whole shows as U+FFFD."""
        return self._settle(self._decode(self._window))

    def _settle(self, text: str) -> str:
        part = text[self._num_sent :]
        self._window = self._window[self._num_settled :]
        self._num_settled = len(self._window)
        self._num_sent = len(self._decode(self._window))
        return part
