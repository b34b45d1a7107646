"""A router that asks is told all, and then what changes; others are told nothing."""

from typing import NamedTuple

from baton.clock import ManualClock
from baton.messages.bounds import Kind
from baton.messages.control import Hello, KvEventBatch
from baton.messages.kv_events import NEWS_S, PAGES_PER_MESSAGE, KvEventPublisher
from baton.messages.workers import Address, Tier
from baton.rpc.peers import PeerRegistry
from tests.fakes import Post, PostedPeer

HELLO = Hello(process=Kind.WORKER, id="1" * 32)
Told = list[tuple[bytes, int, int]]


class Changes(NamedTuple):
    is_afresh: bool
    device: Told
    host: Told


class Engine:
    """Has new pages each time that it is asked."""

    def __init__(self, num_host: int = 0) -> None:
        self.known = 2
        self.num_host = num_host
        self.asked: list[bool] = []

    def take_page_changes(self, *, is_afresh: bool = False) -> Changes:
        self.asked.append(is_afresh)
        number, self.known = self.known, 0
        device = [(bytes([each % 256]) * 16, each, 7) for each in range(number)]
        return Changes(is_afresh, device, [(b"h" * 16, 1, 0)] * self.num_host)


class Desk:
    def __init__(self, num_host: int = 0) -> None:
        self.post, self.clock, self.engine = Post(), ManualClock(5.0), Engine(num_host)
        self.peer_registry = PeerRegistry(HELLO, [Address("127.0.0.1", 1)], lambda address: None)
        self.publisher = KvEventPublisher(self.peer_registry, self.clock)
        self.router = self.join_router("2")

    def join_router(self, digit: str) -> PostedPeer:
        peer = PostedPeer(HELLO.id, Hello(process=Kind.ROUTER, id=digit * 32), self.post)
        self.peer_registry.joined(peer)
        return peer

    def told(self) -> list[KvEventBatch]:
        self.publisher.tell(self.engine)
        return [letter.message for letter in self.post.take() if isinstance(letter.message, KvEventBatch)]


def test_who_has_not_asked_is_told_nothing() -> None:
    desk = Desk()
    assert not desk.told() and not desk.engine.asked


def test_all_is_told_to_who_asks() -> None:
    desk = Desk()
    desk.publisher.want(desk.router)
    (events,) = desk.told()
    assert events.is_afresh and events.first == 0 and events.tier is Tier.DEVICE
    assert events.keys == b"\0" * 16 + b"\1" * 16
    assert (events.pages, events.generations) == ((0, 1), (7, 7))


def test_that_nothing_is_known_is_told_too() -> None:
    desk = Desk()
    desk.engine.known = 0
    desk.publisher.want(desk.router)
    (events,) = desk.told()
    assert events.is_afresh and not events.pages


def test_changes_follow_at_most_so_often_and_are_numbered() -> None:
    desk = Desk(num_host=1)
    desk.publisher.want(desk.router)
    assert [(each.first, each.tier, each.is_afresh) for each in desk.told()] == [
        (0, Tier.DEVICE, True),
        (2, Tier.HOST, False),
    ]
    desk.engine.known = 3
    desk.clock.advance(NEWS_S / 2)
    assert not desk.told()
    desk.clock.advance(NEWS_S)
    assert [(each.first, each.tier) for each in desk.told()] == [(3, Tier.DEVICE), (6, Tier.HOST)]


def test_where_nothing_changes_nothing_is_said() -> None:
    desk = Desk()
    desk.publisher.want(desk.router)
    desk.told()
    desk.clock.advance(NEWS_S)
    assert not desk.told()
    desk.engine.known = 1
    assert len(desk.told()) == 1  # at once: nothing has been said for so long


def test_a_message_is_never_too_long_for_a_frame() -> None:
    desk = Desk()
    desk.engine.known = 2 * PAGES_PER_MESSAGE + 1
    desk.publisher.want(desk.router)
    told = desk.told()  # each was encoded on its way
    assert [(each.first, each.is_afresh) for each in told] == [
        (0, True),
        (PAGES_PER_MESSAGE, False),
        (2 * PAGES_PER_MESSAGE, False),
    ]


def test_a_router_that_asks_again_is_told_all_at_once() -> None:
    desk = Desk()
    desk.publisher.want(desk.router)
    desk.told()
    desk.engine.known = 2
    desk.publisher.want(desk.router)
    (events,) = desk.told()
    assert events.is_afresh and events.first == 2 and desk.engine.asked == [True, True]


def test_a_new_router_is_told_nothing_before_it_asks() -> None:
    desk = Desk()
    desk.publisher.want(desk.router)
    desk.told()
    desk.peer_registry.left(desk.router)
    router = desk.join_router("3")
    desk.engine.known = 2
    desk.clock.advance(1.0)
    assert not desk.told()
    desk.publisher.want(router)
    (events,) = desk.told()
    assert events.is_afresh and events.first == 2


def test_each_router_that_has_asked_is_told_the_same() -> None:
    desk = Desk()
    other = desk.join_router("3")
    desk.publisher.want(desk.router)
    assert len(desk.told()) == 1
    desk.engine.known = 2
    desk.publisher.want(other)
    one, same = desk.told()
    assert one == same and one.is_afresh and one.first == 2
    desk.engine.known = 1
    desk.clock.advance(NEWS_S)
    desk.peer_registry.left(other)
    (events,) = desk.told()
    assert events.first == 4
