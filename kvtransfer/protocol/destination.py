"""The destination's hand-off state machine: another process writes the pages, the destination verifies them.

The life of a transfer at the destination:

1. `grant` tells the source which pages to write, or `pull` requests pages that a holder has. The pages then
   have several owners: the request's lease, and one writer, another process, for each shard. The message
   waits until every rank has opened its shard: a rank in another process has to receive its order first, and
   on a GPU the steps that may still write the pages have to end.
2. The source writes the bytes of each shard. Wrote and Commit name units that are written, and the
   destination takes their digests. Wrote and Extend renew the lease.
3. Commit ends the writing of a shard. The shard's receive registration closes; once no byte can be written,
   the writer's hold ends and the destination compares the shard's digests.
4. When all shards are verified, the sequence adopts the pages, and the destination sends Verified. Corrupt
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

Wrote and Commit are illegal for a shard that has committed, unless its units were corrupt. Messages of
another epoch have no effect; an Abort of epoch 0 comes from a process that does not know the transfer and
therefore never wrote. An illegal message raises ProtocolError and changes nothing: the caller drops the link
and calls `peer_lost`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from baton.errors import ProtocolError
from baton.kvtransfer.protocol.handoff import (
    Action,
    Finished,
    Handoff,
    HandoffContext,
    HandoffOutcome,
    Owner,
)
from baton.kvtransfer.protocol.messages import (
    DIGEST_BYTES,
    ID_BYTES,
    MAX_DIGESTS,
    MAX_DURATION_MS,
    MAX_PAGES,
    MAX_PULLED_PAGES,
    MAX_SHARDS,
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
    WantedPage,
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
    WriterDied,
    WriterStopped,
)
from baton.pages import KEY_BYTES


@dataclass(frozen=True, slots=True)
class TransferSize:
    """The id and the extent of a transfer to request. Raises ValueError for values out of range.

    A peer would drop the link, and all its transfers, because of an invalid request.
    """

    transfer: bytes  # its id, ID_BYTES bytes
    num_units: int
    num_shards: int
    deadline_s: float  # the longest duration of the whole transfer
    position: int = 0  # in its sequence, of the first token to move
    num_layer_groups: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.num_units <= MAX_PAGES or self.num_units * self.num_shards > MAX_DIGESTS:
            raise ValueError(
                f"a transfer has 1 to {MAX_PAGES} units, and at most {MAX_DIGESTS} in all shards together; "
                f"got {self.num_units} units in {self.num_shards} shards"
            )
        if not 1 <= self.num_shards <= MAX_SHARDS:
            raise ValueError(f"a transfer has 1 to {MAX_SHARDS} shards, got {self.num_shards}")
        if not 0 < self.deadline_s <= MAX_DURATION_MS / 1000:
            longest_s = MAX_DURATION_MS // 1000
            raise ValueError(f"a transfer's deadline is in (0, {longest_s}] s, got {self.deadline_s}")
        if len(self.transfer) != ID_BYTES:
            raise ValueError(f"a transfer's id has {ID_BYTES} bytes, got {len(self.transfer)}")
        if not 0 <= self.position < 2**31:
            raise ValueError(f"the position is a token from 0 to 2^31 - 1, got {self.position}")

    @property
    def deadline_ms(self) -> int:
        """Return the deadline as a message has it, at least 1 ms."""
        return max(1, round(self.deadline_s * 1000))


def check_pull(wanted: Sequence[WantedPage], num_pages: int) -> None:
    """Raise ValueError when a pull of these pages into `num_pages` local pages is out of range."""
    if not 1 <= len(wanted) <= MAX_PULLED_PAGES or num_pages > MAX_PULLED_PAGES:
        raise ValueError(
            f"a pull has 1 to {MAX_PULLED_PAGES} pages on each side, got {len(wanted)} into {num_pages}"
        )
    for page, generation, key in wanted:
        if len(key) != KEY_BYTES:
            raise ValueError(f"a page's key has {KEY_BYTES} bytes, got {len(key)}")
        if not 0 <= page < 2**31 or not 0 <= generation < 2**32:
            raise ValueError(f"page {page} of generation {generation} is out of range")


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

    ASKING = "asking"
    RECEIVING = "receiving"
    VERIFYING = "verifying"
    CLOSING = "closing"
    CLOSED = "closed"


class DestinationHandoff(Handoff):
    """The state machine of one incoming transfer."""

    failure = HandoffOutcome.RECOMPUTE

    def __init__(self, size: TransferSize, epoch: int, context: HandoffContext) -> None:
        """Start in ASKING. epoch: higher than the epoch of any earlier transfer of this process."""
        super().__init__(size.transfer, epoch, context, ("receive", size.transfer), size.deadline_ms)
        self.state = DestinationState.ASKING
        self._size = size
        self._shards = [DestinationShard(shard, self.transfer) for shard in range(size.num_shards)]
        self._is_pull = False
        self._adopter: Owner = None

    @property
    def is_closed(self) -> bool:
        return self.state is DestinationState.CLOSED

    # Local calls.

    def grant(self, adopter: Owner) -> list[Action]:
        """Reserve pages and tell the source to write them. The caller has made room.

        adopter: the owner of the pages once they are verified. Without enough free pages, the transfer ends
        at once.
        """
        if not self._reserve(adopter):
            return [self._finish_without_pages()]
        grant = Grant(
            transfer=self.transfer,
            epoch=self.epoch,
            deadline_ms=self._size.deadline_ms,
            num_units=self._size.num_units,
            position=self._size.position,
            num_shards=self._size.num_shards,
            num_layer_groups=self._size.num_layer_groups,
            pages=tuple(self.pages),
            generations=self._generations(),
        )
        return [*self._open_shards(), *self._send(grant)]

    def pull(self, adopter: Owner, holder: bytes, wanted: Sequence[WantedPage]) -> list[Action]:
        """Reserve pages and request the contents of the holder's pages `wanted`, in order.

        holder: the incarnation of the holder's process. adopter: as for `grant`.
        """
        if not self._reserve(adopter):
            return [self._finish_without_pages()]
        self._is_pull = True
        pull = PullRequest(
            transfer=self.transfer,
            epoch=self.epoch,
            deadline_ms=self._size.deadline_ms,
            num_units=self._size.num_units,
            num_shards=self._size.num_shards,
            holder=holder,
            wanted_pages=tuple(each.page for each in wanted),
            wanted_generations=tuple(each.generation for each in wanted),
            wanted_keys=b"".join(each.key for each in wanted),
            pages=tuple(self.pages),
            generations=self._generations(),
        )
        return [*self._open_shards(), *self._send(pull)]

    def on_shard_event(self, event: ShardEvent) -> list[Action]:
        match event:
            case ShardOpened(shard=shard):
                self._opening.discard(shard)
                return self._send()
            case WriterStopped(shard=shard):
                return self._writer_stopped(shard)
            case WriterDied():
                return self.fail("the source's process died")
            case ShardVerified() if not self.has_ended:
                self._shards[event.shard].corrupt = event.corrupt_units
                return self._conclude_verification()
        return []

    def rank_died(self, shard: int) -> list[Action]:
        return self._writer_stopped(shard)

    def _writer_stopped(self, shard: int) -> list[Action]:
        """Release the writer's hold: no byte of the shard can be written any more.

        A writer that stops before its Commit ends the transfer.
        """
        state = self._shards[shard]
        if state.is_stopped:
            return []
        actions = [] if state.is_committed else self.fail("the writer died")
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
        if isinstance(message, Abort) and message.epoch == 0:
            return [*self._end_refused(f"aborted: {message.reason}"), *self._confirm_writers(message)]
        if isinstance(message, Wrote | Commit | Extend | Released | PullRefused | Abort):
            if message.epoch != self.epoch:
                return []
            if self.has_ended:
                return self._confirm_writers(message)
        match message:
            case Abort():
                return self._end_refused(f"aborted: {message.reason}")
            case PullRefused() if self._is_pull and self.state is DestinationState.ASKING:
                return [*self._end_refused(f"refused: {message.reason}"), *self._confirm_writers(message)]
            case Released() if message.shard < len(self._shards):
                return [*self.fail("the source stopped writing"), *self._confirm_writers(message)]
            case Extend() | Wrote() | Commit() if self._is_legal(message):
                if not self._holds_lease():
                    return [*self.fail("expired"), *self._confirm_writers(message)]
                return self._accept(message)
        raise ProtocolError(f"unexpected {type(message).__name__}: the destination is {self.state.value}")

    def _end_refused(self, reason: str) -> list[Action]:
        """End the transfer: the source is alive and does not send the pages."""
        return self.fail(reason, HandoffOutcome.REFUSED, tells_peer=False)

    def _reserve(self, adopter: Owner) -> bool:
        num_pages = self._context.plan.destination.num_pages(self._size.num_units)
        if self._ledger.num_free < num_pages:
            return False
        self._adopter = adopter
        self.pages = self._ledger.reserve(num_pages, self._lease_owner, self._deadline_s)
        return True

    def _open_shards(self) -> list[Action]:
        for state in self._shards:
            self._ledger.add_writer(self.pages, state.writer)
            state.is_stopped = False
        after = self._ledger.free_after(self.pages)
        return [self._open_shard(shard, after) for shard in range(len(self._shards))]

    def _open_shard(self, shard: int, after: int = 0) -> OpenShard:
        self._opening.add(shard)
        route = self._context.routes[shard]
        return OpenShard(
            transfer=self.transfer,
            shard=shard,
            epoch=self.epoch,
            num_units=self._size.num_units,
            pages=tuple(self.pages),
            generations=self._generations(),
            source=route.peer,
            layers=route.layers,
            digest_key=self._context.digest_key,
            after=after,
        )

    def _finish_without_pages(self) -> Finished:
        self.state, self.outcome = DestinationState.CLOSED, HandoffOutcome.RECOMPUTE
        return Finished(self.outcome, "no free pages")

    def _is_legal(self, message: Wrote | Commit | Extend) -> bool:
        if isinstance(message, Extend):
            return True
        state = self._shards[message.shard] if message.shard < len(self._shards) else None
        return state is not None and state.accepts(message, self._size.num_units)

    def _accept(self, message: Wrote | Commit | Extend) -> list[Action]:
        self._extend_lease()
        if self.state is DestinationState.ASKING:
            self.state = DestinationState.RECEIVING
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
        if not self._holds_lease():
            return self.fail("expired")
        corrupt = [(shard, state) for shard, state in enumerate(self._shards) if state.corrupt]
        if not corrupt:
            return self._adopt()
        if any(state.was_corrupt for _, state in corrupt):
            return self.fail("corrupt twice")
        self.state = DestinationState.RECEIVING
        return [action for shard, state in corrupt for action in self._request_again(shard, state)]

    def _adopt(self) -> list[Action]:
        self._ledger.adopt(self.pages, self._lease_owner, self._adopter)
        self.state, self.outcome = DestinationState.CLOSED, HandoffOutcome.ADOPTED
        self._opening.clear()
        verified = Verified(transfer=self.transfer, epoch=self.epoch)
        return [Finished(self.outcome, ""), *self._send(verified)]

    def _request_again(self, shard: int, state: DestinationShard) -> list[Action]:
        units = state.open_again()
        self._ledger.add_writer(self.pages, state.writer)
        corrupt = Corrupt(transfer=self.transfer, epoch=self.epoch, shard=shard, units=units)
        return [self._open_shard(shard), *self._send(corrupt)]

    def _end(self) -> list[Action]:
        writing = [shard for shard, state in enumerate(self._shards) if not state.is_stopped]
        self.state = DestinationState.CLOSING if writing else DestinationState.CLOSED
        return [self._close_shard(shard, is_confirmed=False) for shard in writing]

    def _confirm_writers(self, message: AnyMessage) -> list[Action]:
        """Return the actions for a message that confirms, after the end, that writers have stopped."""
        shards: Sequence[int] = range(len(self._shards))
        match message:
            case Commit() | Released():
                shards = [message.shard] if message.shard in shards else []
            case PullRefused() | Abort(epoch=0):
                pass
            case _:
                return []
        writing = [shard for shard in shards if not self._shards[shard].is_stopped]
        return [self._close_shard(shard, is_confirmed=True) for shard in writing]
