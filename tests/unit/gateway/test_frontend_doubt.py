"""Which workers have died of a request, and which have only lost a connection or ended in order."""

from baton.errors import WorkerLost
from baton.gateway.streams.request_stream import DOUBT_S
from baton.messages.control import AttemptFailed, Failure, Members, Submit
from tests.node_peers import a_worker, id_of
from tests.unit.gateway.frontend_peers import event, failed, gateway


def test_worker_that_came_back_and_died_later_is_no_second_death() -> None:
    g = gateway("d0", "d1", "d2")
    sink = g.open()
    g.route("d0")
    g["d0"].leave()
    g.join("d0")
    g.route("d1")
    g.say("d1", event(0, attempt=1))
    g["d0"].leave()
    g["d1"].leave()
    g.tick(DOUBT_S)
    assert sink.error is None
    assert g.submitted().request.generated_token_ids == (100,)


def test_gateway_that_stood_still_gives_a_lost_worker_the_time_to_come_back() -> None:
    g = gateway("d0", "d1", "d2")
    sink = g.open()
    g.route("d0")
    g["d0"].leave()
    g.route("d1")
    g["d1"].leave()
    g.tick(DOUBT_S + 3.0)
    assert sink.error is None and g["router"].take(Submit) == []
    g.join("d1")
    g.tick(DOUBT_S / 2)
    g.tick(DOUBT_S / 2)
    for _ in range(4):
        g.tick(DOUBT_S)
    assert sink.error is None
    assert g.submitted().request.attempt == 2


def test_time_while_the_gateway_stood_still_is_no_want_of_workers() -> None:
    g = gateway("d0", max_wait_s=5.0)
    sink = g.open()
    g.route("d0")
    g["d0"].say(failed(Failure.BUSY))
    g.tick(20.0)
    g.tick(1.0)
    assert sink.error is None


def test_silence_while_the_gateway_stood_still_is_nobody_s() -> None:
    g = gateway("d0", max_silence_s=5.0)
    g.open()
    g.route("d0")
    g.tick(20.0)
    g.tick(1.0)
    assert g.frontend.counters["replays_error"] == 0


def test_death_that_others_see_first_counts_when_its_connection_ends_later() -> None:
    g = gateway("p0", "d0", "d1", "d2")
    sink = g.open()
    g.route("d0", "p0")
    lost = AttemptFailed(
        request_id=id_of("r"), attempt=0, failure=Failure.LOST, reason="gone", worker=id_of("p0")
    )
    g["d0"].say(lost)
    g.route("d1")
    g["d1"].leave()
    g["p0"].leave()
    g.tick(DOUBT_S)
    assert isinstance(sink.error, WorkerLost)


def test_worker_that_was_connected_all_the_while_has_not_died() -> None:
    g = gateway("p0", "d0", "d1", "d2")
    sink = g.open()
    g.route("d0", "p0")
    lost = AttemptFailed(
        request_id=id_of("r"), attempt=0, failure=Failure.LOST, reason="gone", worker=id_of("p0")
    )
    g["d0"].say(lost)
    g.route("d1")
    g.say("d1", event(0, attempt=1))
    g.tick(DOUBT_S)
    g["d1"].leave()
    g["p0"].leave()
    g.tick(DOUBT_S)
    assert sink.error is None
    assert g.submitted().request.attempt == 2


def test_worker_that_was_going_to_end_has_not_died() -> None:
    g = gateway("d0", "d1", "d2")
    sink = g.open()
    workers = tuple(map(a_worker, ("d0", "d1", "d2")))
    for decode in ("d0", "d1"):
        g.route(decode)
        g["router"].say(Members(workers=workers, draining=(id_of(decode),)))
        g[decode].leave()
    assert sink.error is None
    submit = g.submitted()
    assert submit.request.attempt == 2 and set(submit.avoid) == {id_of("d0"), id_of("d1")}
    assert g.frontend.counters["replays_drained"] == 2
