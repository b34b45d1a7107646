"""The behaviour that both worker roles share."""

from collections.abc import Collection

import pytest

from baton.clock import ManualClock
from baton.errors import ProtocolError
from baton.messages.bounds import Kind
from baton.messages.codec import AnyMessage
from baton.messages.control import Cancel, Heartbeat, Hello, KvEventsWanted, Members, Pressure, Reachable
from baton.messages.operations import Drain
from baton.messages.status import OverloadLevel
from baton.messages.workers import Address, Load, Worker, WorkerRole
from baton.rpc.peers import Peer, PeerRegistry
from baton.rpc.reports import WorkerReports
from baton.rpc.worker_node import MAX_ENDED, EndedAttempts, WorkerNode
from tests.fakes import Post, PostedPeer


def a_worker(number: int) -> Worker:
    return Worker(
        id=f"{number:032x}",
        name=f"prefill-{number}",
        role=WorkerRole.PREFILL,
        model="model",
        fingerprint="f",
        address=Address("127.0.0.1", number),
        kv_address=Address("127.0.0.1", number),
        page_size=16,
        num_pages=8,
        max_num_seqs=1,
        max_model_len=64,
    )


OURS, OTHER = a_worker(1), a_worker(2)
ROUTER = Hello(process=Kind.ROUTER, id="e" * 32)
OTHER_ROUTER = Hello(process=Kind.ROUTER, id="c" * 32)
GATEWAY = Hello(process=Kind.GATEWAY, id="d" * 32)
LISTED = Members(workers=(OURS, OTHER))


class Links:
    def __init__(self) -> None:
        self.kept: list[str] = []

    def keep_up(self, workers: Collection[Worker]) -> None:
        self.kept = [worker.id for worker in workers]


class SomeWorker(WorkerNode):
    """Keeps the calls that a role would handle."""

    attempts = (("f" * 32, 0),)

    def __init__(self) -> None:
        self.post, self.links, self.wrote = Post(), Links(), list[object]()
        self.levels: list[OverloadLevel] = []
        hello = Hello(process=Kind.WORKER, id=OURS.id, worker=OURS)
        peer_registry = PeerRegistry(hello, [Address("127.0.0.1", 9)], lambda address: None)
        clock = ManualClock()
        super().__init__(
            peer_registry,
            self.links,
            WorkerReports(peer_registry, clock),
        )

    def load(self) -> Load:
        return Load(num_running=3)

    def meet(self, hello: Hello) -> PostedPeer:
        peer = PostedPeer(self.hello.id, hello, self.post)
        self.joined(peer)
        return peer

    def said(self, kind: type[AnyMessage]) -> list[AnyMessage]:
        return [letter.message for letter in self.post.take() if isinstance(letter.message, kind)]

    def _reachable(self) -> list[str]:
        return self.links.kept

    def _pressed(self, level: OverloadLevel) -> None:
        self.levels.append(level)

    def _lost(self, peer: Peer) -> None:
        self.wrote.append(peer.hello.id)

    def _lost_workers(self, ids: list[str]) -> None:
        self.wrote += ids

    def _heard(self, peer: Peer, message: AnyMessage) -> None:
        if not isinstance(message, Cancel):
            raise ProtocolError("nothing for it")
        self.wrote.append(message)


@pytest.fixture
def worker() -> SomeWorker:
    return SomeWorker()


def test_listed_workers_get_links_and_reachable_ones_are_reported(worker: SomeWorker) -> None:
    router = worker.meet(ROUTER)
    worker.received(router, LISTED)
    assert worker.links.kept == [OTHER.id]
    assert worker.said(Reachable)[-1] == Reachable(workers=(OTHER.id,))
    worker.received(router, Members(workers=(OURS,)))
    assert worker.wrote == [OTHER.id] and worker.links.kept == []


def test_end_of_a_replaced_connection_is_no_loss(worker: SomeWorker) -> None:
    first, second = worker.meet(GATEWAY), worker.meet(GATEWAY)
    worker.left(first)
    assert not worker.wrote
    worker.left(second)
    assert worker.wrote == [GATEWAY.id]


def test_workers_of_a_lost_router_are_lost(worker: SomeWorker) -> None:
    one, other = worker.meet(ROUTER), worker.meet(OTHER_ROUTER)
    worker.received(one, LISTED)
    worker.received(other, Members(workers=(OURS,)))
    worker.left(one)
    assert worker.wrote == [ROUTER.id, OTHER.id]


def test_highest_overload_level_of_all_routers_holds(worker: SomeWorker) -> None:
    one, other = worker.meet(ROUTER), worker.meet(OTHER_ROUTER)
    for router, level in (
        (one, OverloadLevel.MAKE_ROOM),
        (other, OverloadLevel.SMALL_CHUNKS),
        (other, OverloadLevel.CALM),
        (one, OverloadLevel.SHED),
    ):
        worker.received(router, Pressure(level=level))
    assert worker.levels == [
        OverloadLevel.MAKE_ROOM,
        OverloadLevel.MAKE_ROOM,
        OverloadLevel.MAKE_ROOM,
        OverloadLevel.SHED,
    ]
    worker.left(one)
    assert worker.levels[-1] is OverloadLevel.CALM


def test_drain_is_reported_at_once(worker: SomeWorker) -> None:
    router = worker.meet(ROUTER)
    worker.tick()
    worker.received(router, Drain(worker="prefill-1"))
    beats = worker.said(Heartbeat)
    assert beats == [
        Heartbeat(load=Load(num_running=3), is_draining=is_draining, attempts=worker.attempts)
        for is_draining in (False, True)
    ]


@pytest.mark.parametrize(
    "message", [LISTED, Drain(worker="prefill-1"), KvEventsWanted(), Pressure(level=OverloadLevel.SHED)]
)
def test_only_routers_give_orders(worker: SomeWorker, message: AnyMessage) -> None:
    with pytest.raises(ProtocolError):
        worker.received(worker.meet(GATEWAY), message)
    assert not worker.is_draining and not worker.links.kept


def test_other_messages_go_to_the_role(worker: SomeWorker) -> None:
    cancel = Cancel(request_id="f" * 32, attempt=0)
    worker.received(worker.meet(GATEWAY), cancel)
    assert worker.wrote == [cancel]


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
