import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from baton.clock import ManualClock
from baton.router.membership import Member
from baton.router.prefix_index import PrefixIndex
from baton.router.prompt_keys import family_of
from baton.router.sides import Side
from baton.worker import Worker
from tests.node_peers import TestPeer, a_worker
from tests.unit.router.router_cluster import cluster


def member(worker: Worker) -> Member:
    return Member(worker, TestPeer.worker(cluster().router, worker), 0.0)


def members(num: int) -> list[Member]:
    return [member(a_worker(f"p{number}")) for number in range(num)]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.integers(1, 12))
def test_nobody_who_is_left_out_holds_more(held: list[int], most: int) -> None:
    workers, index = members(len(held)), PrefixIndex(ManualClock(), 1000)
    lengths = np.zeros(16, np.int32)
    for each, length in zip(workers, held, strict=True):
        index.join(each.worker)
        lengths[index.slot(each.id)] = length
    family = family_of(workers[0].worker)
    found = Side(workers).holders(index, family, lengths, most)
    lengths_found = [int(lengths[index.slot(each.id)]) for each in found]
    assert sorted(lengths_found, reverse=True) == sorted(filter(None, held), reverse=True)[:most]


def test_worker_that_the_index_does_not_know_holds_nothing() -> None:
    workers, index = members(3), PrefixIndex(ManualClock(), 1000)
    side = Side(workers)
    lengths = np.full(4, 9, np.int32)
    assert side.holders(index, side.families[0], lengths, 2) == []
    index.join(workers[1].worker)
    assert side.holders(index, side.families[0], lengths, 2) == [workers[1]]
    index.forget(workers[1].id)
    assert side.holders(index, side.families[0], lengths, 2) == []


def test_workers_that_name_pages_otherwise_are_another_family() -> None:
    index = PrefixIndex(ManualClock(), 1000)
    side = Side([member(a_worker("p0")), member(a_worker("p1", page_size=32))])
    for each in side.members:
        index.join(each.worker)
    found = {family: side.holders(index, family, np.ones(4, np.int32), 4) for family in side.families}
    assert [[each.worker.name for each in some] for some in found.values()] == [["p0"], ["p1"]]
