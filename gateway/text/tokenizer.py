"""Text to token ids and back, from `tokenizer.json` of a model directory."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import tokenizers

from baton.errors import InvalidRequest, ModelError
from baton.gateway.text.detokenizer import (
    ByteLevelDetokenizer,
    BytesOfTokens,
    Detokenizer,
    WindowDetokenizer,
)
from baton.gateway.text.model_files import TokenizerConfig, read_text, read_tokenizer_config

TOKENIZER_FILE: Final = "tokenizer.json"
NUM_CONTEXT_TOKENS: Final = 8  # of the prompt; the space before the first word may depend on them


class Tokenizer:
    """The tokenizer of a model. Threads may share it; a long prompt must not be encoded on the event loop."""

    def __init__(self, inner: tokenizers.Tokenizer, config: TokenizerConfig) -> None:
        # A file may ask for truncation or padding as it was used in training; serving must do neither.
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        self._special_tokens = config.special_tokens()
        self._bytes_of_tokens = _bytes_of_tokens(inner)

    @classmethod
    def from_directory(cls, directory: Path) -> "Tokenizer":
        """Read `tokenizer.json`. Raises ModelError when the file is absent or damaged."""
        tokenizer = cls.find(directory)
        if tokenizer is None:
            path = directory / TOKENIZER_FILE
            raise ModelError(f"{path}: there is no such file; other tokenizer formats are not supported")
        return tokenizer

    @classmethod
    def find(cls, directory: Path) -> "Tokenizer | None":
        """Read `tokenizer.json`; None when the file is absent. Raises ModelError when it is damaged."""
        path = directory / TOKENIZER_FILE
        text = read_text(path)
        if text is None:
            return None
        try:
            inner = tokenizers.Tokenizer.from_str(text)
        except BaseException as error:
            if not _is_from_library(error):
                raise
            raise ModelError(f"{path}: is not a tokenizer: {error}") from error
        return cls(inner, read_tokenizer_config(directory))

    @property
    def vocab_size(self) -> int:
        """The bound of the ids; the model's own vocabulary may be padded beyond it."""
        return self._inner.get_vocab_size(with_added_tokens=True)

    @property
    def special_tokens(self) -> dict[str, str]:
        """The special tokens by the names in `tokenizer_config.json`: `{"eos_token": "</s>", ...}`."""
        return dict(self._special_tokens)

    @property
    def eos_token_id(self) -> int | None:
        """The id of the end token; None when the files name none."""
        token = self._special_tokens.get("eos_token")
        return None if token is None else self._inner.token_to_id(token)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text.

        add_special_tokens: False for text from a chat template, which writes them itself. Raises
        InvalidRequest on half a surrogate pair, which is no Unicode, and ModelError when the parts of
        `tokenizer.json` do not fit each other.
        """
        try:
            return self._inner.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError:  # how the library refuses a surrogate
            raise InvalidRequest("the text is not valid Unicode") from None
        except BaseException as error:
            if not _is_from_library(error):
                raise
            raise ModelError(f"the tokenizer is damaged, it fails to encode: {error}") from error

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; an id of a padded vocabulary has no text."""
        try:
            return self._inner.decode(token_ids, skip_special_tokens=skip_special_tokens)
        except BaseException as error:
            if not _is_from_library(error):
                raise
            raise ModelError(f"the tokenizer is damaged, it fails to decode: {error}") from error

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token alone; a byte-level token may be a part of a character."""
        if self._bytes_of_tokens is not None:
            return self._bytes_of_tokens[False][token_id]
        return self.decode([token_id], skip_special_tokens=False).encode("utf-8", "replace")

    def detokenizer(self, context: Sequence[int] = (), *, skip_special_tokens: bool = True) -> Detokenizer:
        """Return the detokenizer of one stream. context: the last few tokens of its prompt."""
        if self._bytes_of_tokens is not None:
            return ByteLevelDetokenizer(self._bytes_of_tokens[skip_special_tokens])
        return WindowDetokenizer(
            lambda token_ids: self.decode(token_ids, skip_special_tokens=skip_special_tokens), context
        )


def detokenizer_of(
    tokenizer: Tokenizer | None, prompt: Sequence[int], *, skip_special_tokens: bool = True
) -> Detokenizer:
    """Return the detokenizer of one answer to the prompt; without a tokenizer all text is ""."""
    if tokenizer is None:
        return WindowDetokenizer(lambda _: "")
    return tokenizer.detokenizer(prompt[-NUM_CONTEXT_TOKENS:], skip_special_tokens=skip_special_tokens)


def _bytes_of_tokens(inner: tokenizers.Tokenizer) -> dict[bool, BytesOfTokens] | None:
    """Return the bytes of each token, by whether special tokens are skipped; None unless byte-level."""
    if not isinstance(inner.decoder, tokenizers.decoders.ByteLevel):
        return None
    special = {token_id for token_id, token in inner.get_added_tokens_decoder().items() if token.special}
    return {True: BytesOfTokens(inner.id_to_token, special), False: BytesOfTokens(inner.id_to_token)}


def _is_from_library(error: BaseException) -> bool:
    """Tell errors of tokenizers: bare Exception for bad input, and an unnamed BaseException for a panic."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"
