import secrets
from collections.abc import Sequence

import msgspec
import pytest

from baton.errors import WireError
from baton.messages.bounds import Id, Kind
from baton.messages.codec import AnyMessage
from baton.messages.control import AttemptFailed, Cancel, Failure, Hello, Members, Reachable, Tokens
from baton.messages.workers import Address, Worker, WorkerRole
from baton.request import TokenEvent, TokenLogprobs
from baton.rpc.peers import EVENTS_PER_MESSAGE, PeerRegistry, new_router_id
from tests.node_peers import ListeningPeer, a_worker, hello_of

ADDRESSES = [Address("127.0.0.1", 1), Address("127.0.0.1", 2)]
ROUTER = Hello(process=Kind.ROUTER, id="1" * 32)
OTHER_ROUTER = Hello(process=Kind.ROUTER, id="7" * 32)
GATEWAY = Hello(process=Kind.GATEWAY, id="2" * 32)
OTHER_GATEWAY = Hello(process=Kind.GATEWAY, id="3" * 32)
EVENT = TokenEvent("a" * 32, 0, 0, 1)
ONE, TWO, THREE = (a_worker(name) for name in ("p1", "p2", "p3"))


class Registry(PeerRegistry):
    """A worker's registry that keeps the dialled addresses."""

    def __init__(
        self, *wanted: WorkerRole, addresses: Sequence[Address] = ADDRESSES, name: str = "own"
    ) -> None:
        self.dialled: list[Address] = []
        super().__init__(hello_of(a_worker(name)), addresses, self.dialled.append, wanted)

    def join(self, hello: Hello) -> ListeningPeer:
        peer = ListeningPeer(hello)
        self.joined(peer)
        return peer

    def join_listing(self, hello: Hello, *workers: Worker, is_complete: bool = True) -> ListeningPeer:
        """Join a router with this list."""
        router = self.join(hello)
        self.lists(router, *workers, is_complete=is_complete)
        return router

    def lists(self, router: ListeningPeer, *workers: Worker, is_complete: bool = True) -> list[str]:
        return self.changed(router, Members(workers=workers, is_complete=is_complete))

    def is_router_in_use(self, peer: ListeningPeer) -> bool:
        return self.is_router(peer) and self.router is peer


def test_all_routers_are_dialled_while_one_is_missing() -> None:
    registry = Registry()
    router = registry.join(ROUTER)
    registry.keep_up()
    registry.join(OTHER_ROUTER)
    registry.keep_up()
    assert registry.dialled == ADDRESSES and registry.router is not None
    assert registry.left(router)
    registry.keep_up()
    assert registry.dialled == ADDRESSES * 2


def test_listed_workers_of_wanted_roles_are_dialled() -> None:
    registry = Registry(WorkerRole.PREFILL, addresses=ADDRESSES[:1])
    router, decoder = registry.join(ROUTER), a_worker("d0")
    registry.join(hello_of(ONE))
    assert registry.lists(router, ONE, TWO, decoder) == []
    registry.keep_up()
    assert registry.dialled == [TWO.address]
    assert registry.connected() == [ONE.id]
    assert list(registry.of_role(WorkerRole.DECODE)) == [decoder.id]


def test_newer_connection_replaces_the_older_one() -> None:
    registry = Registry()
    for hello in (GATEWAY, ROUTER):
        old, new = registry.join(hello), registry.join(hello)
        assert not registry.left(old) and registry.peer(hello.id) is new
        assert registry.is_router_in_use(new) is (hello is ROUTER) and not registry.is_router(old)
        assert registry.left(new) and registry.peer(hello.id) is None


def test_gateway_cannot_take_a_routers_id() -> None:
    registry = Registry()
    router, gateway = registry.join(ROUTER), ListeningPeer(Hello(process=Kind.GATEWAY, id=ROUTER.id))
    with pytest.raises(WireError, match="a gateway has the id of a router") as refused:
        registry.joined(gateway)
    assert refused.value.reason == "role"
    assert not registry.left(gateway) and not registry.is_router(gateway)
    assert registry.is_router_in_use(router)


def test_worker_that_only_a_lost_router_listed_is_gone() -> None:
    registry = Registry()
    one, other = registry.join_listing(ROUTER, ONE, TWO), registry.join_listing(OTHER_ROUTER, TWO)
    assert registry.left(one)
    assert registry.recount() == [ONE.id]
    assert registry.left(other)
    assert registry.recount() == [] and set(registry.members) == {TWO.id}  # the last router is lost


def test_list_of_a_lost_router_counts_until_another_list_is_complete() -> None:
    registry = Registry()
    one, other = registry.join_listing(ROUTER, ONE), registry.join(OTHER_ROUTER)
    registry.left(one)
    assert registry.recount() == []
    assert registry.lists(other, is_complete=False) == []
    assert registry.lists(other) == [ONE.id]


def test_router_with_a_complete_list_is_chosen() -> None:
    registry = Registry()
    one, other = registry.join(ROUTER), registry.join(OTHER_ROUTER)
    for knowing, starting in ((one, other), (other, one)):
        registry.lists(starting, is_complete=False)
        registry.lists(knowing)
        assert registry.router is knowing
    registry.left(other)
    assert registry.router is one


def test_processes_choose_different_routers() -> None:
    chosen = set()
    for number in range(32):
        registry = Registry(name=f"d{number}")
        registry.join_listing(ROUTER), registry.join_listing(OTHER_ROUTER)
        assert registry.router is not None
        chosen.add(registry.router.hello.id)
    assert chosen == {ROUTER.id, OTHER_ROUTER.id}


def test_each_router_gets_reports_that_are_new_to_it() -> None:
    registry = Registry()
    registry.report(["a" * 32])  # no router
    one, other = registry.join(ROUTER), registry.join(OTHER_ROUTER)
    for reachable in (["a" * 32], ["a" * 32], ["b" * 32, "a" * 32], ["a" * 32, "b" * 32], []):
        registry.report(reachable)
    expected = [Reachable(workers=ids) for ids in (("a" * 32,), ("a" * 32, "b" * 32), ())]
    assert one.received == other.received == expected
    registry.left(other)
    for _ in range(2):  # the second connection replaces one that has not ended
        again = registry.join(OTHER_ROUTER)
        registry.report([])
        assert again.received == [Reachable(workers=())]
    assert len(one.received) == 3


def test_messages_to_absent_peers_are_lost() -> None:
    registry = Registry()
    registry.tell(GATEWAY.id, Cancel(request_id="a" * 32, attempt=0))
    assert registry.join(GATEWAY).received == []


def test_tokens_leave_in_one_message_for_each_gateway() -> None:
    registry = Registry()
    gateways = registry.join(GATEWAY), registry.join(OTHER_GATEWAY)
    events = [TokenEvent("a" * 32, 0, index, index) for index in range(5)]
    for event in events:
        registry.emit(gateways[event.index % 2].id, event)
    assert not gateways[0].received
    registry.flush()
    registry.flush()
    assert [each.received for each in gateways] == [
        [Tokens(events=tuple(events[::2]))],
        [Tokens(events=tuple(events[1::2]))],
    ]


def test_many_tokens_leave_in_several_messages_in_order() -> None:
    registry = Registry()
    gateway = registry.join(GATEWAY)
    events = [TokenEvent("a" * 32, 0, index, 1) for index in range(2 * EVENTS_PER_MESSAGE + 1)]
    for event in events:
        registry.emit(GATEWAY.id, event)
    registry.flush()
    batches = gateway.take(Tokens)
    assert len(batches) == 3 and [event for batch in batches for event in batch.events] == events


def test_prompt_log_probabilities_leave_in_a_message_of_their_own() -> None:
    registry = Registry()
    gateway = registry.join(GATEWAY)
    logprobs = (None, TokenLogprobs(token_id=1, logprob=-1.0, rank=1))
    large = TokenEvent("a" * 32, 0, 0, 1, prompt_logprobs=logprobs)
    small = [TokenEvent("b" * 32, 0, index, 1) for index in range(3)]
    for event in (small[0], large, *small[1:]):
        registry.emit(GATEWAY.id, event)
    registry.flush()
    assert gateway.received == [Tokens(events=(large,)), Tokens(events=tuple(small))]


@pytest.mark.parametrize(("num_ticks", "received"), [(1, [Tokens(events=(EVENT,))]), (2, [])])
def test_tokens_wait_one_tick_for_their_gateway(num_ticks: int, received: list[AnyMessage]) -> None:
    registry = Registry()
    registry.emit(GATEWAY.id, EVENT)
    for _ in range(num_ticks):
        registry.flush()
        registry.keep_up()  # is no tick
        registry.tick()
    assert registry.join(GATEWAY).received == received


def test_failure_waits_for_its_gateway_and_leaves_after_its_tokens() -> None:
    registry = Registry()
    failed = AttemptFailed(request_id="a" * 32, attempt=0, failure=Failure.BUSY, reason="it drains")
    registry.emit(GATEWAY.id, EVENT)
    registry.fail(GATEWAY.id, failed)
    gateway = registry.join(GATEWAY)
    registry.fail(GATEWAY.id, failed)
    assert gateway.received == [Tokens(events=(EVENT,)), failed, failed]


def test_tokens_of_a_lost_gateway_are_dropped() -> None:
    registry = Registry()
    gateway = registry.join(GATEWAY)
    registry.emit(GATEWAY.id, EVENT)
    registry.left(gateway)
    assert registry.join(GATEWAY).received == []


def test_pages_are_exchanged_with_workers_of_the_same_weights() -> None:
    registry = Registry()
    decoder, others = a_worker("d0"), [a_worker(name, fingerprint="others") for name in ("p4", "d1")]
    registry.join_listing(ROUTER, a_worker("own"), ONE, decoder, *others)
    assert registry.with_pages() == [ONE, decoder]


START_S = 1.7e9


def a_router(age_s: float, incarnation: int = 0) -> Hello:
    id_ = new_router_id(incarnation, START_S - age_s, secrets.token_bytes(16))
    return Hello(process=Kind.ROUTER, id=id_)


def test_oldest_router_is_the_common_one() -> None:
    assert Registry().common_router is None
    newer, older = a_router(age_s=0.0), a_router(age_s=0.001)
    for hellos in ((newer, older), (older, newer)):
        registry = Registry()
        joined = {hello: registry.join_listing(hello) for hello in hellos}
        assert registry.common_router is joined[older]


def test_router_without_a_decode_worker_is_not_the_common_one() -> None:
    decoder = a_worker("d1")
    registry = Registry()
    older = registry.join(a_router(age_s=9.0))
    newer = registry.join_listing(a_router(age_s=1.0), ONE, decoder)
    assert registry.common_router is newer
    registry.lists(older, ONE, decoder)
    assert registry.common_router is older
    registry.lists(older, is_complete=False)  # it is cut off from the workers
    assert registry.common_router is newer
    registry.lists(older, ONE, is_complete=False)
    assert registry.common_router is newer
    registry.lists(older, decoder, is_complete=False)
    assert registry.common_router is older
    registry.left(older)
    assert registry.common_router is newer


def test_common_router_stays_while_lists_become_complete() -> None:
    registry = Registry()
    older, newer = registry.join(a_router(age_s=9.0)), registry.join(a_router(age_s=1.0))
    for router, is_complete in ((older, False), (newer, False), (newer, True), (older, True)):
        registry.lists(router, a_worker("d1"), is_complete=is_complete)
        assert registry.common_router is older


def test_restarted_router_takes_over_nothing() -> None:
    registry = Registry()
    older, newer = (registry.join_listing(a_router(age_s), ONE) for age_s in (9.0, 1.0))
    registry.left(older)
    registry.join_listing(a_router(age_s=0.0), ONE)
    assert registry.common_router is newer


def test_router_ids_are_valid_and_differ() -> None:
    ids = {new_router_id(0, START_S, secrets.token_bytes(16)) for _ in range(100)}
    assert len({id_[:8] for id_ in ids}) > 90
    for id_ in ids:
        assert msgspec.convert(id_, Id) == id_


def test_supervisor_orders_its_routers_despite_calendar_jumps() -> None:
    older, newer, by_hand = a_router(0.0, 3), a_router(86_400.0, 4), a_router(86_400.0)
    registry = Registry()
    joined = {hello: registry.join_listing(hello) for hello in (by_hand, newer, older)}
    assert registry.common_router is joined[older]
