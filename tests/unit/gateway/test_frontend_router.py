"""Requests while the router has no room, is gone, or is another one."""

import pytest

from baton.errors import Overloaded
from baton.gateway.streams.frontend import UNHEARD_S
from baton.gateway.streams.routers import SILENT_S
from baton.messages.control import Cancel, Failure, Rejected, Submit
from baton.messages.operations import Status
from baton.request import FinishReason
from tests.node_peers import a_request
from tests.unit.gateway.frontend_peers import R, event, failed, gateway, running

STOP = FinishReason.STOP


def test_router_that_has_just_started_says_nobody_is_dead() -> None:
    g, sink = running("d0", "d1")
    g["router"].leave()
    g.join_router("another")
    g.list_members("d1", is_complete=False)
    g.say("d0", event(3, STOP))
    assert (sink.finish, g.frontend.counters["replays_lost"]) == (STOP, 0)


@pytest.mark.parametrize("how", ["rejected", "busy"])
def test_no_room_is_asked_again_later_until_the_deadline(how: str) -> None:
    g = gateway("d0", max_wait_s=5.0)
    sink, submitted_s = g.open(), list[float]()
    start_s = g.clock.now_s()
    while sink.error is None:
        for submit in g["router"].take(Submit):
            submitted_s.append(g.clock.now_s() - start_s)
            attempt = submit.request.attempt
            if how == "rejected":
                full = Rejected(request_id=R, attempt=attempt, reason="full", retry_after_s=1)
                g["router"].say(full)
            else:
                g.route("d0", request=submit.request)
                g["d0"].say(failed(Failure.BUSY, attempt))
        g.tick()
    assert isinstance(sink.error, Overloaded)
    assert 5 <= g.clock.now_s() - start_s <= 6.5
    assert 5 <= len(submitted_s) <= 12
    assert g.frontend.num_open == 0


def test_time_without_a_router_counts_towards_the_deadline() -> None:
    g = gateway("d0", max_wait_s=2.0)
    g["router"].leave()
    sink = g.open()
    for _ in range(13):
        g.tick()
    assert isinstance(sink.error, Overloaded)


def test_answer_that_has_begun_waits_longer_for_a_worker() -> None:
    g = gateway("d0", max_wait_s=2.0, max_begun_wait_s=60.0)
    begun = g.open()
    g.route("d0")
    g.say("d0", event(0))
    start_s = g.clock.now_s()
    g["d0"].leave()
    while begun.error is None:
        for submit in g["router"].take(Submit):
            attempt = submit.request.attempt
            g["router"].say(Rejected(request_id=R, attempt=attempt, reason="no worker", retry_after_s=1))
        g.tick()
    assert isinstance(begun.error, Overloaded)
    assert 60 <= g.clock.now_s() - start_s <= 61.5


def test_request_waits_for_a_router_and_is_submitted_when_it_comes() -> None:
    g = gateway("d0")
    g["router"].leave()
    g.open()
    g.join_router("another")
    assert g.submitted() == Submit(request=a_request(), age_s=g.clock.now_s())


def test_unanswered_attempt_is_submitted_anew_to_the_next_router() -> None:
    g = gateway("d0")
    g.open()
    first = g.submitted().request
    g["router"].leave()
    g.join_router("another")
    assert g.submitted().request == a_request(attempt=1)
    g.say("d0", event(0))  # the first router had dispatched it
    assert first.attempt == 0 and g["d0"].only(Cancel).attempt == 0


def test_streams_that_run_do_not_care_for_the_router() -> None:
    g, sink = running("p0", "d0")
    g["router"].leave()
    g.say("d0", event(3))
    for _ in range(40):
        g.tick()
    g.join_router("another")
    g.say("d0", event(4, STOP))
    assert (sink.token_ids, sink.finish) == ([100, 101, 102, 103, 104], STOP)
    assert g["router"].take(Submit) == []


def test_attempt_that_may_not_have_arrived_is_replaced_when_its_first_token_stays_out() -> None:
    g = gateway("d0", "d1")
    sink = g.open()
    g.route("d0")
    g["router"].leave()
    g.join_router("another")
    g.tick(UNHEARD_S - 0.5)
    assert g["router"].take(Submit) == []
    for _ in range(10):
        g.tick()
    assert g.submitted().request.attempt == 1
    assert g["d0"].only(Cancel).attempt == 0
    assert sink.error is None


def test_gateway_whose_only_router_is_silent_is_not_ready_and_says_why() -> None:
    g = gateway("d0")
    told = [g.frontend.is_ready]
    for _ in range(int(SILENT_S / 0.25) + 1):
        g.tick()
    told.append(g.frontend.is_ready)
    assert g.frontend.why_not_ready == "no router has answered for 3 s"
    assert g["router"].is_open  # the link's own timeout ends that
    g["router"].say(Status())
    told.append(g.frontend.is_ready)
    assert told == [True, False, True]


def test_time_that_the_gateway_stood_still_is_no_silence_of_its_only_router() -> None:
    g = gateway("d0")
    g.tick(1.0)
    g.tick(60.0)
    assert g.frontend.is_ready
    g.open()


def test_stream_that_waits_for_a_router_in_vain_is_told_so() -> None:
    g = gateway("d0", max_wait_s=5.0)
    sink = g.open()
    g["router"].leave()
    for _ in range(24):
        g.tick()
    assert isinstance(sink.error, Overloaded) and "no router answered within 5 s" in str(sink.error)
    assert sink.error.retry_after_s > 0
