"""A simulated KV endpoint: the production transfers over simulated links and ranks (sim/rank.py).

Rank 0 runs in the endpoint's process, further ranks there or in another process, which can die alone.
Simulated clusters have one rank a replica.

Links of a dead source end before its death is known; until then its writers may still write.
"""

from collections.abc import Sequence
from functools import partial
from itertools import count
from random import Random
from typing import Final

from baton.engine.cache.page_pool import PagePool
from baton.errors import WireError
from baton.kvtransfer.endpoint import EndpointSettings, PageEndpoint
from baton.kvtransfer.links import Link
from baton.kvtransfer.protocol.handoff import Timing
from baton.kvtransfer.protocol.messages import ID_BYTES, AnyMessage, decode, encode
from baton.kvtransfer.ranks.executor import CompletedSteps
from baton.kvtransfer.ranks.messages import Command, DropLink, Route, ShardEvent
from baton.kvtransfer.ranks.ranks import routes
from baton.kvtransfer.transports.receive_registration import ReceiveRegistrations
from baton.messages.bounds import Kind
from baton.pages import PageLayout
from baton.rpc.auth import KeyRing
from baton.sim.engine import MODEL, KvMemory, page_layout
from baton.sim.network import End, Network, Recorder
from baton.sim.process import SimProcess
from baton.sim.rank import SimRank


class SimRanks:
    """The `ReplicaRanks` of a simulated replica."""

    def __init__(self, home: SimProcess, layout: PageLayout) -> None:
        """home: the process of the endpoint. layout: of the replica."""
        self.all: list[SimRank] = []
        self._home = home
        self._layout = layout

    @property
    def registrations(self) -> ReceiveRegistrations:
        return self.all[0].registrations

    def complaint(self) -> str | None:
        lost = [str(rank.number) for rank in self.all if rank.is_lost]
        return f"rank {', '.join(lost)} is lost" if lost else None

    def routes(self, link: Link, num_layer_groups: int, *, is_source: bool) -> list[Route]:
        return routes(self._layout, link, num_layer_groups, is_source=is_source)

    def perform(self, rank: int, command: Command) -> None:
        """Perform a command: at once in the endpoint's process, or in a later turn of another process."""
        performing = self.all[rank]
        if performing.process is self._home:
            performing.perform(command)
        elif not performing.is_lost:
            performing.process.post(partial(performing.perform, command))

    def drop(self, link: Link) -> None:
        """See ReplicaRanks."""
        for rank in self.all:
            self.perform(rank.number, DropLink(link=link.number))


KEYS: Final = KeyRing.of(bytes(16), Kind.WORKER)
TIMING: Final = Timing(lease_s=2.0, heartbeat_s=0.5)


class SimLink(Link):
    """A link without socket and thread. Both ends know each other's Hello from the start."""

    def __init__(self, endpoint: "SimEndpoint", number: int, end: End, peer: "SimEndpoint") -> None:
        self.hello = peer.hello
        self.host = peer.process.name
        self.number = number
        self.is_lost = False
        self._endpoint = endpoint
        self._end = end
        end.on_body = lambda body: endpoint.received(self, decode(body))
        end.on_end = self._lost

    def send(self, message: AnyMessage) -> None:
        self._end.send(encode(message))

    def digest_key(self, transfer: bytes) -> bytes:
        """See Link. No forger exists here, so no digest is keyed."""
        return transfer.ljust(32)

    def drop(self, error: WireError) -> None:
        self._endpoint.recorder.dropped(self._endpoint.process.name, error)
        self._end.abort()

    def close(self) -> None:
        self._end.close()

    def _lost(self) -> None:
        self.is_lost = True
        self._endpoint.lost(self)


class SimEndpoint(PageEndpoint):
    """A PageEndpoint of one process. Turns of the process make all calls."""

    def __init__(
        self,
        process: SimProcess,
        pool: PagePool,
        memory: KvMemory,
        network: Network,
        random: Random,
        recorder: Recorder,
        *,
        other_ranks: Sequence[tuple[SimProcess, KvMemory]] = (),
        steps: CompletedSteps | None = None,
        fingerprint: str = MODEL,
    ) -> None:
        """memory: of rank 0. other_ranks: the process and the memory of each other rank.

        Linked endpoints have the same number of ranks. steps: the progress of all ranks' steps; None: pages
        that are released are already written.
        """
        homes = (process, memory), *other_ranks
        settings = EndpointSettings(
            keys=KEYS, fingerprint=fingerprint, layout=page_layout(pool.page_size, len(homes)), timing=TIMING
        )
        incarnations = [random.randbytes(ID_BYTES) for _ in homes]
        replica = SimRanks(process, settings.layout)
        super().__init__(settings, incarnations[0], pool, process.clock, replica)
        self.process = process
        self.pool = pool
        self.recorder = recorder
        self.ranks = replica.all
        self.links: list[SimLink] = []
        self._network = network
        self._random = random
        self._link_numbers = count()
        for number, (incarnation, home) in enumerate(zip(incarnations, homes, strict=True)):
            self.ranks.append(
                SimRank(
                    settings.for_rank(number),
                    incarnation,
                    *home,
                    pool,
                    network,
                    random,
                    partial(self._emitted, number),
                    steps,
                )
            )
        self.hello = settings.hello(self.incarnation, tuple(rank.executor.listeners for rank in self.ranks))

    @property
    def has_writers(self) -> bool:
        """True while bytes may be written here or by this process."""
        ranks = (rank for rank in self.ranks if not rank.is_dead)
        return any(rank.registrations.num_open() or rank.num_pieces for rank in ranks)

    def counts(self) -> dict[str, int]:
        return super().counts() | self.ranks[0].executor.counts()

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

    def lose_ranks(self, process: SimProcess) -> None:
        """Report the loss of the ranks in another process. Call again at its death, if it still lived."""
        for rank in self.ranks:
            if rank.process is process:
                rank.is_lost, rank.is_dead = True, process.is_dead
                self._on_rank_lost(rank.number, process.is_dead)

    def _join(self, end: End, other: "SimEndpoint", *, is_direct: bool) -> SimLink:
        link = SimLink(self, next(self._link_numbers), end, other)
        self.links.append(link)
        for ours, theirs in zip(self.ranks, other.ranks, strict=True):
            ours.peers[theirs.incarnation] = theirs, is_direct
        return link

    def _make_posted_calls(self) -> None:
        self.process.hear()

    def _link_to(self, incarnation: bytes) -> SimLink | None:
        return next((link for link in self.links if link.hello.incarnation == incarnation), None)

    def _emitted(self, number: int, event: ShardEvent) -> None:
        """Take an event of a rank; those of another process come in a later turn."""
        if self.ranks[number].process is self.process:
            self._on_shard_event(event)
        else:
            self.process.post(partial(self._heard, number, event))

    def _heard(self, number: int, event: ShardEvent) -> None:
        if not self.ranks[number].is_lost:
            self._on_shard_event(event)

    def _new_id(self) -> bytes:
        return self._random.randbytes(ID_BYTES)
