"""The destination's hand-off state machine: another process writes the pages, the destination verifies them.

The life of a transfer at the destination:

1. A Grant tells the source which pages to write, or a PullRequest asks for pages that a holder has. The pages
   then have several owners: the transfer, and one writer, another process, for each shard. The message
   waits until every rank has opened its shard: a rank in another process has to receive its order first, and
   on a GPU the steps that may still write the pages have to end.
2. The source writes the bytes of each shard. Wrote and Commit name units that are written, and the
   destination takes their digests. Wrote and Extend renew the lease.
3. Commit ends the writing of a shard. The shard's receive registration closes; once no byte can be written,
   the writer's hold ends and the destination compares the shard's digests.
4. When all shards are verified, the sequence adopts the pages, and the destination sends Verified. Corrupt
   units are requested once more, under a new writer's hold. If they are corrupt again, the engine computes
   the tokens.
5. An abort, a lost peer or an expired lease ends the transfer in any state: one TransferEnded, and the
   transfer releases the pages. They stay quarantined until every writer has confirmed its end or is known to
   be dead, without a time limit; each heartbeat sends the source another Abort.

    state       legal messages
    RECEIVING   Wrote, Commit, Extend, Released, Abort
    VERIFYING   Extend, Released, Abort
    CLOSING     all; Commit confirms that a writer has stopped, Released that all have

Wrote and Commit are illegal for a shard that has committed, unless its units were corrupt. Messages of
another epoch have no effect. An illegal message raises ProtocolError and changes nothing: the caller drops
the link and calls `peer_lost`.
"""

from collections.abc import Sequence
from enum import Enum

import msgspec

from baton.errors import ProtocolError
from baton.kvtransfer.protocol.handoff import (
    Action,
    Handoff,
    HandoffContext,
    HandoffOutcome,
    Owner,
)
from baton.kvtransfer.protocol.messages import (
    DIGEST_BYTES,
    Abort,
    AnyMessage,
    Commit,
    Corrupt,
    Extend,
    Released,
    TransferRequest,
    Verified,
    Wrote,
)
from baton.kvtransfer.ranks.messages import (
    CloseShard,
    HashUnits,
    OpenShard,
    ShardEvent,
    ShardOpened,
    ShardVerified,
    VerifyShard,
    WriterStopped,
)


class DestinationShard:
    """One shard of an incoming transfer: the state of its writer, its digests and its corrupt units."""

    def __init__(self, shard: int, transfer: bytes) -> None:
        self.writer: Owner = ("writer", transfer, shard)  # the writer's owner id in the ledger
        self.is_stopped = True  # the writer holds no page
        self.is_committed = False
        self.digests = b""
        self.corrupt: tuple[int, ...] | None = None  # corrupt units; None: digests not compared yet
        self.was_corrupt = False
        self._num_written = 0  # units that Wrote and Commit name; each unit is then read and hashed

    def accepts(self, message: Wrote | Commit, num_units: int) -> bool:
        """Return True when the message is legal for a shard of `num_units` units.

        A committed shard accepts no message until `open_again`. The source writes each unit once, and once
        more after `open_again`.
        """
        num_written = self._num_written + message.stop - message.first
        if self.is_committed or message.stop > num_units or num_written > num_units * (1 + self.was_corrupt):
            return False
        return isinstance(message, Wrote) or len(message.digests) == num_units * DIGEST_BYTES

    def take(self, message: Wrote | Commit) -> None:
        """Count the written units; a Commit also ends the writing and has the source's digests."""
        self._num_written += message.stop - message.first
        if isinstance(message, Commit):
            self.is_committed, self.digests = True, message.digests

    def open_again(self) -> tuple[int, ...]:
        """Accept a second write and return the corrupt units, which the source writes again."""
        units, self.corrupt = self.corrupt or (), None
        self.is_committed, self.is_stopped, self.was_corrupt = False, False, True
        return units


class DestinationState(Enum):
    """The states of a DestinationHandoff; the module's table lists the legal messages of each state."""

    RECEIVING = "receiving"
    VERIFYING = "verifying"
    CLOSING = "closing"
    CLOSED = "closed"


class DestinationHandoff(Handoff):
    """The state machine of one incoming transfer."""

    failure = HandoffOutcome.RECOMPUTE

    def __init__(self, request: TransferRequest, context: HandoffContext, adopter: Owner) -> None:
        """Start in RECEIVING. request: without pages; its epoch is higher than that of any earlier transfer
        of this process. adopter: the owner of the pages once they are verified.
        """
        super().__init__(request, context, ("receive", request.transfer))
        self.state = DestinationState.RECEIVING
        self._shards = [DestinationShard(shard, self.transfer) for shard in range(len(context.routes))]
        self._adopter = adopter

    @property
    def is_closed(self) -> bool:
        return self.state is DestinationState.CLOSED

    def begin(self) -> list[Action]:
        """Reserve pages and send the request that names them. The caller has made room.

        Without enough free pages, the transfer ends at once.
        """
        num_pages = self._context.plan.destination.num_pages(self._request.num_units)
        if self._ledger.num_free < num_pages:
            self.state = DestinationState.CLOSED
            return [self._report_end(HandoffOutcome.RECOMPUTE, "no free pages")]
        self.pages = self._ledger.reserve(num_pages, self._holder)
        for state in self._shards:
            self._ledger.add_writer(self.pages, state.writer)
            state.is_stopped = False
        after = self._ledger.free_after(self.pages)
        opens = [self._open_shard(shard, after) for shard in range(len(self._shards))]
        pages, generations = tuple(self.pages), self._generations()
        request = msgspec.structs.replace(self._request, pages=pages, generations=generations)
        return [*opens, *self._send(request)]

    def on_shard_event(self, event: ShardEvent) -> list[Action]:
        match event:
            case ShardOpened(shard=shard):
                self._opening.discard(shard)
                return self._send()
            case WriterStopped(shard=shard):
                return self._writer_stopped(shard)
            case ShardVerified() if not self.has_ended:
                self._shards[event.shard].corrupt = event.corrupt_units
                return self._conclude_verification()
        return []

    def rank_died(self, shard: int) -> list[Action]:
        return self._writer_stopped(shard)

    def _writer_stopped(self, shard: int) -> list[Action]:
        """Release the writer's hold: no byte of the shard can be written any more.

        A writer that stops before its Commit has died, and ends the transfer.
        """
        state = self._shards[shard]
        if state.is_stopped:
            return []
        actions = [] if state.is_committed else self.fail("the source's process died")
        state.is_stopped = True
        self._ledger.release(self.pages, state.writer)
        if not self.has_ended:
            return [VerifyShard(transfer=self.transfer, shard=shard, digests=state.digests)]
        if all(other.is_stopped for other in self._shards):
            self.state = DestinationState.CLOSED
        return actions

    def tick(self) -> list[Action]:
        if self.state is DestinationState.CLOSING and self._takes_heartbeat():
            return self._send(self._abort_message("not released yet"))
        return super().tick()

    def _generations(self) -> tuple[int, ...]:
        """Return the generation of each page, in the order of `pages`."""
        return tuple(self._ledger.generation(page) for page in self.pages)

    # Messages of the source.

    def receive(self, message: AnyMessage) -> list[Action]:
        if isinstance(message, Wrote | Commit | Extend | Abort):
            if message.epoch != self.epoch:
                return []
            if self.has_ended:
                return self._confirm_writers(message)
        match message:
            case Abort():  # the source is alive and does not send the pages
                return self.fail(f"aborted: {message.reason}", HandoffOutcome.REFUSED, tells_peer=False)
            case Released():
                ended = self.fail("the source stopped writing", tells_peer=False)
                return [*ended, *self._confirm_writers(message)]
            case Extend() | Wrote() | Commit() if self._is_legal(message):
                return self._accept(message)
        raise ProtocolError(f"unexpected {type(message).__name__}: the destination is {self.state.value}")

    def _open_shard(self, shard: int, after: int = 0) -> OpenShard:
        self._opening.add(shard)
        route = self._context.routes[shard]
        return OpenShard(
            transfer=self.transfer,
            shard=shard,
            epoch=self.epoch,
            num_units=self._request.num_units,
            pages=tuple(self.pages),
            generations=self._generations(),
            source=route.peer,
            layers=route.layers,
            digest_key=self._context.digest_key,
            after=after,
        )

    def _is_legal(self, message: Wrote | Commit | Extend) -> bool:
        if isinstance(message, Extend):
            return True
        state = self._shards[message.shard] if message.shard < len(self._shards) else None
        return state is not None and state.accepts(message, self._request.num_units)

    def _accept(self, message: Wrote | Commit | Extend) -> list[Action]:
        self._extend_lease()
        if isinstance(message, Extend):
            return []
        self._shards[message.shard].take(message)
        hashes = HashUnits(
            transfer=self.transfer, shard=message.shard, first=message.first, stop=message.stop
        )
        if isinstance(message, Wrote):
            return [hashes]
        if all(other.is_committed for other in self._shards):
            self.state = DestinationState.VERIFYING
        return [hashes, self._close_shard(message.shard, is_confirmed=True)]

    def _close_shard(self, shard: int, *, is_confirmed: bool) -> CloseShard:
        return CloseShard(transfer=self.transfer, shard=shard, is_confirmed=is_confirmed)

    def _conclude_verification(self) -> list[Action]:
        """Adopt the pages, request corrupt units again, or give up; waits for the digests of all shards."""
        if any(state.corrupt is None for state in self._shards):
            return []
        corrupt = [(shard, state) for shard, state in enumerate(self._shards) if state.corrupt]
        if not corrupt:
            return self._adopt()
        if any(state.was_corrupt for _, state in corrupt):
            return self.fail("corrupt twice")
        self.state = DestinationState.RECEIVING
        return [action for shard, state in corrupt for action in self._request_again(shard, state)]

    def _adopt(self) -> list[Action]:
        self._ledger.adopt(self.pages, self._holder, self._adopter)
        self.state = DestinationState.CLOSED
        self._opening.clear()
        verified = Verified(transfer=self.transfer, epoch=self.epoch)
        return [self._report_end(HandoffOutcome.ADOPTED), *self._send(verified)]

    def _request_again(self, shard: int, state: DestinationShard) -> list[Action]:
        units = state.open_again()
        self._ledger.add_writer(self.pages, state.writer)
        corrupt = Corrupt(transfer=self.transfer, epoch=self.epoch, shard=shard, units=units)
        return [self._open_shard(shard), *self._send(corrupt)]

    def _end(self) -> list[Action]:
        self._ledger.release(self.pages, self._holder)
        writing = [shard for shard, state in enumerate(self._shards) if not state.is_stopped]
        self.state = DestinationState.CLOSING if writing else DestinationState.CLOSED
        return [self._close_shard(shard, is_confirmed=False) for shard in writing]

    def _confirm_writers(self, message: AnyMessage) -> list[Action]:
        """Return the actions for a message that confirms, after the end, that writers have stopped."""
        shards: Sequence[int] = range(len(self._shards))
        match message:
            case Commit():
                shards = [message.shard] if message.shard in shards else []
            case Released():
                pass
            case _:
                return []
        writing = [shard for shard in shards if not self._shards[shard].is_stopped]
        return [self._close_shard(shard, is_confirmed=True) for shard in writing]
