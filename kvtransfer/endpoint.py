"""A replica's place in the traffic of pages: what leaves it, what arrives, and whom it talks to.

The life of a transfer, in the calls of the two sides' owners:

1. The source calls `link` for the destination's address, once, and `start` for each request. When
   `take_granted` names it there is room for its pages: it calls `offer` as they are computed.
2. At the destination `admit` is asked for each reservation: it makes room and names who adopts the pages.
3. Both call `poll` in their loops, which does all the work that touches the ledger and returns what ended.
4. `pull` asks a peer for pages that it holds; from there on it is its transfer, as above.

Threads of the endpoint move bytes, read sockets and take digests. Whatever they learn is a call in the
inbox that `poll` makes, so the ledger, the hand-offs and the callbacks belong to one thread: the caller's.
Peers come from whoever calls `link`, and hold the cluster key; nothing in a request names one.

A replica of several ranks has its endpoint in rank 0, whose ledger is that of all ranks: page p is page p of
each rank's pool. The other ranks' pages are moved by an agent in each of their processes:

    agents = RankAgents(config.tensor_parallel_size)
    shared = SharedPool()
    engine = load_engine(config, zeros_on_cpu=shared.zeros, companion=agents.companion)
    endpoint = KvEndpoint(settings, engine.runner.pool.device, ledger, admit, shared=shared, agents=agents)
    ...
    endpoint.close()
    engine.close()

The endpoint takes the agents over, and closes them. A rank that is lost ends the transfers that it has a part
in, each once, and no other begins: the replica has to be loaded again.
"""

import contextlib
import secrets
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from typing import Final

from torch import Tensor

from baton.clock import Clock, SystemClock
from baton.errors import WireError
from baton.kvtransfer.choose import TransportCounters
from baton.kvtransfer.ended import Ended
from baton.kvtransfer.endpoint_settings import Admit, EndpointSettings, refuse_all
from baton.kvtransfer.handoff import answer_to_unknown
from baton.kvtransfer.ledger import Owner, PageLedger
from baton.kvtransfer.link import Link
from baton.kvtransfer.message_stream import Call
from baton.kvtransfer.messages import AnyMessage, Pull, Refuse, Reserve
from baton.kvtransfer.page_memory import SharedPool
from baton.kvtransfer.peers import Peers
from baton.kvtransfer.rank_agents import RankAgents
from baton.kvtransfer.rank_messages import PartEvent
from baton.kvtransfer.rank_plane import RankPlane
from baton.kvtransfer.ranks import Ranks
from baton.kvtransfer.remote_rank import RemoteRank
from baton.kvtransfer.reservation import ID_BYTES, check_pull, reservation
from baton.kvtransfer.traffic import Traffic
from baton.wire import DroppedPeers

TICK_S: Final = 0.25  # between two looks at leases and heartbeats


class KvEndpoint:
    """The pools of a replica, on any device. All but `close` is called by the thread that owns the ledger."""

    def __init__(
        self,
        settings: EndpointSettings,
        pool: Tensor,
        ledger: PageLedger,
        admit: Admit = refuse_all,
        *,
        shared: SharedPool | None = None,
        agents: RankAgents | None = None,
        clock: Clock | None = None,
    ) -> None:
        """pool: of rank 0. shared: what it was made by, if sources on this host may write into it directly.

        agents: of the other ranks. WorkerLost when one of them does not come.
        """
        self.settings = settings
        self.incarnation = secrets.token_bytes(ID_BYTES)
        self.dropped = DroppedPeers()
        self._admit = admit
        self._clock = clock or SystemClock()
        self._inbox: SimpleQueue[Call] = SimpleQueue()
        self._next_tick_s = 0.0
        inbox, clock, dropped = self._inbox.put, self._clock, self.dropped
        own, incarnation = settings.for_rank(0), self.incarnation
        self._here = RankPlane(
            own, pool, shared, incarnation, inbox, self._hear, clock=clock, dropped=dropped
        )
        self._doors = self._here.pool_doors
        self._ranks = Ranks(settings, self._here, agents, clock)
        self._traffic = Traffic(settings, ledger, self._clock, self._ranks)
        self._outgoing, self._incoming = self._traffic.outgoing, self._traffic.incoming
        try:
            self._peers = Peers(
                (settings.host, settings.port),
                settings.key,
                settings.hello(self.incarnation),
                self._ranks.doors,
                settings.transport,
                inbox,
                self._received,
                self._lost,
                clock=clock,
                dropped=dropped,
            )
        except OSError:  # somebody else listens there
            self._ranks.close()
            raise
        self._ranks.start(inbox, self._hear, self._lose)

    @property
    def address(self) -> tuple[str, int]:
        return self._peers.address

    @property
    def counters(self) -> TransportCounters:
        """Of rank 0's transports."""
        return self._here.counters

    def counts(self) -> dict[str, int]:
        """What went wrong or well in rank 0 since the start, by name: for metrics."""
        dropped = {f"dropped_{why}": number for why, number in self.dropped.counts().items()}
        return {**self.counters.by_name(), **dropped}

    # What the owner asks for.

    def link(self, address: tuple[str, int]) -> Link:
        """Connect to another endpoint, from any thread; a link serves any number of transfers, both ways.

        TransferFailed, after seconds at worst: it can't be reached, has another key or serves another model.
        """
        return self._peers.dial(address)

    def start(
        self,
        link: Link,
        num_units: int,
        *,
        deadline_s: float,
        transfer: bytes | None = None,
        position: int = 0,
        num_layer_groups: int = 1,
    ) -> bytes:
        """Ask the peer for pages, and return the id of a transfer that ends within `deadline_s`.

        Units are counted from the token `position` of the sequence on, which starts a page on both sides: a
        destination that holds the tokens before needs no more. transfer: 16 bytes that no transfer had yet,
        by which `admit` may know the request; None: they are made here. num_layer_groups: of layers, as of
        `layer_groups`, in which pages may be offered; each is a piece of its own on the way.
        """
        if transfer is not None and self._is_known(transfer):
            raise ValueError(f"transfer {transfer.hex()} was started before")
        num_parts = self._traffic.num_parts(link, num_layer_groups, is_source=True)
        request = reservation(num_units, num_parts, deadline_s, transfer=transfer, position=position)
        request = self._traffic.checked(link, request, num_layer_groups)
        outgoing = self._traffic.depart(link, request)
        if self._traffic.can_begin(outgoing):
            outgoing.start()
        return request.transfer

    def offer(
        self, transfer: bytes, pages: Sequence[int], num_units: int, *, group: int | None = None
    ) -> None:
        """These pages follow those offered before; `num_units` units are computed by now, on a GPU by the
        stream that is current here and in `poll`: only where other ranks have a part does the caller wait.
        group: of this group of layers only; the other groups' offers of the same pages follow, without them.
        """
        outgoing = self._outgoing.get(transfer)
        if outgoing is not None:
            outgoing.offer(pages, num_units, group)

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
        request = reservation(num_units, self._traffic.num_parts(link, is_source=False), deadline_s)
        check_pull(wanted, self._traffic.terms(link, is_source=False).num_destination_pages(num_units))
        incoming = self._traffic.arrive(link, request)
        if self._traffic.can_begin(incoming):
            incoming.perform(
                incoming.handoff.pull(adopter, link.hello.incarnation, wanted, self._doors.names)
            )
        return request.transfer

    def abort(self, transfer: bytes, reason: str) -> None:
        end = self._traffic.end_of(transfer)
        if end is not None:
            end.perform(end.handoff.abort(reason))

    def take_granted(self) -> list[bytes]:
        """The transfers, begun by `start`, that have been granted pages since the last call."""
        return self._traffic.take_granted()

    def poll(self) -> list[Ended]:
        """Do what is due, without waiting; the transfers that have ended since the last call."""
        with contextlib.suppress(Empty):
            for _ in range(self._inbox.qsize()):  # no more than is there: peers may be faster than we are
                self._inbox.get_nowait()()
        if self._clock.now_s() >= self._next_tick_s:
            self._next_tick_s = self._clock.now_s() + TICK_S
            self._traffic.tick(self._peers.link_to)
        return self._traffic.take_ended()

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
        """End every link and thread. Transfers that are open are lost; nothing is written here on return, and
        in other ranks a moment later.
        """
        self._peers.stop()
        if self._ranks.stop():
            for outgoing in list(self._outgoing.values()):
                outgoing.let_go()
        self._peers.close()
        self._ranks.close()

    # Peers and ranks.

    def _lost(self, link: Link) -> None:
        for end in self._traffic.ends():
            if end.link is link:
                end.perform(end.handoff.peer_lost())
        self._ranks.drop(link)

    def _hear(self, event: PartEvent) -> None:
        end = self._traffic.end_of(event.transfer)
        if end is not None:
            end.hear(event)

    def _lose(self, rank: RemoteRank) -> None:
        """One of ours is lost, or dead by now."""
        for end in self._traffic.ends():
            end.lose(rank, f"rank {rank.rank} is lost", is_dead=rank.is_dead)

    # Transfers.

    def _received(self, link: Link, message: AnyMessage) -> None:
        if link.is_lost:
            return
        match message:
            case Reserve() | Pull():
                self._asked(link, message)
            case _:
                self._hand_on(link, message)

    def _hand_on(self, link: Link, message: AnyMessage) -> None:
        """To the end of its transfer, whichever link of the same process it came over."""
        end = self._traffic.end_of(getattr(message, "transfer", b""))
        if end is not None and end.link.hello.incarnation == link.hello.incarnation:
            end.receive(message)
        elif (answer := answer_to_unknown(message)) is not None:
            link.send(answer)

    def _asked(self, link: Link, request: Reserve | Pull) -> None:
        complaint = self._traffic.complaint(link, request)
        if self._is_known(request.transfer):
            complaint = "a transfer that was asked for before"
        if complaint is not None:
            link.drop(WireError(complaint, reason="protocol"))
        elif isinstance(request, Reserve):
            self._reserve(link, request)
        else:
            outgoing = self._traffic.depart(link, request)
            if self._traffic.can_begin(outgoing):
                outgoing.accept_pull(self.incarnation)

    def _reserve(self, link: Link, request: Reserve) -> None:
        num_pages = self._traffic.terms(link, is_source=False).num_destination_pages(request.num_units)
        complaint = self._ranks.complaint()
        adopter = self._admit(request, num_pages) if complaint is None else None
        if adopter is None:
            link.send(Refuse(transfer=request.transfer, reason=complaint or "no room"))
            return
        incoming = self._traffic.arrive(link, request)
        incoming.perform(incoming.handoff.grant(adopter, self._doors.names))

    def _is_known(self, transfer: bytes) -> bool:
        """Ids are minted once; one that comes again is no new transfer's."""
        return self._traffic.end_of(transfer) is not None or transfer in self._doors.landings
