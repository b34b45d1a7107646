"""One request from its opening to its end, without faults."""

from typing import Any

import msgspec
import pytest

from baton.errors import InvalidRequest, Overloaded, ProtocolError
from baton.messages.codec import MAX_REQUEST_BYTES, AnyMessage, encode, fits_request
from baton.messages.control import (
    AttemptFailed,
    Cancel,
    Dispatch,
    Ended,
    Failure,
    Heartbeat,
    Members,
    Prefill,
    PullSource,
    Reachable,
    Rejected,
    Routed,
    Started,
    Submit,
)
from baton.messages.operations import Status, StatusQuery
from baton.messages.orders import Wake
from baton.messages.workers import Load, Worker
from baton.request import HEALTH_PRIORITY, FinishReason, Request, SamplingParams, TokenEvent, TokenIds
from tests.answer import Answer
from tests.node_peers import TestPeer, a_request, a_worker, id_of
from tests.unit.gateway.frontend_peers import event, gateway

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
KEY = (id_of("r"), 0)


def test_tokens_reach_the_sink_in_order_and_the_router_hears_the_start_and_the_end() -> None:
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


def test_answer_may_end_without_a_token() -> None:
    g = gateway("d0")
    sink = g.open()
    g.route("d0")
    g.say("d0", event(0), event(1, STOP, token_id=None))
    assert (sink.token_ids, sink.finish) == ([100, None], STOP)


@pytest.mark.parametrize("is_routed_first", [True, False])
def test_tokens_of_the_decode_worker_wait_for_the_first_token(is_routed_first: bool) -> None:
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


def test_repeated_token_is_dropped_and_counted() -> None:
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


def test_cancel_stops_the_worker_and_ends_the_attempt() -> None:
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


def test_request_cancelled_before_routed_is_cancelled_at_its_worker_afterwards() -> None:
    g = gateway("d0")
    g.open()
    submit = g.submitted()
    g.frontend.cancel(id_of("r"))
    assert g["d0"].take(Cancel) == []
    g.route("d0", request=submit.request)
    assert g["d0"].only(Cancel) == Cancel(request_id=id_of("r"), attempt=0)
    assert g["router"].only(Ended).attempts == (KEY,)


def test_tokens_of_an_unknown_request_cancel_it_at_the_worker() -> None:
    g = gateway("d0")
    g.say("d0", event(3, name="unknown", attempt=2))
    assert g["d0"].only(Cancel) == Cancel(request_id=id_of("unknown"), attempt=2)
    assert g.frontend.counters["stale_events"] == 1


def test_failing_sink_ends_only_its_own_request(caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: TokenEvent) -> None:
        raise KeyError("a bug")

    g = gateway("d0")
    g.open(sink=Answer(fail))
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


def test_health_check_takes_no_stream_of_clients() -> None:
    g = gateway("d0", max_streams=1)
    g.open(a_request("health 0", priority=HEALTH_PRIORITY))
    g.open()
    g.open(a_request("health 1", priority=HEALTH_PRIORITY))  # a busy gateway is healthy
    g.frontend.cancel(id_of("health 0"))
    with pytest.raises(Overloaded):
        g.open(a_request("s"))
    g.frontend.cancel(id_of("r"))
    g.open(a_request("s"))


@pytest.mark.parametrize(
    "request_",
    [
        Request(request_id=id_of("r"), token_ids=TokenIds.of((150_000,) * 270_000)),
        a_request(sampling=SamplingParams(stop_token_ids=(150_000,) * 220_000)),
    ],
)
def test_request_too_large_for_a_message_is_an_invalid_request(request_: Request) -> None:
    g = gateway("d0")
    with pytest.raises(InvalidRequest, match="too large"):
        g.open(request_)
    assert g.frontend.num_open == 0


def test_largest_request_fits_every_message_that_carries_it() -> None:
    num_tokens = MAX_REQUEST_BYTES // 4
    greedy = SamplingParams(temperature=0.0)
    while not fits_request(
        largest := Request(
            request_id=id_of("r"), token_ids=TokenIds.of((150_000,) * num_tokens), sampling=greedy
        )
    ):
        num_tokens -= 10
    g = gateway("d0")
    g.open(largest)
    assert g.submitted().request == largest
    avoid, source = (id_of("w"),) * 8, PullSource(id_of("p"), 10**6)
    encode(Submit(request=largest, sticky_worker=id_of("d0"), avoid=avoid))
    encode(Dispatch(request=largest, gateway=id_of("g"), prefill=id_of("p0")))
    encode(Dispatch(request=largest, gateway=id_of("g"), source=source))
    prefill = Prefill(request=largest, gateway=id_of("g"), decode=id_of("d"), transfer=bytes(16), age_s=1.5)
    encode(msgspec.structs.replace(prefill, source=source))


def test_request_that_a_worker_finds_invalid_is_an_invalid_request() -> None:
    g = gateway("d0")
    sink = g.open()
    g.route("d0")
    failed = AttemptFailed(request_id=id_of("r"), attempt=0, failure=Failure.INVALID, reason="top_k: 1 to 9")
    g["d0"].say(failed)
    assert isinstance(sink.error, InvalidRequest) and "top_k" in str(sink.error)
    assert g["router"].only(Ended).attempts == (KEY,)


def test_router_hears_the_workers_that_the_gateway_reaches() -> None:
    g = gateway("p0", "d0")
    assert set(g["router"].take(Reachable)[-1].workers) == {id_of("p0"), id_of("d0")}
    g.open()
    g.route("d0")
    g["d0"].leave()
    words = [word for word in g["router"].received if isinstance(word, Reachable | Submit)]
    assert words[0] == Reachable(workers=(id_of("p0"),))
    assert isinstance(words[1], Submit)
    assert set(g.join_router("other").only(Reachable).workers) == {id_of("p0")}


def test_router_hears_which_sleeping_workers_the_gateway_knows() -> None:
    g = gateway("p0", "d0")
    asleep = a_worker("d0", id=id_of("d0-asleep"), is_asleep=True)
    g["router"].say(Members(workers=(a_worker("p0"), asleep)))
    assert set(g["router"].take(Reachable)[-1].workers) == {id_of("p0"), asleep.id}


def test_ready_means_a_router_and_a_decode_worker() -> None:
    g = gateway("p0")
    assert g.frontend.why_not_ready
    g.list_members("p0", "d0")
    assert g.frontend.why_not_ready
    g.join("d0")
    ready = [not g.frontend.why_not_ready]
    g["router"].leave()
    ready.append(not g.frontend.why_not_ready)
    assert ready == [True, False]
    assert [worker.name for worker in g.frontend.workers] == ["p0", "d0"]


def test_status_is_asked_for_every_second() -> None:
    g = gateway("d0")
    for _ in range(9):
        g.tick()
    assert len(g["router"].take(StatusQuery)) == 3
    assert g.frontend.status is None
    g["router"].say(Status(num_gateways=3))
    assert g.frontend.status == Status(num_gateways=3)


@pytest.mark.parametrize(
    ("who", "message"),
    [
        ("router", Heartbeat(load=Load())),
        ("router", Submit(request=a_request())),
        ("d0", Routed(request_id=id_of("r"), attempt=0, decode=id_of("d0"))),
        ("d0", Rejected(request_id=id_of("r"), attempt=0, reason="", retry_after_s=1)),
        ("d0", Reachable(workers=())),
    ],
)
def test_message_that_its_sender_may_not_send_is_a_protocol_error(who: str, message: AnyMessage) -> None:
    g = gateway("d0")
    with pytest.raises(ProtocolError):
        g[who].say(message)


@pytest.mark.parametrize("make", [TestPeer.gateway, TestPeer.operator])
def test_only_routers_and_workers_may_join(make: Any) -> None:
    with pytest.raises(ProtocolError, match="has no business"):
        make(gateway("d0").frontend)


@pytest.mark.parametrize("wakes_models", [True, False])
def test_request_that_waits_for_a_model_that_sleeps_wakes_the_model(wakes_models: bool) -> None:
    g = gateway(wakes_models=wakes_models)
    asleep = [a_worker(name, model=name[1:], is_asleep=True) for name in ("pb", "db")]
    awake = a_worker("da", model="a")
    g["router"].say(Members(workers=(*asleep, awake)))
    for name in ("a", "b"):
        g.open(a_request(name, model=name))
        g.refuse(name=name)
    for _ in range(4):
        g.tick()
    woken = [order.model for order in g["router"].take(Wake)]
    assert woken == (["b"] if wakes_models else [])


@pytest.mark.parametrize(
    ("priority", "workers"),
    [
        pytest.param(HEALTH_PRIORITY, (a_worker("d0", is_asleep=True),), id="health check"),
        pytest.param(0, (a_worker("d0", is_asleep=True), a_worker("d1")), id="a decode worker is awake"),
    ],
)
def test_request_that_wakes_no_model(priority: int, workers: tuple[Worker, ...]) -> None:
    g = gateway(wakes_models=True)
    g["router"].say(Members(workers=workers))
    g.open(a_request(priority=priority))
    g.refuse()
    for _ in range(8):
        g.tick()
    assert not g["router"].take(Wake)
