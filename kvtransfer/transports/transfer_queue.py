"""Pieces of transfers on their way out of a rank, and the queue that every sender keeps them in.

The life of a piece:

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
import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta

from baton.clock import Clock
from baton.kvtransfer.protocol.transfer_plan import TransferPlan

PATIENCE_S: Final = 0.005  # before `abort` interrupts a thread that is inside the pages
SPLIT_BYTES: Final = 8 * 2**20  # below, a second thread costs more than it brings
MAX_OVERTAKES: Final = 8
MAX_REASON: Final = 256

Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class OutgoingTransfer(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt to move one request's pages to one destination rank.

    A sender that writes the destination's pages directly must not write a page whose generation is no longer
    the one in `destination_generations`, which were granted with the pages.
    """

    id: bytes  # 16 random bytes
    epoch: int
    plan: TransferPlan
    source_pages: tuple[int, ...]
    destination_pages: tuple[int, ...]
    destination_generations: tuple[int, ...]
    is_bulk: bool = False  # pieces of other transfers overtake its pieces


class Piece(msgspec.Struct, frozen=True):
    """Units [first, stop) of a transfer."""

    transfer: OutgoingTransfer
    first: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return (self.stop - self.first) * self.transfer.plan.unit_bytes


class Spans(msgspec.Struct, frozen=True):
    """The seconds from a piece's push to its end, by what they were spent on."""

    queued_s: float = 0.0  # behind other pieces
    gather_s: float = 0.0  # finding the runs, and packing them where the transport packs
    wire_s: float = 0.0  # moving the bytes until the destination has confirmed them

    @property
    def total_s(self) -> float:
        return self.queued_s + self.gather_s + self.wire_s


class PieceOutcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a piece ended; also sent by a follower's rank to rank 0."""

    is_done: bool
    num_bytes: Count = 0  # that were moved
    num_messages: Count = 0  # system calls, sends or copies that moved them
    reason: Annotated[str, Meta(max_length=MAX_REASON)] = ""  # of a failed piece
    spans: Spans = Spans()


# Called once, by a thread of the sender or from within one of its methods. It must return at once.
OnEnd: TypeAlias = Callable[[PieceOutcome], None]


class QueuedPiece:
    """A piece that a sender has accepted, with its counts so far."""

    def __init__(self, piece: Piece, on_end: OnEnd, num_parts: int, now_s: float) -> None:
        self.transfer = piece.transfer
        self.num_open_parts = num_parts
        self.is_over = False
        self.num_bytes = self.num_messages = 0
        self.gather_s = 0.0
        self.pushed_s = now_s
        self.begun_s: float | None = None  # when a thread took its first part
        self._on_end = on_end

    def end(self, now_s: float, reason: str | None) -> Callable[[], None]:
        """End the piece; the call to make outside the queue's lock. reason: None for a piece that is done."""
        self.is_over = True
        begun_s = now_s if self.begun_s is None else self.begun_s
        gather_s = min(self.gather_s, now_s - begun_s)  # parts are gathered side by side
        outcome = PieceOutcome(
            is_done=reason is None,
            num_bytes=self.num_bytes,
            num_messages=self.num_messages,
            reason=(reason or "")[:MAX_REASON],
            spans=Spans(begun_s - self.pushed_s, gather_s, now_s - begun_s - gather_s),
        )
        return lambda: self._on_end(outcome)


class Part:
    """Units [first, stop) of a piece: as much as one thread moves at a time."""

    __slots__ = ("first", "num_bytes", "piece", "stop", "transfer")

    def __init__(self, piece: QueuedPiece, first: int, stop: int) -> None:
        self.piece = piece
        self.transfer = piece.transfer
        self.first = first
        self.stop = stop
        self.num_bytes = (stop - first) * piece.transfer.plan.unit_bytes


class TransferQueue:
    """The pieces that one sender has accepted and not ended. Safe from any thread."""

    def __init__(self, part_bytes: int, num_threads: int, clock: Clock) -> None:
        """part_bytes: the most that a part has, if a unit has no more. A piece of SPLIT_BYTES or more has a
        part for each thread.
        """
        self._part_bytes = part_bytes
        self._num_threads = num_threads
        self._clock = clock
        self._lock = threading.RLock()
        self._queued = threading.Condition(self._lock)  # notified of a part to take, or of the end
        self._left = threading.Condition(self._lock)  # notified when no thread is inside a transfer's pages
        self._open: dict[QueuedPiece, None] = {}  # in the order of their pushes
        self._due: deque[Part] = deque()
        self._bulk: deque[Part] = deque()
        self._num_overtakes = 0  # since a bulk part was taken last, or none waited
        self._inside: Counter[bytes] = Counter()  # transfer id -> parts whose pages a thread may touch
        self._end_reason: str | None = None  # set once

    @property
    def end_reason(self) -> str | None:
        """Why every piece fails from now on; None while the queue works."""
        return self._end_reason

    @property
    def is_idle(self) -> bool:
        """Whether no part waits to be taken."""
        return not self._due and not self._bulk

    def push(self, piece: Piece, on_end: OnEnd, *, wakes: bool = True) -> None:
        """wakes: False where the caller takes the parts itself, so that no thread needs to."""
        now_s = self._clock.now_s()
        with self._lock:
            bounds = self._cut(piece)
            queued = QueuedPiece(piece, on_end, len(bounds) - 1, now_s)
            if self._end_reason is None and len(bounds) > 1:
                queue = self._bulk if piece.transfer.is_bulk else self._due
                queue.extend(Part(queued, first, stop) for first, stop in itertools.pairwise(bounds))
                self._open[queued] = None
                if wakes:
                    self._queued.notify(len(bounds) - 1)
                return
            tell = queued.end(now_s, self._end_reason)
        tell()

    def abort(self, transfer: bytes, cut: Callable[[], None] | None = None) -> None:
        """Fail a transfer's pieces; returns when no thread is inside its pages.

        cut: interrupts a thread that a slow peer holds up in there. It is called under the queue's lock, so
        no thread enters or leaves meanwhile.
        """
        with self._lock:
            calls = self._fail([piece for piece in self._open if piece.transfer.id == transfer], "aborted")
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
        """The next part, which the caller must `leave` and `finish` or `fail`. None when no part waits, or
        with `wait` when the queue has ended.
        """
        with self._lock:
            while self._end_reason is None:
                part = self._next()
                if part is not None:
                    if part.piece.begun_s is None:
                        part.piece.begun_s = self._clock.now_s()
                    self._inside[part.transfer.id] += 1
                    return part
                if not wait:
                    return None
                self._queued.wait()
            return None

    def leave(self, part: Part) -> None:
        """The calling thread does not touch the part's pages any more."""
        with self._lock:
            self._inside[part.transfer.id] -= 1
            if not self._inside[part.transfer.id]:
                del self._inside[part.transfer.id]
                self._left.notify_all()

    def finish(self, part: Part, num_messages: int, gather_s: float) -> None:
        """The part's bytes are at the destination."""
        piece = part.piece
        with self._lock:
            piece.num_open_parts -= 1
            piece.num_messages += num_messages
            piece.num_bytes += part.num_bytes
            piece.gather_s += gather_s
            if piece.num_open_parts or piece.is_over:
                return
            del self._open[piece]
            tell = piece.end(self._clock.now_s(), None)
        tell()

    def fail(self, part: Part, reason: str) -> None:
        """The destination has refused the part, or it cannot be sent."""
        with self._lock:
            calls = self._fail([] if part.piece.is_over else [part.piece], reason)
        _call(calls)

    def requeue(self, part: Part) -> None:
        """Let another thread take the part again, before all others."""
        with self._lock:
            if not part.piece.is_over:
                (self._bulk if part.transfer.is_bulk else self._due).appendleft(part)
                self._queued.notify()

    # Under the lock.

    def _cut(self, piece: Piece) -> list[int]:
        """[first, ..., stop): the bounds of the parts; a single bound for an empty piece."""
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
            while queue and queue[0].piece.is_over:
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
        now_s = self._clock.now_s()
        return [piece.end(now_s, reason) for piece in pieces]


def _call(calls: list[Callable[[], None]]) -> None:
    for call in calls:
        call()
