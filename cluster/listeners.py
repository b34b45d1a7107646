"""Who listens on this machine, as the kernel says."""

import ipaddress
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

LISTEN: Final = "0A"  # the state, in /proc/net/tcp
TABLES: Final = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))


class Listener(NamedTuple):
    host: str
    port: int


def listeners() -> list[Listener]:
    """Of TCP, in this network namespace; none where there is no /proc."""
    return sorted({found for table in TABLES if table.exists() for found in _listeners(table.read_text())})


def _listeners(table: str) -> Iterator[Listener]:
    for line in table.splitlines()[1:]:
        _, local, _, state, *_ = line.split()
        if state == LISTEN:
            address, _, port = local.partition(":")
            yield Listener(_address(address), int(port, 16))


def _address(hexadecimal: str) -> str:
    """The kernel writes each group of four bytes in its own byte order, little-endian."""
    groups = bytes.fromhex(hexadecimal)
    octets = b"".join(groups[first : first + 4][::-1] for first in range(0, len(groups), 4))
    found = ipaddress.ip_address(octets)
    mapped = getattr(found, "ipv4_mapped", None)
    return str(mapped or found)
