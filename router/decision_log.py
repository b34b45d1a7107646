"""What a router has decided, line by line, for later: bench/router.py replays it under another policy.

A line is a JSON object: one when an attempt is sent out, one when it has ended. Of a prompt there is nothing
but its length and the first 64 bits of its pages' names, which nobody can make without prompt and salt.
Several routers of one machine may share a file: a line is one write, and their clock is one.
"""

import base64
import io
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta

from baton.decision import Decision
from baton.errors import ConfigError
from baton.router.short_keys import SHORT_KEY_BYTES, first_halves
from baton.times import PrefillTimes
from baton.wire_types import Attempt, Count, Id, Seconds

logger = logging.getLogger(__name__)

Moment: TypeAlias = Annotated[float, Meta(ge=0)]  # seconds, by the router's clock


class _Line(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True, tag_field="kind"
):
    at_s: Moment


class SentOut(_Line, frozen=True):
    decision: Decision
    page_size: Annotated[int, Meta(ge=1, le=2**20)]
    num_output_tokens: Count  # expected, as the request's limit allows
    keys: str  # base64


class HasEnded(_Line, frozen=True):
    request_id: Id
    attempt: Attempt
    first_token_s: Seconds | None = None  # after it was sent out
    measured: PrefillTimes | None = None  # by who computed the prompt, if that has come by now


AnyLine: TypeAlias = SentOut | HasEnded


class LogFile:
    """Lines are appended until that fails once: a full disk is no reason to route nothing.

    A new file is this user's alone. Where an earlier log ends in the middle of a line, it begins a new one.
    """

    def __init__(self, path: Path) -> None:
        """ConfigError when it cannot be written to."""
        self._path = path
        self._is_well = True
        try:
            is_cut = _ends_within_a_line(path)
            # Without a buffer: what has been said is there, whatever ends the process.
            self._file = io.FileIO(path, "a", opener=_open_for_this_user)
        except OSError as error:
            raise ConfigError(f"router.decision_log: {path} cannot be written to: {error}") from error
        if is_cut:
            self.write(b"\n")

    def write(self, line: bytes) -> None:
        if self._is_well:
            self._try(lambda: self._write_all(line))

    def _write_all(self, line: bytes) -> None:
        rest = memoryview(line)
        while rest:  # a disk that is almost full takes the beginning
            rest = rest[self._file.write(rest) :]

    def close(self) -> None:
        self._try(self._file.close)

    def _try(self, act: Callable[[], object]) -> None:
        try:
            act()
        except OSError as error:
            self._is_well = False
            logger.warning("the decision log ends here", extra={"path": str(self._path), "error": str(error)})


def _open_for_this_user(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _ends_within_a_line(path: Path) -> bool:
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


_ENCODER: Final = msgspec.json.Encoder()
_DECODER: Final[msgspec.json.Decoder[AnyLine]] = msgspec.json.Decoder(AnyLine)


def encode_line(line: AnyLine) -> bytes:
    return _ENCODER.encode(line) + b"\n"


def decode_lines(lines: Iterable[bytes], name: str) -> Iterator[AnyLine]:
    """Without lines that were cut off. name: of the file. ConfigError names the line that cannot be read."""
    unread: tuple[int, Exception] | None = None
    for number, line in enumerate(lines, start=1):
        if unread is not None:
            raise ConfigError(f"{name}, line {unread[0]}: {unread[1]}")
        try:
            decoded = _DECODER.decode(line)
        except (msgspec.MsgspecError, ValueError) as error:
            if _is_cut(line, error):
                logger.warning("a line was cut off", extra={"log": name, "line": number})
            else:
                unread = number, error
            continue
        yield decoded


def _is_cut(line: bytes, error: Exception) -> bool:
    """Whether it is the beginning of one: the disk was full, or its writer was killed."""
    return line.startswith(b"{") and "truncated" in str(error)


def keys_as_text(keys: bytes) -> str:
    """Of a prompt's keys, as a line has them."""
    return base64.b64encode(first_halves(keys)).decode()


def keys_in(line: SentOut) -> list[bytes]:
    """ConfigError when they are no keys."""
    try:
        joined = base64.b64decode(line.keys, validate=True)
    except ValueError as error:
        raise ConfigError(f"the keys of request {line.decision.request_id}: {error}") from error
    return [joined[at : at + SHORT_KEY_BYTES] for at in range(0, len(joined), SHORT_KEY_BYTES)]
