"""What becomes of a request whose workers, router or connections are lost."""

import pytest

from baton.errors import WorkerLost
from baton.gateway.streams.request_stream import DOUBT_S
from baton.messages.control import Cancel, Ended, Failure, Submit
from baton.request import FinishReason, SamplingParams
from tests.node_peers import a_request, id_of
from tests.unit.gateway.frontend_peers import R, event, failed, gateway, running

STOP = FinishReason.STOP


def test_stream_goes_on_elsewhere_after_its_tokens() -> None:
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


def test_replay_keeps_the_seed() -> None:
    g = gateway("d0", "d1")
    g.open(a_request(sampling=SamplingParams(temperature=1.0, seed=5)))
    first = g.submitted().request
    g.route("d0", request=first)
    g["d0"].leave()
    assert g.submitted().request.sampling == first.sampling


def test_late_words_of_an_attempt_that_was_given_up_change_nothing() -> None:
    g, sink = running("d0", "d1")
    g["d0"].leave()
    g.route("d1")
    g.join("d0")
    g.say("d0", event(3, STOP))
    g["d0"].say(failed(Failure.LOST))
    assert (sink.token_ids, sink.finish) == ([100, 101, 102], None)
    assert g["d0"].only(Cancel) == Cancel(request_id=R, attempt=0)
    assert g["router"].take(Submit) == []


def test_worker_that_the_router_lists_no_more_is_dead_however_it_looks() -> None:
    g, _ = running("d0", "d1")
    g.list_members("d1")
    assert not g["d0"].is_open
    assert g.submitted().request.attempt == 1
    g["d0"].leave()
    assert g["router"].take(Submit) == []


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


def test_prefill_worker_that_the_decode_worker_lost_is_avoided() -> None:
    g = gateway("p0", "d0")
    g.open()
    g.route("d0", "p0")
    g["d0"].say(failed(Failure.LOST, worker="p0"))
    submit = g.submitted()
    assert (submit.request.attempt, submit.avoid) == (1, (id_of("p0"),))


def test_decode_worker_that_the_router_lost_is_left_though_it_is_connected() -> None:
    g = gateway("d0", "d1")
    g.open()
    g.route("d0")
    g["router"].say(failed(Failure.LOST, worker="d0"))
    assert g["d0"].only(Cancel) == Cancel(request_id=R, attempt=0)
    assert g.submitted().avoid == (id_of("d0"),)


def test_routed_to_a_worker_that_is_not_connected_is_lost_at_once() -> None:
    g = gateway("d0", "d1")
    sink = g.open()
    submit = g.submitted()
    g["d0"].leave()
    g.route("d0", request=submit.request)
    assert g.submitted().avoid == (id_of("d0"),)
    assert sink.error is None


def test_worker_whose_connection_broke_before_the_router_answered_must_be_heard_soon() -> None:
    """It may have let the attempt go with the connection, and nobody else knows."""
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


def test_request_that_killed_two_workers_is_not_tried_again() -> None:
    g, sink = running("d0", "d1", "d2")
    g["d0"].leave()
    g.route("d1")
    g["d1"].leave()
    for _ in range(8):
        g.tick()
    assert isinstance(sink.error, WorkerLost)
    assert g["router"].take(Submit) == []
    assert g.frontend.num_open == 0


def test_connections_that_come_back_are_no_deaths() -> None:
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
def test_request_that_two_living_workers_cannot_answer_is_not_tried_again(how: str) -> None:
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
            g.say(name, event(3 + attempt, FinishReason.ERROR, attempt=attempt))
        assert g[name].take(Cancel)
    assert isinstance(sink.error, WorkerLost)
    assert sink.token_ids == [100, 101, 102, 103]


def test_token_of_an_error_is_not_given_out() -> None:
    g, sink = running("d0", "d1")
    g.say("d0", event(3, FinishReason.ABORT))
    assert sink.token_ids == [100, 101, 102]
    assert g.submitted().request.generated_token_ids == (100, 101, 102)


def test_early_tokens_of_a_lost_attempt_are_forgotten() -> None:
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


def test_lost_stream_has_the_whole_wait_again_after_its_tokens() -> None:
    g, sink = running("d0", "d1")
    g.clock.advance(100.0)
    g["d0"].leave()
    g.route("d1")
    g.say("d1", event(3, STOP, attempt=1))
    assert sink.finish is STOP


def test_silent_workers_are_given_up() -> None:
    g = gateway("d0", "d1", max_silence_s=10.0)
    g.open()
    g.route("d0")
    g.say("d0", event(0))
    for _ in range(45):
        g.tick()
    assert g.submitted().request == a_request(attempt=1, generated_token_ids=(100,))
    assert g["d0"].only(Cancel).attempt == 0


def test_log_beyond_its_bound_is_not_replayed() -> None:
    g = gateway("d0", "d1", max_log_tokens=2)
    sink = g.open()
    g.route("d0")
    for index in range(3):
        g.say("d0", event(index))
    g["d0"].leave()
    assert isinstance(sink.error, WorkerLost) and "more than the 2" in str(sink.error)


def test_answer_that_has_all_its_tokens_and_no_end_is_not_replayed() -> None:
    g, sink = running("d0", "d1", num_tokens=8)  # as many as it may have
    g["d0"].leave()
    assert isinstance(sink.error, WorkerLost)
    assert g["router"].take(Submit) == []


def test_newer_connection_of_a_worker_means_the_older_lost_words() -> None:
    g, _ = running("d0", "d1")
    former = g["d0"]
    g.join("d0")
    assert not former.is_open
    assert g.submitted().request.attempt == 1
    former.leave()
    assert g["router"].take(Submit) == []
