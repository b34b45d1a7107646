"""Whom an endpoint talks to: links that it dialled and links that it answered, and the transports of each."""

import logging
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Final

from baton.clock import Clock
from baton.errors import BatonError, ConfigError, TransferFailed, WireError
from baton.kvtransfer.acceptor import Acceptor
from baton.kvtransfer.choose import Place, TransportCounters, TransportName, order
from baton.kvtransfer.cuda_ipc import CudaIpcTransport
from baton.kvtransfer.group import GroupTransport
from baton.kvtransfer.group_door import Knock, ask_for_meeting
from baton.kvtransfer.link import Link, Post, answer, dial
from baton.kvtransfer.messages import AnyMessage, Doors, Hello
from baton.kvtransfer.pair import GroupName, GroupSettings, Meeting
from baton.kvtransfer.pair_channel import payload_bytes
from baton.kvtransfer.peer_transports import PeerTransports
from baton.kvtransfer.rank_pages import RankPages
from baton.kvtransfer.shm import ShmTransport
from baton.kvtransfer.tcp import TcpTransport
from baton.kvtransfer.transfer_plan import plan_transfer
from baton.kvtransfer.transport import OnEnd, Transport
from baton.wire import DroppedPeers

logger = logging.getLogger(__name__)

MAX_LINKS: Final = 1024
MAX_LINKS_OF_PEER: Final = 64  # that it dialled and that we did


class Peers:
    """Listens at `address`. Links join and leave in the endpoint's thread; `post` brings the news there."""

    def __init__(
        self,
        listen: tuple[str, int],
        key: bytes,
        hello: Hello,
        doors: Doors,
        pages: RankPages,
        transport: str,
        post: Post,
        on_message: Callable[[Link, AnyMessage], None],
        on_lost: Callable[[Link], None],
        *,
        clock: Clock,
        dropped: DroppedPeers,
    ) -> None:
        """transport: a name of choose.py that is tried first, or "auto"."""
        self.counters = TransportCounters()
        self._key = key
        self._hello = hello
        self._doors = doors
        self._pages = pages
        self._transport = transport
        self._post = post
        self._on_message = on_message
        self._on_lost = on_lost
        self._clock = clock
        self._dropped = dropped
        self._links: dict[Link, PeerTransports] = {}
        self._joining: set[Link] = set()  # greeted, and not yet let in
        self._lock = threading.Lock()  # a link is started before it is closed
        self._is_closed = False
        self._acceptor = Acceptor(listen, self._answer, "kv", dropped)
        self.address = self._acceptor.address

    def dial(self, address: tuple[str, int]) -> Link:
        """From any thread."""
        link = dial(address, self._key, self._hello, self._doors, self._clock, self._dropped)
        self._add(link)
        return link

    def link_to(self, incarnation: bytes) -> Link | None:
        """Any link to that very process."""
        links = (link for link in list(self._links) if link.hello.incarnation == incarnation)
        return next(links, None)

    def transports(self, link: Link) -> PeerTransports | None:
        """None: the link is lost."""
        return self._links.get(link)

    def stop(self) -> None:
        """No page leaves any more, and none will; links live on. From any thread."""
        with self._lock:
            self._is_closed = True
        for transports in list(self._links.values()):
            transports.close()

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
            link = answer(sock, self._key, self._hello, self._doors, self._clock, self._dropped)
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
            names = self._order(link)
        except ConfigError:
            link.close()
            raise
        transports = PeerTransports(
            names, lambda name, on_end: self._make(link, name, on_end), self._post, self.counters
        )
        with self._lock:
            if not self._is_closed:
                self._links[link] = transports
                link.start(self._post, self._on_message, lambda: self._remove(link))
                return
        link.close()
        raise TransferFailed("the endpoint is closed")

    def _remove(self, link: Link) -> None:
        """Whoever has transfers over it hears first: their pieces end before the transports do."""
        link.is_lost = True
        self._on_lost(link)
        transports = self._links.pop(link, None)
        if transports is not None:
            transports.close()

    def _order(self, link: Link) -> Sequence[TransportName]:
        here = Place(host=self._doors.host, device=self._doors.device)
        there = Place(host=link.doors.host, device=link.doors.device)
        return order(here, there, link.doors.names, self._transport)

    def _make(self, link: Link, name: TransportName, on_end: OnEnd) -> Transport:
        key, pages, clock, dropped = self._key, self._pages, self._clock, self._dropped
        doors, incarnation = link.doors, self._hello.incarnation
        match name:
            case "shm":
                assert pages.memory is not None
                return ShmTransport(
                    doors.shm_address,
                    key,
                    pages.memory,
                    incarnation,
                    clock=clock,
                    on_end=on_end,
                    dropped=dropped,
                )
            case "cuda_ipc":
                return CudaIpcTransport(
                    doors.cuda_ipc_address,
                    key,
                    pages.pool,
                    incarnation,
                    clock=clock,
                    on_end=on_end,
                    dropped=dropped,
                )
            case "tcp":
                address = (link.host, doors.tcp_port)
                return TcpTransport(
                    address, key, pages.for_sockets(), clock=clock, on_end=on_end, dropped=dropped
                )
            case "gloo":
                return self._make_group(link, name, doors.gloo_port, on_end)
            case "nccl":
                return self._make_group(link, name, doors.nccl_port, on_end)

    def _make_group(self, link: Link, name: GroupName, port: int, on_end: OnEnd) -> GroupTransport:
        here, there, settings = self._hello, link.hello, GroupSettings(host=self.address[0])
        plan = plan_transfer(here.layout, there.layout, here.rank, there.rank)

        def meet() -> Meeting:
            knock = Knock(name=name, layout=here.layout, rank=here.rank, payload_bytes=payload_bytes(plan))
            address, timeout_s = (link.host, port), settings.connect_s
            return ask_for_meeting(
                address, self._key, knock, timeout_s, clock=self._clock, dropped=self._dropped
            )

        return GroupTransport(
            name, meet, self._pages.pool, plan, settings=settings, clock=self._clock, on_end=on_end
        )
