"""uvicorn as a gateway runs it: our protocol, our sockets, and an end that its owner asks for."""

import asyncio
import contextlib
import functools
import math
import socket
from collections.abc import Callable, Iterator
from typing import Any, Final

from starlette.types import ASGIApp
from uvicorn.config import Config
from uvicorn.server import Server

from baton.errors import ConfigError
from baton.gateway.http_protocol import LimitedProtocol, Limits
from baton.gateway.socket_protocol import LimitedSocket
from baton.gateway_config import GatewayConfig

BACKLOG: Final = 1024
GIVE_UP_S: Final = 2  # until what was given up has told its clients
WEBSOCKET_QUEUE: Final = 4  # messages that a client may send ahead


class HttpServer:
    """`start` it, then `drain` it; used on one loop."""

    def __init__(self, app: ASGIApp, config: GatewayConfig, limits: Limits) -> None:
        self._config = config
        self._socket: socket.socket | None = None
        self._server = _Server(_uvicorn_config(app, config, limits))
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> tuple[str, int]:
        """The address that is listened on from now on. Raises ConfigError when it cannot be had."""
        self._socket = listening_socket(self._config)
        host, port = self._socket.getsockname()[:2]
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        ready = asyncio.create_task(self._server.is_listening.wait())
        await asyncio.wait((ready, self._task), return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if self._task.done():
            await self._task
        return host, port

    async def drain(self, give_up: Callable[[], None]) -> None:
        """Accept nothing more, let what runs end, then close. `give_up` is called when the time is over: it
        should end what still runs.
        """
        if self._task is None:
            return
        self._server.should_exit = True
        await asyncio.wait((self._task,), timeout=self._config.drain_timeout_s)
        if not self._task.done():
            give_up()
        await self._task


class _Server(Server):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.is_listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the process's, not one of its parts'."""
        yield


def listening_socket(config: GatewayConfig) -> socket.socket:
    """Raises ConfigError when the address is taken, or none of this machine's."""
    try:
        found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"gateway.host: {config.host!r}: {error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if config.shares_port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # Connections inherit both: a client that never reads pins no more than this, and no longer.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, config.send_buffer_bytes)
        user_timeout_ms = int(config.stall_timeout_s * 1000)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, user_timeout_ms)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"gateway.port: {config.host}:{config.port} cannot be bound ({error.strerror}): "
            "another program may have it; give another --port"
        ) from error
    listener.setblocking(False)
    return listener


def _uvicorn_config(app: ASGIApp, config: GatewayConfig, limits: Limits) -> Config:
    protocol: Any = functools.partial(LimitedProtocol, limits)
    socket_protocol: Any = functools.partial(LimitedSocket, limits.header_timeout_s)
    return Config(
        app,
        http=protocol,
        ws=socket_protocol,
        ws_max_size=config.max_body_bytes,
        ws_max_queue=WEBSOCKET_QUEUE,
        ws_per_message_deflate=False,
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=max(1, round(config.idle_timeout_s)),
        timeout_graceful_shutdown=math.ceil(config.drain_timeout_s) + GIVE_UP_S,
    )
