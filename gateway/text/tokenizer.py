"""Text to token ids and back, from the tokenizer of a model directory.

`Tokenizer` encodes whole texts and decodes whole answers. A `Detokenizer` decodes one stream token by token,
without half a character. `ChoiceText` cuts that text before the first stop string.

Decoding is not additive: a character may span tokens, and a token's text may depend on the token before (a
leading space). So `WindowDetokenizer` decodes a short window of ids again at each push:

    ids        ....|-- settled, kept as context --|---- pending ----|
    window          [0, num_settled)               [num_settled, end)
    text            [0, num_sent) has been given out; the rest has not

When the window's text ends in whole characters, all of the text is given out, the settled ids are dropped and
the pending ids become the next context. Otherwise the text that may still change is held back.

In a byte-level vocabulary (GPT-2's alphabet: Llama 3, Qwen, Mistral's newer models) a token is the same bytes
everywhere. There `ByteLevelDetokenizer` sends the bytes through a UTF-8 decoder, which waits for the rest of
a character. docs/decisions/0020 says why this is not `DecodeStream` of the tokenizers library.
"""

import codecs
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Protocol

import tokenizers

from baton.errors import InvalidRequest, ModelError
from baton.gateway.text.answer_reader import overlap
from baton.request import FinishReason, SamplingParams
from baton.tokenizer_file import TOKENIZER_FILE, TokenizerConfig, read_tokenizer, read_tokenizer_config

Decode = Callable[[Sequence[int]], str]
INCOMPLETE: Final = "\ufffd"  # decoders write this for bytes that are not, or not yet, a character
MAX_PENDING: Final = 64  # tokens; bounds the work on a model that only writes broken bytes
# In transformers 4, tokenizers of these classes follow `add_bos_token`.
LLAMA_CLASSES: Final = frozenset(
    {"LlamaTokenizer", "LlamaTokenizerFast", "GemmaTokenizer", "GemmaTokenizerFast"}
)
NUM_CONTEXT_TOKENS: Final = 8  # of the prompt; the space before the first word may depend on them


class Detokenizer(Protocol):
    """The text of one stream: `push` every token id, then `finish`; the parts join to the whole text."""

    def push(self, token_id: int) -> str:
        """Return the text that became certain with this token; often "" in scripts with long characters."""

    def finish(self) -> str:
        """Return the text that was held back; a character that never became whole shows as U+FFFD."""


class WindowDetokenizer:
    """A Detokenizer for any vocabulary: decodes a window of ids again at each push."""

    def __init__(self, decode: Decode, context: Sequence[int] = ()) -> None:
        """context: the last tokens of the prompt; their text is not repeated."""
        self._decode = decode
        self._window = list(context)
        self._num_settled = len(self._window)
        self._num_sent = len(self._decode(self._window))

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        is_whole = not text.endswith(INCOMPLETE)
        if is_whole or len(self._window) - self._num_settled >= MAX_PENDING:
            return self._settle(text)
        # All of the trailing run may change: a byte decoder shows it as broken until its last byte.
        num_certain = max(self._num_sent, len(text.rstrip(INCOMPLETE)))
        part = text[self._num_sent : num_certain]
        self._num_sent = num_certain
        return part

    def finish(self) -> str:
        return self._settle(self._decode(self._window))

    def _settle(self, text: str) -> str:
        part = text[self._num_sent :]
        self._window = self._window[self._num_settled :]
        self._num_settled = len(self._window)
        self._num_sent = len(self._decode(self._window))
        return part


_PRINTABLE: Final = (range(0x21, 0x7F), range(0xA1, 0xAD), range(0xAE, 0x100))


def _byte_of_character() -> dict[str, int]:
    """Return GPT-2's alphabet: a printable byte is its own character, the others follow from U+0100 on."""
    printable = {byte for span in _PRINTABLE for byte in span}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF_CHARACTER: Final = _byte_of_character()


def token_bytes(token: str) -> bytes:
    """Return the bytes of a token; a token outside the alphabet (an added token) is its own text."""
    try:
        return bytes(BYTE_OF_CHARACTER[character] for character in token)
    except KeyError:
        return token.encode("utf-8", "replace")


class BytesOfTokens(dict[int, bytes]):
    """Token id -> bytes, filled on demand; b"" for an id without a token and for a hidden id."""

    def __init__(self, token_of_id: Callable[[int], str | None], hidden: Collection[int] = ()) -> None:
        self._token_of_id = token_of_id
        self._hidden = hidden

    def __missing__(self, token_id: int) -> bytes:
        token = None if token_id in self._hidden else self._token_of_id(token_id)
        self[token_id] = found = b"" if token is None else token_bytes(token)
        return found


class ByteLevelDetokenizer:
    """A Detokenizer for a byte-level vocabulary."""

    def __init__(self, bytes_of_tokens: Mapping[int, bytes]) -> None:
        self._bytes_of_tokens = bytes_of_tokens
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token_id: int) -> str:
        return self._decode(self._bytes_of_tokens[token_id])

    def finish(self) -> str:
        return self._decode(b"", True)


class Tokenizer:
    """The tokenizer of a model. Threads may share it; a long prompt must not be encoded on the event loop."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        # A file may ask for truncation or padding as it was used in training; serving must do neither.
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        self._bytes_of_tokens = _bytes_of_tokens(inner)

    @classmethod
    def from_directory(cls, directory: Path) -> "Tokenizer":
        """Return the result of `find`. Raises ModelError also when there is no tokenizer."""
        tokenizer = cls.find(directory)
        if tokenizer is None:
            path = directory / TOKENIZER_FILE
            raise ModelError(f"{path}: there is no such file; other tokenizer formats are not supported")
        return tokenizer

    @classmethod
    def find(cls, directory: Path) -> "Tokenizer | None":
        """Read the tokenizer; None when there is none. Raises ModelError when it is damaged."""
        text = read_tokenizer(directory)
        if text is None:
            return None
        config = read_tokenizer_config(directory)
        with _library_faults(f"{directory / TOKENIZER_FILE}: is not a tokenizer"):
            inner = tokenizers.Tokenizer.from_str(text)
            _add_bos(inner, config)
        return cls(inner)

    @property
    def vocab_size(self) -> int:
        """The bound of the ids; the model's own vocabulary may be padded beyond it."""
        return self._inner.get_vocab_size(with_added_tokens=True)

    @property
    def added_tokens(self) -> dict[str, int]:
        """Text -> id of the tokens that were added to the vocabulary, such as tags of a chat template."""
        return {token.content: number for number, token in self._inner.get_added_tokens_decoder().items()}

    @property
    def special_tokens(self) -> frozenset[str]:
        """The added tokens that text leaves out, unless they are asked for."""
        return frozenset(
            token.content for token in self._inner.get_added_tokens_decoder().values() if token.special
        )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text.

        add_special_tokens: False for text from a chat template, which writes them itself. Raises
        InvalidRequest on half a surrogate pair, which is no Unicode, and ModelError when the parts of
        `tokenizer.json` do not fit each other.
        """
        with _library_faults("the tokenizer is damaged, it fails to encode"):
            try:
                # Without offsets, which `encode` computes: a third faster.
                (encoding,) = self._inner.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            except TypeError:  # the library refuses a surrogate with a TypeError
                raise InvalidRequest("the text is not valid Unicode") from None
            return encoding.ids

    def encode_bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return the token ids of each word as it begins a text and as it follows a space, as vLLM does."""
        found: list[tuple[int, ...]] = []
        for word in words:
            bare, spaced = (
                tuple(self.encode(prefix + word.lstrip(), add_special_tokens=False)) for prefix in ("", " ")
            )
            if not bare:
                continue
            found.append(bare)
            # Another tokenisation that adds a token for the space would ban the space.
            if len(spaced) == len(bare) and spaced[0] != bare[0]:
                found.append(spaced)
        return tuple(found)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; an id of a padded vocabulary has no text."""
        with _library_faults("the tokenizer is damaged, it fails to decode"):
            return self._inner.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token; a byte-level token may be a part of a character."""
        if self._bytes_of_tokens is not None:
            return self._bytes_of_tokens[False][token_id]
        return self.decode([token_id], skip_special_tokens=False).encode("utf-8", "replace")

    def token(self, token_id: int) -> str:
        """Return a token as the vocabulary spells it; "" for an id without a token."""
        return self._inner.id_to_token(token_id) or ""

    def detokenizer(self, context: Sequence[int] = (), *, skip_special_tokens: bool = True) -> Detokenizer:
        """Return the detokenizer of one stream. context: its prompt, or the last tokens of it."""
        if self._bytes_of_tokens is not None:
            return ByteLevelDetokenizer(self._bytes_of_tokens[skip_special_tokens])
        return WindowDetokenizer(
            lambda token_ids: self.decode(token_ids, skip_special_tokens=skip_special_tokens),
            context[-NUM_CONTEXT_TOKENS:],
        )


def detokenizer_of(
    tokenizer: Tokenizer | None, prompt: Sequence[int], *, skip_special_tokens: bool = True
) -> Detokenizer:
    """Return the detokenizer of one answer to the prompt; without a tokenizer all text is ""."""
    if tokenizer is None:
        return WindowDetokenizer(lambda _: "")
    return tokenizer.detokenizer(prompt, skip_special_tokens=skip_special_tokens)


def _add_bos(inner: tokenizers.Tokenizer, config: TokenizerConfig) -> None:
    """Have texts begin with the BOS token where the config asks for the token and the file adds none.

    The files of DeepSeek are such ones. transformers 4 makes the post-processor of these classes anew.
    """
    bos = config.special_tokens().get("bos_token")
    if bos is None or config.tokenizer_class not in LLAMA_CLASSES or not config.add_bos_token:
        return
    bos_id = inner.token_to_id(bos)
    if bos_id is not None and not inner.encode("").ids:
        inner.post_processor = tokenizers.processors.TemplateProcessing(
            single=[bos, "$A"], special_tokens=[(bos, bos_id)]
        )


def _bytes_of_tokens(inner: tokenizers.Tokenizer) -> dict[bool, BytesOfTokens] | None:
    """Return the bytes of each token, by whether special tokens are skipped; None unless byte-level."""
    if not isinstance(inner.decoder, tokenizers.decoders.ByteLevel):
        return None
    special = {token_id for token_id, token in inner.get_added_tokens_decoder().items() if token.special}
    return {True: BytesOfTokens(inner.id_to_token, special), False: BytesOfTokens(inner.id_to_token)}


@contextmanager
def _library_faults(message: str) -> Iterator[None]:
    """Turn an error of the tokenizers library into a ModelError.

    The library raises a bare Exception for bad input, and an unnamed BaseException for a panic.
    """
    try:
        yield
    except InvalidRequest:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ModelError(f"{message}: {error}") from error


class StopStrings:
    """Ends the text of one stream before the first stop string.

        text    |-- given out --|-- held: the longest ending that some stop string starts with --|

    `push` the parts until `matched` is set, or `finish` when the parts end first. Held text is given out once
    the text cannot continue a stop string. Cutting the text into other parts changes nothing.
    """

    def __init__(self, stops: Sequence[str] = (), *, includes_stop: bool = False) -> None:
        """stops: non-empty strings. includes_stop: the stop string is given out as well."""
        self._stops = tuple(stops)
        self._includes_stop = includes_stop
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Return the text that cannot belong to a stop string; "" after a match."""
        if self.matched is not None:
            return ""
        text = self._held + text
        ends = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if ends:  # the stop string that becomes whole first; of several, the longest
            end, start, self.matched = min(ends)
            self._held = ""
            return text[: end if self._includes_stop else start]
        num_certain = len(text) - max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[num_certain:]
        return text[:num_certain]

    def finish(self) -> str:
        """Return the held text: the stream ended before a stop string was whole."""
        held, self._held = self._held, ""
        return held


class ChoiceText:
    """The text of one choice, and why it ended: `accept` every token until `finish_reason` is set."""

    def __init__(self, detokenizer: Detokenizer, sampling: SamplingParams) -> None:
        """No stop string is looked for in the text of the first `sampling.min_tokens` tokens."""
        stops, includes_stop = sampling.stops, sampling.include_stop_str_in_output
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops, includes_stop=includes_stop) if stops else None
        self._includes_stop = includes_stop
        self._num_exempt_tokens = sampling.min_tokens
        self._stop_token_ids = sampling.stop_token_ids
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None  # the stop string, or the id of `stop_token_ids`

    def accept(self, token_id: int | None, reason: FinishReason | None) -> str:
        """Return the text that has become certain. None: the end came without a token."""
        text, stops = "", self._stops
        shows_token = reason is not FinishReason.STOP or self._includes_stop
        if token_id is not None and shows_token:
            text = self._detokenizer.push(token_id)
            if stops is not None:
                text = stops.push(text) if self._num_exempt_tokens <= 0 else text
                self._num_exempt_tokens -= 1
        if reason is not None:
            rest = self._detokenizer.finish()
            text += rest if stops is None else stops.push(rest) + stops.finish()
            self.finish_reason = reason
        if stops is not None and stops.matched is not None:
            self.finish_reason, self.stop_reason = FinishReason.STOP, stops.matched
        elif reason is FinishReason.STOP and token_id in self._stop_token_ids:
            self.stop_reason = token_id
        return text
