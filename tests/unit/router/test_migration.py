"""Attempts that another decode worker prepares while the one before them runs, and orders to migrate."""

from collections.abc import Iterator

import pytest

from baton.messages.control import Dispatch, Ended, Prefill, Rejected, Routed
from baton.messages.operations import Drain, Migrate, Migrated
from baton.tenants import Quotas
from tests.node_peers import TestPeer, a_request, id_of, name_of
from tests.unit.router.queue_cases import asked
from tests.unit.router.router_cluster import Cluster, cluster


@pytest.fixture
def c() -> Iterator[Cluster]:
    made = cluster("p0", "d0", "d1", local_prefill_tokens=8)
    yield made
    made.router.admission_queue.check_integrity()
    made.router.in_flight.check_integrity()


def migrate(c: Cluster, to: str = "", **fields: str) -> Routed | Rejected:
    sticky = id_of(to) if to else ""
    return c.submit(
        a_request(attempt=1), is_begun=True, sticky_worker=sticky, migrates_from=id_of("d0"), **fields
    )


def test_goes_past_the_queue_to_another_decode_worker_alone(c: Cluster) -> None:
    routed = migrate(c)
    assert isinstance(routed, Routed) and (name_of(routed.decode), routed.prefill) == ("d1", "")
    dispatch = c["d1"].only(Dispatch)
    assert (dispatch.migrates_from, dispatch.prefill) == (id_of("d0"), "")
    assert c["p0"].take(Prefill) == []
    c["g"].say(Ended(attempts=((id_of("r"), 1),), num_tokens=(3,)))
    assert not len(c.router.in_flight)


def test_goes_to_no_worker_but_the_named_one(c: Cluster) -> None:
    assert isinstance(migrate(c, to="d0"), Rejected)
    c.add("d2")
    routed = migrate(c, to="d2")
    assert isinstance(routed, Routed) and name_of(routed.decode) == "d2"


@pytest.mark.parametrize("obstacle", ["drains", "other weights", "unreached", "full"])
def test_is_rejected_and_not_queued_where_no_other_worker_takes_it(c: Cluster, obstacle: str) -> None:
    if obstacle == "drains":
        TestPeer.operator(c.router).say(Drain(worker="d1"))
    elif obstacle == "other weights":
        c["d1"].leave()
        c.add("d1", fingerprint="other")
    elif obstacle == "unreached":
        c["d1"].leave()
    else:
        c.add("d1", max_num_seqs=1)
        for name in ("x", "y"):
            assert isinstance(c.submit(a_request(name), sticky_worker=id_of("d1"), is_begun=True), Routed)
    c["g"].received.clear()
    assert isinstance(migrate(c), Rejected)
    assert not len(c.router.admission_queue)


def test_counts_among_the_active_requests_of_its_tenant(c: Cluster) -> None:
    first = asked("r", quotas=Quotas(max_active_sequences=1))
    c["g"].say(first)
    moved = asked("r", quotas=Quotas(max_active_sequences=1), attempt=1).request
    c.submit(moved, is_begun=True, migrates_from=id_of("d0"))
    quotas = c.router.admission_queue.quotas
    c["g"].say(Ended(attempts=((id_of("r"), 0),)))
    assert (quotas.num_active("a"), quotas.num_requests("a")) == (1, 1)
    c["g"].say(Ended(attempts=((id_of("r"), 1),)))
    assert quotas.num_requests("a") == 0


def test_order_reaches_every_gateway_and_each_answer_the_operator(c: Cluster) -> None:
    other, operator = TestPeer.gateway(c.router, "g2"), TestPeer.operator(c.router)
    operator.say(Migrate(question=3, worker="d0", to="d1"))
    for gateway in (c["g"], other):
        order = gateway.only(Migrate)
        assert (order.worker, order.to, order.num_asked) == (id_of("d0"), id_of("d1"), 2)
        gateway.say(Migrated.answer_to(order, num_moved=1))
    assert [each.num_moved for each in operator.take(Migrated)] == [1, 1]


def test_gateway_that_connects_again_has_lost_its_open_orders(c: Cluster) -> None:
    operator = TestPeer.operator(c.router)
    for question in (3, 4):
        operator.say(Migrate(question=question, worker="d0"))
    answered, _ = c["g"].take(Migrate)
    c["g"].say(Migrated.answer_to(answered, num_moved=1))
    TestPeer.gateway(c.router)
    assert [(each.question, each.is_lost) for each in operator.take(Migrated)] == [(3, False), (4, True)]


def test_order_with_an_unknown_worker_is_answered_by_the_router(c: Cluster) -> None:
    operator = TestPeer.operator(c.router)
    operator.say(Migrate(question=3, worker="d7"))
    assert operator.only(Migrated).reason == "there is no worker 'd7'"
    assert c["g"].take(Migrate) == []
