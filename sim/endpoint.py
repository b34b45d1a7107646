"""A simulated KV endpoint: the production transfers and rank executors over simulated links and transports.

Rank 0 runs in the endpoint's process, further ranks there or in another process, which can die alone.
Simulated clusters have one rank a replica.

Links of a dead source end before its death is known; until then its writers may still write.

Pages of a pool are written in one of two ways, as between real ranks:

- by the destination's receiver, as over TCP: a piece travels by itself, is admitted by its registration
  or drained, and may be damaged on the way;
- directly by the source, as in shared memory, where the two ranks can: the source checks that the pages are
  granted and writes a moment later, even when the destination has ended meanwhile. Until then the ledger
  alone prevents the reuse of a page.

Either writer may be held up between its check and its write. When the transfer ends meanwhile, the writer
still writes one unit, and then leaves the page.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from random import Random
from typing import Final

from baton.engine.cache.page_pool import PagePool
from baton.errors import TransferFailed, WireError
from baton.kvtransfer.endpoint import EndpointSettings, PageEndpoint
from baton.kvtransfer.links import Link
from baton.kvtransfer.protocol.handoff import Timing
from baton.kvtransfer.protocol.messages import (
    ID_BYTES,
    AnyMessage,
    PeerRank,
    RankListenerAddresses,
    decode,
    encode,
)
from baton.kvtransfer.ranks.executor import CompletedSteps, Emit, RankExecutor
from baton.kvtransfer.ranks.messages import Command, DropLink, OfShard, ShardEvent, registration_id
from baton.kvtransfer.transports.base import (
    LocalRank,
    OnEnd,
    Piece,
    PieceOutcome,
    RankSettings,
    TransportSet,
)
from baton.kvtransfer.transports.receive_registration import ReceiveRegistrations, Writing
from baton.messages.bounds import LINK_TIMEOUT_S, Kind
from baton.rpc.auth import KeyRing
from baton.rpc.connection import DroppedPeers
from baton.sim.engine import MODEL, KvMemory, page_layout
from baton.sim.network import End, Network, Recorder
from baton.sim.process import Call, SimProcess

# Ranks.

FLIPPED: Final = 0x40
DEATH_IS_KNOWN_S: Final = (0.0, 0.5)  # after a process has died, to the ranks whose pages it could write
TAKEN_BACK: Final = "the destination has taken pages back"


class SimBackground:
    """A `Background` of virtual time."""

    def __init__(self, process: SimProcess, network: Network) -> None:
        self._process = process
        self._network = network

    def start(self, call: Call) -> None:
        self._process.later(self._network.delay_s(), call)

    def when(self, has_happened: Callable[[], bool], call: Call) -> None:
        self._process.later(self._network.delay_s(), partial(self._look, has_happened, call))

    def close(self) -> None:
        """Conditions are checked until the process ends."""

    def _look(self, has_happened: Callable[[], bool], call: Call) -> None:
        if has_happened():
            call()
        else:
            self.when(has_happened, call)


class SimRank:
    """One rank of a replica, its memory, and the faults of the pieces that leave it."""

    def __init__(
        self,
        settings: RankSettings,
        incarnation: bytes,
        process: SimProcess,
        memory: KvMemory,
        pool: PagePool,
        network: Network,
        random: Random,
        emit: Emit,
        steps: CompletedSteps | None,
    ) -> None:
        """pool: the ledger of the replica. emit: called by turns of the process. steps: see RankExecutor."""
        self.number = settings.rank
        self.process = process
        self.memory = memory
        self.pool = pool
        self.incarnation = incarnation
        self.network = network
        self.random = random
        self.flip_chance = 0.0  # faults: the chance that a unit arrives damaged,
        self.break_chance = 0.0  # the chance that a piece breaks its connection,
        self.delay_s = 0.0  # and a delay of each piece
        self.num_pieces = 0  # under way from here
        self.is_lost = False  # commands and events are lost from now on
        self.is_dead = False  # the endpoint knows that the rank's process is dead
        self.peers: dict[bytes, tuple[SimRank, bool]] = {}  # incarnation -> rank, may be written directly
        self.shards: dict[bytes, tuple[bytes, int]] = {}  # registration -> (transfer, shard)
        self._writers: set[bytes] = set()  # incarnations that may write directly, and live
        self.executor = RankExecutor(
            settings,
            memory.tensor,
            memory.shared,
            incarnation,
            TransportSet([SimTransport(self, is_direct=is_direct) for is_direct in (True, False)]),
            process.post,
            emit,
            clock=process.clock,
            dropped=DroppedPeers(),
            steps=steps,
            background=SimBackground(process, network),
        )

    @property
    def registrations(self) -> ReceiveRegistrations:
        return self.executor.rank.registrations

    def perform(self, command: Command) -> None:
        """Perform a command in a turn of the rank's process."""
        if isinstance(command, OfShard):
            shard = command.transfer, command.shard
            self.shards[registration_id(*shard)] = shard
        self.executor.perform(command)

    def admit_writer(self, source: "SimRank") -> None:
        """Let the source write these pages directly until its process has died, as `DirectListener` does."""
        if source.incarnation not in self._writers:
            self._writers.add(source.incarnation)
            self.registrations.writer_came(source.incarnation)
            source.process.on_death.append(partial(self._writer_died, source.incarnation))

    def _writer_died(self, incarnation: bytes) -> None:
        self.process.later(
            self.random.uniform(*DEATH_IS_KNOWN_S), partial(self._on_writer_death, incarnation)
        )

    def _on_writer_death(self, incarnation: bytes) -> None:
        self._writers.discard(incarnation)
        self.executor.rank.on_writer_death(self.registrations.writer_died(incarnation))


class SimListener:
    """A `TransportListener`: simulated senders find the rank by its incarnation."""

    address = "simulated"

    def close(self) -> None:
        """A simulated rank listens until its process ends."""


class SimTransport:
    """A `Transport` between simulated ranks."""

    is_automatic = True

    def __init__(self, rank: SimRank, *, is_direct: bool) -> None:
        """is_direct: the source writes the destination's pages itself."""
        self.name = "shm" if is_direct else "tcp"
        self._rank = rank
        self._is_direct = is_direct

    def can_serve(self, source: RankListenerAddresses, destination: RankListenerAddresses) -> bool:
        return not self._is_direct or self._rank.peers[destination.incarnation][1]

    def listen(self, rank: LocalRank) -> SimListener:
        return SimListener()

    def connect(self, rank: LocalRank, peer: PeerRank) -> "SimSender":
        target, _ = self._rank.peers[peer.listeners.incarnation]
        return SimSender(self._rank, target, is_direct=self._is_direct)


@dataclass(slots=True, eq=False)
class _MovingPiece:
    piece: Piece
    on_end: OnEnd
    is_inside: bool = False  # its direct writer has checked the pages, and has not written them yet
    contents: list[bytes] = field(default_factory=list)  # of each run


class SimSender:
    """A `Sender`. Reads and writes go on beside the turns of both processes."""

    def __init__(self, source: SimRank, target: SimRank, *, is_direct: bool) -> None:
        self.is_broken = False
        self._source = source
        self._target = target
        self._network = source.network
        self._is_direct = is_direct
        self._moving: dict[_MovingPiece, None] = {}  # that have not ended

    def open(self) -> None:
        source, target = self._source.process, self._target.process
        is_parted = not self._is_direct and self._network.is_parted(source, target)
        if target.is_dead or target.is_paused or is_parted:
            raise TransferFailed(f"{target.name} cannot be reached")
        if self._is_direct:
            self._target.admit_writer(self._source)
        else:
            target.on_death.append(partial(self._later, partial(self._break, f"{target.name} is gone")))

    def push(self, piece: Piece, on_end: OnEnd) -> None:
        moving, source = _MovingPiece(piece, on_end), self._source
        self._moving[moving] = None
        source.num_pieces += 1
        if self.is_broken:
            self._end(moving, "the connection was broken before")
        elif source.random.random() < source.break_chance:
            self._later(partial(self._break, "the connection is broken"))
        else:
            num_tokens = (piece.stop - piece.first) * piece.plan.unit_tokens
            move = self._enter if self._is_direct else self._leave_source
            self._later(partial(move, moving), self._network.moves_s(num_tokens, source.num_pieces))

    def abort(self, transfer: bytes) -> None:
        """As `Sender`. A direct writer that is inside the pages is waited for: it writes now."""
        for moving in [each for each in self._moving if each.piece.transfer == transfer]:
            self._stop(moving, "aborted")

    def close(self) -> None:
        self._break("the transport was closed")

    def _break(self, reason: str) -> None:
        self.is_broken = True
        for moving in list(self._moving):
            self._stop(moving, reason)

    def _stop(self, moving: _MovingPiece, reason: str) -> None:
        if moving.is_inside:
            self._write(moving, is_whole=False)
        self._end(moving, reason)

    def _end(self, moving: _MovingPiece, reason: str = "") -> None:
        """End a piece, unless it has ended. reason: why it has failed; "" when it has arrived."""
        if moving in self._moving:
            del self._moving[moving]
            self._source.num_pieces -= 1
            num_bytes = 0 if reason else moving.piece.num_bytes
            moving.on_end(PieceOutcome(is_done=not reason, num_bytes=num_bytes, reason=reason))

    def _later(self, call: Call, more_s: float = 0.0) -> None:
        """Make a call of the source a moment later."""
        self._source.process.later(self._network.delay_s() + self._source.delay_s + more_s, call)

    # Direct writes.

    def _enter(self, moving: _MovingPiece) -> None:
        if moving not in self._moving:
            return
        if self._is_granted(moving.piece):
            self._read(moving)
            moving.is_inside = True
            self._source.process.later(self._nap_s(), partial(self._leave, moving))
        else:
            self._end(moving, TAKEN_BACK)

    def _leave(self, moving: _MovingPiece) -> None:
        if moving in self._moving:
            self._write(moving, is_whole=True)
            self._end(moving, "" if self._is_granted(moving.piece) else TAKEN_BACK)

    def _is_granted(self, piece: Piece) -> bool:
        return self._target.memory.generations.match(*piece.granted(piece.first, piece.stop))

    # Writes through the receiver.

    def _leave_source(self, moving: _MovingPiece) -> None:
        if moving not in self._moving:
            return
        self._read(moving)
        target = self._target.process
        wait_s = self._network.connects_in_s(self._source.process, target)
        if wait_s < LINK_TIMEOUT_S:
            target.later(wait_s + self._network.delay_s(), partial(self._arrive, moving))
        else:
            silent = partial(self._break, f"{target.name} is silent")
            self._source.process.later(LINK_TIMEOUT_S, silent)

    def _arrive(self, moving: _MovingPiece) -> None:
        piece = moving.piece
        writing = self._target.registrations.begin(
            piece.transfer, piece.epoch, piece.first, piece.stop, piece.num_bytes
        )
        if writing is None:
            self._later(partial(self._end, moving, "the destination has ended the transfer"))
        else:
            self._target.process.later(self._nap_s(), partial(self._receive, moving, writing))

    def _receive(self, moving: _MovingPiece, writing: Writing) -> None:
        is_whole = not writing.must_stop
        self._write(moving, is_whole=is_whole)
        self._target.registrations.end(writing, is_whole=is_whole)
        self._later(partial(self._end, moving, "" if is_whole else "the destination has ended the transfer"))

    # Both.

    def _nap_s(self) -> float:
        return self._network.nap_s(self._source.random)

    def _read(self, moving: _MovingPiece) -> None:
        piece, source = moving.piece, self._source
        side = piece.plan.source
        reader = "source", source.shards[piece.transfer][0]
        for page in piece.source_pages[piece.first // side.units_per_page : side.num_pages(piece.stop)]:
            assert reader in source.pool.owners(page), f"page {page} is read unheld"
        content, run_bytes = source.memory.bytes, piece.plan.run_bytes
        offsets = side.offsets(piece.first, piece.stop, piece.source_pages).tolist()
        moving.contents = [bytes(content[offset : offset + run_bytes]) for offset in offsets]

    def _write(self, moving: _MovingPiece, *, is_whole: bool) -> None:
        """Write the piece; a writer that was stopped before its write (not is_whole) writes one unit."""
        piece, target = moving.piece, self._target
        side = piece.plan.destination
        stop = piece.stop if is_whole else piece.first + 1
        writer = "writer", *self._source.shards[piece.transfer]
        for page in piece.destination_pages[piece.first // side.units_per_page : side.num_pages(stop)]:
            owners = target.pool.owners(page)
            is_held = writer in owners or target.process.is_dead
            assert is_held, f"{target.process.name}: page {page} is {owners}'s while a writer is in it"
        content, run_bytes = target.memory.bytes, piece.plan.run_bytes
        offsets = side.offsets(piece.first, stop, piece.destination_pages).tolist()
        runs_per_unit = len(offsets) // (stop - piece.first)
        for number, (offset, run) in enumerate(zip(offsets, moving.contents, strict=False)):
            content[offset : offset + run_bytes] = run
            is_first = number % runs_per_unit == 0
            if is_first and self._source.random.random() < self._source.flip_chance:
                content[offset] ^= FLIPPED


class SimRanks:
    """The `ReplicaRanks` of a simulated replica."""

    def __init__(self, home: SimProcess) -> None:
        """home: the process of the endpoint."""
        self.all: list[SimRank] = []
        self._home = home

    def complaint(self) -> str | None:
        lost = [str(rank.number) for rank in self.all if rank.is_lost]
        return f"rank {', '.join(lost)} is lost" if lost else None

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


# The endpoint.

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
        replica = SimRanks(process)
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
