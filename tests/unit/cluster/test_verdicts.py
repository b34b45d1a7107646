from baton.clock import ManualClock
from baton.cluster.supervisor import SILENCE_GRACE_S, Verdicts
from baton.messages.control import Members
from baton.messages.operations import Undrain, WorkerRemoved
from tests.node_peers import a_worker, id_of


class Watched:
    """Verdicts, with what they led to."""

    def __init__(self, *routers: str) -> None:
        self.clock = ManualClock()
        self.replaced: list[tuple[str, float]] = []
        self.orders: list[object] = []
        self.verdicts = Verdicts(
            self.clock.now_s,
            lambda name, why, age_s: self.replaced.append((name, age_s)),
            self.orders.append,
        )
        for router in routers:
            self.verdicts.joined(router)
            self.lists(router, "d0", "d1")

    def lists(self, router: str, *names: str, is_complete: bool = True) -> None:
        workers = tuple(a_worker(name) for name in names)
        self.verdicts.told(router, Members(workers=workers, is_complete=is_complete))

    def removes(self, router: str, name: str, *, is_hung: bool = True) -> None:
        removed = WorkerRemoved(worker=id_of(name), name=name, reason="for some reason", is_hung=is_hung)
        self.verdicts.told(router, removed)

    def passes(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.verdicts.tick()


def test_worker_that_the_only_router_removes_is_replaced_at_once() -> None:
    watched = Watched("a")
    watched.removes("a", "d0")
    assert watched.replaced == [("d0", 0.0)]
    watched.lists("a", "d1")
    assert len(watched.replaced) == 1


def test_worker_that_another_router_lists_is_kept() -> None:
    watched = Watched("a", "b")
    watched.removes("a", "d0")
    watched.lists("a", "d1")
    watched.lists("b", "d0", "d1")
    assert watched.replaced == []


def test_worker_is_replaced_when_the_last_router_loses_it() -> None:
    watched = Watched("a", "b")
    watched.removes("a", "d0")
    watched.clock.advance(2.0)
    watched.lists("b", "d1")  # its connection ended there, which is no verdict
    assert watched.replaced == [("d0", 2.0)]


def test_worker_is_replaced_when_the_router_that_lists_it_leaves() -> None:
    watched = Watched("a", "b")
    watched.removes("a", "d0")
    watched.verdicts.left("b")
    assert watched.replaced == [("d0", 0.0)]


def test_router_that_does_not_know_all_workers_yet_is_waited_for() -> None:
    watched = Watched("a")
    watched.verdicts.joined("b")
    watched.removes("a", "d0")
    watched.lists("b", "d1", is_complete=False)
    assert watched.replaced == []
    watched.lists("b", "d0", "d1")
    assert watched.replaced == []
    watched.lists("b", "d1")
    assert watched.replaced == [("d0", 0.0)]


def test_worker_that_its_router_lists_again_is_kept() -> None:
    watched = Watched("a", "b")
    watched.removes("a", "d0")
    watched.lists("a", "d0", "d1")
    watched.lists("b", "d1")
    watched.lists("a", "d1")  # it left in order
    assert watched.replaced == []


def test_worker_with_a_listed_successor_is_not_replaced_again() -> None:
    watched = Watched("a", "b")
    watched.removes("a", "d0")
    successor = a_worker("d0", id=id_of("d0, the second"))
    watched.verdicts.told("b", Members(workers=(successor, a_worker("d1"))))
    assert watched.replaced == []


def test_silent_worker_is_replaced_after_a_grace() -> None:
    watched = Watched("a")
    watched.removes("a", "d0", is_hung=False)
    watched.passes(SILENCE_GRACE_S - 0.1)
    assert watched.replaced == []
    watched.passes(0.1)
    assert watched.replaced == [("d0", SILENCE_GRACE_S)]


def test_silent_worker_that_comes_back_within_its_grace_is_kept() -> None:
    watched = Watched("a")
    watched.removes("a", "d0", is_hung=False)
    watched.passes(1.0)
    watched.lists("a", "d0", "d1")
    watched.passes(SILENCE_GRACE_S)
    assert watched.replaced == []


def test_worker_that_hangs_in_its_grace_is_replaced_at_once() -> None:
    watched = Watched("a", "b")
    watched.removes("a", "d0", is_hung=False)
    watched.passes(1.0)
    watched.removes("b", "d0")
    assert watched.replaced == [("d0", 1.0)]


def test_order_of_an_operator_is_passed_on() -> None:
    watched = Watched("a")
    watched.verdicts.told("a", Undrain(worker="d0"))
    assert (watched.orders, watched.replaced) == ([Undrain(worker="d0")], [])
