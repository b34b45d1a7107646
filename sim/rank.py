"""A simulated rank: the production executor in a simulated process, over simulated transports.

Pages of a pool are written in one of two ways, as between real ranks:

- by the destination's receiver, as over TCP: a piece travels by itself, is admitted by its registration
  or drained, and may be damaged on the way;
- directly by the source, as in shared memory, where the two ranks can: the source checks that the pages are
  granted and writes a moment later, even when the destination has ended meanwhile. Until then the ledger
  alone prevents the reuse of a page.

Either writer may be held up between its check and its write. When the transfer ends meanwhile, the writer
still writes one unit, and then leaves the page.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Final

import numpy as np

from baton.engine.cache.page_pool import PagePool
from baton.errors import TransferFailed
from baton.kvtransfer.protocol.messages import PeerRank, RankListenerAddresses
from baton.kvtransfer.ranks.executor import CompletedSteps, Emit, RankExecutor
from baton.kvtransfer.ranks.messages import Command, OfShard, registration_id
from baton.kvtransfer.transports.base import (
    LocalRank,
    OnEnd,
    Piece,
    PieceOutcome,
    RankSettings,
    TransportSet,
)
from baton.kvtransfer.transports.pages import as_words
from baton.kvtransfer.transports.receive_registration import ReceiveRegistrations, Writing
from baton.messages.bounds import LINK_TIMEOUT_S
from baton.rpc.connection import DroppedPeers
from baton.sim.engine import KvMemory
from baton.sim.network import Network
from baton.sim.process import Call, SimProcess

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
        """Conditions are asked until the process ends."""

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
        self.process.later(self.random.uniform(*DEATH_IS_KNOWN_S), partial(self._bury, incarnation))

    def _bury(self, incarnation: bytes) -> None:
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
            num_tokens = (piece.stop - piece.first) * piece.transfer.plan.unit_tokens
            move = self._enter if self._is_direct else self._leave_source
            self._later(partial(move, moving), self._network.moves_s(num_tokens, source.num_pieces))

    def abort(self, transfer: bytes) -> None:
        """As `Sender`. A direct writer that is inside the pages is waited for: it writes now."""
        for moving in [each for each in self._moving if each.piece.transfer.id == transfer]:
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
        transfer, side = piece.transfer, piece.transfer.plan.destination
        used = slice(piece.first // side.units_per_page, side.num_pages(piece.stop))
        pages = np.asarray(transfer.destination_pages[used], dtype=np.int64)
        words = as_words(transfer.destination_generations[used])
        return self._target.memory.generations.match(pages, words)

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
        piece, transfer = moving.piece, moving.piece.transfer
        writing = self._target.registrations.begin(
            transfer.id, transfer.epoch, piece.first, piece.stop, piece.num_bytes
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
        transfer, side = piece.transfer, piece.transfer.plan.source
        reader = "reader", source.shards[transfer.id][0]
        for page in transfer.source_pages[piece.first // side.units_per_page : side.num_pages(piece.stop)]:
            assert reader in source.pool.owners(page), f"page {page} is read unheld"
        content, run_bytes = source.memory.bytes, transfer.plan.run_bytes
        offsets = side.offsets(piece.first, piece.stop, transfer.source_pages).tolist()
        moving.contents = [bytes(content[offset : offset + run_bytes]) for offset in offsets]

    def _write(self, moving: _MovingPiece, *, is_whole: bool) -> None:
        """Write the piece; a writer that was stopped before its write (not is_whole) writes one unit."""
        piece, target = moving.piece, self._target
        transfer, side = piece.transfer, piece.transfer.plan.destination
        stop = piece.stop if is_whole else piece.first + 1
        writer = "writer", *self._source.shards[transfer.id]
        for page in transfer.destination_pages[piece.first // side.units_per_page : side.num_pages(stop)]:
            owners = target.pool.owners(page)
            is_held = writer in owners or target.process.is_dead
            assert is_held, f"{target.process.name}: page {page} is {owners}'s while a writer is in it"
        content, run_bytes = target.memory.bytes, transfer.plan.run_bytes
        offsets = side.offsets(piece.first, stop, transfer.destination_pages).tolist()
        runs_per_unit = len(offsets) // (stop - piece.first)
        for number, (offset, run) in enumerate(zip(offsets, moving.contents, strict=False)):
            content[offset : offset + run_bytes] = run
            is_first = number % runs_per_unit == 0
            if is_first and self._source.random.random() < self._source.flip_chance:
                content[offset] ^= FLIPPED
