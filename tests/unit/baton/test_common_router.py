"""The router that everybody asks for what one alone is to see all of."""

import secrets

import msgspec

from baton.messages.bounds import Id, Kind
from baton.messages.control import Hello, Members
from baton.messages.workers import Address
from baton.rpc.peers import PeerRegistry, new_router_id
from tests.fakes import Post, PostedPeer

START_S = 1.7e9
GATEWAY = Hello(process=Kind.GATEWAY, id="2" * 32)


class Desk:
    """One gateway's colleagues."""

    def __init__(self) -> None:
        self.post = Post()
        self.peer_registry = PeerRegistry(GATEWAY, [Address("127.0.0.1", 1)], lambda address: None)

    def join(self, hello: Hello, *, is_complete: bool | None = None) -> PostedPeer:
        """is_complete: what it says of its list of workers; None: nothing yet."""
        peer = PostedPeer(GATEWAY.id, hello, self.post)
        self.peer_registry.joined(peer)
        if is_complete is not None:
            self.tell(peer, is_complete=is_complete)
        return peer

    def tell(self, router: PostedPeer, *, is_complete: bool) -> None:
        self.peer_registry.changed(router, Members(workers=(), is_complete=is_complete))


def a_router(age: float) -> Hello:
    return Hello(process=Kind.ROUTER, id=new_router_id(0, START_S - age, secrets.token_bytes(16)))


def test_without_routers_nobody_is_asked() -> None:
    assert Desk().peer_registry.common_router is None


def test_the_oldest_is_asked_whoever_was_met_first() -> None:
    newer, older = a_router(age=0.0), a_router(age=0.001)
    for hellos in ((newer, older), (older, newer)):
        desk = Desk()
        joined = {hello: desk.join(hello, is_complete=True) for hello in hellos}
        assert desk.peer_registry.common_router is joined[older]


def test_one_that_knows_all_workers_goes_before() -> None:
    desk = Desk()
    older, newer = desk.join(a_router(age=9.0)), desk.join(a_router(age=1.0), is_complete=True)
    assert desk.peer_registry.common_router is newer
    desk.tell(older, is_complete=True)
    assert desk.peer_registry.common_router is older


def test_who_comes_again_takes_over_nothing() -> None:
    desk = Desk()
    older, newer = (desk.join(a_router(age), is_complete=True) for age in (9.0, 1.0))
    desk.peer_registry.left(older)
    assert desk.peer_registry.common_router is newer
    desk.join(a_router(age=0.0), is_complete=True)
    assert desk.peer_registry.common_router is newer


def test_ids_of_routers_are_ids_that_differ() -> None:
    ids = {new_router_id(0, START_S, secrets.token_bytes(16)) for _ in range(100)}
    assert len({id_[:8] for id_ in ids}) > 90
    for id_ in ids:
        assert msgspec.convert(id_, Id) == id_


def test_no_calendar_orders_routers_that_a_supervisor_starts() -> None:
    """The calendar jumps back by a day between the two starts."""
    older, newer = (
        Hello(process=Kind.ROUTER, id=new_router_id(number, START_S - day * 86_400, secrets.token_bytes(16)))
        for number, day in ((3, 0), (4, 1))
    )
    by_hand = a_router(age=86_400.0)
    desk = Desk()
    joined = {hello: desk.join(hello, is_complete=True) for hello in (by_hand, newer, older)}
    assert desk.peer_registry.common_router is joined[older]
