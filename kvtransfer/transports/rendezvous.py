"""Where the two ranks of a pair tell each other how to connect: torch's store, on a connection of their own.

1. The destination's `RendezvousServer` opens a port for each `Rendezvous`, whose secret the two alone know.
2. The source connects; both prove that they hold the secret, as at every connection of ours
   (baton/rpc/connection.py). Whoever can't is dropped, and of too many strangers the oldest makes way.
3. Each end has a `PairStore` on the connection: what one sets travels in sealed frames, and the other reads
   it. There is no server that keeps it, so nobody else can list, read or overwrite anything.
4. The port is closed once the source has come, the connection once the two have joined.
"""

import contextlib
import hmac
import logging
import socket
import threading
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import timedelta
from typing import Annotated, Final

import msgspec
from msgspec import Meta
from torch._C._distributed_c10d import Store

from baton.errors import BatonError, TransferFailed
from baton.kvtransfer.transports.listener import Listener, decode_said
from baton.rpc.connection import Connection, DroppedPeers, Role

logger = logging.getLogger(__name__)

MAX_ENTRIES: Final = 256  # of a peer; gloo sets one, NCCL one more


class Rendezvous(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where one source rank meets one destination rank, once. To be kept from everybody else."""

    host: str
    port: int
    secret: bytes

    @property
    def connection_key(self) -> bytes:
        """Held by both ends of the connection on which they meet."""
        return hmac.digest(self.secret, b"baton pair rendezvous 1", "sha256")

    @property
    def record_key(self) -> bytes:
        """For the seals of the pair's records."""
        return hmac.digest(self.secret, b"baton pair records 1", "sha256")


class _Entry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    key: Annotated[str, Meta(max_length=256)]
    value: Annotated[bytes, Meta(max_length=4096)]


class PairStore(Store):
    """What torch asks of a store to make a group of two, on a connection between them.

    torch sees RuntimeError for a key that does not come within the timeout or before the connection ends.
    """

    def __init__(self, connection: Connection, timeout_s: float) -> None:
        super().__init__()
        self._connection = connection
        self._timeout_s = timeout_s
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._is_over = False
        self._reader = threading.Thread(target=self._read, name="pair-store", daemon=True)
        self._reader.start()

    def set(self, key: str, value: str | bytes) -> None:
        content = value.encode() if isinstance(value, str) else bytes(value)
        with self._changed:
            self._values[key] = content
        try:
            self._connection.send(msgspec.msgpack.encode(_Entry(key, content)))
        except BatonError as error:
            raise RuntimeError(f"the peer is gone: {error}") from error

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        timeout_s = self._timeout_s if timeout is None else min(self._timeout_s, timeout.total_seconds())
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_over or self.check(keys), timeout_s):
                raise RuntimeError(f"the peer did not say {keys} within {timeout_s:g} s")
            if not self.check(keys):
                raise RuntimeError("the peer is gone")

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def add(self, key: str, amount: int) -> int:
        raise RuntimeError("a pair's store counts nothing")

    def close(self) -> None:
        """What was said can still be read; nothing more is heard."""
        self._connection.close()
        self._reader.join()

    def _read(self) -> None:
        try:
            for _ in range(MAX_ENTRIES):
                entry = decode_said(self._connection.recv(), _Entry, "entry")
                with self._changed:
                    self._values[entry.key] = entry.value
                    self._changed.notify_all()
        except (BatonError, TimeoutError) as error:
            logger.debug("a pair's connection ended: %s", error)
        finally:
            with self._changed:
                self._is_over = True
                self._changed.notify_all()


class _Port:
    """Of one meeting: whoever proves first that it holds the secret is the source."""

    def __init__(self, host: str, secret: bytes, timeout_s: float, dropped: DroppedPeers) -> None:
        self._timeout_s = timeout_s
        self._dropped = dropped
        self._source: Future[Connection] = Future()
        self._is_taken = False  # by whoever waited for it
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, 0), family=family, backlog=128)
        self.meeting = Rendezvous(host=host, port=listener.getsockname()[1], secret=secret)
        self._acceptor = Listener(listener, self._greet, "pair", dropped)

    def wait_for_source(self) -> Connection:
        """TransferFailed when none comes in time, or the port is closed meanwhile."""
        try:
            connection = self._source.result(self._timeout_s)
        except FutureTimeout:
            raise TransferFailed("no source came to the meeting") from None
        self._is_taken = True
        return connection

    def close(self) -> None:
        with contextlib.suppress(InvalidStateError):
            self._source.set_exception(TransferFailed("the meeting place was closed"))
        self._acceptor.close()
        if not self._is_taken and self._source.exception() is None:
            self._source.result().close()

    def _greet(self, sock: socket.socket) -> None:
        connection = Connection(sock, self.meeting.connection_key, Role.ACCEPTING, dropped=self._dropped)
        try:
            connection.handshake(self._timeout_s)
            self._acceptor.let_in(sock)
            self._source.set_result(connection)
        except (BatonError, TimeoutError, OSError, InvalidStateError) as error:
            logger.info("somebody did not come to a meeting: %s", error)
            connection.close()


class RendezvousServer:
    """Of one destination process, at `host`; `close` ends every wait."""

    def __init__(self, host: str, timeout_s: float, dropped: DroppedPeers | None = None) -> None:
        self._host = host
        self._timeout_s = timeout_s
        self._dropped = dropped or DroppedPeers()
        self._lock = threading.Lock()
        self._ports: dict[Rendezvous, _Port] = {}  # to which no source has come yet
        self._is_closed = False

    def meeting(self, secret: bytes) -> Rendezvous:
        """TransferFailed when no port can be had."""
        try:
            port = _Port(self._host, secret, self._timeout_s, self._dropped)
        except OSError as error:
            raise TransferFailed(f"no port for a meeting: {error}") from error
        with self._lock:
            self._ports[port.meeting] = port
        if self._is_closed:
            self.close()
        return port.meeting

    def wait_for_source(self, meeting: Rendezvous) -> PairStore:
        """TransferFailed when none comes in time. To be closed by the caller."""
        with self._lock:
            port = self._ports.get(meeting)
        if port is None:
            raise TransferFailed("the meeting place was closed")
        try:
            return PairStore(port.wait_for_source(), self._timeout_s)
        finally:
            with self._lock:
                self._ports.pop(meeting, None)
            port.close()

    def cancel(self, meeting: Rendezvous) -> None:
        """Close the port of a meeting that nothing will wait for."""
        with self._lock:
            port = self._ports.pop(meeting, None)
        if port is not None:
            port.close()

    def close(self) -> None:
        self._is_closed = True
        with self._lock:
            ports = list(self._ports.values())
            self._ports.clear()
        for port in ports:
            port.close()


def reach(meeting: Rendezvous, timeout_s: float, name: str) -> PairStore:
    """The source's end. TransferFailed when the destination can't be reached, or holds another secret.

    name: of the transport that wants it, for errors.
    """
    where = f"{name} meeting place {meeting.host}:{meeting.port}"
    try:
        sock = socket.create_connection((meeting.host, meeting.port), timeout_s)
    except OSError as error:
        raise TransferFailed(f"{where}: {error}") from error
    connection = Connection(sock, meeting.connection_key, Role.CONNECTING)
    try:
        connection.handshake(timeout_s)
    except (BatonError, TimeoutError, OSError) as error:
        connection.close()
        raise TransferFailed(f"{where}: {error}") from error
    return PairStore(connection, timeout_s)
