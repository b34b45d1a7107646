"""Connections between endpoints: links that this endpoint dials, and links that it accepts.

The life of a link:

1. Each end proves that it has the key of page links and that it runs the same build as the other
   (baton/rpc/connection.py). Each then sends EndpointHello. Replicas of the same model are compatible, also
   with different tp_size or page_size. Otherwise both ends close the link and report the reason, before any
   page moves.
2. The link carries messages about transfers in both directions.
3. The link ends when the peer breaks a rule, closes the connection or dies. `on_lost` is called once, after
   all messages that arrived before. Links to other peers stay open.
"""

import hmac
import logging
import socket
import threading
from collections.abc import Callable, Collection
from functools import partial
from itertools import count
from typing import Final, TypeAlias

from baton.clock import Clock
from baton.errors import BatonError, ConfigError, TransferFailed, WireError, reason_of
from baton.kvtransfer.protocol.messages import AnyMessage, EndpointHello, decode, encode
from baton.kvtransfer.protocol.transfer_plan import check_same_model, shards_of
from baton.kvtransfer.transports.base import TransportSet
from baton.messages.bounds import LINK_TIMEOUT_S, schema_hash
from baton.messages.workers import Address, Worker
from baton.rpc.auth import LinkSecret, Role
from baton.rpc.connection import Call, Connection, DroppedPeers, MessageStream, Post
from baton.rpc.listener import Listener, listen
from baton.rpc.session import HANDSHAKE_TIMEOUT_S

logger = logging.getLogger(__name__)
MAX_LINKS: Final = 1024
MAX_LINKS_OF_PEER: Final = 64  # dialled by either end
KV_SCHEMA: Final = schema_hash(AnyMessage)


def incompatibility(ours: EndpointHello, theirs: EndpointHello) -> str | None:
    """Return why two replicas cannot exchange pages, with the name of the field, or None."""
    if ours.protocol != theirs.protocol:
        return f"we speak version {ours.protocol} of the transfer protocol, the peer {theirs.protocol}"
    if ours.fingerprint != theirs.fingerprint:
        return f"we serve the model {ours.fingerprint}, the peer {theirs.fingerprint}"
    try:
        check_same_model(ours.layout, theirs.layout)
    except ConfigError as error:
        return str(error)
    if ours.incarnation == theirs.incarnation:
        return "the peer is this process itself"
    num_ranks = theirs.layout.num_ranks
    if len(theirs.listeners) != num_ranks:
        return f"{len(theirs.listeners)} ranks listen, expected {num_ranks}"
    if len({rank.incarnation for rank in theirs.listeners}) != num_ranks:
        return "two ranks are one process"
    return None


OnMessage: TypeAlias = Callable[["Link", AnyMessage], None]


class Link:
    """One authenticated connection between two endpoints. It reads nothing before `start`."""

    def __init__(
        self, connection: Connection, host: str, hello: EndpointHello, link_timeout_s: float
    ) -> None:
        """host, hello: of the peer."""
        self.host = host
        self.hello = hello
        self.number = 0  # the link's id within this endpoint, which sets it
        self.is_lost = False
        self._digest_root = hmac.digest(connection.session_key, b"baton kv digests 1", "sha256")
        self._stream = MessageStream(connection, decode, "kv-link", link_timeout_s=link_timeout_s)

    def start(self, post: Post, on_message: OnMessage, on_lost: Call) -> None:
        """Begin to read. The callbacks go through `post`; the reading thread never calls them."""
        self._stream.start(post, partial(on_message, self), on_lost)

    def send(self, message: AnyMessage) -> None:
        """Send a message. If the peer is gone, nothing is raised: `on_lost` reports it."""
        self._stream.send(encode(message))

    def digest_key(self, transfer: bytes) -> bytes:
        """Return the key for the digests of a transfer; only the two ends of this link know it."""
        return hmac.digest(self._digest_root, transfer, "sha256")

    def drop(self, error: WireError) -> None:
        """Close the link because the peer broke a rule, and count the error."""
        self._stream.drop(error)

    def close(self) -> None:
        """Close the connection, and wait for the link's threads."""
        self._stream.close()


class Peers:
    """All links of an endpoint, and the listener at `address` that accepts more.

    The endpoint's thread adds and removes links; other threads reach it through `post`.
    """

    def __init__(
        self,
        address: tuple[str, int],
        keys: LinkSecret,
        hello: EndpointHello,
        transports: TransportSet,
        post: Post,
        on_message: Callable[[Link, AnyMessage], None],
        on_lost: Callable[[Link], None],
        *,
        clock: Clock,
        dropped: DroppedPeers,
        link_timeout_s: float = LINK_TIMEOUT_S,
    ) -> None:
        """address: host and port to listen on. hello, transports: of this endpoint."""
        self._keys = keys
        self._hello = hello
        self._transports = transports
        self._post = post
        self._on_message = on_message
        self._on_lost = on_lost
        self._clock = clock
        self._dropped = dropped
        self._link_timeout_s = link_timeout_s
        self._links: set[Link] = set()
        self._numbers = count(1)
        self._joining: set[Link] = set()  # after the handshake, and not yet in `_links`
        self._lock = threading.Lock()  # a link is started before it is closed
        self._is_closed = False
        listener = listen(*address)
        self.address: tuple[str, int] = listener.getsockname()[:2]
        self._acceptor = Listener(listener, self._answer, "kv", dropped)

    def dial(self, address: tuple[str, int]) -> Link:
        """Open a link to the endpoint at this address. Any thread may call.

        Raises TransferFailed when the endpoint cannot be reached or is incompatible, ConfigError when the
        configured transport does not work between the two.
        """
        host, port = address
        try:
            sock = socket.create_connection(address, HANDSHAKE_TIMEOUT_S)
            link = self._greet(sock, host, Role.CONNECTING)
        except (BatonError, OSError) as error:
            raise TransferFailed(f"{host}:{port}: {reason_of(error)}") from error
        self._add(link)
        return link

    def link_to(self, incarnation: bytes) -> Link | None:
        """Return any link to the process with this incarnation, or None."""
        links = (link for link in list(self._links) if link.hello.incarnation == incarnation)
        return next(links, None)

    def incarnations(self) -> dict[int, bytes]:
        """Return the number of each open link, with the incarnation of the peer's process."""
        return {link.number: link.hello.incarnation for link in list(self._links)}

    def stop(self) -> None:
        """Accept and open no further links; open links stay. Any thread may call."""
        with self._lock:
            self._is_closed = True

    def tell_all(self, message: AnyMessage) -> None:
        """Send a message over each open link."""
        for link in list(self._links):
            link.send(message)

    def close(self) -> None:
        """Stop listening, and close every link."""
        self.stop()
        self._acceptor.close()
        for link in (*self._joining, *self._links):
            link.close()
        self._links.clear()

    def _answer(self, sock: socket.socket) -> None:
        """Do the handshake with a peer that has connected. Runs in a thread of the listener."""
        link = self._greet(sock, sock.getpeername()[0], Role.ACCEPTING)
        self._joining.add(link)
        self._post(lambda: self._admit(link))

    def _greet(self, sock: socket.socket, host: str, role: Role) -> Link:
        """Do the handshake and return a link, not started. Closes the socket if it raises."""
        connection = Connection(
            sock,
            self._keys,
            role,
            dropped=self._dropped,
            clock=self._clock,
            link_timeout_s=self._link_timeout_s,
            schema=KV_SCHEMA,
        )
        try:
            connection.handshake()
            connection.send(encode(self._hello))
            hello = connection.recv_message(decode, HANDSHAKE_TIMEOUT_S)
            if not isinstance(hello, EndpointHello):
                unexpected = f"{type(hello).__name__} came instead of EndpointHello"
                raise connection.drop(WireError(unexpected, reason="order"))
            if (complaint := incompatibility(self._hello, hello)) is not None:
                raise connection.drop(WireError(complaint, reason="incompatible"))
            return Link(connection, host, hello, self._link_timeout_s)
        except BaseException:
            connection.close()
            raise

    def _admit(self, link: Link) -> None:
        self._joining.discard(link)
        num_theirs = sum(link.hello.incarnation == other.hello.incarnation for other in list(self._links))
        if len(self._links) >= MAX_LINKS or num_theirs >= MAX_LINKS_OF_PEER:
            link.drop(WireError(f"{len(self._links)} links, {num_theirs} to this peer", reason="limit"))
            link.close()
            return
        try:
            self._add(link)
        except (BatonError, OSError) as error:
            logger.warning("a peer was refused: %s", error)

    def _add(self, link: Link) -> None:
        """Start the link, or close it and raise.

        Raises ConfigError when the configured transport does not work with the peer, TransferFailed after
        `close` or when no thread can be started.
        """
        try:
            for ranks in shards_of(self._hello.layout, link.hello.layout):
                self._transports.order(
                    self._hello.listeners[ranks.source], link.hello.listeners[ranks.destination]
                )
            with self._lock:
                self._start(link)
        except BatonError:
            link.close()
            raise

    def _start(self, link: Link) -> None:
        if self._is_closed:
            raise TransferFailed("the endpoint is closed")
        link.number = next(self._numbers)
        self._links.add(link)
        try:
            link.start(self._post, self._on_message, lambda: self._remove(link))
        except RuntimeError as error:  # the process may have no more threads
            self._links.discard(link)
            raise TransferFailed(str(error)) from error

    def _remove(self, link: Link) -> None:
        link.is_lost = True
        self._links.discard(link)
        self._on_lost(link)


# Opens a link to an endpoint in the background. The worker's thread calls the callback with the link, or with
# None after a failure.
Connect: TypeAlias = Callable[[Address, Callable[[Link | None], None]], None]


MOST_CALLS: Final = 16  # of `keep_up`, between two tries to open a link that fails


class KvLinks:
    """A worker's links to the workers of its weights, for grants and for requests of prefixes."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._links: dict[Address, Link] = {}
        self._addresses: dict[str, Address] = {}  # of the listed workers, by id
        self._asked: set[Address] = set()
        self._pauses: dict[Address, int] = {}  # calls of `keep_up` between two tries; absent: 1
        self._num_calls = 0  # of `keep_up`

    def to(self, worker: str) -> Link | None:
        """Return the open link to a listed worker, or None."""
        address = self._addresses.get(worker)
        link = None if address is None else self._links.get(address)
        return None if link is None or link.is_lost else link

    def keep_up(self, workers: Collection[Worker]) -> None:
        """Open the links that are missing. Called in each tick, and for each new list. workers: the current
        list.

        Links that cannot be opened are tried less and less often: the peer may hold pages of another type.
        The link to a worker that has left the list stays open, unused: its process may return to the list,
        for example after a short silence, or under another id, in another role.
        """
        self._links = {address: link for address, link in self._links.items() if not link.is_lost}
        self._addresses = {worker.id: worker.kv_address for worker in workers}
        listed = set(self._addresses.values())
        self._pauses = {each: pause for each, pause in self._pauses.items() if each in listed}
        self._num_calls += 1
        for address in self._addresses.values():
            if address in self._links or address in self._asked:
                continue
            if self._num_calls % self._pauses.get(address, 1) == 0:
                self._asked.add(address)
                self._connect(address, partial(self._answered, address))

    def reachable(self) -> list[str]:
        """Return the ids of the listed workers that have an open link."""
        return [id_ for id_ in self._addresses if self.to(id_) is not None]

    def ids(self) -> dict[bytes, str]:
        """Return the incarnations of the processes behind the open links, each with its worker's id."""
        return {link.hello.incarnation: id_ for id_ in self._addresses if (link := self.to(id_)) is not None}

    def _answered(self, address: Address, link: Link | None) -> None:
        self._asked.discard(address)
        if link is None:
            self._pauses[address] = min(MOST_CALLS, 2 * self._pauses.get(address, 1))
        else:
            self._pauses.pop(address, None)
            self._links[address] = link
