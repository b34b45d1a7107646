"""Whom an endpoint talks to: links that it dialled and links that it answered."""

import logging
import socket
import threading
from collections.abc import Callable
from itertools import count
from typing import Final

from baton.challenge import LinkSecret
from baton.clock import Clock
from baton.errors import BatonError, TransferFailed, WireError
from baton.kvtransfer.acceptor import Acceptor
from baton.kvtransfer.link import Link, answer, dial
from baton.kvtransfer.message_stream import Post
from baton.kvtransfer.messages import AnyMessage, Doors, Hello
from baton.kvtransfer.part_ranks import parts_of
from baton.kvtransfer.rank_transports import transports_between
from baton.link_life import LINK_TIMEOUT_S
from baton.wire import DroppedPeers

logger = logging.getLogger(__name__)

MAX_LINKS: Final = 1024
MAX_LINKS_OF_PEER: Final = 64  # that it dialled and that we did


class Peers:
    """Listens at `address`. Links join and leave in the endpoint's thread; `post` brings the news there."""

    def __init__(
        self,
        listen: tuple[str, int],
        key: LinkSecret,
        hello: Hello,
        doors: Doors,
        transport: str,
        post: Post,
        on_message: Callable[[Link, AnyMessage], None],
        on_lost: Callable[[Link], None],
        *,
        clock: Clock,
        dropped: DroppedPeers,
        link_timeout_s: float = LINK_TIMEOUT_S,
    ) -> None:
        """transport: a name of choose.py that is tried first, or "auto"."""
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
        self._acceptor = Acceptor(listener, self._answer, "kv", dropped)

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
