"""Who knocks at a listening socket: each is greeted in a thread of its own, and nobody keeps another out.

1. A connection is accepted and greeted, which takes as long as its peer likes, up to the greeting's deadline.
2. More than MAX_NEWCOMERS at once: the one that has waited longest makes way. Who holds the cluster's key has
   proved it in milliseconds; who says nothing gets no thread for long.
3. No file or no thread is left: nobody is accepted for a moment, those who knock wait.
"""

import contextlib
import logging
import socket
import threading
from collections.abc import Callable
from typing import Final

from baton.wire import DroppedPeers

logger = logging.getLogger(__name__)

MAX_NEWCOMERS: Final = 64
PAUSE_S: Final = 0.1


class Acceptor:
    def __init__(
        self,
        listener: socket.socket,
        greet: Callable[[socket.socket], None],
        name: str,
        dropped: DroppedPeers,
    ) -> None:
        """listener: listens, and is taken over. greet: takes a newcomer's socket over, raises nothing."""
        self._greet = greet
        self._name = name
        self._dropped = dropped
        self._lock = threading.Lock()
        self._newcomers: dict[socket.socket, threading.Thread] = {}  # oldest first
        self._closing = threading.Event()
        self._listener = listener
        self._thread = threading.Thread(target=self._run, name=f"{name}-accept", daemon=True)
        self._thread.start()

    def let_in(self, sock: socket.socket) -> None:
        """For `greet`, before it tells anybody else of the newcomer: from now on nothing here cuts it off."""
        with self._lock:
            self._newcomers.pop(sock, None)

    def close(self) -> None:
        """Cut off whoever is being greeted and was not let in; returns when these greetings have ended."""
        self._closing.set()
        _shut(self._listener)
        self._thread.join()
        self._listener.close()
        with self._lock:
            newcomers = dict(self._newcomers)
        for sock, thread in newcomers.items():
            _shut(sock)
            thread.join()

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if not self._closing.is_set():
                    logger.warning("nobody can be accepted: %s", error)
                    self._closing.wait(PAUSE_S)
                continue
            try:
                self._admit(sock)
            except RuntimeError as error:  # no thread is to be had
                logger.warning("nobody can be greeted: %s", error)
                self._drop(sock)
                self._closing.wait(PAUSE_S)

    def _admit(self, sock: socket.socket) -> None:
        thread = threading.Thread(target=self._serve, args=(sock,), name=f"{self._name}-answer", daemon=True)
        with self._lock:
            if len(self._newcomers) >= MAX_NEWCOMERS:
                oldest = next(iter(self._newcomers))
                del self._newcomers[oldest]
                self._dropped.add("crowd")
                _shut(oldest)
            thread.start()
            self._newcomers[sock] = thread

    def _serve(self, sock: socket.socket) -> None:
        try:
            self._greet(sock)
        finally:
            with self._lock:
                self._newcomers.pop(sock, None)

    def _drop(self, sock: socket.socket) -> None:
        self._dropped.add("crowd")
        sock.close()


def _shut(sock: socket.socket) -> None:
    """Whoever waits for it finds its peer gone."""
    with contextlib.suppress(OSError):  # it is gone already
        sock.shutdown(socket.SHUT_RDWR)
