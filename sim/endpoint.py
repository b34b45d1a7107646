"""A simulated KV endpoint: the production transfers over simulated links, and the ranks of a replica.

Rank n carries out shard n of every transfer. Simulated clusters have one rank a replica. Further ranks run in
the endpoint's process or in another, which can die alone.

Pages of a pool are written in one of two ways, chosen for each pair of endpoints:

- through the destination's receiver, as over TCP: a piece travels by itself, is admitted by its registration
  or drained, and may be damaged on the way;
- directly by the source, as in shared memory: the source checks that the registration is open and writes a
  moment later, even when the destination has ended meanwhile. Until then the ledger alone prevents the
  reuse of the page.

Either writer may be held up between its check and its write. When the transfer ends meanwhile, the writer
still writes one unit, and then leaves the page.

Links of a dead source end before its death is known; until then its writers may still write.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from random import Random
from typing import Final

from baton.engine.cache.page_pool import PagePool
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
from baton.kvtransfer.ranks.executor import CompletedSteps, NoSteps, StepGate
from baton.kvtransfer.transports.base import PieceOutcome
from baton.kvtransfer.transports.receive_registration import (
    ReceiveRegistration,
    ReceiveRegistrations,
    Writing,
)
from baton.messages.bounds import LINK_TIMEOUT_S, Kind
from baton.pages import PageLayout
from baton.rpc.auth import KeyRing
from baton.sim.engine import ENTRY_BYTES, MODEL, KvMemory
from baton.sim.network import End, Network, Recorder
from baton.sim.process import Call, SimProcess

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
    is_stopped: bool = False
    is_inside: bool = False  # its direct writer has checked the pages, and has not written them yet
    contents: list[bytes] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return (self.stop - self.first) * self.unit_tokens

    @property
    def num_bytes(self) -> int:
        return self.num_tokens * ENTRY_BYTES

    @property
    def units(self) -> range:
        return range(self.first, self.stop)


def digest(content: bytes | bytearray) -> bytes:
    """Return the digest of a unit's bytes."""
    return blake2b(content, digest_size=DIGEST_BYTES).digest()


class Pieces:
    """Pieces that leave one rank. Reads and writes go on beside the turns of both processes."""

    def __init__(self, source: SimRank, network: Network, random: Random) -> None:
        self.flip_chance = 0.0  # faults: the chance that a piece arrives damaged,
        self.break_chance = 0.0  # the chance that it does not arrive,
        self.delay_s = 0.0  # and a delay of each piece
        self._source = source
        self._process = source.process
        self._network = network
        self._random = random
        self._targets: dict[bytes, tuple[SimRank, bool]] = {}  # incarnation -> rank, writes directly
        self._going: dict[SimPiece, SimRank] = {}
        self._stopping: dict[bytes, Call] = {}  # transfer -> called when none of its pieces is going

    @property
    def num_transfers(self) -> int:
        """The number of pieces under way."""
        return len(self._going)

    def reach(self, target: SimRank, *, is_direct: bool) -> None:
        """Learn how to write a peer's pages."""
        self._targets.setdefault(target.incarnation, (target, is_direct))

    def is_direct(self, incarnation: bytes) -> bool:
        """Return whether pages of that peer are written directly."""
        return self._targets[incarnation][1]

    def push(self, incarnation: bytes, piece: SimPiece) -> None:
        """Send a piece to a peer; `SimRank.pushed` follows once, unless the transfer is stopped before."""
        target, is_direct = self._targets[incarnation]
        self._going[piece] = target
        if self._random.random() < self.break_chance:
            self._later(lambda: self._fail(piece, "broken"))
        else:
            move = self._check if is_direct else self._read
            moves_s = self._network.moves_s(piece.num_tokens, self.num_transfers)
            self._later(lambda: move(target, piece), moves_s)

    def stop(self, transfer: bytes, on_stopped: Call) -> None:
        """Neither read nor write for a transfer any more; its target refuses pieces that are under way.

        on_stopped: called once no direct writer is inside the target's pages, at the earliest at once.
        """
        self._stopping[transfer] = on_stopped
        for piece in [piece for piece in self._going if piece.transfer == transfer]:
            piece.is_stopped = True
            if not piece.is_inside:
                del self._going[piece]
        self._settle(transfer)

    def target_died(self, incarnation: bytes) -> None:
        """Fail the pieces that are under way to a dead process."""
        for piece in [piece for piece, its in self._going.items() if its.incarnation == incarnation]:
            self._fail(piece, "the destination is gone")

    def _later(self, call: Callable[[], None], more_s: float = 0.0) -> None:
        self._process.later(self._network.delay_s() + self.delay_s + more_s, call)

    # Direct writes.

    def _check(self, target: SimRank, piece: SimPiece) -> None:
        if piece.is_stopped:
            return
        units_per_page = target.memory.page_size // piece.unit_tokens
        for index in range(piece.first // units_per_page, -(-piece.stop // units_per_page)):
            if target.open_pages.get(piece.pages[index]) != piece.generations[index]:
                self._fail(piece, "the page is not ours any more")
                return
        self._take_contents(piece)
        piece.is_inside = True
        self._process.later(self._network.nap_s(self._random), lambda: self._write_directly(target, piece))

    def _write_directly(self, target: SimRank, piece: SimPiece) -> None:
        self._write(target, piece, is_whole=not piece.is_stopped)
        self._end(piece)

    # Writes through the receiver.

    def _read(self, target: SimRank, piece: SimPiece) -> None:
        if piece.is_stopped:
            return
        self._take_contents(piece)
        wait_s = self._network.connects_in_s(self._process, target.process)
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
            target.process.later(
                self._network.nap_s(self._random), lambda: self._receive(target, piece, writing)
            )

    def _receive(self, target: SimRank, piece: SimPiece, writing: Writing) -> None:
        is_whole = not writing.must_stop
        self._write(target, piece, is_whole=is_whole)
        target.registrations.end(writing, is_whole=is_whole)
        self._later(lambda: self._end(piece) if is_whole else self._fail(piece, "stopped"))

    # Both.

    def _take_contents(self, piece: SimPiece) -> None:
        source = self._source
        for unit in piece.units:
            page, place = source.memory.place(piece.source_pages, unit, piece.unit_tokens)
            assert ("reader", piece.transfer) in source.pool.owners(page), f"page {page} is read unheld"
            piece.contents.append(bytes(source.memory.bytes[place]))

    def _write(self, target: SimRank, piece: SimPiece, *, is_whole: bool) -> None:
        """Write the piece; a writer that was stopped before its write (not is_whole) writes one unit."""
        writer = "writer", piece.transfer, target.number
        for unit, content in list(zip(piece.units, piece.contents, strict=True))[: None if is_whole else 1]:
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
        was_stopped, piece.is_stopped = piece.is_stopped, True
        if self._going.pop(piece, None) is not None and not was_stopped:
            self._process.post(lambda: self._source.pushed(piece, digests, reason))
        self._settle(piece.transfer)

    def _settle(self, transfer: bytes) -> None:
        """Call `on_stopped` of a stopped transfer once none of its pieces is under way."""
        if transfer in self._stopping and not any(piece.transfer == transfer for piece in self._going):
            self._stopping.pop(transfer)()


LAYERS: Final = (0, 1)  # of every shard: the model has one layer


class SimStepGate(StepGate):
    """The production gate without its thread: a timer of the rank's process checks the marks."""

    def __init__(
        self,
        steps: CompletedSteps,
        carry_out: Callable[[messages.ShardCommand], None],
        process: SimProcess,
        network: Network,
    ) -> None:
        super().__init__(steps, carry_out, process.post)
        self._process = process
        self._network = network

    def _watch(self, mark: int, key: tuple[bytes, int]) -> None:
        self._process.later(self._network.delay_s(), lambda: self._look(mark, key))

    def _look(self, mark: int, key: tuple[bytes, int]) -> None:
        if self._steps.has_passed(mark):
            self._post(lambda: self._resume(key))
        else:
            self._watch(mark, key)


@dataclass(slots=True)
class _Incoming:
    order: messages.OpenShard
    plan: TransferPlan
    found: bytearray  # digests of the units that came


@dataclass(slots=True)
class _Outgoing:
    order: messages.ReachPeer
    plan: TransferPlan
    pages: tuple[int, ...] = ()


class SimRank:
    """One rank of a replica, which performs commands and reports its events to the endpoint."""

    def __init__(
        self,
        number: int,
        process: SimProcess,
        memory: KvMemory,
        endpoint: SimEndpoint,
        network: Network,
        random: Random,
        steps: CompletedSteps,
    ) -> None:
        """process: the rank's, which may be the endpoint's. steps: of this rank, which write its memory."""
        self.number = number
        self.process = process
        self.memory = memory
        self.pool = endpoint.pool
        self.incarnation = endpoint.incarnation
        self.registrations = ReceiveRegistrations(self.pool.num_pages)
        self.open_pages: dict[int, int] = {}  # page -> generation: open for direct writes
        self.pieces = Pieces(self, network, random)
        self.is_lost = False  # commands and events are lost from now on
        self.is_dead = False  # the endpoint knows that the rank's process is dead
        self._endpoint = endpoint
        self._network = network
        self._layout = endpoint.settings.layout
        self._gate = SimStepGate(steps, self._carry_out, process, network)
        self._incoming: dict[bytes, _Incoming] = {}
        self._outgoing: dict[bytes, _Outgoing] = {}

    def perform(self, command: messages.Command) -> None:
        """Perform a command: at once in the endpoint's process, or in a later turn of another process."""
        if isinstance(command, messages.DropLink | messages.UseKeys):
            return
        if self.process is self._endpoint.process:
            self._gate.perform(command)
        elif not self.is_lost:
            self.process.post(lambda: self._gate.perform(command))

    def on_peer_death(self, incarnation: bytes) -> None:
        """A peer's process is known to be dead: it reads and writes no more."""
        self.pieces.target_died(incarnation)
        for transfer in self.registrations.writer_died(incarnation):
            self._close(messages.CloseShard(transfer=transfer, shard=self.number, is_confirmed=True))

    def _carry_out(self, command: messages.ShardCommand) -> None:
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
                stopped = messages.ShardStopped(transfer=command.transfer, shard=self.number)
                self.pieces.stop(command.transfer, lambda: self._emit(stopped))
            case messages.ForgetShard():
                self._incoming.pop(command.transfer, None)
                self._outgoing.pop(command.transfer, None)

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
        self.registrations.add(registration)
        self.open_pages.update(zip(order.pages, order.generations, strict=True))
        self._emit(messages.ShardOpened(transfer=order.transfer, shard=self.number))

    def _close(self, command: messages.CloseShard) -> None:
        transfer = command.transfer
        for page in self._incoming[transfer].order.pages:
            self.open_pages.pop(page, None)
        if command.is_confirmed:
            self.registrations.release(transfer)
        stopped = messages.WriterStopped(transfer=transfer, shard=self.number)
        self.registrations.close(transfer, on_safe=lambda: self._emit_later(stopped))

    def _hash(self, shard: _Incoming, first: int, stop: int) -> None:
        for unit in range(first, stop):
            _, place = self.memory.place(shard.order.pages, unit, shard.plan.unit_tokens)
            shard.found[unit * DIGEST_BYTES : (unit + 1) * DIGEST_BYTES] = digest(self.memory.bytes[place])

    def _verify(self, command: messages.VerifyShard) -> None:
        corrupt = tuple(differing_units(command.digests, bytes(self._incoming[command.transfer].found)))
        self._emit_later(
            messages.ShardVerified(transfer=command.transfer, shard=self.number, corrupt_units=corrupt)
        )

    # The source's side.

    def _reach(self, order: messages.ReachPeer) -> None:
        plan = plan_transfer(self._layout, order.destination.layout, 0, 0)
        self._outgoing[order.transfer] = _Outgoing(order, plan)
        reached = messages.ShardReached(transfer=order.transfer, shard=self.number, transport="shm")
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
        )
        self.pieces.push(shard.order.destination.listeners.incarnation, piece)

    def pushed(self, piece: SimPiece, digests: bytes | None, reason: str) -> None:
        """Report the end of a piece. digests: of its units; None when they were not written."""
        is_done = digests is not None
        self._emit(
            messages.PushEnded(
                transfer=piece.transfer,
                shard=self.number,
                first=piece.first,
                stop=piece.stop,
                outcome=PieceOutcome(
                    is_done=is_done,
                    num_bytes=piece.num_bytes if is_done else 0,
                    reason=reason,
                ),
            )
        )
        if digests is not None:
            hashed = messages.UnitsHashed(
                transfer=piece.transfer,
                shard=self.number,
                first=piece.first,
                stop=piece.stop,
                digests=digests,
            )
            self._emit(hashed)

    def _emit(self, event: messages.ShardEvent) -> None:
        if self.process is self._endpoint.process:
            self._endpoint.on_shard_event(event)
        else:
            self._emit_later(event)

    def _emit_later(self, event: messages.ShardEvent) -> None:
        self._endpoint.process.post(lambda: self._tell(event))

    def _tell(self, event: messages.ShardEvent) -> None:
        if not self.is_lost:
            self._endpoint.on_shard_event(event)


class SimRanks:
    """The `ReplicaRanks` of a simulated replica."""

    def __init__(self, ranks: Sequence[SimRank]) -> None:
        self._ranks = ranks

    @property
    def registrations(self) -> ReceiveRegistrations:
        return self._ranks[0].registrations

    def complaint(self) -> str | None:
        lost = [str(rank.number) for rank in self._ranks if rank.is_lost]
        return f"rank {', '.join(lost)} is lost" if lost else None

    def routes(self, link: Link, num_layer_groups: int, *, is_source: bool) -> list[messages.Route]:
        assert num_layer_groups == 1, "the model has one layer"
        listeners = RankListenerAddresses(incarnation=link.hello.incarnation, host="simulated", device="cpu")
        peer = partial(PeerRank, host="", layout=link.hello.layout, listeners=listeners)
        return [messages.Route(rank.number, peer(rank=rank.number), LAYERS, 0) for rank in self._ranks]

    def drop(self, link: Link) -> None:
        """See ReplicaRanks. The work for a link ends with its transfers."""

    def perform(self, rank: int, command: messages.Command) -> None:
        self._ranks[rank].perform(command)


KEYS: Final = KeyRing.of(bytes(16), Kind.WORKER)
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
        settings = EndpointSettings(
            keys=KEYS, fingerprint=fingerprint, layout=_layout(pool.page_size), timing=TIMING
        )
        self.ranks: list[SimRank] = []  # filled below: a rank needs its endpoint
        super().__init__(settings, random.randbytes(ID_BYTES), pool, process.clock, SimRanks(self.ranks))
        self.process = process
        self.pool = pool
        self.recorder = recorder
        self.hello = settings.hello(self.incarnation)
        self.links: list[SimLink] = []
        self._network = network
        self._random = random
        for number, home in enumerate(((process, memory), *other_ranks)):
            self.ranks.append(SimRank(number, *home, self, network, random, steps or NoSteps()))

    @property
    def has_writers(self) -> bool:
        """True while bytes may be written here or by this process."""
        ranks = (rank for rank in self.ranks if not rank.is_dead)
        return any(rank.registrations.num_open() or rank.pieces.num_transfers for rank in ranks)

    def counts(self) -> dict[str, int]:
        counts = self.ranks[0].registrations.counts()
        return super().counts() | {"pieces": counts["landed_pieces"], "stale_pieces": counts["stale_pieces"]}

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

    def on_shard_event(self, event: messages.ShardEvent) -> None:
        """Take an event of a rank."""
        self._on_shard_event(event)

    def lose_ranks(self, process: SimProcess) -> None:
        """Report the loss of the ranks in another process. Call again at its death, if it still lived."""
        for rank in self.ranks:
            if rank.process is process:
                rank.is_lost, rank.is_dead = True, process.is_dead
                self._on_rank_lost(rank.number, process.is_dead)

    def _join(self, end: End, other: SimEndpoint, *, is_direct: bool) -> SimLink:
        link = SimLink(self, end, other)
        self.links.append(link)
        for ours, theirs in zip(self.ranks, other.ranks, strict=True):
            ours.pieces.reach(theirs, is_direct=is_direct)
            if not theirs.process.is_dead:
                ours.registrations.writer_came(other.incarnation)
                theirs.process.on_death.append(partial(self._died, ours, other.incarnation))
        return link

    def _make_posted_calls(self) -> None:
        self.process.hear()

    def _link_to(self, incarnation: bytes) -> SimLink | None:
        return next((link for link in self.links if link.hello.incarnation == incarnation), None)

    def _died(self, rank: SimRank, incarnation: bytes) -> None:
        """Report the death of the peer's rank to the rank that exchanges pages with it, a moment later."""
        delay_s = self._random.uniform(*DEATH_IS_KNOWN_S)
        on_peer_death = partial(rank.on_peer_death, incarnation)
        rank.process.later(delay_s, partial(rank.process.post, on_peer_death))

    def _new_id(self) -> bytes:
        return self._random.randbytes(ID_BYTES)


def _layout(page_size: int) -> PageLayout:
    """Return a layout of eight bytes a token: see ENTRY_BYTES."""
    return PageLayout(
        tp_size=1, page_size=page_size, num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32"
    )
