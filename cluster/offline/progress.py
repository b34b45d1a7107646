"""Progress of loading and generating: a bar on a terminal, else one line every INTERVAL_S."""

import sys
import time
from collections.abc import Iterable, Iterator
from typing import Final, Self

from baton.cluster.offline.generation import TextDelta

INTERVAL_S: Final = 3.0


class ProgressBar:
    """A bar named `title` on stderr, or lines where stderr is no terminal. A context manager."""

    def __init__(self, title: str, unit: str) -> None:
        """unit: bytes, which is shown in MB and MB/s, or the plural of what is counted."""
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TransferSpeedColumn,
        )

        self._title = title
        self._unit = unit
        self._stream = sys.stderr
        self._is_terminal = self._stream.isatty()
        self._begun_s = time.monotonic()
        self._next_s = self._begun_s + INTERVAL_S  # when the next line is due
        sizes = (DownloadColumn(), TransferSpeedColumn()) if unit == "bytes" else (MofNCompleteColumn(),)
        columns = (TextColumn("{task.description}"), BarColumn(), *sizes, TextColumn("{task.fields[note]}"))
        self._bar = Progress(*columns, console=Console(file=self._stream), disable=not self._is_terminal)
        self._task = self._bar.add_task(title, total=None, note="")

    def __call__(self, done: int, total: int, note: str = "") -> None:
        """Show `done` of `total` units; note: what else to show."""
        self._bar.update(self._task, completed=done, total=total, note=note)
        now_s = time.monotonic()
        if not self._is_terminal and (now_s >= self._next_s or done == total):
            self._next_s = now_s + INTERVAL_S
            amounts = f"{done} of {total} {self._unit}"
            if self._unit == "bytes":
                rate = done / 1e6 / max(now_s - self._begun_s, 1e-9)
                amounts = f"{done / 1e6:,.1f} of {total / 1e6:,.1f} MB, {rate:,.0f} MB/s"
            print(", ".join(filter(None, (f"{self._title}: {amounts}", note))), file=self._stream, flush=True)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def watch(deltas: Iterable[TextDelta], num_choices: int) -> Iterator[TextDelta]:
    """Yield the same deltas, and show the finished choices and tokens per second on stderr."""
    begun_s, num_tokens, num_finished = time.monotonic(), 0, 0
    with ProgressBar("Generating", "choices") as progress:
        for delta in deltas:
            num_tokens += len(delta.token_ids)
            num_finished += delta.finish_reason is not None
            rate = num_tokens / max(time.monotonic() - begun_s, 1e-9)
            progress(num_finished, num_choices, f"{rate:,.0f} tokens/s")
            yield delta
