"""Requests whose workers, router or connections are lost, and requests that a router refuses."""

from typing import Any

import msgspec
import pytest

from baton.errors import Refused, WorkerLost
from baton.gateway.streams.request_stream import DOUBT_S, NODE_ENDS_S, SILENT_BEFORE_S
from baton.messages.control import Cancel, Ended, Failure, Members, Submit
from baton.request import FinishReason, SamplingParams
from baton.tenants import Refusal, Sla
from tests.answer import Answer
from tests.node_peers import a_request, a_worker, id_of
from tests.unit.gateway.frontend_peers import Gateway, R, event, failed, gateway, running

STOP = FinishReason.STOP


def test_stream_continues_on_another_worker_after_its_tokens() -> None:
    g, sink = running("p0", "d0", "d1")
    g["d0"].leave()
    submit = g.submitted()
    assert submit.request == a_request(attempt=1, generated_token_ids=(100, 101, 102))
    assert submit.avoid == (id_of("d0"),)
    assert (R, 0) in g["router"].only(Ended).attempts
    g.route("d1", request=submit.request)
    g.say("d1", event(3, attempt=1))
    g.say("d1", event(4, STOP, attempt=1))
    assert (sink.token_ids, sink.finish) == ([100, 101, 102, 103, 104], STOP)
    assert g.frontend.counters["replays_lost"] == 1


def test_late_messages_of_a_former_attempt_change_nothing() -> None:
    g, sink = running("d0", "d1")
    g["d0"].leave()
    g.route("d1")
    g.join("d0")
    g.say("d0", event(3, STOP))
    g["d0"].say(failed(Failure.LOST))
    assert (sink.token_ids, sink.finish) == ([100, 101, 102], None)
    assert g["d0"].only(Cancel) == Cancel(request_id=R, attempt=0)
    assert g["router"].take(Submit) == []


def test_worker_that_does_not_answer_a_request_says_nothing_about_it() -> None:
    g, sink = running("p0", "d0", "d1")
    g.say("d1", event(3, STOP))
    g["d1"].say(failed(Failure.ERROR))
    assert (sink.token_ids, sink.finish) == ([100, 101, 102], None)
    assert g["d1"].only(Cancel) == Cancel(request_id=R, attempt=0)
    g.say("d0", event(3, STOP))
    assert (sink.token_ids, sink.finish) == ([100, 101, 102, 103], STOP)


def test_prefill_worker_is_needed_until_the_first_token() -> None:
    g = gateway("p0", "d0")
    g.open()
    g.route("d0", "p0")
    g["p0"].leave()
    assert g["d0"].only(Cancel) == Cancel(request_id=R, attempt=0)
    assert g.submitted().avoid == (id_of("p0"),)

    g, sink = running("p0", "d0", num_tokens=1)
    g["p0"].leave()
    g.say("d0", event(1, STOP))
    assert sink.token_ids == [100, 101]


@pytest.mark.parametrize(("reporter", "lost"), [("d0", "p0"), ("router", "d0")])
def test_worker_that_another_process_lost_is_avoided(reporter: str, lost: str) -> None:
    """The gateway may still be connected to that worker."""
    g = gateway("p0", "d0", "d1")
    g.open()
    g.route("d0", "p0")
    g[reporter].say(failed(Failure.LOST, worker=lost))
    assert g["d0"].only(Cancel) == Cancel(request_id=R, attempt=0)
    submit = g.submitted()
    assert (submit.request.attempt, submit.avoid) == (1, (id_of(lost),))


def test_worker_whose_connection_broke_before_routed_must_answer_soon() -> None:
    """The worker may have dropped the attempt with the connection."""
    g = gateway("d0", "d1")
    sink = g.open()
    submit = g.submitted()
    g["d0"].leave()
    g.join("d0")
    g.route("d0", request=submit.request)
    for _ in range(5):
        g.tick(1.0)
    assert g.submitted().request.attempt == 1
    assert sink.error is None


def test_token_that_comes_before_routed_hides_no_broken_connection() -> None:
    g = gateway("p0", "d0", "d1")
    g.open()
    submit = g.submitted()
    g["p0"].leave()
    g.join("p0")
    g.tick(0.1)
    g.say("d0", event(1))
    g.route("d0", "p0", request=submit.request)
    for _ in range(5):
        g.tick(1.0)
    assert g.submitted().request.attempt == 1


@pytest.mark.parametrize("reporter", ["gateway", "router"])
def test_worker_that_was_silent_before_it_had_the_request_did_not_die_of_it(reporter: str) -> None:
    """A node freezes: its workers are given up one after the other, and the request had both."""
    g = gateway("p0", "d0", "d1")
    sink = g.open()
    g.route("d0", "p0")
    g.tick(3.0)
    g["p0"].quiet_s = g["d0"].quiet_s = 3.0
    g["p0"].leave()
    g.route("d0")
    g.tick(0.5)
    g["d0"].quiet_s += 0.5
    if reporter == "router":
        g["router"].say(failed(Failure.LOST, worker="d0", attempt=1))
    g["d0"].leave()
    g.tick(DOUBT_S)
    assert sink.error is None
    assert g.submitted().request.attempt == 2


def test_worker_that_fell_silent_with_the_request_counts_as_a_death() -> None:
    g, sink = running("d0", "d1", "d2")
    for number, name in enumerate(("d0", "d1")):
        if number:
            g.route(name)
        g.tick(DOUBT_S)
        g.tick(DOUBT_S)
        g[name].quiet_s = 2 * DOUBT_S
        g[name].leave()
    g.tick(DOUBT_S)
    assert isinstance(sink.error, WorkerLost)


def test_worker_that_was_heard_counts_as_a_death_though_nothing_reached_it() -> None:
    g, sink = running("d0", "d1", "d2")
    for number, name in enumerate(("d0", "d1")):
        if number:
            g.route(name)
        g[name].silence_s = 2 * SILENT_BEFORE_S
        g[name].leave()
    g.tick(DOUBT_S)
    assert isinstance(sink.error, WorkerLost)


def test_death_counts_though_the_gateway_hears_late_that_the_worker_had_the_request() -> None:
    g = gateway("d0", "d1", "d2")
    sink = g.open()
    for name in ("d0", "d1"):
        submit = g.submitted()
        g[name].leave()
        for _ in range(4):
            g.tick(SILENT_BEFORE_S / 2)
        g.route(name, request=submit.request)
    g.tick(DOUBT_S)
    assert isinstance(sink.error, WorkerLost)


def test_workers_of_a_lost_node_count_as_one_death() -> None:
    g = gateway("p@a", "d0@a", "p@b", "d1@b")
    sink = g.open()
    g.route("d1@b", "p@a")
    g["p@a"].leave()
    g.route("d0@a", "p@b")
    g["d0@a"].leave()
    g.tick(DOUBT_S)
    assert sink.error is None
    g.list_members("p@b", "d1@b", "d2@a")  # a new process on the node changes nothing any more
    g.join("d2@a")
    g.route("d1@b", "p@b")
    g["router"].say(failed(Failure.BUSY, attempt=2))
    g.tick(DOUBT_S)
    assert sink.error is None
    assert g.submitted().request.attempt == 3


@pytest.mark.parametrize(("other", "is_one_death"), [("d0@c+b", True), ("d0@c+d", False)])
def test_workers_with_ranks_on_a_lost_node_count_as_one_death(other: str, is_one_death: bool) -> None:
    """The node b; other nodes still have a worker."""
    g = gateway("p@a+b", other, "d1@a+c")
    sink = g.open()
    g.route("d1@a+c", "p@a+b")
    g["p@a+b"].leave()
    g.route(other)
    g[other].leave()
    g.tick(DOUBT_S)
    assert (sink.error is None) is is_one_death


def test_request_that_killed_the_only_worker_of_a_node_and_its_successor_is_not_replayed() -> None:
    g = gateway("d0@a", "p@b")
    sink = g.open()
    g.route("d0@a")
    g["d0@a"].leave()
    g.tick(NODE_ENDS_S + 1.0)
    g.list_members("d1@a", "p@b")
    g.join("d1@a")
    g.route("d1@a")
    g["d1@a"].leave()
    g.tick(DOUBT_S)
    assert isinstance(sink.error, WorkerLost)


def test_request_that_killed_two_workers_of_a_living_node_is_not_replayed() -> None:
    g = gateway("d0@a", "d1@a", "d2@a", "d3@b")
    sink = g.open()
    for name in ("d0@a", "d1@a"):
        g.route(name)
        g[name].leave()
    g.tick(DOUBT_S)
    assert isinstance(sink.error, WorkerLost)


def test_connections_that_come_back_are_not_deaths() -> None:
    g, sink = running("d0", "d1", "d2")
    for number, name in enumerate(("d0", "d1", "d0", "d1"), start=1):
        g[name].leave()
        g.join(name)
        if g.frontend.counters["replays_lost"] > 1:
            g.tick(DOUBT_S)
        g.route("d1" if name == "d0" else "d0")
        assert g.frontend.counters["replays_lost"] == number
    assert sink.error is None


@pytest.mark.parametrize("how", ["error", "gap", "abort"])
def test_request_that_two_living_workers_cannot_answer_is_not_replayed(how: str) -> None:
    g, sink = running("d0", "d1")
    for attempt, name in enumerate(("d0", "d1")):
        if attempt:
            assert g.submitted().avoid == (id_of("d0"),)
            g.route("d1", request=a_request(attempt=1))
            g.say("d1", event(3, attempt=1))
        if how == "error":
            g[name].say(failed(Failure.ERROR, attempt))
        elif how == "gap":
            g.say(name, event(9, attempt=attempt))
        else:
            end = FinishReason.ABORT if attempt else FinishReason.ERROR
            g.say(name, event(3 + attempt, end, attempt=attempt))
        assert g[name].take(Cancel)
    assert isinstance(sink.error, WorkerLost)
    assert [each.token_id for each in sink.events] == [100, 101, 102, 103]


def test_early_tokens_of_a_former_attempt_are_dropped() -> None:
    g = gateway("p0", "d0", "d1")
    sink = g.open()
    g.route("d0", "p0")
    g.say("d0", event(1), event(2))
    g["p0"].leave()
    assert g.submitted().request == a_request(attempt=1)
    g.route("d1", request=a_request(attempt=1))
    g.say("d1", event(0, attempt=1, token_id=5))
    assert sink.token_ids == [5]


def test_too_many_early_tokens_are_a_fault() -> None:
    g = gateway("p0", "d0", "d1")
    g.open()
    g.route("d0", "p0")
    g.say("d0", *(event(index) for index in range(1, 1100)))
    assert g.frontend.counters["replays_error"] == 1


def test_stream_that_was_answered_has_its_whole_wait_again() -> None:
    g, sink = running("d0", "d1")
    g.clock.advance(100.0)
    g["d0"].leave()
    g.route("d1")
    g.say("d1", event(3, STOP, attempt=1))
    assert sink.finish is STOP


def test_request_of_a_silent_worker_is_replayed() -> None:
    g = gateway("d0", "d1", max_silence_s=10.0)
    g.open()
    g.route("d0")
    g.say("d0", event(0))
    for _ in range(45):
        g.tick()
    assert g.submitted().request == a_request(attempt=1, generated_token_ids=(100,))
    assert g["d0"].only(Cancel).attempt == 0


def test_answer_above_max_log_tokens_is_not_replayed() -> None:
    g = gateway("d0", "d1", max_log_tokens=2)
    sink = g.open()
    g.route("d0")
    for index in range(3):
        g.say("d0", event(index))
    g["d0"].leave()
    assert isinstance(sink.error, WorkerLost) and "more than the 2" in str(sink.error)


def test_answer_with_all_tokens_and_no_end_is_not_replayed() -> None:
    g, sink = running("d0", "d1", num_tokens=8)  # max_tokens
    g["d0"].leave()
    assert isinstance(sink.error, WorkerLost)
    assert g["router"].take(Submit) == []


def test_newer_connection_of_a_worker_replays_the_requests_of_the_older() -> None:
    g, _ = running("d0", "d1")
    former = g["d0"]
    g.join("d0")
    assert not former.is_open
    assert g.submitted().request.attempt == 1
    former.leave()
    assert g["router"].take(Submit) == []


def test_gateway_that_stood_still_waits_for_a_lost_worker_to_come_back() -> None:
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


def test_standstill_of_the_gateway_counts_neither_as_waiting_nor_as_silence() -> None:
    g = gateway("d0", max_wait_s=5.0, max_silence_s=5.0)
    running, waiting = g.open(a_request("a")), g.open(a_request("b"))
    g.route("d0", request=a_request("a"))
    g.route("d0", request=a_request("b"))
    g["d0"].say(msgspec.structs.replace(failed(Failure.BUSY), request_id=id_of("b")))
    g.tick(20.0)
    g.tick(1.0)
    assert (running.error, waiting.error) == (None, None)
    assert g.frontend.counters["replays_silent"] == 0


def test_death_reported_by_another_worker_counts_when_the_connection_ends() -> None:
    g = gateway("p0", "d0", "d1", "d2")
    sink = g.open()
    g.route("d0", "p0")
    g["d0"].say(failed(Failure.LOST, worker="p0"))
    g.route("d1")
    g["d1"].leave()
    g["p0"].leave()
    g.tick(DOUBT_S)
    assert isinstance(sink.error, WorkerLost)


def test_worker_that_stays_connected_has_not_died() -> None:
    g = gateway("p0", "d0", "d1", "d2")
    sink = g.open()
    g.route("d0", "p0")
    g["d0"].say(failed(Failure.LOST, worker="p0"))
    g.route("d1")
    g.say("d1", event(0, attempt=1))
    g.tick(DOUBT_S)
    g["d1"].leave()
    g["p0"].leave()
    g.tick(DOUBT_S)
    assert sink.error is None
    assert g.submitted().request.attempt == 2


def test_draining_worker_that_leaves_does_not_count_as_a_death() -> None:
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


def test_time_in_the_queue_of_a_router_is_not_time_without_a_worker() -> None:
    g = gateway("d0", max_wait_s=5.0, max_silence_s=60.0)
    sink = g.open()
    for _ in range(50):
        g.tick(1.0)
    assert sink.error is None
    g.route("d0")
    g["d0"].say(failed(Failure.BUSY))
    g.tick(1.0)
    assert sink.error is None and g["router"].take(Submit), "it has not been homeless for long"


def test_router_that_never_answers_fails_the_request_in_the_end() -> None:
    g = gateway("d0", max_wait_s=5.0, max_silence_s=60.0)
    sink = g.open()
    for _ in range(70):
        g.tick(1.0)
    assert sink.error is not None


def test_request_behind_others_at_a_worker_is_not_silent() -> None:
    g = gateway("d0", max_wait_s=5.0, max_silence_s=10.0)
    before, behind = g.open(a_request(name="a")), g.open(a_request(name="b"))
    g.route("d0", request=a_request(name="a"))
    g.route("d0", request=a_request(name="b"))
    for index in range(40):
        g.say("d0", event(index, name="a"))
        g.tick(1.0)
    assert before.error is None and behind.error is None
    g.say("d0", event(0, FinishReason.STOP, name="b"))
    assert behind.finish is FinishReason.STOP and g.frontend.counters["replays_silent"] == 0


def test_request_that_a_busy_worker_never_answers_fails_in_the_end() -> None:
    g = gateway("d0", max_silence_s=10.0)
    g.open(a_request(name="a"))
    forgotten = g.open(a_request(name="b"))
    g.route("d0", request=a_request(name="a"))
    g.route("d0", request=a_request(name="b"))
    for index in range(110):
        g.say("d0", event(index, name="a"))
        g.tick(1.0)
    assert forgotten.error is not None


def test_router_hears_the_tokens_of_each_attempt() -> None:
    g, sink = running("d0", "d1", num_tokens=3)
    g["d0"].leave()
    g.tick(2.0)
    (ended,) = g["router"].take(Ended)
    assert ended.num_tokens == (3,)
    request = g["router"].take(Submit)[-1].request
    g.route("d1", request=request)
    g.say("d1", event(3, attempt=1), event(4, FinishReason.LENGTH, attempt=1))
    g.tick()
    (ended,) = g["router"].take(Ended)
    assert ended.attempts == ((request.request_id, 1),) and ended.num_tokens == (2,)
    assert sink.error is None


FINAL = [refusal for refusal in Refusal if refusal is not Refusal.NO_ROOM]


def refusal_of(sink: Answer) -> Refusal | None:
    return sink.error.refusal if isinstance(sink.error, Refused) else None


@pytest.mark.parametrize("refusal", FINAL)
def test_refusal_ends_the_request_with_its_reason(refusal: Refusal) -> None:
    g = gateway("d0")
    sink = g.open()
    g.refuse(refusal=refusal, reason="too much")
    assert isinstance(sink.error, Refused)
    assert (sink.error.refusal, sink.error.retry_after_s, str(sink.error)) == (refusal, 2.5, "too much")
    assert g.frontend.num_open == 0
    g.tick(5.0)
    assert not g["router"].take(Submit)[1:], "it is not asked again"


@pytest.mark.parametrize("refusal", FINAL)
def test_request_that_has_begun_waits_after_a_refusal(refusal: Refusal) -> None:
    g, sink = running("d0", "d1")
    g["router"].take(Submit)
    g["d0"].leave()
    g.list_members("d1")
    g.tick(2.0)
    (again,) = g["router"].take(Submit)
    g.refuse(again.request.attempt, refusal)
    assert sink.error is None and g.frontend.num_open == 1
    for _ in range(4):
        g.tick(0.5)
    assert len(g["router"].take(Submit)) == 1


def test_later_choice_of_an_answer_waits_after_a_refusal() -> None:
    g = gateway("d0")
    sink = g.open(a_request(choice=2, sampling=SamplingParams(max_tokens=8, temperature=0.0)))
    g.refuse(refusal=Refusal.MAX_CONCURRENT_REQUESTS)
    assert sink.error is None and g.frontend.num_open == 1


def test_refusal_of_an_unknown_attempt_changes_nothing() -> None:
    g = gateway("d0")
    sink = g.open()
    g.refuse(3, Refusal.SHED)
    assert sink.error is None


def late(g: Gateway, **fields: Any) -> Answer:
    """A request that should have its first token within two seconds."""
    request = a_request(sla=Sla(deadline_ms=2000.0), arrival_s=g.clock.now_s(), **fields)
    return g.open(request)


@pytest.mark.parametrize("is_routed", [False, True])
def test_request_without_a_token_ends_at_its_deadline(is_routed: bool) -> None:
    g = gateway("d0")
    sink = late(g)
    if is_routed:
        g.route("d0")
    for _ in range(3):
        g.tick(0.6)
    assert refusal_of(sink) is None
    for _ in range(3):
        g.tick(0.6)
    assert refusal_of(sink) is Refusal.DEADLINE
    assert g.frontend.num_open == 0
    assert (R, 0) in [key for ended in g["router"].take(Ended) for key in ended.attempts]


def test_request_with_a_token_continues_past_its_deadline() -> None:
    g = gateway("d0")
    sink = late(g)
    g.route("d0")
    g.say("d0", event(0))
    for _ in range(10):
        g.tick(1.0)
    assert sink.error is None and g.frontend.num_open == 1


def test_request_past_its_deadline_is_not_submitted() -> None:
    g = gateway("d0")
    sink = g.open(a_request(sla=Sla(deadline_ms=1.0), arrival_s=g.clock.now_s() - 1))
    assert isinstance(sink.error, Refused) and not g["router"].take(Submit)


def test_later_choices_have_no_deadline_of_their_own() -> None:
    g = gateway("d0")
    sink = late(g, choice=1)
    for _ in range(4):
        g.tick(1.0)
    assert sink.error is None
