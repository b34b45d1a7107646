"""Limits of WebSockets: handshakes that do not end, and pings of clients that do not read."""

import asyncio
from collections import Counter
from typing import Any

from starlette.types import Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.server import ServerState

from baton.config.gateway import GatewayConfig
from baton.gateway.http.protocol import HttpLimits
from baton.gateway.http.server import HttpServer
from baton.gateway.http.websocket import LimitedSocket
from baton.messages.workers import Address
from tests.event_loop import on_loop

HEAD = (
    b"GET /v1/stream HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: Upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)

PING = b"\x89\x80\0\0\0\0"
PONG = b"\x8a\x00"
CONFIG = GatewayConfig(model="tiny", routers=(Address("127.0.0.1", 1),), port=0, header_timeout_s=0.2)
LIMITS = HttpLimits(config=CONFIG, refused=Counter())


async def _accept_never(scope: Scope, receive: Receive, send: Send) -> None:
    while (await receive())["type"] != "websocket.disconnect":
        pass


def test_handshake_that_does_not_end_closes_the_connection() -> None:
    async def shake() -> bytes:
        server = HttpServer(_accept_never, CONFIG, Counter())
        host, port = await server.start()
        try:
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(HEAD)
            try:
                async with asyncio.timeout(10):
                    return await reader.read()
            except ConnectionResetError:
                return b""
            finally:
                writer.close()
        finally:
            await server.drain()
            await server.closed()

    assert asyncio.run(shake()) == b""


class _Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.written = b""

    def write(self, data: Any) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        pass


async def _accept(scope: Scope, receive: Receive, send: Send) -> None:
    await receive()
    await send({"type": "websocket.accept"})
    await _accept_never(scope, receive, send)


@on_loop
async def test_pings_of_a_client_that_does_not_read_are_not_answered() -> None:
    config = Config(_accept, ws_per_message_deflate=False, log_config=None)
    config.load()
    connection, transport = (
        LimitedSocket(LIMITS, config=config, server_state=ServerState(), app_state={}),
        _Transport(),
    )
    connection.connection_made(transport)
    connection.data_received(HEAD)
    async with asyncio.timeout(10):
        while not connection.handshake_complete:
            await asyncio.sleep(0)
    num_written = len(transport.written)
    connection.pause_writing()
    connection.data_received(PING * 100)
    assert len(transport.written) == num_written
    connection.resume_writing()
    connection.data_received(PING)
    assert transport.written[num_written:] == PONG
    connection.connection_lost(ConnectionResetError())
    await asyncio.gather(*connection.tasks)
