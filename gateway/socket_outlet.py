"""An outlet over a WebSocket: lines are messages, sent one after the other by a task."""

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from starlette.websockets import WebSocket, WebSocketDisconnect

MAX_UNSENT: Final = 8  # messages: with more, the client lags


class SocketOutlet:
    """See outlet.Outlet."""

    def __init__(self, websocket: WebSocket) -> None:
        self.on_gone: Callable[[], None] | None = None
        self.on_writable: Callable[[], None] | None = None
        self.is_gone = False
        self._websocket = websocket
        self._unsent: deque[bytes] = deque()
        self._has_unsent = asyncio.Event()
        self._writer = asyncio.create_task(self._write())

    @property
    def lags(self) -> bool:
        return len(self._unsent) > MAX_UNSENT

    def write(self, data: bytes) -> None:
        if not self.is_gone:
            self._unsent += data.splitlines()
            self._has_unsent.set()

    async def close(self) -> None:
        self._writer.cancel()
        with suppress(asyncio.CancelledError):
            await self._writer

    async def _write(self) -> None:
        while True:
            await self._has_unsent.wait()
            self._has_unsent.clear()
            has_lagged = False
            while self._unsent:
                has_lagged = has_lagged or self.lags
                try:
                    await self._websocket.send_text(self._unsent.popleft().decode())
                except (WebSocketDisconnect, RuntimeError, OSError):  # however the server says it
                    self._leave()
                    return
            if has_lagged and self.on_writable is not None:
                self.on_writable()

    def _leave(self) -> None:
        self.is_gone = True
        self._unsent.clear()
        if self.on_gone is not None:
            self.on_gone()
