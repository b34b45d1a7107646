"""How the bytes of transfers get from one simulated pool into another, and what can go wrong on the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from random import Random
from typing import TYPE_CHECKING, Final, TypeAlias

from baton.cluster.sim.model import ENTRY_BYTES
from baton.cluster.sim.network import LINK_TIMEOUT_S, Network
from baton.cluster.sim.process import Process
from baton.kvtransfer.landing import Writing
from baton.kvtransfer.messages import DIGEST_BYTES

if TYPE_CHECKING:
    from baton.cluster.sim.rank import SimRank

OnEnd: TypeAlias = Callable[[bytes | None, str], None]  # digests of the piece's units, or why it failed

NAPS_S: Final = (0.0, 0.0, 0.0, 0.0, 0.3)
FLIPPED: Final = 0x40


@dataclass(slots=True, eq=False)
class Piece:
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


class Faults:
    """What a source's pieces suffer at present."""

    def __init__(self) -> None:
        self.flip_chance = 0.0  # that a piece arrives damaged
        self.break_chance = 0.0  # that it does not arrive
        self.delay_s = 0.0  # that each takes longer


class Pieces:
    """What leaves one endpoint. Reading and writing go on beside the turns of both processes."""

    def __init__(self, process: Process, network: Network, random: Random) -> None:
        self.faults = Faults()
        self._process = process
        self._network = network
        self._random = random
        self._targets: dict[bytes, tuple[SimRank, bool]] = {}  # by incarnation
        self._going: dict[Piece, SimRank] = {}

    @property
    def num_going(self) -> int:
        return len(self._going)

    def reach(self, target: SimRank, *, is_direct: bool) -> None:
        self._targets.setdefault(target.incarnation, (target, is_direct))

    def is_direct(self, incarnation: bytes) -> bool:
        return self._targets[incarnation][1]

    def push(self, source: SimRank, incarnation: bytes, piece: Piece) -> None:
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

    def _look(self, source: SimRank, target: SimRank, piece: Piece) -> None:
        if piece.is_stopped:
            return
        units_per_page = target.memory.page_size // piece.unit_tokens
        for index in range(piece.first // units_per_page, -(-piece.stop // units_per_page)):
            if target.open_pages.get(piece.pages[index]) != piece.generations[index]:
                self._fail(piece, "the page is not ours any more")
                return
        self._take_contents(source, piece)
        self._process.later(self._nap_s(), lambda: self._write_by_hand(target, piece))

    def _write_by_hand(self, target: SimRank, piece: Piece) -> None:
        if not piece.is_stopped:
            self._write(target, piece)
            self._end(piece)

    # Through the receiver.

    def _read(self, source: SimRank, target: SimRank, piece: Piece) -> None:
        if piece.is_stopped:
            return
        self._take_contents(source, piece)
        wait_s = self._network.connects_in_s(source.process, target.process)
        if wait_s < LINK_TIMEOUT_S:
            target.process.later(wait_s + self._network.delay_s(), lambda: self._arrive(target, piece))
        else:
            self._process.later(LINK_TIMEOUT_S, lambda: self._fail(piece, "nobody acknowledges it"))

    def _arrive(self, target: SimRank, piece: Piece) -> None:
        whole = piece.first, piece.stop, piece.num_bytes
        writing = target.landings.begin(piece.transfer, piece.epoch, *whole)
        if writing is None:
            self._later(lambda: self._fail(piece, "refused"))
        else:
            target.process.later(self._nap_s(), lambda: self._land(target, piece, writing))

    def _land(self, target: SimRank, piece: Piece, writing: Writing) -> None:
        is_whole = not writing.must_stop
        if is_whole:
            self._write(target, piece)
        target.landings.end(writing, is_whole=is_whole)
        self._later(lambda: self._end(piece) if is_whole else self._fail(piece, "stopped"))

    # Both.

    def _take_contents(self, source: SimRank, piece: Piece) -> None:
        memory, reader = source.memory, ("reader", piece.transfer)
        units_per_page = memory.page_size // piece.unit_tokens
        for unit in range(piece.first, piece.stop):
            page = piece.source_pages[unit // units_per_page]
            assert reader in source.pool.owners(page), f"page {page} is read unheld"
            place = memory.unit(page, unit % units_per_page * piece.unit_tokens, piece.unit_tokens)
            piece.contents.append(bytes(memory.bytes[place]))

    def _write(self, target: SimRank, piece: Piece) -> None:
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

    def _end(self, piece: Piece) -> None:
        self._conclude(piece, piece.digests, "")

    def _fail(self, piece: Piece, reason: str) -> None:
        self._conclude(piece, None, reason)

    def _conclude(self, piece: Piece, digests: bytes | None, reason: str) -> None:
        piece.is_stopped = True  # what was about to be read is not
        if self._going.pop(piece, None) is not None:
            self._process.post(lambda: piece.on_end(digests, reason))
