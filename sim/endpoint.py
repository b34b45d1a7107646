"""A simulated KV endpoint: the production transfers over simulated links and the one rank of a replica.

Pages of a pool are written in one of two ways, chosen for each pair of endpoints:

- through the destination's receiver, as over TCP: a piece travels by itself, is admitted by its registration
  or drained, and may be damaged on the way;
- directly by the source, as in shared memory: the source checks that the registration is open and writes a
  moment later, even when the destination has ended meanwhile. Until then the ledger alone prevents the
  reuse of the page.

Links of a dead source end before its death is known; until then its writers may still write.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from random import Random
from typing import Final, TypeAlias

from baton.errors import WireError
from baton.kvtransfer.endpoint import EndpointSettings, PageEndpoint
from baton.kvtransfer.links import Link
from baton.kvtransfer.protocol.handoff import Timing
from baton.kvtransfer.protocol.messages import (
    DIGEST_BYTES,
    ID_BYTES,
    AnyMessage,
    PeerRank,
    RankListenerAddresses,
    decode,
    encode,
)
from baton.kvtransfer.protocol.transfer_plan import TransferPlan, plan_transfer
from baton.kvtransfer.ranks import messages
from baton.kvtransfer.ranks.digests import differing_units
from baton.kvtransfer.transports.base import PieceOutcome
from baton.kvtransfer.transports.receive_registration import (
    ReceiveRegistration,
    ReceiveRegistrations,
    Writing,
)
from baton.messages.bounds import LINK_TIMEOUT_S
from baton.pages import PageLayout
from baton.sim.engine import ENTRY_BYTES, FINGERPRINT, SimEngine
from baton.sim.network import End, Network
from baton.sim.process import SimProcess
from baton.sim.trace import Recorder

OnEnd: TypeAlias = Callable[
    [bytes | None, str], None
]  # digests of the piece's units, or the reason of failure
NAPS_S: Final = (0.0, 0.0, 0.0, 0.0, 0.3)  # of a writer between its check and its write
FLIPPED: Final = 0x40


@dataclass(slots=True, eq=False)
class SimPiece:
    """Units [first, stop) of a transfer. `pages` and `generations` are the destination's, for all units."""

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
    def units(self) -> range:
        return range(self.first, self.stop)


def digest(content: bytes | bytearray) -> bytes:
    """Return the digest of a unit's bytes."""
    return blake2b(content, digest_size=DIGEST_BYTES).digest()


class Pieces:
    """Pieces that leave one endpoint. Reads and writes go on beside the turns of both processes."""

    def __init__(self, process: SimProcess, network: Network, random: Random) -> None:
        self.flip_chance = 0.0  # faults: the chance that a piece arrives damaged,
        self.break_chance = 0.0  # the chance that it does not arrive,
        self.delay_s = 0.0  # and a delay of each piece
        self._process = process
        self._network = network
        self._random = random
        self._targets: dict[bytes, tuple[SimRank, bool]] = {}  # incarnation -> rank, writes directly
        self._going: dict[SimPiece, SimRank] = {}

    @property
    def num_going(self) -> int:
        """The number of pieces under way."""
        return len(self._going)

    def reach(self, target: SimRank, *, is_direct: bool) -> None:
        """Learn how to write a peer's pages."""
        self._targets.setdefault(target.incarnation, (target, is_direct))

    def is_direct(self, incarnation: bytes) -> bool:
        """Return whether pages of that peer are written directly."""
        return self._targets[incarnation][1]

    def push(self, source: SimRank, incarnation: bytes, piece: SimPiece) -> None:
        """Send a piece to a peer; `piece.on_end` is posted once, unless the transfer is stopped before."""
        target, is_direct = self._targets[incarnation]
        self._going[piece] = target
        if self._random.random() < self.break_chance:
            self._later(lambda: self._fail(piece, "broken"))
        elif is_direct:
            self._later(lambda: self._check(source, target, piece))
        else:
            self._later(lambda: self._read(source, target, piece))

    def stop(self, transfer: bytes) -> None:
        """Neither read nor write for a transfer any more; its target refuses pieces that are under way."""
        for piece in [piece for piece in self._going if piece.transfer == transfer]:
            piece.is_stopped = True
            del self._going[piece]

    def target_died(self, incarnation: bytes) -> None:
        """Fail the pieces that are under way to a dead process."""
        for piece in [piece for piece, its in self._going.items() if its.incarnation == incarnation]:
            self._fail(piece, "the destination is gone")

    def _later(self, call: Callable[[], None]) -> None:
        self._process.later(self._network.delay_s() + self.delay_s, call)

    def _nap_s(self) -> float:
        """Draw the time between a check and its write: a thread may be held up there."""
        return self._random.choice(NAPS_S) + self._network.delay_s()

    # Direct writes.

    def _check(self, source: SimRank, target: SimRank, piece: SimPiece) -> None:
        if piece.is_stopped:
            return
        units_per_page = target.memory.page_size // piece.unit_tokens
        for index in range(piece.first // units_per_page, -(-piece.stop // units_per_page)):
            if target.open_pages.get(piece.pages[index]) != piece.generations[index]:
                self._fail(piece, "the page is not ours any more")
                return
        self._take_contents(source, piece)
        self._process.later(self._nap_s(), lambda: self._write_directly(target, piece))

    def _write_directly(self, target: SimRank, piece: SimPiece) -> None:
        if not piece.is_stopped:
            self._write(target, piece)
            self._end(piece)

    # Writes through the receiver.

    def _read(self, source: SimRank, target: SimRank, piece: SimPiece) -> None:
        if piece.is_stopped:
            return
        self._take_contents(source, piece)
        wait_s = self._network.connects_in_s(source.process, target.process)
        if wait_s < LINK_TIMEOUT_S:
            target.process.later(wait_s + self._network.delay_s(), lambda: self._arrive(target, piece))
        else:
            self._process.later(LINK_TIMEOUT_S, lambda: self._fail(piece, "the destination is silent"))

    def _arrive(self, target: SimRank, piece: SimPiece) -> None:
        whole = piece.first, piece.stop, piece.num_bytes
        writing = target.registrations.begin(piece.transfer, piece.epoch, *whole)
        if writing is None:
            self._later(lambda: self._fail(piece, "refused"))
        else:
            target.process.later(self._nap_s(), lambda: self._receive(target, piece, writing))

    def _receive(self, target: SimRank, piece: SimPiece, writing: Writing) -> None:
        is_whole = not writing.must_stop
        if is_whole:
            self._write(target, piece)
        target.registrations.end(writing, is_whole=is_whole)
        self._later(lambda: self._end(piece) if is_whole else self._fail(piece, "stopped"))

    # Both.

    def _take_contents(self, source: SimRank, piece: SimPiece) -> None:
        for unit in piece.units:
            page, place = source.memory.place(piece.source_pages, unit, piece.unit_tokens)
            assert ("reader", piece.transfer) in source.pool.owners(page), f"page {page} is read unheld"
            piece.contents.append(bytes(source.memory.bytes[place]))

    def _write(self, target: SimRank, piece: SimPiece) -> None:
        writer = "writer", piece.transfer, 0
        for unit, content in zip(piece.units, piece.contents, strict=True):
            page, place = target.memory.place(piece.pages, unit, piece.unit_tokens)
            owners = target.pool.owners(page)
            is_held = writer in owners or target.process.is_dead
            assert is_held, f"{target.process.name}: page {page} is {owners}'s while a writer is in it"
            if self._random.random() < self.flip_chance:
                content = bytes((content[0] ^ FLIPPED, *content[1:]))
            target.memory.bytes[place] = content

    def _end(self, piece: SimPiece) -> None:
        self._conclude(piece, b"".join(map(digest, piece.contents)), "")

    def _fail(self, piece: SimPiece, reason: str) -> None:
        self._conclude(piece, None, reason)

    def _conclude(self, piece: SimPiece, digests: bytes | None, reason: str) -> None:
        piece.is_stopped = True
        if self._going.pop(piece, None) is not None:
            self._process.post(lambda: piece.on_end(digests, reason))


SHARD: Final = 0  # the only shard: one rank at either end, one group of layers
LAYERS: Final = (0, 1)


@dataclass(slots=True)
class _Incoming:
    order: messages.OpenShard
    plan: TransferPlan
    found: bytearray  # digests of the units that came
    is_registered: bool = False


@dataclass(slots=True)
class _Outgoing:
    order: messages.ReachPeer
    plan: TransferPlan
    pages: tuple[int, ...] = ()


class SimRank:
    """The `ReplicaRanks` of one rank, which answers its commands by `emit`."""

    def __init__(
        self,
        process: SimProcess,
        engine: SimEngine,
        layout: PageLayout,
        emit: Callable[[messages.ShardEvent], None],
        network: Network,
        random: Random,
    ) -> None:
        self.process = process
        self.memory = engine.memory
        self.pool = engine.pages
        self.registrations = ReceiveRegistrations(engine.machine.num_pages)
        self.open_pages: dict[int, int] = {}  # page -> generation: open for direct writes
        self.incarnation = random.randbytes(ID_BYTES)
        self.pieces = Pieces(process, network, random)
        self._network = network
        self._layout = layout
        self._emit = emit
        self._incoming: dict[bytes, _Incoming] = {}
        self._outgoing: dict[bytes, _Outgoing] = {}

    def complaint(self) -> str | None:
        """See ReplicaRanks."""
        return None

    def routes(self, link: Link, num_layer_groups: int, *, is_source: bool) -> list[messages.Route]:
        """See ReplicaRanks."""
        assert num_layer_groups == 1, "the model has one layer"
        listeners = RankListenerAddresses(incarnation=link.hello.incarnation, host="simulated", device="cpu")
        peer = PeerRank(host="", layout=link.hello.layout, rank=0, listeners=listeners)
        return [messages.Route(0, peer, LAYERS)]

    def drop(self, link: Link) -> None:
        """See ReplicaRanks. The work for a link ends with its transfers."""

    def perform(self, rank: int, command: messages.Command) -> None:
        """See ReplicaRanks."""
        match command:
            case messages.OpenShard():
                self._open(command)
            case messages.CloseShard():
                self._close(command)
            case messages.HashUnits():
                self._hash(self._incoming[command.transfer], command.first, command.stop)
            case messages.VerifyShard():
                self._verify(command)
            case messages.ReachPeer():
                self._reach(command)
            case messages.PushUnits():
                self._push(command)
            case messages.StopShard():
                self.pieces.stop(command.transfer)
                self._emit(messages.ShardStopped(transfer=command.transfer, shard=SHARD))
            case messages.ForgetShard():
                self._incoming.pop(command.transfer, None)
                self._outgoing.pop(command.transfer, None)
            case messages.DropLink():
                pass

    def on_peer_death(self, incarnation: bytes) -> None:
        """A peer's process is known to be dead: it reads and writes no more."""
        self.pieces.target_died(incarnation)
        for transfer in self.registrations.writer_died(incarnation):
            self._emit(messages.WriterDied(transfer=transfer, shard=SHARD))

    # The destination's side.

    def _open(self, order: messages.OpenShard) -> None:
        shard = self._incoming.get(order.transfer)
        if shard is None:
            plan = plan_transfer(order.source.layout, self._layout, 0, 0)
            shard = _Incoming(order, plan, bytearray(order.num_units * DIGEST_BYTES))
            self._incoming[order.transfer] = shard
        registration = ReceiveRegistration(
            id=order.transfer,
            epoch=order.epoch,
            plan=shard.plan,
            num_units=order.num_units,
            pages=order.pages,
            writer=order.source.listeners.incarnation,
            may_write_directly=self.pieces.is_direct(order.source.listeners.incarnation),
        )
        if shard.is_registered:
            self.registrations.reopen(registration)
        else:
            self.registrations.add(registration)
        shard.is_registered = True
        self.open_pages.update(zip(order.pages, order.generations, strict=True))
        self._emit(messages.ShardOpened(transfer=order.transfer, shard=SHARD))

    def _close(self, command: messages.CloseShard) -> None:
        transfer = command.transfer
        for page in self._incoming[transfer].order.pages:
            self.open_pages.pop(page, None)
        if command.is_confirmed:
            self.registrations.release(transfer)
        stopped = messages.WriterStopped(transfer=transfer, shard=SHARD)
        self.registrations.close(transfer, on_safe=lambda: self._emit_later(stopped))

    def _hash(self, shard: _Incoming, first: int, stop: int) -> None:
        for unit in range(first, stop):
            _, place = self.memory.place(shard.order.pages, unit, shard.plan.unit_tokens)
            shard.found[unit * DIGEST_BYTES : (unit + 1) * DIGEST_BYTES] = digest(self.memory.bytes[place])

    def _verify(self, command: messages.VerifyShard) -> None:
        corrupt = tuple(differing_units(command.digests, bytes(self._incoming[command.transfer].found)))
        self._emit_later(
            messages.ShardVerified(transfer=command.transfer, shard=SHARD, corrupt_units=corrupt)
        )

    # The source's side.

    def _reach(self, order: messages.ReachPeer) -> None:
        plan = plan_transfer(self._layout, order.destination.layout, 0, 0)
        self._outgoing[order.transfer] = _Outgoing(order, plan)
        reached = messages.ShardReached(transfer=order.transfer, shard=SHARD, transport="shm")
        self.process.later(self._network.delay_s(), lambda: self._emit_later(reached))

    def _push(self, order: messages.PushUnits) -> None:
        shard = self._outgoing[order.transfer]
        shard.pages += order.more_pages
        piece = SimPiece(
            order.transfer,
            shard.order.epoch,
            order.first,
            order.stop,
            shard.plan.unit_tokens,
            shard.pages,
            shard.order.pages,
            shard.order.generations,
            lambda digests, reason: self._pushed(piece, digests, reason),
        )
        self.pieces.push(self, shard.order.destination.listeners.incarnation, piece)

    def _pushed(self, piece: SimPiece, digests: bytes | None, reason: str) -> None:
        """digests: of the piece's units; None when they were not written."""
        is_done = digests is not None
        self._emit(
            messages.PushEnded(
                transfer=piece.transfer,
                shard=SHARD,
                first=piece.first,
                stop=piece.stop,
                outcome=PieceOutcome(
                    is_done=is_done,
                    num_bytes=piece.num_bytes if is_done else 0,
                    num_messages=1,
                    reason=reason,
                ),
            )
        )
        if digests is not None:
            hashed = messages.UnitsHashed(
                transfer=piece.transfer, shard=SHARD, first=piece.first, stop=piece.stop, digests=digests
            )
            self._emit(hashed)

    def _emit_later(self, event: messages.ShardEvent) -> None:
        self.process.post(lambda: self._emit(event))


TIMING: Final = Timing(lease_s=2.0, heartbeat_s=0.5)
DEATH_IS_KNOWN_S: Final = (0.0, 0.5)  # after a process has died, to the processes that it could write to


class SimLink(Link):
    """A link without socket and thread. Both ends know each other's Hello from the start."""

    def __init__(self, endpoint: SimEndpoint, end: End, peer: SimEndpoint) -> None:
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
        self.rank = rank = SimRank(process, engine, settings.layout, self._on_shard_event, network, random)
        super().__init__(settings, rank.incarnation, engine.pages, process.clock, rank)
        self.pin = engine.pin
        self.process = process
        self.recorder = recorder
        self.hello = settings.hello(rank.incarnation)
        self.links: list[SimLink] = []
        self._network = network
        self._random = random

    @property
    def has_writers(self) -> bool:
        """Bytes may still be written, here or by this process."""
        return bool(self.rank.registrations.num_open() or self.rank.pieces.num_going)

    def counts(self) -> dict[str, int]:
        """See PageEndpoint."""
        counts = self.rank.registrations.counts()
        return {"pieces": counts["landed_pieces"], "stale_pieces": counts["stale_pieces"]}

    def connect(self, other: SimEndpoint, *, is_direct: bool) -> SimLink:
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

    def _join(self, end: End, other: SimEndpoint, *, is_direct: bool) -> SimLink:
        link = SimLink(self, end, other)
        self.links.append(link)
        self.rank.pieces.reach(other.rank, is_direct=is_direct)
        self.rank.registrations.writer_came(other.incarnation)
        other.process.on_death.append(lambda: self._died(other))
        return link

    def _make_posted_calls(self) -> None:
        self.process.hear()

    def _link_to(self, incarnation: bytes) -> SimLink | None:
        return next((link for link in self.links if link.hello.incarnation == incarnation), None)

    def _died(self, peer: SimEndpoint) -> None:
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
