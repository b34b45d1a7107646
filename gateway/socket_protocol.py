"""uvicorn's WebSocket, whose handshake must come to an end: the library drops some without a word."""

import asyncio
from typing import Any, Final

from uvicorn.config import Config
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState

from baton.gateway.http_refusals import BAD_UPGRADE, end, response

CLOSE_TIMEOUT_S: Final = 2.0  # for a client to say that it has heard of the end


class LimitedSocket(WebSocketsSansIOProtocol):
    """Begun by the HTTP protocol, which hands the whole header block on in one piece."""

    def __init__(
        self,
        handshake_timeout_s: float,
        *,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.close_timeout = CLOSE_TIMEOUT_S
        self._handshake_timeout_s = handshake_timeout_s
        self._deadline: asyncio.TimerHandle | None = None
        self._is_refused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._deadline = self.loop.call_later(self._handshake_timeout_s, self._late)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        super().data_received(data)
        if not self.handshake_initiated and not self.transport.is_closing():
            self._is_refused = True
            self.transport.write(response(BAD_UPGRADE))
            end(self.transport, self.loop)

    def _late(self) -> None:
        if not self.handshake_complete:
            self.transport.abort()
