"""Reads a model's tokenizer, `tokenizer.json` or the same made of a SentencePiece model, and its vocabulary
size.

Older Llama, Mistral and Gemma checkpoints may have `tokenizer.model` alone. The converted tokenizer gives the
tokens that SentencePiece gives: `transformers` 5 converts these files too, and loses spaces at the start of a
text. The extra `sentencepiece` installs what reads the file; models with a tokenizer.json need none of it.
"""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from baton.errors import ModelError, how_to_install

TOKENIZER_FILE: Final = "tokenizer.json"
_CONFIG_FILE: Final = "config.json"
SENTENCEPIECE_FILE: Final = "tokenizer.model"
MAX_FILE_BYTES: Final = 64 * 2**20
_TOKENIZER_CONFIG_FILE: Final = "tokenizer_config.json"
_ADDED_FILE: Final = "added_tokens.json"
_LIBRARIES: Final = ("sentencepiece", "google.protobuf")
StructT = TypeVar("StructT", bound=msgspec.Struct)


def read_text(path: Path) -> str | None:
    """Return the file's text, or None when the file is absent. Raises ModelError for an unreadable file."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ModelError(f"{path}: should be at most {MAX_FILE_BYTES} bytes, got {path.stat().st_size}")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error


def has_tokenizer(directory: Path) -> bool:
    """Return whether `read_tokenizer` would find a file."""
    return any((directory / name).is_file() for name in (TOKENIZER_FILE, SENTENCEPIECE_FILE))


def read_tokenizer(directory: Path) -> str | None:
    """Return the tokenizer of a model as JSON, or None when the directory has none.

    Raises ModelError for a file that cannot be read or converted, and without the extra for a conversion.
    """
    text = read_text(directory / TOKENIZER_FILE)
    if text is None and (directory / SENTENCEPIECE_FILE).is_file():
        return _convert(directory)
    return text


def _convert(directory: Path) -> str:
    path = directory / SENTENCEPIECE_FILE
    missing = [name for name in _LIBRARIES if not _is_installed(name)]
    if missing:
        raise ModelError(
            f"{path}: there is no {TOKENIZER_FILE} beside it, and {', '.join(missing)} to convert it is not "
            f"installed: {how_to_install('sentencepiece')}"
        )
    from baton.sentencepiece_model import convert

    try:
        config, added = (_read_json(directory, name) for name in (_TOKENIZER_CONFIG_FILE, _ADDED_FILE))
        return convert(path.read_bytes(), config, added)
    except Exception as error:  # the tokenizers library raises nothing more special
        raise ModelError(f"{path}: cannot be converted to {TOKENIZER_FILE}: {error}") from error


def _is_installed(library: str) -> bool:
    try:
        return find_spec(library) is not None
    except ModuleNotFoundError:  # the package around it
        return False


def _read_json(directory: Path, name: str) -> dict[str, Any]:
    text = read_text(directory / name)
    found = {} if text is None else json.loads(text)
    if not isinstance(found, dict):
        raise ValueError(f"{name} is not a JSON object")
    return found


class _AddedToken(msgspec.Struct, frozen=True):
    content: str
    id: int | None = None


class _NamedTemplate(msgspec.Struct, frozen=True):
    name: str
    template: str


class TokenizerConfig(msgspec.Struct, frozen=True):
    """The keys of `tokenizer_config.json` that Baton uses; the file has dozens that only training uses."""

    bos_token: str | _AddedToken | None = None
    eos_token: str | _AddedToken | None = None
    unk_token: str | _AddedToken | None = None
    pad_token: str | _AddedToken | None = None
    chat_template: str | list[_NamedTemplate] | None = None
    tokenizer_class: str | None = None
    add_bos_token: bool | None = None

    def special_tokens(self) -> dict[str, str]:
        """Return the model's special tokens by the names that templates use: `{"bos_token": "<s>", ...}`."""
        names = ("bos_token", "eos_token", "unk_token", "pad_token")
        named = {name: getattr(self, name) for name in names}
        return {
            name: token.content if isinstance(token, _AddedToken) else token
            for name, token in named.items()
            if token is not None
        }

    def template(self, name: str) -> str | None:
        """Return a named chat template; one without a name is the "default"."""
        if isinstance(self.chat_template, list):
            return {entry.name: entry.template for entry in self.chat_template}.get(name)
        return self.chat_template if name == "default" else None


def read_tokenizer_config(directory: Path) -> TokenizerConfig:
    """Return the tokenizer's settings, empty for an absent file. Raises ModelError for a damaged one."""
    return _decoded(directory / _TOKENIZER_CONFIG_FILE, TokenizerConfig) or TokenizerConfig()


class _EndToken(msgspec.Struct, frozen=True):
    """The keys that name the end token; others may be odd where no template is used."""

    eos_token: str | _AddedToken | None = None
    added_tokens_decoder: dict[int, _AddedToken] = {}


class _TokenizerFile(msgspec.Struct, frozen=True):
    added_tokens: tuple[_AddedToken, ...] = ()


def read_end_token(directory: Path) -> int | None:
    """Return the id of the tokenizer's end token; None where no file names the token or has its id.

    Raises ModelError for a damaged file.
    """
    config = _decoded(directory / _TOKENIZER_CONFIG_FILE, _EndToken)
    if config is None or config.eos_token is None:
        return None
    end = config.eos_token if isinstance(config.eos_token, str) else config.eos_token.content
    for token_id, token in config.added_tokens_decoder.items():
        if token.content == end:
            return token_id
    file = _decoded(directory / TOKENIZER_FILE, _TokenizerFile) or _TokenizerFile()
    return next((token.id for token in file.added_tokens if token.content == end), None)


def _decoded(path: Path, kind: type[StructT]) -> StructT | None:
    """Return the keys of a JSON file that `kind` has; None for an absent file."""
    text = read_text(path)
    try:
        return None if text is None else msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ModelError(f"{path}: {error}") from None


class _Vocabulary(msgspec.Struct, frozen=True):
    vocab_size: int | None = None


def read_vocab_size(directory: Path) -> int | None:
    """Return the model's vocabulary size from `config.json`, or None when the file does not say."""
    found = _decoded(directory / _CONFIG_FILE, _Vocabulary)
    return None if found is None else found.vocab_size
