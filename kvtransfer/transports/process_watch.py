"""The process at the other end of a unix socket, and the moment when that process is certainly gone.

A process is held by a descriptor, not by its number, which another process may get. The descriptor becomes
readable when the last thread has ended: from then on the process writes nowhere.
"""

import logging
import os
import select
import socket
import struct
import threading
from collections.abc import Callable
from typing import Final

from baton.errors import WireError
from baton.rpc.connection import DroppedPeers

logger = logging.getLogger(__name__)
_SO_PEERPIDFD: Final = 77  # of asm-generic/socket.h, since Linux 6.5
_CREDENTIALS: Final = struct.Struct("iII")  # struct ucred: pid, uid, gid


def peer_process(sock: socket.socket, dropped: DroppedPeers) -> int:
    """Return a descriptor of the process that connected; the caller closes it.

    WireError, counted, for a process of another user; OSError when the process is gone already.
    """
    pid, user, _ = _CREDENTIALS.unpack(
        sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    if user != os.getuid():
        dropped.add("user")
        raise WireError(f"user {user} may not connect to a process of user {os.getuid()}", reason="user")
    try:
        return int(sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD))
    except OSError:
        return os.pidfd_open(pid)


class ProcessWatch:
    """One thread that waits for the deaths of many processes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: dict[int, Callable[[], None]] = {}  # process descriptor -> the call at its death
        self._is_closed = False
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # readable once the watch is closed
        self._poll = select.epoll()
        self._poll.register(self._wakeup, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name="process-watch", daemon=True)
        self._thread.start()

    def add(self, process: int, on_death: Callable[[], None]) -> None:
        """Own the descriptor. `on_death` is called in the watch's thread, and must return at once.

        Nothing is called once the watch is closed. OSError: the process cannot be watched.
        """
        with self._lock:
            if self._is_closed:
                os.close(process)
                return
            try:
                self._poll.register(process, select.EPOLLIN)
            except OSError:
                os.close(process)
                raise
            self._watched[process] = on_death

    def close(self) -> None:
        """Watch no process any more. After the return no call is made. May be called twice."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            os.eventfd_write(self._wakeup, 1)
        self._thread.join()
        for descriptor in (*self._watched, self._wakeup):
            os.close(descriptor)
        self._poll.close()
        self._watched.clear()

    def _run(self) -> None:
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor == self._wakeup:
                    return
                self._report(descriptor)

    def _report(self, process: int) -> None:
        with self._lock:
            on_death = self._watched.pop(process)
            self._poll.unregister(process)  # a forked process may hold the descriptor, too
        os.close(process)
        try:
            on_death()
        except Exception:
            logger.exception("the call at the death of a process has failed")
