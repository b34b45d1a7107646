"""The source's hand-off state machine: the source holds pages and writes them into the destination's pages.

The life of a transfer at the source:

1. A Grant or a PullRequest begins the transfer, and the ranks open the transports. Once they are open, the
   pages that a worker offers are written; for a pull, the source holds the wanted pages, if they are still
   here or have come from a disk, and writes them all.
2. `offer` adds pages as the prompt is computed. The transfer holds them until it has ended and no push runs.
   Each offer is pushed for every shard.
3. Each push that has ended is a Wrote; the last push of a shard is its Commit, which carries the digests of
   all units and ends the writing of that shard.
4. Verified: the destination has adopted the pages, and the source releases its own. Corrupt: the source
   writes the named units again.
5. An abort, a lost peer or an expired lease ends the transfer in any state: one TransferEnded and, once no
   push runs, the pages are released and Released is sent.

    state       legal messages
    OPENING     Extend, Abort, Released
    STREAMING   Extend, Abort, Released; Corrupt of a shard that has committed
    COMMITTING  Verified, Corrupt, Extend, Abort, Released
    STOPPING    all; none has an effect

Each shard may be Corrupt once. Messages of another epoch, and Released, have no effect. An illegal message
raises ProtocolError and changes nothing: the caller drops the link and calls `peer_lost`.

A pull names each wanted page by its key, which the peer derives from its own tokens. The source looks the
keys up and holds the pages in one call: a page that was evicted or used again since the router's hint has no
such key any more. A wrong hint therefore never transfers the KV of other tokens.
"""

from collections.abc import Callable, Sequence
from enum import Enum
from itertools import pairwise
from typing import Final, TypeAlias

from baton.clock import Clock
from baton.errors import ProtocolError
from baton.kvtransfer.protocol.handoff import (
    Action,
    Handoff,
    HandoffContext,
    HandoffOutcome,
    Owner,
    TransferTimes,
)
from baton.kvtransfer.protocol.messages import (
    DIGEST_BYTES,
    Abort,
    AnyMessage,
    Commit,
    Corrupt,
    Extend,
    PullRequest,
    Released,
    TransferRequest,
    Verified,
    Wrote,
)
from baton.kvtransfer.ranks.messages import (
    PushEnded,
    PushUnits,
    ReachPeer,
    ShardEvent,
    ShardReached,
    ShardStopped,
    StopShard,
    UnitsHashed,
)
from baton.kvtransfer.transports.base import PieceOutcome


class SourceShard:
    """One shard of an outgoing transfer: its running pushes, its missing units and its digests."""

    def __init__(self, num_units: int) -> None:
        self.in_flight: set[tuple[int, int]] = set()  # pushes: (first, stop)
        self.is_committed = False
        self.was_corrupt = False
        self.is_reached = False  # its rank has opened a transport, or none can be opened
        self.is_stopping = False  # StopShard is sent, and ShardStopped has not come
        self.num_pages_told = 0  # source pages that its rank knows
        self._num_units = num_units
        self._num_missing = num_units
        self._digests = bytearray()  # allocated by the first push, so that an unused grant takes no memory

    @property
    def is_written(self) -> bool:
        """Return True when all units are written and no push runs."""
        return not self._num_missing and not self.in_flight

    @property
    def digests(self) -> bytes:
        """Return the digests of all written units, in order."""
        return bytes(self._digests)

    def wrote(self, first: int, stop: int, digests: bytes) -> None:
        """Record the digests of written units. Raises ValueError when their number is wrong."""
        if len(digests) != (stop - first) * DIGEST_BYTES:
            raise ValueError(f"units [{first}, {stop}) have {len(digests)} bytes of digests")
        self._digests = self._digests or bytearray(self._num_units * DIGEST_BYTES)
        self._digests[first * DIGEST_BYTES : stop * DIGEST_BYTES] = digests
        self._num_missing -= stop - first

    def can_be_corrupt(self, units: Sequence[int]) -> bool:
        """Return True when a Corrupt of these units is legal: after a Commit, and once."""
        return self.is_committed and not self.was_corrupt and units[-1] < self._num_units

    def open_again(self, units: Sequence[int]) -> list[tuple[int, int]]:
        """Mark the corrupt units as missing and return them as ranges [first, stop)."""
        self.is_committed, self.was_corrupt, self._num_missing = False, True, len(units)
        gaps = [index for index, (a, b) in enumerate(pairwise(units), 1) if b != a + 1]
        bounds = pairwise([0, *gaps, len(units)])
        return [(units[start], units[stop - 1] + 1) for start, stop in bounds]


class Timeline:
    """Measures one transfer. The caller reports each event when it happens."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began_s = self._last_offer_s = clock.now_s()
        self._changed_s = self._began_s  # when the first piece in flight began, or the last one ended
        self._moving_s = 0.0  # before `_changed_s`
        self._num_in_flight = 0
        self._num_bytes = 0

    def offered(self) -> None:
        """Record that pages were offered."""
        self._last_offer_s = self._clock.now_s()

    def pushed(self) -> None:
        """Record that a piece is being sent."""
        if not self._num_in_flight:
            self._changed_s = self._clock.now_s()
        self._num_in_flight += 1

    def wrote(self, outcome: PieceOutcome) -> None:
        """Record the end of a piece, successful or not."""
        self._num_bytes += outcome.num_bytes
        moving_s = self.moving_s
        self._num_in_flight -= 1
        if not self._num_in_flight:
            self._moving_s, self._changed_s = moving_s, self._clock.now_s()

    @property
    def moving_s(self) -> float:
        """Return the seconds so far in which at least one piece was being sent."""
        return self._moving_s + (self._clock.now_s() - self._changed_s if self._num_in_flight else 0.0)

    def end(self) -> TransferTimes:
        """Return the durations of the transfer, which ends now."""
        now_s = self._clock.now_s()
        return TransferTimes(
            total_s=now_s - self._began_s,
            moving_s=self.moving_s,
            verify_s=0.0 if self._num_in_flight else now_s - self._changed_s,
            exposed_s=now_s - self._last_offer_s,
            num_bytes=self._num_bytes,
        )


# Returns device pages with the contents of these keys and makes the owner a user of the pages. Pages that are
# only in host memory are copied to the device. Returns None, with no page held, when a key is not found or
# when no room is left on the device.
Pin: TypeAlias = Callable[[Sequence[bytes], Owner], Sequence[int] | None]


def pin_nothing(keys: Sequence[bytes], owner: Owner) -> Sequence[int] | None:
    """Refuse every pull: the `pin` of a replica without a prefix cache for peers."""
    return None


# Orders pages with these keys that lie on disk. Returns None when nothing has to come, else a function that
# says whether some pages are still to come.
Fetch: TypeAlias = Callable[[Sequence[bytes]], Callable[[], bool] | None]


def fetch_nothing(keys: Sequence[bytes]) -> None:
    """Fetch no page: the `fetch` of a replica without a disk."""


MAX_FETCH_S: Final = 4.0  # then a pull goes on without the pages, and is refused


class SourceState(Enum):
    """The states of a SourceHandoff; the module's table lists the legal messages of each state."""

    OPENING = "opening"
    STREAMING = "streaming"
    COMMITTING = "committing"
    STOPPING = "stopping"
    CLOSED = "closed"


class SourceHandoff(Handoff):
    """The state machine of one outgoing transfer."""

    failure = HandoffOutcome.FAILED

    def __init__(
        self,
        request: TransferRequest,
        context: HandoffContext,
        pin: Pin,
        fetch: Fetch = fetch_nothing,
    ) -> None:
        """Start in OPENING. request: the peer's Grant or PullRequest.

        pin: finds the wanted pages of a pull by their keys, once `fetch` has brought those that lie on disk.
        """
        super().__init__(request, context, ("source", request.transfer))
        self.state = SourceState.OPENING
        self.timeline = Timeline(context.clock)
        self._pin = pin
        self._fetch = fetch
        self._is_coming: Callable[[], bool] | None = None  # whether a disk still reads wanted pages
        self._fetch_until_s = 0.0
        self._units_per_page = context.plan.source.units_per_page
        self._shards = [SourceShard(request.num_units) for _ in context.routes]
        self._num_offered = [0] * request.num_layer_groups  # layer group -> units
        self._num_pushed = [0] * request.num_layer_groups  # units [pushed, offered) wait for the transports

    @property
    def is_closed(self) -> bool:
        return self.state is SourceState.CLOSED

    # Local calls.

    def begin(self) -> list[Action]:
        """Have each shard's rank open a transport; the rank learns the destination's pages.

        Meanwhile a disk reads the wanted pages of a pull that lie there; see `fetched`.
        """
        request, context = self._request, self._context
        if isinstance(request, PullRequest):
            self._is_coming = self._fetch(request.keys)
            self._fetch_until_s = context.clock.now_s() + MAX_FETCH_S
        return [
            ReachPeer(
                transfer=self.transfer,
                shard=shard,
                link=context.link,
                destination=route.peer,
                layers=route.layers,
                digest_key=context.digest_key,
                epoch=self.epoch,
                pages=request.pages,
                generations=request.generations,
                is_bulk=isinstance(request, PullRequest),  # no first token waits for these pages
            )
            for shard, route in enumerate(context.routes)
        ]

    @property
    def is_fetching(self) -> bool:
        """Return True while the transfer waits for pages from a disk."""
        return self._is_coming is not None and not self.has_ended

    def fetched(self) -> list[Action]:
        """Go on if all pages have come from the disk, or have not come in time. Legal while `is_fetching`."""
        assert self._is_coming is not None
        if self._is_coming() and self._context.clock.now_s() < self._fetch_until_s:
            return []
        self._is_coming = None
        return self._start()

    def offer(self, pages: Sequence[int], num_units: int, group: int | None = None) -> list[Action]:
        """Add the next pages and push all newly computed units.

        num_units: the units computed so far, in this group of layers; group None: in all groups. Raises
        ValueError when `num_units` does not follow the earlier offers or does not match the pages.
        """
        if self.has_ended:
            return []
        self.timeline.offered()
        return self._offer(pages, num_units, group)

    def _offer(self, pages: Sequence[int], num_units: int, group: int | None = None) -> list[Action]:
        groups = range(len(self._num_offered)) if group is None else range(group, group + 1)
        stop = min(num_units, (len(self.pages) + len(pages)) * self._units_per_page)
        before = max(self._num_offered[groups.start : groups.stop], default=self._request.num_units + 1)
        if not before <= num_units == stop <= self._request.num_units:
            of_group = "" if group is None else f" of layer group {group}"
            raise ValueError(
                f"{num_units} units{of_group} offered after {before}, in {len(pages)} more pages"
            )
        self._ledger.hold(pages, self._holder)
        self.pages += pages
        for each in groups:
            self._num_offered[each] = num_units
        return self._push_offered()

    # Events of the ranks.

    def on_shard_event(self, event: ShardEvent) -> list[Action]:
        match event:
            case ShardReached(shard=shard):
                return self._reached(shard)
            case PushEnded():
                return self._push_ended(event)
            case UnitsHashed(shard=shard, first=first, stop=stop, digests=digests, reason=""):
                return self._pushed(shard, first, stop, digests)
            case UnitsHashed(shard=shard, first=first, stop=stop, reason=reason):
                return self._push_failed(shard, first, stop, reason)
            case ShardStopped(shard=shard):
                return self._stopped(shard)
        return []

    def rank_died(self, shard: int) -> list[Action]:
        return self._stopped(shard)

    def _reached(self, shard: int) -> list[Action]:
        self._shards[shard].is_reached = True
        return self._start()

    def _start(self) -> list[Action]:
        """Start writing once the transports of every shard are open and no page is to come from a disk."""
        is_ready = all(each.is_reached for each in self._shards) and self._is_coming is None
        if self.state is not SourceState.OPENING or not is_ready:
            return []
        if isinstance(self._request, PullRequest):
            return self._accept_pull(self._request)
        self.state = SourceState.STREAMING
        return self._push_offered()

    def _accept_pull(self, pull: PullRequest) -> list[Action]:
        """Hold the wanted pages and write them all, or refuse the pull."""
        owner = ("pin", self.transfer)
        pages = self._pin(pull.keys, owner)
        if pages is None:
            return self.fail("a wanted page is not cached here, or there is no room to copy it from the host")
        self.state = SourceState.STREAMING
        offered = self._offer(pages, pull.num_units)
        self._ledger.release(pages, owner)
        return offered

    def _push_ended(self, event: PushEnded) -> list[Action]:
        outcome = event.outcome
        if not self.has_ended:
            self.timeline.wrote(outcome)
        if outcome.is_done:
            return []
        return self._push_failed(event.shard, event.first, event.stop, outcome.reason)

    def _pushed(self, shard: int, first: int, stop: int, digests: bytes) -> list[Action]:
        """Record a successful push. digests: one for each unit of the push, computed from the bytes read."""
        self._shards[shard].in_flight.remove((first, stop))
        if self.has_ended:
            return []
        self._shards[shard].wrote(first, stop, digests)
        if self._shards[shard].is_written:
            return [self._commit(shard, first, stop)]
        return [Wrote(transfer=self.transfer, epoch=self.epoch, shard=shard, first=first, stop=stop)]

    def _push_failed(self, shard: int, first: int, stop: int, reason: str) -> list[Action]:
        """Record a push that failed on every transport, which ends the transfer."""
        self._shards[shard].in_flight.remove((first, stop))
        return self.fail(f"transport: {reason}")

    def _stopped(self, shard: int) -> list[Action]:
        """Close the transfer once no rank reads or writes for any of its shards."""
        self._shards[shard].is_stopping = False
        if self.state is not SourceState.STOPPING or any(each.is_stopping for each in self._shards):
            return []
        return self._close()

    def _close(self) -> list[Action]:
        """Release the pages: no push runs, and no push will start."""
        self._ledger.release(self.pages, self._holder)
        self.state = SourceState.CLOSED
        return [Released(transfer=self.transfer)]

    # Messages of the destination.

    def receive(self, message: AnyMessage) -> list[Action]:
        if self.has_ended:
            return []
        match message, self.state:
            case ((Verified() | Corrupt() | Extend() | Abort()), _) if message.epoch != self.epoch:
                return []
            case Released(), _:  # from a destination that did not know the transfer
                return []
            case Abort(), _:
                return self.fail(f"aborted: {message.reason}", tells_peer=False)
            case Verified(), SourceState.COMMITTING:
                self.state = SourceState.CLOSED
                self._ledger.release(self.pages, self._holder)
                return [self._report_end(HandoffOutcome.HANDED_OVER)]
            case Corrupt(), SourceState.COMMITTING | SourceState.STREAMING:
                return self._write_again(message)
            case Extend(), _:
                self._extend_lease()
                return []
        raise ProtocolError(f"unexpected {type(message).__name__}: the source is {self.state.value}")

    def _times(self) -> TransferTimes:
        return self.timeline.end()

    def _end(self) -> list[Action]:
        self.state = SourceState.STOPPING
        if not any(state.in_flight for state in self._shards):
            return self._close()
        for state in self._shards:
            state.is_stopping = True
        return [StopShard(transfer=self.transfer, shard=shard) for shard in range(len(self._shards))]

    def _push_offered(self) -> list[Action]:
        if self.state is SourceState.OPENING:
            return []
        pushed, self._num_pushed = self._num_pushed, list(self._num_offered)
        due = list(zip(pushed, self._num_offered, strict=True))  # by group of layers
        shards = [(shard, *due[route.group]) for shard, route in enumerate(self._context.routes)]
        return [self._push(shard, first, stop) for shard, first, stop in shards if first < stop]

    def _push(self, shard: int, first: int, stop: int) -> PushUnits:
        state = self._shards[shard]
        state.in_flight.add((first, stop))
        more_pages, state.num_pages_told = tuple(self.pages[state.num_pages_told :]), len(self.pages)
        self.timeline.pushed()
        return PushUnits(
            transfer=self.transfer,
            shard=shard,
            first=first,
            stop=stop,
            more_pages=more_pages,
            after=self._ledger.launched,
        )

    def _commit(self, shard: int, first: int, stop: int) -> Commit:
        state = self._shards[shard]
        state.is_committed = True
        if all(other.is_committed for other in self._shards):
            self.state = SourceState.COMMITTING
        return Commit(
            transfer=self.transfer,
            epoch=self.epoch,
            shard=shard,
            first=first,
            stop=stop,
            digests=state.digests,
        )

    def _write_again(self, corrupt: Corrupt) -> list[Action]:
        state = self._shards[corrupt.shard] if corrupt.shard < len(self._shards) else None
        if state is None or not state.can_be_corrupt(corrupt.units):
            raise ProtocolError(f"unexpected Corrupt of shard {corrupt.shard}")
        self.state = SourceState.STREAMING
        self._extend_lease()
        return [self._push(corrupt.shard, first, stop) for first, stop in state.open_again(corrupt.units)]
