"""The common base of the hand-off state machines of the source and the destination.

A hand-off is a state machine without sockets, threads or device memory. Its caller reports each event by a
call, and performs the actions that the call returns, in their order: messages to the peer, commands to the
ranks that carry out the shards (kvtransfer/ranks/messages.py), and one report of the end. Without a link the
caller drops the messages; heartbeats and Aborts repeat the state that matters. The hand-off itself holds and
releases its pages in the ledger.

The caller forgets a hand-off once it is CLOSED. The caller passes on only messages that have the
transfer's id and come from the process incarnation that the transfer began with: a restarted process does not
know the writers that may have outlived its predecessor. `answer_to_unknown` answers all other messages.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol, TypeAlias

import msgspec

from baton.clock import Clock
from baton.kvtransfer.protocol.messages import (
    Abort,
    AnyMessage,
    Commit,
    Corrupt,
    Extend,
    Released,
    TransferRequest,
    Wrote,
)
from baton.kvtransfer.protocol.transfer_plan import TransferPlan
from baton.kvtransfer.ranks.messages import Route, ShardCommand, ShardEvent

Owner: TypeAlias = Hashable


class PageLedger(Protocol):
    """The ownership record of a replica's pages; the engine's PagePool implements and documents it.

    Only the thread that runs the hand-offs uses a ledger.
    """

    @property
    def num_free(self) -> int: ...
    @property
    def launched(self) -> int: ...
    def generation(self, page: int) -> int: ...
    def free_after(self, pages: Sequence[int]) -> int: ...
    def reserve(self, num_pages: int, transfer: Owner) -> list[int]: ...
    def hold(self, pages: Sequence[int], transfer: Owner) -> None: ...
    def add_writer(self, pages: Sequence[int], owner: Owner) -> None: ...
    def adopt(self, pages: Sequence[int], transfer: Owner, owner: Owner) -> None: ...
    def release(self, pages: Sequence[int], owner: Owner) -> None: ...


class HandoffOutcome(StrEnum):
    """The result of a transfer, as one side knows it. The two sides may disagree after a lost message."""

    # At the source.
    HANDED_OVER = "handed_over"
    FAILED = "failed"  # the destination may have adopted the pages: its Verified may have been lost
    # At the destination.
    ADOPTED = "adopted"
    RECOMPUTE = "recompute"  # the pages did not arrive, and the source may be dead
    REFUSED = "refused"  # the source is alive and does not send the pages
    # At either side: the local worker aborted the transfer.
    CANCELLED = "cancelled"


class TransferTimes(msgspec.Struct, frozen=True, kw_only=True):
    """The durations of an outgoing transfer, and its bytes."""

    total_s: float
    moving_s: float  # while at least one piece was being sent
    verify_s: float  # after the last piece was written
    exposed_s: float  # after the last page was computed: the delay that the request sees
    num_bytes: int


class TransferEnded(NamedTuple):
    """The end of a transfer on this side; a hand-off returns exactly one.

    Pages that a reader or a writer still uses become free later.
    """

    transfer: bytes
    outcome: HandoffOutcome
    reason: str
    pages: tuple[int, ...]  # the adopter owns them after ADOPTED
    times: TransferTimes | None  # at the source


Action: TypeAlias = AnyMessage | ShardCommand | TransferEnded


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """The lease and heartbeat periods of hand-offs, in seconds."""

    lease_s: float = 30.0  # a transfer fails after this time without a message from the peer
    heartbeat_s: float = 5.0


class HandoffContext(NamedTuple):
    """The ledger, clock, timing and shards of one hand-off."""

    ledger: PageLedger
    clock: Clock
    timing: Timing
    plan: TransferPlan  # of shard 0; all shards count the same units and pages
    routes: Sequence[Route]  # of each shard
    link: int  # the number of the link to the peer
    digest_key: bytes


class Handoff(ABC):
    """One side of a transfer: its pages, its lease, its heartbeats, and its one end.

    The lease ends `lease_s` after the peer's last message, and at the transfer's time limit at the latest.
    The transfer ends with it.
    Each call returns the actions that the caller performs, in order. One thread makes all calls.

    Messages to the peer are held back while ranks open their shards. When the transfer ends, the held
    messages are sent.
    """

    failure: HandoffOutcome  # the outcome of a transfer that fails on this side

    def __init__(self, request: TransferRequest, context: HandoffContext, holder: Owner) -> None:
        """request: of the destination. Its deadline counts from now. holder: of the pages, in the ledger."""
        self.transfer = request.transfer
        self.epoch = request.epoch
        self.outcome: HandoffOutcome | None = None
        self.routes = context.routes
        self.pages: list[int] = []  # of this side; the hand-off holds and releases them in the ledger
        self._request = request
        self._context = context
        self._ledger = context.ledger
        self._holder = holder
        self._opening: set[int] = set()  # shards that their ranks have not opened yet
        self._held_messages: list[AnyMessage] = []
        now_s = context.clock.now_s()
        self._limit_s = now_s + request.deadline_ms / 1000
        self._next_heartbeat_s = now_s + context.timing.heartbeat_s
        self._deadline_s = min(now_s + context.timing.lease_s, self._limit_s)

    @property
    def has_ended(self) -> bool:
        """Return True after TransferEnded; writers and readers may still use pages."""
        return self.outcome is not None

    @property
    @abstractmethod
    def is_closed(self) -> bool:
        """Return True when the transfer has ended and no writer or reader of its pages is left."""

    @abstractmethod
    def begin(self) -> list[Action]:
        """Begin the transfer; the first call."""

    @abstractmethod
    def receive(self, message: AnyMessage) -> list[Action]:
        """Process a message of this transfer. Raises ProtocolError, without an effect, for an illegal one."""

    @abstractmethod
    def on_shard_event(self, event: ShardEvent) -> list[Action]:
        """Process an event from the rank of one of the shards."""

    @abstractmethod
    def rank_died(self, shard: int) -> list[Action]:
        """Process the death of the process that had this shard: the process reads and writes no more."""

    @abstractmethod
    def _end(self) -> list[Action]:
        """Enter the state that follows a failure, and stop the readers or writers."""

    def _report_end(self, outcome: HandoffOutcome, reason: str = "") -> TransferEnded:
        """Set the outcome and return its report."""
        self.outcome = outcome
        return TransferEnded(self.transfer, outcome, reason, tuple(self.pages), self._times())

    def _times(self) -> TransferTimes | None:
        """Return the durations of a transfer that ends now; a destination measures none."""
        return None

    def abort(self, reason: str) -> list[Action]:
        """End the transfer with the outcome CANCELLED and tell the peer."""
        return self.fail(reason, HandoffOutcome.CANCELLED)

    def peer_lost(self) -> list[Action]:
        """End the transfer after the loss of the link. The peer's process may still write."""
        return self.fail("peer lost", tells_peer=False)

    def fail(
        self, reason: str, outcome: HandoffOutcome | None = None, *, tells_peer: bool = True
    ) -> list[Action]:
        """End the transfer in any state; has no effect after its end.

        outcome: None for `failure`. tells_peer: send an Abort.
        """
        if self.has_ended:
            return []
        self._opening.clear()
        aborts = [self._abort_message(reason)] if tells_peer else []
        return [*self._send(*aborts), self._report_end(outcome or self.failure, reason), *self._end()]

    def tick(self) -> list[Action]:
        """Check the lease and send a due heartbeat. The caller calls it at least once a heartbeat."""
        if self.has_ended:
            return []
        if self._context.clock.now_s() >= self._deadline_s:
            return self.fail("expired")
        if not self._takes_heartbeat():
            return []
        return self._send(Extend(transfer=self.transfer, epoch=self.epoch))

    def _send(self, *messages: AnyMessage) -> list[Action]:
        """Return the messages that may be sent now: none while a shard is being opened."""
        self._held_messages += messages
        if self._opening:
            return []
        held, self._held_messages = self._held_messages, []
        return [*held]

    def _extend_lease(self) -> None:
        """Renew the lease after a message from the peer."""
        self._deadline_s = min(self._context.clock.now_s() + self._context.timing.lease_s, self._limit_s)

    def _takes_heartbeat(self) -> bool:
        """Return True when a heartbeat is due, and schedule the next heartbeat."""
        now_s = self._context.clock.now_s()
        if now_s < self._next_heartbeat_s:
            return False
        self._next_heartbeat_s = now_s + self._context.timing.heartbeat_s
        return True

    def _abort_message(self, reason: str) -> Abort:
        return Abort(transfer=self.transfer, epoch=self.epoch, reason=reason[:256])


def answer_to_unknown(message: AnyMessage) -> Abort | Released | None:
    """Return the answer to a message of a transfer that is not open here; None for no answer.

    A source hand-off stays open while a push runs, so an unknown transfer has no writer here. Released tells
    the destination that.
    """
    match message:
        case Corrupt() | Abort():
            return Released(transfer=message.transfer)
        case Wrote() | Commit() | Extend():
            return Abort(transfer=message.transfer, epoch=message.epoch, reason="unknown transfer")
    return None


class GrantedTransfer(NamedTuple):
    """A transfer for which a peer has granted pages. The worker that computes the KV offers pages for it."""

    transfer: bytes
    position: int  # in its sequence, of the first token to move
    num_units: int
    unit_tokens: int  # tokens a unit: the smaller page size of the two sides
    num_layer_groups: int
