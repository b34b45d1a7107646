"""Whom a worker knows, what it asks for, and how its tokens are bundled."""

from collections.abc import Sequence

import msgspec
import pytest

from baton.errors import WireError
from baton.messages.bounds import Kind
from baton.messages.control import AttemptFailed, Cancel, Failure, Hello, Members, Reachable, Tokens
from baton.messages.workers import Address, Worker, WorkerRole
from baton.request import TokenEvent, TokenLogprobs
from baton.rpc.peers import EVENTS_PER_MESSAGE, PeerRegistry
from tests.fakes import Post, PostedPeer

ROUTER_ADDRESS = Address("127.0.0.1", 1)
ROUTER = Hello(process=Kind.ROUTER, id="1" * 32)
OTHER_ROUTER = Hello(process=Kind.ROUTER, id="7" * 32)
GATEWAY = Hello(process=Kind.GATEWAY, id="2" * 32)


def a_worker(number: int, role: WorkerRole = WorkerRole.PREFILL) -> Worker:
    return Worker(
        id=f"{number:032x}",
        name=f"{role.value}-{number}",
        role=role,
        model="tiny",
        fingerprint="f",
        address=Address("127.0.0.1", number),
        kv_address=Address("127.0.0.1", 1000 + number),
        page_size=16,
        num_pages=10,
        max_num_seqs=4,
        max_model_len=96,
    )


def hello_of(worker: Worker) -> Hello:
    return Hello(process=Kind.WORKER, id=worker.id, worker=worker)


class Desk:
    """One worker's colleagues, with what it dialled and what it said."""

    def __init__(self, *wanted: WorkerRole, addresses: Sequence[Address] = (), number: int = 99) -> None:
        self.post = Post()
        self.dialled: list[Address] = []
        self.hello = hello_of(a_worker(number, WorkerRole.DECODE))
        self.peer_registry = PeerRegistry(
            self.hello, addresses or [ROUTER_ADDRESS], self.dialled.append, wanted
        )
        self.router = PostedPeer(self.hello.id, ROUTER, self.post)

    def changed(self, members: Members) -> list[str]:
        return self.peer_registry.changed(self.router, members)

    def peer(self, hello: Hello) -> PostedPeer:
        return PostedPeer(self.hello.id, hello, self.post)

    def join(self, hello: Hello) -> PostedPeer:
        peer = self.peer(hello)
        self.peer_registry.joined(peer)
        return peer


def test_it_dials_the_router_until_that_is_there() -> None:
    desk = Desk()
    desk.peer_registry.keep_up()
    desk.peer_registry.keep_up()
    assert desk.dialled == [ROUTER_ADDRESS] * 2
    router = desk.join(ROUTER)
    desk.peer_registry.keep_up()
    assert len(desk.dialled) == 2 and desk.peer_registry.router is router
    assert desk.peer_registry.left(router)
    desk.peer_registry.keep_up()
    assert len(desk.dialled) == 3 and desk.peer_registry.router is None


def test_it_dials_listed_workers_of_the_roles_it_wants() -> None:
    desk = Desk(WorkerRole.PREFILL)
    desk.join(ROUTER)
    here, missing, other = a_worker(5), a_worker(6), a_worker(7, WorkerRole.DECODE)
    desk.join(hello_of(here))
    assert desk.changed(Members(workers=(here, missing, other))) == []
    desk.peer_registry.keep_up()
    assert desk.dialled == [missing.address]
    assert desk.peer_registry.connected() == [here.id]
    assert list(desk.peer_registry.of_role(WorkerRole.DECODE)) == [other.id]


def test_who_is_not_listed_any_more_is_gone() -> None:
    desk = Desk()
    first, second, third = a_worker(5), a_worker(6), a_worker(7)
    desk.changed(Members(workers=(first, second)))
    assert desk.changed(Members(workers=(second, third))) == [first.id]
    assert list(desk.peer_registry.members) == [second.id, third.id]


def test_a_list_that_is_not_complete_ends_nobody() -> None:
    desk = Desk()
    first, second = a_worker(5), a_worker(6)
    desk.changed(Members(workers=(first,)))
    assert desk.changed(Members(workers=(second,), is_complete=False)) == []
    assert set(desk.peer_registry.members) == {first.id, second.id}
    assert desk.changed(Members(workers=(second,))) == [first.id]


def test_a_newer_connection_takes_the_older_ones_place() -> None:
    desk = Desk()
    old = desk.join(GATEWAY)
    new = desk.join(GATEWAY)
    assert not desk.peer_registry.left(old)
    assert desk.peer_registry.peer(GATEWAY.id) is new
    assert desk.peer_registry.left(new)
    assert desk.peer_registry.peer(GATEWAY.id) is None


def test_a_connection_that_was_replaced_is_no_routers() -> None:
    desk = Desk()
    old, gateway = desk.join(ROUTER), desk.join(GATEWAY)
    assert desk.peer_registry.is_router(old) and not desk.peer_registry.is_router(gateway)
    new = desk.join(ROUTER)
    assert desk.peer_registry.is_router(new) and not desk.peer_registry.is_router(old)


def test_a_gateway_cannot_take_a_routers_place() -> None:
    desk = Desk()
    router = desk.join(ROUTER)
    gateway = desk.peer(Hello(process=Kind.GATEWAY, id=ROUTER.id))
    with pytest.raises(WireError, match="a gateway has the id of a router") as refused:
        desk.peer_registry.joined(gateway)
    assert refused.value.reason == "role"
    assert not desk.peer_registry.left(gateway) and not desk.peer_registry.is_router(gateway)
    assert desk.peer_registry.is_router(router) and desk.peer_registry.router is router


class TestSeveralRouters:
    def two(self) -> tuple[Desk, PostedPeer, PostedPeer]:
        desk = Desk(addresses=[ROUTER_ADDRESS, Address("127.0.0.1", 2)])
        return desk, desk.join(ROUTER), desk.join(OTHER_ROUTER)

    def test_all_are_dialled_while_one_is_missing(self) -> None:
        desk, router, _ = self.two()
        desk.peer_registry.keep_up()
        assert desk.dialled == []
        desk.peer_registry.left(router)
        desk.peer_registry.keep_up()
        assert desk.dialled == [ROUTER_ADDRESS, Address("127.0.0.1", 2)]

    def test_a_worker_is_gone_when_none_lists_it(self) -> None:
        desk, one, other = self.two()
        first, second = a_worker(5), a_worker(6)
        for router in (one, other):
            desk.peer_registry.changed(router, Members(workers=(first, second)))
        assert desk.peer_registry.changed(one, Members(workers=(second,))) == []
        assert set(desk.peer_registry.members) == {first.id, second.id}
        assert desk.peer_registry.changed(other, Members(workers=(second,))) == [first.id]

    def test_a_worker_that_only_a_lost_router_listed_is_gone(self) -> None:
        """As when a host loses its power that had the one and the other."""
        desk, one, other = self.two()
        first, second = a_worker(5), a_worker(6)
        for router in (one, other):
            desk.peer_registry.changed(router, Members(workers=(first, second)))
        assert desk.peer_registry.changed(other, Members(workers=(second,))) == []
        assert desk.peer_registry.left(one)
        assert desk.peer_registry.recount() == [first.id]
        assert set(desk.peer_registry.members) == {second.id}

    def test_what_a_router_said_before_it_left_counts_until_another_knows_all(self) -> None:
        desk, one, other = self.two()
        desk.peer_registry.changed(one, Members(workers=(a_worker(5),)))
        desk.peer_registry.left(one)
        assert desk.peer_registry.recount() == []
        assert desk.peer_registry.changed(other, Members(workers=(), is_complete=False)) == []
        assert desk.peer_registry.changed(other, Members(workers=())) == [a_worker(5).id]

    def test_nobody_is_gone_with_the_last_router(self) -> None:
        desk, one, other = self.two()
        desk.peer_registry.changed(one, Members(workers=(a_worker(5),)))
        for router in (other, one):
            desk.peer_registry.left(router)
            assert desk.peer_registry.recount() == []

    def test_a_list_that_is_complete_vouches_for_one_that_is_not(self) -> None:
        desk, one, other = self.two()
        desk.peer_registry.changed(one, Members(workers=(a_worker(5), a_worker(6))))
        desk.peer_registry.changed(other, Members(workers=(), is_complete=False))
        assert desk.peer_registry.changed(one, Members(workers=(a_worker(6),))) == [a_worker(5).id]

    def test_one_that_knows_all_workers_is_asked(self) -> None:
        desk, one, other = self.two()
        for knowing, starting in ((one, other), (other, one)):
            desk.peer_registry.changed(starting, Members(workers=(), is_complete=False))
            desk.peer_registry.changed(knowing, Members(workers=()))
            assert desk.peer_registry.router is knowing
        desk.peer_registry.left(other)
        assert desk.peer_registry.router is one

    def test_processes_choose_different_ones(self) -> None:
        chosen = set()
        for number in range(32):
            desk = Desk(number=number)
            one, other = desk.join(ROUTER), desk.join(OTHER_ROUTER)
            desk.peer_registry.changed(one, Members(workers=()))
            desk.peer_registry.changed(other, Members(workers=()))
            router = desk.peer_registry.router
            assert router is not None
            chosen.add(router.hello.id)
        assert chosen == {ROUTER.id, OTHER_ROUTER.id}

    def test_each_is_told_who_can_be_reached(self) -> None:
        desk, _, other = self.two()
        desk.peer_registry.report(["a" * 32])
        assert {letter.receiver for letter in desk.post.take()} == {ROUTER.id, OTHER_ROUTER.id}
        desk.peer_registry.left(other)
        desk.join(OTHER_ROUTER)
        desk.peer_registry.report(["a" * 32])
        assert {letter.receiver for letter in desk.post.take()} == {OTHER_ROUTER.id}


def test_a_report_is_made_when_something_has_changed() -> None:
    desk = Desk()
    desk.peer_registry.report(["a" * 32])  # nobody to tell
    desk.join(ROUTER)
    for reachable in (["a" * 32], ["a" * 32], ["b" * 32, "a" * 32], ["a" * 32, "b" * 32], []):
        desk.peer_registry.report(reachable)
    assert [letter.message for letter in desk.post.take()] == [
        Reachable(workers=("a" * 32,)),
        Reachable(workers=("a" * 32, "b" * 32)),
        Reachable(workers=()),
    ]


def test_a_router_that_comes_anew_is_told_again() -> None:
    desk = Desk()
    for _ in range(2):
        desk.join(ROUTER)
        desk.peer_registry.report(["a" * 32])
    assert len(desk.post.take()) == 2


def test_to_nobody_nothing_is_said() -> None:
    desk = Desk()
    desk.peer_registry.tell(GATEWAY.id, Cancel(request_id="a" * 32, attempt=0))
    desk.peer_registry.emit(GATEWAY.id, TokenEvent("a" * 32, 0, 0, 1))
    desk.peer_registry.flush()
    assert desk.post.take() == []


class TestTokens:
    def test_they_leave_in_one_message_for_each_gateway(self) -> None:
        desk, other = Desk(), Hello(process=Kind.GATEWAY, id="3" * 32)
        desk.join(GATEWAY)
        desk.join(other)
        events = [TokenEvent("a" * 32, 0, index, index) for index in range(5)]
        for event in events:
            desk.peer_registry.emit((GATEWAY, other)[event.index % 2].id, event)
        assert desk.post.take() == []
        desk.peer_registry.flush()
        desk.peer_registry.flush()
        said = {letter.receiver: letter.message for letter in desk.post.take()}
        assert said == {
            GATEWAY.id: Tokens(events=tuple(events[::2])),
            other.id: Tokens(events=tuple(events[1::2])),
        }

    def test_very_many_leave_in_several_and_in_order(self) -> None:
        desk = Desk()
        desk.join(GATEWAY)
        events = [TokenEvent("a" * 32, 0, index, 1) for index in range(2 * EVENTS_PER_MESSAGE + 1)]
        for event in events:
            desk.peer_registry.emit(GATEWAY.id, event)
        desk.peer_registry.flush()
        batches = [letter.message for letter in desk.post.take()]
        assert len(batches) == 3
        assert [each for batch in batches if isinstance(batch, Tokens) for each in batch.events] == events

    def test_those_with_a_prompts_log_probabilities_leave_alone(self) -> None:
        desk = Desk()
        desk.join(GATEWAY)
        logprobs = (None, TokenLogprobs(token_id=1, logprob=-1.0, rank=1))
        large = TokenEvent("a" * 32, 0, 0, 1, prompt_logprobs=logprobs)
        small = [TokenEvent("b" * 32, 0, index, 1) for index in range(3)]
        for event in (small[0], large, *small[1:]):
            desk.peer_registry.emit(GATEWAY.id, event)
        desk.peer_registry.flush()
        batches = [letter.message for letter in desk.post.take()]
        assert batches == [Tokens(events=(large,)), Tokens(events=tuple(small))]

    def test_those_of_a_gateway_that_is_about_to_come_wait_for_it(self) -> None:
        desk = Desk()
        event = TokenEvent("a" * 32, 0, 0, 1)
        desk.peer_registry.emit(GATEWAY.id, event)
        desk.peer_registry.flush()
        desk.peer_registry.tick()
        desk.join(GATEWAY)
        desk.peer_registry.flush()
        assert [letter.message for letter in desk.post.take()] == [Tokens(events=(event,))]

    def test_at_the_second_tick_without_their_gateway_they_are_dropped(self) -> None:
        desk = Desk()
        desk.peer_registry.emit(GATEWAY.id, TokenEvent("a" * 32, 0, 0, 1))
        for _ in range(2):
            desk.peer_registry.flush()
            desk.peer_registry.tick()
        desk.join(GATEWAY)
        desk.peer_registry.flush()
        assert desk.post.take() == []

    def test_lists_of_several_routers_are_no_ticks(self) -> None:
        desk = Desk()
        event = TokenEvent("a" * 32, 0, 0, 1)
        desk.peer_registry.emit(GATEWAY.id, event)
        for _ in range(3):
            desk.peer_registry.keep_up()
        desk.join(GATEWAY)
        assert [letter.message for letter in desk.post.take()] == [Tokens(events=(event,))]

    def test_a_failure_waits_for_its_gateway_too_and_leaves_after_its_tokens(self) -> None:
        desk = Desk()
        event = TokenEvent("a" * 32, 0, 0, 1)
        failed = AttemptFailed(request_id="a" * 32, attempt=0, failure=Failure.BUSY, reason="it drains")
        desk.peer_registry.emit(GATEWAY.id, event)
        desk.peer_registry.fail(GATEWAY.id, failed)
        desk.join(GATEWAY)
        desk.peer_registry.fail(GATEWAY.id, failed)
        assert [letter.message for letter in desk.post.take()] == [Tokens(events=(event,)), failed, failed]

    def test_those_of_a_gateway_that_is_gone_are_dropped(self) -> None:
        desk = Desk()
        gateway = desk.join(GATEWAY)
        desk.peer_registry.emit(GATEWAY.id, TokenEvent("a" * 32, 0, 0, 1))
        desk.peer_registry.left(gateway)
        desk.join(GATEWAY)
        desk.peer_registry.flush()
        assert desk.post.take() == []


def test_pages_are_exchanged_with_all_of_the_same_weights() -> None:
    desk = Desk()
    own = desk.hello.worker
    assert own is not None
    alike, decoder = a_worker(1), a_worker(2, WorkerRole.DECODE)
    other = msgspec.structs.replace(a_worker(3), fingerprint="others")
    other_decoder = msgspec.structs.replace(a_worker(4, WorkerRole.DECODE), fingerprint="others")
    desk.changed(Members(workers=(own, alike, decoder, other, other_decoder)))
    assert desk.peer_registry.with_pages() == [alike, decoder]
