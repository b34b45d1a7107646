"""The source's end of a transfer: it holds pages and writes them into the destination's.

The life of a transfer at the source:

1. A Grant or a PullRequest begins the transfer; its transports are opened. `opened` starts writing what a
   worker offers; `accept_pull` leases the requested pages, if they are still here, and writes them all.
2. `offer` adds pages as the prompt is computed; a lease holds them. Each becomes a Push to every part. Pages
   under a push have a second owner, the reader, which lets go when the transport does and not by time.
3. When all units of a part are written, Commit carries their digests and ends the writing of that part.
4. Verified: the destination has adopted the pages; the lease ends. Corrupt: those units are written again.
5. An abort, a lost peer or an expired lease ends the transfer in any state: one Finished, the lease released,
   and when no push runs any more, Released for every part.

    state       legal messages
    OPENING     Extend, Abort
    STREAMING   Extend, Abort; Corrupt of a part that has committed
    COMMITTING  Verified, Corrupt, Extend, Abort
    STOPPING    all: they crossed ours and change nothing
    CLOSED      all: an Abort asks for Released again, in case it was lost

Each part may be Corrupt once. Messages of another epoch are counted in `num_stale` and change nothing. An
illegal message raises ProtocolError and changes nothing: the caller drops the link and calls `peer_lost`.
"""

from collections import Counter
from collections.abc import Sequence
from enum import Enum
from itertools import pairwise

from baton.errors import ProtocolError
from baton.kvtransfer.protocol.handoff import (
    Action,
    Finished,
    Granted,
    HandoffOutcome,
    HandoffTimeouts,
    LeaseTimer,
    Owner,
    PageLedger,
    Push,
    Send,
    StopPushes,
    holds_lease,
    release_lease,
)
from baton.kvtransfer.protocol.messages import (
    DIGEST_BYTES,
    Abort,
    AnyMessage,
    Commit,
    Corrupt,
    Extend,
    Grant,
    PullRefused,
    PullRequest,
    Released,
    TransferRequest,
    Verified,
    Wrote,
)
from baton.kvtransfer.protocol.pull import Lend, borrow


class SourcePart:
    """One part of a leaving transfer: what is still to be written, and what is being written."""

    def __init__(self, num_units: int) -> None:
        self.in_flight: set[tuple[int, int]] = set()  # pushes: (first, stop)
        self.is_committed = False
        self.was_corrupt = False
        self._num_units = num_units
        self._num_missing = num_units
        self._digests = bytearray()  # none until the first push: a peer's mere question takes no memory

    @property
    def is_written(self) -> bool:
        return not self._num_missing and not self.in_flight

    @property
    def digests(self) -> bytes:
        return bytes(self._digests)

    def wrote(self, first: int, stop: int, digests: bytes) -> None:
        if len(digests) != (stop - first) * DIGEST_BYTES:
            raise ValueError(f"{len(digests)} bytes of digests for units [{first}, {stop})")
        self._digests = self._digests or bytearray(self._num_units * DIGEST_BYTES)
        self._digests[first * DIGEST_BYTES : stop * DIGEST_BYTES] = digests
        self._num_missing -= stop - first

    def can_be_corrupt(self, units: Sequence[int]) -> bool:
        """Only what was committed can be damaged, and only once."""
        return self.is_committed and not self.was_corrupt and units[-1] < self._num_units

    def open_again(self, units: Sequence[int]) -> list[tuple[int, int]]:
        """The damaged units are missing again; returns them as ranges [first, stop)."""
        self.is_committed, self.was_corrupt, self._num_missing = False, True, len(units)
        gaps = [index for index, (a, b) in enumerate(pairwise(units), 1) if b != a + 1]
        bounds = pairwise([0, *gaps, len(units)])
        return [(units[start], units[stop - 1] + 1) for start, stop in bounds]


class PageReaders:
    """Source pages that pushes read now: their second owner, which lets go when the last push has ended."""

    def __init__(self, ledger: PageLedger, owner: Owner) -> None:
        self._ledger = ledger
        self._owner = owner
        self._num_pushes: Counter[int] = Counter()  # page -> pushes that read it, never 0

    def enter(self, pages: Sequence[int]) -> None:
        """A push begins; somebody else still holds the pages."""
        self._ledger.share([page for page in pages if page not in self._num_pushes], self._owner)
        self._num_pushes.update(pages)

    def leave(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._num_pushes[page] -= 1
            if not self._num_pushes[page]:
                del self._num_pushes[page]
                self._ledger.release([page], self._owner)

    def leave_all(self) -> None:
        self._ledger.release(sorted(self._num_pushes), self._owner)
        self._num_pushes.clear()


class SourceState(Enum):
    OPENING = "opening"
    STREAMING = "streaming"
    COMMITTING = "committing"
    STOPPING = "stopping"
    CLOSED = "closed"


_ENDED = (SourceState.STOPPING, SourceState.CLOSED)


class SourceHandoff:
    """One transfer. Calls return what has to be done, in order; one thread makes them."""

    def __init__(self, request: TransferRequest, timeouts: HandoffTimeouts) -> None:
        """request: the peer's."""
        self.transfer = request.transfer
        self.epoch = request.epoch
        self.state = SourceState.OPENING
        self.outcome: HandoffOutcome | None = None
        self.num_stale = 0
        self.pages: list[int] = []
        self._request = request
        self._timeouts = timeouts
        self._ledger = timeouts.ledger
        self._units_per_page = timeouts.source_units_per_page
        self._timer = LeaseTimer(timeouts.clock, timeouts.timing, request.deadline_ms / 1000)
        self._parts = [SourcePart(request.num_units) for _ in range(request.num_parts)]
        num_groups = request.num_layer_groups if isinstance(request, Grant) else 1
        self._num_offered = [0] * num_groups  # units, of each group of layers
        self._num_pushed = [0] * num_groups  # [pushed, offered) wait until the transports are open
        self._lease_owner = ("source", self.transfer)
        self._readers = PageReaders(timeouts.ledger, ("reader", self.transfer))

    # What our own side does.

    def opened(self) -> list[Action]:
        """Write what was offered while the transports of every part were opened."""
        if self.state in _ENDED:
            return []
        if not self._holds_lease():
            return self.fail("expired")
        self.state = SourceState.STREAMING
        return [Granted(self._request), *self._push_offered()]

    def accept_pull(self, incarnation: bytes, lend: Lend) -> list[Action]:
        """Lease the requested pages and write them all, or refuse. incarnation: of this process."""
        pull = self._request
        assert isinstance(pull, PullRequest)
        if self.state in _ENDED:
            return []
        borrower = ("borrower", self.transfer)
        pages = borrow(pull, incarnation, self._timeouts, lend, borrower)
        if isinstance(pages, str):
            self.state, self.outcome = SourceState.CLOSED, HandoffOutcome.FAILED
            refused = PullRefused(transfer=self.transfer, epoch=self.epoch, reason=pages)
            return [Send(refused), Finished(self.outcome, pages)]
        self.state = SourceState.STREAMING
        offered = self.offer(pages, pull.num_units)
        self._ledger.release(pages, borrower)
        return [Granted(pull), *offered]

    def offer(self, pages: Sequence[int], num_units: int, group: int | None = None) -> list[Action]:
        """Add the next pages; so many units are computed by now, in this group of layers or in all."""
        if self.state in _ENDED:
            return []
        groups = range(len(self._num_offered)) if group is None else range(group, group + 1)
        stop = min(num_units, (len(self.pages) + len(pages)) * self._units_per_page)
        before = max(self._num_offered[groups.start : groups.stop], default=self._request.num_units + 1)
        if not before <= num_units == stop <= self._request.num_units:
            of_group = "" if group is None else f" of group {group}"
            raise ValueError(
                f"{num_units} units{of_group} offered after {before}, in {len(pages)} more pages"
            )
        if not self._holds_lease():
            return self.fail("expired")
        if pages:
            self._ledger.lease(pages, self._lease_owner, self._timer.deadline_s)
            self.pages += pages
        for each in groups:
            self._num_offered[each] = num_units
        return self._push_offered()

    def pushed(self, part: int, first: int, stop: int, digests: bytes) -> list[Action]:
        """A push has ended well; `digests` are of its units, as they were when they were read."""
        self._end_push(part, first, stop)
        if self.state in _ENDED:
            return []
        self._parts[part].wrote(first, stop, digests)
        wrote = Wrote(transfer=self.transfer, epoch=self.epoch, part=part, first=first, stop=stop)
        return [Send(wrote), *self._commit(part)]

    def push_failed(self, part: int, first: int, stop: int, reason: str) -> list[Action]:
        """A push has failed for good, on every transport there is."""
        self._end_push(part, first, stop)
        return self.fail(f"transport: {reason}")

    def pushes_stopped(self) -> list[Action]:
        """The answer to StopPushes: no byte is read or written any more, whatever became of each push."""
        if self.state is not SourceState.STOPPING:
            return []
        for part in self._parts:
            part.in_flight.clear()
        self._readers.leave_all()
        self.state = SourceState.CLOSED
        return self.released()

    def abort(self, reason: str) -> list[Action]:
        return self.fail(reason, HandoffOutcome.CANCELLED)

    def fail(
        self, reason: str, outcome: HandoffOutcome = HandoffOutcome.FAILED, *, tells_peer: bool = True
    ) -> list[Action]:
        """End it from any state; once it has ended nothing changes."""
        if self.state in _ENDED:
            return []
        self.outcome = outcome
        release_lease(self._ledger, self.pages, self._lease_owner)
        abort = Abort(transfer=self.transfer, epoch=self.epoch, reason=reason[:256])
        actions: list[Action] = [Send(abort)] if tells_peer else []
        actions.append(Finished(outcome, reason))
        self.state = SourceState.STOPPING
        if any(part.in_flight for part in self._parts):
            return [*actions, StopPushes()]
        return [*actions, *self.pushes_stopped()]

    def peer_lost(self) -> list[Action]:
        return self.fail("peer lost", tells_peer=False)

    def tick(self) -> list[Action]:
        """To be called at least once a heartbeat."""
        if self.state in _ENDED:
            return []
        if self._timer.is_over or not self._holds_lease():
            return self.fail("expired")
        if self._timer.takes_heartbeat():
            return [Send(Extend(transfer=self.transfer, epoch=self.epoch))]
        return []

    # What the destination says.

    def receive(self, message: AnyMessage) -> list[Action]:
        """message: one that names this transfer."""
        if self.state in _ENDED:
            is_asked = isinstance(message, Abort) and self.state is SourceState.CLOSED
            return self.released() if is_asked else []
        match message, self.state:
            case ((Verified() | Corrupt() | Extend() | Abort()), _) if message.epoch != self.epoch:
                self.num_stale += 1
                return []
            case Abort(), _:
                return self.fail(f"aborted: {message.reason}", tells_peer=False)
            case Verified(), SourceState.COMMITTING:
                return self._handed_over()
            case Corrupt(), SourceState.COMMITTING | SourceState.STREAMING:
                return self._write_again(message)
            case Extend(), _:
                return self._extend() if self._holds_lease() else self.fail("expired")
        raise ProtocolError(f"{type(message).__name__} came to a source that is {self.state.value}")

    def _push_offered(self) -> list[Action]:
        if self.state is SourceState.OPENING:
            return []
        pushed, self._num_pushed = self._num_pushed, list(self._num_offered)
        due = list(zip(pushed, self._num_offered, strict=True)) * (len(self._parts) // len(pushed))
        return [self._push(part, first, stop) for part, (first, stop) in enumerate(due) if first < stop]

    def _push(self, part: int, first: int, stop: int) -> Push:
        self._parts[part].in_flight.add((first, stop))
        self._readers.enter(self._pages_of(first, stop))
        return Push(part, first, stop, self._ledger.launched)

    def _end_push(self, part: int, first: int, stop: int) -> None:
        if self.state is SourceState.CLOSED:
            return
        self._parts[part].in_flight.remove((first, stop))
        self._readers.leave(self._pages_of(first, stop))

    def _pages_of(self, first: int, stop: int) -> list[int]:
        return self.pages[first // self._units_per_page : -(-stop // self._units_per_page)]

    def _commit(self, part: int) -> list[Action]:
        state = self._parts[part]
        if not state.is_written:
            return []
        state.is_committed = True
        if all(other.is_committed for other in self._parts):
            self.state = SourceState.COMMITTING
        return [Send(Commit(transfer=self.transfer, epoch=self.epoch, part=part, digests=state.digests))]

    def _write_again(self, corrupt: Corrupt) -> list[Action]:
        part = self._parts[corrupt.part] if corrupt.part < len(self._parts) else None
        if part is None or not part.can_be_corrupt(corrupt.units):
            raise ProtocolError(f"part {corrupt.part} is called corrupt out of turn")
        if not self._holds_lease():
            return self.fail("expired")
        self.state = SourceState.STREAMING
        self._extend()
        return [self._push(corrupt.part, first, stop) for first, stop in part.open_again(corrupt.units)]

    def _handed_over(self) -> list[Action]:
        self.state, self.outcome = SourceState.CLOSED, HandoffOutcome.HANDED_OVER
        release_lease(self._ledger, self.pages, self._lease_owner)
        return [Finished(self.outcome, "")]

    def _extend(self) -> list[Action]:
        self._timer.extend()
        if self.pages:
            self._ledger.extend(self._lease_owner, self._timer.deadline_s)
        return []

    def released(self) -> list[Action]:
        """Say that no byte can be written any more: no push runs, and none will."""
        numbers = range(len(self._parts))
        return [Send(Released(transfer=self.transfer, epoch=self.epoch, part=part)) for part in numbers]

    def _holds_lease(self) -> bool:
        return holds_lease(self._ledger, self.pages, self._lease_owner)
