"""A simulated KV endpoint: the production transfers over simulated links and a simulated rank.

Links of a dead source end before its death is known; until then its writers may still write.
"""

from functools import partial
from random import Random
from typing import Final

from baton.errors import WireError
from baton.kvtransfer.links import Link
from baton.kvtransfer.page_endpoint import PageEndpoint
from baton.kvtransfer.protocol.handoff import Timing, TransferEnded
from baton.kvtransfer.protocol.messages import AnyMessage, decode, encode
from baton.kvtransfer.protocol.pull import ID_BYTES
from baton.kvtransfer.settings import EndpointSettings
from baton.pages import PageLayout
from baton.sim.engine import FINGERPRINT, SimEngine
from baton.sim.network import End, Network
from baton.sim.process import SimProcess
from baton.sim.rank import SimRank
from baton.sim.trace import Recorder

TICK_S: Final = 0.25
TIMING: Final = Timing(lease_s=2.0, heartbeat_s=0.5)
DEATH_IS_KNOWN_S: Final = (0.0, 0.5)  # after a process has died, to the processes that it could write to


class SimLink(Link):
    """A link without socket and thread. Both ends know each other's Hello from the start."""

    def __init__(self, endpoint: "SimEndpoint", end: End, peer: "SimEndpoint") -> None:
        self.hello = peer.hello
        self.number = 0
        self.is_lost = False
        self._endpoint = endpoint
        self._end = end
        end.on_body = lambda body: endpoint.received(self, decode(body))
        end.on_end = self._lost

    def send(self, message: AnyMessage) -> None:
        """See Link."""
        self._end.send(encode(message))

    def digest_key(self, transfer: bytes) -> bytes:
        """See Link. No forger exists here, so no digest is keyed."""
        return transfer.ljust(32)

    def drop(self, error: WireError) -> None:
        """See Link."""
        self._endpoint.recorder.dropped(self._endpoint.process.name, error)
        self._end.abort()

    def close(self) -> None:
        """See Link."""
        self._end.close()

    def _lost(self) -> None:
        self.is_lost = True
        self._endpoint.lost(self)


class SimEndpoint(PageEndpoint):
    """A PageEndpoint of one process. Turns of the process make all calls."""

    def __init__(
        self,
        process: SimProcess,
        engine: SimEngine,
        network: Network,
        random: Random,
        recorder: Recorder,
    ) -> None:
        settings = EndpointSettings(
            key=b"", fingerprint=FINGERPRINT, layout=_layout(engine.machine.page_size), timing=TIMING
        )
        self.rank = rank = SimRank(process, engine, settings.layout, self._on_part_event, network, random)
        super().__init__(settings, rank.incarnation, engine.pages, process.clock, rank)
        self.lend = engine.pin
        self.process = process
        self.recorder = recorder
        self.hello = settings.hello(rank.incarnation)
        self.links: list[SimLink] = []
        self._network = network
        self._random = random
        self._next_tick_s = process.clock.now_s()

    @property
    def has_writers(self) -> bool:
        """Bytes may still be written, here or by this process."""
        return bool(self.rank.registrations.num_open() or self.rank.pieces.num_going)

    def counts(self) -> dict[str, int]:
        """See PageEndpoint."""
        counters = self.rank.registrations.counters
        return {"pieces": counters.num_pieces, "stale_pieces": counters.num_stale}

    def poll(self) -> list[TransferEnded]:
        """See PageEndpoint."""
        self.process.hear()
        if self.process.clock.now_s() >= self._next_tick_s:
            self._next_tick_s = self.process.clock.now_s() + TICK_S
            self._transfer_manager.tick(self._link_to)
        return self._transfer_manager.take_ended()

    def connect(self, other: "SimEndpoint", *, is_direct: bool) -> SimLink:
        """Link two endpoints. is_direct: each side writes into the other's pages itself."""
        ours, theirs = self._network.connect(self.process, other.process)
        link = self._join(ours, other, is_direct=is_direct)
        other._join(theirs, self, is_direct=is_direct)
        return link

    def received(self, link: SimLink, message: AnyMessage) -> None:
        """Take a message of a link."""
        self._received(link, message)

    def lost(self, link: SimLink) -> None:
        """Take the end of a link."""
        self.links.remove(link)
        self._on_link_lost(link)

    def _join(self, end: End, other: "SimEndpoint", *, is_direct: bool) -> SimLink:
        link = SimLink(self, end, other)
        self.links.append(link)
        self.rank.pieces.reach(other.rank, is_direct=is_direct)
        self.rank.registrations.writer_came(other.incarnation)
        other.process.on_death.append(lambda: self._died(other))
        return link

    def _link_to(self, incarnation: bytes) -> SimLink | None:
        return next((link for link in self.links if link.hello.incarnation == incarnation), None)

    def _died(self, peer: "SimEndpoint") -> None:
        delay_s = self._random.uniform(*DEATH_IS_KNOWN_S)
        on_peer_death = partial(self.rank.on_peer_death, peer.incarnation)
        self.process.later(delay_s, partial(self.process.post, on_peer_death))

    def _new_id(self) -> bytes:
        return self._random.randbytes(ID_BYTES)


def _layout(page_size: int) -> PageLayout:
    """Return a layout of eight bytes a token: see ENTRY_BYTES."""
    return PageLayout(
        tp_size=1, page_size=page_size, num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32"
    )
