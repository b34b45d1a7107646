"""Signs of life: about one a second, at once when something must be known, and none to nobody."""

from pathlib import Path

from baton.clock import ManualClock
from baton.messages.bounds import MAX_EVENTS, Kind
from baton.messages.control import Heartbeat, Hello
from baton.messages.workers import Address, Load
from baton.request import Request, SamplingParams
from baton.rpc.heartbeat import BEAT_S, HeartbeatSender, load_of
from baton.rpc.peers import PeerRegistry
from tests.fakes import Post, PostedPeer
from tests.tiny_models import tiny_engine

HELLO = Hello(process=Kind.WORKER, id="1" * 32)
ROUTER = Hello(process=Kind.ROUTER, id="2" * 32)


class Beater:
    """A worker, as far as its beats tell."""

    def __init__(self, num_attempts: int = 0) -> None:
        self.is_draining = False
        self.attempts = tuple((f"{number:032x}", 0) for number in range(num_attempts))

    def load(self) -> Load:
        return Load(num_running=3)


class Desk:
    def __init__(self) -> None:
        self.post, self.clock = Post(), ManualClock(5.0)
        self.peer_registry = PeerRegistry(HELLO, [Address("127.0.0.1", 1)], lambda address: None)
        self.beats = HeartbeatSender(self.peer_registry, self.clock)

    def join_router(self) -> None:
        self.peer_registry.joined(PostedPeer(HELLO.id, ROUTER, self.post))

    def given(self) -> list[Heartbeat]:
        return [letter.message for letter in self.post.take() if isinstance(letter.message, Heartbeat)]


def test_one_a_second_however_often_it_is_asked_for() -> None:
    desk = Desk()
    desk.join_router()
    for _ in range(40):
        desk.beats.give(Beater())
        desk.clock.advance(BEAT_S / 4)
    assert desk.given() == [Heartbeat(load=Load(num_running=3))] * 10


def test_without_a_router_none_is_given_or_saved_up() -> None:
    desk = Desk()
    for _ in range(3):
        desk.beats.give(Beater())
        desk.clock.advance(BEAT_S)
    desk.join_router()
    desk.beats.give(Beater())
    desk.beats.give(Beater())
    assert len(desk.given()) == 1


def test_what_must_be_known_is_said_at_once() -> None:
    desk, beater = Desk(), Beater()
    desk.join_router()
    desk.beats.give(beater)
    beater.is_draining = True
    desk.beats.give(beater, at_once=True)
    assert [beat.is_draining for beat in desk.given()] == [False, True]


def test_no_message_is_too_long_for_all_that_goes_on() -> None:
    desk = Desk()
    desk.join_router()
    desk.beats.give(Beater(MAX_EVENTS + 1))
    (beat,) = desk.given()
    assert len(beat.attempts) == MAX_EVENTS


def test_a_load_has_the_engines_figures(tmp_path: Path) -> None:
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
