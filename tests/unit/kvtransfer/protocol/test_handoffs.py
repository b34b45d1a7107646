"""The rules of each side's hand-off. test_handoff_interleavings.py checks ends and pages in random order."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import msgspec
import pytest

from baton.clock import ManualClock
from baton.engine.cache.page_pool import PagePool, PageState
from baton.errors import ProtocolError
from baton.kvtransfer.protocol.destination import DestinationHandoff, DestinationState
from baton.kvtransfer.protocol.handoff import (
    Action,
    HandoffOutcome,
    TransferEnded,
    answer_to_unknown,
)
from baton.kvtransfer.protocol.messages import (
    MAX_DIGESTS,
    MAX_PAGES,
    MAX_SHARDS,
    Abort,
    AnyMessage,
    Commit,
    Corrupt,
    EndpointHello,
    Extend,
    Grant,
    PullRequest,
    Released,
    TransferMessage,
    TransferRequest,
    Verified,
    Wrote,
    check_request,
)
from baton.kvtransfer.protocol.source import SourceHandoff, SourceState
from baton.kvtransfer.ranks.messages import (
    CloseShard,
    OpenShard,
    PushUnits,
    ShardEvent,
    ShardOpened,
    ShardReached,
    ShardVerified,
    UnitsHashed,
    WriterStopped,
)
from tests.layouts import a_layout
from tests.numbered_pages import NumberedPages, handoff_context, key_of

ID, EPOCH, NUM_UNITS, NUM_PAGES = b"t" * 16, 7, 4, 8
DIGESTS = bytes(range(8 * NUM_UNITS))
OF_TRANSFER: dict[str, Any] = {"transfer": ID, "epoch": EPOCH}
EXTEND, VERIFIED = Extend(**OF_TRANSFER), Verified(**OF_TRANSFER)
RELEASED = Released(transfer=ID)
State: TypeAlias = SourceState | DestinationState


def grant(num_groups: int = 1) -> Grant:
    return Grant(
        **OF_TRANSFER,
        deadline_ms=100_000,
        num_units=NUM_UNITS,
        num_layer_groups=num_groups,
        pages=(20, 21, 22, 23),
        generations=(1, 1, 1, 1),
    )


def pull(wanted: tuple[int, ...] = (0, 1, 2, 3)) -> PullRequest:
    return PullRequest(
        **OF_TRANSFER,
        deadline_ms=100_000,
        num_units=NUM_UNITS,
        wanted_keys=b"".join(map(key_of, wanted)),
        pages=(20, 21, 22, 23),
        generations=(1,) * NUM_UNITS,
    )


def wrote(first: int = 0, stop: int = 2, **fields: int) -> Wrote:
    return Wrote(**{**OF_TRANSFER, **fields}, first=first, stop=stop)


def commit(first: int = 0, digests: bytes = DIGESTS, **fields: int) -> Commit:
    return Commit(**{**OF_TRANSFER, **fields}, first=first, stop=NUM_UNITS, digests=digests)


def sent(actions: Sequence[Action]) -> list[AnyMessage]:
    return [action for action in actions if isinstance(action, TransferMessage)]


def finished(actions: Sequence[Action]) -> list[HandoffOutcome]:
    return [action.outcome for action in actions if isinstance(action, TransferEnded)]


def pushes(actions: Sequence[Action]) -> list[tuple[int, int, int]]:
    """(shard, first unit, end) of each."""
    assert all(isinstance(action, PushUnits) for action in actions)
    return [(each.shard, each.first, each.stop) for each in actions if isinstance(each, PushUnits)]


def closing(shard: int = 0, *, is_confirmed: bool) -> CloseShard:
    return CloseShard(transfer=ID, shard=shard, is_confirmed=is_confirmed)


class Side:
    """One side of a transfer with one unit a page, and the ledger of its host.

    Each shard has a rank of its own.
    """

    handoff: SourceHandoff | DestinationHandoff

    def __init__(self, num_shards: int, num_layer_groups: int = 1) -> None:
        self.num_shards = num_shards
        self.clock = ManualClock()
        self.pool = PagePool(NUM_PAGES, 16)
        self.context = handoff_context(self.pool, self.clock, range(num_shards), num_layer_groups)

    def hear(self, kind: Callable[..., ShardEvent], *shards: int, **fields: Any) -> list[Action]:
        """Have the hand-off process an event of each of these shards; none: of all shards."""
        events = [kind(transfer=ID, shard=shard, **fields) for shard in shards or range(self.num_shards)]
        return [action for event in events for action in self.handoff.on_shard_event(event)]


class Source(Side):
    def __init__(self, request: TransferRequest | None = None, num_shards: int = 1) -> None:
        request = request or grant()
        super().__init__(num_shards, request.num_layer_groups)
        pin = NumberedPages(self.pool)
        self.handoff: SourceHandoff = SourceHandoff(request, self.context, pin)
        self.pages = self.pool.allocate(NUM_UNITS, "sequence")

    def reached(self) -> list[Action]:
        return self.hear(ShardReached, transport="")

    def pushed(self, shard: int, first: int, stop: int, digests: bytes) -> list[Action]:
        return self.hear(UnitsHashed, shard, first=first, stop=stop, digests=digests)

    def to(self, state: SourceState) -> "Source":
        source = self.handoff
        if state is not SourceState.OPENING:
            self.reached()
            source.offer(self.pages, NUM_UNITS)
        if state is SourceState.COMMITTING:
            self.pushed(0, 0, NUM_UNITS, DIGESTS)
        if state is SourceState.STOPPING:
            source.abort("cancelled")
        assert source.state is state
        return self


class Destination(Side):
    def __init__(self, num_shards: int = 1) -> None:
        super().__init__(num_shards)
        unpaged = msgspec.structs.replace(grant(), pages=(), generations=())
        self.handoff: DestinationHandoff = DestinationHandoff(unpaged, self.context, "sequence")

    def verified(self, shard: int, corrupt_units: tuple[int, ...]) -> list[Action]:
        return self.hear(ShardVerified, shard, corrupt_units=corrupt_units)

    def to(self, state: DestinationState) -> "Destination":
        destination = self.handoff
        destination.begin()
        self.hear(ShardOpened)
        if state is DestinationState.VERIFYING:
            destination.receive(commit())
        if state is DestinationState.CLOSING:
            destination.abort("cancelled")
        assert destination.state is state
        return self


def in_state(state: State) -> Side:
    return Source().to(state) if isinstance(state, SourceState) else Destination().to(state)


LAYOUT = a_layout(page_size=1, num_layers=1, num_kv_heads=1, head_dim=1)
MESSAGES: list[AnyMessage] = [
    EndpointHello(protocol=1, incarnation=ID, fingerprint="f", layout=LAYOUT),
    grant(),
    pull(),
    wrote(),
    commit(),
    VERIFIED,
    Corrupt(**OF_TRANSFER, units=(0,)),
    EXTEND,
    Abort(**OF_TRANSFER, reason="no more"),
    RELEASED,
]
FROM_A_SOURCE = {"Wrote", "Commit", "Extend", "Released", "Abort"}
LEGAL: dict[State, set[str]] = {
    SourceState.OPENING: {"Extend", "Abort", "Released"},
    SourceState.STREAMING: {"Extend", "Abort", "Released"},
    SourceState.COMMITTING: {"Verified", "Corrupt", "Extend", "Abort", "Released"},
    SourceState.STOPPING: {type(message).__name__ for message in MESSAGES},
    DestinationState.RECEIVING: FROM_A_SOURCE,
    DestinationState.VERIFYING: {"Extend", "Released", "Abort"},
    DestinationState.CLOSING: FROM_A_SOURCE,
}


@pytest.mark.parametrize("state", LEGAL, ids=str)
@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_table_of_legal_messages(state: State, message: AnyMessage) -> None:
    handoff = in_state(state).handoff
    has_ended, name = handoff.has_ended, type(message).__name__
    if name not in LEGAL[state]:
        with pytest.raises(ProtocolError, match=f"unexpected {name}"):
            handoff.receive(message)
        assert handoff.has_ended == has_ended
        return
    assert not (finished(handoff.receive(message)) and has_ended)


@pytest.mark.parametrize("state", [SourceState.COMMITTING, DestinationState.RECEIVING], ids=str)
def test_messages_of_the_peer_renew_the_lease_up_to_the_transfers_time_limit(state: State) -> None:
    side = in_state(state)
    for _ in range(19):
        side.clock.advance(5)
        assert sent(side.handoff.tick()) == [EXTEND]
        assert side.handoff.tick() == []
        side.handoff.receive(EXTEND)
    assert not side.handoff.has_ended
    side.clock.advance(5)
    assert len(finished(side.handoff.tick())) == 1


# The source.


def test_last_push_of_a_shard_is_its_commit() -> None:
    source = Source()
    assert source.handoff.offer(source.pages[:1], 1) == []  # no transport is open
    assert pushes(source.reached()) == [(0, 0, 1)]
    assert pushes(source.handoff.offer(source.pages[1:], NUM_UNITS)) == [(0, 1, NUM_UNITS)]
    assert sent(source.pushed(0, 1, NUM_UNITS, DIGESTS[8:])) == [wrote(1, NUM_UNITS)]
    committed = Commit(**OF_TRANSFER, first=0, stop=1, digests=DIGESTS)
    assert sent(source.pushed(0, 0, 1, DIGESTS[:8])) == [committed]
    assert finished(source.handoff.receive(VERIFIED)) == [HandoffOutcome.HANDED_OVER]


@pytest.mark.parametrize(
    ("num_pages", "num_units", "group"),
    [(0, 4, 2), (0, 4, -1), (0, 1, 1), (0, 5, 0), (0, 3, None), (0, 5, None), (1, 6, None)],
)
def test_impossible_offer_is_the_callers_mistake(num_pages: int, num_units: int, group: int | None) -> None:
    source = Source(grant(num_groups=2), num_shards=2)
    source.handoff.offer(source.pages[:2], 2)
    source.handoff.offer(source.pages[2:], 4, 0)
    with pytest.raises(ValueError, match=f"{num_units} units.* offered after"):
        source.handoff.offer(source.pages[:num_pages], num_units, group)


def test_corrupt_units_are_written_again_once_and_as_ranges() -> None:
    source = Source().to(SourceState.COMMITTING)
    corrupt = Corrupt(**OF_TRANSFER, units=(0, 2, 3))
    assert pushes(source.handoff.receive(corrupt)) == [(0, 0, 1), (0, 2, 4)]
    source.pushed(0, 2, 4, DIGESTS[16:])
    committed = Commit(**OF_TRANSFER, first=0, stop=1, digests=b"newwords" + DIGESTS[8:])
    assert sent(source.pushed(0, 0, 1, b"newwords")) == [committed]
    with pytest.raises(ProtocolError, match="unexpected Corrupt"):
        source.handoff.receive(Corrupt(**OF_TRANSFER, units=(0,)))


def test_wrong_number_of_digests_is_the_callers_mistake() -> None:
    with pytest.raises(ValueError, match="7 bytes of digests"):
        Source().to(SourceState.STREAMING).pushed(0, 0, NUM_UNITS, b"digests")


def holder(request: PullRequest) -> Source:
    """A source whose first pages are in the prefix cache."""
    side = Source(request)
    for page in side.pages:
        side.pool.mark_known(page)
    side.pool.release(side.pages, "sequence")
    return side


@pytest.mark.parametrize("wanted", [(0, 1, 2, 6), (0, 1, 2, 2)])
def test_wrong_hint_is_refused_and_pins_nothing(wanted: tuple[int, ...]) -> None:
    side = holder(pull(wanted))
    actions = side.reached()
    refused, released = sent(actions)
    assert isinstance(refused, Abort) and "not cached here" in refused.reason and released == RELEASED
    assert finished(actions) == [HandoffOutcome.FAILED] and side.handoff.is_closed
    assert side.pool.num_available == NUM_PAGES


def test_page_that_is_used_again_before_the_pull_is_refused() -> None:
    side = holder(pull())
    side.pool.forget(2)
    (page,) = side.pool.allocate(1, "another prompt")
    side.pool.mark_known(page)
    side.pool.release([page], "another prompt")
    refused, released = sent(side.reached())
    assert isinstance(refused, Abort) and "not cached here" in refused.reason and released == RELEASED


def test_pulled_page_is_held_until_it_is_written() -> None:
    side = holder(pull())
    side.reached()
    assert side.pool.num_available == NUM_PAGES - NUM_UNITS
    side.handoff.receive(Abort(**OF_TRANSFER, reason="cancelled"))
    assert side.pool.num_available == NUM_PAGES - NUM_UNITS  # the push goes on


# The destination.


def test_corrupt_units_are_requested_again_under_a_new_hold_and_once() -> None:
    side = Destination(num_shards=2).to(DestinationState.RECEIVING)
    destination = side.handoff
    for shard in (0, 1):
        destination.receive(commit(shard=shard))
        side.hear(WriterStopped, shard)
    assert side.verified(0, ()) == []
    corrupt = Corrupt(**OF_TRANSFER, units=(1, 3), shard=1)
    (opened,) = side.verified(1, (1, 3))
    assert isinstance(opened, OpenShard) and opened.shard == 1
    assert side.hear(ShardOpened, 1) == [corrupt]
    assert side.pool.owners(destination.pages[0]) == {("receive", ID), ("writer", ID, 1)}
    with pytest.raises(ProtocolError):
        destination.receive(commit(shard=0))
    destination.receive(commit(shard=1))
    side.hear(WriterStopped, 1)
    (aborted, end) = side.verified(1, (3,))
    assert aborted == Abort(**OF_TRANSFER, reason="corrupt twice")
    assert isinstance(end, TransferEnded)
    assert (end.outcome, end.reason) == (HandoffOutcome.RECOMPUTE, "corrupt twice")


def test_time_never_ends_a_writers_hold() -> None:
    side = Destination().to(DestinationState.RECEIVING)
    side.clock.advance(31)
    assert side.handoff.tick()[-1] == closing(is_confirmed=False)
    for _ in range(3):
        side.clock.advance(10_000)
        assert side.pool.count(PageState.QUARANTINED) == NUM_UNITS
        assert sent(side.handoff.tick()) == [Abort(**OF_TRANSFER, reason="not released yet")]
    assert side.handoff.receive(RELEASED) == [closing(is_confirmed=True)]
    side.hear(WriterStopped)
    assert side.pool.num_free == NUM_PAGES and side.handoff.tick() == []


@pytest.mark.parametrize(
    "message",
    [
        wrote(stop=NUM_UNITS + 1),
        wrote(shard=1),
        commit(digests=DIGESTS[8:]),
        commit(shard=1),
    ],
)
def test_message_about_units_that_the_transfer_does_not_have_is_illegal(message: AnyMessage) -> None:
    side = Destination().to(DestinationState.RECEIVING)
    with pytest.raises(ProtocolError):
        side.handoff.receive(message)
    assert side.handoff.state is DestinationState.RECEIVING


# Both.


UNKNOWN = Abort(**OF_TRANSFER, reason="unknown transfer")


@pytest.mark.parametrize(
    ("message", "answer"),
    [
        # To a destination: this process writes nothing for the transfer.
        (Corrupt(**OF_TRANSFER, units=(0,)), RELEASED),
        (Abort(**OF_TRANSFER, reason="expired"), RELEASED),
        # To a peer that continues: stop.
        (wrote(), UNKNOWN),
        (commit(), UNKNOWN),
        (EXTEND, UNKNOWN),
        # Two processes would answer each other without end.
        (RELEASED, None),
        (VERIFIED, None),
    ],
)
def test_message_of_an_unknown_transfer_is_answered_by_its_end(
    message: AnyMessage, answer: AnyMessage | None
) -> None:
    assert answer_to_unknown(message) == answer


@pytest.mark.parametrize(
    ("num_units", "num_shards"),
    [(0, 1), (MAX_PAGES + 1, 1), (1, MAX_SHARDS + 1), (MAX_DIGESTS // MAX_SHARDS + 1, MAX_SHARDS)],
)
def test_request_that_no_peer_accepts_is_the_callers_mistake(num_units: int, num_shards: int) -> None:
    largest = msgspec.structs.replace(grant(), num_units=MAX_DIGESTS // MAX_SHARDS)
    check_request(largest, MAX_SHARDS, MAX_PAGES)
    with pytest.raises(ValueError, match="transfer"):
        check_request(msgspec.structs.replace(grant(), num_units=num_units), num_shards, 1)


@pytest.mark.parametrize(("num_wanted", "num_pages"), [(1, 2**15 + 1), (2**15 + 1, 1)])
def test_impossible_pull_is_the_callers_mistake(num_wanted: int, num_pages: int) -> None:
    with pytest.raises(ValueError, match="page"):
        check_request(pull((0,) * num_wanted), 1, num_pages)
