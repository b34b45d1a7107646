"""Whom an endpoint talks to: links that it dialled and links that it answered."""

import hmac
import logging
import socket
import threading
from collections.abc import Callable, Collection
from functools import partial
from itertools import count
from typing import Final, TypeAlias

from baton.clock import Clock
from baton.errors import BatonError, ConfigError, TransferFailed, WireError
from baton.kvtransfer.protocol.messages import AnyMessage, EndpointHello, ListenerAddresses, decode, encode
from baton.kvtransfer.protocol.transfer_plan import check_same_model
from baton.kvtransfer.ranks.messages import parts_of
from baton.kvtransfer.ranks.transports import transports_between
from baton.kvtransfer.transports.cuda_ipc import CudaOffer
from baton.kvtransfer.transports.group_receiver import RendezvousReply, RendezvousRequest
from baton.kvtransfer.transports.listener import Listener
from baton.kvtransfer.transports.message_stream import Call, MessageStream, Post
from baton.kvtransfer.transports.shm import PoolOffer
from baton.messages.bounds import LINK_TIMEOUT_S, schema_hash
from baton.messages.workers import Address, Worker
from baton.rpc.auth import LinkSecret
from baton.rpc.connection import HANDSHAKE_TIMEOUT_S, Connection, DroppedPeers, Role

# Whether two replicas may move pages between each other: decided from their first messages, before any page.
#
# Two replicas of one model and one layout of heads are compatible rank by rank, however many ranks each has:
# what has to be said of every rank is where its doors are.


def check(ours: EndpointHello, theirs: EndpointHello) -> str | None:
    """Why not, naming what differs; None when they may. tp_size and page_size may differ."""
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
    return None


def check_doors(hello: EndpointHello, doors: ListenerAddresses) -> str | None:
    """Why a peer's doors are not those of its ranks; None when each rank has its own."""
    num_ranks = hello.layout.tp_size
    if len(doors.ranks) != num_ranks:
        return f"{len(doors.ranks)} ranks have doors in a layout of tp_size {num_ranks}"
    if len({rank.incarnation for rank in doors.ranks}) != num_ranks:
        return "two ranks are one process"
    return None


# One authenticated connection between two endpoints, over which they talk about transfers.
#
# The life of a link:
#
# 1. Both ends prove that they hold the cluster key and are of one build (baton/rpc/connection.py), then each
#    says Hello and, if the two are compatible, Doors. A mismatch is refused at both ends, with the reason.
# 2. Messages are heard as of any kvtransfer/transports/message_stream.py: nobody waits for the peer.
# 3. A peer that breaks a rule, closes or dies ends the link. `on_lost` is called once, after everything that
# was received before. Nothing else ends with it: other peers' links go on.

# Of all that two replicas say to each other, at the doors of their pools too, which only a link leads to.
KV_SCHEMA: Final = schema_hash(AnyMessage, CudaOffer, RendezvousRequest, PoolOffer, RendezvousReply)
OnMessage: TypeAlias = Callable[["Link", AnyMessage], None]


class Link:
    """Made by `dial` or `answer`; `start` begins to read."""

    def __init__(
        self,
        connection: Connection,
        host: str,
        hello: EndpointHello,
        doors: ListenerAddresses,
        link_timeout_s: float,
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
        """What both ends of this link know, and nobody else, for the digests of a transfer
        (kvtransfer/ranks/digests.py).
        """
        return hmac.digest(self._digest_root, transfer, "sha256")

    def drop(self, error: WireError) -> None:
        """End the link to a peer that broke a rule, and count it."""
        self._stream.drop(error)

    def close(self) -> None:
        self._stream.close()


def dial(
    address: tuple[str, int],
    key: LinkSecret,
    hello: EndpointHello,
    doors: ListenerAddresses,
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
    hello: EndpointHello,
    doors: ListenerAddresses,
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


def _greet(
    connection: Connection, host: str, hello: EndpointHello, doors: ListenerAddresses, link_timeout_s: float
) -> Link:
    connection.send(encode(hello))
    theirs = decode(connection.recv(HANDSHAKE_TIMEOUT_S))
    if not isinstance(theirs, EndpointHello):
        raise connection.drop(WireError(f"{type(theirs).__name__} came before Hello", reason="order"))
    complaint = check(hello, theirs)
    if complaint is not None:
        raise connection.drop(WireError(complaint, reason="incompatible"))
    connection.send(encode(doors))
    their_doors = decode(connection.recv(HANDSHAKE_TIMEOUT_S))
    if not isinstance(their_doors, ListenerAddresses):
        raise connection.drop(WireError(f"{type(their_doors).__name__} came before Doors", reason="order"))
    complaint = check_doors(theirs, their_doors)
    if complaint is not None:
        raise connection.drop(WireError(complaint, reason="incompatible"))
    return Link(connection, host, theirs, their_doors, link_timeout_s)


logger = logging.getLogger(__name__)
MAX_LINKS: Final = 1024
MAX_LINKS_OF_PEER: Final = 64  # that it dialled and that we did


class Peers:
    """Listens at `address`. Links join and leave in the endpoint's thread; `post` brings the news there."""

    def __init__(
        self,
        listen: tuple[str, int],
        key: LinkSecret,
        hello: EndpointHello,
        doors: ListenerAddresses,
        transport: str,
        post: Post,
        on_message: Callable[[Link, AnyMessage], None],
        on_lost: Callable[[Link], None],
        *,
        clock: Clock,
        dropped: DroppedPeers,
        link_timeout_s: float = LINK_TIMEOUT_S,
    ) -> None:
        """transport: a name of kvtransfer/transports/registry.py that is tried first, or "auto"."""
        self._key = key
        self._hello = hello
        self._doors = doors
        self._transport = transport
        self._post = post
        self._on_message = on_message
        self._on_lost = on_lost
        self._clock = clock
        self._dropped = dropped
        self._link_timeout_s = link_timeout_s
        self._links: set[Link] = set()
        self._numbers = count(1)
        self._joining: set[Link] = set()  # greeted, and not yet let in
        self._lock = threading.Lock()  # a link is started before it is closed
        self._is_closed = False
        listener = socket.create_server(listen, backlog=128)
        self.address: tuple[str, int] = listener.getsockname()[:2]
        self._acceptor = Listener(listener, self._answer, "kv", dropped)

    def dial(self, address: tuple[str, int]) -> Link:
        """From any thread."""
        link = dial(
            address,
            self._key,
            self._hello,
            self._doors,
            self._clock,
            self._dropped,
            self._link_timeout_s,
        )
        self._add(link)
        return link

    def link_to(self, incarnation: bytes) -> Link | None:
        """Any link to that very process."""
        links = (link for link in list(self._links) if link.hello.incarnation == incarnation)
        return next(links, None)

    def stop(self) -> None:
        """No link joins any more; those that there are live on. From any thread."""
        with self._lock:
            self._is_closed = True

    def close(self) -> None:
        self.stop()
        self._acceptor.close()
        for link in list(self._joining):
            link.close()
        for link in list(self._links):
            link.close()
        self._links.clear()

    def _answer(self, sock: socket.socket) -> None:
        try:
            link = answer(
                sock,
                self._key,
                self._hello,
                self._doors,
                self._clock,
                self._dropped,
                self._link_timeout_s,
            )
        except (BatonError, TimeoutError, OSError) as error:
            logger.warning("a peer was not let in: %s", error)
            return
        self._joining.add(link)
        self._post(lambda: self._let_in(link))

    def _let_in(self, link: Link) -> None:
        self._joining.discard(link)
        num_theirs = sum(link.hello.incarnation == other.hello.incarnation for other in list(self._links))
        if len(self._links) >= MAX_LINKS or num_theirs >= MAX_LINKS_OF_PEER:
            link.drop(WireError(f"{len(self._links)} links, {num_theirs} to this peer", reason="crowd"))
            link.close()
            return
        try:
            self._add(link)
        except (BatonError, OSError) as error:
            logger.warning("a peer was not let in: %s", error)

    def _add(self, link: Link) -> None:
        """ConfigError when the transport asked for cannot serve the peer, TransferFailed after `close`.

        The link is closed then.
        """
        try:
            self._check_ways(link)
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

    def _check_ways(self, link: Link) -> None:
        for ranks in parts_of(self._hello.layout, link.hello.layout):
            source, destination = self._doors.ranks[ranks.source], link.doors.ranks[ranks.destination]
            transports_between(source, destination, self._transport)


# Link to that endpoint, without waiting; answers on the worker's thread, None if it cannot be had now.
Connect: TypeAlias = Callable[[Address, Callable[[Link | None], None]], None]


class KvLinks:
    """The links that pages leave over: one to every worker that the router lists and that could take them."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._links: dict[str, Link] = {}  # worker's id -> link
        self._asked: set[str] = set()
        self._wanted: frozenset[str] = frozenset()

    def to(self, worker: str) -> Link | None:
        link = self._links.get(worker) if worker in self._wanted else None
        return None if link is None or link.is_lost else link

    def keep_up(self, workers: Collection[Worker]) -> None:
        """Ask for what is missing. A link to who is not listed any more is kept, unused, while it lives: who
        is listed again, as after a moment's silence, is not linked to twice.
        """
        self._wanted = frozenset(worker.id for worker in workers)
        self._links = {id_: link for id_, link in self._links.items() if not link.is_lost}
        for worker in workers:
            if self.to(worker.id) is None and worker.id not in self._asked:
                self._asked.add(worker.id)
                self._connect(worker.kv_address, partial(self._answered, worker.id))

    def reachable(self) -> list[str]:
        return [id_ for id_ in self._links if self.to(id_) is not None]

    def _answered(self, worker: str, link: Link | None) -> None:
        self._asked.discard(worker)
        if link is not None:
            self._links[worker] = link
