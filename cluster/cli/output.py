"""Standard output of the commands: text and tables. An error of writing ends the command with one line."""

import io
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, TypeAlias

from baton.errors import ConfigError, reason_of

if TYPE_CHECKING:
    from rich.table import Table

Part: TypeAlias = "str | Table"
UNLIMITED: Final = 10_000  # columns of a line that no terminal shows: a program reads it


def check() -> None:
    """Raise ConfigError if standard output is closed. Commands call this before work that takes long."""
    if sys.stdout is None:
        raise ConfigError("standard output is closed: there is nowhere to write the answer")


def write(text: str) -> None:
    """Write at once. BrokenPipeError when the reader has gone, ConfigError when it fails in another way."""
    with stdout_errors():
        sys.stdout.write(text)
        sys.stdout.flush()


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> "Table":
    """Return a table of text, one row a line; on a terminal that is too narrow, cells are folded."""
    from rich.table import Table  # 40 ms, which other commands need not take

    made = Table(*columns, box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for row in rows:
        made.add_row(*row)
    return made


def show(*parts: Part) -> None:
    """Write lines of text and tables."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    write(rendered(*parts, width=shutil.get_terminal_size().columns if is_terminal else None))


def rendered(*parts: Part, width: int | None = None) -> str:
    """Return the text of lines and tables. width: columns of the terminal; None: plain text, never folded."""
    from rich.console import Console

    text = io.StringIO()
    console = Console(
        file=text,
        width=width or UNLIMITED,
        force_terminal=width is not None,
        markup=False,
        highlight=False,
        emoji=False,
        soft_wrap=True,
    )
    for part in parts:
        console.print(part)
    return "".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines())


def natural(name: str) -> tuple[str, int]:
    """Return a sort key: decode-2 comes before decode-10."""
    stem, _, number = name.rpartition("-")
    return (stem, int(number)) if number.isdecimal() else (name, -1)


@contextmanager
def stdout_errors() -> Iterator[None]:
    """Raise the errors of `write` for an OSError of standard output."""
    try:
        yield
    except OSError as error:
        # The interpreter, which flushes at exit, must not fail once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise
        raise ConfigError(f"standard output cannot be written: {reason_of(error)}") from None


def flush() -> None:
    """Write what other code has left in the buffer; raises as `write` does."""
    if sys.stdout is not None:
        write("")
