"""A connection as a stream of messages, which the owner's thread handles.

1. A thread reads messages and posts each as a call for the owner's thread to make. While MAX_UNHEARD_BYTES
   wait for the owner, the thread reads no more. Sending never waits for the peer (baton/rpc/connection.py).
2. With a link timeout both ends ping, from the reading thread, and drop a peer that is silent for so long
   (baton/rpc/liveness.py). While too much waits for the owner, nothing is read and no peer is dropped.
3. A peer that breaks a rule, closes or dies ends the stream. `on_lost` is called once, after everything that
   was received before.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Final, Generic, TypeAlias, TypeVar

from baton.errors import PeerGone, WireError
from baton.messages.bounds import MAX_BODY_BYTES
from baton.rpc.connection import Connection, Outbox
from baton.rpc.liveness import PING_S, LinkLife

logger = logging.getLogger(__name__)

Call: TypeAlias = Callable[[], None]
Post: TypeAlias = Callable[[Call], None]  # hands a call to the owner's thread, from any thread
Heard = TypeVar("Heard")

MAX_UNHEARD_BYTES: Final = 2 * MAX_BODY_BYTES  # room for the largest message, and for the one before it


class MessageStream(Generic[Heard]):
    """`start` begins to read."""

    def __init__(
        self,
        connection: Connection,
        decode: Callable[[bytes], Heard],
        name: str,
        *,
        link_timeout_s: float | None = None,
    ) -> None:
        """connection: after its handshake. decode: raises WireError. name: of the thread. link_timeout_s: the
        peer pings too; None: over a unix socket a process does not vanish without its end.
        """
        self._connection = connection
        self._decode = decode
        self._name = name
        self._outbox = Outbox(connection)
        self._life = None if link_timeout_s is None else LinkLife(link_timeout_s, time.monotonic())
        self._heard = threading.Condition()
        self._num_unheard_bytes = 0  # of messages whose calls are still to be made
        self._thread: threading.Thread | None = None

    def start(self, post: Post, on_message: Callable[[Heard], None], on_lost: Call) -> None:
        """The calls are posted, never made by the reading thread. RuntimeError: no thread can be had."""
        thread = threading.Thread(
            target=self._read, args=(post, on_message, on_lost), name=self._name, daemon=True
        )
        thread.start()
        self._thread = thread

    def send(self, body: bytes) -> None:
        """A peer that is gone gets nothing: the reading thread finds out and `on_lost` tells."""
        with contextlib.suppress(PeerGone, WireError):
            self._outbox.send(body)

    def drop(self, error: WireError) -> None:
        """End the stream of a peer that broke a rule, and count it."""
        logger.warning("%s was dropped: %s", self._name, error)
        self._connection.drop(error)

    def close(self) -> None:
        """Returns when no thread is left; from the owner's thread or another."""
        self._connection.close()
        with self._heard:
            self._heard.notify()
        self._outbox.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _read(self, post: Post, on_message: Callable[[Heard], None], on_lost: Call) -> None:
        try:
            while True:
                body = self._next_body()
                message = self._decode(body)
                self._make_room(len(body))
                post(partial(self._hear, on_message, message, len(body)))
        except WireError as error:
            self.drop(error)
        except PeerGone:
            logger.info("%s has ended", self._name)
        finally:
            self._connection.close()
            post(on_lost)

    def _make_room(self, num_bytes: int) -> None:
        def has_room() -> bool:
            return self._num_unheard_bytes + num_bytes <= MAX_UNHEARD_BYTES or self._connection.is_closed

        with self._heard:
            while not self._heard.wait_for(has_room, None if self._life is None else PING_S):
                self._keep_alive(has_heard=True)
            self._num_unheard_bytes += num_bytes

    def _next_body(self) -> bytes:
        """The next that is no ping."""
        if self._life is None:
            return self._connection.recv()
        while True:
            try:
                body = self._connection.recv(PING_S)
            except TimeoutError:
                self._keep_alive(has_heard=False)
                continue
            self._keep_alive(has_heard=True)
            if not self._life.take_ping(body):
                return body

    def _keep_alive(self, *, has_heard: bool) -> None:
        """Ping the peer when that is due; WireError when it is silent."""
        assert self._life is not None
        now_s = time.monotonic()
        if has_heard:
            self._life.heard(now_s)
        ping = self._life.tick(now_s)
        if ping is not None:
            self.send(ping)

    def _hear(self, on_message: Callable[[Heard], None], message: Heard, num_bytes: int) -> None:
        with self._heard:
            self._num_unheard_bytes -= num_bytes
            self._heard.notify()
        on_message(message)
