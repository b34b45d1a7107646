"""A rank's place in the traffic of pages: what leaves it, what arrives, and whom it talks to.

The life of a transfer, in the calls of the two sides' owners:

1. The source calls `link` for the destination's address, once, and `start` for each request. It calls
   `offer` as pages are computed.
2. At the destination `admit` is asked for each reservation: it makes room and names who adopts the pages.
3. Both call `poll` in their loops, which does all the work that touches the ledger and returns what ended.
4. `pull` asks a peer for pages that it holds; from there on it is its transfer, as above.

Threads of the endpoint move bytes, read sockets and take digests. Whatever they learn is a call in the
inbox that `poll` makes, so the ledger, the hand-offs and the callbacks belong to one thread: the caller's.
Peers come from whoever calls `link`, and hold the cluster key; nothing in a request names one.
"""

import contextlib
import secrets
from collections.abc import Sequence
from itertools import count
from queue import Empty, SimpleQueue
from typing import Final

from torch import Tensor

from baton.clock import Clock, SystemClock
from baton.errors import WireError
from baton.kvtransfer.choose import TransportCounters
from baton.kvtransfer.destination_handoff import DestinationHandoff
from baton.kvtransfer.ended import Ended
from baton.kvtransfer.endpoint_settings import Admit, EndpointSettings, refuse_all
from baton.kvtransfer.handoff import Finished, Terms, answer_to_unknown
from baton.kvtransfer.hashing import Hashing
from baton.kvtransfer.incoming import Incoming
from baton.kvtransfer.ledger import Owner, PageLedger
from baton.kvtransfer.link import Call, Link
from baton.kvtransfer.messages import AnyMessage, Pull, Refuse, Reserve
from baton.kvtransfer.outgoing import Outgoing
from baton.kvtransfer.page_memory import SharedPool
from baton.kvtransfer.peers import Peers
from baton.kvtransfer.pool_doors import PoolDoors
from baton.kvtransfer.reservation import ID_BYTES, check_pull, reservation
from baton.kvtransfer.source_handoff import SourceHandoff
from baton.wire import DroppedPeers

TICK_S: Final = 0.25  # between two looks at leases and heartbeats


class KvEndpoint:
    """One rank's pool, on any device. Everything but `close` is called by the thread that owns the ledger."""

    def __init__(
        self,
        settings: EndpointSettings,
        pool: Tensor,
        ledger: PageLedger,
        admit: Admit = refuse_all,
        *,
        shared: SharedPool | None = None,
        clock: Clock | None = None,
    ) -> None:
        """shared: what `pool` was made by, if sources on this host may write into it directly."""
        self.settings = settings
        self.incarnation = secrets.token_bytes(ID_BYTES)
        self.dropped = DroppedPeers()
        self._ledger = ledger
        self._admit = admit
        self._clock = clock or SystemClock()
        self._inbox: SimpleQueue[Call] = SimpleQueue()
        self._hashing = Hashing(settings.num_hashing_threads, may_inline=not pool.is_cuda)
        self._epochs = count(1)
        self._outgoing: dict[bytes, Outgoing] = {}
        self._incoming: dict[bytes, Incoming] = {}
        self._ended: list[Ended] = []
        self._granted: list[bytes] = []
        self._next_tick_s = 0.0
        self._doors = PoolDoors(
            pool,
            shared,
            settings,
            lambda transfers: self._inbox.put(lambda: self._bury(transfers)),
            clock=self._clock,
            dropped=self.dropped,
        )
        try:
            self._peers = Peers(
                (settings.host, settings.port),
                settings.key,
                settings.hello(self.incarnation),
                self._doors.message(),
                self._doors.pages,
                settings.transport,
                self._inbox.put,
                self._received,
                self._lost,
                clock=self._clock,
                dropped=self.dropped,
            )
        except OSError:  # somebody else listens there
            self._doors.close()
            raise

    @property
    def address(self) -> tuple[str, int]:
        return self._peers.address

    @property
    def counters(self) -> TransportCounters:
        return self._peers.counters

    def counts(self) -> dict[str, int]:
        """What went wrong or well since the start, by name: for metrics."""
        return {
            **self.counters.by_name(),
            **{f"dropped_{why}": n for why, n in self.dropped.counts().items()},
        }

    # What the owner asks for.

    def link(self, address: tuple[str, int]) -> Link:
        """Connect to another endpoint, from any thread; a link serves any number of transfers, both ways.

        TransferFailed, after seconds at worst: it can't be reached, has another key or serves another model.
        """
        return self._peers.dial(address)

    def start(self, link: Link, num_units: int, *, deadline_s: float, transfer: bytes | None = None) -> bytes:
        """Ask the peer for pages, and return the id of a transfer that ends within `deadline_s`.

        transfer: 16 bytes that the peer's owner knows it by, never used before; None: an id is minted.
        """
        request = reservation(num_units, deadline_s, transfer)
        outgoing = self._depart(link, request)
        transports = self._peers.transports(link)
        if transports is None:
            outgoing.perform(outgoing.handoff.peer_lost())
        else:
            transports.when_settled(outgoing.start)
        return request.transfer

    def offer(self, transfer: bytes, pages: Sequence[int], num_units: int) -> None:
        """These pages follow those offered before; `num_units` units of the transfer are computed by now,
        on a GPU by the stream that is current here and in `poll`: its work is waited for, not by the caller.
        """
        outgoing = self._outgoing.get(transfer)
        if outgoing is not None:
            outgoing.offer(pages, num_units)

    def pull(
        self,
        link: Link,
        wanted: Sequence[tuple[int, int]],
        num_units: int,
        adopter: Owner,
        *,
        deadline_s: float,
    ) -> bytes:
        """Ask the peer for its pages `wanted`, (page, generation) each. The caller has made room for them."""
        request = reservation(num_units, deadline_s)
        check_pull(wanted, self._terms(link, is_source=False).num_destination_pages(num_units))
        incoming = self._arrive(link, request)
        incoming.perform(incoming.handoff.pull(adopter, link.hello.incarnation, wanted, self._doors.names))
        if self._peers.transports(link) is None:
            incoming.perform(incoming.handoff.peer_lost())
        return request.transfer

    def abort(self, transfer: bytes, reason: str) -> None:
        for traffic in (self._outgoing, self._incoming):
            end = traffic.get(transfer)
            if end is not None:
                end.perform(end.handoff.abort(reason))

    def take_granted(self) -> list[bytes]:
        """The transfers, begun by `start`, that have been granted pages since the last call."""
        granted, self._granted = self._granted, []
        return granted

    def poll(self) -> list[Ended]:
        """Do what is due, without waiting; the transfers that have ended since the last call."""
        with contextlib.suppress(Empty):
            for _ in range(self._inbox.qsize()):  # no more than is there: peers may be faster than we are
                self._inbox.get_nowait()()
        if self._clock.now_s() >= self._next_tick_s:
            self._tick()
        ended, self._ended = self._ended, []
        return ended

    def post(self, call: Call) -> None:
        """From any thread: have the call made by the next `poll` or `wait`, in order with all others."""
        self._inbox.put(call)

    def wait(self, timeout_s: float) -> None:
        """Until there is something to `poll` for, or for so long."""
        with contextlib.suppress(Empty):
            self._inbox.get(timeout=timeout_s)()

    @property
    def num_open(self) -> int:
        """Transfers that hold pages here, as source or as destination."""
        return len(self._outgoing) + len(self._incoming)

    def close(self) -> None:
        """End every link and thread. Transfers that are open are lost; nothing is written on return."""
        self._peers.stop()
        for outgoing in list(self._outgoing.values()):
            outgoing.let_go()
        self._peers.close()
        self._doors.close()
        self._hashing.close()

    # Peers.

    def _bury(self, transfers: list[bytes]) -> None:
        """Their source's process is dead."""
        for transfer in transfers:
            incoming = self._incoming.get(transfer)
            if incoming is not None:
                incoming.perform(incoming.handoff.peer_lost())

    def _ends(self) -> list[Outgoing | Incoming]:
        return [*self._outgoing.values(), *self._incoming.values()]

    def _lost(self, link: Link) -> None:
        for end in self._ends():
            if end.link is link:
                end.perform(end.handoff.peer_lost())

    # Transfers.

    def _received(self, link: Link, message: AnyMessage) -> None:
        if link.is_lost:
            return
        match message:
            case Reserve():
                self._reserve(link, message)
            case Pull():
                self._accept_pull(link, message)
            case _:
                self._hand_on(link, message)

    def _hand_on(self, link: Link, message: AnyMessage) -> None:
        """To the end of its transfer, whichever link of the same process it came over."""
        transfer: bytes = getattr(message, "transfer", b"")
        end = self._outgoing.get(transfer) or self._incoming.get(transfer)
        if end is not None and end.link.hello.incarnation == link.hello.incarnation:
            end.receive(message)
        elif (answer := answer_to_unknown(message)) is not None:
            link.send(answer)

    def _reserve(self, link: Link, request: Reserve) -> None:
        if self._is_known(request.transfer) or request.num_parts != 1:
            link.drop(WireError("a reservation that was made before, or of several parts", reason="protocol"))
            return
        num_pages = self._terms(link, is_source=False).num_destination_pages(request.num_units)
        adopter = self._admit(request, num_pages)
        if adopter is None:
            link.send(Refuse(transfer=request.transfer, reason="no room"))
            return
        incoming = self._arrive(link, request)
        incoming.perform(incoming.handoff.grant(adopter, self._doors.names))

    def _accept_pull(self, link: Link, pull: Pull) -> None:
        if self._is_known(pull.transfer) or pull.num_parts != 1:
            link.drop(WireError("a pull that was asked for before, or of several parts", reason="protocol"))
            return
        outgoing = self._depart(link, pull)
        transports = self._peers.transports(link)
        assert transports is not None, "a message came over a link that is lost"
        transports.when_settled(lambda: outgoing.accept_pull(self.incarnation))

    def _is_known(self, transfer: bytes) -> bool:
        """Ids are minted once; one that comes again is no new transfer's."""
        return any(transfer in ends for ends in (self._outgoing, self._incoming, self._doors.landings))

    def _terms(self, link: Link, *, is_source: bool) -> Terms:
        return self.settings.terms(link.hello, self._ledger, self._clock, is_source=is_source)

    def _depart(self, link: Link, request: Reserve | Pull) -> Outgoing:
        outgoing = Outgoing(
            SourceHandoff(request, self._terms(link, is_source=True)),
            self.settings.plan(link.hello, is_source=True),
            link,
            self._peers.transports(link),
            request.num_units,
            self._doors.pages.digests,
            self._hashing,
            self._inbox.put,
            self._clock,
            self._finished,
            self._granted_to,
        )
        self._outgoing[request.transfer] = outgoing
        return outgoing

    def _arrive(self, link: Link, request: Reserve) -> Incoming:
        incoming = Incoming(
            DestinationHandoff(request, next(self._epochs), self._terms(link, is_source=False)),
            self.settings.plan(link.hello, is_source=False),
            request.num_units,
            link,
            self._doors,
            self._hashing,
            self._inbox.put,
            self._finished,
        )
        self._incoming[request.transfer] = incoming
        return incoming

    def _granted_to(self, transfer: bytes) -> None:
        self._granted.append(transfer)

    def _finished(self, end: Outgoing | Incoming, finished: Finished) -> None:
        handoff = end.handoff
        times = end.timeline.times() if isinstance(end, Outgoing) else None
        ended = Ended(handoff.transfer, finished.outcome, finished.reason, tuple(handoff.pages), times)
        self._ended.append(ended)

    def _tick(self) -> None:
        self._next_tick_s = self._clock.now_s() + TICK_S
        for end in self._ends():
            if end.link.is_lost:  # what is left to be said goes over another link to the same process
                end.link = self._peers.link_to(end.link.hello.incarnation) or end.link
            end.perform(end.handoff.tick())
        self._outgoing = {id_: end for id_, end in self._outgoing.items() if not end.is_over}
        self._incoming = {id_: end for id_, end in self._incoming.items() if not end.is_over}
