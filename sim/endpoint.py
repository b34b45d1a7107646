"""An endpoint of the simulation: the real transfers, over wires and between ranks that carry no real bytes.

A source that dies is known to be dead some time after its links have ended; until then its writers may live.
"""

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Final

from baton.errors import WireError
from baton.kvtransfer.links import Link, OnMessage
from baton.kvtransfer.page_endpoint import PageEndpoint
from baton.kvtransfer.protocol.handoff import Timing, TransferEnded
from baton.kvtransfer.protocol.messages import AnyMessage, EndpointHello, decode, encode
from baton.kvtransfer.protocol.pull import ID_BYTES
from baton.kvtransfer.ranks.receive_registration import ReceiveRegistrations
from baton.kvtransfer.settings import Admit, EndpointSettings
from baton.pages import PageLayout
from baton.sim.engine import FINGERPRINT, SimEngine
from baton.sim.host import Trace
from baton.sim.network import End, Network
from baton.sim.process import SimProcess
from baton.sim.rank import SimRank

# A link between two endpoints of the simulation: what they say about transfers, over a wire of its own.


class SimLink(Link):
    """Has no socket and no thread; both ends of it know each other's Hello from the start."""

    def __init__(
        self,
        end: End,
        hello: EndpointHello,
        on_message: OnMessage,
        on_end: Callable[["SimLink"], None],
        note: Callable[[WireError], None],
    ) -> None:
        self.hello = hello
        self.number = 0
        self.is_lost = False
        self._end = end
        self._on_message = on_message
        self._on_end = on_end
        self._note = note
        end.on_body = self._received
        end.on_end = self._lost

    def send(self, message: AnyMessage) -> None:
        self._end.send(encode(message))

    def digest_key(self, transfer: bytes) -> bytes:
        return transfer.ljust(32)  # nothing here asks for it: there are no forgers

    def drop(self, error: WireError) -> None:
        self._note(error)
        self._end.abort()

    def close(self) -> None:
        self._end.close()

    def _received(self, body: bytes) -> None:
        self._on_message(self, decode(body))

    def _lost(self) -> None:
        self.is_lost = True
        self._on_end(self)


TICK_S: Final = 0.25
TIMING: Final = Timing(lease_s=2.0, heartbeat_s=0.5)
DEATH_IS_KNOWN_S: Final = (0.0, 0.5)  # after a process has died, to those that it could write to


class SimEndpoint(PageEndpoint):
    """All calls are made by its process's turns."""

    def __init__(
        self,
        process: SimProcess,
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
    def registrations(self) -> ReceiveRegistrations:
        return self.rank.registrations

    def counts(self) -> dict[str, int]:
        counters = self.registrations.counters
        return {"pieces": counters.num_pieces, "stale_pieces": counters.num_stale}

    def poll(self) -> list[TransferEnded]:
        self.process.hear()
        if self.process.clock.now_s() >= self._next_tick_s:
            self._next_tick_s = self.process.clock.now_s() + TICK_S
            self._transfer_manager.tick(self._link_to)
        return self._transfer_manager.take_ended()

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
        self.registrations.writer_came(other.incarnation)
        other.process.on_death.append(lambda: self._died(other))
        return link

    def _ended(self, link: SimLink) -> None:
        self.links.remove(link)
        self._lost(link)

    def _link_to(self, incarnation: bytes) -> SimLink | None:
        return next((link for link in self.links if link.hello.incarnation == incarnation), None)

    def _died(self, peer: "SimEndpoint") -> None:
        delay_s = self._random.uniform(*DEATH_IS_KNOWN_S)
        on_peer_death = partial(self.rank.on_peer_death, peer.incarnation)
        self.process.later(delay_s, partial(self.process.post, on_peer_death))

    def _new_id(self) -> bytes:
        return self._random.randbytes(ID_BYTES)

    def _note(self, error: WireError) -> None:
        self._trace.dropped(self.process.name, error)


def _layout(page_size: int) -> PageLayout:
    """Eight bytes a token: an entry of sim/engine.py."""
    return PageLayout(
        tp_size=1, page_size=page_size, num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32"
    )
