"""Both ends of a transfer and the ranks that carry out its parts: who is told what, and when."""

from typing import cast

import pytest

from baton.clock import ManualClock
from baton.engine.cache.page_pool import PagePool
from baton.kvtransfer.links import Link
from baton.kvtransfer.protocol.destination import DestinationHandoff, TransferSize
from baton.kvtransfer.protocol.handoff import (
    Finished,
    HandoffContext,
    HandoffOutcome,
    Timing,
)
from baton.kvtransfer.protocol.messages import (
    Abort,
    AnyMessage,
    Grant,
    PeerRank,
    PullRequest,
    RankListenerAddresses,
    Released,
    TransferRequest,
    Wrote,
)
from baton.kvtransfer.protocol.source import SourceHandoff
from baton.kvtransfer.ranks.executor import Executor
from baton.kvtransfer.ranks.messages import (
    ClosePart,
    Command,
    ForgetPart,
    HashUnits,
    PartHashed,
    PartOpened,
    PartReached,
    PartStopped,
    PartWritten,
    PushPart,
    ReachPeer,
    Route,
    StopPart,
    WriterDied,
    WriterStopped,
)
from baton.kvtransfer.transfers import Incoming, Outgoing
from baton.kvtransfer.transports.base import PieceOutcome
from baton.pages import PageLayout

ID, EPOCH = b"t" * 16, 5
NUM_PAGES = 6
NUM_UNITS = 2
LAYOUT = PageLayout(tp_size=2, page_size=16, num_layers=2, num_kv_heads=2, head_dim=8, dtype="bfloat16")
LISTENERS = RankListenerAddresses(incarnation=b"i" * 16, host="h", device="cpu")
GRANT = Grant(
    transfer=ID,
    epoch=EPOCH,
    deadline_ms=60_000,
    num_units=NUM_UNITS,
    num_parts=2,
    pages=(4, 5),
    generations=(1, 1),
)


class SilentExecutor:
    """Records its commands, and answers nothing."""

    def __init__(self) -> None:
        self.told: list[Command] = []

    def perform(self, command: Command) -> None:
        self.told.append(command)

    def kinds(self) -> list[str]:
        """The kinds of the commands since the last call."""
        told, self.told = self.told, []
        return [type(command).__name__ for command in told]


class RecordingLink:
    """Records the messages that are sent over the link."""

    number = 3

    def __init__(self) -> None:
        self.sent: list[AnyMessage] = []

    def send(self, message: AnyMessage) -> None:
        self.sent.append(message)

    def digest_key(self, transfer: bytes) -> bytes:
        return bytes(32)

    def kinds(self) -> list[str]:
        sent, self.sent = self.sent, []
        return [type(message).__name__ for message in sent]


class Bench:
    """A transfer of two parts, one for each rank of ours."""

    def __init__(self) -> None:
        self.pool, self.clock = PagePool(NUM_PAGES, 16), ManualClock()
        self.timeouts = HandoffContext(self.pool, self.clock, Timing(lease_s=30.0, heartbeat_s=5.0), 1, 1)
        self.executors = [SilentExecutor(), SilentExecutor()]
        self.link = RecordingLink()
        self.size = TransferSize(ID, NUM_UNITS, num_parts=2, deadline_s=60.0)
        self.finished: list[HandoffOutcome] = []

    def routes(self) -> list[Route]:
        peer = PeerRank(host="127.0.0.1", layout=LAYOUT, rank=0, listeners=LISTENERS)
        return [
            Route(part, cast(Executor, executor), peer, (0, 2))
            for part, executor in enumerate(self.executors)
        ]

    def finish(self, _: object, finished: Finished) -> None:
        self.finished.append(finished.outcome)

    def incoming(self) -> Incoming:
        handoff = DestinationHandoff(self.size, EPOCH, self.timeouts)
        incoming = Incoming(handoff, cast(Link, self.link), self.routes(), NUM_UNITS, self.finish)
        incoming.perform(handoff.grant("sequence"))
        return incoming

    def outgoing(self, request: TransferRequest = GRANT) -> Outgoing:
        handoff = SourceHandoff(request, self.timeouts)
        return Outgoing(
            handoff,
            cast(Link, self.link),
            self.routes(),
            NUM_UNITS,
            self.clock,
            self.finish,
        )

    def streaming(self) -> Outgoing:
        """All of it is computed, and on its way."""
        outgoing = self.outgoing()
        outgoing.start(GRANT, outgoing.handoff.opened)
        for part in range(2):
            outgoing.on_part_event(PartReached(transfer=ID, part=part, transport="shm"))
        pages = self.pool.allocate(NUM_UNITS, "prompt")
        outgoing.offer(pages, NUM_UNITS, None)
        self.pool.release(pages, "prompt")
        return outgoing


@pytest.fixture
def bench() -> Bench:
    return Bench()


def told(bench: Bench) -> list[list[str]]:
    return [executor.kinds() for executor in bench.executors]


# Where it arrives.


def test_the_source_hears_of_its_grant_when_every_rank_has_opened(bench: Bench) -> None:
    incoming = bench.incoming()
    assert told(bench) == [["OpenPart"], ["OpenPart"]]
    incoming.on_part_event(PartOpened(transfer=ID, part=1))
    assert bench.link.kinds() == []
    incoming.on_part_event(PartOpened(transfer=ID, part=0))
    assert bench.link.kinds() == ["Grant"]


def test_a_transfer_that_ends_before_every_rank_has_opened_is_told_in_order(bench: Bench) -> None:
    incoming = bench.incoming()
    incoming.perform(incoming.handoff.abort("the test"))
    assert bench.link.kinds() == ["Grant", "Abort"]
    assert bench.finished == [HandoffOutcome.CANCELLED]
    assert told(bench) == [["OpenPart", "ClosePart"], ["OpenPart", "ClosePart"]]


def test_each_rank_hashes_its_own_part(bench: Bench) -> None:
    incoming = bench.incoming()
    bench.executors[1].kinds()
    incoming.receive(Wrote(transfer=ID, epoch=EPOCH, part=1, first=0, stop=1))
    incoming.receive(Wrote(transfer=ID, epoch=EPOCH + 1, part=1, first=0, stop=9))  # stale
    assert bench.executors[1].told == [HashUnits(transfer=ID, part=1, first=0, stop=1)]
    assert bench.executors[0].kinds() == ["OpenPart"]


def test_a_lost_rank_ends_it_and_its_death_frees_its_part(bench: Bench) -> None:
    incoming = bench.incoming()
    incoming.on_rank_lost(cast(Executor, bench.executors[1]), "rank 1 is lost", is_dead=False)
    assert bench.finished == [HandoffOutcome.RECOMPUTE]
    incoming.on_part_event(WriterStopped(transfer=ID, part=0))
    assert (incoming.handoff.is_closed, bench.pool.num_free) == (False, NUM_PAGES - NUM_UNITS)
    incoming.on_rank_lost(cast(Executor, bench.executors[1]), "rank 1 is lost", is_dead=True)
    assert (incoming.handoff.is_closed, bench.pool.num_free) == (True, NUM_PAGES)
    incoming.forget()
    assert [kinds[-1] for kinds in told(bench)] == ["ForgetPart", "ForgetPart"]


def test_a_lost_rank_without_a_part_of_it_changes_nothing(bench: Bench) -> None:
    incoming, outgoing = bench.incoming(), Bench().streaming()
    for end in (incoming, outgoing):
        end.on_rank_lost(cast(Executor, SilentExecutor()), "rank 7 is lost", is_dead=True)
        assert end.handoff.outcome is None


def test_death_of_the_writer_ends_the_transfer(bench: Bench) -> None:
    incoming = bench.incoming()
    incoming.on_part_event(WriterDied(transfer=ID, part=0))
    assert bench.finished == [HandoffOutcome.RECOMPUTE]
    assert [each for each in bench.executors[1].told if isinstance(each, ClosePart)]


# Where it leaves.


def test_pages_leave_when_every_rank_has_opened_its_transports(bench: Bench) -> None:
    outgoing = bench.outgoing()
    outgoing.start(GRANT, outgoing.handoff.opened)
    outgoing.offer(bench.pool.allocate(1, "prompt"), 1, None)
    assert told(bench) == [["ReachPeer"], ["ReachPeer"]]
    outgoing.on_part_event(PartReached(transfer=ID, part=1, transport=""))
    assert told(bench) == [[], []]
    outgoing.on_part_event(PartReached(transfer=ID, part=0, transport="tcp"))
    assert told(bench) == [["PushPart"], ["PushPart"]]


def test_every_rank_is_told_of_the_grant_and_of_each_page_once(bench: Bench) -> None:
    outgoing = bench.outgoing()
    outgoing.start(GRANT, outgoing.handoff.opened)
    first, second = bench.pool.allocate(2, "prompt")
    outgoing.offer([first], 1, None)
    for part in range(2):
        outgoing.on_part_event(PartReached(transfer=ID, part=part, transport="shm"))
    outgoing.offer([second], 2, None)
    for executor in bench.executors:
        assert [type(each) for each in executor.told] == [ReachPeer, PushPart, PushPart]
        pushed = [each for each in executor.told if isinstance(each, PushPart)]
        assert [(each.first, each.stop, each.more_pages) for each in pushed] == [
            (0, 1, (first,)),
            (1, 2, (second,)),
        ]


@pytest.mark.parametrize("is_pull", [False, True])
def test_pulled_pages_are_bulk_and_prompts_are_not(bench: Bench, is_pull: bool) -> None:
    pull = PullRequest(
        transfer=ID,
        epoch=EPOCH,
        deadline_ms=60_000,
        num_units=NUM_UNITS,
        holder=b"h" * 16,
        wanted_pages=(0, 1),
        wanted_generations=(1, 1),
        wanted_keys=b"k" * 32,
        pages=(4, 5),
        generations=(1, 1),
        num_parts=2,
    )
    request = pull if is_pull else GRANT
    bench.outgoing(request).start(request, lambda: [])
    for executor in bench.executors:
        (reach,) = executor.told
        assert isinstance(reach, ReachPeer)
        assert (reach.is_bulk, reach.pages) == (is_pull, (4, 5))


def test_released_is_sent_when_every_rank_has_stopped(bench: Bench) -> None:
    outgoing = bench.streaming()
    bench.link.kinds()
    outgoing.receive(Abort(transfer=ID, epoch=EPOCH, reason="the test"))
    assert [kinds[-1] for kinds in told(bench)] == ["StopPart", "StopPart"]
    outgoing.on_part_event(PartStopped(transfer=ID, part=0))
    outgoing.on_part_event(PartStopped(transfer=ID, part=0))
    assert bench.link.kinds() == [] and bench.pool.num_free == NUM_PAGES - NUM_UNITS
    outgoing.on_part_event(PartStopped(transfer=ID, part=1))
    assert bench.link.sent == [Released(transfer=ID, epoch=EPOCH, part=part) for part in range(2)]
    assert outgoing.handoff.is_closed and bench.pool.num_free == NUM_PAGES


def test_a_silent_rank_may_write_until_it_is_dead(bench: Bench) -> None:
    outgoing = bench.streaming()
    executor = cast(Executor, bench.executors[1])
    bench.link.kinds()
    outgoing.on_rank_lost(executor, "rank 1 is lost", is_dead=False)
    outgoing.on_part_event(PartStopped(transfer=ID, part=0))
    assert bench.finished == [HandoffOutcome.FAILED] and bench.link.kinds() == ["Abort"]
    assert [outgoing.handoff.is_closed] == [False]
    outgoing.on_rank_lost(executor, "rank 1 is lost", is_dead=True)
    assert outgoing.handoff.is_closed and bench.link.kinds() == ["Released", "Released"]


def test_late_events_have_no_effect(bench: Bench) -> None:
    outgoing = bench.streaming()
    outgoing.perform(outgoing.handoff.abort("the test"))
    times = outgoing.timeline.times()
    written = PartWritten(
        transfer=ID,
        part=0,
        first=0,
        stop=NUM_UNITS,
        outcome=PieceOutcome(is_done=True, num_bytes=10, num_messages=1),
    )
    bench.clock.advance(1.0)
    outgoing.on_part_event(written)
    outgoing.on_part_event(
        PartHashed(transfer=ID, part=0, first=0, stop=NUM_UNITS, digests=bytes(8 * NUM_UNITS))
    )
    for part in range(2):
        outgoing.on_part_event(PartStopped(transfer=ID, part=part))
    assert outgoing.timeline.times() == times and bench.finished == [HandoffOutcome.CANCELLED]
    assert bench.pool.num_free == NUM_PAGES
    outgoing.forget()
    kinds = [type(each) for each in bench.executors[0].told]
    assert kinds == [ReachPeer, PushPart, StopPart, ForgetPart]
