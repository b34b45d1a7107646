"""What a router has decided, line by line, for later: bench/router.py replays it under another policy.

A line is a JSON object: one when an attempt is sent out, one when it has ended. Of a prompt there is nothing
but its length and the first 64 bits of its pages' names, which nobody can make without prompt and salt.
Several routers of one machine may share a file: a line is one write, and their clock is one.
"""

import base64
import logging
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
    """Lines are appended until that fails once: a full disk is no reason to route nothing."""

    def __init__(self, path: Path) -> None:
        """ConfigError when it cannot be written to."""
        self._path = path
        self._is_well = True
        try:
            self._file = path.open(
                "ab", buffering=0
            )  # what has been said is there, whatever ends the process
        except OSError as error:
            raise ConfigError(f"router.decision_log: {path} cannot be written to: {error}") from error

    def write(self, line: bytes) -> None:
        if self._is_well:
            self._try(lambda: self._file.write(line))

    def close(self) -> None:
        self._try(self._file.close)

    def _try(self, act: Callable[[], object]) -> None:
        try:
            act()
        except OSError as error:
            self._is_well = False
            logger.warning("the decision log ends here", extra={"path": str(self._path), "error": str(error)})


_ENCODER: Final = msgspec.json.Encoder()
_DECODER: Final[msgspec.json.Decoder[AnyLine]] = msgspec.json.Decoder(AnyLine)


def encode_line(line: AnyLine) -> bytes:
    return _ENCODER.encode(line) + b"\n"


def decode_lines(lines: Iterable[bytes], name: str) -> Iterator[AnyLine]:
    """name: of the file. ConfigError names the line that cannot be read; the last may be cut off."""
    unread: tuple[int, Exception] | None = None
    for number, line in enumerate(lines, start=1):
        if unread is not None:
            raise ConfigError(f"{name}, line {unread[0]}: {unread[1]}")
        try:
            decoded = _DECODER.decode(line)
        except (msgspec.MsgspecError, ValueError) as error:
            unread = number, error
            continue
        yield decoded


def short_keys(keys: bytes) -> str:
    """Of a prompt's keys, as a line has them."""
    return base64.b64encode(first_halves(keys)).decode()


def keys_in(line: SentOut) -> list[bytes]:
    """ConfigError when they are no keys."""
    try:
        joined = base64.b64decode(line.keys, validate=True)
    except ValueError as error:
        raise ConfigError(f"the keys of request {line.decision.request_id}: {error}") from error
    return [joined[at : at + SHORT_KEY_BYTES] for at in range(0, len(joined), SHORT_KEY_BYTES)]
