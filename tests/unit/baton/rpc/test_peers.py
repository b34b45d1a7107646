import secrets
from collections.abc import Sequence

import msgspec
import pytest

from baton.errors import WireError
from baton.messages.bounds import Id, Kind
from baton.messages.control import AttemptFailed, Cancel, Failure, Hello, Members, Reachable, Tokens
from baton.messages.workers import Address, Worker, WorkerRole
from baton.request import TokenEvent, TokenLogprobs
from baton.rpc.peers import EVENTS_PER_MESSAGE, PeerRegistry, new_router_id
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
    """One worker's registry; `dialled` and `post` have its calls and messages."""

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


def test_router_is_dialled_until_it_is_connected() -> None:
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


def test_listed_workers_of_wanted_roles_are_dialled() -> None:
    desk = Desk(WorkerRole.PREFILL)
    desk.join(ROUTER)
    here, missing, other = a_worker(5), a_worker(6), a_worker(7, WorkerRole.DECODE)
    desk.join(hello_of(here))
    assert desk.changed(Members(workers=(here, missing, other))) == []
    desk.peer_registry.keep_up()
    assert desk.dialled == [missing.address]
    assert desk.peer_registry.connected() == [here.id]
    assert list(desk.peer_registry.of_role(WorkerRole.DECODE)) == [other.id]


def test_worker_that_leaves_the_list_is_gone() -> None:
    desk = Desk()
    first, second, third = a_worker(5), a_worker(6), a_worker(7)
    desk.changed(Members(workers=(first, second)))
    assert desk.changed(Members(workers=(second, third))) == [first.id]
    assert list(desk.peer_registry.members) == [second.id, third.id]


def test_incomplete_list_removes_no_worker() -> None:
    desk = Desk()
    first, second = a_worker(5), a_worker(6)
    desk.changed(Members(workers=(first,)))
    assert desk.changed(Members(workers=(second,), is_complete=False)) == []
    assert set(desk.peer_registry.members) == {first.id, second.id}
    assert desk.changed(Members(workers=(second,))) == [first.id]


def test_newer_connection_replaces_the_older_one() -> None:
    desk = Desk()
    old = desk.join(GATEWAY)
    new = desk.join(GATEWAY)
    assert not desk.peer_registry.left(old)
    assert desk.peer_registry.peer(GATEWAY.id) is new
    assert desk.peer_registry.left(new)
    assert desk.peer_registry.peer(GATEWAY.id) is None


def test_replaced_connection_is_no_router() -> None:
    desk = Desk()
    old, gateway = desk.join(ROUTER), desk.join(GATEWAY)
    assert desk.peer_registry.is_router(old) and not desk.peer_registry.is_router(gateway)
    new = desk.join(ROUTER)
    assert desk.peer_registry.is_router(new) and not desk.peer_registry.is_router(old)


def test_gateway_cannot_take_a_routers_id() -> None:
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

    def test_worker_is_gone_when_no_router_lists_it(self) -> None:
        desk, one, other = self.two()
        first, second = a_worker(5), a_worker(6)
        for router in (one, other):
            desk.peer_registry.changed(router, Members(workers=(first, second)))
        assert desk.peer_registry.changed(one, Members(workers=(second,))) == []
        assert set(desk.peer_registry.members) == {first.id, second.id}
        assert desk.peer_registry.changed(other, Members(workers=(second,))) == [first.id]

    def test_worker_that_only_a_lost_router_listed_is_gone(self) -> None:
        desk, one, other = self.two()
        first, second = a_worker(5), a_worker(6)
        for router in (one, other):
            desk.peer_registry.changed(router, Members(workers=(first, second)))
        assert desk.peer_registry.changed(other, Members(workers=(second,))) == []
        assert desk.peer_registry.left(one)
        assert desk.peer_registry.recount() == [first.id]
        assert set(desk.peer_registry.members) == {second.id}

    def test_list_of_a_lost_router_counts_until_another_list_is_complete(self) -> None:
        desk, one, other = self.two()
        desk.peer_registry.changed(one, Members(workers=(a_worker(5),)))
        desk.peer_registry.left(one)
        assert desk.peer_registry.recount() == []
        assert desk.peer_registry.changed(other, Members(workers=(), is_complete=False)) == []
        assert desk.peer_registry.changed(other, Members(workers=())) == [a_worker(5).id]

    def test_loss_of_the_last_router_removes_no_worker(self) -> None:
        desk, one, other = self.two()
        desk.peer_registry.changed(one, Members(workers=(a_worker(5),)))
        for router in (other, one):
            desk.peer_registry.left(router)
            assert desk.peer_registry.recount() == []

    def test_complete_list_removes_workers_despite_an_incomplete_one(self) -> None:
        desk, one, other = self.two()
        desk.peer_registry.changed(one, Members(workers=(a_worker(5), a_worker(6))))
        desk.peer_registry.changed(other, Members(workers=(), is_complete=False))
        assert desk.peer_registry.changed(one, Members(workers=(a_worker(6),))) == [a_worker(5).id]

    def test_router_with_a_complete_list_is_chosen(self) -> None:
        desk, one, other = self.two()
        for knowing, starting in ((one, other), (other, one)):
            desk.peer_registry.changed(starting, Members(workers=(), is_complete=False))
            desk.peer_registry.changed(knowing, Members(workers=()))
            assert desk.peer_registry.router is knowing
        desk.peer_registry.left(other)
        assert desk.peer_registry.router is one

    def test_processes_choose_different_routers(self) -> None:
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

    def test_every_router_gets_the_report(self) -> None:
        desk, _, other = self.two()
        desk.peer_registry.report(["a" * 32])
        assert {letter.receiver for letter in desk.post.take()} == {ROUTER.id, OTHER_ROUTER.id}
        desk.peer_registry.left(other)
        desk.join(OTHER_ROUTER)
        desk.peer_registry.report(["a" * 32])
        assert {letter.receiver for letter in desk.post.take()} == {OTHER_ROUTER.id}


def test_only_changed_reports_are_sent() -> None:
    desk = Desk()
    desk.peer_registry.report(["a" * 32])  # no router
    desk.join(ROUTER)
    for reachable in (["a" * 32], ["a" * 32], ["b" * 32, "a" * 32], ["a" * 32, "b" * 32], []):
        desk.peer_registry.report(reachable)
    assert [letter.message for letter in desk.post.take()] == [
        Reachable(workers=("a" * 32,)),
        Reachable(workers=("a" * 32, "b" * 32)),
        Reachable(workers=()),
    ]


def test_router_that_reconnects_gets_the_report_again() -> None:
    desk = Desk()
    for _ in range(2):
        desk.join(ROUTER)
        desk.peer_registry.report(["a" * 32])
    assert len(desk.post.take()) == 2


def test_messages_to_absent_peers_are_lost() -> None:
    desk = Desk()
    desk.peer_registry.tell(GATEWAY.id, Cancel(request_id="a" * 32, attempt=0))
    desk.peer_registry.emit(GATEWAY.id, TokenEvent("a" * 32, 0, 0, 1))
    desk.peer_registry.flush()
    assert desk.post.take() == []


class TestTokens:
    def test_tokens_leave_in_one_message_for_each_gateway(self) -> None:
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

    def test_many_tokens_leave_in_several_messages_in_order(self) -> None:
        desk = Desk()
        desk.join(GATEWAY)
        events = [TokenEvent("a" * 32, 0, index, 1) for index in range(2 * EVENTS_PER_MESSAGE + 1)]
        for event in events:
            desk.peer_registry.emit(GATEWAY.id, event)
        desk.peer_registry.flush()
        batches = [letter.message for letter in desk.post.take()]
        assert len(batches) == 3
        assert [each for batch in batches if isinstance(batch, Tokens) for each in batch.events] == events

    def test_prompt_log_probabilities_leave_in_a_message_of_their_own(self) -> None:
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

    def test_tokens_wait_for_a_gateway_that_is_about_to_connect(self) -> None:
        desk = Desk()
        event = TokenEvent("a" * 32, 0, 0, 1)
        desk.peer_registry.emit(GATEWAY.id, event)
        desk.peer_registry.flush()
        desk.peer_registry.tick()
        desk.join(GATEWAY)
        desk.peer_registry.flush()
        assert [letter.message for letter in desk.post.take()] == [Tokens(events=(event,))]

    def test_tokens_are_dropped_at_the_second_tick_without_their_gateway(self) -> None:
        desk = Desk()
        desk.peer_registry.emit(GATEWAY.id, TokenEvent("a" * 32, 0, 0, 1))
        for _ in range(2):
            desk.peer_registry.flush()
            desk.peer_registry.tick()
        desk.join(GATEWAY)
        desk.peer_registry.flush()
        assert desk.post.take() == []

    def test_keeping_up_is_no_tick(self) -> None:
        desk = Desk()
        event = TokenEvent("a" * 32, 0, 0, 1)
        desk.peer_registry.emit(GATEWAY.id, event)
        for _ in range(3):
            desk.peer_registry.keep_up()
        desk.join(GATEWAY)
        assert [letter.message for letter in desk.post.take()] == [Tokens(events=(event,))]

    def test_failure_waits_for_its_gateway_and_leaves_after_its_tokens(self) -> None:
        desk = Desk()
        event = TokenEvent("a" * 32, 0, 0, 1)
        failed = AttemptFailed(request_id="a" * 32, attempt=0, failure=Failure.BUSY, reason="it drains")
        desk.peer_registry.emit(GATEWAY.id, event)
        desk.peer_registry.fail(GATEWAY.id, failed)
        desk.join(GATEWAY)
        desk.peer_registry.fail(GATEWAY.id, failed)
        assert [letter.message for letter in desk.post.take()] == [Tokens(events=(event,)), failed, failed]

    def test_tokens_of_a_lost_gateway_are_dropped(self) -> None:
        desk = Desk()
        gateway = desk.join(GATEWAY)
        desk.peer_registry.emit(GATEWAY.id, TokenEvent("a" * 32, 0, 0, 1))
        desk.peer_registry.left(gateway)
        desk.join(GATEWAY)
        desk.peer_registry.flush()
        assert desk.post.take() == []


def test_pages_are_exchanged_with_workers_of_the_same_weights() -> None:
    desk = Desk()
    own = desk.hello.worker
    assert own is not None
    alike, decoder = a_worker(1), a_worker(2, WorkerRole.DECODE)
    other = msgspec.structs.replace(a_worker(3), fingerprint="others")
    other_decoder = msgspec.structs.replace(a_worker(4, WorkerRole.DECODE), fingerprint="others")
    desk.changed(Members(workers=(own, alike, decoder, other, other_decoder)))
    assert desk.peer_registry.with_pages() == [alike, decoder]


START_S = 1.7e9


def joined_router(desk: Desk, hello: Hello) -> PostedPeer:
    """Join a router with a complete list."""
    router = desk.join(hello)
    desk.peer_registry.changed(router, Members(workers=()))
    return router


def a_router(age: float) -> Hello:
    return Hello(process=Kind.ROUTER, id=new_router_id(0, START_S - age, secrets.token_bytes(16)))


def test_there_is_no_common_router_without_routers() -> None:
    assert Desk().peer_registry.common_router is None


def test_oldest_router_is_the_common_one() -> None:
    newer, older = a_router(age=0.0), a_router(age=0.001)
    for hellos in ((newer, older), (older, newer)):
        desk = Desk()
        joined = {hello: joined_router(desk, hello) for hello in hellos}
        assert desk.peer_registry.common_router is joined[older]


def test_complete_list_outranks_age() -> None:
    desk = Desk()
    older, newer = desk.join(a_router(age=9.0)), joined_router(desk, a_router(age=1.0))
    assert desk.peer_registry.common_router is newer
    desk.peer_registry.changed(older, Members(workers=()))
    assert desk.peer_registry.common_router is older


def test_restarted_router_takes_over_nothing() -> None:
    desk = Desk()
    older, newer = (joined_router(desk, a_router(age)) for age in (9.0, 1.0))
    desk.peer_registry.left(older)
    assert desk.peer_registry.common_router is newer
    joined_router(desk, a_router(age=0.0))
    assert desk.peer_registry.common_router is newer


def test_router_ids_are_valid_and_differ() -> None:
    ids = {new_router_id(0, START_S, secrets.token_bytes(16)) for _ in range(100)}
    assert len({id_[:8] for id_ in ids}) > 90
    for id_ in ids:
        assert msgspec.convert(id_, Id) == id_


def test_supervisor_orders_its_routers_despite_calendar_jumps() -> None:
    older, newer = (
        Hello(process=Kind.ROUTER, id=new_router_id(number, START_S - day * 86_400, secrets.token_bytes(16)))
        for number, day in ((3, 0), (4, 1))
    )
    by_hand = a_router(age=86_400.0)
    desk = Desk()
    joined = {hello: joined_router(desk, hello) for hello in (by_hand, newer, older)}
    assert desk.peer_registry.common_router is joined[older]
