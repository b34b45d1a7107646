"""What is written at the end of a turn of the event loop.

A turn may bring several batches of tokens for one stream, the more so the busier the process is. They leave
in one chunk, by one system call, when the turn ends: so what a token costs falls as the load rises.
"""

import asyncio
from collections.abc import Callable


class Turn:
    """Of one event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._writers: list[Callable[[], None]] = []

    def add(self, write: Callable[[], None]) -> None:
        """Call `write` once this turn is over."""
        if not self._writers:
            self._loop.call_soon(self._end)
        self._writers.append(write)

    def _end(self) -> None:
        writers, self._writers = self._writers, []
        for write in writers:
            write()
