"""Registrations: the transfers that may write into the pages of one rank, as their destination granted them.

The life of a registration:

1. `add`: the transfer was granted, with its epoch. The ledger holds the pages for the transfer.
2. `begin` admits a writer of this process (a receiver's thread) for one piece; the writer calls `end` when it
   has left the pages. Writers of other processes (shm, cuda_ipc) are not seen. Such a writer counts as inside
   from the moment that its process maps the pool until `release` (the source has confirmed that it writes no
   more) or `writer_died`; no timeout ends it.
3. `close`: no writer is admitted any more, and writers inside leave at their next look.
4. When the last writer has left, every callback given to `close` is called, once, in the thread that saw the
   writer leave. Only then may the pages be read for good, or reused. Pieces that come later are stale.

The bytes of a piece that is not admitted are drained and counted; they never touch a page.
"""

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Final

import msgspec

from baton.errors import TransferFailed, WireError
from baton.kernels.pages import Offsets
from baton.kvtransfer.protocol.transfer_plan import TransferPlan

NUM_REMEMBERED: Final = 4096  # ended transfers; late pieces of these count as stale, not as unknown

OnSafe = Callable[[], None]


class ReceiveRegistration(msgspec.Struct, frozen=True, kw_only=True):
    """A transfer as its destination granted it."""

    id: bytes
    epoch: int
    plan: TransferPlan
    num_units: int
    pages: tuple[int, ...]  # of the destination, in the order of the units
    writer: bytes  # the incarnation of the source's process
    # Whether the writer's process writes without `begin` and `end` once it has mapped the pool.
    may_write_directly: bool = False


class _State:
    def __init__(self, registration: ReceiveRegistration, *, is_writer_present: bool) -> None:
        self.registration = registration
        self.num_inside = 0
        self.has_outside_writer = registration.may_write_directly and is_writer_present
        self.is_closed = False
        self.on_safe: list[OnSafe] = []

    @property
    def is_safe(self) -> bool:
        return self.is_closed and not self.num_inside and not self.has_outside_writer


class Writing:
    """The permission to write units [first, stop) of a registered transfer, until `end`."""

    def __init__(self, state: _State, first: int, stop: int) -> None:
        self._state = state
        self.registration = state.registration
        self.first = first
        self.stop = stop

    @property
    def must_stop(self) -> bool:
        """Return True once the registration is closed: the writer then leaves the pages.

        Writers check at least once a second.
        """
        return self._state.is_closed

    def offsets(self) -> Offsets:
        """Return the offsets of the piece's runs in the pool, in plan order."""
        registration = self.registration
        return registration.plan.destination.offsets(self.first, self.stop, registration.pages)


class ReceiveRegistrations:
    """All registrations of one rank, by transfer id. Safe from any thread."""

    def __init__(self, num_pages: int) -> None:
        """num_pages: of the pool."""
        self._counts: Counter[str] = Counter()
        self._num_pages = num_pages
        self._lock = threading.Lock()
        self._states: dict[bytes, _State] = {}
        self._ended: OrderedDict[bytes, None] = OrderedDict()
        self._present_writers: set[bytes] = set()

    # Grants.

    def add(self, registration: ReceiveRegistration) -> None:
        """Register a granted transfer, or one that has ended once more: some of its units arrived damaged.

        Raises TransferFailed for an id that is registered, ValueError for pages that do not hold the units.
        """
        num_pages = registration.plan.destination.num_pages(registration.num_units)
        if len(registration.pages) != num_pages or not all(
            0 <= page < self._num_pages for page in registration.pages
        ):
            raise ValueError(
                f"{registration.num_units} units need {num_pages} pages, got {registration.pages}"
            )
        with self._lock:
            if registration.id in self._states:
                raise TransferFailed(f"transfer {registration.id.hex()} exists already")
            self._ended.pop(registration.id, None)
            is_present = registration.writer in self._present_writers
            self._states[registration.id] = _State(registration, is_writer_present=is_present)

    def close(self, transfer: bytes, on_safe: OnSafe) -> None:
        """Admit no further writer. Calls `on_safe` once no writer is inside, at the earliest at once."""
        with self._lock:
            state = self._states.get(transfer)
            if state is not None:
                state.is_closed = True
                state.on_safe.append(on_safe)
                callbacks = self._settle(state)
            else:
                callbacks = [on_safe]
        _call(callbacks)

    # Writers of this process.

    def begin(self, transfer: bytes, epoch: int, first: int, stop: int, num_bytes: int) -> Writing | None:
        """Return the permission to write a piece, or None: the caller then drains the piece's bytes.

        Raises WireError for units or bytes outside the plan: the caller drops the peer.
        """
        with self._lock:
            state = self._states.get(transfer)
            if state is None:
                self._counts["stale_pieces" if transfer in self._ended else "unknown_pieces"] += 1
                return None
            registration = state.registration
            if state.is_closed or registration.epoch != epoch:
                self._counts["stale_pieces"] += 1
                return None
            is_within = 0 <= first < stop <= registration.num_units
            if not is_within or num_bytes != (stop - first) * registration.plan.sent_unit_bytes:
                self._counts["malformed_pieces"] += 1
                raise WireError(
                    f"units [{first}, {stop}) of {registration.num_units} in {num_bytes} bytes, "
                    f"a unit has {registration.plan.sent_unit_bytes}",
                    reason="piece",
                )
            state.num_inside += 1
        return Writing(state, first, stop)

    def end(self, writing: Writing, *, is_whole: bool) -> None:
        """Record that the writer has left the pages. is_whole: the writer wrote every byte of the piece."""
        with self._lock:
            state = writing._state
            state.num_inside -= 1
            if is_whole:
                num_units = writing.stop - writing.first
                self._counts["landed_pieces"] += 1
                self._counts["landed_bytes"] += num_units * writing.registration.plan.sent_unit_bytes
            else:
                self._counts["broken_pieces"] += 1
            callbacks = self._settle(state)
        _call(callbacks)

    # Writers of other processes.

    def writer_came(self, writer: bytes) -> None:
        """Record that a process is about to map the pool. `writer_died` reports the death of the process."""
        with self._lock:
            self._present_writers.add(writer)
            for state in self._states.values():
                registration = state.registration
                if registration.writer == writer and registration.may_write_directly and not state.is_closed:
                    state.has_outside_writer = True

    def release(self, transfer: bytes) -> None:
        """Record that the source has confirmed the end of its direct writes."""
        with self._lock:
            state = self._states.get(transfer)
            if state is None:
                return
            state.has_outside_writer = False
            callbacks = self._settle(state)
        _call(callbacks)

    def writer_died(self, writer: bytes) -> list[bytes]:
        """Record the certain death of the process; return the transfers that the caller must close."""
        callbacks: list[OnSafe] = []
        with self._lock:
            self._present_writers.discard(writer)
            theirs = [state for state in self._states.values() if state.registration.writer == writer]
            for state in theirs:
                state.has_outside_writer = False
                callbacks += self._settle(state)
        _call(callbacks)
        return [state.registration.id for state in theirs if not state.is_closed]

    # Queries.

    def counts(self) -> Counter[str]:
        """Return counts of pieces since the start, for those that are not zero.

        landed_pieces, landed_bytes: written whole. stale_pieces: of an ended transfer or another epoch.
        unknown_pieces: of a transfer that was never granted here, or is forgotten. malformed_pieces: units or
        bytes outside the plan; the peer is dropped. broken_pieces: begun and not completed.
        """
        with self._lock:
            return self._counts.copy()

    def num_open(self) -> int:
        """Return the number of registrations that have not ended."""
        with self._lock:
            return len(self._states)

    def _settle(self, state: _State) -> list[OnSafe]:
        """Return the callbacks to make outside the lock, which the caller holds."""
        if not state.is_safe or self._states.pop(state.registration.id, None) is None:
            return []
        self._ended[state.registration.id] = None
        if len(self._ended) > NUM_REMEMBERED:
            self._ended.popitem(last=False)
        return state.on_safe


def _call(callbacks: list[OnSafe]) -> None:
    for callback in callbacks:
        callback()
