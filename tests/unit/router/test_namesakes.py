"""Two processes of one name: the process that started last is the worker, in any order of joining."""

import msgspec
import pytest

from baton.errors import WireError
from baton.router import membership
from tests.node_peers import TestPeer, a_worker, id_of
from tests.unit.router.router_cluster import Cluster, cluster


def join(c: Cluster, which: str, incarnation: int) -> TestPeer:
    worker = msgspec.structs.replace(a_worker(which), name="d", incarnation=incarnation)
    return TestPeer.worker(c.router, worker)


def test_later_process_replaces_the_earlier() -> None:
    c = cluster()
    earlier = join(c, "earlier", 1)
    join(c, "later", 2)
    assert not earlier.is_open
    assert c.router.members.find("d") is c.router.members.get(id_of("later"))


def test_earlier_process_is_refused_while_the_later_is_connected() -> None:
    """After a restart of the router, a suspended process wakes up."""
    c = cluster()
    later = join(c, "later", 2)
    with pytest.raises(WireError, match="has started after") as refused:
        join(c, "earlier", 1)
    assert refused.value.reason == "fenced"
    assert later.is_open
    assert c.router.members.get(id_of("later")) is not None


def test_earlier_process_is_admitted_while_the_later_is_away() -> None:
    c = cluster()
    join(c, "later", 2).leave()
    earlier = join(c, "earlier", 1)
    assert c.router.members.get(id_of("earlier")) is not None
    join(c, "later", 2)
    assert not earlier.is_open
    assert c.router.members.get(id_of("later")) is not None


def test_of_two_processes_started_by_hand_the_last_to_join_stays() -> None:
    c = cluster()
    first = join(c, "first", 0)
    join(c, "second", 0)
    assert not first.is_open
    with pytest.raises(WireError, match="has been replaced"):
        join(c, "first", 0)


def test_of_two_processes_started_by_hand_the_silent_one_is_refused() -> None:
    c = cluster()
    join(c, "earlier", 0).leave()  # as when the router gave it up for its silence
    later = join(c, "later", 0)
    with pytest.raises(WireError, match="has been replaced"):
        join(c, "earlier", 0)
    assert later.is_open


def test_process_that_lost_its_connection_may_join_again() -> None:
    c = cluster()
    join(c, "only", 0).leave()
    join(c, "only", 0)
    assert c.router.members.find("d") is c.router.members.get(id_of("only")) is not None


def test_names_of_workers_that_left_are_forgotten_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(membership, "MAX_LATEST", 2)
    c = cluster()
    here = TestPeer.worker(c.router, msgspec.structs.replace(a_worker("here"), name="here"))
    for number in range(5):
        worker = msgspec.structs.replace(a_worker(f"w{number}"), name=f"w{number}")
        TestPeer.worker(c.router, worker).leave()
    assert here.is_open
    assert c.router.members.find("here") is c.router.members.get(id_of("here")) is not None
