from random import Random

import msgspec
import pytest

from baton.clock import ManualClock
from baton.config.router import RouterConfig
from baton.errors import ProtocolError, WireError
from baton.messages.bounds import Kind
from baton.messages.codec import AnyMessage
from baton.messages.control import (
    Alive,
    AttemptFailed,
    Cancel,
    Ended,
    Failure,
    Heartbeat,
    Hello,
    Members,
    Reachable,
    Rejected,
    Routed,
    Started,
    Submit,
    Tokens,
)
from baton.messages.operations import (
    Drain,
    FindRequests,
    FoundRequests,
    GatewayReport,
    GatewayStatus,
    RestartWorker,
    Status,
    StatusQuery,
    SupervisorReport,
    Undrain,
    WatchWorkers,
    WorkerRemoved,
)
from baton.messages.workers import Load, RunningStep
from baton.router import membership
from baton.router.in_flight import SILENCE_S
from baton.router.membership import Member, Membership
from baton.router.router import SETTLE_S, Router
from baton.tenants import Quotas, SchedulingKey
from tests.node_peers import ListeningPeer, TestPeer, a_request, a_worker, hello_of, id_of
from tests.unit.router.router_cluster import Cluster, cluster


def test_peers_hear_every_change_of_the_members() -> None:
    c = cluster("p0")
    c.tick()
    c["p0"].take(Members)
    c["g"].take(Members)
    c.add("d0")
    for name in ("g", "p0", "d0"):
        assert [worker.name for worker in c[name].only(Members).workers] == ["p0", "d0"]
    c.tick()
    c["p0"].leave()
    for name in ("g", "d0"):
        assert [worker.name for worker in c[name].only(Members).workers] == ["d0"]


def test_list_is_complete_once_every_worker_had_time_to_join() -> None:
    c = cluster("d0")
    c.tick()
    assert not c["g"].take(Members)[-1].is_complete
    while c.clock.now_s() < 100 + SETTLE_S:
        c.beat("d0")
        c.tick()
    assert c["g"].take(Members)[-1].is_complete
    c.tick()
    assert c["g"].take(Members) == []


def test_list_of_a_router_that_was_cut_off_is_complete_once_every_worker_had_time_to_join_again() -> None:
    c = cluster("d0", "d1")
    c.settle("d0", "d1")
    for name in ("g", "d0", "d1"):
        c[name].leave()
    gateway = TestPeer.gateway(c.router, "g")
    c.tick()
    c.add("d0")
    c.tick()
    heard = gateway.take(Members)
    assert len(heard[0].workers) == 0 and len(heard[-1].workers) == 1
    assert not any(each.is_complete for each in heard)
    c.tick(SETTLE_S / 2)
    c.add("d1")
    c.tick()
    assert not any(each.is_complete for each in gateway.take(Members))
    c.beat("d0", "d1")
    c.tick(SETTLE_S / 2)
    assert gateway.take(Members)[-1].is_complete


@pytest.mark.parametrize("is_hung", [False, True])
def test_list_of_a_router_whose_workers_all_fall_silent_is_incomplete_and_of_hung_ones_complete(
    is_hung: bool,
) -> None:
    c = cluster("d0", "d1")
    c.settle("d0", "d1")
    c["g"].take(Members)
    if is_hung:
        for name in ("d0", "d1"):
            c[name].say(Alive(step=RunningStep(age_s=100.0, bound_s=10.0)))
    for _ in range(16):
        c.tick()
    last = c["g"].take(Members)[-1]
    assert not last.workers and last.is_complete == is_hung


def test_list_stays_complete_when_the_last_worker_leaves_in_order() -> None:
    c = cluster("d0")
    c.settle("d0")
    c.beat("d0", is_draining=True)
    c["d0"].leave()
    c.tick()
    last = c["g"].take(Members)[-1]
    assert last.is_complete and not last.workers


def test_silent_worker_is_dead_after_three_seconds() -> None:
    c = cluster("d0", "d1")
    for _ in range(12):
        c.beat("d1")
        c.tick()
    open_before = [c[name].is_open for name in ("d0", "d1")]
    c.beat("d1")
    c.tick()
    assert (open_before, [c[name].is_open for name in ("d0", "d1")]) == ([True, True], [False, True])
    assert [worker.name for worker in c["g"].take(Members)[-1].workers] == ["d1"]
    c["d0"].leave()
    assert isinstance(c.submit(), Routed)


def test_watching_operators_hear_of_silent_workers() -> None:
    c = cluster("d0", "d1", "d2")
    watching, other = (
        TestPeer.operator(c.router),
        TestPeer.operator(c.router, "other"),
    )
    watching.say(WatchWorkers())
    c["d1"].leave()
    for _ in range(14):
        c.beat("d2")
        c.tick()
    removed = watching.only(WorkerRemoved)
    assert (removed.worker, removed.name, removed.reason) == (id_of("d0"), "d0", "it was silent for 3 s")
    assert other.take(WorkerRemoved) == []


@pytest.mark.parametrize("order", [Undrain(worker="d7"), RestartWorker(worker="d7")])
def test_watching_operators_hear_which_worker_to_restart(order: Undrain | RestartWorker) -> None:
    c = cluster("d0")
    asking = TestPeer.operator(c.router)
    asking.say(order)
    assert asking.only(Status).num_watchers == 0
    watching = TestPeer.operator(c.router, "other")
    watching.say(WatchWorkers())
    asking.say(order)
    assert asking.only(Status).num_watchers == 1
    assert watching.only(type(order)) == order


def test_worker_that_serves_is_not_called_back() -> None:
    """Its supervisor would start it again after its next drain."""
    c = cluster("d0")
    asking = TestPeer.operator(c.router)
    watching = TestPeer.operator(c.router, "other")
    watching.say(WatchWorkers())
    asking.say(Undrain(worker="d0"))
    assert watching.take(Undrain) == []
    c["d0"].say(Heartbeat(load=Load(), is_draining=True))
    asking.say(Undrain(worker="d0"))
    assert watching.only(Undrain)


def test_status_tells_how_long_the_head_of_ray_is_away() -> None:
    c = cluster("d0")
    asking = TestPeer.operator(c.router)
    watching = TestPeer.operator(c.router, "other")
    watching.say(WatchWorkers())

    def away_s() -> float:
        asking.say(StatusQuery())
        return asking.only(Status).head_away_s

    watching.say(SupervisorReport(head_away_s=4.5))
    assert away_s() == 4.5
    watching.say(SupervisorReport(head_away_s=0.0))
    assert away_s() == 0.0
    watching.say(SupervisorReport(head_away_s=4.5))
    watching.leave()
    assert away_s() == 0.0


def test_operator_that_left_hears_nothing() -> None:
    c = cluster("d0")
    watching = TestPeer.operator(c.router)
    watching.say(WatchWorkers())
    watching.leave()
    watching.is_open = True
    for _ in range(14):
        c.tick()
    assert watching.take(WorkerRemoved) == []


def test_worker_in_a_slow_step_stays_while_it_gives_signs_of_life() -> None:
    c = cluster("d0")
    watching = TestPeer.operator(c.router)
    watching.say(WatchWorkers())
    for number in range(240):  # a minute of steps of 6 s: no Beat comes, which waits for a step to end
        c["d0"].say(Alive(step=RunningStep(age_s=0.25 * (number % 24), num_tokens=2048, bound_s=30.0)))
        c.tick()
    assert c["d0"].is_open and watching.take(WorkerRemoved) == []
    assert isinstance(c.submit(), Routed)


def test_worker_whose_step_exceeds_its_bound_is_removed_at_the_next_tick() -> None:
    c = cluster("d0", "d1")
    watching = TestPeer.operator(c.router)
    watching.say(WatchWorkers())
    c.submit(sticky_worker=id_of("d0"))
    c["d0"].say(Alive(step=RunningStep(age_s=30.0, num_tokens=2048, bound_s=30.0)))
    c.tick()
    was_open = c["d0"].is_open
    c["d0"].say(Alive(step=RunningStep(age_s=41.2, num_tokens=2048, bound_s=30.0)))
    c.tick()
    removed = watching.only(WorkerRemoved)
    assert (removed.name, removed.reason) == ("d0", "a step of 2048 tokens takes 41 s, its bound is 30 s")
    assert (was_open, c["d0"].is_open) == (True, False)
    assert [worker.name for worker in c["g"].take(Members)[-1].workers] == ["d1"]
    assert c["g"].only(AttemptFailed).failure is Failure.LOST


def test_pause_of_the_router_does_not_count_as_silence() -> None:
    c = cluster("d0")
    c.tick()
    c.tick(30.0)
    assert [worker.name for worker in c["g"].take(Members)[-1].workers] == ["d0"]
    for _ in range(13):
        c.tick()
    assert c["g"].take(Members)[-1].workers == ()


def test_later_process_of_a_name_fences_the_earlier() -> None:
    c = cluster("d0")
    former = c["d0"]
    c.add("d0", id=id_of("d0 again"))
    assert not former.is_open
    routed = c.submit()
    assert isinstance(routed, Routed) and routed.decode == id_of("d0 again")
    former.leave()
    assert isinstance(c.submit(a_request("more")), Routed)
    with pytest.raises(WireError, match="has been replaced"):
        TestPeer.worker(c.router, a_worker("d0"))


def test_id_of_another_name_is_refused() -> None:
    c = cluster("d0")
    with pytest.raises(ProtocolError, match="has the id of d0"):
        TestPeer.worker(c.router, a_worker("d1", id=id_of("d0")))
    assert isinstance(c.submit(), Routed)


def test_attempt_that_its_decode_worker_does_not_report_fails() -> None:
    c = cluster("d0", "d1")
    c.submit(a_request("lost"), sticky_worker=id_of("d0"))
    c.submit(a_request("reported"), sticky_worker=id_of("d0"))
    for _ in range(int(SILENCE_S) + 2):
        c.beat("d0", attempts=((id_of("reported"), 0),))
        c.beat("d1")
        c.tick(1.0)
    failed = c["g"].only(AttemptFailed)
    assert (failed.request_id, failed.failure) == (id_of("lost"), Failure.LOST)


@pytest.mark.parametrize("how", ["left", "silent", "connected again", "fenced"])
def test_attempts_on_a_lost_decode_worker_fail(how: str) -> None:
    c = cluster("d0")
    c.submit(a_request("ended"))
    c["g"].say(Ended(attempts=((id_of("ended"), 0),)))
    c.submit(a_request("waiting"))
    c.submit(a_request("started"))
    c["g"].say(Started(attempts=((id_of("started"), 0),)))
    if how == "left":
        c["d0"].leave()
    elif how == "silent":
        for _ in range(14):
            c.tick()
    else:
        c.add("d0", id=id_of("d0" if how == "connected again" else "d0 again"))
    failed = c["g"].take(AttemptFailed)
    assert {each.request_id for each in failed} == {id_of("waiting"), id_of("started")}
    assert {(each.attempt, each.failure, each.worker) for each in failed} == {(0, Failure.LOST, id_of("d0"))}


def test_restarted_worker_starts_without_load() -> None:
    c = cluster("d0")
    c.submit()
    c["d0"].leave()
    c.add("d0", id=id_of("d0 again"))
    assert c.router.in_flight.account(id_of("d0 again")).num_attempts == 0
    c["g"].say(Ended(attempts=((id_of("r"), 0),)))
    c.tick()
    c.router.in_flight.check_integrity()
    assert list(c.router.in_flight.workers()) == [id_of("d0 again")]


def test_status_has_workers_load_and_counters() -> None:
    c = cluster("p0", "d0")
    c.submit()
    c["d0"].say(Heartbeat(load=Load(num_running=3)))
    c.tick(0.5)
    for asker in (c["g"], TestPeer.operator(c.router)):
        asker.say(StatusQuery())
        status = asker.only(Status)
        assert (status.num_gateways, status.num_attempts) == (1, 1)
        workers = {worker.worker.name: worker for worker in status.workers}
        assert workers["d0"].load.num_running == 3
        assert (workers["d0"].num_attempts, workers["p0"].num_attempts) == (1, 1)
        assert workers["d0"].beat_age_s == pytest.approx(0.5)
        assert status.routers[0].counters == {"dispatched": 1}


@pytest.mark.parametrize(
    ("who", "message"),
    [
        ("g", Heartbeat(load=Load())),
        ("g", Tokens(events=())),
        ("g", Drain(worker="d0")),
        ("d0", Submit(request=a_request())),
        ("d0", Cancel(request_id=id_of("r"), attempt=0)),
        ("d0", Drain(worker="d0")),
        ("g", WatchWorkers()),
        ("d0", WatchWorkers()),
        ("d0", GatewayReport(status=GatewayStatus(id=id_of("g")))),
    ],
)
def test_forbidden_message_is_an_offence(who: str, message: AnyMessage) -> None:
    c = cluster("d0")
    with pytest.raises(ProtocolError):
        c[who].say(message)
    assert len(c.router.in_flight) == 0


def test_hello_of_a_worker_must_describe_it() -> None:
    c = cluster()
    for worker in (None, a_worker("d1")):
        with pytest.raises(ProtocolError, match="must describe it"):
            TestPeer(c.router, Hello(process=Kind.WORKER, id=id_of("d0"), worker=worker))
    with pytest.raises(ProtocolError):
        TestPeer.router(c.router)


def test_ends_of_unknown_attempts_are_no_offence() -> None:
    c = cluster("p0", "d0")
    c["g"].say(Ended(attempts=((id_of("unknown"), 0),)))
    c["g"].say(Started(attempts=((id_of("unknown"), 0),)))
    c.submit()
    for _ in range(2):
        c["g"].say(Started(attempts=((id_of("r"), 0),)))
    for _ in range(2):
        c["g"].say(Ended(attempts=((id_of("r"), 0),)))
    c.router.in_flight.check_integrity()
    assert len(c.router.in_flight) == 0


def test_refused_attempt_is_not_counted_as_routed() -> None:
    c = cluster("d0")
    limits = {"tenant": "t", "scheduling_key": SchedulingKey(quotas=Quotas(max_concurrent_requests=1))}
    answers = [c.submit(msgspec.structs.replace(a_request(name), **limits)) for name in ("a", "b", "c")]
    assert [type(answer) for answer in answers] == [Routed, Rejected, Rejected]
    assert c.router.status().routers[0].routing.num == 1


def test_status_holds_what_each_gateway_last_reported() -> None:
    c = cluster("d0")
    assert c.router.status().gateways == ()
    for num_refused in (3, 5):
        report = GatewayStatus(id=id_of("g"), node="host", pid=7, num_refused=num_refused)
        c["g"].say(GatewayReport(status=report))
    assert [gateway.num_refused for gateway in c.router.status().gateways] == [5]
    c["g"].leave()
    assert c.router.status().gateways == ()


@pytest.mark.parametrize("who", ["worker", "operator"])
def test_members_name_draining_workers(who: str) -> None:
    c = cluster("p", "d")
    c.tick()
    assert c["g"].take(Members)[-1].draining == ()
    if who == "worker":
        c["d"].say(Heartbeat(load=Load(), is_draining=True))
    else:
        TestPeer.operator(c.router).say(Drain(worker="d"))
    c.tick()
    assert c["g"].take(Members)[-1].draining == (id_of("d"),)
    assert c["p"].take(Members)[-1].draining == (id_of("d"),)
    c.tick()
    assert c["g"].take(Members) == []


def test_worker_is_ready_when_gateways_and_partners_reach_it() -> None:
    router = Router(RouterConfig(), ManualClock(), id_of("router"))
    p, d = (TestPeer.worker(router, a_worker(name)) for name in ("p", "d"))
    assert router.status().num_ready == 0
    p.say(Reachable(workers=(d.id,)))
    assert router.status().num_ready == 0
    d.say(Reachable(workers=(p.id,)))
    assert router.status().num_ready == 2
    gateway = TestPeer.gateway(router)
    assert router.status().num_ready == 0
    gateway.say(Reachable(workers=(d.id,)))
    assert router.status().num_ready == 1
    gateway.say(Reachable(workers=(d.id, p.id)))
    assert router.status().num_ready == 2
    d.leave()
    assert router.status().num_ready == 1


def test_workers_of_other_weights_need_not_reach_each_other() -> None:
    router = Router(RouterConfig(), ManualClock(), id_of("router"))
    for name, fingerprint in (("p", "f"), ("d", "others")):
        TestPeer.worker(router, a_worker(name, fingerprint=fingerprint))
    assert router.status().num_ready == 2


def test_ready_workers_are_those_that_pairs_of_workers_tell() -> None:
    for seed in range(200):
        random, members = Random(seed), Membership(ManualClock())
        for name in ("p0", "p1", "d0", "d1", "d2"):
            worker = a_worker(name, fingerprint=random.choice("ff2"), is_asleep=random.random() < 0.2)
            members.join(worker, ListeningPeer(hello_of(worker)))
        ids = [member.id for member in members.all()]
        for member in members.all():
            members.reach(member, (each for each in ids if random.random() < 0.9))
        by_gateways = tuple(frozenset(each for each in ids if random.random() < 0.9) for _ in range(seed % 3))
        assert members.num_ready(by_gateways) == sum(
            all(one.id in reached for reached in by_gateways)
            and (one.worker.is_asleep or all(are_connected(one, other) for other in members.all()))
            for one in members.all()
        )


def are_connected(one: Member, other: Member) -> bool:
    """True for workers that reach each other, or that do not work together."""
    if other.worker.is_asleep:
        return True
    if one.worker.role is other.worker.role or one.worker.fingerprint != other.worker.fingerprint:
        return True
    return one.id in other.reached and other.id in one.reached


def join(c: Cluster, which: str, incarnation: int) -> TestPeer:
    worker = msgspec.structs.replace(a_worker(which), name="d", incarnation=incarnation)
    return TestPeer.worker(c.router, worker)


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


def test_question_about_requests_goes_to_every_gateway_and_the_answers_to_the_asker() -> None:
    c = cluster("d0")
    gateways = [c["g"], TestPeer.gateway(c.router, "h")]
    operator = TestPeer.operator(c.router)
    operator.say(FindRequests(question=7, request_id=id_of("r")))
    for gateway in gateways:
        query = gateway.only(FindRequests)
        assert (query.question, query.asker, query.num_asked) == (7, operator.id, 2)
        gateway.say(FoundRequests.answer_to(query))
    assert [found.num_asked for found in operator.take(FoundRequests)] == [2, 2]
    gateways[0].say(FindRequests(question=8))
    gateways[1].say(FoundRequests.answer_to(gateways[1].only(FindRequests)))
    assert gateways[0].only(FoundRequests).question == 8
    operator.leave()
    gateways[0].say(FoundRequests(question=7, asker=operator.id))
    assert not operator.received


def test_question_without_a_gateway_is_answered_with_nothing() -> None:
    c = cluster()
    c["g"].leave()
    operator = TestPeer.operator(c.router)
    operator.say(FindRequests(question=1))
    assert operator.only(FoundRequests).num_asked == 0


def test_gateway_is_told_how_long_its_attempt_was_queued_and_behind_whom() -> None:
    c = cluster("d0", max_attempts=100)
    c["d0"].say(Heartbeat(load=Load()))
    requests = [a_request(f"r{number}", tenant="bulk" if number < 11 else "") for number in range(12)]
    for request in requests:
        c["g"].say(Submit(request=request))
    c["g"].received.clear()
    c.clock.advance(2.0)
    c["g"].say(Ended(attempts=tuple(request.key for request in requests[:10])))
    last = next(each for each in c["g"].take(Routed) if each.request_id == requests[11].request_id)
    assert last.dispatched_s - last.received_s == pytest.approx(2.0)
    assert last.num_ahead >= 1 and last.ahead_tenant == "bulk"
