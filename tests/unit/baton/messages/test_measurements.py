"""Times are told about once a second, to who has asked for pages, and never without end."""

from typing import NamedTuple

from baton.clock import ManualClock
from baton.messages.bounds import Kind
from baton.messages.control import Hello, Measured
from baton.messages.kv_events import KvEventPublisher
from baton.messages.measurements import MAX_KEPT, STEP_S, TELL_S, Measurements
from baton.messages.workers import Address, PrefillTimes, StepTimes
from baton.rpc.peers import PeerRegistry
from tests.fakes import Post, PostedPeer

HELLO = Hello(process=Kind.WORKER, id="1" * 32)
ROUTER = Hello(process=Kind.ROUTER, id="2" * 32)


class Step(NamedTuple):
    num_sequences: int = 3
    num_new_tokens: int = 40
    num_context_tokens: int = 90
    step_s: float = 0.25


class Engine:
    def last_step(self) -> Step:
        return Step()


class Idle:
    def last_step(self) -> None:
        return None


class Desk:
    def __init__(self, *, is_asked: bool = True) -> None:
        self.post, self.clock = Post(), ManualClock(5.0)
        peer_registry = PeerRegistry(HELLO, [Address("127.0.0.1", 1)], lambda address: None)
        router = PostedPeer(HELLO.id, ROUTER, self.post)
        peer_registry.joined(router)
        publisher = KvEventPublisher(peer_registry, self.clock)
        if is_asked:
            publisher.want(router)
        self.measurements = Measurements(publisher, self.clock)

    def told(self) -> list[Measured]:
        self.measurements.tell()
        return [letter.message for letter in self.post.take() if isinstance(letter.message, Measured)]


def times(number: int = 0) -> PrefillTimes:
    return PrefillTimes(f"{number:032x}", 0, 0.1, 0.2, 30, 40)


def test_what_was_noted_is_told_once_a_second() -> None:
    desk = Desk()
    desk.measurements.prefilled(times(1))
    desk.measurements.stepped(Engine())
    assert desk.told() == [Measured(prefills=(times(1),), steps=(StepTimes(3, 40, 90, 0.25),))]
    desk.measurements.prefilled(times(2))
    desk.clock.advance(TELL_S / 2)
    assert not desk.told()
    desk.clock.advance(TELL_S / 2)
    assert [each.prefills for each in desk.told()] == [(times(2),)]


def test_where_nothing_was_measured_nothing_is_said() -> None:
    desk = Desk()
    desk.measurements.stepped(Idle())
    assert not desk.told()


def test_who_has_not_asked_is_told_nothing() -> None:
    desk = Desk(is_asked=False)
    desk.measurements.prefilled(times())
    desk.measurements.stepped(Engine())
    assert not desk.told()


def test_of_many_steps_a_few_are_told() -> None:
    desk = Desk()
    for _ in range(100):
        desk.measurements.stepped(Engine())
        desk.clock.advance(STEP_S / 10)
    (measured,) = desk.told()
    assert len(measured.steps) == 10


def test_what_nobody_takes_does_not_grow_without_end() -> None:
    desk = Desk()
    for number in range(MAX_KEPT + 5):
        desk.measurements.prefilled(times(number))
    (measured,) = desk.told()
    assert len(measured.prefills) == MAX_KEPT and measured.prefills[-1] == times(MAX_KEPT + 4)
