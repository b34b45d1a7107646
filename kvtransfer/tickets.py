"""The queue and the books of a transport: which pieces are under way, and what became of them.

The life of a ticket:

1. `push` cuts its piece into parts, at unit boundaries, and queues them; PENDING.
2. Threads of the transport `take` parts; SENDING from the first one on. A thread that took a part may read
   its pages until it calls `leave`, on every path.
3. `finish` for the last part makes it DONE. `fail` of any part makes it FAILED: its queued parts are never
   taken, parts being worked on see `is_failed` and stop.
4. `abort` fails a transfer's tickets and waits until no thread is inside its pages.
5. `break_off` fails everything, now and later: the destination can't be reached any more.

Parts of bulk transfers are overtaken by others, however early they came; but after MAX_OVERTAKES of these one
of them is taken, so that bulk never stands still.

A closed or broken queue hands out no part; `take` then returns None.
"""

import itertools
import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import Final

from baton.clock import Clock
from baton.kvtransfer.transport import OnEnd, Piece, Progress, Spans, TransferStatus

PATIENCE_S: Final = 0.005  # for a thread that is about to leave its pages by itself
SPLIT_BYTES: Final = 8 * 2**20  # below, a second thread costs more than it brings
NO_REASON: Final = ""
MAX_OVERTAKES: Final = 8


class Ticket:
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

    def progress(self) -> Progress:
        elapsed_s = self.ended_s - self.begun_s
        gather_s = min(self.gather_s, elapsed_s)  # parts are gathered side by side
        spans = Spans(self.begun_s - self.pushed_s, gather_s, elapsed_s - gather_s)
        return Progress(self.status, self.num_bytes, self.num_messages, self.reason, spans)


class Part:
    """Units [first, stop) of a ticket's piece."""

    __slots__ = ("first", "num_bytes", "stop", "ticket")

    def __init__(self, ticket: Ticket, first: int, stop: int) -> None:
        self.ticket = ticket
        self.first = first
        self.stop = stop
        self.num_bytes = (stop - first) * ticket.piece.transfer.plan.unit_bytes


class Tickets:
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
        self._tickets: dict[int, Ticket] = {}
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
            ticket = self._tickets[number] = Ticket(number, piece, len(bounds) - 1, now_s)
            if self._end_reason is not None:
                self._end(ticket, TransferStatus.FAILED, self._end_reason)
            elif len(bounds) == 1:
                self._end(ticket, TransferStatus.DONE)
            else:
                parts = [Part(ticket, first, stop) for first, stop in itertools.pairwise(bounds)]
                self._queue_of(ticket).extend(parts)
                if wakes:
                    self._queued.notify(len(bounds) - 1)
        if ticket.status.is_final:
            self._tell([ticket])
        return number

    def poll(self, number: int) -> Progress:
        with self._lock:
            return self._tickets[number].progress()

    def forget(self, number: int) -> None:
        with self._lock:
            ticket = self._tickets[number]
            ticket.is_forgotten = True
            if ticket.status.is_final:
                del self._tickets[number]

    def abort(self, transfer: bytes, reason: str = "aborted", cut: Callable[[], None] | None = None) -> None:
        """Fail a transfer's tickets; returns when no thread is inside its pages.

        cut: makes threads leave that a peer holds up in there; called under the lock, so that none does yet.
        """
        with self._lock:
            ended = [
                ticket
                for ticket in self._tickets.values()
                if ticket.piece.transfer.id == transfer and not ticket.status.is_final
            ]
            for ticket in ended:
                self._end(ticket, TransferStatus.FAILED, reason)
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
        transfer = part.ticket.piece.transfer.id
        with self._lock:
            self._inside[transfer] -= 1
            if not self._inside[transfer]:
                del self._inside[transfer]
                self._left.notify_all()

    def finish(self, part: Part, num_messages: int, gather_s: float) -> None:
        """The part's bytes are at the destination."""
        ticket = part.ticket
        with self._lock:
            ticket.num_open_parts -= 1
            ticket.num_messages += num_messages
            ticket.num_bytes += part.num_bytes
            ticket.gather_s += gather_s
            if ticket.num_open_parts or ticket.status.is_final:
                return
            self._end(ticket, TransferStatus.DONE)
        self._tell([ticket])

    def fail(self, part: Part, reason: str) -> None:
        with self._lock:
            if part.ticket.status.is_final:
                return
            self._end(part.ticket, TransferStatus.FAILED, reason)
        self._tell([part.ticket])

    def requeue(self, part: Part) -> None:
        """Take up a part again that may not have arrived; the caller has left its pages."""
        with self._lock:
            if not part.ticket.status.is_final:
                self._queue_of(part.ticket).appendleft(part)
                self._queued.notify()

    def break_off(self, reason: str) -> None:
        """Fail everything unfinished and everything that will be pushed; threads in `take` return."""
        with self._lock:
            if self._end_reason is None:
                self._end_reason = reason
            ended = [ticket for ticket in self._tickets.values() if not ticket.status.is_final]
            for ticket in ended:
                self._end(ticket, TransferStatus.FAILED, self._end_reason)
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

    def _queue_of(self, ticket: Ticket) -> deque[Part]:
        return self._bulk if ticket.piece.transfer.is_bulk else self._due

    def _next(self) -> Part | None:
        """The next part to be taken, which no failed ticket is of."""
        for queue in (self._due, self._bulk):
            while queue and queue[0].ticket.is_failed:
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
        ticket = part.ticket
        if ticket.status == TransferStatus.PENDING:
            ticket.status = TransferStatus.SENDING
            ticket.begun_s = self._clock.now_s()
        self._inside[ticket.piece.transfer.id] += 1
        return part

    def _end(self, ticket: Ticket, status: TransferStatus, reason: str = NO_REASON) -> None:
        ticket.ended_s = self._clock.now_s()
        if ticket.status == TransferStatus.PENDING:
            ticket.begun_s = ticket.ended_s
        ticket.status = status
        ticket.reason = reason
        if ticket.is_forgotten:
            del self._tickets[ticket.number]

    def _tell(self, ended: list[Ticket]) -> None:
        if self._on_end is not None:
            for ticket in ended:
                self._on_end(ticket.number)
