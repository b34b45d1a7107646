"""One authenticated connection between two endpoints, over which they talk about transfers.

The life of a link:

1. Both ends prove that they hold the cluster key and are of one build (wire.py), then each says Hello and,
   if the two are compatible, Doors. A mismatch is refused at both ends, with the reason.
2. Messages are heard as of any message_stream.py: nobody waits for the peer.
3. A peer that breaks a rule, closes or dies ends the link. `on_lost` is called once, after everything that
   was received before. Nothing else ends with it: other peers' links go on.
"""

import hmac
import socket
from collections.abc import Callable
from functools import partial
from typing import Final, TypeAlias

from baton.challenge import LinkSecret
from baton.clock import Clock
from baton.errors import BatonError, TransferFailed, WireError
from baton.kvtransfer.compatibility import check, check_doors
from baton.kvtransfer.cuda_ipc import CudaOffer
from baton.kvtransfer.group_door import Knock, Welcome
from baton.kvtransfer.message_stream import Call, MessageStream, Post
from baton.kvtransfer.messages import AnyMessage, Doors, Hello, decode, encode
from baton.kvtransfer.shm_door import PoolOffer
from baton.link_life import LINK_TIMEOUT_S
from baton.schema import schema_hash
from baton.wire import HANDSHAKE_TIMEOUT_S, Connection, DroppedPeers, Role

# Of all that two replicas say to each other, at the doors of their pools too, which only a link leads to.
KV_SCHEMA: Final = schema_hash(AnyMessage, CudaOffer, Knock, PoolOffer, Welcome)

OnMessage: TypeAlias = Callable[["Link", AnyMessage], None]


class Link:
    """Made by `dial` or `answer`; `start` begins to read."""

    def __init__(
        self, connection: Connection, host: str, hello: Hello, doors: Doors, link_timeout_s: float
    ) -> None:
        self.host = host  # the peer's address, as the network has it
        self.hello = hello
        self.doors = doors
        self.number = 0  # among the links of our endpoint, which gives it
        self.is_lost = False
        self._digest_root = hmac.digest(connection.session_key, b"baton kv digests 1", "sha256")
        self._stream = MessageStream(connection, decode, "kv-link", link_timeout_s=link_timeout_s)

    def start(self, post: Post, on_message: OnMessage, on_lost: Call) -> None:
        """The calls are posted, never made by the reading thread."""
        self._stream.start(post, partial(on_message, self), on_lost)

    def send(self, message: AnyMessage) -> None:
        """A peer that is gone gets nothing: `on_lost` tells."""
        self._stream.send(encode(message))

    def digest_key(self, transfer: bytes) -> bytes:
        """What both ends of this link know, and nobody else, for the digests of a transfer (digests.py)."""
        return hmac.digest(self._digest_root, transfer, "sha256")

    def drop(self, error: WireError) -> None:
        """End the link to a peer that broke a rule, and count it."""
        self._stream.drop(error)

    def close(self) -> None:
        self._stream.close()


def dial(
    address: tuple[str, int],
    key: LinkSecret,
    hello: Hello,
    doors: Doors,
    clock: Clock,
    dropped: DroppedPeers,
    link_timeout_s: float = LINK_TIMEOUT_S,
) -> Link:
    """TransferFailed when the peer can't be reached, or must not be."""
    host, port = address
    try:
        sock = socket.create_connection(address, HANDSHAKE_TIMEOUT_S)
    except OSError as error:
        raise TransferFailed(f"{host}:{port} cannot be reached: {error}") from error
    connection = Connection(
        sock,
        key,
        Role.CONNECTING,
        dropped=dropped,
        clock=clock,
        link_timeout_s=link_timeout_s,
        schema=KV_SCHEMA,
    )
    try:
        return _greet(connection.handshake(), host, hello, doors, link_timeout_s)
    except (BatonError, TimeoutError) as error:
        connection.close()
        raise TransferFailed(f"{host}:{port}: {error}") from error


def answer(
    sock: socket.socket,
    key: LinkSecret,
    hello: Hello,
    doors: Doors,
    clock: Clock,
    dropped: DroppedPeers,
    link_timeout_s: float = LINK_TIMEOUT_S,
) -> Link:
    """The other end of `dial`. Raises BatonError or TimeoutError, and the socket is closed then."""
    connection = Connection(
        sock,
        key,
        Role.ACCEPTING,
        dropped=dropped,
        clock=clock,
        link_timeout_s=link_timeout_s,
        schema=KV_SCHEMA,
    )
    try:
        host = sock.getpeername()[0]
        return _greet(connection.handshake(), host, hello, doors, link_timeout_s)
    except BaseException:
        connection.close()
        raise


def _greet(connection: Connection, host: str, hello: Hello, doors: Doors, link_timeout_s: float) -> Link:
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
    complaint = check_doors(theirs, their_doors)
    if complaint is not None:
        raise connection.drop(WireError(complaint, reason="incompatible"))
    return Link(connection, host, theirs, their_doors, link_timeout_s)
