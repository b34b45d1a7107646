"""The destination's hand-off state machine: another process writes the pages, the destination verifies them.

The life of a transfer at the destination:

1. `grant` tells the source which pages to write, or `pull` requests pages that a holder has. The pages then
   have several owners: the request's lease, and one writer, another process, for each part.
2. The source writes the bytes of each part. Wrote and Extend renew the lease.
3. Commit ends the writing of a part. The part's receive registration closes; once no byte can be written, the
   writer's hold ends and the destination compares the part's digests.
4. When all parts are verified, the sequence adopts the pages, and the destination sends Verified. Corrupt
   units are requested once more, under a new writer's hold. If they are corrupt again, the engine computes
   the tokens.
5. An abort, a lost peer or an expired lease ends the transfer in any state: one Finished, the lease released.
   The pages stay quarantined until every writer has confirmed its end or is known to be dead, without a time
   limit; each heartbeat sends the source another Abort.

    state       legal messages
    ASKING      Wrote, Commit, Extend, Released, Abort; PullRefused after `pull`
    RECEIVING   Wrote, Commit, Extend, Released, Abort
    VERIFYING   Extend, Released, Abort
    CLOSING     all; Commit, Released and PullRefused confirm that a writer has stopped
    CLOSED      all; none has an effect

Wrote and Commit are illegal for a part that has committed, unless its units were corrupt. Messages of another
epoch are counted in `num_stale` and have no effect; an Abort of epoch 0 comes from a process that does not
know the transfer and therefore never wrote. An illegal message raises ProtocolError and changes nothing: the
caller drops the link and calls `peer_lost`.
"""

from collections.abc import Sequence
from enum import Enum

from baton.errors import ProtocolError
from baton.kvtransfer.protocol.handoff import (
    Action,
    CloseReceive,
    Finished,
    HandoffOutcome,
    HandoffTimeouts,
    LeaseTimer,
    OpenReceive,
    Owner,
    Send,
    TransferSize,
    Verify,
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
    Verified,
    Wrote,
)
from baton.kvtransfer.protocol.pull import WantedPage


class ReceivePart:
    """One part of an incoming transfer: the state of its writer, its digests and its corrupt units."""

    def __init__(self, number: int, transfer: bytes) -> None:
        self.writer: Owner = ("writer", transfer, number)  # the writer's owner id in the ledger
        self.is_stopped = True  # the writer holds no page
        self.is_committed = False
        self.digests = b""
        self.corrupt: tuple[int, ...] | None = None  # corrupt units; None: digests not compared yet
        self.was_corrupt = False
        self._num_announced = 0  # units in Wrote messages; each unit is then read and hashed

    def accepts(self, message: Wrote | Commit, num_units: int) -> bool:
        """Return True when the message is legal for a part of `num_units` units.

        A committed part accepts no message until `open_again`. Wrote messages announce each unit once, and
        once more after `open_again`.
        """
        if self.is_committed:
            return False
        if isinstance(message, Wrote):
            num_announced = self._num_announced + message.stop - message.first
            return message.stop <= num_units and num_announced <= num_units * (1 + self.was_corrupt)
        return len(message.digests) == num_units * DIGEST_BYTES

    def announce(self, message: Wrote) -> None:
        """Count the units that the source has written."""
        self._num_announced += message.stop - message.first

    def commit(self, digests: bytes) -> None:
        """Record the source's digests and the end of the writing."""
        self.is_committed, self.digests = True, digests

    def open_again(self) -> tuple[int, ...]:
        """Accept a second write and return the corrupt units, which the source writes again."""
        units, self.corrupt = self.corrupt or (), None
        self.is_committed, self.is_stopped, self.was_corrupt = False, False, True
        return units


class DestinationState(Enum):
    """The states of a DestinationHandoff; the module's table lists the legal messages of each state."""

    ASKING = "asking"
    RECEIVING = "receiving"
    VERIFYING = "verifying"
    CLOSING = "closing"
    CLOSED = "closed"


_ENDED = (DestinationState.CLOSING, DestinationState.CLOSED)


class DestinationHandoff:
    """The state machine of one incoming transfer.

    Each call returns the actions that the caller performs, in order. One thread makes all calls. Holds and
    releases `pages` in the ledger.
    """

    def __init__(self, size: TransferSize, epoch: int, timeouts: HandoffTimeouts) -> None:
        """Start in ASKING. epoch: higher than the epoch of any earlier transfer of this process."""
        self.transfer = size.transfer
        self.epoch = epoch
        self.state = DestinationState.ASKING
        self.outcome: HandoffOutcome | None = None
        self.num_stale = 0
        self.pages: list[int] = []
        self._size = size
        self._timeouts = timeouts
        self._ledger = timeouts.ledger
        self._timer = LeaseTimer(timeouts.clock, timeouts.timing, size.deadline_ms / 1000)
        self._parts = [ReceivePart(number, self.transfer) for number in range(size.num_parts)]
        self._is_pull = False
        self._lease_owner = ("receive", self.transfer)
        self._adopter: Owner = None

    # Local calls.

    def grant(self, adopter: Owner, transports: tuple[str, ...] = ()) -> list[Action]:
        """Reserve pages and tell the source to write them. The caller has made room.

        adopter: the owner of the pages once they are verified. transports: the names of the transports that
        this replica listens with. Without enough free pages, the transfer ends at once.
        """
        if not self._reserve(adopter):
            return [self._finish_without_pages()]
        grant = Grant(
            transfer=self.transfer,
            epoch=self.epoch,
            deadline_ms=self._size.deadline_ms,
            num_units=self._size.num_units,
            position=self._size.position,
            num_parts=self._size.num_parts,
            num_layer_groups=self._size.num_layer_groups,
            pages=tuple(self.pages),
            generations=self.generations(),
            transports=transports,
        )
        return [*self._open_parts(), Send(grant)]

    def pull(
        self,
        adopter: Owner,
        holder: bytes,
        wanted: Sequence[WantedPage],
        transports: tuple[str, ...] = (),
    ) -> list[Action]:
        """Reserve pages and request the contents of the holder's pages `wanted`, in order.

        holder: the incarnation of the holder's process. adopter, transports: as for `grant`.
        """
        if not self._reserve(adopter):
            return [self._finish_without_pages()]
        self._is_pull = True
        pull = PullRequest(
            transfer=self.transfer,
            epoch=self.epoch,
            deadline_ms=self._size.deadline_ms,
            num_units=self._size.num_units,
            num_parts=self._size.num_parts,
            holder=holder,
            wanted_pages=tuple(each.page for each in wanted),
            wanted_generations=tuple(each.generation for each in wanted),
            wanted_keys=b"".join(each.key for each in wanted),
            pages=tuple(self.pages),
            generations=self.generations(),
            transports=transports,
        )
        return [*self._open_parts(), Send(pull)]

    def writer_stopped(self, part: int) -> list[Action]:
        """Release the writer's hold: no byte of the part can be written any more.

        The caller calls it as the answer to CloseReceive, or when the writer's process is dead. A writer that
        stops before its Commit ends the transfer.
        """
        state = self._parts[part]
        if state.is_stopped:
            return []
        actions = [] if state.is_committed else self.fail("the writer died")
        state.is_stopped = True
        self._ledger.release(self.pages, state.writer)
        if self.state not in _ENDED:
            return [Verify(part, state.digests)]
        if all(other.is_stopped for other in self._parts):
            self.state = DestinationState.CLOSED
        return actions

    def verified(self, part: int, corrupt_units: tuple[int, ...]) -> list[Action]:
        """Record the part's corrupt units, the answer to Verify; the last part concludes the verification."""
        if self.state in _ENDED:
            return []
        self._parts[part].corrupt = corrupt_units
        return self._conclude_verification()

    def abort(self, reason: str) -> list[Action]:
        """End the transfer with the outcome CANCELLED and tell the source."""
        return self.fail(reason, HandoffOutcome.CANCELLED)

    def fail(
        self, reason: str, outcome: HandoffOutcome = HandoffOutcome.RECOMPUTE, *, tells_peer: bool = True
    ) -> list[Action]:
        """End the transfer in any state; has no effect after its end. tells_peer: send an Abort."""
        if self.state in _ENDED:
            return []
        self.outcome = outcome
        release_lease(self._ledger, self.pages, self._lease_owner)
        actions: list[Action] = [self._abort_message(reason)] if tells_peer else []
        writing = [number for number, part in enumerate(self._parts) if not part.is_stopped]
        self.state = DestinationState.CLOSING if writing else DestinationState.CLOSED
        actions.append(Finished(outcome, reason))
        return actions + [CloseReceive(number, is_confirmed=False) for number in writing]

    def peer_lost(self) -> list[Action]:
        """End the transfer after the loss of the link; writers may still write until `writer_stopped`."""
        return self.fail("peer lost", tells_peer=False)

    def tick(self) -> list[Action]:
        """Check the lease and send a due heartbeat. The caller calls it at least once a heartbeat."""
        if self.state is DestinationState.CLOSING:
            return [self._abort_message("not released yet")] if self._timer.takes_heartbeat() else []
        if self.state is DestinationState.CLOSED:
            return []
        if self._timer.is_over or not self._holds_lease():
            return self.fail("expired")
        if self._timer.takes_heartbeat():
            return [Send(Extend(transfer=self.transfer, epoch=self.epoch))]
        return []

    def generations(self) -> tuple[int, ...]:
        """Return the generation of each page, in the order of `pages`."""
        return tuple(self._ledger.generation(page) for page in self.pages)

    # Messages of the source.

    def receive(self, message: AnyMessage) -> list[Action]:
        """Process a message of this transfer.

        Raises ProtocolError, without an effect, when the message is illegal in this state.
        """
        if isinstance(message, Abort) and message.epoch == 0:
            return self._end_refused(f"aborted: {message.reason}") + self._confirm_all()
        if isinstance(message, Wrote | Commit | Extend | Released | PullRefused | Abort):
            if message.epoch != self.epoch:
                self.num_stale += 1
                return []
            if self.state in _ENDED:
                return self._confirm_writer(message)
        match message:
            case Abort():
                return self._end_refused(f"aborted: {message.reason}")
            case PullRefused() if self._is_pull and self.state is DestinationState.ASKING:
                return self._end_refused(f"refused: {message.reason}") + self._confirm_all()
            case Released() if message.part < len(self._parts):
                return self.fail("the source stopped writing") + self._confirm_writer(message)
            case Extend() | Wrote() | Commit() if self._is_legal(message):
                if not self._holds_lease():
                    return self.fail("expired") + self._confirm_writer(message)
                return self._accept(message)
        raise ProtocolError(f"unexpected {type(message).__name__}: the destination is {self.state.value}")

    def _end_refused(self, reason: str) -> list[Action]:
        """End the transfer: the source is alive and does not send the pages."""
        return self.fail(reason, HandoffOutcome.REFUSED, tells_peer=False)

    def _reserve(self, adopter: Owner) -> bool:
        num_pages = self._timeouts.num_destination_pages(self._size.num_units)
        if self._ledger.num_free < num_pages:
            return False
        self._adopter = adopter
        self.pages = self._ledger.reserve(num_pages, self._lease_owner, self._timer.deadline_s)
        return True

    def _open_parts(self) -> list[Action]:
        for state in self._parts:
            self._ledger.quarantine(self.pages, state.writer)
            state.is_stopped = False
        after = self._ledger.free_after(self.pages)
        return [OpenReceive(part, after) for part in range(len(self._parts))]

    def _finish_without_pages(self) -> Finished:
        self.state, self.outcome = DestinationState.CLOSED, HandoffOutcome.RECOMPUTE
        return Finished(self.outcome, "no free pages")

    def _is_legal(self, message: Wrote | Commit | Extend) -> bool:
        if isinstance(message, Extend):
            return True
        part = self._parts[message.part] if message.part < len(self._parts) else None
        return part is not None and part.accepts(message, self._size.num_units)

    def _accept(self, message: Wrote | Commit | Extend) -> list[Action]:
        self._timer.extend()
        self._ledger.extend(self._lease_owner, self._timer.deadline_s)
        if self.state is DestinationState.ASKING:
            self.state = DestinationState.RECEIVING
        if isinstance(message, Wrote):
            self._parts[message.part].announce(message)
        if not isinstance(message, Commit):
            return []
        self._parts[message.part].commit(message.digests)
        if all(other.is_committed for other in self._parts):
            self.state = DestinationState.VERIFYING
        return [CloseReceive(message.part, is_confirmed=True)]

    def _conclude_verification(self) -> list[Action]:
        """Adopt the pages, request corrupt units again, or give up; waits for the digests of all parts."""
        if any(part.corrupt is None for part in self._parts):
            return []
        if not self._holds_lease():
            return self.fail("expired")
        corrupt = [(number, part) for number, part in enumerate(self._parts) if part.corrupt]
        if not corrupt:
            return self._adopt()
        if any(part.was_corrupt for _, part in corrupt):
            return self.fail("corrupt twice")
        self.state = DestinationState.RECEIVING
        return [action for number, part in corrupt for action in self._request_again(number, part)]

    def _adopt(self) -> list[Action]:
        self._ledger.adopt(self.pages, self._lease_owner, self._adopter)
        self.state, self.outcome = DestinationState.CLOSED, HandoffOutcome.ADOPTED
        verified = Verified(transfer=self.transfer, epoch=self.epoch)
        return [Finished(self.outcome, ""), Send(verified)]

    def _request_again(self, number: int, part: ReceivePart) -> list[Action]:
        units = part.open_again()
        self._ledger.quarantine(self.pages, part.writer)
        corrupt = Corrupt(transfer=self.transfer, epoch=self.epoch, part=number, units=units)
        return [OpenReceive(number), Send(corrupt)]

    def _holds_lease(self) -> bool:
        return holds_lease(self._ledger, self.pages, self._lease_owner)

    def _abort_message(self, reason: str) -> Send:
        return Send(Abort(transfer=self.transfer, epoch=self.epoch, reason=reason[:256]))

    def _confirm_writer(self, message: AnyMessage) -> list[Action]:
        """Return the actions for a message that confirms, after the end, that a writer has stopped."""
        if isinstance(message, PullRefused):
            return self._confirm_all()
        if not isinstance(message, Commit | Released) or message.part >= len(self._parts):
            return []
        return [] if self._parts[message.part].is_stopped else [CloseReceive(message.part, is_confirmed=True)]

    def _confirm_all(self) -> list[Action]:
        writing = [number for number, part in enumerate(self._parts) if not part.is_stopped]
        return [CloseReceive(number, is_confirmed=True) for number in writing]
