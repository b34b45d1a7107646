"""Token ids to text, one at a time, without ever showing half a character.

Decoding is not additive: a character may span tokens, and a token's text may depend on the one before (a
leading space). So a short window of ids is decoded again at each push:

    ids        ....|-- settled, kept as context --|---- pending ----|
    window          [0, num_settled)               [num_settled, end)
    text            [0, num_sent) has been given out; the rest has not

When the window's text ends in whole characters everything is given out, the settled ids are dropped and the
pending ones become the next context. Otherwise what may still change is held back.
"""

import codecs
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, Protocol

from baton.errors import InvalidRequest
from baton.request import FinishReason, SamplingParams

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


# Token ids to text for byte-level vocabularies (GPT-2's alphabet: Llama 3, Qwen, Mistral's newer ones).
#
# There a token is bytes, whatever stands around it, so a stream needs no window of tokens decoded again and
# again: bytes go through a UTF-8 decoder that waits for the rest of a character.
_PRINTABLE: Final = (range(0x21, 0x7F), range(0xA1, 0xAD), range(0xAE, 0x100))


def _byte_of_character() -> dict[str, int]:
    """The alphabet: a printable byte is its own character, the others are U+0100 and on, in order."""
    printable = {byte for span in _PRINTABLE for byte in span}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF_CHARACTER: Final = _byte_of_character()


def token_bytes(token: str) -> bytes:
    """What a token stands for; one that is not in the alphabet (an added token) is its own text."""
    try:
        return bytes(BYTE_OF_CHARACTER[character] for character in token)
    except KeyError:
        return token.encode("utf-8", "replace")


class BytesOfTokens(dict[int, bytes]):
    """By id, filled as ids are asked for; b"" for those without a token, and for the `hidden` ones."""

    def __init__(self, token_of_id: Callable[[int], str | None], hidden: Collection[int] = ()) -> None:
        self._token_of_id = token_of_id
        self._hidden = hidden

    def __missing__(self, token_id: int) -> bytes:
        token = None if token_id in self._hidden else self._token_of_id(token_id)
        self[token_id] = found = b"" if token is None else token_bytes(token)
        return found


class ByteLevelDetokenizer:
    """The text of one stream: `push` every token id, then `finish`; the parts join to the whole text."""

    def __init__(self, bytes_of_tokens: Mapping[int, bytes]) -> None:
        self._bytes_of_tokens = bytes_of_tokens
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token_id: int) -> str:
        return self._decode(self._bytes_of_tokens[token_id])

    def finish(self) -> str:
        """What was held back: a character that never became whole shows as U+FFFD."""
        return self._decode(b"", True)


# From the tokens of one choice to the text that its reader sees.


# Ends a stream of text at the first stop string, of which nothing is ever shown.
#
# text    |-- given out --|-- held: the longest ending that some stop string starts with --|
#
# What is held is given out once the text goes on otherwise. How the text is cut into parts changes nothing.
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


# The text of one choice, token by token, and why it ended.
class ChoiceText:
    """`accept` every token until `finish_reason` is set: by the engine's word, or by a stop string."""

    def __init__(self, detokenizer: Incremental, stops: Sequence[str], sampling: SamplingParams) -> None:
        """Raises InvalidRequest on stop strings that cannot be found."""
        self._stream: TextStream | None = None
        self._text: Incremental = detokenizer
        if stops:
            self._text = self._stream = TextStream(detokenizer, stops, min_tokens=sampling.min_tokens)
        self._stop_token_ids = sampling.stop_token_ids
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None  # the stop string, or the one of `stop_token_ids`

    def accept(self, token_id: int | None, reason: FinishReason | None) -> str:
        """The text that has become certain. None: the end came without a token."""
        text = ""
        if token_id is not None and reason is not FinishReason.STOP:  # what stops is not shown
            text = self._text.push(token_id)
        if reason is not None:
            text += self._text.finish()
            self.finish_reason = reason
        if self._stream is not None and self._stream.stopped_at is not None:
            self.finish_reason = FinishReason.STOP
            self.stop_reason = self._stream.stopped_at
        elif reason is FinishReason.STOP and token_id in self._stop_token_ids:
            self.stop_reason = token_id
        return text
