"""What is written at the end of a turn of the event loop, and what takes many of them.

A turn may bring several batches of tokens for one stream, the more so the busier the process is. They leave
in one chunk, by one system call, when the turn ends: so what a token costs falls as the load rises.
"""

import asyncio
from collections.abc import Callable, Iterable
from typing import Final

from baton.clock import Clock
from baton.gateway.api_errors import ClientGone
from baton.gateway.outlet import Outlet

TURN_S: Final = 0.002  # so long a large answer may be written before others have a turn


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


async def in_turns(parts: Iterable[bytes], clock: Clock, outlet: Outlet) -> list[bytes]:
    """All of them; what they take longer than TURN_S is done in the turns that follow.

    Raises ClientGone when nobody waits for them any more.
    """
    found, since_s = list[bytes](), clock.now_s()
    for part in parts:
        found.append(part)
        if clock.now_s() - since_s > TURN_S:
            await asyncio.sleep(0)
            if outlet.is_gone:
                raise ClientGone
            since_s = clock.now_s()
    return found
