"""What `tokenizer_config.json` adds to the tokenizer: its special tokens and the chat template."""

from pathlib import Path
from typing import Final

import msgspec

from baton.errors import ModelError

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
