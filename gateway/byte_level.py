"""Token ids to text for byte-level vocabularies (GPT-2's alphabet: Llama 3, Qwen, Mistral's newer ones).

There a token is bytes, whatever stands around it, so a stream needs no window of tokens decoded again and
again: bytes go through a UTF-8 decoder that waits for the rest of a character.
"""

import codecs
from collections.abc import Callable, Collection, Mapping
from typing import Final

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
