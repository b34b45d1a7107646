"""What one end of a connection has said and its peer has not taken yet: whoever speaks never waits.

1. `send` gives the kernel what it takes at once. Mostly that is the whole frame.
2. The rest is kept, and a thread sends it as the peer takes it; it ends with the last byte.
3. A peer that lets too much wait, or takes nothing for too long, is dropped.
"""

import contextlib
import threading
from collections import deque
from typing import Final

from baton.errors import PeerGone, WireError
from baton.wire import FRAME_TIMEOUT_S, MAX_CONTROL_BYTES, Connection

MAX_UNSENT_BYTES: Final = 4 * MAX_CONTROL_BYTES


class Outbox:
    """Of a connection after its handshake, over which nothing else is sent."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._unsent: deque[memoryview] = deque()
        self._num_bytes = 0
        self._thread: threading.Thread | None = None  # there is one while something is unsent

    def send(self, body: bytes) -> None:
        """Returns at once. PeerGone, or WireError where the peer had to be dropped."""
        with self._lock:
            frame = memoryview(self._connection.frame(body))
            if self._num_bytes + len(frame) > MAX_UNSENT_BYTES:
                message = f"the peer has {self._num_bytes} bytes to take, no more is kept for it"
                raise self._connection.drop(WireError(message, reason="slow"))
            self._unsent.append(frame)
            self._num_bytes += len(frame)
            if self._thread is None:
                self._push()
                if self._unsent:
                    self._thread = self._started()

    def close(self) -> None:
        """After the connection: returns when the thread has ended."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _started(self) -> threading.Thread:
        thread = threading.Thread(target=self._run, name="wire-outbox", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the process may have no more threads
            message = f"what the peer has not taken cannot be kept for it: {error}"
            raise self._connection.drop(WireError(message, reason="slow")) from error
        return thread

    def _run(self) -> None:
        with contextlib.suppress(PeerGone, WireError):
            while self._connection.wait_for_room(FRAME_TIMEOUT_S):
                with self._lock:
                    self._push()
                    if not self._unsent:
                        self._thread = None
                        return

    def _push(self) -> None:
        while self._unsent:
            frame = self._unsent[0]
            num_sent = self._connection.write_some(frame)
            self._num_bytes -= num_sent
            if num_sent < len(frame):
                self._unsent[0] = frame[num_sent:]
                return
            self._unsent.popleft()
