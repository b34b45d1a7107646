from pathlib import Path
from typing import NamedTuple, TypeVar

import pytest

from baton.clock import ManualClock
from baton.messages.bounds import MAX_EVENTS, Kind
from baton.messages.control import Heartbeat, Hello, KvEventBatch, Measured
from baton.messages.workers import Address, Load, PrefillTimes, StepTimes, Tier
from baton.request import Request, SamplingParams
from baton.rpc.peers import PeerRegistry
from baton.rpc.reports import (
    BEAT_S,
    EVENTS_S,
    MAX_KEPT,
    MEASURED_S,
    PAGES_PER_MESSAGE,
    SAMPLE_S,
    WorkerReports,
    load_of,
)
from tests.fakes import Post, PostedPeer
from tests.tiny_models import tiny_engine

HELLO = Hello(process=Kind.WORKER, id="1" * 32)
MessageT = TypeVar("MessageT", Heartbeat, KvEventBatch, Measured)


class Worker:
    def __init__(self, num_attempts: int = 0) -> None:
        self.is_draining = False
        self.attempts = tuple((f"{number:032x}", 0) for number in range(num_attempts))

    def load(self) -> Load:
        return Load(num_running=3)


class Changes(NamedTuple):
    is_afresh: bool
    device: list[tuple[bytes, int, int]]
    host: list[tuple[bytes, int, int]]


class Step(NamedTuple):
    num_sequences: int = 3
    num_new_tokens: int = 40
    num_context_tokens: int = 90
    step_s: float = 0.25


class Engine:
    """Has `num_new` changed pages at the next call, and the same step every time."""

    def __init__(self) -> None:
        self.num_new = 2
        self.num_host = 0
        self.step: Step | None = None
        self.asked: list[bool] = []

    def take_page_changes(self, *, is_afresh: bool = False) -> Changes:
        self.asked.append(is_afresh)
        number, self.num_new = self.num_new, 0
        device = [(bytes([each % 256]) * 16, each, 7) for each in range(number)]
        return Changes(is_afresh, device, [(b"h" * 16, 1, 0)] * self.num_host)

    def last_step(self) -> Step | None:
        return self.step


class Desk:
    """A worker's reports to routers whose mail the test reads."""

    def __init__(self, *, num_routers: int = 1) -> None:
        self.post, self.clock, self.engine = Post(), ManualClock(5.0), Engine()
        self.peer_registry = PeerRegistry(HELLO, [Address("127.0.0.1", 1)], lambda address: None)
        self.reports = WorkerReports(self.peer_registry, self.clock)
        self.routers = [self.join_router() for _ in range(num_routers)]

    def join_router(self) -> PostedPeer:
        digit = len(self.peer_registry.routers) + 2
        peer = PostedPeer(HELLO.id, Hello(process=Kind.ROUTER, id=f"{digit}" * 32), self.post)
        self.peer_registry.joined(peer)
        return peer

    def told(self, kind: type[MessageT]) -> list[MessageT]:
        self.reports.tell(self.engine)
        return [letter.message for letter in self.post.take() if isinstance(letter.message, kind)]


@pytest.fixture
def desk() -> Desk:
    """One router has asked for KV events."""
    desk = Desk()
    desk.reports.want(desk.routers[0])
    return desk


def test_heartbeats_leave_once_a_second() -> None:
    desk = Desk()
    for _ in range(40):
        desk.reports.heartbeat(Worker())
        desk.clock.advance(BEAT_S / 4)
    assert desk.told(Heartbeat) == [Heartbeat(load=Load(num_running=3))] * 10


def test_heartbeat_without_a_router_is_not_saved_up() -> None:
    desk = Desk(num_routers=0)
    for _ in range(3):
        desk.reports.heartbeat(Worker())
        desk.clock.advance(BEAT_S)
    desk.join_router()
    desk.reports.heartbeat(Worker())
    desk.reports.heartbeat(Worker())
    assert len(desk.told(Heartbeat)) == 1


def test_urgent_heartbeat_leaves_at_once() -> None:
    desk, worker = Desk(), Worker()
    desk.reports.heartbeat(worker)
    worker.is_draining = True
    desk.reports.heartbeat(worker, at_once=True)
    assert [beat.is_draining for beat in desk.told(Heartbeat)] == [False, True]


def test_heartbeat_names_no_more_attempts_than_a_message_holds() -> None:
    desk = Desk()
    desk.reports.heartbeat(Worker(MAX_EVENTS + 1))
    (beat,) = desk.told(Heartbeat)
    assert len(beat.attempts) == MAX_EVENTS


def test_load_has_the_engines_figures(tmp_path: Path) -> None:
    engine = tiny_engine(tmp_path)
    sampling = SamplingParams(temperature=0.0, max_tokens=4)
    for name in ("a", "b"):
        engine.add(Request(request_id=name, token_ids=tuple(range(10)), sampling=sampling))
        engine.step()
    load = load_of(engine.stats())
    assert (load.num_running, load.num_waiting) == (2, 0)
    assert load.pages["active"] == engine.pages.num_pages - load.pages["free"] == 4  # two are shared
    assert sum(load.pages.values()) == engine.pages.num_pages
    assert (load.prefix_queries_tokens, load.prefix_hits_tokens) == (20, 8)


def test_router_that_has_not_asked_gets_neither_events_nor_times() -> None:
    desk = Desk()
    desk.engine.step = Step()
    desk.reports.prefilled(times())
    desk.reports.step_ended(desk.engine)
    desk.reports.tell(desk.engine)
    assert not desk.post.take() and not desk.engine.asked


def test_router_that_asks_gets_all_pages(desk: Desk) -> None:
    (events,) = desk.told(KvEventBatch)
    assert events.is_afresh and events.first == 0 and events.tier is Tier.DEVICE
    assert events.keys == b"\0" * 16 + b"\1" * 16
    assert (events.pages, events.generations) == ((0, 1), (7, 7))


def test_empty_cache_is_reported_too(desk: Desk) -> None:
    desk.engine.num_new = 0
    (events,) = desk.told(KvEventBatch)
    assert events.is_afresh and not events.pages


def test_changes_follow_at_intervals_and_are_numbered(desk: Desk) -> None:
    desk.engine.num_host = 1
    assert [(each.first, each.tier, each.is_afresh) for each in desk.told(KvEventBatch)] == [
        (0, Tier.DEVICE, True),
        (2, Tier.HOST, False),
    ]
    desk.engine.num_new = 3
    desk.clock.advance(EVENTS_S / 2)
    assert not desk.told(KvEventBatch)
    desk.clock.advance(EVENTS_S)
    events = desk.told(KvEventBatch)
    assert [(each.first, each.tier) for each in events] == [(3, Tier.DEVICE), (6, Tier.HOST)]


def test_unchanged_cache_is_not_reported_and_the_next_change_leaves_at_once(desk: Desk) -> None:
    desk.told(KvEventBatch)
    desk.clock.advance(EVENTS_S)
    assert not desk.told(KvEventBatch)
    desk.engine.num_new = 1
    assert len(desk.told(KvEventBatch)) == 1


def test_many_changes_are_cut_into_messages_that_fit_a_frame(desk: Desk) -> None:
    desk.engine.num_new = 2 * PAGES_PER_MESSAGE + 1
    told = desk.told(KvEventBatch)  # PostedPeer has encoded each
    assert [(each.first, each.is_afresh) for each in told] == [
        (0, True),
        (PAGES_PER_MESSAGE, False),
        (2 * PAGES_PER_MESSAGE, False),
    ]


def test_router_that_asks_again_gets_all_pages_at_once(desk: Desk) -> None:
    desk.told(KvEventBatch)
    desk.engine.num_new = 2
    desk.reports.want(desk.routers[0])
    (events,) = desk.told(KvEventBatch)
    assert events.is_afresh and events.first == 2 and desk.engine.asked == [True, True]


def test_new_router_gets_nothing_before_it_asks(desk: Desk) -> None:
    desk.told(KvEventBatch)
    desk.peer_registry.left(desk.routers[0])
    router = desk.join_router()
    desk.engine.num_new = 2
    desk.clock.advance(1.0)
    assert not desk.told(KvEventBatch)
    desk.reports.want(router)
    (events,) = desk.told(KvEventBatch)
    assert events.is_afresh and events.first == 2


def test_all_routers_that_asked_get_the_same_events(desk: Desk) -> None:
    other = desk.join_router()
    assert len(desk.told(KvEventBatch)) == 1
    desk.engine.num_new = 2
    desk.reports.want(other)
    one, same = desk.told(KvEventBatch)
    assert one == same and one.is_afresh and one.first == 2
    desk.engine.num_new = 1
    desk.clock.advance(EVENTS_S)
    desk.peer_registry.left(other)
    (events,) = desk.told(KvEventBatch)
    assert events.first == 4


def times(number: int = 0) -> PrefillTimes:
    return PrefillTimes(f"{number:032x}", 0, 0.1, 0.2, 30, 40)


def test_measured_times_leave_once_a_second(desk: Desk) -> None:
    desk.engine.step = Step()
    desk.reports.prefilled(times(1))
    desk.reports.step_ended(desk.engine)
    expected = Measured(prefills=(times(1),), steps=(StepTimes(3, 40, 90, 0.25),))
    assert desk.told(Measured) == [expected]
    desk.reports.prefilled(times(2))
    desk.clock.advance(MEASURED_S / 2)
    assert not desk.told(Measured)
    desk.clock.advance(MEASURED_S / 2)
    assert [each.prefills for each in desk.told(Measured)] == [(times(2),)]


def test_nothing_is_sent_without_measured_times(desk: Desk) -> None:
    desk.reports.step_ended(desk.engine)
    assert not desk.told(Measured)


def test_steps_are_sampled(desk: Desk) -> None:
    desk.engine.step = Step()
    for _ in range(100):
        desk.reports.step_ended(desk.engine)
        desk.clock.advance(SAMPLE_S / 10)
    (measured,) = desk.told(Measured)
    assert len(measured.steps) == 10


def test_only_the_newest_times_are_kept(desk: Desk) -> None:
    for number in range(MAX_KEPT + 5):
        desk.reports.prefilled(times(number))
    (measured,) = desk.told(Measured)
    assert len(measured.prefills) == MAX_KEPT and measured.prefills[-1] == times(MAX_KEPT + 4)
