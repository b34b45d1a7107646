"""What every transport offers: it moves pieces of transfers to one destination rank.

The life of a piece, at the source:

1. `push` takes it and returns a ticket at once; it is PENDING until a thread of the transport takes it up.
2. SENDING: its bytes are read from the source's pages. Those pages must stay as they are until step 3.
3. DONE: every byte is in the destination's memory, and the destination has said so or could see it.
   FAILED: with a reason; any part of its bytes may have arrived. Its pages may still be touched until
   `abort` or `close` has returned, which must come before they are reused.
4. `forget` ends the ticket, once its outcome has been read.

`abort` ends all pieces of one transfer. Nothing that happens to one destination reaches another.
"""

import itertools
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Final, Protocol

import msgspec

from baton.clock import Clock
from baton.kvtransfer.protocol.transfer_plan import Offsets, TransferPlan, TransferSide

# Called from the transport's thread when a ticket is DONE or FAILED; it must return at once.
OnEnd = Callable[[int], None]


class TransferStatus(IntEnum):
    PENDING = 0
    SENDING = 1
    DONE = 2
    FAILED = 3

    @property
    def is_final(self) -> bool:
        return self >= TransferStatus.DONE


class OutgoingTransfer(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt to move one request's pages to one destination rank, as the source knows it.

    `destination_generations` are those of `destination_pages` when they were granted: a transport that
    writes into them directly may not write a page whose generation has changed.
    """

    id: bytes  # 16 random bytes
    epoch: int
    plan: TransferPlan
    source_pages: tuple[int, ...]
    destination_pages: tuple[int, ...]
    destination_generations: tuple[int, ...]
    is_bulk: bool = False  # nobody waits for it: pieces of other transfers overtake its own


class Piece(msgspec.Struct, frozen=True):
    """Units [first, stop) of a transfer: what one `push` moves."""

    transfer: OutgoingTransfer
    first: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return (self.stop - self.first) * self.transfer.plan.unit_bytes


class Spans(msgspec.Struct, frozen=True):
    """Where the seconds of a piece went; they add up to the time from `push` to its end."""

    queued_s: float = 0.0  # behind other pieces
    gather_s: float = 0.0  # finding the runs, and packing them where the transport packs
    wire_s: float = 0.0  # moving the bytes, and the destination's word that they are there


class TransferProgress(msgspec.Struct, frozen=True):
    status: TransferStatus
    num_bytes: int = 0  # that have been moved so far
    num_messages: int = 0  # system calls, sends or copies that it took
    reason: str = ""  # why it FAILED
    spans: Spans = Spans()


class Transport(Protocol):
    """Calls are safe from any thread. All but `open`, `abort` and `close` return at once."""

    name: str

    def open(self) -> None:
        """Connect. TransferFailed when the destination can't be reached this way; `close` is still due."""

    def push(self, piece: Piece) -> int:
        """Queue a piece and return its ticket. A transport that is broken or closed fails the ticket."""

    @property
    def is_broken(self) -> bool:
        """Whether every piece fails from now on, whichever transfer it is of."""

    def poll(self, handle: int) -> TransferProgress:
        """KeyError for a ticket that was forgotten."""

    def forget(self, handle: int) -> None:
        """Drop a ticket whose outcome has been read; one that is still open is dropped when it ends."""

    def abort(self, transfer: bytes) -> None:
        """Fail all unfinished pieces of a transfer.

        On return this process neither reads its source pages nor writes its destination pages any more; what
        the network still holds is the destination's to refuse (see kvtransfer/ranks/receive_registration.py).
        """

    def close(self) -> None:
        """Fail everything unfinished, stop the threads, give back memory and sockets. Twice is harmless.

        An `open` that waits in another thread fails soon; close once more when it has.
        """


def offsets_of(side: TransferSide, first: int, stop: int, pages: Sequence[int]) -> Offsets:
    """`side.offsets`, at a cost that does not grow with the pages that [first, stop) has no part in."""
    first_page = first // side.units_per_page
    before = first_page * side.units_per_page
    return side.offsets(first - before, stop - before, pages[first_page : side.num_pages(stop)])


# The queue and the books of a transport: which pieces are under way, and what became of them.
#
# The life of a ticket:
#
# 1. `push` cuts its piece into parts, at unit boundaries, and queues them; PENDING.
# 2. Threads of the transport `take` parts; SENDING from the first one on. A thread that took a part may read
# its pages until it calls `leave`, on every path.
# 3. `finish` for the last part makes it DONE. `fail` of any part makes it FAILED: its queued parts are never
# taken, parts being worked on see `is_failed` and stop.
# 4. `abort` fails a transfer's tickets and waits until no thread is inside its pages.
# 5. `break_off` fails everything, now and later: the destination can't be reached any more.
#
# Parts of bulk transfers are overtaken by others, however early they came; but after MAX_OVERTAKES of these
# one of them is taken, so that bulk never stands still.
#
# A closed or broken queue hands out no part; `take` then returns None.

PATIENCE_S: Final = 0.005  # for a thread that is about to leave its pages by itself
SPLIT_BYTES: Final = 8 * 2**20  # below, a second thread costs more than it brings
NO_REASON: Final = ""
MAX_OVERTAKES: Final = 8


class TransferHandle:
    def __init__(self, number: int, piece: Piece, num_parts: int, now_s: float) -> None:
        self.number = number
        self.piece = piece
        self.num_open_parts = num_parts
        self.status = TransferStatus.PENDING
        self.reason = NO_REASON
        self.is_forgotten = False
        self.num_bytes = 0
        self.num_messages = 0
        self.gather_s = 0.0
        self.pushed_s = self.begun_s = self.ended_s = now_s

    @property
    def is_failed(self) -> bool:
        return self.status == TransferStatus.FAILED

    def progress(self) -> TransferProgress:
        elapsed_s = self.ended_s - self.begun_s
        gather_s = min(self.gather_s, elapsed_s)  # parts are gathered side by side
        spans = Spans(self.begun_s - self.pushed_s, gather_s, elapsed_s - gather_s)
        return TransferProgress(self.status, self.num_bytes, self.num_messages, self.reason, spans)


class Part:
    """Units [first, stop) of a ticket's piece."""

    __slots__ = ("first", "handle", "num_bytes", "stop")

    def __init__(self, handle: TransferHandle, first: int, stop: int) -> None:
        self.handle = handle
        self.first = first
        self.stop = stop
        self.num_bytes = (stop - first) * handle.piece.transfer.plan.unit_bytes


class TransferQueue:
    """Safe from any thread. `on_end` is called outside the lock."""

    def __init__(self, part_bytes: int, num_lanes: int, clock: Clock, on_end: OnEnd | None) -> None:
        """Parts are of part_bytes at most, if a unit is; a piece of SPLIT_BYTES has a part for each lane."""
        self._part_bytes = part_bytes
        self._num_lanes = num_lanes
        self._clock = clock
        self._on_end = on_end
        self._lock = threading.RLock()
        self._queued = threading.Condition(self._lock)  # there is a part to take, or there will be none
        self._left = threading.Condition(self._lock)  # nobody is inside some transfer's pages any more
        self._transfer_queue: dict[int, TransferHandle] = {}
        self._due: deque[Part] = deque()
        self._bulk: deque[Part] = deque()
        self._num_overtakes = 0  # since a part of a bulk transfer was taken last, or none waited
        self._inside: Counter[bytes] = Counter()  # transfer id -> parts whose pages a thread may touch
        self._num_pushed = 0
        self._end_reason: str | None = None  # set once: nothing is taken up any more

    # For the caller of the transport.

    def push(self, piece: Piece, *, wakes: bool = True) -> int:
        """wakes: a thread that waits in `take`; without, the caller takes the parts itself."""
        now_s = self._clock.now_s()
        with self._lock:
            number = self._num_pushed
            self._num_pushed += 1
            bounds = self._cut(piece)
            handle = self._transfer_queue[number] = TransferHandle(number, piece, len(bounds) - 1, now_s)
            if self._end_reason is not None:
                self._end(handle, TransferStatus.FAILED, self._end_reason)
            elif len(bounds) == 1:
                self._end(handle, TransferStatus.DONE)
            else:
                parts = [Part(handle, first, stop) for first, stop in itertools.pairwise(bounds)]
                self._queue_of(handle).extend(parts)
                if wakes:
                    self._queued.notify(len(bounds) - 1)
        if handle.status.is_final:
            self._tell([handle])
        return number

    def poll(self, number: int) -> TransferProgress:
        with self._lock:
            return self._transfer_queue[number].progress()

    def forget(self, number: int) -> None:
        with self._lock:
            handle = self._transfer_queue[number]
            handle.is_forgotten = True
            if handle.status.is_final:
                del self._transfer_queue[number]

    def abort(self, transfer: bytes, reason: str = "aborted", cut: Callable[[], None] | None = None) -> None:
        """Fail a transfer's tickets; returns when no thread is inside its pages.

        cut: makes threads leave that a peer holds up in there; called under the lock, so that none does yet.
        """
        with self._lock:
            ended = [
                handle
                for handle in self._transfer_queue.values()
                if handle.piece.transfer.id == transfer and not handle.status.is_final
            ]
            for handle in ended:
                self._end(handle, TransferStatus.FAILED, reason)
            if cut is not None and not self._left.wait_for(lambda: transfer not in self._inside, PATIENCE_S):
                cut()
            self._left.wait_for(lambda: transfer not in self._inside)
        self._tell(ended)

    # For the transport's threads.

    def take(self, *, wait: bool) -> Part | None:
        """The next part, which the caller must `leave` and `finish` or `fail`. None: there is none now, or
        with `wait` there will be none any more.
        """
        with self._lock:
            while True:
                if self._end_reason is not None:
                    return None
                part = self._next()
                if part is not None:
                    return self._begin(part)
                if not wait:
                    return None
                self._queued.wait()

    def leave(self, part: Part) -> None:
        """This thread does not touch the part's pages any more."""
        transfer = part.handle.piece.transfer.id
        with self._lock:
            self._inside[transfer] -= 1
            if not self._inside[transfer]:
                del self._inside[transfer]
                self._left.notify_all()

    def finish(self, part: Part, num_messages: int, gather_s: float) -> None:
        """The part's bytes are at the destination."""
        handle = part.handle
        with self._lock:
            handle.num_open_parts -= 1
            handle.num_messages += num_messages
            handle.num_bytes += part.num_bytes
            handle.gather_s += gather_s
            if handle.num_open_parts or handle.status.is_final:
                return
            self._end(handle, TransferStatus.DONE)
        self._tell([handle])

    def fail(self, part: Part, reason: str) -> None:
        with self._lock:
            if part.handle.status.is_final:
                return
            self._end(part.handle, TransferStatus.FAILED, reason)
        self._tell([part.handle])

    def requeue(self, part: Part) -> None:
        """Take up a part again that may not have arrived; the caller has left its pages."""
        with self._lock:
            if not part.handle.status.is_final:
                self._queue_of(part.handle).appendleft(part)
                self._queued.notify()

    def break_off(self, reason: str) -> None:
        """Fail everything unfinished and everything that will be pushed; threads in `take` return."""
        with self._lock:
            if self._end_reason is None:
                self._end_reason = reason
            ended = [handle for handle in self._transfer_queue.values() if not handle.status.is_final]
            for handle in ended:
                self._end(handle, TransferStatus.FAILED, self._end_reason)
            self._due.clear()
            self._bulk.clear()
            self._queued.notify_all()
        self._tell(ended)

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits to be taken."""
        return not self._due and not self._bulk

    @property
    def end_reason(self) -> str | None:
        """Why nothing is taken up any more."""
        return self._end_reason

    # Under the lock.

    def _cut(self, piece: Piece) -> list[int]:
        """[first, ..., stop): the bounds of the parts; of an empty piece one bound alone."""
        if not piece.num_bytes:
            return [piece.first]
        num_parts = -(-piece.num_bytes // self._part_bytes)
        if piece.num_bytes >= SPLIT_BYTES:
            num_parts = -(-num_parts // self._num_lanes) * self._num_lanes
        num_units = piece.stop - piece.first
        num_parts = min(num_parts, num_units)
        return [piece.first + num_units * index // num_parts for index in range(num_parts + 1)]

    def _queue_of(self, handle: TransferHandle) -> deque[Part]:
        return self._bulk if handle.piece.transfer.is_bulk else self._due

    def _next(self) -> Part | None:
        """The next part to be taken, which no failed ticket is of."""
        for queue in (self._due, self._bulk):
            while queue and queue[0].handle.is_failed:
                queue.popleft()
        if not self._bulk:
            self._num_overtakes = 0
            return self._due.popleft() if self._due else None
        if self._due and self._num_overtakes < MAX_OVERTAKES:
            self._num_overtakes += 1
            return self._due.popleft()
        self._num_overtakes = 0
        return self._bulk.popleft()

    def _begin(self, part: Part) -> Part:
        handle = part.handle
        if handle.status == TransferStatus.PENDING:
            handle.status = TransferStatus.SENDING
            handle.begun_s = self._clock.now_s()
        self._inside[handle.piece.transfer.id] += 1
        return part

    def _end(self, handle: TransferHandle, status: TransferStatus, reason: str = NO_REASON) -> None:
        handle.ended_s = self._clock.now_s()
        if handle.status == TransferStatus.PENDING:
            handle.begun_s = handle.ended_s
        handle.status = status
        handle.reason = reason
        if handle.is_forgotten:
            del self._transfer_queue[handle.number]

    def _tell(self, ended: list[TransferHandle]) -> None:
        if self._on_end is not None:
            for handle in ended:
                self._on_end(handle.number)
