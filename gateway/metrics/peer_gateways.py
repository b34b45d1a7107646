"""The gateways behind one port of this machine: each tells the others what it has counted.

The kernel hands a scrape of the port to any one of them, so whoever gets it asks the others first. Each
listens on an abstract unix socket, whose name begins with their address; both ends prove that they hold the
key. A process that ends takes its socket along: nothing is left behind.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import msgspec

from baton.errors import PeerGone, WireError
from baton.gateway.metrics.metrics import Counts
from baton.messages.bounds import schema_hash
from baton.messages.workers import Address
from baton.rpc.auth import GATEWAYS, KeyRing, LinkKeys
from baton.rpc.connection import Connection, Role

SOCKETS: Final = Path("/proc/net/unix")
_SCHEMA: Final = schema_hash(Counts)
TIMEOUT_S: Final = 2.0  # for one of them to tell; it is left out of that answer otherwise
MAX_SIBLINGS: Final = 64
MAX_ANSWERING: Final = 8  # at once; more are hung up on
BACKLOG: Final = 64

logger = logging.getLogger(__name__)


class PeerGateways:
    """`listen`, then ask for `others`; used on one loop. Whoever does not listen, or cannot, has none."""

    def __init__(self, keys: KeyRing, own: Callable[[], Counts]) -> None:
        """keys: a gateway's. own: what this one has counted by now."""
        self._keys = LinkKeys(keys, GATEWAYS)
        self._own = own
        self._prefix = self._name = ""
        self._listener: socket.socket | None = None
        self._answering: set[asyncio.Future[None]] = set()
        # Not the loop's own, whose threads may all be asking while others ask this one.
        self._threads = ThreadPoolExecutor(MAX_ANSWERING, thread_name_prefix="sibling")

    def listen(self, address: Address) -> None:
        """address: the one that all of them share."""
        self._prefix = f"baton-gateway/{address.host}:{address.port}/"
        self._name = self._prefix + secrets.token_hex(8)
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(f"\0{self._name}")
            listener.listen(BACKLOG)
        except OSError as error:
            logger.warning("the gateways of this port cannot ask each other: %s", error)
            listener.close()
            return
        listener.setblocking(False)
        self._listener = listener
        asyncio.get_running_loop().add_reader(listener, self._accept)

    async def others(self) -> list[Counts]:
        """Of those that answer in time, in no order."""
        if self._listener is None:
            return []
        asked = (asyncio.to_thread(self._ask, name) for name in self._names())
        return [counts for counts in await asyncio.gather(*asked) if counts is not None]

    def close(self) -> None:
        """May be called twice."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        self._threads.shutdown(wait=False)

    def _names(self) -> list[str]:
        """As the kernel lists them: the last column, with @ for the first byte."""
        try:
            lines = SOCKETS.read_text(errors="replace").splitlines()
        except OSError:
            return []
        found = {line.rpartition(" @")[2] for line in lines if f" @{self._prefix}" in line}
        return sorted(found - {self._name})[:MAX_SIBLINGS]

    def _ask(self, name: str) -> Counts | None:
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(TIMEOUT_S)
        try:
            sock.connect(f"\0{name}")
        except OSError:  # it has just ended
            sock.close()
            return None
        if not _is_ours(sock):
            sock.close()
            return None
        connection = Connection(sock, self._keys, Role.CONNECTING, schema=_SCHEMA)
        try:
            with contextlib.closing(connection.handshake(TIMEOUT_S)):
                return msgspec.msgpack.decode(connection.recv(TIMEOUT_S), type=Counts)
        except (WireError, PeerGone, TimeoutError, msgspec.MsgspecError) as error:
            logger.warning("a gateway of this port does not tell what it has counted: %s", error)
            return None

    def _accept(self) -> None:
        """What is told is of now, after the other has asked: so no scrape shows less than the one before."""
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        if not _is_ours(sock):
            sock.close()
            return
        if len(self._answering) >= MAX_ANSWERING:
            sock.close()
            return
        told = msgspec.msgpack.encode(self._own())
        telling = asyncio.get_running_loop().run_in_executor(self._threads, self._tell, sock, told)
        self._answering.add(telling)
        telling.add_done_callback(self._answering.discard)

    def _tell(self, sock: socket.socket, told: bytes) -> None:
        connection = Connection(sock, self._keys, Role.ACCEPTING, schema=_SCHEMA)
        with contextlib.closing(connection), contextlib.suppress(WireError, PeerGone, TimeoutError):
            connection.handshake(TIMEOUT_S)
            connection.send(told, timeout_s=TIMEOUT_S)


def _is_ours(sock: socket.socket) -> bool:
    """Whether the other end runs as this user, or as root: another user's process is not even heard."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return uid in (0, os.geteuid())
