"""What is written at the end of a turn of the event loop, and what takes many of them.

A turn may bring several batches of tokens for one stream, the more so the busier the process is. They leave
in one chunk, by one system call, when the turn ends: so what a token costs falls as the load rises.
"""

import asyncio
from collections.abc import Callable, Iterable
from typing import Final

from starlette.types import Send

from baton.clock import Clock
from baton.gateway.api_errors import ClientGone
from baton.gateway.asgi import BLOCK_BYTES, JSON, respond
from baton.gateway.outlet import Outlet

JSON_HEADERS: Final = [(b"content-type", JSON)]
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


async def respond_in_turns(send: Send, parts: Iterable[bytes], clock: Clock, outlet: Outlet) -> None:
    """Answer 200 with JSON that is written while `parts` are made; others have a turn every TURN_S.

    What is longer than a block goes out in chunks as the client reads it, so no more than a block is kept.
    Raises ClientGone when nobody waits any more.
    """
    gathered, since_s, has_begun = bytearray(), clock.now_s(), False
    for part in parts:
        gathered += part
        if len(gathered) > BLOCK_BYTES:
            if not has_begun:
                has_begun = True
                await send({"type": "http.response.start", "status": 200, "headers": JSON_HEADERS})
            await send({"type": "http.response.body", "body": bytes(gathered), "more_body": True})
            gathered.clear()
        if clock.now_s() - since_s > TURN_S:
            await asyncio.sleep(0)
            if outlet.is_gone:
                raise ClientGone
            since_s = clock.now_s()
    if has_begun:
        await send({"type": "http.response.body", "body": bytes(gathered), "more_body": False})
    else:
        await respond(send, 200, bytes(gathered))
