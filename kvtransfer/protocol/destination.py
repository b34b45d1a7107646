"""The destination's end of a transfer: another process fills its pages, and it verifies them.

The life of a transfer at the destination:

1. `grant` tells the source which pages to write, or `pull` asks a holder for pages that it has. From then on
   the pages have two owners: a lease, which belongs to the request, and each part's writer, another process.
2. The source writes the bytes of each part. Wrote and Extend keep the lease.
3. Commit of a part: its writer writes no more. The part's receive registration closes; once nothing can be
   written, the writer's hold ends and the part's digests are compared.
4. All parts verified: the sequence adopts the pages, and Verified is sent. Corrupt units are requested once
   more, under a new hold of their writer; if they are corrupt again, the tokens are computed here instead.
5. An abort, a lost peer or an expired lease ends the transfer in any state: one Finished, the lease released.
   The pages stay quarantined until every writer has confirmed or is known dead, however long that takes;
   every heartbeat sends the source another Abort.

    state       legal messages
    ASKING      Wrote, Commit, Extend, Released, Abort; PullRefused after `pull`
    RECEIVING   Wrote, Commit, Extend, Released, Abort
    VERIFYING   Extend, Released, Abort
    CLOSING     all; Commit, Released and PullRefused confirm that a writer has stopped
    CLOSED      all: they crossed ours and change nothing

Wrote and Commit are illegal for a part that has committed, unless its units were corrupt. Messages of
another epoch are counted in `num_stale` and change nothing; an Abort of epoch 0 comes from a process that
does not know the transfer and so never wrote. An illegal message raises ProtocolError and changes nothing:
the caller drops the link and calls `peer_lost`.
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
    """One part of an arriving transfer: whether its source may still write, and its digests."""

    def __init__(self, number: int, transfer: bytes) -> None:
        self.writer: Owner = ("writer", transfer, number)  # in the ledger
        self.is_stopped = True  # its writer holds no page
        self.is_committed = False
        self.digests = b""
        self.corrupt: tuple[int, ...] | None = None  # units; None: not compared yet
        self.was_corrupt = False
        self._num_announced = 0  # units that its source has said to be written: each is read to be hashed

    def may_say(self, message: Wrote | Commit, num_units: int) -> bool:
        """A part that has committed is silent, unless its units came damaged.

        Each unit is announced once, and once more if it came damaged.
        """
        if self.is_committed:
            return False
        if isinstance(message, Wrote):
            num_announced = self._num_announced + message.stop - message.first
            return message.stop <= num_units and num_announced <= num_units * (1 + self.was_corrupt)
        return len(message.digests) == num_units * DIGEST_BYTES

    def announce(self, message: Wrote) -> None:
        self._num_announced += message.stop - message.first

    def commit(self, digests: bytes) -> None:
        self.is_committed, self.digests = True, digests

    def open_again(self) -> tuple[int, ...]:
        """Its damaged units, which are to be written once more."""
        units, self.corrupt = self.corrupt or (), None
        self.is_committed, self.is_stopped, self.was_corrupt = False, False, True
        return units


class DestinationState(Enum):
    ASKING = "asking"
    RECEIVING = "receiving"
    VERIFYING = "verifying"
    CLOSING = "closing"
    CLOSED = "closed"


_ENDED = (DestinationState.CLOSING, DestinationState.CLOSED)


class DestinationHandoff:
    """One transfer. Calls return what has to be done, in order; one thread makes them."""

    def __init__(self, size: TransferSize, epoch: int, timeouts: HandoffTimeouts) -> None:
        """epoch: higher than that of any earlier transfer of this process."""
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

    # What our own side does.

    def grant(self, adopter: Owner, transports: tuple[str, ...] = ()) -> list[Action]:
        """Reserve pages and tell the source to write them. The caller has made room.

        adopter: the owner of the pages once they are verified.
        """
        if not self._reserve(adopter):
            return [self._end_at_once()]
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
        """Ask the process `holder` for its pages `wanted`, in order; adopter: as for `grant`."""
        if not self._reserve(adopter):
            return [self._end_at_once()]
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
        """Nothing of the part can be written any more: the answer to CloseReceive, or its process is dead."""
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
        """The answer to Verify: which units are not what was sent."""
        if self.state in _ENDED:
            return []
        self._parts[part].corrupt = corrupt_units
        return self._conclude()

    def abort(self, reason: str) -> list[Action]:
        return self.fail(reason, HandoffOutcome.CANCELLED)

    def fail(
        self, reason: str, outcome: HandoffOutcome = HandoffOutcome.RECOMPUTE, *, tells_peer: bool = True
    ) -> list[Action]:
        """End it from any state; once it has ended nothing changes."""
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
        return self.fail("peer lost", tells_peer=False)

    def tick(self) -> list[Action]:
        """To be called at least once a heartbeat."""
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
        """Of the pages, in their order."""
        return tuple(self._ledger.generation(page) for page in self.pages)

    # What the source says.

    def receive(self, message: AnyMessage) -> list[Action]:
        """message: one that names this transfer."""
        if isinstance(message, Abort) and message.epoch == 0:
            return self._refused(f"aborted: {message.reason}") + self._confirm_all()
        if isinstance(message, Wrote | Commit | Extend | Released | PullRefused | Abort):
            if message.epoch != self.epoch:
                self.num_stale += 1
                return []
            if self.state in _ENDED:
                return self._confirmed(message)
        match message:
            case Abort():
                return self._refused(f"aborted: {message.reason}")
            case PullRefused() if self._is_pull and self.state is DestinationState.ASKING:
                return self._refused(f"refused: {message.reason}") + self._confirm_all()
            case Released() if message.part < len(self._parts):
                return self.fail("the source has let go") + self._confirmed(message)
            case Extend() | Wrote() | Commit() if self._is_legal(message):
                if not self._holds_lease():
                    return self.fail("expired") + self._confirmed(message)
                return self._go_on(message)
        raise ProtocolError(f"{type(message).__name__} came to a destination that is {self.state.value}")

    def _refused(self, reason: str) -> list[Action]:
        """The source lives, and says that it does not send the pages."""
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

    def _end_at_once(self) -> Finished:
        self.state, self.outcome = DestinationState.CLOSED, HandoffOutcome.RECOMPUTE
        return Finished(self.outcome, "no free pages")

    def _is_legal(self, message: Wrote | Commit | Extend) -> bool:
        if isinstance(message, Extend):
            return True
        part = self._parts[message.part] if message.part < len(self._parts) else None
        return part is not None and part.may_say(message, self._size.num_units)

    def _go_on(self, message: Wrote | Commit | Extend) -> list[Action]:
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

    def _conclude(self) -> list[Action]:
        """Once the digests of all parts have been compared: adopt, ask again, or give up."""
        if any(part.corrupt is None for part in self._parts):
            return []
        if not self._holds_lease():
            return self.fail("expired")
        damaged = [(number, part) for number, part in enumerate(self._parts) if part.corrupt]
        if not damaged:
            return self._adopt()
        if any(part.was_corrupt for _, part in damaged):
            return self.fail("corrupt twice")
        self.state = DestinationState.RECEIVING
        return [action for number, part in damaged for action in self._ask_again(number, part)]

    def _adopt(self) -> list[Action]:
        self._ledger.adopt(self.pages, self._lease_owner, self._adopter)
        self.state, self.outcome = DestinationState.CLOSED, HandoffOutcome.ADOPTED
        verified = Verified(transfer=self.transfer, epoch=self.epoch)
        return [Finished(self.outcome, ""), Send(verified)]

    def _ask_again(self, number: int, part: ReceivePart) -> list[Action]:
        units = part.open_again()
        self._ledger.quarantine(self.pages, part.writer)
        corrupt = Corrupt(transfer=self.transfer, epoch=self.epoch, part=number, units=units)
        return [OpenReceive(number), Send(corrupt)]

    def _holds_lease(self) -> bool:
        return holds_lease(self._ledger, self.pages, self._lease_owner)

    def _abort_message(self, reason: str) -> Send:
        return Send(Abort(transfer=self.transfer, epoch=self.epoch, reason=reason[:256]))

    def _confirmed(self, message: AnyMessage) -> list[Action]:
        """What a message says about a writer, after the end."""
        if isinstance(message, PullRefused):
            return self._confirm_all()
        if not isinstance(message, Commit | Released) or message.part >= len(self._parts):
            return []
        return [] if self._parts[message.part].is_stopped else [CloseReceive(message.part, is_confirmed=True)]

    def _confirm_all(self) -> list[Action]:
        writing = [number for number, part in enumerate(self._parts) if not part.is_stopped]
        return [CloseReceive(number, is_confirmed=True) for number in writing]
