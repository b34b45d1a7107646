"""Ports that are kept for processes which have not started yet, or are started again."""

import errno
import socket
from types import TracebackType
from typing import Self

from baton.errors import ConfigError


class KeptPort:
    """`number` on `host`: bound, never listened on, so that nobody else is given it.

    Whoever listens there must set `option`: SO_REUSEADDR lets one process, SO_REUSEPORT several.
    """

    def __init__(self, host: str, port: int, option: int) -> None:
        """port 0: any that is free. ConfigError: something listens there already, or `host` is not here."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            if port:
                _check_unused(family, host, port)
            self._socket.setsockopt(socket.SOL_SOCKET, option, 1)
            self._socket.bind((host, port))
        except OSError as error:
            self._socket.close()
            raise _cannot_bind(host, port, error) from None
        self.number: int = self._socket.getsockname()[1]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()


def _check_unused(family: socket.AddressFamily, host: str, port: int) -> None:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what has closed may linger
        probe.bind((host, port))
        probe.listen(1)


def _cannot_bind(host: str, port: int, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(f"port: {port} on {host} is in use: choose another, or 0 for one that is free")
    if error.errno == errno.EACCES:
        return ConfigError(f"port: {port} is for privileged processes: choose one from 1024 on")
    return ConfigError(f"host: {host} cannot be listened on: {error.strerror or error}")
