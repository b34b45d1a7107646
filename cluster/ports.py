"""Ports that are kept for processes which have not started yet, or are started again."""

import contextlib
import errno
import ipaddress
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Self

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


LISTEN: Final = "0A"  # the state, in /proc/net/tcp
SOCKET: Final = "socket:["  # begins what a descriptor of one links to
TABLES: Final = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))


class ListeningProcess(NamedTuple):
    """Who listens on this machine, as the kernel says."""

    host: str
    port: int


def listeners() -> list[ListeningProcess]:
    """Of TCP, in this network namespace; none where there is no /proc."""
    return sorted({found for table in TABLES if table.exists() for found in _listeners(table.read_text())})


def processes() -> dict[ListeningProcess, int]:
    """Who listens, and the id of the process that does, where this user may see that."""
    by_inode = {
        inode: found for table in TABLES if table.exists() for found, inode in _entries(table.read_text())
    }
    return {by_inode[inode]: pid for pid, inode in _sockets() if inode in by_inode}


def _sockets() -> Iterator[tuple[int, int]]:
    """Process and inode of each socket that is open."""
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        for link in _links(Path("/proc", pid, "fd")):
            if link.startswith(SOCKET):
                yield int(pid), int(link.removeprefix(SOCKET).rstrip("]"))


def _links(folder: Path) -> Iterator[str]:
    """What may be read of them: some are another user's, some close meanwhile."""
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):
                yield os.readlink(folder / name)


def _listeners(table: str) -> Iterator[ListeningProcess]:
    for found, _ in _entries(table):
        yield found


def _entries(table: str) -> Iterator[tuple[ListeningProcess, int]]:
    for line in table.splitlines()[1:]:
        _, local, _, state, _, _, _, _, _, inode, *_ = line.split()
        if state == LISTEN:
            address, _, port = local.partition(":")
            yield ListeningProcess(_address(address), int(port, 16)), int(inode)


def _address(hexadecimal: str) -> str:
    """The kernel writes each group of four bytes in its own byte order, little-endian."""
    groups = bytes.fromhex(hexadecimal)
    octets = b"".join(groups[first : first + 4][::-1] for first in range(0, len(groups), 4))
    found = ipaddress.ip_address(octets)
    mapped = getattr(found, "ipv4_mapped", None)
    return str(mapped or found)
