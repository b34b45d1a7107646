"""The deadline of a WebSocket's handshake, which nothing that the application does may outlast."""

import asyncio

from starlette.types import Receive, Scope, Send

from baton.gateway.http_protocol import Limits
from baton.gateway.http_server import HttpServer
from baton.gateway_config import GatewayConfig
from baton.worker import Address

HEAD = (
    b"GET /v1/stream HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: Upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


async def _accept_never(scope: Scope, receive: Receive, send: Send) -> None:
    while (await receive())["type"] != "websocket.disconnect":
        pass


def test_a_handshake_that_does_not_end_is_given_up() -> None:
    config = GatewayConfig(model="tiny", routers=(Address("127.0.0.1", 1),), port=0)
    limits = Limits(
        max_connections=10,
        max_body_bytes=1024,
        header_timeout_s=0.2,
        body_timeout_s=60.0,
        stall_timeout_s=60.0,
        refused=lambda code: None,
    )

    async def shake() -> bytes:
        server = HttpServer(_accept_never, config, limits)
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
            await server.drain(lambda: None)

    assert asyncio.run(shake()) == b""
