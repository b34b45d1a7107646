"""One request from its opening to its end, without faults."""

import pytest
from msgspec.structs import force_setattr

from baton.errors import InvalidRequest, Overloaded
from baton.messages.codec import MAX_REQUEST_BYTES, encode, fits_request
from baton.messages.control import AttemptFailed, Cancel, Dispatch, Ended, Failure, Prefill, Started, Submit
from baton.request import FinishReason, Request, SamplingParams
from tests.node_peers import a_request, id_of
from tests.unit.gateway.frontend_peers import ListSink, event, gateway

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
KEY = (id_of("r"), 0)


def test_tokens_reach_the_sink_in_order_and_the_router_learns_of_start_and_end() -> None:
    g = gateway("p0", "d0")
    sink = g.open()
    assert g.submitted() == Submit(request=a_request(), age_s=g.clock.now_s())
    g.route("d0", "p0", a_request())
    g.say("p0", event(0))
    assert g["router"].only(Started).attempts == (KEY,)
    g.say("d0", event(1))
    g.say("d0", event(2, STOP))
    assert (sink.token_ids, sink.finish) == ([100, 101, 102], STOP)
    assert g["router"].only(Ended).attempts == (KEY,)
    assert g["router"].take(Started) == []
    assert g.frontend.num_open == 0


def test_first_token_may_be_the_last() -> None:
    g = gateway("p0", "d0")
    sink = g.open()
    g.route("d0", "p0")
    g.say("p0", event(0, LENGTH))
    assert (sink.token_ids, sink.finish) == ([100], LENGTH)
    assert g["router"].only(Started).attempts == (KEY,)  # its time is told all the same
    assert g["router"].only(Ended).attempts == (KEY,)


def test_answer_may_end_without_a_token() -> None:
    g = gateway("d0")
    sink = g.open()
    g.route("d0")
    g.say("d0", event(0), event(1, STOP, token_id=None))
    assert (sink.token_ids, sink.finish) == ([100, None], STOP)


def test_tokens_may_come_before_the_router_has_answered() -> None:
    g = gateway("p0", "d0")
    sink = g.open()
    submit = g.submitted()
    g.say("p0", event(0))
    g.route("d0", "p0", submit.request)
    assert g.frontend.decode_worker(id_of("r")) == id_of("d0")
    g.say("d0", event(1, STOP))
    assert sink.token_ids == [100, 101]


@pytest.mark.parametrize("is_routed_first", [True, False])
def test_decode_workers_tokens_wait_for_the_first_one(is_routed_first: bool) -> None:
    g = gateway("p0", "d0")
    sink = g.open()
    submit = g.submitted()
    if is_routed_first:
        g.route("d0", "p0", submit.request)
    g.say("d0", event(1))
    g.say("d0", event(2, STOP))
    assert sink.token_ids == []
    g.say("p0", event(0))
    assert (sink.token_ids, sink.finish) == ([100, 101, 102], STOP)
    assert not [name for name in g.frontend.counters if name.startswith("replays")]


def test_token_that_came_before_is_dropped_and_counted() -> None:
    g = gateway("p0", "d0")
    sink = g.open()
    g.route("d0", "p0")
    g.say("p0", event(0))
    g.say("d0", event(0), event(1), event(0))
    assert sink.token_ids == [100, 101]
    assert g.frontend.counters["repeated_events"] == 2
    assert g.frontend.counters["contradictions"] == 0
    g.say("d0", event(0, token_id=7))
    assert sink.token_ids == [100, 101]
    assert g.frontend.counters["contradictions"] == 1


def test_holder_of_the_prompt_is_named_to_the_router() -> None:
    g = gateway("d0", "d1")
    g.open(sticky_worker=id_of("d1"))
    assert g.submitted().sticky_worker == id_of("d1")


def test_sink_may_open_another_choice_as_it_gets_its_first_token() -> None:
    g = gateway("d0")
    second = ListSink()

    def open_second() -> None:
        if first.token_ids == [100]:
            sticky_worker = g.frontend.decode_worker(id_of("r"))
            g.frontend.open(a_request("s", choice=1), second, sticky_worker=sticky_worker)

    first = g.open(sink=ListSink(open_second))
    g.route("d0")
    g.say("d0", event(0))
    assert g.submitted() == Submit(
        request=a_request("s", choice=1), sticky_worker=id_of("d0"), age_s=g.clock.now_s()
    )
    g.route("d0", request=a_request("s"))
    g.say("d0", event(1, STOP), event(0, STOP, name="s"))
    assert (first.token_ids, second.token_ids) == ([100, 101], [100])


def test_cancel_stops_the_worker_and_frees_the_books() -> None:
    g = gateway("d0")
    sink = g.open()
    g.route("d0")
    g.say("d0", event(0))
    g.frontend.cancel(id_of("r"))
    g.frontend.cancel(id_of("r"))
    g.say("d0", event(1))
    assert sink.token_ids == [100]
    assert Cancel(request_id=id_of("r"), attempt=0) in g["d0"].take(Cancel)
    assert g["router"].only(Ended).attempts == (KEY,)
    assert g.frontend.num_open == 0


def test_sink_may_cancel_as_it_is_told_of_a_token() -> None:
    g = gateway("d0")
    sink = g.open(sink=ListSink(lambda: g.frontend.cancel(id_of("r"))))
    g.route("d0")
    g.say("d0", event(0), event(1), event(2, STOP))
    assert sink.token_ids == [100]
    assert g["router"].only(Ended).attempts == (KEY,)


def test_cancelled_before_it_was_routed_is_cancelled_at_its_worker_then() -> None:
    g = gateway("d0")
    g.open()
    submit = g.submitted()
    g.frontend.cancel(id_of("r"))
    assert g["d0"].take(Cancel) == []
    g.route("d0", request=submit.request)
    assert g["d0"].only(Cancel) == Cancel(request_id=id_of("r"), attempt=0)
    assert g["router"].only(Ended).attempts == (KEY,)


def test_worker_that_works_for_nobody_is_told() -> None:
    g = gateway("d0")
    g.say("d0", event(3, name="unknown", attempt=2))
    assert g["d0"].only(Cancel) == Cancel(request_id=id_of("unknown"), attempt=2)
    assert g.frontend.counters["stale_events"] == 1


def test_failing_sink_costs_only_its_own_request(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise KeyError("a bug")

    g = gateway("d0")
    g.open(sink=ListSink(fail))
    g.route("d0")
    other = g.open(a_request("s"))
    g.route("d0")
    g.say("d0", event(0), event(0, name="s"), event(1), event(1, STOP, name="s"))
    assert other.token_ids == [100, 101]
    assert g.frontend.num_open == 0
    assert g["d0"].take(Cancel)
    assert "its sink failed" in caplog.text


def test_too_many_streams_are_refused_and_leave_nothing() -> None:
    g = gateway("d0", max_streams=1)
    g.open()
    with pytest.raises(Overloaded) as caught:
        g.open(a_request("s"))
    assert caught.value.retry_after_s > 0
    assert g.frontend.num_open == 1
    g.frontend.cancel(id_of("r"))
    g.open(a_request("s"))


@pytest.mark.parametrize(
    "request_",
    [
        Request(request_id=id_of("r"), token_ids=(150_000,) * 220_000),
        Request(request_id=id_of("r"), token_ids=(2**60,) * 120_000),
        a_request(sampling=SamplingParams(stop_token_ids=(150_000,) * 220_000)),
    ],
)
def test_request_too_large_for_a_message_is_the_clients_error(request_: Request) -> None:
    g = gateway("d0")
    with pytest.raises(InvalidRequest, match="too large"):
        g.open(request_)
    assert g.frontend.num_open == 0


def what_no_message_holds(name: str) -> Request:
    """SamplingParams refuse such a number; whatever else comes to that may not harm others either."""
    request = a_request(name, sampling=SamplingParams(max_tokens=8, temperature=0.0))
    force_setattr(request.sampling, "max_tokens", 2**64)
    return request


def test_request_that_no_message_holds_is_refused_and_leaves_nothing() -> None:
    g = gateway("d0")
    with pytest.raises(InvalidRequest, match="can't be sent on"):
        g.open(what_no_message_holds("bad"))
    assert g.frontend.num_open == 0
    g.open(a_request())
    assert g.submitted().request == a_request()


def test_request_that_no_message_holds_ends_alone_when_a_router_joins() -> None:
    g = gateway("d0")
    g["router"].leave()
    before, bad, after = g.open(a_request("a")), g.open(what_no_message_holds("bad")), g.open(a_request("b"))
    g.join_router("another")
    g.tick()
    assert isinstance(bad.error, InvalidRequest) and "can't be sent on" in str(bad.error)
    assert [submit.request for submit in g["router"].take(Submit)] == [a_request("a"), a_request("b")]
    assert (before.error, after.error, g.frontend.num_open) == (None, None, 2)


def test_largest_request_fits_every_message_that_carries_it() -> None:
    num_tokens = MAX_REQUEST_BYTES // 5
    greedy = SamplingParams(temperature=0.0)
    while not fits_request(
        largest := Request(request_id=id_of("r"), token_ids=(150_000,) * num_tokens, sampling=greedy)
    ):
        num_tokens -= 10
    g = gateway("d0")
    g.open(largest)
    assert g.submitted().request == largest
    avoid = (id_of("w"),) * 8
    encode(Submit(request=largest, sticky_worker=id_of("d0"), avoid=avoid))
    encode(Dispatch(request=largest, gateway=id_of("g"), prefill=id_of("p0")))
    encode(Prefill(request=largest, gateway=id_of("g"), transfer=bytes(16), num_held_tokens=2**53))


def test_what_the_worker_finds_invalid_is_the_clients_error() -> None:
    g = gateway("d0")
    sink = g.open()
    g.route("d0")
    failed = AttemptFailed(request_id=id_of("r"), attempt=0, failure=Failure.INVALID, reason="top_k: 1 to 9")
    g["d0"].say(failed)
    assert isinstance(sink.error, InvalidRequest) and "top_k" in str(sink.error)
    assert g["router"].only(Ended).attempts == (KEY,)
