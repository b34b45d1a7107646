"""Runs uvicorn with Baton's HTTP and WebSocket protocols on sockets of its own, and drains it on request."""

import asyncio
import contextlib
import functools
import math
import resource
import socket
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

from starlette.types import ASGIApp
from uvicorn.config import Config
from uvicorn.server import Server

from baton.config.gateway import OPERATOR_HOST, GatewayConfig
from baton.errors import ConfigError
from baton.gateway.http.protocol import HttpLimits, LimitedProtocol
from baton.gateway.http.websocket import LimitedSocket
from baton.rpc.process import backlog_within

GIVE_UP_S: Final = 2  # for the clients of abandoned requests to be told


class HttpServer:
    """The HTTP server of one event loop: `start` it, then `drain` it."""

    def __init__(self, app: ASGIApp, config: GatewayConfig, refused: Counter[str]) -> None:
        """refused: counts the connections that the server refuses, by code."""
        self._config = config
        self._server = _Server(_uvicorn_config(app, HttpLimits(config=config, refused=refused)))
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> tuple[str, int]:
        """Listen for clients, and for operators where they have a port. Returns the clients' address.

        Raises ConfigError when an address cannot be had.
        """
        config = self._config
        listeners = [listening_socket(config, config.host, config.port, "port")]
        host, port = listeners[0].getsockname()[:2]
        if config.operator_port is not None:
            try:
                listeners.append(
                    listening_socket(config, OPERATOR_HOST, config.operator_port, "operator_port")
                )
            except ConfigError:
                listeners[0].close()
                raise
        self._task = asyncio.create_task(self._server.serve(sockets=listeners))
        ready = asyncio.create_task(self._server.is_listening.wait())
        await asyncio.wait((ready, self._task), return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if self._task.done():
            await self._task
        return host, port

    async def drain(self) -> bool:
        """Accept nothing more, let requests end. Returns False if some run after `drain_timeout_s`."""
        if self._task is None:
            return True
        self._server.should_exit = True
        await asyncio.wait((self._task,), timeout=self._config.drain_timeout_s)
        return self._task.done()

    async def closed(self) -> None:
        """Wait until the server that was drained has closed."""
        if self._task is not None:
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
        """Handle no signals: the process does."""
        yield


def listening_socket(config: GatewayConfig, host: str, port: int, setting: str) -> socket.socket:
    """Return a bound socket with the limits of client connections. setting: the name of the port's setting.

    Raises ConfigError when the address is taken or is not one of this machine.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"gateway.host: {host!r}: {error}") from error
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
            f"gateway.{setting}: {host}:{port} cannot be bound ({error.strerror}): "
            f"another program may have it; give another --{setting.replace('_', '-')}"
        ) from error
    listener.setblocking(False)
    return listener


def _uvicorn_config(app: ASGIApp, limits: HttpLimits) -> Config:
    config = limits.config
    protocol: Any = functools.partial(LimitedProtocol, limits)
    socket_protocol: Any = functools.partial(LimitedSocket, limits)
    return Config(
        app,
        http=protocol,
        ws=socket_protocol,
        ws_max_size=config.max_body_bytes,
        ws_per_message_deflate=False,
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        backlog=backlog_within(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        timeout_keep_alive=max(1, round(config.idle_timeout_s)),
        timeout_graceful_shutdown=math.ceil(config.drain_timeout_s) + GIVE_UP_S,
    )
