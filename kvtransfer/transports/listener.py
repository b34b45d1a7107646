"""Who knocks at a listening socket: each is greeted in a thread of its own, and nobody keeps another out.

1. A connection is accepted and greeted, which takes as long as its peer likes, up to the greeting's deadline.
2. More than MAX_NEWCOMERS at once: the one that has waited longest makes way. Who holds the cluster's key has
   proved it in milliseconds; who says nothing gets no thread for long.
3. No file or no thread is left: nobody is accepted for a moment, those who knock wait.
"""

import contextlib
import logging
import os
import select
import socket
import struct
import threading
from collections.abc import Callable
from typing import Final, TypeVar

import msgspec

from baton.errors import WireError
from baton.rpc.connection import DroppedPeers

logger = logging.getLogger(__name__)
MAX_NEWCOMERS: Final = 64
PAUSE_S: Final = 0.1


class Listener:
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


# What is said at the doors of a pool: one small message of a known type each way.

Said = TypeVar("Said", bound=msgspec.Struct)


def decode_said(body: bytes, kind: type[Said], reason: str) -> Said:
    """WireError, for that reason, for anything that is no such message in bounds."""
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:  # ValueError: a key that is no text
        raise WireError(f"no {kind.__name__}: {error}", reason=reason) from None


# Who is on the other end of a unix socket, and the moment that process is gone for certain.
#
# A process is held by a descriptor, not by its number, which another process may get. The descriptor becomes
# readable when the last thread has ended: from then on the process writes nowhere.

_SO_PEERPIDFD: Final = 77  # of asm-generic/socket.h, since Linux 6.5
_CREDENTIALS: Final = struct.Struct("iII")  # struct ucred: pid, uid, gid


def peer_process(sock: socket.socket) -> int:
    """A descriptor of the process that connected; the caller closes it. OSError when it is gone already."""
    try:
        return int(sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD))
    except OSError:
        pid, _, _ = _CREDENTIALS.unpack(
            sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        return os.pidfd_open(pid)


def peer_user(sock: socket.socket) -> int:
    _, user, _ = _CREDENTIALS.unpack(
        sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return int(user)


class ProcessWatch:
    """One thread that waits for the deaths of many processes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: dict[int, Callable[[], None]] = {}  # process descriptor -> what to do at its death
        self._is_closed = False
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="process-watch", daemon=True)
        self._thread.start()

    def add(self, process: int, on_death: Callable[[], None]) -> None:
        """Takes the descriptor over. `on_death` is called in the watch's thread, and must return at once.

        Nothing is called once the watch is closed.
        """
        with self._lock:
            if self._is_closed:
                os.close(process)
                return
            self._watched[process] = on_death
            os.eventfd_write(self._wakeup, 1)

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            os.eventfd_write(self._wakeup, 1)
        self._thread.join()
        for descriptor in (*self._watched, self._wakeup):
            os.close(descriptor)
        self._watched.clear()

    def _run(self) -> None:
        while True:
            poll = select.poll()
            with self._lock:
                if self._is_closed:
                    return
                for descriptor in (*self._watched, self._wakeup):
                    poll.register(descriptor, select.POLLIN)
            ready = [descriptor for descriptor, _ in poll.poll()]
            if self._wakeup in ready:
                os.eventfd_read(self._wakeup)
                ready.remove(self._wakeup)
            for descriptor in ready:
                self._report(descriptor)

    def _report(self, process: int) -> None:
        with self._lock:
            on_death = self._watched.pop(process)
        os.close(process)
        try:
            on_death()
        except Exception:
            logger.exception("a process has died, and what was to follow failed")
