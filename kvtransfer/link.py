"""One authenticated connection between two endpoints, over which they talk about transfers.

The life of a link:

1. Both ends prove that they hold the cluster key (wire.py), then each says Hello and, if the two are
   compatible, Doors. A mismatch is refused at both ends, with the reason.
2. A thread reads messages. What it learns it hands on as a call for the endpoint's own thread to make; while
   MAX_UNHEARD_BYTES wait for that it reads no more. What is sent never waits for the peer (outbox.py).
3. A peer that breaks a rule, closes or dies ends the link. `on_lost` is called once, after everything that
   was received before. Nothing else ends with it: other peers' links go on.
"""

import contextlib
import logging
import socket
import threading
from collections.abc import Callable
from functools import partial
from typing import Final, TypeAlias

from baton.clock import Clock
from baton.errors import BatonError, PeerGone, TransferFailed, WireError
from baton.kvtransfer.compatibility import check
from baton.kvtransfer.messages import AnyMessage, Doors, Hello, decode, encode
from baton.outbox import Outbox
from baton.wire import HANDSHAKE_TIMEOUT_S, MAX_BODY_BYTES, Connection, DroppedPeers, Role

logger = logging.getLogger(__name__)

Call: TypeAlias = Callable[[], None]
Post: TypeAlias = Callable[[Call], None]  # hands a call to the endpoint's thread, from any thread


MAX_UNHEARD_BYTES: Final = 2 * MAX_BODY_BYTES  # room for the largest message, and for the one before it
OnMessage: TypeAlias = Callable[["Link", AnyMessage], None]


class Link:
    """Made by `dial` or `answer`; `start` begins to read."""

    def __init__(self, connection: Connection, host: str, hello: Hello, doors: Doors) -> None:
        self.host = host  # the peer's address, as the network has it
        self.hello = hello
        self.doors = doors
        self.is_lost = False
        self._connection = connection
        self._outbox = Outbox(connection)
        self._heard = threading.Condition()
        self._num_unheard_bytes = 0  # of messages whose calls are still to be made
        self._thread: threading.Thread | None = None

    def start(self, post: Post, on_message: OnMessage, on_lost: Call) -> None:
        """The calls are posted, never made by the reading thread."""
        self._thread = threading.Thread(
            target=self._read, args=(post, on_message, on_lost), name="kv-link", daemon=True
        )
        self._thread.start()

    def send(self, message: AnyMessage) -> None:
        """A peer that is gone gets nothing: the reading thread finds out and `on_lost` tells."""
        with contextlib.suppress(PeerGone, WireError):
            self._outbox.send(encode(message))

    def drop(self, error: WireError) -> None:
        """End the link to a peer that broke a rule, and count it."""
        logger.warning("a link was dropped: %s", error)
        self._connection.drop(error)

    def close(self) -> None:
        self._connection.close()
        with self._heard:
            self._heard.notify()
        self._outbox.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _read(self, post: Post, on_message: OnMessage, on_lost: Call) -> None:
        try:
            while True:
                body = self._connection.recv()
                message = decode(body)
                self._make_room(len(body))
                post(partial(self._hear, on_message, message, len(body)))
        except WireError as error:
            self.drop(error)
        except PeerGone:
            logger.info("a link has ended")
        finally:
            self._connection.close()
            post(on_lost)

    def _make_room(self, num_bytes: int) -> None:
        def has_room() -> bool:
            return self._num_unheard_bytes + num_bytes <= MAX_UNHEARD_BYTES or self._connection.is_closed

        with self._heard:
            self._heard.wait_for(has_room)
            self._num_unheard_bytes += num_bytes

    def _hear(self, on_message: OnMessage, message: AnyMessage, num_bytes: int) -> None:
        with self._heard:
            self._num_unheard_bytes -= num_bytes
            self._heard.notify()
        on_message(self, message)


def dial(
    address: tuple[str, int], key: bytes, hello: Hello, doors: Doors, clock: Clock, dropped: DroppedPeers
) -> Link:
    """TransferFailed when the peer can't be reached, or must not be."""
    host, port = address
    try:
        sock = socket.create_connection(address, HANDSHAKE_TIMEOUT_S)
    except OSError as error:
        raise TransferFailed(f"{host}:{port} cannot be reached: {error}") from error
    connection = Connection(sock, key, Role.CONNECTING, dropped=dropped, clock=clock)
    try:
        return _greet(connection.handshake(), host, hello, doors)
    except (BatonError, TimeoutError) as error:
        connection.close()
        raise TransferFailed(f"{host}:{port}: {error}") from error


def answer(
    sock: socket.socket, key: bytes, hello: Hello, doors: Doors, clock: Clock, dropped: DroppedPeers
) -> Link:
    """The other end of `dial`. Raises BatonError or TimeoutError, and the socket is closed then."""
    connection = Connection(sock, key, Role.ACCEPTING, dropped=dropped, clock=clock)
    try:
        host = sock.getpeername()[0]
        return _greet(connection.handshake(), host, hello, doors)
    except BaseException:
        connection.close()
        raise


def _greet(connection: Connection, host: str, hello: Hello, doors: Doors) -> Link:
    connection.send(encode(hello))
    theirs = decode(connection.recv(HANDSHAKE_TIMEOUT_S))
    if not isinstance(theirs, Hello):
        raise connection.drop(WireError(f"{type(theirs).__name__} came before Hello", reason="order"))
    complaint = check(hello, theirs)
    if complaint is not None:
        raise connection.drop(WireError(complaint, reason="incompatible"))
    connection.send(encode(doors))
    their_doors = decode(connection.recv(HANDSHAKE_TIMEOUT_S))
    if not isinstance(their_doors, Doors):
        raise connection.drop(WireError(f"{type(their_doors).__name__} came before Doors", reason="order"))
    return Link(connection, host, theirs, their_doors)
