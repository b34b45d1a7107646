import msgspec
import pytest

from baton.clock import ManualClock
from baton.engine.cache.page_pool import PagePool, PageState
from baton.errors import ProtocolError
from baton.kvtransfer.protocol.handoff import (
    Action,
    Finished,
    Granted,
    HandoffOutcome,
    HandoffTimeouts,
    Push,
    Send,
    StopPushes,
    Timing,
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
from baton.kvtransfer.protocol.pull import ON_HOST, Lend
from baton.kvtransfer.protocol.source import SourceHandoff, SourceState
from baton.pages import PageLayout
from tests.numbered_pages import NumberedPages, key_of

ID, EPOCH, NUM_UNITS, NUM_PAGES = b"t" * 16, 7, 4, 8
ME = b"m" * 16
DIGESTS = bytes(range(8 * NUM_UNITS))


def grant(num_parts: int = 1, num_groups: int = 1) -> Grant:
    return Grant(
        transfer=ID,
        epoch=EPOCH,
        deadline_ms=100_000,
        num_units=NUM_UNITS,
        num_parts=num_parts,
        num_layer_groups=num_groups,
        pages=(20, 21, 22, 23),
        generations=(1, 1, 1, 1),
    )


GRANT = grant()


def digests(first: int, stop: int) -> bytes:
    return DIGESTS[8 * first : 8 * stop]


class Bench:
    """A source with `units_per_page` units in each of its pages, the destination with one."""

    def __init__(self, num_parts: int = 1, units_per_page: int = 1, num_groups: int = 1) -> None:
        self.clock = ManualClock()
        self.pool = PagePool(NUM_PAGES, 16)
        self.timeouts = HandoffTimeouts(
            self.pool, self.clock, Timing(lease_s=30, heartbeat_s=5), units_per_page, 1
        )
        self.source = SourceHandoff(grant(num_parts, num_groups), self.timeouts)
        self.pages = self.pool.allocate(NUM_UNITS // units_per_page, "sequence")

    def streaming(self) -> "Bench":
        self.source.opened()
        return self

    def committing(self) -> "Bench":
        self.streaming().source.offer(self.pages, NUM_UNITS)
        self.source.pushed(0, 0, NUM_UNITS, DIGESTS)
        assert self.source.state is SourceState.COMMITTING
        return self

    def in_state(self, state: SourceState) -> "Bench":
        if state is SourceState.STREAMING:
            self.streaming().source.offer(self.pages, NUM_UNITS)
        elif state is SourceState.COMMITTING:
            self.committing()
        elif state is SourceState.STOPPING:
            self.streaming().source.offer(self.pages, NUM_UNITS)
            self.source.abort("cancelled")
        elif state is SourceState.CLOSED:
            self.committing().source.receive(Verified(transfer=ID, epoch=EPOCH))
        assert self.source.state is state
        return self

    def num_free_without_sequence(self) -> int:
        self.pool.release(self.pages, "sequence")
        return self.pool.num_free


def sent(actions: list[Action]) -> list[AnyMessage]:
    return [action.message for action in actions if isinstance(action, Send)]


def finished(actions: list[Action]) -> list[HandoffOutcome]:
    return [action.outcome for action in actions if isinstance(action, Finished)]


def every_message() -> list[AnyMessage]:
    layout = PageLayout(tp_size=1, page_size=1, num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32")
    return [
        EndpointHello(protocol=1, incarnation=ME, fingerprint="f", layout=layout),
        GRANT,
        pull((0,), (1,), 1),
        PullRefused(transfer=ID, epoch=EPOCH, reason="gone"),
        Wrote(transfer=ID, epoch=EPOCH, first=0, stop=1),
        Commit(transfer=ID, epoch=EPOCH, digests=DIGESTS),
        Verified(transfer=ID, epoch=EPOCH),
        Corrupt(transfer=ID, epoch=EPOCH, units=(0,)),
        Extend(transfer=ID, epoch=EPOCH),
        Abort(transfer=ID, epoch=EPOCH, reason="no more"),
        Released(transfer=ID, epoch=EPOCH),
    ]


def pull(wanted: tuple[int, ...], generations: tuple[int, ...], num_units: int = NUM_UNITS) -> PullRequest:
    return PullRequest(
        transfer=ID,
        epoch=EPOCH,
        deadline_ms=100_000,
        num_units=num_units,
        holder=ME,
        wanted_pages=wanted,
        wanted_generations=generations,
        wanted_keys=b"".join(map(key_of, wanted)),
        pages=tuple(range(20, 20 + num_units)),
        generations=(1,) * num_units,
    )


def test_groups_of_layers_travel_one_after_the_other() -> None:
    bench = Bench(num_parts=4, num_groups=2)  # two pairs of ranks
    source = bench.streaming().source
    assert source.offer(bench.pages[:2], 2) == [Push(part, 0, 2) for part in range(4)]
    assert source.offer(bench.pages[2:], NUM_UNITS, 0) == [Push(0, 2, 4), Push(2, 2, 4)]
    assert source.offer((), NUM_UNITS, 0) == []
    assert source.offer((), NUM_UNITS, 1) == [Push(1, 2, 4), Push(3, 2, 4)]
    for part in range(4):
        source.pushed(part, 0, 2, digests(0, 2))
        source.pushed(part, 2, 4, digests(2, 4))
    assert source.state is SourceState.COMMITTING
    assert finished(source.receive(Verified(transfer=ID, epoch=EPOCH))) == [HandoffOutcome.HANDED_OVER]
    assert bench.num_free_without_sequence() == NUM_PAGES


def test_groups_offered_before_transports_are_open_leave_then() -> None:
    bench = Bench(num_parts=2, num_groups=2)
    assert bench.source.offer(bench.pages, NUM_UNITS, 0) == []
    actions = bench.source.opened()
    assert [action for action in actions if isinstance(action, Push)] == [Push(0, 0, NUM_UNITS)]
    assert bench.source.offer((), 3, 1) == [Push(1, 0, 3)]


@pytest.mark.parametrize(("group", "num_units"), [(2, 4), (-1, 4), (1, 1), (0, 5), (None, 3)])
def test_what_a_group_cannot_offer_is_our_mistake(group: int | None, num_units: int) -> None:
    bench = Bench(num_parts=2, num_groups=2)
    source = bench.streaming().source
    source.offer(bench.pages[:2], 2)
    source.offer(bench.pages[2:], 4, 0)
    with pytest.raises(ValueError, match=f"{num_units} units.* offered after"):
        source.offer((), num_units, group)
    assert source.offer((), 4, 1) == [Push(1, 2, 4)]


def test_pages_travel_as_they_are_computed() -> None:
    bench = Bench()
    source = bench.source
    assert source.offer(bench.pages[:1], 1) == []  # no transport is open
    assert source.opened() == [Granted(GRANT), Push(0, 0, 1)]
    assert source.offer(bench.pages[1:], NUM_UNITS) == [Push(0, 1, NUM_UNITS)]
    wrote = Wrote(transfer=ID, epoch=EPOCH, first=1, stop=NUM_UNITS)
    assert sent(source.pushed(0, 1, NUM_UNITS, digests(1, NUM_UNITS))) == [wrote]
    assert sent(source.pushed(0, 0, 1, digests(0, 1))) == [
        Wrote(transfer=ID, epoch=EPOCH, first=0, stop=1),
        Commit(transfer=ID, epoch=EPOCH, digests=DIGESTS),
    ]
    assert source.receive(Verified(transfer=ID, epoch=EPOCH)) == [Finished(HandoffOutcome.HANDED_OVER, "")]
    assert bench.num_free_without_sequence() == NUM_PAGES


def test_each_part_gets_every_unit_and_commits_by_itself() -> None:
    bench = Bench(num_parts=2).streaming()
    assert bench.source.offer(bench.pages, NUM_UNITS) == [Push(0, 0, NUM_UNITS), Push(1, 0, NUM_UNITS)]
    first = sent(bench.source.pushed(1, 0, NUM_UNITS, DIGESTS))
    assert first[-1] == Commit(transfer=ID, epoch=EPOCH, digests=DIGESTS, part=1)
    assert bench.source.state.value == "streaming"
    assert isinstance(sent(bench.source.pushed(0, 0, NUM_UNITS, DIGESTS))[-1], Commit)
    assert bench.source.state is SourceState.COMMITTING


def test_page_of_two_units_may_be_pushed_by_halves() -> None:
    bench = Bench(units_per_page=2).streaming()
    assert bench.source.offer(bench.pages[:1], 1) == [Push(0, 0, 1)]
    assert bench.source.offer([], 2) == [Push(0, 1, 2)]
    reader = ("reader", ID)
    bench.source.pushed(0, 0, 1, digests(0, 1))
    assert reader in bench.pool.owners(bench.pages[0])  # by the other half
    bench.source.pushed(0, 1, 2, digests(1, 2))
    assert reader not in bench.pool.owners(bench.pages[0])


def test_lease_keeps_pages_that_their_sequence_left() -> None:
    bench = Bench().committing()
    bench.pool.release(bench.pages, "sequence")
    assert bench.pool.count(PageState.LEASED) == NUM_UNITS


def test_readers_keep_pages_beyond_the_lease() -> None:
    bench = Bench().streaming()
    bench.source.offer(bench.pages, NUM_UNITS)
    bench.pool.release(bench.pages, "sequence")
    bench.clock.advance(31)
    bench.pool.expire(bench.clock.now_s())
    assert bench.pool.num_free == NUM_PAGES - NUM_UNITS  # the transport still reads them
    actions = bench.source.tick()
    assert finished(actions) == [HandoffOutcome.FAILED] and actions[-1] == StopPushes()
    assert bench.pool.num_free == NUM_PAGES - NUM_UNITS
    assert sent(bench.source.pushes_stopped()) == [Released(transfer=ID, epoch=EPOCH)]
    assert bench.pool.num_free == NUM_PAGES


def test_heartbeats_go_out_and_extend() -> None:
    bench = Bench().committing()
    for _ in range(7):
        bench.clock.advance(5)
        assert sent(bench.source.tick()) == [Extend(transfer=ID, epoch=EPOCH)]
        assert bench.source.tick() == []
        bench.source.receive(Extend(transfer=ID, epoch=EPOCH))
    assert bench.pool.expire(64.9) == [] and len(bench.pool.expire(65.0)) == 1


def test_nothing_extends_beyond_the_deadline_of_the_transfer() -> None:
    bench = Bench().committing()
    for _ in range(19):
        bench.clock.advance(5)
        bench.source.tick()
        bench.source.receive(Extend(transfer=ID, epoch=EPOCH))
    bench.clock.advance(5)
    assert finished(bench.source.tick()) == [HandoffOutcome.FAILED]


def test_transfer_without_transports_expires() -> None:
    bench = Bench()
    bench.clock.advance(30)
    actions = bench.source.tick()
    released = Released(transfer=ID, epoch=EPOCH)
    assert sent(actions) == [Abort(transfer=ID, epoch=EPOCH, reason="expired"), released]
    assert bench.source.state is SourceState.CLOSED


def test_pages_whose_lease_expired_while_transports_were_opened_are_not_sent() -> None:
    bench = Bench()
    bench.source.offer(bench.pages, NUM_UNITS)
    bench.clock.advance(31)
    bench.pool.expire(bench.clock.now_s())
    assert finished(bench.source.opened()) == [HandoffOutcome.FAILED]
    assert bench.num_free_without_sequence() == NUM_PAGES


def test_damaged_units_are_written_and_committed_once_more() -> None:
    bench = Bench().committing()
    assert bench.source.receive(Corrupt(transfer=ID, epoch=EPOCH, units=(0, 2, 3))) == [
        Push(0, 0, 1),
        Push(0, 2, 4),
    ]
    bench.source.pushed(0, 2, 4, digests(2, 4))
    again = sent(bench.source.pushed(0, 0, 1, b"newwords"))
    assert again[-1] == Commit(transfer=ID, epoch=EPOCH, digests=b"newwords" + DIGESTS[8:])
    with pytest.raises(ProtocolError, match="unexpected Corrupt"):
        bench.source.receive(Corrupt(transfer=ID, epoch=EPOCH, units=(0,)))


@pytest.mark.parametrize("units", [(NUM_UNITS,), (0, 400)])
def test_units_that_do_not_exist_cannot_be_damaged(units: tuple[int, ...]) -> None:
    bench = Bench().committing()
    with pytest.raises(ProtocolError):
        bench.source.receive(Corrupt(transfer=ID, epoch=EPOCH, units=units))
    with pytest.raises(ProtocolError):
        bench.source.receive(Corrupt(transfer=ID, epoch=EPOCH, units=(0,), part=1))


def test_failed_push_fails_the_transfer() -> None:
    bench = Bench(num_parts=2).streaming()
    bench.source.offer(bench.pages, NUM_UNITS)
    actions = bench.source.push_failed(0, 0, NUM_UNITS, "cut")
    assert sent(actions) == [Abort(transfer=ID, epoch=EPOCH, reason="transport: cut")]
    assert finished(actions) == [HandoffOutcome.FAILED] and actions[-1] == StopPushes()
    assert len(sent(bench.source.pushes_stopped())) == 2


LEGAL = {
    SourceState.OPENING: {"Extend", "Abort"},
    SourceState.STREAMING: {"Extend", "Abort"},
    SourceState.COMMITTING: {"Verified", "Corrupt", "Extend", "Abort"},
}


@pytest.mark.parametrize("state", SourceState)
@pytest.mark.parametrize("message", every_message(), ids=lambda message: type(message).__name__)
def test_table_of_legal_messages(state: SourceState, message: AnyMessage) -> None:
    bench = Bench().in_state(state)
    name = type(message).__name__
    if state in LEGAL and name not in LEGAL[state]:
        with pytest.raises(ProtocolError, match=f"unexpected {name}"):
            bench.source.receive(message)
        assert bench.source.state is state
        return
    bench.source.receive(message)
    assert bench.source.num_stale == 0
    assert state in LEGAL or bench.source.state is state


@pytest.mark.parametrize("state", SourceState)
@pytest.mark.parametrize("end", ["abort", "peer_lost", "Abort"])
def test_it_can_end_in_every_state_once_and_frees_all(state: SourceState, end: str) -> None:
    bench = Bench().in_state(state)
    source = bench.source
    before, actions = source.outcome, list[Action]()
    for _ in range(2):
        if end == "Abort":
            actions += source.receive(Abort(transfer=ID, epoch=source.epoch, reason="no more"))
        else:
            actions += source.abort("cancelled") if end == "abort" else source.peer_lost()
    actions += source.pushes_stopped()
    assert len(finished(actions)) == (before is None)
    assert source.state is SourceState.CLOSED and source.outcome is not None
    assert bench.num_free_without_sequence() == NUM_PAGES
    bench.pool.check_integrity()


def test_other_epochs_change_nothing() -> None:
    bench = Bench().committing()
    for message in (
        Verified(transfer=ID, epoch=EPOCH - 1),
        Corrupt(transfer=ID, epoch=EPOCH + 1, units=(0,)),
        Extend(transfer=ID, epoch=1),
        Abort(transfer=ID, epoch=1, reason="old"),
    ):
        assert bench.source.receive(message) == []
    assert bench.source.num_stale == 4
    assert bench.source.state is SourceState.COMMITTING


def test_released_is_said_again_to_who_asks() -> None:
    bench = Bench().in_state(SourceState.STOPPING)
    asked = Abort(transfer=ID, epoch=EPOCH, reason="not released yet")
    assert bench.source.receive(asked) == []  # a push may still write
    bench.source.pushes_stopped()
    assert sent(bench.source.receive(asked)) == [Released(transfer=ID, epoch=EPOCH)]


def test_late_answers_of_the_transport_change_nothing() -> None:
    bench = Bench().in_state(SourceState.STOPPING)
    assert bench.source.pushed(0, 0, NUM_UNITS, DIGESTS) == []
    assert bench.num_free_without_sequence() == NUM_PAGES
    bench.source.pushes_stopped()
    assert bench.source.push_failed(0, 0, NUM_UNITS, "late") == []


@pytest.mark.parametrize(("num_pages", "num_units"), [(1, 2), (0, 1), (4, 5)])
def test_only_units_that_lie_in_the_pages_can_be_offered(num_pages: int, num_units: int) -> None:
    bench = Bench().streaming()
    with pytest.raises(ValueError, match="units offered"):
        bench.source.offer(bench.pages[:num_pages], num_units)


class TestPull:
    def test_known_pages_are_pinned_and_pushed(self) -> None:
        bench = self.bench_with_known_pages()
        asked = pull(tuple(bench.pages), (1,) * NUM_UNITS)
        source = SourceHandoff(asked, bench.timeouts)
        assert source.accept_pull(ME, NumberedPages(bench.pool)) == [Granted(asked), Push(0, 0, NUM_UNITS)]
        assert not any(bench.pool.is_available(page) for page in bench.pages)  # not to be evicted now
        source.pushed(0, 0, NUM_UNITS, DIGESTS)
        source.receive(Verified(transfer=ID, epoch=EPOCH))
        assert bench.pool.count(PageState.CACHED) == NUM_UNITS

    def test_what_is_not_there_any_more_is_refused(self) -> None:
        cases = [
            (pull((0, 1, 2, NUM_PAGES), (1,) * 4), f"page {NUM_PAGES} is not in the prefix cache"),
            (pull((0, 1, 2, 3), (1, 1, 9, 1)), "has generation 1, not 9"),
            (pull((0, 1, 2, 6), (1,) * 4), "page 6 is not in the prefix cache"),
            (pull((0, 1, 2), (1,) * 3), "4 units do not match 3 wanted pages"),
            (pull((0, 1, 2, 2), (1,) * 4), "a wanted page is not cached here"),
        ]
        for asked, reason in cases:
            self.check_refused(asked, ME, reason)

    def test_a_page_that_holds_something_else_than_its_key_is_refused(self) -> None:
        """Number and generation are right: it is the hint that names another prompt's pages."""
        asked = pull((0, 1, 2, 3), (1,) * 4)
        elsewhere = NumberedPages(PagePool(NUM_PAGES, 16))
        self.check_refused(asked, ME, "a wanted page is not cached here", elsewhere)
        moved = msgspec.structs.replace(asked, wanted_keys=b"".join(map(key_of, (0, 1, 3, 2))))
        self.check_refused(moved, ME, "the contents of the wanted page 2 are in page 3")

    def test_pages_of_the_host_are_found_by_their_keys(self) -> None:
        bench = self.bench_with_known_pages()
        asked = msgspec.structs.replace(
            pull((7, 1, 9, 8), (ON_HOST, 1, ON_HOST, ON_HOST)),
            wanted_keys=b"".join(map(key_of, (0, 1, 2, 3))),
        )
        source = SourceHandoff(asked, bench.timeouts)
        assert source.accept_pull(ME, NumberedPages(bench.pool)) == [Granted(asked), Push(0, 0, NUM_UNITS)]
        assert source.pages == [0, 1, 2, 3]

    def test_another_incarnation_has_other_pages(self) -> None:
        self.check_refused(pull((0, 1, 2, 3), (1,) * 4), b"n" * 16, "was restarted")

    def check_refused(
        self, asked: PullRequest, incarnation: bytes, reason: str, lend: Lend | None = None
    ) -> None:
        bench = self.bench_with_known_pages()
        source = SourceHandoff(asked, bench.timeouts)
        actions = source.accept_pull(incarnation, lend or NumberedPages(bench.pool))
        (refused,) = sent(actions)
        assert isinstance(refused, PullRefused) and reason in refused.reason
        assert finished(actions) == [HandoffOutcome.FAILED] and source.state is SourceState.CLOSED
        assert bench.pool.num_available == NUM_PAGES

    def bench_with_known_pages(self) -> Bench:
        bench = Bench()
        for page in bench.pages:
            bench.pool.mark_known(page)
        bench.pool.release(bench.pages, "sequence")
        return bench
