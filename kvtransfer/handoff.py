"""What the two ends of a hand-off share: how long they wait, and what they ask of whoever runs them.

An end is a state machine without sockets, threads or memory. What happens is told to it by a call; the call
returns actions, to be done in their order. Its pages it holds and frees in the ledger by itself.

Whoever runs the ends keeps each until it is CLOSED, and gives it only messages that name its transfer and
come from the very process that it began with: a process that was started again knows nothing of writers
that may have outlived it. Other messages get `answer_to_unknown`.
"""

from enum import StrEnum
from typing import NamedTuple, TypeAlias

import msgspec

from baton.clock import Clock
from baton.kvtransfer.ledger import PageLedger
from baton.kvtransfer.messages import Abort, AnyMessage, Commit, Corrupt, Extend, Grant, Pull, Wrote


class Send(NamedTuple):
    """Send to the peer, in order; without a link to it, drop it: what matters will be said again."""

    message: AnyMessage


class Granted(NamedTuple):
    """The source may write: these are the destination's pages, by which pieces are made."""

    grant: Grant | Pull


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


class OpenLanding(NamedTuple):
    """From now on bytes of this part may be written into the destination's pages.

    after: the mark that the steps of the part's rank must have passed before: until then they may write
    there. What is said to the source after this action waits for it.
    """

    part: int
    after: int = 0


class CloseLanding(NamedTuple):
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


class Outcome(StrEnum):
    # At the source.
    HANDED_OVER = "handed_over"
    FAILED = "failed"  # as far as the source knows: the word that it was adopted may have been lost
    # At the destination.
    ADOPTED = "adopted"
    RECOMPUTE = "recompute"  # the pages did not come: their tokens have to be computed
    # At either: its own side wanted no more.
    CANCELLED = "cancelled"


class Finished(NamedTuple):
    """The one end of the transfer on this side; pages may follow later, when nobody is in them any more."""

    outcome: Outcome
    reason: str


Action: TypeAlias = Send | Granted | Push | StopPushes | OpenLanding | CloseLanding | Verify | Finished


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    lease_s: float = 30.0  # without a word from the peer
    heartbeat_s: float = 5.0


class Terms(NamedTuple):
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
        case Grant() | Corrupt():
            return Abort(transfer=message.transfer, epoch=0, reason="unknown transfer")
        case Abort() if message.epoch:
            return Abort(transfer=message.transfer, epoch=0, reason="unknown transfer")
        case Wrote() | Commit() | Extend():
            return Abort(transfer=message.transfer, epoch=message.epoch, reason="unknown transfer")
    return None
