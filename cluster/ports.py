"""TCP ports: reserved ones for processes that start later, and listening ones of this machine."""

import errno
import ipaddress
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple, Self

from baton.errors import ConfigError


class KeptPort:
    """A port that is bound and never listened on, so that the kernel gives it to no other program.

    Processes that listen on it must set `option`: SO_REUSEADDR for one process, SO_REUSEPORT for several.
    """

    def __init__(self, host: str, port: int, option: int) -> None:
        """port: 0: any free one. ConfigError: the port is in use, or `host` is no address of this machine."""
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

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the port."""
        self._socket.close()


def _check_unused(family: socket.AddressFamily, host: str, port: int) -> None:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # closed connections may linger
        probe.bind((host, port))
        probe.listen(1)


def _cannot_bind(host: str, port: int, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(f"port: {port} on {host} is in use: choose another, or 0 for one that is free")
    if error.errno == errno.EACCES:
        return ConfigError(f"port: {port} is for privileged processes: choose one from 1024 on")
    return ConfigError(f"host: {host} cannot be listened on: {error.strerror or error}")


LISTEN: Final = "0A"  # the state, in /proc/net/tcp
TABLES: Final = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))


class ListeningProcess(NamedTuple):
    """The address of a process of this machine that listens."""

    host: str
    port: int


def listeners() -> list[ListeningProcess]:
    """Return the TCP listeners of this network namespace; none without /proc."""
    return sorted({found for table in TABLES if table.exists() for found in _listeners(table.read_text())})


def _listeners(table: str) -> Iterator[ListeningProcess]:
    for line in table.splitlines()[1:]:
        _, local, _, state, *_ = line.split()
        if state == LISTEN:
            address, _, port = local.partition(":")
            yield ListeningProcess(_address(address), int(port, 16))


def _address(hexadecimal: str) -> str:
    """Read an address. The kernel writes each group of four bytes in its own byte order, little-endian."""
    groups = bytes.fromhex(hexadecimal)
    octets = b"".join(groups[first : first + 4][::-1] for first in range(0, len(groups), 4))
    found = ipaddress.ip_address(octets)
    mapped = getattr(found, "ipv4_mapped", None)
    return str(mapped or found)
