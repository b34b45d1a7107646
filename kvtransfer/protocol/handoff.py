"""What the two ends of a hand-off share: how long they wait, and what they ask of whoever runs them.

An end is a state machine without sockets, threads or memory. What happens is told to it by a call; the call
returns actions, to be done in their order. Its pages it holds and frees in the ledger by itself.

Whoever runs the ends keeps each until it is CLOSED, and gives it only messages that name its transfer and
come from the very process that it began with: a process that was started again knows nothing of writers
that may have outlived it. Other messages get `answer_to_unknown`.
"""

from collections.abc import Hashable, Sequence
from enum import Enum, StrEnum
from typing import Final, NamedTuple, Protocol, TypeAlias

import msgspec

from baton.clock import Clock
from baton.kvtransfer.protocol.messages import (
    Abort,
    AnyMessage,
    Commit,
    Corrupt,
    Extend,
    TransferRequest,
    Wrote,
)

# What a hand-off asks of the ledger of pages: the engine's PagePool has it all, and documents it.

Owner: TypeAlias = Hashable


class PageLedger(Protocol):
    """One thread uses it, the one that also runs the hand-offs."""

    @property
    def num_pages(self) -> int: ...

    @property
    def num_free(self) -> int: ...

    @property
    def launched(self) -> int:
        """The mark of all that the replica's steps have been told to write so far."""

    def generation(self, page: int) -> int: ...

    def free_after(self, pages: Sequence[int]) -> int:
        """The mark after which no step writes these pages, which no sequence uses now."""

    def is_known(self, page: int) -> bool:
        """Whether the page's contents are settled, and found by others: they may be sent to who asks."""

    def owners(self, page: int) -> frozenset[Owner]: ...

    def reserve(self, num_pages: int, owner: Owner, deadline_s: float) -> list[int]: ...

    def lease(self, pages: Sequence[int], owner: Owner, deadline_s: float) -> None: ...

    def extend(self, owner: Owner, deadline_s: float) -> None: ...

    def share(self, pages: Sequence[int], owner: Owner) -> None: ...

    def quarantine(self, pages: Sequence[int], owner: Owner) -> None: ...

    def adopt(self, pages: Sequence[int], lease_owner: Owner, owner: Owner) -> None: ...

    def release(self, pages: Sequence[int], owner: Owner) -> None: ...


def holds_lease(ledger: PageLedger, pages: Sequence[int], owner: Owner) -> bool:
    """Whether time has not ended the lease: that ends it for all its pages at once, so one page tells."""
    return not pages or owner in ledger.owners(pages[0])


def release_lease(ledger: PageLedger, pages: Sequence[int], owner: Owner) -> None:
    """End the owner's lease on all its pages, if time has not done so before."""
    if holds_lease(ledger, pages, owner):
        ledger.release(pages, owner)


class TransferSize(NamedTuple):
    """A transfer that the destination is about to ask for; `transfer_size` checks the values."""

    transfer: bytes  # its id
    num_units: int
    num_parts: int
    deadline_ms: int
    position: int = 0  # in its sequence, of the first token to move
    num_layer_groups: int = 1


class Send(NamedTuple):
    """Send to the peer, in order; without a link to it, drop it: what matters will be said again."""

    message: AnyMessage


class Granted(NamedTuple):
    """The source may write: these are the destination's pages."""

    request: TransferRequest


class Push(NamedTuple):
    """Write units [first, stop) of a part; answer with `pushed` or `push_failed`.

    after: the mark that the steps of the part's rank must have passed before anything is read.
    """

    part: int
    first: int
    stop: int
    after: int = 0


class StopPushes(NamedTuple):
    """End every push of the transfer; answer with `pushes_stopped` when none reads or writes any more."""


class OpenReceive(NamedTuple):
    """From now on bytes of this part may be written into the destination's pages.

    after: the mark that the steps of the part's rank must have passed before: until then they may write
    there. What is said to the source after this action waits for it.
    """

    part: int
    after: int = 0


class CloseReceive(NamedTuple):
    """Refuse further bytes of this part; answer with `writer_stopped` when none can be written any more.

    is_confirmed: the source has said so itself. Where it writes into our memory directly, `writer_stopped`
    may follow only then, or when its process is known to be dead; where our receiver writes, it may follow
    as soon as the receiver is out of the pages.
    """

    part: int
    is_confirmed: bool


class Verify(NamedTuple):
    """Compare the pages with these digests, one a unit; answer with `verified`."""

    part: int
    digests: bytes


class HandoffOutcome(StrEnum):
    # At the source.
    HANDED_OVER = "handed_over"
    FAILED = "failed"  # as far as the source knows: the word that it was adopted may have been lost
    # At the destination.
    ADOPTED = "adopted"
    RECOMPUTE = "recompute"  # the pages did not come, and the source may be dead
    REFUSED = "refused"  # the source lives and does not send the pages
    # At either end: its own side cancelled.
    CANCELLED = "cancelled"


class Finished(NamedTuple):
    """The one end of the transfer on this side; pages may follow later, when nobody is in them any more."""

    outcome: HandoffOutcome
    reason: str


Action: TypeAlias = Send | Granted | Push | StopPushes | OpenReceive | CloseReceive | Verify | Finished


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    lease_s: float = 30.0  # without a word from the peer
    heartbeat_s: float = 5.0


class HandoffTimeouts(NamedTuple):
    """What an end is given, beside the request."""

    ledger: PageLedger
    clock: Clock
    timing: Timing
    source_units_per_page: int
    destination_units_per_page: int

    def num_source_pages(self, num_units: int) -> int:
        return -(-num_units // self.source_units_per_page)

    def num_destination_pages(self, num_units: int) -> int:
        return -(-num_units // self.destination_units_per_page)


class LeaseTimer:
    """How long an end goes on: a lease from the last word of the peer, and never beyond the limit."""

    def __init__(self, clock: Clock, timing: Timing, limit_s: float) -> None:
        """limit_s: how long the whole transfer may take, from now."""
        self._clock = clock
        self._timing = timing
        self._limit_s = clock.now_s() + limit_s
        self._next_heartbeat_s = clock.now_s() + timing.heartbeat_s
        self.deadline_s = 0.0
        self.extend()

    def extend(self) -> None:
        self.deadline_s = min(self._clock.now_s() + self._timing.lease_s, self._limit_s)

    @property
    def is_over(self) -> bool:
        return self._clock.now_s() >= self.deadline_s

    def takes_heartbeat(self) -> bool:
        """Whether it is time to tell the peer that we live; asking starts the next wait."""
        now_s = self._clock.now_s()
        if now_s < self._next_heartbeat_s:
            return False
        self._next_heartbeat_s = now_s + self._timing.heartbeat_s
        return True


def answer_to_unknown(message: AnyMessage) -> Abort | None:
    """What to say about a transfer that there is no end of here, or no longer; None for nothing.

    To a destination it says that nothing is written: a source is kept while it has a push.
    """
    match message:
        case Corrupt():
            return Abort(transfer=message.transfer, epoch=0, reason="unknown transfer")
        case Abort() if message.epoch:
            return Abort(transfer=message.transfer, epoch=0, reason="unknown transfer")
        case Wrote() | Commit() | Extend():
            return Abort(transfer=message.transfer, epoch=message.epoch, reason="unknown transfer")
    return None


# Where the time of one transfer went, as its source saw it.
#
# At every moment a transfer is in one phase, the first of these that applies; the spans are how long it was
# in each, so they add up to the total:
#
# handshake   the transports are being opened
# moving      a piece is under way; split into gather, wire and scatter as the pieces' own clocks say
# waiting     everything that was computed is there, and more is to come
# verify      all is written; digests, and the destination's word that they are right
#
# `exposed_s` is none of them: what was left of the transfer when the last page was computed, which is what
# the request had to wait for.


class Phase(Enum):
    HANDSHAKE = "handshake"
    MOVING = "moving"
    WAITING = "waiting"
    VERIFY = "verify"


class TransferTimes(msgspec.Struct, frozen=True, kw_only=True):
    """All but exposed_s add up to total_s."""

    total_s: float
    handshake_s: float
    gather_s: float
    wire_s: float
    waiting_s: float
    verify_s: float
    exposed_s: float
    num_bytes: int
    num_messages: int


_NOTHING: Final = 0.0


class Timeline:
    """Told what happens when it happens."""

    def __init__(self, clock: Clock, num_units: int) -> None:
        """num_units: of all parts together, as `wrote` counts them."""
        self._clock = clock
        self._num_units = num_units
        self._started_s = self._changed_s = clock.now_s()
        self._last_offer_s = self._started_s
        self._ended_s: float | None = None
        self._phase = Phase.HANDSHAKE
        self._seconds = dict.fromkeys(Phase, _NOTHING)
        self._num_in_flight = 0
        self._num_unwritten = num_units
        self._gather_s = self._moving_s = _NOTHING  # of all pieces, which may be under way side by side
        self._num_bytes = self._num_messages = 0

    def opened(self) -> None:
        self._enter(Phase.WAITING)

    def offered(self) -> None:
        self._last_offer_s = self._clock.now_s()

    def pushed(self) -> None:
        self._num_in_flight += 1
        self._enter(Phase.MOVING)

    def wrote(
        self, num_units: int, *, gather_s: float, moving_s: float, num_bytes: int, num_messages: int
    ) -> None:
        """A piece of a part has ended, well or not. moving_s: from its push to its end, gather_s included."""
        self._num_in_flight -= 1
        self._num_unwritten -= num_units
        self._gather_s += gather_s
        self._moving_s += moving_s
        self._num_bytes += num_bytes
        self._num_messages += num_messages
        if not self._num_in_flight:
            self._enter(Phase.VERIFY if self._num_unwritten <= 0 else Phase.WAITING)

    def finished(self) -> None:
        self._enter(self._phase)
        self._ended_s = self._changed_s

    def times(self) -> TransferTimes:
        """Of a transfer that has finished."""
        assert self._ended_s is not None
        moving_s = self._seconds[Phase.MOVING]
        gather_s = moving_s * self._gather_s / self._moving_s if self._moving_s else _NOTHING
        return TransferTimes(
            total_s=self._ended_s - self._started_s,
            handshake_s=self._seconds[Phase.HANDSHAKE],
            gather_s=gather_s,
            wire_s=moving_s - gather_s,
            waiting_s=self._seconds[Phase.WAITING],
            verify_s=self._seconds[Phase.VERIFY],
            exposed_s=self._ended_s - self._last_offer_s,
            num_bytes=self._num_bytes,
            num_messages=self._num_messages,
        )

    def _enter(self, phase: Phase) -> None:
        now_s = self._clock.now_s()
        self._seconds[self._phase] += now_s - self._changed_s
        self._changed_s = now_s
        self._phase = phase


# What an endpoint tells its owner of a transfer that has ended.


class GrantedTransfer(NamedTuple):
    """A transfer that a peer has granted pages for; the worker that computes the pages offers them."""

    transfer: bytes
    position: int  # in its sequence, of the first token to move
    num_units: int
    unit_tokens: int  # tokens a unit: the smaller page size of the two sides
    num_layer_groups: int


class TransferEnded(NamedTuple):
    """The one end of a transfer on this side."""

    transfer: bytes
    outcome: HandoffOutcome
    reason: str
    pages: tuple[int, ...]  # ADOPTED: the adopter's own from now on
    times: TransferTimes | None  # at the source
