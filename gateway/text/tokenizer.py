"""Text to token ids and back, from `tokenizer.json` of a model directory."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import tokenizers

from baton.errors import InvalidRequest, ModelError
from baton.gateway.text.detokenizer import ByteLevelDetokenizer, BytesOfTokens, Detokenizer, Incremental

# What `tokenizer_config.json` adds to the tokenizer: its special tokens and the chat template.

TEMPLATE_FILE: Final = "chat_template.jinja"
MAX_FILE_BYTES: Final = 64 * 2**20


class _AddedToken(msgspec.Struct, frozen=True):
    content: str


class _NamedTemplate(msgspec.Struct, frozen=True):
    name: str
    template: str


class TokenizerConfig(msgspec.Struct, frozen=True):
    """Keys that Baton does not use are ignored: the file has dozens that only the training side reads."""

    bos_token: str | _AddedToken | None = None
    eos_token: str | _AddedToken | None = None
    unk_token: str | _AddedToken | None = None
    pad_token: str | _AddedToken | None = None
    chat_template: str | list[_NamedTemplate] | None = None

    def special_tokens(self) -> dict[str, str]:
        """`{"bos_token": "<s>", ...}`, those that the model has; templates use them by these names."""
        named = {
            "bos_token": self.bos_token,
            "eos_token": self.eos_token,
            "unk_token": self.unk_token,
            "pad_token": self.pad_token,
        }
        return {
            name: token.content if isinstance(token, _AddedToken) else token
            for name, token in named.items()
            if token is not None
        }


def read_tokenizer_config(directory: Path) -> TokenizerConfig:
    """An absent file says nothing; a damaged one raises ModelError."""
    text = read_text(directory / "tokenizer_config.json")
    if text is None:
        return TokenizerConfig()
    try:
        return msgspec.json.decode(text, type=TokenizerConfig)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{directory / 'tokenizer_config.json'}: {error}") from None


def read_chat_template(directory: Path, config: TokenizerConfig) -> str | None:
    """The source of the chat template: its own file first, as in `transformers`; None when there is none."""
    source = read_text(directory / TEMPLATE_FILE)
    if source is not None:
        return source
    if not isinstance(config.chat_template, list):
        return config.chat_template
    named = {entry.name: entry.template for entry in config.chat_template}
    return named.get("default")


def read_tool_template(directory: Path, config: TokenizerConfig) -> str | None:
    """That for chats with tools, where the model has one of its own for them."""
    if (directory / TEMPLATE_FILE).exists() or not isinstance(config.chat_template, list):
        return None
    return {entry.name: entry.template for entry in config.chat_template}.get("tool_use")


def read_text(path: Path) -> str | None:
    """The file's text, or None when it is absent."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ModelError(f"{path}: should be at most {MAX_FILE_BYTES} bytes, got {path.stat().st_size}")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error


TOKENIZER_FILE: Final = "tokenizer.json"
NUM_CONTEXT_TOKENS: Final = 8  # of the prompt: the first word's space may depend on them


class Tokenizer:
    """Safe to call from several threads; encoding a long prompt belongs off the event loop."""

    def __init__(self, inner: tokenizers.Tokenizer, config: TokenizerConfig) -> None:
        # A file may ask for truncation or padding as it was used in training; serving must do neither.
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        self._special_tokens = config.special_tokens()
        # Of a byte-level vocabulary: what is shown, by whether special tokens are skipped.
        self._bytes_of_tokens = _bytes_of_tokens(inner)

    @classmethod
    def from_directory(cls, directory: Path) -> "Tokenizer":
        """Raises ModelError when there is no `tokenizer.json` or it is damaged."""
        tokenizer = cls.find(directory)
        if tokenizer is None:
            path = directory / TOKENIZER_FILE
            raise ModelError(f"{path}: there is no such file; other tokenizer formats are not supported")
        return tokenizer

    @classmethod
    def find(cls, directory: Path) -> "Tokenizer | None":
        """None when there is no `tokenizer.json`; raises ModelError when it is damaged."""
        path = directory / TOKENIZER_FILE
        text = read_text(path)
        if text is None:
            return None
        try:
            inner = tokenizers.Tokenizer.from_str(text)
        except BaseException as error:
            if not _is_the_librarys(error):
                raise
            raise ModelError(f"{path}: is not a tokenizer: {error}") from error
        return cls(inner, read_tokenizer_config(directory))

    @property
    def vocab_size(self) -> int:
        """Ids are below this; the model's own vocabulary may be padded beyond it."""
        return self._inner.get_vocab_size(with_added_tokens=True)

    @property
    def special_tokens(self) -> dict[str, str]:
        """`{"eos_token": "</s>", ...}` as `tokenizer_config.json` names them."""
        return dict(self._special_tokens)

    @property
    def eos_token_id(self) -> int | None:
        token = self._special_tokens.get("eos_token")
        return None if token is None else self._inner.token_to_id(token)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """`add_special_tokens=False` for text from a chat template, which writes them itself.

        Raises InvalidRequest on text that is no Unicode (half a surrogate pair), ModelError when the file's
        parts do not fit each other, which shows only now.
        """
        try:
            return self._inner.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError:  # how the library refuses a surrogate
            raise InvalidRequest("the text is not valid Unicode") from None
        except BaseException as error:
            if not _is_the_librarys(error):
                raise
            raise ModelError(f"the tokenizer is damaged, it fails to encode: {error}") from error

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Ids without a token, such as those of a padded vocabulary, have no text."""
        try:
            return self._inner.decode(token_ids, skip_special_tokens=skip_special_tokens)
        except BaseException as error:
            if not _is_the_librarys(error):
                raise
            raise ModelError(f"the tokenizer is damaged, it fails to decode: {error}") from error

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for by itself; a byte-level one may be a part of a character."""
        if self._bytes_of_tokens is not None:
            return self._bytes_of_tokens[False][token_id]
        return self.decode([token_id], skip_special_tokens=False).encode("utf-8", "replace")

    def detokenizer(self, context: Sequence[int] = (), *, skip_special_tokens: bool = True) -> Incremental:
        """For one stream. `context`: the last few tokens of the prompt that it goes on from."""
        if self._bytes_of_tokens is not None:
            return ByteLevelDetokenizer(self._bytes_of_tokens[skip_special_tokens])
        return Detokenizer(
            lambda token_ids: self.decode(token_ids, skip_special_tokens=skip_special_tokens), context
        )


def detokenizer_of(
    tokenizer: Tokenizer | None, prompt: Sequence[int], *, skip_special_tokens: bool = True
) -> Incremental:
    """For one answer to that prompt; without a tokenizer all text is ""."""
    if tokenizer is None:
        return Detokenizer(lambda _: "")
    return tokenizer.detokenizer(prompt[-NUM_CONTEXT_TOKENS:], skip_special_tokens=skip_special_tokens)


def _bytes_of_tokens(inner: tokenizers.Tokenizer) -> dict[bool, BytesOfTokens] | None:
    """None for a vocabulary whose tokens are no bytes by themselves."""
    if not isinstance(inner.decoder, tokenizers.decoders.ByteLevel):
        return None
    special = {token_id for token_id, token in inner.get_added_tokens_decoder().items() if token.special}
    return {True: BytesOfTokens(inner.id_to_token, special), False: BytesOfTokens(inner.id_to_token)}


def _is_the_librarys(error: BaseException) -> bool:
    """It raises bare Exception on what it refuses, and a BaseException of no public name where it panics."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"
