"""Listening sockets that greet each newcomer in a thread of its own.

1. A connection is accepted and greeted. The greeting takes as long as its peer likes, up to the deadline of
   the greeting.
2. With more than MAX_NEWCOMERS at once, the one that has waited longest is cut off. A peer that holds the
   cluster's key proves it in milliseconds, so only peers without the key are cut off.
3. A peer that has proved itself may be served in the same thread, as long as `keep` finds room for it.
4. When the process has no file or no thread left, nothing is accepted for a moment and newcomers wait.
"""

import contextlib
import logging
import secrets
import socket
import threading
from collections.abc import Callable
from typing import Final

from baton.errors import BatonError, PeerGone, TransferFailed
from baton.rpc.connection import DroppedPeers

logger = logging.getLogger(__name__)
MAX_NEWCOMERS: Final = 64
PAUSE_S: Final = 0.1
BACKLOG: Final = 128


def listen(host: str, port: int = 0) -> socket.socket:
    """Return a TCP socket that listens at an address of this machine, IPv4 or IPv6.

    port: 0 for any free port.
    """
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, port), family=family, backlog=BACKLOG)


def port_of(address: str) -> int:
    """Return the TCP port that a peer's listener has as its address; TransferFailed for any other address."""
    if not (address.isascii() and address.isdecimal() and 0 < int(address) < 2**16):
        raise TransferFailed(f"a TCP port is a number from 1 to 65535, the peer said {address!r}")
    return int(address)


def listen_on_host(name: str) -> tuple[socket.socket, str]:
    """Return a unix socket that listens at a random abstract address, and the address. No folder lists it."""
    address = f"\0{name}-{secrets.token_hex(16)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(address)
    listener.listen(BACKLOG)
    return listener, address


class Listener:
    """Accepts connections in a thread of its own until `close`."""

    def __init__(
        self,
        listener: socket.socket,
        greet: Callable[[socket.socket], None],
        name: str,
        dropped: DroppedPeers,
    ) -> None:
        """listener: listens; the Listener owns it.

        greet: owns the newcomer's socket. When it raises a BatonError or an OSError, the Listener logs the
        error and closes the socket.
        """
        self._greet = greet
        self._kept: dict[threading.Thread, Callable[[], None]] = {}  # thread -> the call that ends its work
        self._name = name
        self._dropped = dropped
        self._lock = threading.Lock()
        self._newcomers: dict[socket.socket, threading.Thread] = {}  # oldest first
        self._closing = threading.Event()
        self._listener = listener
        self._thread = threading.Thread(target=self._run, name=f"{name}-accept", daemon=True)
        self._thread.start()

    def let_in(self, sock: socket.socket) -> None:
        """Exempt this newcomer from being cut off. `greet` calls it before it gives the connection away."""
        with self._lock:
            self._newcomers.pop(sock, None)

    def keep(self, sock: socket.socket, stop: Callable[[], None], max_kept: int) -> bool:
        """Let this newcomer in, to be served in the calling thread, which has greeted it.

        Returns False when the listener is closed or keeps max_kept peers. stop: called by `close`, from
        another thread; the calling thread then returns from `greet` soon.
        """
        with self._lock:
            self._newcomers.pop(sock, None)
            if self.is_closing or len(self._kept) >= max_kept:
                return False
            self._kept[threading.current_thread()] = stop
            return True

    @property
    def is_closing(self) -> bool:
        """Return True once `close` was called."""
        return self._closing.is_set()

    def close(self) -> None:
        """Cut off the newcomers that were not let in, and stop the peers that are served.

        Returns when the threads of both have ended. May be called twice.
        """
        self._closing.set()
        _shut(self._listener)
        self._thread.join()
        self._listener.close()
        with self._lock:
            newcomers = dict(self._newcomers)
        for sock, thread in newcomers.items():
            _shut(sock)
            thread.join()
        with self._lock:
            kept = dict(self._kept)
        for stop in kept.values():
            stop()
        for thread in kept:
            thread.join()

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if not self._closing.is_set():
                    logger.warning("no connection can be accepted: %s", error)
                    self._closing.wait(PAUSE_S)
                continue
            try:
                self._admit(sock)
            except RuntimeError as error:  # the process may have no more threads
                logger.warning("a connection cannot be greeted: %s", error)
                self._dropped.add("limit")
                sock.close()
                self._closing.wait(PAUSE_S)

    def _admit(self, sock: socket.socket) -> None:
        thread = threading.Thread(target=self._serve, args=(sock,), name=f"{self._name}-answer", daemon=True)
        with self._lock:
            if len(self._newcomers) >= MAX_NEWCOMERS:
                oldest = next(iter(self._newcomers))
                del self._newcomers[oldest]
                self._dropped.add("limit")
                _shut(oldest)
            thread.start()
            self._newcomers[sock] = thread

    def _serve(self, sock: socket.socket) -> None:
        try:
            self._greet(sock)
        except (BatonError, OSError) as error:
            log_end(f"a connection to the {self._name} listener ended", error)
            sock.close()
        finally:
            with self._lock:
                self._newcomers.pop(sock, None)
                self._kept.pop(threading.current_thread(), None)


def _shut(sock: socket.socket) -> None:
    """Shut the socket down; calls that wait for the socket return."""
    with contextlib.suppress(OSError):  # closed already
        sock.shutdown(socket.SHUT_RDWR)


def log_end(what: str, error: Exception) -> None:
    """Log the end of a peer's connection: as a warning, unless the peer was only lost."""
    level = logging.INFO if isinstance(error, PeerGone | OSError) else logging.WARNING
    logger.log(level, "%s: %s", what, error)
