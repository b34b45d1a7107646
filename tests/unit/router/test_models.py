"""Several models behind one router: each has its own queue, and the quotas of tenants go over all."""

from collections.abc import Iterator
from typing import Any

import pytest

from baton.messages.control import (
    Dispatch,
    Ended,
    Heartbeat,
    Prefill,
    Pressure,
    Queued,
    Reachable,
    Rejected,
    Routed,
    Submit,
)
from baton.messages.operations import Status, StatusQuery
from baton.messages.orders import Sleep, Wake
from baton.messages.workers import Load
from baton.router.queue.admission import MIN_COMPUTING
from baton.tenants import Quotas, Refusal, SchedulingKey
from tests.node_peers import TestPeer, a_request, id_of, name_of
from tests.unit.router.router_cluster import Cluster, cluster

ONE_ACTIVE = SchedulingKey(quotas=Quotas(max_active_sequences=1))
ONE_QUEUED = SchedulingKey(quotas=Quotas(max_active_sequences=1, max_queued=1))


@pytest.fixture(params=["least-loaded", "cost", "round-robin", "prefix"])
def c(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Workers of two models with equal weights, so that only the model's name tells them apart."""
    made = cluster(policy=request.param, local_prefill_tokens=0)
    for model in ("a", "b"):
        made.add(f"p-{model}", model=model)
        made.add(f"d-{model}", model=model, max_num_seqs=1)
    yield made
    check(made)


def check(c: Cluster) -> None:
    c.router.dispatchers.check_integrity()
    c.router.in_flight.check_integrity()


def submit(c: Cluster, name: str, model: str, **fields: Any) -> Routed | Rejected | Queued:
    return answer(c, Submit(request=a_request(name, model=model, **fields)))


def answer(c: Cluster, message: Submit) -> Routed | Rejected | Queued:
    c["g"].say(message)
    found = c["g"].received.pop()
    assert isinstance(found, Routed | Rejected | Queued)
    return found


def fill(c: Cluster, model: str) -> None:
    """Dispatch requests until the decode worker of the model takes no more; one waits then."""
    for number in range(8):
        if isinstance(submit(c, f"{model}{number}", model), Queued):
            return
    raise AssertionError("the worker is never full")


def end(c: Cluster, *names: str) -> None:
    c["g"].say(Ended(attempts=tuple((id_of(name), 0) for name in names), num_tokens=()))


def test_request_runs_on_workers_of_its_model_alone(c: Cluster) -> None:
    for number in range(6):
        model = "ab"[number % 2]
        routed = submit(c, f"r{number}", model)
        assert isinstance(routed, Routed)
        assert name_of(routed.decode) == f"d-{model}" and name_of(routed.prefill) in ("", f"p-{model}")
        end(c, f"r{number}")


def test_probe_and_begun_attempt_stay_within_their_model(c: Cluster) -> None:
    probe = submit(c, "r0", "b", is_probe=True)
    assert isinstance(probe, Routed)
    assert (name_of(probe.decode), name_of(probe.prefill)) == ("d-b", "p-b")
    request = a_request("r1", model="b", attempt=1, generated_token_ids=(3,))
    begun = answer(c, Submit(request=request, is_begun=True, avoid=(id_of("d-b"),)))
    assert isinstance(begun, Routed) and name_of(begun.decode) == "d-b"


def test_migration_goes_to_no_worker_of_another_model(c: Cluster) -> None:
    request = a_request("r", model="a", attempt=1)
    assert isinstance(answer(c, Submit(request=request, is_begun=True, migrates_from=id_of("d-a"))), Rejected)


def test_full_model_holds_up_no_request_for_another(c: Cluster) -> None:
    fill(c, "a")
    assert isinstance(submit(c, "r", "b"), Routed)
    status = status_of(c)
    assert status.queue.num_queued == 1 and status.routers[0].queue.num_queued == 1


def test_queued_request_gets_the_room_that_comes_free_in_its_model(c: Cluster) -> None:
    fill(c, "a")
    assert isinstance(submit(c, "r", "b"), Routed)
    c["d-a"].received.clear()
    end(c, "r")
    assert not c["d-a"].take(Dispatch)
    end(c, "a0")
    assert len(c["d-a"].take(Dispatch)) == 1


def test_request_for_a_model_without_workers_is_rejected_and_no_other_worker_hears_of_it(c: Cluster) -> None:
    fill(c, "a")
    refused = submit(c, "r", "c")
    assert isinstance(refused, Rejected) and refused.refusal is Refusal.NO_ROOM
    assert all(not c[name].take(Prefill) for name in ("p-b",)) and not c["d-b"].take(Dispatch)
    c.add("d-c", model="c")
    routed = submit(c, "r", "c")
    assert isinstance(routed, Routed) and (name_of(routed.decode), routed.prefill) == ("d-c", "")


def test_request_for_a_model_without_workers_does_not_wait_for_slots_of_others() -> None:
    c = cluster(policy="least-loaded", local_prefill_tokens=0)
    for name in ("p-a", "d-a"):
        c.add(name, model="a", num_pages=10_000, max_model_len=65_536)
    request = a_request("b", model="b")
    for number in range(MIN_COMPUTING):
        assert isinstance(answer(c, Submit(request=a_request(f"a{number}", 3000, model="a"))), Routed)
    assert isinstance(answer(c, Submit(request=a_request("waiting", 3000, model="a"))), Queued)
    for is_begun in (False, True):
        refused = answer(c, Submit(request=request, is_begun=is_begun))
        assert isinstance(refused, Rejected) and refused.refusal is Refusal.NO_ROOM
    check(c)


def test_active_requests_of_a_tenant_count_over_all_models(c: Cluster) -> None:
    key = ONE_ACTIVE
    assert isinstance(submit(c, "r0", "a", tenant="t", scheduling_key=key), Routed)
    assert isinstance(submit(c, "r1", "b", tenant="t", scheduling_key=key), Queued)
    assert isinstance(submit(c, "r2", "b", tenant="u", scheduling_key=key), Routed)
    end(c, "r2")
    assert not c["g"].take(Routed)
    end(c, "r0")
    assert name_of(c["g"].only(Routed).decode) == "d-b"


def test_queued_requests_of_a_tenant_count_over_all_models(c: Cluster) -> None:
    key = ONE_QUEUED
    assert isinstance(submit(c, "r0", "a", tenant="t", scheduling_key=key), Routed)
    assert isinstance(submit(c, "r1", "a", tenant="t", scheduling_key=key), Queued)
    refused = submit(c, "r2", "b", tenant="t", scheduling_key=key)
    assert isinstance(refused, Rejected) and refused.refusal is Refusal.MAX_QUEUED


def test_overload_of_one_model_is_told_to_its_workers_alone(c: Cluster) -> None:
    """Pages in use are the pressure; a promise makes it matter."""
    key = SchedulingKey(max_queue_delay_ms=60_000.0)
    assert isinstance(submit(c, "r", "a", scheduling_key=key), Routed)
    for _ in range(40):
        c["d-a"].say(Heartbeat(load=Load(pages={"active": 64}), attempts=((id_of("r"), 0),)))
        c.beat("p-a", "p-b", "d-b")
        c.tick(0.25)
    levels = {name: c[name].take(Pressure) for name in ("p-a", "d-a", "p-b", "d-b")}
    assert levels["p-a"] and levels["d-a"] and not levels["p-b"] and not levels["d-b"]


def test_gateway_that_leaves_takes_its_requests_out_of_every_queue(c: Cluster) -> None:
    for model in ("a", "b"):
        fill(c, model)
    c["g"].leave()
    assert not len(c.router.in_flight) and status_of_router(c).routers[0].queue.num_queued == 0


def status_of(c: Cluster) -> Status:
    c["g"].say(StatusQuery())
    found = c["g"].received.pop()
    assert isinstance(found, Status)
    return found


def status_of_router(c: Cluster) -> Status:
    return c.router.status()


def test_one_model_has_one_dispatcher() -> None:
    c = cluster("p0", "d0")
    assert isinstance(c.submit(), Routed)
    assert len(list(c.router.dispatchers)) == 1


# Sleep.


def test_order_to_sleep_goes_to_the_workers_of_the_model_which_get_no_new_work(c: Cluster) -> None:
    operator = TestPeer.operator(c.router)
    operator.say(Sleep(model="b", level=2))
    assert isinstance(operator.only(Status), Status)
    assert [c[name].take(Sleep) for name in ("p-a", "d-a")] == [[], []]
    assert all(c[name].only(Sleep).level == 2 for name in ("p-b", "d-b"))
    assert isinstance(submit(c, "r0", "b"), Rejected)
    assert isinstance(submit(c, "r1", "a"), Routed)


def test_sleeping_worker_is_a_member_without_work_and_hears_of_the_wake(c: Cluster) -> None:
    for name in ("p-b", "d-b"):
        c[name].leave()
        c.add(name, id=id_of(f"{name}-asleep"), model="b", is_asleep=True)
    assert isinstance(submit(c, "r0", "b"), Rejected)
    assert status_of(c).num_ready == 4  # the workers that serve need no links to sleeping workers
    awake = (c["p-a"].id, c["d-a"].id)
    c["g"].say(Reachable(workers=awake))
    assert status_of(c).num_ready == 2  # the gateway does not know yet that the others sleep
    c.all_reach_all()
    c["g"].say(Wake(model="b"))
    assert c["d-b"].only(Wake) and c["p-b"].only(Wake) and not c["d-a"].take(Wake)
    for name in ("p-b", "d-b"):
        c[name].leave()
        c.add(name, id=id_of(f"{name}-awake"), model="b")
    assert isinstance(submit(c, "r1", "b"), Routed)


def test_order_with_the_highest_number_holds_whichever_gateway_gave_it(c: Cluster) -> None:
    gateways = c["g"], TestPeer.gateway(c.router, "g2")
    orders: list[Sleep | Wake] = [Sleep(model="b", number=5), Wake(model="b", number=6)]
    for _ in range(3):  # each gateway repeats its order until it hears of the other one
        for gateway, order in zip(gateways, orders, strict=True):
            gateway.say(order)
    heard = [each for each in c["d-b"].received if isinstance(each, Sleep | Wake)]
    assert heard == [orders[0], *orders[1:] * 3]
    assert status_of(c).orders == (orders[1],)
    c["g"].say(Sleep(model="b", number=7))
    assert c["d-b"].take(Sleep)[-1].number == 7


def test_workers_that_ignored_an_order_to_sleep_get_work_again_after_the_wake(c: Cluster) -> None:
    """They had heard of the wake first, from another router."""
    c["g"].say(Sleep(model="b", number=5))
    assert isinstance(submit(c, "r0", "b"), Rejected)
    c["g"].say(Wake(model="b", number=6))
    c.beat("p-b", "d-b", is_draining=True)
    assert isinstance(submit(c, "r1", "b"), Rejected), "perhaps they still follow the order to sleep"
    c.beat("p-b", "d-b")
    assert isinstance(submit(c, "r2", "b"), Routed)


def test_worker_that_starts_while_its_model_sleeps_is_put_to_sleep_and_gets_no_work(c: Cluster) -> None:
    c["g"].say(Sleep(model="b", level=2, number=5))
    for name in ("p-b", "d-b"):
        c[name].leave()
    c.add("d-b", id=id_of("d-b-again"), model="b")
    assert c["d-b"].only(Sleep).level == 2
    assert isinstance(submit(c, "r0", "b"), Rejected)
    c["d-b"].leave()
    c.add("d-b", id=id_of("d-b-asleep"), model="b", is_asleep=True, order_number=5)
    assert not c["d-b"].take(Sleep), "it has followed"


def test_router_that_starts_learns_the_orders_from_workers() -> None:
    c = cluster()
    c.add("d0", is_asleep=True, sleep_level=2, order_number=5)
    c.add("p0")
    given = c["p0"].only(Sleep)
    assert (given.number, given.level) == (5, 2)
    c.add("d1", order_number=6)
    assert not c["d1"].take(Sleep) and status_of_router(c).orders[-1].number == 6
    assert {c[name].only(Wake).number for name in ("d0", "p0")} == {6}, "they have missed it"
