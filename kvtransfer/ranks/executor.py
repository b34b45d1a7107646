"""One rank's share of all transfers: the rank's pool and listeners, and the parts that leave and arrive.

The executor decides nothing. It performs the commands of rank 0 (kvtransfer/ranks/messages.py) in the order
in which they were given: at once, except for pages that a step of this rank still writes. Threads of
listeners, transports and digests do the lengthy work, and report through `post`. All of an executor's calls
are made by one thread: the endpoint's in rank 0, the agent's in a follower.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Final, NamedTuple, ParamSpec, Protocol, TypeAlias, TypeVar

from torch import Tensor

from baton.clock import Clock
from baton.kvtransfer.protocol.messages import DIGEST_BYTES, PeerRank, RankListenerAddresses
from baton.kvtransfer.protocol.transfer_plan import TransferPlan, plan_transfer
from baton.kvtransfer.ranks.digests import PartDigests, UnitDigests, differing_units, digests_of
from baton.kvtransfer.ranks.messages import (
    ClosePart,
    Command,
    DropLink,
    ForgetPart,
    GrantPart,
    HashUnits,
    OfPart,
    OpenPart,
    PartCommand,
    PartEvent,
    PartHashed,
    PartOpened,
    PartReached,
    PartStopped,
    PartVerified,
    PartWritten,
    Performer,
    PushPart,
    RankSettings,
    ReachPeer,
    StopPart,
    UseKeys,
    VerifyPart,
    WriterDied,
    WriterStopped,
    registration_id,
)
from baton.kvtransfer.ranks.peer_transports import PeerTransports, RankTransports, TransportCounters
from baton.kvtransfer.ranks.step_gate import CompletedSteps, NoSteps, StepGate
from baton.kvtransfer.transports.base import LocalRank, TransportSet, this_host
from baton.kvtransfer.transports.message_stream import Post
from baton.kvtransfer.transports.pages import SharedPool
from baton.kvtransfer.transports.receive_registration import ReceiveRegistration
from baton.kvtransfer.transports.transfer_queue import MAX_REASON, OutgoingTransfer, Piece, PieceOutcome
from baton.messages.bounds import Kind
from baton.rpc.auth import PAGES, KeyRing, LinkKeys, LinkSecret
from baton.rpc.connection import DroppedPeers

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Emit: TypeAlias = Callable[[PartEvent], None]
INLINE_BYTES: Final = 2**21  # hashed in 0.1 ms, the time that it takes to wake a thread and hear of its end


class Hashing:
    """Runs functions that take digests: short ones at once, longer ones in threads."""

    def __init__(self, num_threads: int, *, may_inline: bool) -> None:
        """may_inline: the pages are in this CPU's memory, so the caller waits for nothing but the hash."""
        self.may_inline = may_inline
        self._inline_bytes = INLINE_BYTES if may_inline else -1
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="kv-digest")

    def submit(
        self,
        num_bytes: int,
        function: Callable[Arguments, Result],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> "Future[Result]":
        """Call the function, which reads num_bytes; the future is done already where they are few.

        Functions that go to threads begin in the order in which they were submitted.
        """
        if num_bytes > self._inline_bytes:
            return self._threads.submit(function, *args, **kwargs)
        future: Future[Result] = Future()
        try:
            future.set_result(function(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future

    def close(self) -> None:
        """Returns when no function runs any more; functions that have not begun are cancelled."""
        self._threads.shutdown(cancel_futures=True)


class RankTools(NamedTuple):
    """The objects that all shards of a rank share."""

    rank: LocalRank
    digests: UnitDigests
    hashing: Hashing
    post: Post  # hands a call to the rank's thread
    emit: Emit  # reports to rank 0, from the rank's thread


class ReceiveShard:
    """A part that arrives. All calls are made by the rank's thread.

    The registrations say under the part's id which bytes are admitted; for sources that write shared memory
    directly, the table of generations says the same.

    Threads take the digests of units as the source reports them written, so little is left to do when the
    last units come. The digests are compared once nothing can be written any more. Until then the source
    writes nothing to those units but the same bytes again, so a unit whose digest is right stays right.
    """

    def __init__(self, order: OpenPart, plan: TransferPlan, tools: RankTools) -> None:
        self.pages = order.pages
        self.registration_id = registration_id(order.transfer, order.part)
        self.is_open = False
        self._order = order
        self._plan = plan
        self._tools = tools
        self._digests = PartDigests(tools.digests, order.digest_key, order.part)
        self._registrations = tools.rank.registrations
        self._was_opened = False
        self._found = bytearray(order.num_units * DIGEST_BYTES)
        self._hashes: list[Future[None]] = []  # in the order in which units were written

    def open(self) -> None:
        """Admit the part's bytes, for the first time or again."""
        generations, order = self._tools.rank.generations, self._order
        registration = ReceiveRegistration(
            id=self.registration_id,
            epoch=order.epoch,
            plan=self._plan,
            num_units=order.num_units,
            pages=order.pages,
            writer=order.source.listeners.incarnation,
            may_write_directly=generations is not None,
        )
        if self._was_opened:
            self._registrations.reopen(registration)
        else:
            self._registrations.add(registration)
        self._was_opened = self.is_open = True
        if generations is not None:
            generations.grant(order.pages, order.generations)

    def close(self, *, is_confirmed: bool) -> None:
        """Emits WriterStopped, later, when nothing of the part can be written any more."""
        self.is_open = False
        if is_confirmed:
            self._registrations.release(self.registration_id)
        stopped = WriterStopped(transfer=self._order.transfer, part=self._order.part)
        self._registrations.close(self.registration_id, on_safe=lambda: self._emit_later(stopped))

    def hash(self, first: int, stop: int) -> None:
        """Take the digests of units [first, stop), which are written."""
        num_bytes = (stop - first) * self._plan.unit_bytes
        self._hashes.append(self._tools.hashing.submit(num_bytes, self._take_digests, first, stop))

    def verify(self, expected: bytes) -> None:
        """Compare when the last digest is taken; emits PartVerified, later."""
        waiting = [each for each in self._hashes if not each.done()]
        if waiting:
            waiting[-1].add_done_callback(lambda _: self._tools.post(lambda: self.verify(expected)))
            return
        corrupt_units = differing_units(expected, bytes(self._found))
        self._emit_later(
            PartVerified(transfer=self._order.transfer, part=self._order.part, corrupt_units=corrupt_units)
        )

    def _take_digests(self, first: int, stop: int) -> None:
        offset_N = self._plan.destination.offsets(first, stop, self._order.pages)
        digests = self._digests.take(self._plan, offset_N, first, stop)
        self._found[first * DIGEST_BYTES : stop * DIGEST_BYTES] = digests

    def _emit_later(self, event: PartEvent) -> None:
        self._tools.post(lambda: self._tools.emit(event))


class SendShard:
    """A part that leaves. All calls are made by the rank's thread.

    The digests of a piece are taken from the pages that it was read from, once it is written. For a bulk
    transfer from a CPU's memory they are taken while the piece is written: its pages were computed long ago,
    and a busy rank hears of events only once a step.
    """

    def __init__(
        self, order: ReachPeer, plan: TransferPlan, transports: PeerTransports, tools: RankTools
    ) -> None:
        self._transfer = order.transfer
        self._part = order.part
        self._registration_id = registration_id(order.transfer, order.part)
        self._plan = plan
        self._transports = transports
        self._tools = tools
        self._digests = PartDigests(tools.digests, order.digest_key, order.part)
        self._pages: tuple[int, ...] = ()
        self._grant: GrantPart | None = None

    def reach(self) -> None:
        """Emits PartReached, at once or later."""
        self._transports.when_settled(self._reached)

    def grant(self, grant: GrantPart) -> None:
        self._grant = grant

    def push(self, order: PushPart) -> None:
        """After the grant. Emits PartWritten, and PartHashed for a piece that was written."""
        grant = self._grant
        assert grant is not None, "pages are pushed without a grant"
        self._pages += order.more_pages
        transfer = OutgoingTransfer(
            id=self._registration_id,
            epoch=grant.epoch,
            plan=self._plan,
            source_pages=self._pages,
            destination_pages=grant.pages,
            destination_generations=grant.generations,
            is_bulk=grant.is_bulk,
        )
        piece = Piece(transfer, order.first, order.stop)
        hashing, digests = self._tools.hashing, None
        if grant.is_bulk and hashing.may_inline:
            digests = hashing.submit(piece.num_bytes, self._digest, piece)
        self._transports.push(piece, partial(self._written, piece, digests))

    def stop(self) -> None:
        """Emits PartStopped: on return nothing is read or written for the part."""
        self._transports.abort(self._registration_id)
        self._tools.emit(PartStopped(transfer=self._transfer, part=self._part))

    def _reached(self) -> None:
        name = self._transports.name or ""
        self._tools.emit(PartReached(transfer=self._transfer, part=self._part, transport=name))

    def _written(self, piece: Piece, digests: "Future[bytes] | None", outcome: PieceOutcome) -> None:
        self._tools.emit(
            PartWritten(
                transfer=self._transfer,
                part=self._part,
                first=piece.first,
                stop=piece.stop,
                outcome=outcome,
            )
        )
        if not outcome.is_done:
            return
        taken = digests or self._tools.hashing.submit(piece.num_bytes, self._digest, piece)
        if taken.done():
            self._hashed(piece, taken)
        else:
            taken.add_done_callback(lambda taken: self._tools.post(partial(self._hashed, piece, taken)))

    def _hashed(self, piece: Piece, taken: "Future[bytes]") -> None:
        error = taken.exception()
        self._tools.emit(
            PartHashed(
                transfer=self._transfer,
                part=self._part,
                first=piece.first,
                stop=piece.stop,
                digests=b"" if error is not None else taken.result(),
                reason="" if error is None else f"the digest of a piece failed: {error!r}"[:MAX_REASON],
            )
        )

    def _digest(self, piece: Piece) -> bytes:
        offset_N = self._plan.source.offsets(piece.first, piece.stop, piece.transfer.source_pages)
        return self._digests.take(self._plan, offset_N, piece.first, piece.stop)


class Executor(Performer, Protocol):
    """Any rank of a replica, as its rank 0 sees it. All but `stop` and `close` are called by one thread."""

    @property
    def listeners(self) -> RankListenerAddresses: ...

    @property
    def is_lost(self) -> bool:
        """Whether the rank's process is gone, or going: no transfer begins with it any more."""

    def counts(self) -> dict[str, int]:
        """The rank's counters since its start, by name; those of another process may be a little old."""

    def stop(self) -> None:
        """Send no page any more; `wait_until_stopped` says when that is certain. From any thread."""

    def wait_until_stopped(self, timeout_s: float) -> bool:
        """Whether it is certain that no page leaves the rank."""

    def close(self) -> None:
        """On return no page of the rank is written, but by processes that have mapped it."""


class RankExecutor:
    """The rank of this process: an `Executor`."""

    def __init__(
        self,
        settings: RankSettings,
        pool: Tensor,
        shared: SharedPool | None,
        incarnation: bytes,
        transports: TransportSet,
        post: Post,
        emit: Emit,
        *,
        clock: Clock,
        dropped: DroppedPeers,
        steps: CompletedSteps | None = None,
    ) -> None:
        """pool, shared, incarnation: as of LocalRank. emit: called by the rank's thread, which `post`
        reaches.

        steps: those that write the pool; None: only transfers write the pool.
        """
        self.is_lost = False  # a process never finds itself lost
        self._settings = settings
        self._ring: KeyRing | None = None  # None: the key never changes
        key: LinkSecret
        if isinstance(settings.key, bytes):
            key = settings.key
        else:
            self._ring = KeyRing(Kind.WORKER, settings.key)
            key = LinkKeys(self._ring, PAGES)
        self.rank = LocalRank(
            pool,
            layout=settings.layout,
            rank=settings.rank,
            host=settings.host,
            key=key,
            incarnation=incarnation,
            shared=shared,
            on_writer_death=lambda registrations: post(partial(self._on_writer_death, registrations)),
            clock=clock,
            dropped=dropped,
        )
        self._open_listeners = transports.listen(self.rank)
        self.listeners = RankListenerAddresses(
            incarnation=incarnation,
            host=this_host(),
            device=self.rank.device,
            addresses={name: listener.address for name, listener in self._open_listeners.items()},
        )
        self._hashing = Hashing(settings.num_hashing_threads, may_inline=self.rank.memory is not None)
        self._transports = RankTransports(self.rank, self.listeners, transports, post)
        self._emit = emit
        self._tools = RankTools(self.rank, digests_of(self.rank), self._hashing, post, emit)
        self._arriving: dict[bytes, dict[int, ReceiveShard]] = {}  # transfer -> part -> shard
        self._leaving: dict[tuple[bytes, int], SendShard] = {}  # (transfer, part) -> shard
        # On a GPU rank 0 pushes from the thread of its steps, and the stream that reads follows theirs.
        is_ordered = pool.is_cuda and settings.rank == 0
        self._gate = StepGate(steps or NoSteps(), self._carry_out, post, pushes_wait=not is_ordered)

    @property
    def counters(self) -> TransportCounters:
        return self._transports.counters

    def counts(self) -> dict[str, int]:
        received = self.rank.registrations.counters.by_name()
        dropped = {f"dropped_{reason}": number for reason, number in self.rank.dropped.counts().items()}
        return {**self.counters.by_name(), **received, **dropped}

    def perform(self, command: Command) -> None:
        match command:
            case DropLink(link=link):
                self._transports.drop(link)
            case UseKeys(generations=generations):
                if self._ring is not None:
                    self._ring.replace(generations)
            case _:
                self._gate.perform(command)

    def stop(self) -> None:
        self._transports.stop()

    def wait_until_stopped(self, timeout_s: float) -> bool:
        return True  # `stop` has waited

    def close(self) -> None:
        self.stop()
        self._gate.close()
        for listener in self._open_listeners.values():
            listener.close()
        self.rank.close()
        self._hashing.close()

    def _carry_out(self, command: PartCommand) -> None:
        match command:
            case OpenPart():
                self._open(command)
            case ClosePart():
                self._close_part(command)
            case HashUnits():
                self._arriving[command.transfer][command.part].hash(command.first, command.stop)
            case VerifyPart():
                self._arriving[command.transfer][command.part].verify(command.digests)
            case ReachPeer():
                self._reach(command)
            case GrantPart():
                self._leaving[command.transfer, command.part].grant(command)
            case PushPart():
                self._leaving[command.transfer, command.part].push(command)
            case StopPart():
                self._leaving[command.transfer, command.part].stop()
            case ForgetPart():
                self._forget(command)

    def _open(self, order: OpenPart) -> None:
        parts = self._arriving.setdefault(order.transfer, {})
        part = parts.get(order.part)
        if part is None:
            plan = self._plan(order.source, order.layers, is_source=False)
            part = parts[order.part] = ReceiveShard(order, plan, self._tools)
        part.open()
        self._emit(PartOpened(transfer=order.transfer, part=order.part))

    def _close_part(self, command: ClosePart) -> None:
        """Other parts may have the same pages, with other heads: pages are revoked with the last part."""
        parts, generations = self._arriving[command.transfer], self.rank.generations
        part = parts[command.part]
        others = (other for other in parts.values() if other is not part)
        if generations is not None and not any(other.is_open for other in others):
            generations.revoke(part.pages)
        part.close(is_confirmed=command.is_confirmed)

    def _on_writer_death(self, registrations: list[bytes]) -> None:
        dead = [
            WriterDied(transfer=transfer, part=number)
            for transfer, parts in self._arriving.items()
            for number, part in parts.items()
            if part.registration_id in registrations
        ]
        for event in dead:
            self._emit(event)

    def _reach(self, order: ReachPeer) -> None:
        transports = self._transports.to(order.link, order.destination)
        plan = self._plan(order.destination, order.layers, is_source=True)
        part = SendShard(order, plan, transports, self._tools)
        self._leaving[order.transfer, order.part] = part
        part.reach()

    def _forget(self, command: OfPart) -> None:
        self._leaving.pop((command.transfer, command.part), None)
        parts = self._arriving.get(command.transfer)
        if parts is not None:
            parts.pop(command.part, None)
            if not parts:
                del self._arriving[command.transfer]

    def _plan(self, peer: PeerRank, layers: tuple[int, int], *, is_source: bool) -> TransferPlan:
        ours, theirs = (self._settings.layout, self._settings.rank), (peer.layout, peer.rank)
        (source, source_rank), (destination, rank) = (ours, theirs) if is_source else (theirs, ours)
        return plan_transfer(source, destination, source_rank, rank, layers)
