"""What workers of both roles do alike: whom they hear, what they say, and what only their role answers."""

from collections.abc import Collection

import pytest

from baton.beats import Beats
from baton.clock import ManualClock
from baton.colleagues import Colleagues
from baton.control import Beat, Cancel, Hello, Members, PagesWanted, Pressure, Reachable
from baton.control_wire import AnyMessage
from baton.errors import ProtocolError
from baton.node import Peer
from baton.operating import Drain
from baton.pressure import Rung
from baton.reports import WorkerReports
from baton.wire_types import Kind
from baton.worker import Address, Load, Worker, WorkerRole
from baton.worker_node import WorkerNode
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
    """Of no role: it writes down what is left to one."""

    attempts = (("f" * 32, 0),)

    def __init__(self) -> None:
        self.post, self.links, self.wrote = Post(), Links(), list[object]()
        self.rungs: list[Rung] = []
        hello = Hello(process=Kind.WORKER, id=OURS.id, worker=OURS)
        colleagues = Colleagues(hello, [Address("127.0.0.1", 9)], lambda address: None)
        clock = ManualClock()
        super().__init__(colleagues, self.links, Beats(colleagues, clock), WorkerReports(colleagues, clock))

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

    def _pressed(self, rung: Rung) -> None:
        self.rungs.append(rung)

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


def test_it_keeps_links_to_all_others_that_are_listed_and_says_whom_it_reaches(worker: SomeWorker) -> None:
    router = worker.meet(ROUTER)
    worker.received(router, LISTED)
    assert worker.links.kept == [OTHER.id]
    assert worker.said(Reachable)[-1] == Reachable(workers=(OTHER.id,))
    worker.received(router, Members(workers=(OURS,)))
    assert worker.wrote == [OTHER.id] and worker.links.kept == []


def test_only_the_connection_in_use_is_lost(worker: SomeWorker) -> None:
    first, second = worker.meet(GATEWAY), worker.meet(GATEWAY)
    worker.left(first)
    assert not worker.wrote
    worker.left(second)
    assert worker.wrote == [GATEWAY.id]


def test_workers_that_only_a_lost_router_listed_are_lost_with_it(worker: SomeWorker) -> None:
    one, other = worker.meet(ROUTER), worker.meet(OTHER_ROUTER)
    worker.received(one, LISTED)
    worker.received(other, Members(workers=(OURS,)))
    worker.left(one)
    assert worker.wrote == [ROUTER.id, OTHER.id]


def test_of_several_routers_it_is_on_the_highest_rung(worker: SomeWorker) -> None:
    one, other = worker.meet(ROUTER), worker.meet(OTHER_ROUTER)
    for router, rung in (
        (one, Rung.MAKE_ROOM),
        (other, Rung.SMALL_CHUNKS),
        (other, Rung.CALM),
        (one, Rung.SHED),
    ):
        worker.received(router, Pressure(rung=rung))
    assert worker.rungs == [Rung.MAKE_ROOM, Rung.MAKE_ROOM, Rung.MAKE_ROOM, Rung.SHED]
    worker.left(one)
    assert worker.rungs[-1] is Rung.CALM, "who is gone presses nobody"


def test_it_says_at_once_that_it_drains(worker: SomeWorker) -> None:
    router = worker.meet(ROUTER)
    worker.tick()
    worker.received(router, Drain(worker="prefill-1"))
    beats = worker.said(Beat)
    assert beats == [
        Beat(load=Load(num_running=3), is_draining=is_draining, attempts=worker.attempts)
        for is_draining in (False, True)
    ]


@pytest.mark.parametrize(
    "message", [LISTED, Drain(worker="prefill-1"), PagesWanted(), Pressure(rung=Rung.SHED)]
)
def test_only_a_router_is_obeyed(worker: SomeWorker, message: AnyMessage) -> None:
    with pytest.raises(ProtocolError):
        worker.received(worker.meet(GATEWAY), message)
    assert not worker.is_draining and not worker.links.kept


def test_the_rest_is_its_roles(worker: SomeWorker) -> None:
    cancel = Cancel(request_id="f" * 32, attempt=0)
    worker.received(worker.meet(GATEWAY), cancel)
    assert worker.wrote == [cancel]
