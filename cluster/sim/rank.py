"""The one rank of a simulated replica: does for the real state machines what kvtransfer's ranks do.

A pool's pages are written in one of two ways, chosen for each pair of endpoints:

- through the destination's receiver, as over TCP: a piece travels by itself, is let into its landing or
  drained, and may be damaged on the way;
- by the source's own hand, as in shared memory: it looks whether the landing is open, and writes a moment
  later, whatever has become of the destination meanwhile. Only the ledger keeps such a page from being
  reused before.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Final

from baton.cluster.sim.engine import SimEngine
from baton.cluster.sim.network import Network
from baton.cluster.sim.pieces import Piece, Pieces, digest
from baton.cluster.sim.process import Process
from baton.kvtransfer.digests import differing_units
from baton.kvtransfer.landing import Landing, Landings
from baton.kvtransfer.link import Link
from baton.kvtransfer.messages import DIGEST_BYTES, RankDoors
from baton.kvtransfer.rank_messages import (
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
from baton.kvtransfer.ranks import Route
from baton.kvtransfer.reservation import ID_BYTES
from baton.kvtransfer.transfer_plan import TransferPlan, plan_transfer
from baton.kvtransfer.transport import Spans
from baton.layout import PageLayout

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
        process: Process,
        engine: SimEngine,
        layout: PageLayout,
        emit: Callable[[PartEvent], None],
        network: Network,
        random: Random,
    ) -> None:
        self.process = process
        self.memory = engine.memory
        self.pool = engine.pages
        self.landings = Landings(engine.machine.num_pages)
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
        doors = RankDoors(incarnation=link.hello.incarnation, host="simulated", device="cpu")
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

    def bury(self, incarnation: bytes) -> None:
        """That process is known to be dead."""
        self.pieces.target_died(incarnation)
        orphans = self.landings.writer_died(incarnation)
        for transfer in orphans:
            self._emit(WriterDied(transfer=transfer, part=PART))

    # What arrives.

    def _open(self, order: OpenPart) -> None:
        part = self._arriving.get(order.transfer)
        if part is None:
            plan = plan_transfer(order.source.layout, self._layout, 0, 0)
            part = _Arriving(order, plan, bytearray(order.num_units * DIGEST_BYTES))
            self._arriving[order.transfer] = part
        landing = Landing(
            id=order.transfer,
            epoch=order.epoch,
            plan=part.plan,
            num_units=order.num_units,
            pages=order.pages,
            writer=order.source.doors.incarnation,
            may_write_directly=self.pieces.is_direct(order.source.doors.incarnation),
        )
        if part.is_landed:
            self.landings.reopen(landing)
        else:
            self.landings.add(landing)
        part.is_landed = True
        self.open_pages.update(zip(order.pages, order.generations, strict=True))
        self._emit(PartOpened(transfer=order.transfer, part=PART))

    def _close(self, command: ClosePart) -> None:
        transfer = command.transfer
        for page in self._arriving[transfer].order.pages:
            self.open_pages.pop(page, None)
        if command.is_confirmed:
            self.landings.release(transfer)
        stopped = WriterStopped(transfer=transfer, part=PART)
        self.landings.close(transfer, on_safe=lambda: self._emit_later(stopped))

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
        piece = Piece(
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

    def _pushed(self, piece: Piece, digests: bytes | None, reason: str) -> None:
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
