"""The behaviour that both worker roles share: membership, orders of routers, and reports to routers."""

from collections.abc import Collection
from typing import TypeVar

import pytest

from baton.clock import ManualClock
from baton.errors import ProtocolError
from baton.messages.bounds import MAX_EVENTS, Kind
from baton.messages.codec import AnyMessage
from baton.messages.control import (
    Cancel,
    Heartbeat,
    Hello,
    KvEventBatch,
    KvEventsWanted,
    Measured,
    Members,
    PageChanges,
    Pressure,
    Reachable,
)
from baton.messages.operations import Drain
from baton.messages.status import OverloadLevel
from baton.messages.workers import Address, Load, PrefillTimes, StepTimes, Tier, Worker
from baton.rpc.liveness import BEAT_S
from baton.rpc.peers import Peer, PeerRegistry
from baton.rpc.worker_node import (
    EVENTS_S,
    MAX_ENDED,
    MAX_KEPT,
    MEASURED_S,
    PAGES_PER_MESSAGE,
    SAMPLE_S,
    EndedAttempts,
    WorkerNode,
    WorkerReports,
)
from tests.node_peers import ListeningPeer, TestPeer, a_worker, hello_of, id_of

MessageT = TypeVar("MessageT", Heartbeat, KvEventBatch, Measured)
OURS, OTHER = a_worker("prefill-1"), a_worker("prefill-2")
LISTED = Members(workers=(OURS, OTHER))


class Links:
    def __init__(self) -> None:
        self.kept: list[str] = []

    def keep_up(self, workers: Collection[Worker]) -> None:
        self.kept = [worker.id for worker in workers]


class Engine:
    """Has `num_new` changed pages at the next call, and the same step every time."""

    def __init__(self) -> None:
        self.num_new = 2
        self.num_host = 0
        self.step: StepTimes | None = None
        self.asked: list[bool] = []
        self.pressures: list[tuple[bool, bool]] = []  # (small_chunks, makes_room) of each call

    def set_pressure(self, *, small_chunks: bool, makes_room: bool) -> None:
        self.pressures.append((small_chunks, makes_room))

    def take_page_changes(self, *, is_snapshot: bool = False) -> PageChanges:
        self.asked.append(is_snapshot)
        number, self.num_new = self.num_new, 0
        on_device = [bytes([each % 256]) * 16 for each in range(number)]
        on_host = [b"h" * 16] * self.num_host
        return PageChanges(is_snapshot, {None: [], Tier.DEVICE: on_device, Tier.HOST: on_host})

    def last_step(self) -> StepTimes | None:
        return self.step


class SomeWorker(WorkerNode):
    """Keeps the calls that a role would handle."""

    attempts = (("f" * 32, 0),)

    def __init__(self) -> None:
        self.links, self.noted = Links(), list[object]()
        self.engine = Engine()
        peer_registry = PeerRegistry(hello_of(OURS), [Address("127.0.0.1", 9)], lambda address: None)
        reports = WorkerReports(peer_registry, ManualClock())
        super().__init__(self.engine, peer_registry, self.links, reports)

    def load(self) -> Load:
        return Load(num_running=3)

    def _reachable(self) -> list[str]:
        return self.links.kept

    def _lost(self, peer: Peer) -> None:
        self.noted.append(peer.hello.id)

    def _lost_workers(self, ids: list[str]) -> None:
        self.noted += ids

    def _heard(self, peer: Peer, message: AnyMessage) -> None:
        if not isinstance(message, Cancel):
            raise ProtocolError("nothing for it")
        self.noted.append(message)


@pytest.fixture
def worker() -> SomeWorker:
    return SomeWorker()


def test_listed_workers_get_links_and_reachable_ones_are_reported(worker: SomeWorker) -> None:
    router = TestPeer.router(worker)
    router.say(LISTED)
    assert worker.links.kept == [OTHER.id]
    assert router.take(Reachable)[-1] == Reachable(workers=(OTHER.id,))
    router.say(Members(workers=(OURS,)))
    assert worker.noted == [OTHER.id] and worker.links.kept == []


def test_end_of_a_replaced_connection_is_no_loss(worker: SomeWorker) -> None:
    first, second = TestPeer.gateway(worker), TestPeer.gateway(worker)
    first.leave()
    assert not worker.noted
    second.leave()
    assert worker.noted == [second.id]


def test_workers_of_a_lost_router_are_lost(worker: SomeWorker) -> None:
    one, other = TestPeer.router(worker), TestPeer.router(worker, "other")
    one.say(LISTED)
    other.say(Members(workers=(OURS,)))
    one.leave()
    assert worker.noted == [one.id, OTHER.id]


def test_highest_overload_level_of_all_routers_holds(worker: SomeWorker) -> None:
    one, other = TestPeer.router(worker), TestPeer.router(worker, "other")
    for router, level in (
        (one, OverloadLevel.MAKE_ROOM),
        (other, OverloadLevel.SMALL_CHUNKS),
        (one, OverloadLevel.CALM),
    ):
        router.say(Pressure(level=level))
    other.leave()
    assert worker.engine.pressures == [(True, True), (True, True), (True, False), (False, False)]


def test_drain_is_reported_at_once(worker: SomeWorker) -> None:
    router = TestPeer.router(worker)
    router.say(Drain(worker="prefill-1"))
    beat = Heartbeat(load=Load(num_running=3), is_draining=True, attempts=worker.attempts)
    assert router.take(Heartbeat) == [beat]


@pytest.mark.parametrize(
    "message", [LISTED, Drain(worker="prefill-1"), KvEventsWanted(), Pressure(level=OverloadLevel.SHED)]
)
def test_only_routers_give_orders(worker: SomeWorker, message: AnyMessage) -> None:
    with pytest.raises(ProtocolError):
        TestPeer.gateway(worker).say(message)
    assert not worker.is_draining and not worker.links.kept


def test_other_messages_go_to_the_role(worker: SomeWorker) -> None:
    cancel = Cancel(request_id="f" * 32, attempt=0)
    TestPeer.gateway(worker).say(cancel)
    assert worker.noted == [cancel]


def test_end_of_an_attempt_is_the_end_of_earlier_ones() -> None:
    ended = EndedAttempts()
    for attempt in (1, 0):
        ended.add("a", attempt)
    assert ("a", 1) in ended and ("a", 0) in ended
    assert ("a", 2) not in ended and ("b", 1) not in ended


def test_oldest_ends_are_forgotten() -> None:
    ended = EndedAttempts()
    for number in range(MAX_ENDED + 1):
        ended.add(str(number), 0)
    assert ("0", 0) not in ended
    assert ("1", 0) in ended and (str(MAX_ENDED), 0) in ended


class Beating:
    """A worker with the parts that heartbeats read."""

    def __init__(self, num_attempts: int = 0) -> None:
        self.is_draining = False
        self.attempts = tuple((f"{number:032x}", 0) for number in range(num_attempts))

    def load(self) -> Load:
        return Load(num_running=3)


STEP = StepTimes(3, 40, 90, 0.25)


class Reporter:
    """A worker's reports to its routers."""

    def __init__(self, *, num_routers: int = 1) -> None:
        self.clock, self.engine = ManualClock(5.0), Engine()
        self.routers: list[ListeningPeer] = []
        self.peer_registry = PeerRegistry(hello_of(OURS), [Address("127.0.0.1", 1)], lambda address: None)
        self.reports = WorkerReports(self.peer_registry, self.clock)
        for _ in range(num_routers):
            self.join_router()

    def join_router(self) -> ListeningPeer:
        self.routers.append(ListeningPeer(Hello(process=Kind.ROUTER, id=id_of(f"r{len(self.routers)}"))))
        self.peer_registry.joined(self.routers[-1])
        return self.routers[-1]

    def told(self, kind: type[MessageT]) -> list[MessageT]:
        """Return the new messages of that kind to all routers."""
        self.reports.tell(self.engine)
        return [message for router in self.routers for message in router.take(kind)]


@pytest.fixture
def reporter() -> Reporter:
    """One router has asked for KV events."""
    reporter = Reporter()
    reporter.reports.want(reporter.routers[0])
    return reporter


def test_heartbeats_leave_once_a_second() -> None:
    reporter = Reporter()
    for _ in range(40):
        reporter.reports.heartbeat(Beating())
        reporter.clock.advance(BEAT_S / 4)
    assert reporter.told(Heartbeat) == [Heartbeat(load=Load(num_running=3))] * 10


def test_heartbeat_without_a_router_is_not_saved_up() -> None:
    reporter = Reporter(num_routers=0)
    for _ in range(3):
        reporter.reports.heartbeat(Beating())
        reporter.clock.advance(BEAT_S)
    reporter.join_router()
    reporter.reports.heartbeat(Beating())
    reporter.reports.heartbeat(Beating())
    assert len(reporter.told(Heartbeat)) == 1


def test_heartbeat_names_no_more_attempts_than_a_message_holds() -> None:
    reporter = Reporter()
    reporter.reports.heartbeat(Beating(MAX_EVENTS + 1))
    (beat,) = reporter.told(Heartbeat)
    assert len(beat.attempts) == MAX_EVENTS


def test_empty_cache_is_reported_too(reporter: Reporter) -> None:
    reporter.engine.num_new = 0
    assert reporter.told(KvEventBatch) == [KvEventBatch(first=0, keys=b"", is_snapshot=True)]


def test_changes_follow_at_intervals_and_are_numbered(reporter: Reporter) -> None:
    reporter.engine.num_host = 1
    assert [(each.first, each.tier, each.is_snapshot) for each in reporter.told(KvEventBatch)] == [
        (0, Tier.DEVICE, True),
        (0, Tier.DEVICE, False),
        (2, Tier.HOST, False),
    ]
    reporter.engine.num_new = 3
    reporter.clock.advance(EVENTS_S / 2)
    assert not reporter.told(KvEventBatch)
    reporter.clock.advance(EVENTS_S)
    events = reporter.told(KvEventBatch)
    assert [(each.first, each.tier) for each in events] == [(3, Tier.DEVICE), (6, Tier.HOST)]


def test_unchanged_cache_is_not_reported_and_the_next_change_leaves_at_once(reporter: Reporter) -> None:
    reporter.told(KvEventBatch)
    reporter.clock.advance(EVENTS_S)
    assert not reporter.told(KvEventBatch)
    reporter.engine.num_new = 1
    assert len(reporter.told(KvEventBatch)) == 1


def test_many_changes_are_cut_into_messages_that_fit_a_frame(reporter: Reporter) -> None:
    reporter.engine.num_new = 2 * PAGES_PER_MESSAGE + 1
    told = reporter.told(KvEventBatch)  # each was encoded
    assert [(each.first, each.is_snapshot) for each in told] == [
        (0, True),
        (0, False),
        (PAGES_PER_MESSAGE, False),
        (2 * PAGES_PER_MESSAGE, False),
    ]


def test_router_that_asks_again_gets_all_pages_at_once(reporter: Reporter) -> None:
    reporter.told(KvEventBatch)
    reporter.engine.num_new = 2
    reporter.reports.want(reporter.routers[0])
    begin, events = reporter.told(KvEventBatch)
    assert begin.is_snapshot and begin.first == events.first == 2
    assert events.num_changes == 2 and reporter.engine.asked == [True, True]


def test_new_router_gets_nothing_before_it_asks(reporter: Reporter) -> None:
    reporter.told(KvEventBatch)
    reporter.peer_registry.left(reporter.routers[0])
    router = reporter.join_router()
    reporter.engine.num_new = 2
    reporter.clock.advance(1.0)
    assert not reporter.told(KvEventBatch)
    reporter.reports.want(router)
    begin, events = reporter.told(KvEventBatch)
    assert begin.is_snapshot and begin.first == events.first == 2


def test_all_routers_that_asked_get_the_same_events(reporter: Reporter) -> None:
    other = reporter.join_router()
    assert len(reporter.told(KvEventBatch)) == 2
    reporter.engine.num_new = 2
    reporter.reports.want(other)
    told = reporter.told(KvEventBatch)
    assert told[:2] == told[2:] and told[0].is_snapshot and told[0].first == 2
    reporter.engine.num_new = 1
    reporter.clock.advance(EVENTS_S)
    reporter.peer_registry.left(other)
    (events,) = reporter.told(KvEventBatch)
    assert events.first == 4


def times(number: int = 0) -> PrefillTimes:
    return PrefillTimes(f"{number:032x}", 0, 0.1, 0.2, 30, 40)


def test_measured_times_leave_once_a_second(reporter: Reporter) -> None:
    reporter.engine.step = STEP
    reporter.reports.prefilled(times(1))
    reporter.reports.step_ended(reporter.engine)
    expected = Measured(prefills=(times(1),), steps=(STEP,))
    assert reporter.told(Measured) == [expected]
    reporter.reports.prefilled(times(2))
    reporter.clock.advance(MEASURED_S / 2)
    assert not reporter.told(Measured)
    reporter.clock.advance(MEASURED_S / 2)
    assert [each.prefills for each in reporter.told(Measured)] == [(times(2),)]


def test_steps_are_sampled(reporter: Reporter) -> None:
    reporter.engine.step = STEP
    for _ in range(100):
        reporter.reports.step_ended(reporter.engine)
        reporter.clock.advance(SAMPLE_S / 10)
    (measured,) = reporter.told(Measured)
    assert len(measured.steps) == 10


def test_only_the_newest_times_are_kept(reporter: Reporter) -> None:
    for number in range(MAX_KEPT + 5):
        reporter.reports.prefilled(times(number))
    (measured,) = reporter.told(Measured)
    assert len(measured.prefills) == MAX_KEPT and measured.prefills[-1] == times(MAX_KEPT + 4)
