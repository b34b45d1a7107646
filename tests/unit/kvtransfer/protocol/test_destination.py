import pytest

from baton.clock import ManualClock
from baton.engine.cache.page_pool import PagePool, PageState
from baton.errors import ProtocolError
from baton.kvtransfer.protocol.destination import DestinationHandoff, DestinationState
from baton.kvtransfer.protocol.handoff import (
    Action,
    CloseReceive,
    Finished,
    HandoffOutcome,
    HandoffTimeouts,
    OpenReceive,
    Send,
    Timing,
    TransferSize,
    Verify,
)
from baton.kvtransfer.protocol.messages import (
    Abort,
    AnyMessage,
    Commit,
    Corrupt,
    EndpointHello,
    Extend,
    Grant,
    PullRefused,
    PullRequest,
    Released,
    Verified,
    Wrote,
)
from baton.pages import PageLayout
from tests.numbered_pages import key_of, wanted_pages

ID, EPOCH, NUM_UNITS, NUM_PAGES = b"t" * 16, 7, 4, 8
HOLDER = b"h" * 16
DIGESTS = bytes(8 * NUM_UNITS)
EXTEND, WROTE = Extend(transfer=ID, epoch=EPOCH), Wrote(transfer=ID, epoch=EPOCH, first=0, stop=2)


def commit(part: int = 0) -> Commit:
    return Commit(transfer=ID, epoch=EPOCH, digests=DIGESTS, part=part)


def released(part: int = 0) -> Released:
    return Released(transfer=ID, epoch=EPOCH, part=part)


class Bench:
    """A destination with one unit a page."""

    def __init__(self, num_parts: int = 1) -> None:
        self.clock = ManualClock()
        self.pool = PagePool(NUM_PAGES, 16)
        timeouts = HandoffTimeouts(self.pool, self.clock, Timing(lease_s=30, heartbeat_s=5), 1, 1)
        size = TransferSize(ID, NUM_UNITS, num_parts, deadline_ms=100_000)
        self.destination = DestinationHandoff(size, EPOCH, timeouts)

    def granted(self) -> "Bench":
        self.destination.grant("sequence")
        return self

    def receiving(self) -> "Bench":
        self.granted().destination.receive(EXTEND)
        return self

    def verifying(self) -> "Bench":
        self.receiving().destination.receive(commit())
        return self

    def in_state(self, state: DestinationState) -> "Bench":
        if state is DestinationState.ASKING:
            self.destination.pull("sequence", HOLDER, wanted_pages((page, 1) for page in range(NUM_UNITS)))
        elif state is DestinationState.RECEIVING:
            self.receiving()
        elif state is DestinationState.VERIFYING:
            self.verifying()
        elif state is DestinationState.CLOSING:
            self.receiving().destination.abort("cancelled")
        else:
            self.verifying().destination.writer_stopped(0)
            self.destination.verified(0, ())
        assert self.destination.state is state
        return self


def sent(actions: list[Action]) -> list[AnyMessage]:
    return [action.message for action in actions if isinstance(action, Send)]


def finished(actions: list[Action]) -> list[HandoffOutcome]:
    return [action.outcome for action in actions if isinstance(action, Finished)]


def every_message() -> list[AnyMessage]:
    layout = PageLayout(tp_size=1, page_size=1, num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32")
    grant = Grant(transfer=ID, epoch=EPOCH, deadline_ms=1, num_units=1, pages=(0,), generations=(1,))
    return [
        EndpointHello(protocol=1, incarnation=HOLDER, fingerprint="f", layout=layout),
        grant,
        PullRequest(
            transfer=ID,
            epoch=EPOCH,
            deadline_ms=1,
            num_units=1,
            holder=HOLDER,
            wanted_pages=(0,),
            wanted_generations=(1,),
            wanted_keys=bytes(16),
            pages=(0,),
            generations=(1,),
        ),
        PullRefused(transfer=ID, epoch=EPOCH, reason="gone"),
        WROTE,
        commit(),
        Verified(transfer=ID, epoch=EPOCH),
        Corrupt(transfer=ID, epoch=EPOCH, units=(0,)),
        EXTEND,
        Abort(transfer=ID, epoch=EPOCH, reason="no more"),
        released(),
    ]


def test_pages_are_granted_with_two_owners_each_and_adopted_when_they_are_right() -> None:
    bench = Bench()
    destination = bench.destination
    actions = destination.grant("sequence", ("shm", "tcp"))
    pages = tuple(destination.pages)
    grant = Grant(
        transfer=ID,
        epoch=EPOCH,
        deadline_ms=100_000,
        num_units=NUM_UNITS,
        pages=pages,
        generations=(1,) * NUM_UNITS,
        transports=("shm", "tcp"),
    )
    assert actions == [OpenReceive(0), Send(grant)]
    assert bench.pool.owners(pages[0]) == {("receive", ID), ("writer", ID, 0)}
    assert destination.receive(WROTE) == []
    assert destination.receive(commit()) == [CloseReceive(0, is_confirmed=True)]
    assert destination.writer_stopped(0) == [Verify(0, DIGESTS)]
    assert destination.verified(0, ()) == [
        Finished(HandoffOutcome.ADOPTED, ""),
        Send(Verified(transfer=ID, epoch=EPOCH)),
    ]
    assert bench.pool.owners(pages[0]) == {"sequence"}


def test_nothing_is_granted_without_free_pages() -> None:
    bench = Bench()
    bench.pool.allocate(NUM_PAGES - NUM_UNITS + 1, "others")
    actions = bench.destination.grant("sequence")
    assert not sent(actions)
    assert finished(actions) == [HandoffOutcome.RECOMPUTE]
    assert bench.destination.receive(Abort(transfer=ID, epoch=0, reason="crossed")) == []


def test_pull_brings_its_own_grant() -> None:
    bench = Bench()
    wanted = wanted_pages([(5, 2), (6, 3), (1, 1), (0, 9)])
    (opened, send) = bench.destination.pull("sequence", HOLDER, wanted)
    assert opened == OpenReceive(0)
    assert isinstance(send, Send) and isinstance(send.message, PullRequest)
    assert send.message.wanted_pages == (5, 6, 1, 0) and send.message.wanted_generations == (2, 3, 1, 9)
    assert send.message.wanted_keys == b"".join(map(key_of, (5, 6, 1, 0)))
    assert send.message.pages == tuple(bench.destination.pages)


def test_refused_pull_is_recomputed_and_confirms_that_nothing_was_written() -> None:
    bench = Bench().in_state(DestinationState.ASKING)
    actions = bench.destination.receive(PullRefused(transfer=ID, epoch=EPOCH, reason="gone"))
    assert finished(actions) == [HandoffOutcome.REFUSED]
    assert CloseReceive(0, is_confirmed=True) in actions
    bench.destination.writer_stopped(0)
    assert bench.pool.num_free == NUM_PAGES


def test_pull_is_under_way_once_something_came() -> None:
    bench = Bench().in_state(DestinationState.ASKING)
    bench.destination.receive(EXTEND)
    with pytest.raises(ProtocolError):
        bench.destination.receive(PullRefused(transfer=ID, epoch=EPOCH, reason="gone"))


def test_every_part_must_have_let_go_and_be_right() -> None:
    bench = Bench(num_parts=2).receiving()
    destination = bench.destination
    destination.receive(commit(1))
    destination.writer_stopped(1)
    assert destination.verified(1, ()) == []
    destination.receive(commit(0))
    assert destination.state is DestinationState.VERIFYING
    destination.writer_stopped(0)
    assert finished(destination.verified(0, ())) == [HandoffOutcome.ADOPTED]


def test_damaged_units_are_asked_for_again_under_a_new_hold() -> None:
    bench = Bench(num_parts=2).receiving()
    destination = bench.destination
    for part in (0, 1):
        destination.receive(commit(part))
        destination.writer_stopped(part)
    assert destination.verified(0, ()) == []
    assert destination.verified(1, (1, 3)) == [
        OpenReceive(1),
        Send(Corrupt(transfer=ID, epoch=EPOCH, units=(1, 3), part=1)),
    ]
    assert bench.pool.owners(destination.pages[0]) == {("receive", ID), ("writer", ID, 1)}
    with pytest.raises(ProtocolError):
        destination.receive(commit(0))
    assert destination.receive(commit(1)) == [CloseReceive(1, is_confirmed=True)]
    destination.writer_stopped(1)
    assert finished(destination.verified(1, ())) == [HandoffOutcome.ADOPTED]


def test_damaged_twice_is_recomputed() -> None:
    bench = Bench().verifying()
    destination = bench.destination
    destination.writer_stopped(0)
    destination.verified(0, (0,))
    destination.receive(commit())
    destination.writer_stopped(0)
    actions = destination.verified(0, (2,))
    assert actions == [
        Send(Abort(transfer=ID, epoch=EPOCH, reason="corrupt twice")),
        Finished(HandoffOutcome.RECOMPUTE, "corrupt twice"),
    ]
    assert destination.state is DestinationState.CLOSED
    assert bench.pool.num_free == NUM_PAGES


def test_time_never_ends_a_writers_hold() -> None:
    bench = Bench().receiving()
    bench.clock.advance(31)
    bench.pool.expire(bench.clock.now_s())
    actions = bench.destination.tick()
    assert finished(actions) == [HandoffOutcome.RECOMPUTE]
    assert actions[-1] == CloseReceive(0, is_confirmed=False)
    for _ in range(3):
        bench.clock.advance(10_000)
        bench.pool.expire(bench.clock.now_s())
        assert bench.pool.count(PageState.QUARANTINED) == NUM_UNITS
        assert sent(bench.destination.tick()) == [Abort(transfer=ID, epoch=EPOCH, reason="not released yet")]
    assert bench.destination.receive(released()) == [CloseReceive(0, is_confirmed=True)]
    bench.destination.writer_stopped(0)
    assert bench.pool.num_free == NUM_PAGES
    assert bench.destination.tick() == []


@pytest.mark.parametrize("message", [EXTEND, WROTE, commit()], ids=lambda message: type(message).__name__)
def test_lease_that_the_ledger_ended_is_noticed(message: AnyMessage) -> None:
    bench = Bench().receiving()
    bench.clock.advance(30)
    bench.pool.expire(bench.clock.now_s())
    assert finished(bench.destination.receive(message)) == [HandoffOutcome.RECOMPUTE]


def test_pages_of_a_lease_that_ended_are_not_adopted() -> None:
    bench = Bench().verifying()
    bench.destination.writer_stopped(0)
    bench.clock.advance(30)
    bench.pool.expire(bench.clock.now_s())
    assert finished(bench.destination.verified(0, ())) == [HandoffOutcome.RECOMPUTE]
    assert bench.pool.num_free == NUM_PAGES


def test_word_of_the_source_extends_the_lease() -> None:
    bench = Bench().receiving()
    for _ in range(8):
        bench.clock.advance(10)
        bench.pool.expire(bench.clock.now_s())
        assert sent(bench.destination.tick()) == [EXTEND]
        bench.destination.receive(EXTEND)
    bench.clock.advance(20)
    assert finished(bench.destination.tick()) == [HandoffOutcome.RECOMPUTE]  # its whole time is over


def test_writer_that_dies_before_it_commits_ends_it() -> None:
    bench = Bench().receiving()
    actions = bench.destination.writer_stopped(0)
    assert finished(actions) == [HandoffOutcome.RECOMPUTE]
    assert bench.destination.state is DestinationState.CLOSED
    assert bench.pool.num_free == NUM_PAGES


def test_source_that_saw_no_grant_has_never_written() -> None:
    bench = Bench().receiving()
    actions = bench.destination.receive(Abort(transfer=ID, epoch=0, reason="expired"))
    assert finished(actions) == [HandoffOutcome.REFUSED]
    assert CloseReceive(0, is_confirmed=True) in actions


ILLEGAL = [
    Wrote(transfer=ID, epoch=EPOCH, first=0, stop=NUM_UNITS + 1),
    Wrote(transfer=ID, epoch=EPOCH, first=0, stop=1, part=1),
    Commit(transfer=ID, epoch=EPOCH, digests=DIGESTS[8:]),
    Commit(transfer=ID, epoch=EPOCH, digests=DIGESTS, part=1),
    released(1),
]


@pytest.mark.parametrize("message", ILLEGAL)
def test_what_the_transfer_does_not_have_is_illegal(message: AnyMessage) -> None:
    bench = Bench().receiving()
    with pytest.raises(ProtocolError):
        bench.destination.receive(message)
    assert bench.destination.state is DestinationState.RECEIVING


LEGAL = {
    DestinationState.ASKING: {"PullRefused", "Wrote", "Commit", "Extend", "Released", "Abort"},
    DestinationState.RECEIVING: {"Wrote", "Commit", "Extend", "Released", "Abort"},
    DestinationState.VERIFYING: {"Extend", "Released", "Abort"},
}
FROM_A_SOURCE = {"PullRefused", "Wrote", "Commit", "Extend", "Released", "Abort"}


@pytest.mark.parametrize("state", DestinationState)
@pytest.mark.parametrize("message", every_message(), ids=lambda message: type(message).__name__)
def test_table_of_legal_messages(state: DestinationState, message: AnyMessage) -> None:
    bench = Bench().in_state(state)
    destination = bench.destination
    if type(message).__name__ not in LEGAL.get(state, FROM_A_SOURCE):
        with pytest.raises(ProtocolError, match=f"unexpected {type(message).__name__}"):
            destination.receive(message)
        assert destination.state is state
        return
    destination.receive(message)
    assert state in LEGAL or destination.state is state


@pytest.mark.parametrize("state", DestinationState)
@pytest.mark.parametrize("end", ["abort", "peer_lost", "Abort", "Released"])
def test_it_can_end_in_every_state_once_and_frees_all(state: DestinationState, end: str) -> None:
    bench = Bench().in_state(state)
    destination = bench.destination
    before, actions = destination.outcome, list[Action]()
    for _ in range(2):
        if end in ("Abort", "Released"):
            message = released() if end == "Released" else Abort(transfer=ID, epoch=EPOCH, reason="no")
            actions += destination.receive(message)
        else:
            actions += destination.abort("cancelled") if end == "abort" else destination.peer_lost()
    for _ in range(2):
        actions += destination.writer_stopped(0)
    assert len(finished(actions)) == (before is None)
    assert destination.state.value == "closed" and destination.outcome is not None
    bench.pool.release([p for p in destination.pages if "sequence" in bench.pool.owners(p)], "sequence")
    assert bench.pool.num_free == NUM_PAGES
    bench.pool.check_integrity()


def test_other_epochs_change_nothing() -> None:
    bench = Bench().receiving()
    for message in (
        Wrote(transfer=ID, epoch=EPOCH - 1, first=0, stop=1),
        Commit(transfer=ID, epoch=EPOCH + 1, digests=DIGESTS),
        Extend(transfer=ID, epoch=1),
        Released(transfer=ID, epoch=1),
        Abort(transfer=ID, epoch=1, reason="old"),
    ):
        assert bench.destination.receive(message) == []
    assert bench.destination.num_stale == 5
    assert bench.destination.state is DestinationState.RECEIVING


def test_digests_that_come_too_late_are_ignored() -> None:
    bench = Bench().verifying()
    bench.destination.writer_stopped(0)
    bench.destination.abort("cancelled")
    assert bench.destination.verified(0, ()) == []
    assert bench.destination.outcome is HandoffOutcome.CANCELLED
