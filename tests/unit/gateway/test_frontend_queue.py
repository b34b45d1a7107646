"""What waits in a router's queue, and what the router is told of its work."""

from baton.messages.control import Ended, Failure, Started, Submit
from baton.request import FinishReason
from tests.node_peers import a_request
from tests.unit.gateway.frontend_peers import event, failed, gateway, running


def test_time_in_a_routers_queue_is_no_want_of_workers() -> None:
    g = gateway("d0", max_wait_s=5.0, max_silence_s=60.0)
    sink = g.open()
    for _ in range(50):
        g.tick(1.0)
    assert sink.error is None
    g.route("d0")
    g["d0"].say(failed(Failure.BUSY))
    g.tick(1.0)
    assert sink.error is None and g["router"].take(Submit), "it has not been homeless for long"


def test_router_that_never_answers_is_not_waited_for_without_end() -> None:
    g = gateway("d0", max_wait_s=5.0, max_silence_s=60.0)
    sink = g.open()
    for _ in range(70):
        g.tick(1.0)
    assert sink.error is not None


def test_time_behind_others_at_a_worker_is_no_silence_of_it() -> None:
    g = gateway("d0", max_wait_s=5.0, max_silence_s=10.0)
    before, behind = g.open(a_request(name="a")), g.open(a_request(name="b"))
    g.route("d0", request=a_request(name="a"))
    g.route("d0", request=a_request(name="b"))
    for index in range(40):
        g.say("d0", event(index, name="a"))
        g.tick(1.0)
    assert before.error is None and behind.error is None
    g.say("d0", event(0, FinishReason.STOP, name="b"))
    assert behind.finish is FinishReason.STOP and g.frontend.counters["replays_error"] == 0


def test_worker_that_goes_on_with_others_is_not_waited_for_without_end() -> None:
    g = gateway("d0", max_silence_s=10.0)
    g.open(a_request(name="a"))
    forgotten = g.open(a_request(name="b"))
    g.route("d0", request=a_request(name="a"))
    g.route("d0", request=a_request(name="b"))
    for index in range(110):
        g.say("d0", event(index, name="a"))
        g.tick(1.0)
    assert forgotten.error is not None


def test_router_is_told_what_each_attempt_has_answered() -> None:
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


def test_router_hears_of_the_first_token_of_an_answer_of_one() -> None:
    g = gateway("d0")
    g.open()
    g.route("d0")
    g.say("d0", event(0, FinishReason.STOP))
    g.tick()
    (started,), (ended,) = g["router"].take(Started), g["router"].take(Ended)
    assert started.attempts == ended.attempts and ended.num_tokens == (1,)
