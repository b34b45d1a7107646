"""Reads a model's tokenizer, `tokenizer.json` or the same made of a SentencePiece model, and its vocabulary
size.

Older Llama, Mistral and Gemma checkpoints may have `tokenizer.model` alone. The converted tokenizer gives the
tokens that SentencePiece gives: `transformers` 5 converts these files too, and loses spaces at the start of a
text. The extra `sentencepiece` installs what reads the file; models with a tokenizer.json need none of it.
"""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import msgspec

from baton.errors import ModelError, how_to_install

TOKENIZER_FILE: Final = "tokenizer.json"
_CONFIG_FILE: Final = "config.json"
SENTENCEPIECE_FILE: Final = "tokenizer.model"
MAX_FILE_BYTES: Final = 64 * 2**20
_TOKENIZER_CONFIG_FILE: Final = "tokenizer_config.json"
_ADDED_FILE: Final = "added_tokens.json"
_LIBRARIES: Final = ("sentencepiece", "google.protobuf")


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


class _Vocabulary(msgspec.Struct, frozen=True):
    vocab_size: int | None = None


def read_vocab_size(directory: Path) -> int | None:
    """Return the model's vocabulary size from `config.json`, or None when the file does not say."""
    text = read_text(directory / _CONFIG_FILE)
    if text is None:
        return None
    try:
        return msgspec.json.decode(text, type=_Vocabulary).vocab_size
    except (msgspec.DecodeError, RecursionError) as error:
        raise ModelError(f"{directory / _CONFIG_FILE}: {error}") from None
