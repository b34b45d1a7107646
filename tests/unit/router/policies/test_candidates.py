from hypothesis import given
from hypothesis import strategies as st

from baton.clock import ManualClock
from baton.messages.workers import Worker
from baton.router.index.prefix_index import Holdings, PrefixIndex
from baton.router.membership import Member
from baton.router.policies.base import WorkerPool, WorkerView
from tests.node_peers import TestPeer, a_worker
from tests.unit.router.router_cluster import cluster


def member(worker: Worker) -> Member:
    return Member(worker, TestPeer.worker(cluster().router, worker), 0.0)


def members(num: int) -> list[Member]:
    return [member(a_worker(f"p{number}")) for number in range(num)]


def holdings(side: WorkerPool, index: PrefixIndex, held: list[int]) -> Holdings:
    """The expected holders, by a sort of all members."""
    bits = [worker_view.slot_bit for worker_view in side.views(index)]
    assert all(bits)
    levels = sorted(set(filter(None, held)), reverse=True)
    return Holdings(
        [(num, sum(bit for bit, of in zip(bits, held, strict=True) if of >= num)) for num in levels]
    )


def names(stations: list[WorkerView], workers: list[Member]) -> list[str]:
    of = {each.id: each.worker.name for each in workers}
    return [of[worker_view.id] for worker_view in stations]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.integers(1, 12), st.integers(0, 11))
def test_holders_are_the_workers_that_hold_most(held: list[int], limit: int, first: int) -> None:
    workers, index = members(len(held)), PrefixIndex(ManualClock(), 1000)
    for each in workers:
        index.join(each.worker)
    side = WorkerPool(workers)
    stations, lengths = side.views(index), holdings(side, index, held)
    found = side.holders(side.families[0], lengths, limit, stations[first % len(held)])
    lengths_found = [lengths.num_pages(worker_view.slot_bit) for worker_view in found]
    assert lengths_found == sorted(filter(None, held), reverse=True)[:limit]
    assert len({worker_view.id for worker_view in found}) == len(found)


def test_among_equals_holders_begin_at_the_first_view() -> None:
    workers, index = members(4), PrefixIndex(ManualClock(), 1000)
    for each in workers:
        index.join(each.worker)
    side = WorkerPool(workers)
    stations, lengths = side.views(index), holdings(side, index, [2, 2, 2, 7])
    found = side.holders(side.families[0], lengths, 3, stations[1])
    assert names(found, workers) == ["p3", "p1", "p2"]


def test_worker_unknown_to_the_index_holds_nothing() -> None:
    workers, index = members(3), PrefixIndex(ManualClock(), 1000)
    side, everybody = WorkerPool(workers), Holdings([(9, 0b1111)])

    def found() -> list[str]:
        first = side.views(index)[0]
        return names(side.holders(side.families[0], everybody, 2, first), workers)

    assert found() == []
    index.join(workers[1].worker)
    assert found() == ["p1"]
    index.forget(workers[1].id)
    assert found() == []


def test_workers_with_other_page_keys_are_another_family() -> None:
    index, workers = PrefixIndex(ManualClock(), 1000), [member(a_worker("p0"))]
    workers.append(member(a_worker("p1", page_size=32)))
    side, everybody = WorkerPool(workers), Holdings([(1, 0b1111)])
    for each in workers:
        index.join(each.worker)
    first = side.views(index)[0]
    found = [side.holders(family, everybody, 4, first) for family in side.families]
    assert [names(some, workers) for some in found] == [["p0"], ["p1"]]
