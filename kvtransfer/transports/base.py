"""The extension point `Transport`: moves page bytes from one rank's pool into another rank's pool.

1. A destination rank listens with every automatic transport, and with the one that its operator asked for.
   Its `RankListenerAddresses` tell peers the address of each listener.
2. A source rank puts the transports that both ranks have in order (`TransportSet.order`) and connects with
   the first. The `Sender` moves pieces; `LocalRank.registrations` at the destination admit them.
3. A transport that does not open, or breaks, is replaced by the next (kvtransfer/ranks/peer_transports.py).
   When none is left, the destination computes the pages itself.

The transports and their order are the dictionary in kvtransfer/transports/registry.py.

The life of a piece in the TransferQueue that every sender of Baton's own has:

1. `push` cuts the piece into parts, at unit boundaries, and queues the parts.
2. The sender's threads `take` parts. A thread may read a part's pages until it calls `leave`, on every path.
3. `finish` of the last part ends the piece as done: every byte is in the destination's memory. `fail` of any
   part ends it as failed: its queued parts are never taken, and threads that work on others see `is_over`.
   Any bytes of a failed piece may have arrived.
4. `abort` fails all pieces of a transfer, and returns when no thread is inside the transfer's pages. The
   pages of a failed piece may be reused only then.
5. `break_off` fails all pieces, now and later: the destination cannot be reached any more.

Parts of other transfers overtake the parts of bulk transfers. One bulk part is taken after every
MAX_OVERTAKES others, so that bulk transfers never stand still.
"""

import itertools
import socket
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Annotated, Final, Literal, Protocol, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray
from torch import Tensor

from baton.clock import Clock
from baton.errors import ConfigError
from baton.kvtransfer.protocol.messages import PeerRank, RankListenerAddresses
from baton.kvtransfer.protocol.transfer_plan import TransferPlan, sent_codes
from baton.kvtransfer.transports.pages import (
    PageGenerations,
    PageMemory,
    PagePacking,
    SharedPool,
    as_words,
    packing_of,
)
from baton.kvtransfer.transports.receive_registration import ReceiveRegistrations
from baton.kvtransfer.transports.records import PartHeader, WriteOutcome
from baton.messages.bounds import Kind, KvStreams
from baton.pages import PageLayout
from baton.rpc.auth import NO_SCHEMA, PAGES, KeyRing, LinkKeys, Role
from baton.rpc.auth import Generations as KeyGenerations
from baton.rpc.connection import Connection, DroppedPeers

AUTO: Final = "auto"  # the setting by which a transport is chosen by where the two ranks are
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def this_host() -> str:
    """Return an id of this boot of this machine. Ranks that share a kernel have the same id."""
    return _BOOT_ID.read_text().strip()


Rank: TypeAlias = Annotated[int, Meta(ge=0, le=2**16 - 1)]


class RankSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of one rank of a replica."""

    keys: KeyGenerations  # of the process, at its start
    layout: PageLayout
    rank: Rank
    host: str  # the address that the rank listens on
    transport: str  # see kvtransfer/transports/registry.py
    num_streams: KvStreams = 1  # of CUDA, for the copies of one pair of ranks over nccl, nixl or mooncake
    stream_priority: int = 0  # of all streams that copy pages, as torch counts priorities: -1 goes before 0


class LocalRank:
    """A rank of this process, with everything that its transports need. `close` frees what it has made."""

    def __init__(
        self,
        pool: Tensor,
        settings: RankSettings,
        incarnation: bytes,
        *,
        shared: SharedPool | None,
        on_writer_death: Callable[[list[bytes]], None],
        clock: Clock,
        dropped: DroppedPeers,
    ) -> None:
        """pool: contiguous [num_pages, ...], on a CPU or a GPU; ValueError for any other.

        incarnation: 16 bytes that name this process. shared: has made `pool`, if other processes on this host
        may map the pool. on_writer_death: called from any thread with the ids of open registrations after the
        death of their writing process.
        """
        self.pool = pool
        self.settings = settings
        self.incarnation = incarnation
        self.num_pages = len(pool)
        self.device: Literal["cpu", "cuda"] = "cuda" if pool.is_cuda else "cpu"
        self.memory = None if pool.is_cuda else PageMemory.of(pool)
        self.sends_codes = sent_codes(settings.layout) is not None
        self.shared = shared
        self.on_writer_death = on_writer_death
        self.clock = clock
        self.dropped = dropped
        self.registrations = ReceiveRegistrations(self.num_pages)
        # None: other processes cannot write into the pool directly
        self.generations = PageGenerations(self.num_pages) if pool.is_cuda else None
        if shared is not None:
            self.generations = shared.generations
        self.keys = KeyRing(Kind.WORKER, settings.keys)  # new connections are proved with these

    def connect(
        self, sock: socket.socket, role: Role, timeout_s: float, schema: bytes = NO_SCHEMA
    ) -> Connection:
        """Return a connection over the socket; both ends have proven the key of page links to each other.

        Raises BatonError or OSError when that fails; the caller closes the socket.
        """
        keys = LinkKeys(self.keys, PAGES)
        connection = Connection(sock, keys, role, dropped=self.dropped, clock=self.clock, schema=schema)
        return connection.handshake(timeout_s)

    def packing(self, num_lanes: int = 1) -> PagePacking:
        """Return a packing of the pool for one user: on a GPU each user has streams of its own."""
        return packing_of(self.pool, num_lanes, self.settings.stream_priority)

    def close(self) -> None:
        """Free what this rank has made; the listeners have been closed before."""
        if self.generations is not None and self.shared is None:
            self.generations.file.close()


PATIENCE_S: Final = 0.005  # of `abort`, before it interrupts a thread that reads the pages
SPLIT_BYTES: Final = 8 * 2**20  # below, a second thread costs more than it brings
MAX_OVERTAKES: Final = 8
MAX_REASON: Final = 256

Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """Units [first, stop) of a transfer to one destination rank.

    A sender that writes the destination's pages directly must not write a page after its generation has
    changed from the one in `destination_generations`, which were granted with the pages.
    """

    transfer: bytes  # 16 random bytes
    epoch: int
    plan: TransferPlan
    source_pages: tuple[int, ...]  # of the transfer: those of [0, stop) at least
    destination_pages: tuple[int, ...]  # of all units
    destination_generations: tuple[int, ...]
    first: int
    stop: int
    is_bulk: bool = False  # pieces of other transfers overtake this one

    @property
    def num_bytes(self) -> int:
        return (self.stop - self.first) * self.plan.sent_unit_bytes

    def granted(self, first: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
        """Return the destination's pages of units [first, stop), and their words in its PageGenerations."""
        side = self.plan.destination
        used = slice(first // side.units_per_page, side.num_pages(stop))
        pages = np.asarray(self.destination_pages[used], dtype=np.int64)
        return pages, as_words(self.destination_generations[used])


class PieceOutcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The end of a piece; an agent also sends it to rank 0."""

    is_done: bool
    num_bytes: Count = 0  # that were moved
    reason: Annotated[str, Meta(max_length=MAX_REASON)] = ""  # of a failed piece


# Called once, by a thread of the sender or from within one of its methods. It must return at once.
OnEnd: TypeAlias = Callable[[PieceOutcome], None]


class Sender(Protocol):
    """Moves pieces from one source rank to one destination rank. Calls are safe from any thread.

    A failure of one sender never affects another. All calls but `open`, `abort` and `close` return at once.
    """

    @property
    def is_broken(self) -> bool:
        """Return True when every further piece fails."""

    def open(self) -> None:
        """Connect. Raises TransferFailed when the destination cannot be reached; the caller calls `close`."""

    def push(self, piece: Piece, on_end: OnEnd) -> None:
        """Queue a piece. A sender that is broken or closed fails it.

        The source's pages must stay as they are until the piece has ended; those of a failed piece until
        `abort` or `close` has returned.
        """

    def abort(self, transfer: bytes) -> None:
        """Fail all pieces of a transfer that have not ended.

        On return this process neither reads the transfer's source pages nor writes its destination pages.
        The destination refuses bytes that are still in the network (see receive_registration.py).
        """

    def close(self) -> None:
        """Fail all pieces, stop the threads, free memory and sockets. May be called twice.

        An `open` may be waiting in another thread; `close` is due once more when it has returned.
        """


class TransportListener(Protocol):
    """Admits sources to the pool of one rank. A listener lets only registered bytes into the pages."""

    @property
    def address(self) -> str:
        """Return the address for `Transport.connect`, at most 107 characters. The peer knows the host."""

    def close(self) -> None:
        """Accept no further source. Afterwards only processes that have mapped the pool write pages."""


class Transport(Protocol):
    """One way to move pages, and one entry of the registry."""

    name: str  # at most 16 characters, for settings and counters
    is_automatic: bool  # False: only where the operator asks for the transport by name

    def can_serve(self, source: RankListenerAddresses, destination: RankListenerAddresses) -> bool:
        """Return True when pages can move between these ranks, judged by `host` and `device`."""

    def listen(self, rank: LocalRank) -> TransportListener | None:
        """Begin to admit sources. Returns None when this transport cannot reach the rank's pool."""

    def connect(self, rank: LocalRank, peer: PeerRank) -> Sender:
        """Return a sender to the peer's listener, not open yet. Raises TransferFailed for a bad address."""


class TransportSet:
    """The transports that a rank uses, best first. The last one serves every pair of ranks."""

    def __init__(self, transports: Sequence[Transport], asked: Transport | None = None) -> None:
        """asked: the transport to try first; None: the places of the two ranks decide."""
        self._transports = transports
        self._asked = asked

    def listen(self, rank: LocalRank) -> dict[str, TransportListener]:
        """Return the rank's open listeners by transport name. The caller closes the listeners."""
        listeners: dict[str, TransportListener] = {}
        with ExitStack() as failing:
            for transport in self._transports:
                if transport.is_automatic or transport is self._asked:
                    listener = transport.listen(rank)
                    if listener is not None:
                        listeners[transport.name] = failing.enter_context(closing(listener))
            failing.pop_all()
        return listeners

    def order(
        self, source: RankListenerAddresses, destination: RankListenerAddresses
    ) -> tuple[Transport, ...]:
        """Return the destination's transports that a source tries, best first.

        Raises ConfigError when the operator's transport cannot serve the two ranks.
        """
        usable = [each for each in self._transports if each.can_serve(source, destination)]
        ordered = [each for each in usable if each.is_automatic]
        if self._asked is not None:
            if self._asked not in usable:
                raise ConfigError(
                    f"transport: {self._asked.name} cannot serve {_place(source)} to {_place(destination)}"
                )
            fallback = [each for each in ordered[-1:] if each is not self._asked]
            ordered = [self._asked, *fallback]
        return tuple(each for each in ordered if each.name in destination.addresses)


def _place(rank: RankListenerAddresses) -> str:
    return f"{rank.device} on host {rank.host}"


class QueuedPiece:
    """A piece that a sender has accepted, with its counts so far."""

    def __init__(self, piece: Piece, on_end: OnEnd, num_parts: int) -> None:
        self.piece = piece
        self.num_open_parts = num_parts
        self.is_over = False
        self.num_bytes = 0
        self._on_end = on_end

    def end(self, reason: str | None) -> Callable[[], None]:
        """End the piece and return the call to make outside the queue's lock.

        reason: None for a piece that is done.
        """
        self.is_over = True
        outcome = PieceOutcome(
            is_done=reason is None, num_bytes=self.num_bytes, reason=(reason or "")[:MAX_REASON]
        )
        return lambda: self._on_end(outcome)


class Part:
    """Units [first, stop) of a piece: as much as one thread moves at a time."""

    __slots__ = ("first", "num_bytes", "piece", "queued", "stop")

    def __init__(self, queued: QueuedPiece, first: int, stop: int) -> None:
        self.queued = queued
        self.piece = queued.piece
        self.first = first
        self.stop = stop
        self.num_bytes = (stop - first) * self.piece.plan.sent_unit_bytes

    @property
    def header(self) -> PartHeader:
        """Return the record that goes before the part's bytes."""
        return PartHeader(self.piece.transfer, self.piece.epoch, self.first, self.stop, self.num_bytes)


class TransferQueue:
    """The pieces that one sender has accepted and not ended. Safe from any thread."""

    def __init__(self, part_bytes: int, num_threads: int) -> None:
        """part_bytes: the most that a part has, if a unit has no more. A piece of SPLIT_BYTES or more has a
        part for each thread.
        """
        self._part_bytes = part_bytes
        self._num_threads = num_threads
        self._lock = threading.RLock()
        self._queued = threading.Condition(self._lock)  # notified of a part to take, or of the end
        self._left = threading.Condition(self._lock)  # notified when no thread is inside a transfer's pages
        self._open: dict[QueuedPiece, None] = {}  # in the order of their pushes
        self._due: deque[Part] = deque()
        self._bulk: deque[Part] = deque()
        self._num_overtakes = 0  # since a bulk part was taken last, or none waited
        self._inside: Counter[bytes] = Counter()  # transfer id -> parts in the hands of threads
        self._end_reason: str | None = None  # set once

    @property
    def end_reason(self) -> str | None:
        """Return why every further piece fails; None while the queue works."""
        return self._end_reason

    @property
    def is_idle(self) -> bool:
        """Return True when no part waits."""
        return not self._due and not self._bulk

    def push(self, piece: Piece, on_end: OnEnd, *, wakes: bool = True) -> None:
        """Queue a piece. wakes: False when the caller takes the parts itself, so that no thread needs to."""
        with self._lock:
            bounds = self._cut(piece)
            queued = QueuedPiece(piece, on_end, len(bounds) - 1)
            if self._end_reason is None and len(bounds) > 1:
                queue = self._bulk if piece.is_bulk else self._due
                queue.extend(Part(queued, first, stop) for first, stop in itertools.pairwise(bounds))
                self._open[queued] = None
                if wakes:
                    self._queued.notify(len(bounds) - 1)
                return
            tell = queued.end(self._end_reason)
        tell()

    def abort(self, transfer: bytes, cut: Callable[[], None] | None = None) -> None:
        """Fail a transfer's pieces. Returns when no thread is inside the transfer's pages.

        cut: interrupts a thread that a slow peer holds up inside the pages. It is called under the queue's
        lock, so no thread enters or leaves meanwhile.
        """
        with self._lock:
            theirs = [queued for queued in self._open if queued.piece.transfer == transfer]
            calls = self._fail(theirs, "aborted")
            if cut is not None and not self._left.wait_for(lambda: transfer not in self._inside, PATIENCE_S):
                cut()
            self._left.wait_for(lambda: transfer not in self._inside)
        _call(calls)

    def break_off(self, reason: str) -> None:
        """Fail all pieces, now and later; threads that wait in `take` return."""
        with self._lock:
            if self._end_reason is None:
                self._end_reason = reason
            calls = self._fail(list(self._open), self._end_reason)
            self._queued.notify_all()
        _call(calls)

    # For the sender's threads.

    def take(self, *, wait: bool) -> Part | None:
        """Return the next part, which the caller must `leave` and `finish` or `fail`.

        Returns None when the queue has ended and, without `wait`, when no part waits.
        """
        with self._lock:
            while self._end_reason is None:
                part = self._next()
                if part is not None:
                    self._inside[part.piece.transfer] += 1
                    return part
                if not wait:
                    return None
                self._queued.wait()
            return None

    def leave(self, part: Part) -> None:
        """Record that the calling thread no longer touches the part's pages."""
        with self._lock:
            self._inside[part.piece.transfer] -= 1
            if not self._inside[part.piece.transfer]:
                del self._inside[part.piece.transfer]
                self._left.notify_all()

    def finish(self, part: Part) -> None:
        """Record that the part's bytes are at the destination."""
        queued = part.queued
        with self._lock:
            queued.num_open_parts -= 1
            queued.num_bytes += part.num_bytes
            if queued.num_open_parts or queued.is_over:
                return
            del self._open[queued]
            tell = queued.end(None)
        tell()

    def answered(self, part: Part, outcome: WriteOutcome) -> None:
        """Record the destination's answer to a part."""
        if outcome == WriteOutcome.WRITTEN:
            self.finish(part)
        else:
            self.fail(part, "the destination has ended the transfer")

    def fail(self, part: Part, reason: str) -> None:
        """Fail the part's piece: the destination refused the part, or the part cannot be sent."""
        with self._lock:
            calls = self._fail([] if part.queued.is_over else [part.queued], reason)
        _call(calls)

    def requeue(self, part: Part) -> None:
        """Queue the part again, before all other parts."""
        with self._lock:
            if not part.queued.is_over:
                (self._bulk if part.piece.is_bulk else self._due).appendleft(part)
                self._queued.notify()

    # Under the lock.

    def _cut(self, piece: Piece) -> list[int]:
        """Return the bounds of the parts, `first` to `stop`; a single bound for an empty piece."""
        if not piece.num_bytes:
            return [piece.first]
        num_parts = -(-piece.num_bytes // self._part_bytes)
        if piece.num_bytes >= SPLIT_BYTES:
            num_parts = -(-num_parts // self._num_threads) * self._num_threads
        num_units = piece.stop - piece.first
        num_parts = min(num_parts, num_units)
        return [piece.first + num_units * index // num_parts for index in range(num_parts + 1)]

    def _next(self) -> Part | None:
        for queue in (self._due, self._bulk):
            while queue and queue[0].queued.is_over:
                queue.popleft()
        if not self._bulk:
            self._num_overtakes = 0
            return self._due.popleft() if self._due else None
        if self._due and self._num_overtakes < MAX_OVERTAKES:
            self._num_overtakes += 1
            return self._due.popleft()
        self._num_overtakes = 0
        return self._bulk.popleft()

    def _fail(self, pieces: list[QueuedPiece], reason: str) -> list[Callable[[], None]]:
        for piece in pieces:
            del self._open[piece]
        return [piece.end(reason) for piece in pieces]


def _call(calls: list[Callable[[], None]]) -> None:
    for call in calls:
        call()


class QueueSender:
    """The part of a `Sender` that all of Baton's transports share: pieces wait in a TransferQueue."""

    def __init__(self, rank: LocalRank, part_bytes: int, num_threads: int, num_lanes: int = 1) -> None:
        """part_bytes, num_threads: as in TransferQueue. rank: the source. num_lanes: of the packing."""
        self._rank = rank
        self._packing = rank.packing(num_lanes)
        self._queue = TransferQueue(part_bytes, num_threads)

    @property
    def is_broken(self) -> bool:
        return self._queue.end_reason is not None

    def push(self, piece: Piece, on_end: OnEnd) -> None:
        """Queue a piece. ValueError for pages that the pool does not have."""
        pages, num_pages = piece.source_pages, self._rank.num_pages
        if pages and not 0 <= min(pages) <= max(pages) < num_pages:
            raise ValueError(f"the pool has {num_pages} pages: {pages}")
        self._packing.note_written()
        self._enqueue(piece, on_end)

    def abort(self, transfer: bytes) -> None:
        self._queue.abort(transfer)

    def _enqueue(self, piece: Piece, on_end: OnEnd) -> None:
        self._queue.push(piece, on_end)
