"""The one rank of a simulated replica: does for the real state machines what kvtransfer's ranks do.

A pool's pages are written in one of two ways, chosen for each pair of endpoints:

- through the destination's receiver, as over TCP: a piece travels by itself, is let into its landing or
  drained, and may be damaged on the way;
- by the source's own hand, as in shared memory: it looks whether the landing is open, and writes a moment
  later, whatever has become of the destination meanwhile. Only the ledger keeps such a page from being
  reused before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from random import Random
from typing import Final, TypeAlias

from baton.kvtransfer.links import Link
from baton.kvtransfer.protocol.messages import DIGEST_BYTES, RankListenerAddresses
from baton.kvtransfer.protocol.pull import ID_BYTES
from baton.kvtransfer.protocol.transfer_plan import TransferPlan, plan_transfer
from baton.kvtransfer.ranks.digests import differing_units
from baton.kvtransfer.ranks.messages import (
    ClosePart,
    Command,
    DropLink,
    ForgetPart,
    GrantPart,
    HashUnits,
    OpenPart,
    PartEvent,
    PartHashed,
    PartOpened,
    PartReached,
    PartStopped,
    PartVerified,
    PartWritten,
    PeerRank,
    PushPart,
    ReachPeer,
    StopPart,
    VerifyPart,
    WriterDied,
    WriterStopped,
)
from baton.kvtransfer.ranks.ranks import Route
from baton.kvtransfer.ranks.receive_registration import ReceiveRegistration, ReceiveRegistrations, Writing
from baton.kvtransfer.transports.base import Spans
from baton.pages import PageLayout
from baton.sim.engine import ENTRY_BYTES, SimEngine
from baton.sim.network import LINK_TIMEOUT_S, Network
from baton.sim.process import SimProcess

# How the bytes of transfers get from one simulated pool into another, and what can go wrong on the way.

OnEnd: TypeAlias = Callable[[bytes | None, str], None]  # digests of the piece's units, or why it failed
NAPS_S: Final = (0.0, 0.0, 0.0, 0.0, 0.3)
FLIPPED: Final = 0x40


@dataclass(slots=True, eq=False)
class SimPiece:
    """Units [first, stop) of a transfer; `pages` are the destination's, of all its units."""

    transfer: bytes
    epoch: int
    first: int
    stop: int
    unit_tokens: int
    source_pages: tuple[int, ...]
    pages: tuple[int, ...]
    generations: tuple[int, ...]
    on_end: OnEnd
    is_stopped: bool = False
    contents: list[bytes] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        return (self.stop - self.first) * self.unit_tokens * ENTRY_BYTES

    @property
    def digests(self) -> bytes:
        return b"".join(map(digest, self.contents))


def digest(content: bytes | bytearray) -> bytes:
    return blake2b(content, digest_size=DIGEST_BYTES).digest()


class TransferFaults:
    """What a source's pieces suffer at present."""

    def __init__(self) -> None:
        self.flip_chance = 0.0  # that a piece arrives damaged
        self.break_chance = 0.0  # that it does not arrive
        self.delay_s = 0.0  # that each takes longer


class Pieces:
    """What leaves one endpoint. Reading and writing go on beside the turns of both processes."""

    def __init__(self, process: SimProcess, network: Network, random: Random) -> None:
        self.faults = TransferFaults()
        self._process = process
        self._network = network
        self._random = random
        self._targets: dict[bytes, tuple[SimRank, bool]] = {}  # by incarnation
        self._going: dict[SimPiece, SimRank] = {}

    @property
    def num_going(self) -> int:
        return len(self._going)

    def reach(self, target: SimRank, *, is_direct: bool) -> None:
        self._targets.setdefault(target.incarnation, (target, is_direct))

    def is_direct(self, incarnation: bytes) -> bool:
        return self._targets[incarnation][1]

    def push(self, source: SimRank, incarnation: bytes, piece: SimPiece) -> None:
        target, is_direct = self._targets[incarnation]
        self._going[piece] = target
        if self._random.random() < self.faults.break_chance:
            self._later(lambda: self._fail(piece, "broken"))
        elif is_direct:
            self._later(lambda: self._look(source, target, piece))
        else:
            self._later(lambda: self._read(source, target, piece))

    def stop(self, transfer: bytes) -> None:
        """This process reads and writes nothing of it any more; what flies is for its target to refuse."""
        for piece in [piece for piece in self._going if piece.transfer == transfer]:
            piece.is_stopped = True
            del self._going[piece]

    def target_died(self, incarnation: bytes) -> None:
        for piece in [piece for piece, its in self._going.items() if its.incarnation == incarnation]:
            self._fail(piece, "the destination is gone")

    def _later(self, call: Callable[[], None]) -> None:
        self._process.later(self._network.delay_s() + self.faults.delay_s, call)

    def _nap_s(self) -> float:
        """Between looking and writing: a thread may be held up there."""
        return self._random.choice(NAPS_S) + self._network.delay_s()

    # By hand.

    def _look(self, source: SimRank, target: SimRank, piece: SimPiece) -> None:
        if piece.is_stopped:
            return
        units_per_page = target.memory.page_size // piece.unit_tokens
        for index in range(piece.first // units_per_page, -(-piece.stop // units_per_page)):
            if target.open_pages.get(piece.pages[index]) != piece.generations[index]:
                self._fail(piece, "the page is not ours any more")
                return
        self._take_contents(source, piece)
        self._process.later(self._nap_s(), lambda: self._write_by_hand(target, piece))

    def _write_by_hand(self, target: SimRank, piece: SimPiece) -> None:
        if not piece.is_stopped:
            self._write(target, piece)
            self._end(piece)

    # Through the receiver.

    def _read(self, source: SimRank, target: SimRank, piece: SimPiece) -> None:
        if piece.is_stopped:
            return
        self._take_contents(source, piece)
        wait_s = self._network.connects_in_s(source.process, target.process)
        if wait_s < LINK_TIMEOUT_S:
            target.process.later(wait_s + self._network.delay_s(), lambda: self._arrive(target, piece))
        else:
            self._process.later(LINK_TIMEOUT_S, lambda: self._fail(piece, "nobody acknowledges it"))

    def _arrive(self, target: SimRank, piece: SimPiece) -> None:
        whole = piece.first, piece.stop, piece.num_bytes
        writing = target.registrations.begin(piece.transfer, piece.epoch, *whole)
        if writing is None:
            self._later(lambda: self._fail(piece, "refused"))
        else:
            target.process.later(self._nap_s(), lambda: self._land(target, piece, writing))

    def _land(self, target: SimRank, piece: SimPiece, writing: Writing) -> None:
        is_whole = not writing.must_stop
        if is_whole:
            self._write(target, piece)
        target.registrations.end(writing, is_whole=is_whole)
        self._later(lambda: self._end(piece) if is_whole else self._fail(piece, "stopped"))

    # Both.

    def _take_contents(self, source: SimRank, piece: SimPiece) -> None:
        memory, reader = source.memory, ("reader", piece.transfer)
        units_per_page = memory.page_size // piece.unit_tokens
        for unit in range(piece.first, piece.stop):
            page = piece.source_pages[unit // units_per_page]
            assert reader in source.pool.owners(page), f"page {page} is read unheld"
            place = memory.unit(page, unit % units_per_page * piece.unit_tokens, piece.unit_tokens)
            piece.contents.append(bytes(memory.bytes[place]))

    def _write(self, target: SimRank, piece: SimPiece) -> None:
        memory, writer = target.memory, ("writer", piece.transfer, 0)
        units_per_page = memory.page_size // piece.unit_tokens
        for unit, content in zip(range(piece.first, piece.stop), piece.contents, strict=True):
            page = piece.pages[unit // units_per_page]
            owners = target.pool.owners(page)
            is_held = writer in owners or target.process.is_dead
            assert is_held, f"{target.process.name}: page {page} is {owners}'s while a writer is in it"
            if self._random.random() < self.faults.flip_chance:
                content = bytes((content[0] ^ FLIPPED, *content[1:]))
            memory.bytes[memory.unit(page, unit % units_per_page * piece.unit_tokens, piece.unit_tokens)] = (
                content
            )

    def _end(self, piece: SimPiece) -> None:
        self._conclude(piece, piece.digests, "")

    def _fail(self, piece: SimPiece, reason: str) -> None:
        self._conclude(piece, None, reason)

    def _conclude(self, piece: SimPiece, digests: bytes | None, reason: str) -> None:
        piece.is_stopped = True  # what was about to be read is not
        if self._going.pop(piece, None) is not None:
            self._process.post(lambda: piece.on_end(digests, reason))


PART: Final = 0  # the only one: there is one rank at either end, and a layer
LAYERS: Final = (0, 1)
AT_ONCE: Final = Spans(0.0, 0.0, 0.0)


@dataclass(slots=True)
class _Arriving:
    order: OpenPart
    plan: TransferPlan
    found: bytearray  # digests of what came
    is_landed: bool = False


@dataclass(slots=True)
class _Departing:
    peer: PeerRank
    plan: TransferPlan
    grant: GrantPart | None = None
    pages: tuple[int, ...] = ()


class SimRank:
    """See `Performer`, whose calls it answers by `emit`, and `Routing`."""

    transports = ("shm", "tcp")

    def __init__(
        self,
        process: SimProcess,
        engine: SimEngine,
        layout: PageLayout,
        emit: Callable[[PartEvent], None],
        network: Network,
        random: Random,
    ) -> None:
        self.process = process
        self.memory = engine.memory
        self.pool = engine.pages
        self.registrations = ReceiveRegistrations(engine.machine.num_pages)
        self.open_pages: dict[int, int] = {}  # page -> generation: what may be written by hand now
        self.incarnation = random.randbytes(ID_BYTES)
        self.pieces = Pieces(process, network, random)
        self._network = network
        self._layout = layout
        self._emit = emit
        self._arriving: dict[bytes, _Arriving] = {}
        self._departing: dict[bytes, _Departing] = {}

    # Routing.

    def complaint(self) -> str | None:
        return None

    def routes(self, link: Link, num_layer_groups: int, *, is_source: bool) -> list[Route]:
        assert num_layer_groups == 1, "the model has one layer"
        doors = RankListenerAddresses(incarnation=link.hello.incarnation, host="simulated", device="cpu")
        return [Route(PART, self, PeerRank(host="", layout=link.hello.layout, rank=0, doors=doors), LAYERS)]

    def drop(self, link: Link) -> None:
        """What it had to move ends with its transfers."""

    # What rank 0's machines want done.

    def perform(self, command: Command) -> None:
        match command:
            case OpenPart():
                self._open(command)
            case ClosePart():
                self._close(command)
            case HashUnits():
                self._hash(self._arriving[command.transfer], command.first, command.stop)
            case VerifyPart():
                self._verify(command)
            case ReachPeer():
                self._reach(command)
            case GrantPart():
                self._departing[command.transfer].grant = command
            case PushPart():
                self._push(command)
            case StopPart():
                self.pieces.stop(command.transfer)
                self._emit(PartStopped(transfer=command.transfer, part=PART))
            case ForgetPart():
                self._arriving.pop(command.transfer, None)
                self._departing.pop(command.transfer, None)
            case DropLink():
                pass

    def on_peer_death(self, incarnation: bytes) -> None:
        """That process is known to be dead."""
        self.pieces.target_died(incarnation)
        orphans = self.registrations.writer_died(incarnation)
        for transfer in orphans:
            self._emit(WriterDied(transfer=transfer, part=PART))

    # What arrives.

    def _open(self, order: OpenPart) -> None:
        part = self._arriving.get(order.transfer)
        if part is None:
            plan = plan_transfer(order.source.layout, self._layout, 0, 0)
            part = _Arriving(order, plan, bytearray(order.num_units * DIGEST_BYTES))
            self._arriving[order.transfer] = part
        registration = ReceiveRegistration(
            id=order.transfer,
            epoch=order.epoch,
            plan=part.plan,
            num_units=order.num_units,
            pages=order.pages,
            writer=order.source.doors.incarnation,
            may_write_directly=self.pieces.is_direct(order.source.doors.incarnation),
        )
        if part.is_landed:
            self.registrations.reopen(registration)
        else:
            self.registrations.add(registration)
        part.is_landed = True
        self.open_pages.update(zip(order.pages, order.generations, strict=True))
        self._emit(PartOpened(transfer=order.transfer, part=PART))

    def _close(self, command: ClosePart) -> None:
        transfer = command.transfer
        for page in self._arriving[transfer].order.pages:
            self.open_pages.pop(page, None)
        if command.is_confirmed:
            self.registrations.release(transfer)
        stopped = WriterStopped(transfer=transfer, part=PART)
        self.registrations.close(transfer, on_safe=lambda: self._emit_later(stopped))

    def _hash(self, part: _Arriving, first: int, stop: int) -> None:
        unit_tokens = part.plan.unit_tokens
        units_per_page = self.memory.page_size // unit_tokens
        for unit in range(first, stop):
            page = part.order.pages[unit // units_per_page]
            place = self.memory.unit(page, unit % units_per_page * unit_tokens, unit_tokens)
            part.found[unit * DIGEST_BYTES : (unit + 1) * DIGEST_BYTES] = digest(self.memory.bytes[place])

    def _verify(self, command: VerifyPart) -> None:
        corrupt_units = differing_units(command.digests, bytes(self._arriving[command.transfer].found))
        self._emit_later(
            PartVerified(transfer=command.transfer, part=PART, corrupt_units=tuple(corrupt_units))
        )

    # What leaves.

    def _reach(self, order: ReachPeer) -> None:
        peer = order.destination
        self._departing[order.transfer] = _Departing(peer, plan_transfer(self._layout, peer.layout, 0, 0))
        reached = PartReached(transfer=order.transfer, part=PART, transport="shm")
        self.process.later(self._network.delay_s(), lambda: self._emit_later(reached))

    def _push(self, order: PushPart) -> None:
        part = self._departing[order.transfer]
        assert part.grant is not None, "pages are granted before any is pushed"
        part.pages += order.more_pages
        piece = SimPiece(
            order.transfer,
            part.grant.epoch,
            order.first,
            order.stop,
            part.plan.unit_tokens,
            part.pages,
            part.grant.pages,
            part.grant.generations,
            lambda digests, reason: self._pushed(piece, digests, reason),
        )
        self.pieces.push(self, part.peer.doors.incarnation, piece)

    def _pushed(self, piece: SimPiece, digests: bytes | None, reason: str) -> None:
        """digests: of its units; None when they were not written."""
        is_done = digests is not None
        written = PartWritten(
            transfer=piece.transfer,
            part=PART,
            first=piece.first,
            stop=piece.stop,
            is_done=is_done,
            reason=reason,
            num_bytes=piece.num_bytes if is_done else 0,
            num_messages=1,
            spans=AT_ONCE,
        )
        self._emit(written)
        if digests is not None:
            units = written.first, written.stop
            hashed = PartHashed(
                transfer=piece.transfer, part=PART, first=units[0], stop=units[1], digests=digests
            )
            self._emit(hashed)

    def _emit_later(self, event: PartEvent) -> None:
        self.process.post(lambda: self._emit(event))
