"""The command's standard output: what cannot be written there is told in one line, never in a traceback."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from baton.errors import ConfigError


def check() -> None:
    """ConfigError when there is none, which is better known before the work."""
    if sys.stdout is None:
        raise ConfigError("standard output is closed: there is nowhere to write the answer")


def write(text: str) -> None:
    """Write at once. BrokenPipeError when the reader has gone, ConfigError when it fails in another way."""
    with told():
        sys.stdout.write(text)
        sys.stdout.flush()


@contextmanager
def told() -> Iterator[None]:
    """Around what writes there and nowhere else: an OSError becomes what `write` raises."""
    try:
        yield
    except OSError as error:
        _drop()
        if isinstance(error, BrokenPipeError):
            raise
        raise ConfigError(f"standard output cannot be written: {error.strerror}") from None


def flush() -> None:
    if sys.stdout is not None:
        write("")


def _drop() -> None:
    """Point stdout at nothing, so that the interpreter does not fail once more when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
