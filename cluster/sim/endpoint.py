"""An endpoint of the simulation: the real hand-offs and landings, over wires that carry no real bytes.

A pool's pages are written in one of two ways, chosen for each pair of endpoints:

- through the destination's receiver, as over TCP: a piece travels by itself, is let into its landing or
  drained, and may be damaged on the way;
- by the source's own hand, as in shared memory: it looks whether the landing is open, and writes a moment
  later, whatever has become of the destination meanwhile. Only the ledger keeps such a page from being
  reused before.

A source that dies is known to be dead some time after its links have ended; until then its writers may live.
"""

from collections.abc import Sequence
from itertools import count
from random import Random
from typing import Final

from baton.cluster.sim.engine import FINGERPRINT, SimEngine
from baton.cluster.sim.host import Trace
from baton.cluster.sim.kv_link import SimLink
from baton.cluster.sim.network import Network
from baton.cluster.sim.pieces import Pieces
from baton.cluster.sim.process import Process
from baton.cluster.sim.transfers import SimIncoming, SimOutgoing
from baton.errors import WireError
from baton.kvtransfer.destination_handoff import DestinationHandoff
from baton.kvtransfer.ended import Ended
from baton.kvtransfer.endpoint_settings import Admit
from baton.kvtransfer.handoff import Finished, Terms, Timing, answer_to_unknown
from baton.kvtransfer.landing import Landings
from baton.kvtransfer.ledger import Owner
from baton.kvtransfer.link import Link
from baton.kvtransfer.messages import PROTOCOL, AnyMessage, Hello, Pull, Refuse, Reserve
from baton.kvtransfer.source_handoff import SourceHandoff
from baton.kvtransfer.transfer_plan import TransferPlan, plan_transfer
from baton.layout import PageLayout

TICK_S: Final = 0.25
TIMING: Final = Timing(lease_s=2.0, heartbeat_s=0.5)
DEATH_IS_KNOWN_S: Final = (0.0, 0.5)  # after a process has died, to those that it could write to


class SimEndpoint:
    """See PageEndpoint. All calls are made by its process's turns."""

    def __init__(
        self,
        process: Process,
        engine: SimEngine,
        network: Network,
        random: Random,
        trace: Trace,
        admit: Admit,
    ) -> None:
        self.process = process
        self.memory = engine.memory
        self.pool = engine.pages
        self.landings = Landings(engine.machine.num_pages)
        self.open_pages: dict[int, int] = {}  # page -> generation: what may be written by hand now
        self.hello = Hello(
            protocol=PROTOCOL,
            incarnation=random.randbytes(16),
            fingerprint=FINGERPRINT,
            layout=_layout(engine.machine.page_size),
        )
        self.pieces = Pieces(process, network, random)
        self.admit = admit
        self._network = network
        self._random = random
        self._trace = trace
        self._epochs = count(1)
        self.links: list[SimLink] = []
        self._outgoing: dict[bytes, SimOutgoing] = {}
        self._incoming: dict[bytes, SimIncoming] = {}
        self._granted: list[bytes] = []
        self._ended: list[Ended] = []
        self._next_tick_s = process.clock.now_s()

    # Links.

    def connect(self, other: "SimEndpoint", *, is_direct: bool) -> SimLink:
        """is_direct: both sides write into each other's pools by their own hand."""
        ours, theirs = self._network.connect(self.process, other.process)
        link = SimLink(ours, other.hello, self, self._note)
        back = SimLink(theirs, self.hello, other, other._note)
        self.links.append(link)
        other.links.append(back)
        for one, peer in ((self, other), (other, self)):
            one.pieces.reach(peer, is_direct=is_direct)
            one.landings.writer_came(peer.hello.incarnation)
            peer.process.on_death.append(lambda one=one, peer=peer: one._peer_died(peer))  # type: ignore[misc]
        return link

    def received(self, link: SimLink, message: AnyMessage) -> None:
        if isinstance(message, Reserve):
            self._reserve(link, message)
            return
        if isinstance(message, Pull):
            outgoing = self._depart(link, message)
            outgoing.perform(outgoing.handoff.accept_pull(self.hello.incarnation))
            return
        transfer: bytes = getattr(message, "transfer", b"")
        end = self._outgoing.get(transfer) or self._incoming.get(transfer)
        if end is not None and end.link.hello.incarnation == link.hello.incarnation:
            end.receive(message)
        elif (answer := answer_to_unknown(message)) is not None:
            link.send(answer)

    def lost(self, link: SimLink) -> None:
        self.links.remove(link)
        for end in self._ends():
            if end.link is link:
                end.perform(end.handoff.peer_lost())

    # What the owner asks for.

    @property
    def num_open(self) -> int:
        return len(self._outgoing) + len(self._incoming)

    def counts(self) -> dict[str, int]:
        counters = self.landings.counters
        return {"pieces": counters.num_pieces, "stale_pieces": counters.num_stale}

    def start(
        self,
        link: Link,
        num_units: int,
        *,
        deadline_s: float,
        transfer: bytes | None = None,
        num_layer_groups: int = 1,
    ) -> bytes:
        assert isinstance(link, SimLink) and transfer is not None and transfer not in self._outgoing
        assert num_layer_groups == 1, "the model has one layer"
        request = Reserve(transfer=transfer, num_units=num_units, deadline_ms=round(deadline_s * 1000))
        outgoing = self._depart(link, request)
        handoff = outgoing.handoff
        outgoing.perform(handoff.peer_lost() if link.is_lost else handoff.start())
        return transfer

    def offer(
        self, transfer: bytes, pages: Sequence[int], num_units: int, *, group: int | None = None
    ) -> None:
        outgoing = self._outgoing.get(transfer)
        if outgoing is not None:
            outgoing.perform(outgoing.handoff.offer(pages, num_units))

    def pull(
        self,
        link: Link,
        wanted: Sequence[tuple[int, int]],
        num_units: int,
        adopter: Owner,
        *,
        deadline_s: float,
    ) -> bytes:
        assert isinstance(link, SimLink)
        transfer = self._random.randbytes(16)
        request = Reserve(transfer=transfer, num_units=num_units, deadline_ms=round(deadline_s * 1000))
        incoming = self._arrive(link, request)
        handoff = incoming.handoff
        incoming.perform(handoff.pull(adopter, link.hello.incarnation, wanted))
        if link.is_lost:
            incoming.perform(handoff.peer_lost())
        return transfer

    def abort(self, transfer: bytes, reason: str) -> None:
        end = self._outgoing.get(transfer) or self._incoming.get(transfer)
        if end is not None:
            end.perform(end.handoff.abort(reason))

    def take_granted(self) -> list[bytes]:
        granted, self._granted = self._granted, []
        return granted

    def poll(self) -> list[Ended]:
        self.process.hear()
        if self.process.clock.now_s() >= self._next_tick_s:
            self._tick()
        ended, self._ended = self._ended, []
        return ended

    # What its transfers tell.

    def granted(self, transfer: bytes) -> None:
        self._granted.append(transfer)

    def finished(self, end: SimOutgoing | SimIncoming, finished: Finished) -> None:
        handoff = end.handoff
        ended = Ended(handoff.transfer, finished.outcome, finished.reason, tuple(handoff.pages), None)
        self._ended.append(ended)

    def plan(self, link: SimLink, *, is_source: bool) -> TransferPlan:
        """is_source: from here to the other end of the link."""
        ours, theirs = self.hello.layout, link.hello.layout
        return plan_transfer(ours, theirs, 0, 0) if is_source else plan_transfer(theirs, ours, 0, 0)

    # The rest is how.

    def _terms(self, plan: TransferPlan) -> Terms:
        return Terms(
            self.pool,
            self.process.clock,
            TIMING,
            plan.source.units_per_page,
            plan.destination.units_per_page,
        )

    def _reserve(self, link: SimLink, request: Reserve) -> None:
        if request.transfer in self._incoming or request.transfer in self.landings:
            link.drop(WireError("a reservation that was made before", reason="protocol"))
            return
        terms = self._terms(self.plan(link, is_source=False))
        adopter = self.admit(request, terms.num_destination_pages(request.num_units))
        if adopter is None:
            link.send(Refuse(transfer=request.transfer, reason="no room"))
            return
        incoming = self._arrive(link, request)
        incoming.perform(incoming.handoff.grant(adopter))

    def _depart(self, link: SimLink, request: Reserve | Pull) -> SimOutgoing:
        handoff = SourceHandoff(request, self._terms(self.plan(link, is_source=True)))
        outgoing = self._outgoing[request.transfer] = SimOutgoing(handoff, self, link)
        return outgoing

    def _arrive(self, link: SimLink, request: Reserve) -> SimIncoming:
        terms = self._terms(self.plan(link, is_source=False))
        handoff = DestinationHandoff(request, next(self._epochs), terms)
        incoming = self._incoming[request.transfer] = SimIncoming(handoff, request.num_units, self, link)
        return incoming

    def _ends(self) -> list[SimOutgoing | SimIncoming]:
        return [*self._outgoing.values(), *self._incoming.values()]

    def _tick(self) -> None:
        self._next_tick_s = self.process.clock.now_s() + TICK_S
        for end in self._ends():
            if end.link.is_lost:  # what is left to be said goes over another link to the same process
                end.link = self._link_to(end.link.hello.incarnation) or end.link
            end.perform(end.handoff.tick())
        self._outgoing = {id_: end for id_, end in self._outgoing.items() if not end.is_over}
        self._incoming = {id_: end for id_, end in self._incoming.items() if not end.is_over}

    def _link_to(self, incarnation: bytes) -> SimLink | None:
        return next((link for link in self.links if link.hello.incarnation == incarnation), None)

    def _peer_died(self, peer: "SimEndpoint") -> None:
        delay_s = self._random.uniform(*DEATH_IS_KNOWN_S)
        self.process.later(delay_s, lambda: self.process.post(lambda: self._bury(peer)))

    def _bury(self, peer: "SimEndpoint") -> None:
        self.pieces.target_died(peer)
        self.landings.writer_died(peer.hello.incarnation)
        for incoming in list(self._incoming.values()):
            if incoming.link.hello.incarnation == peer.hello.incarnation:
                incoming.perform(incoming.handoff.peer_lost())

    def _note(self, error: WireError) -> None:
        self._trace.dropped(self.process.name, error)


def _layout(page_size: int) -> PageLayout:
    """Eight bytes a token: an entry of model.py."""
    return PageLayout(
        tp_size=1, page_size=page_size, num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32"
    )
