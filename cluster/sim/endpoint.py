"""An endpoint of the simulation: the real transfers, over wires and between ranks that carry no real bytes.

A source that dies is known to be dead some time after its links have ended; until then its writers may live.
"""

from functools import partial
from random import Random
from typing import Final

from baton.cluster.sim.engine import FINGERPRINT, SimEngine
from baton.cluster.sim.host import Trace
from baton.cluster.sim.kv_link import SimLink
from baton.cluster.sim.network import End, Network
from baton.cluster.sim.process import Process
from baton.cluster.sim.rank import SimRank
from baton.errors import WireError
from baton.kvtransfer.ended import Ended
from baton.kvtransfer.endpoint_settings import Admit, EndpointSettings
from baton.kvtransfer.handoff import Timing
from baton.kvtransfer.landing import Landings
from baton.kvtransfer.page_endpoint import PageEndpoint
from baton.kvtransfer.reservation import ID_BYTES
from baton.layout import PageLayout

TICK_S: Final = 0.25
TIMING: Final = Timing(lease_s=2.0, heartbeat_s=0.5)
DEATH_IS_KNOWN_S: Final = (0.0, 0.5)  # after a process has died, to those that it could write to


class SimEndpoint(PageEndpoint):
    """All calls are made by its process's turns."""

    def __init__(
        self,
        process: Process,
        engine: SimEngine,
        network: Network,
        random: Random,
        trace: Trace,
        admit: Admit,
    ) -> None:
        settings = EndpointSettings(
            key=b"", fingerprint=FINGERPRINT, layout=_layout(engine.machine.page_size), timing=TIMING
        )
        self.rank = rank = SimRank(process, engine, settings.layout, self._hear, network, random)
        super().__init__(settings, rank.incarnation, engine.pages, admit, process.clock, rank)
        self.lend = engine.lend
        self.process = process
        self.pieces = rank.pieces
        self.hello = settings.hello(rank.incarnation)
        self.links: list[SimLink] = []
        self._network = network
        self._random = random
        self._trace = trace
        self._next_tick_s = process.clock.now_s()

    @property
    def landings(self) -> Landings:
        return self.rank.landings

    def counts(self) -> dict[str, int]:
        counters = self.landings.counters
        return {"pieces": counters.num_pieces, "stale_pieces": counters.num_stale}

    def poll(self) -> list[Ended]:
        self.process.hear()
        if self.process.clock.now_s() >= self._next_tick_s:
            self._next_tick_s = self.process.clock.now_s() + TICK_S
            self._traffic.tick(self._link_to)
        return self._traffic.take_ended()

    def connect(self, other: "SimEndpoint", *, is_direct: bool) -> SimLink:
        """is_direct: both sides write into each other's pools by their own hand."""
        ours, theirs = self._network.connect(self.process, other.process)
        link = self._join(ours, other, is_direct=is_direct)
        other._join(theirs, self, is_direct=is_direct)
        return link

    def _join(self, end: End, other: "SimEndpoint", *, is_direct: bool) -> SimLink:
        link = SimLink(end, other.hello, self._received, self._ended, self._note)
        self.links.append(link)
        self.pieces.reach(other.rank, is_direct=is_direct)
        self.landings.writer_came(other.incarnation)
        other.process.on_death.append(lambda: self._died(other))
        return link

    def _ended(self, link: SimLink) -> None:
        self.links.remove(link)
        self._lost(link)

    def _link_to(self, incarnation: bytes) -> SimLink | None:
        return next((link for link in self.links if link.hello.incarnation == incarnation), None)

    def _died(self, peer: "SimEndpoint") -> None:
        delay_s = self._random.uniform(*DEATH_IS_KNOWN_S)
        bury = partial(self.rank.bury, peer.incarnation)
        self.process.later(delay_s, partial(self.process.post, bury))

    def _new_id(self) -> bytes:
        return self._random.randbytes(ID_BYTES)

    def _note(self, error: WireError) -> None:
        self._trace.dropped(self.process.name, error)


def _layout(page_size: int) -> PageLayout:
    """Eight bytes a token: an entry of model.py."""
    return PageLayout(
        tp_size=1, page_size=page_size, num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32"
    )
