"""The gateways behind one port of this machine: each tells the others its counts.

The kernel hands a scrape of the port to any gateway, and that gateway asks the others first. Each gateway
listens on an abstract unix socket; its name begins with the shared address. Both ends prove that they hold
the key. The socket ends with its process.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import msgspec

from baton.errors import PeerGone, WireError
from baton.gateway.metrics.metrics import Metrics
from baton.messages.bounds import schema_hash
from baton.messages.workers import Address
from baton.rpc.auth import GATEWAYS, KeyRing, LinkKeys, Role
from baton.rpc.connection import Connection

SOCKETS: Final = Path("/proc/net/unix")
_SCHEMA: Final = schema_hash(Metrics)
TIMEOUT_S: Final = 2.0  # for a gateway to answer; a slower one is left out of the scrape
MAX_PEERS: Final = 64
MAX_ANSWERING: Final = 8  # connections at once; the others are closed
BACKLOG: Final = 64

logger = logging.getLogger(__name__)


class PeerGateways:
    """`listen`, then ask for `others`, on one event loop. A gateway that does not listen has no others."""

    def __init__(self, keys: KeyRing, own: Metrics) -> None:
        """keys: a gateway's. own: the counts of this gateway."""
        self._keys = LinkKeys(keys, GATEWAYS)
        self._own = own
        self._prefix = self._name = ""
        self._listener: socket.socket | None = None
        self._answering: set[asyncio.Future[None]] = set()
        # Not the loop's default pool: all its threads may wait in `_ask` while peers ask this gateway.
        self._threads = ThreadPoolExecutor(MAX_ANSWERING, thread_name_prefix="peer-gateway")

    def listen(self, address: Address) -> None:
        """Listen for the others. address: the address that all of them share."""
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

    async def others(self) -> list[Metrics]:
        """Return the counts of the gateways that answer in time, in no order."""
        if self._listener is None:
            return []
        asked = (asyncio.to_thread(self._ask, name) for name in self._names())
        return [counts for counts in await asyncio.gather(*asked) if counts is not None]

    def close(self) -> None:
        """Stop listening. May be called twice."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        self._threads.shutdown(wait=False)

    def _names(self) -> list[str]:
        """Return the names in the kernel's list: the last column, with @ for the first byte."""
        try:
            lines = SOCKETS.read_text(errors="replace").splitlines()
        except OSError:
            return []
        found = {line.rpartition(" @")[2] for line in lines if f" @{self._prefix}" in line}
        return sorted(found - {self._name})[:MAX_PEERS]

    def _ask(self, name: str) -> Metrics | None:
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
                return msgspec.msgpack.decode(connection.recv(TIMEOUT_S), type=Metrics)
        except (WireError, PeerGone, TimeoutError, msgspec.MsgspecError) as error:
            logger.warning("a gateway of this port does not tell its counts: %s", error)
            return None

    def _accept(self) -> None:
        """Answer with the counts at the time of the question: no scrape shows less than the one before."""
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        if not _is_ours(sock) or len(self._answering) >= MAX_ANSWERING:
            sock.close()
            return
        told = msgspec.msgpack.encode(self._own)
        telling = asyncio.get_running_loop().run_in_executor(self._threads, self._tell, sock, told)
        self._answering.add(telling)
        telling.add_done_callback(self._answering.discard)

    def _tell(self, sock: socket.socket, told: bytes) -> None:
        connection = Connection(sock, self._keys, Role.ACCEPTING, schema=_SCHEMA)
        with contextlib.closing(connection), contextlib.suppress(WireError, PeerGone, TimeoutError):
            connection.handshake(TIMEOUT_S)
            connection.send(told, timeout_s=TIMEOUT_S)


def _is_ours(sock: socket.socket) -> bool:
    """Return whether the other end runs as this user or as root; other users are refused."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return uid in (0, os.geteuid())
