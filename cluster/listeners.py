"""Who listens on this machine, as the kernel says."""

import contextlib
import ipaddress
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

LISTEN: Final = "0A"  # the state, in /proc/net/tcp
SOCKET: Final = "socket:["  # begins what a descriptor of one links to
TABLES: Final = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))


class Listener(NamedTuple):
    host: str
    port: int


def listeners() -> list[Listener]:
    """Of TCP, in this network namespace; none where there is no /proc."""
    return sorted({found for table in TABLES if table.exists() for found in _listeners(table.read_text())})


def processes() -> dict[Listener, int]:
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


def _listeners(table: str) -> Iterator[Listener]:
    for found, _ in _entries(table):
        yield found


def _entries(table: str) -> Iterator[tuple[Listener, int]]:
    for line in table.splitlines()[1:]:
        _, local, _, state, _, _, _, _, _, inode, *_ = line.split()
        if state == LISTEN:
            address, _, port = local.partition(":")
            yield Listener(_address(address), int(port, 16)), int(inode)


def _address(hexadecimal: str) -> str:
    """The kernel writes each group of four bytes in its own byte order, little-endian."""
    groups = bytes.fromhex(hexadecimal)
    octets = b"".join(groups[first : first + 4][::-1] for first in range(0, len(groups), 4))
    found = ipaddress.ip_address(octets)
    mapped = getattr(found, "ipv4_mapped", None)
    return str(mapped or found)
