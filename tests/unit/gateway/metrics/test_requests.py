"""The ended requests that a gateway keeps, and those that it exports."""

import socket
import sys
import threading
import time
from typing import Any

import pytest

from baton.clock import ManualClock
from baton.config.gateway import GatewaySettings
from baton.errors import ConfigError
from baton.gateway.metrics.metrics import Metrics
from baton.gateway.metrics.requests import (
    COUNT_S,
    INTERVAL_S,
    MAX_LATEST,
    MAX_SLOWEST,
    SLOWEST_S,
    RequestHistory,
)
from baton.gateway.metrics.tracing import CLOSE_S, TraceContext, Tracer, traces_url
from baton.gateway.streams.request_stream import RequestMarks
from baton.gateway.streams.resume import DeliveredChoice, ResumePoint
from baton.gateway.tenants.tenants import Tenant
from baton.messages.operations import FindRequests
from baton.messages.timeline import RequestTimeline
from tests.otlp_collector import Collector
from tests.scripted_service import ScriptedService
from tests.unit.gateway.calls import answer

CALENDAR_S = 1.7e9


class History:
    """A history on a clock that the test moves; requests are opened and ended by hand."""

    def __init__(self, tracer: Tracer | None = None) -> None:
        self.clock = ManualClock(100.0)
        self.metrics = Metrics(gateway="g")
        self.history = RequestHistory(self.metrics, self.clock, lambda: CALENDAR_S, tracer)

    def end(self, seconds: float, tenant: str = "acme", **call: Any) -> str:
        """End a request that takes so long; return its id."""
        began_s = self.clock.now_s()
        ended = answer(
            ScriptedService(),
            arrival_s=began_s,
            received_s=began_s,
            tenant=Tenant(name=tenant, cache_salt=b"s" * 16),
            **call,
        )
        for choice in ended.choices:
            choice.marks = RequestMarks(began_s, began_s + seconds - choice.index)
        self.clock.advance(seconds)
        self.history.finished(ended, "answered")
        return ended.choices[0].request_id

    def found(self, **query: Any) -> list[str]:
        return [each.request_id for each in self.find(**query)]

    def find(self, **query: Any) -> list[RequestTimeline]:
        return list(self.history.find(FindRequests(**query)))


def test_latest_requests_come_first_and_the_oldest_are_forgotten() -> None:
    history = History()
    ids = [history.end(0.001) for _ in range(MAX_LATEST + 3)]
    assert history.found(limit=2) == [ids[-1], ids[-2]]
    assert history.found(request_id=ids[3]) == [ids[3]]
    assert len(history.history.find(FindRequests())) == 100


def test_slowest_requests_of_the_last_quarter_of_an_hour_outlive_the_latest() -> None:
    history = History()
    slow = history.end(30.0)
    for _ in range(MAX_LATEST):
        history.end(0.001)
    slower = history.end(40.0)
    assert history.found(order="slowest", limit=2) == [slower, slow]
    assert history.found(request_id=slow) == [slow]
    history.clock.advance(SLOWEST_S - 80.0)
    assert history.found(order="slowest", limit=2) == [slower, slow]
    history.clock.advance(INTERVAL_S + 80.0)
    assert history.found(order="slowest") == []


def test_each_minute_keeps_a_bounded_number() -> None:
    history = History()
    for number in range(MAX_SLOWEST + 50):
        history.end(0.01 + number * 1e-4)
    kept = history.find(order="slowest", limit=MAX_SLOWEST)
    assert kept[-1].total_s == pytest.approx(0.01 + 50 * 1e-4)
    assert len(history.find(order="slowest")) == MAX_SLOWEST


def test_resumed_answer_is_found_by_its_id_and_by_the_id_of_its_request() -> None:
    history = History()
    point = ResumePoint(b"a" * 16, b"d" * 16, 7, 1_700_000_000, 2_000_000_000, False, (DeliveredChoice(),))
    request_id = history.end(1.0, is_streamed=True, resumed=point)
    assert request_id != point.answer.hex()
    assert (
        history.found(request_id=point.answer.hex()) == history.found(request_id=request_id) == [request_id]
    )


def test_requests_of_one_tenant_are_found_alone() -> None:
    history = History()
    one, other = history.end(1.0, "one"), history.end(2.0, "other")
    assert history.found(tenant="one") == [one] and history.found(order="slowest", tenant="other") == [other]
    assert history.found(tenant="unknown") == []


def test_timeline_is_of_the_choice_that_ended_last_and_named_by_the_answer() -> None:
    history = History()
    request_id = history.end(5.0, num_choices=3, is_streamed=True)
    (found,) = history.find(request_id=request_id)
    assert (found.num_choices, found.is_streamed, found.gateway) == (3, True, "gateway g")
    assert found.began_s == CALENDAR_S - 5.0 and found.total_s == 5.0


def test_call_that_was_refused_before_it_could_begin_is_not_kept() -> None:
    history = History()
    history.history.finished(answer(ScriptedService()), "max_concurrent_requests")
    assert history.found() == []


def test_metrics_count_a_sample_of_a_busy_gateway() -> None:
    history = History()
    for _ in range(100):
        history.end(COUNT_S / 10)
    assert history.metrics.unaccounted.num == pytest.approx(10, abs=1)
    for _ in range(100):
        history.end(COUNT_S * 2)
    assert history.metrics.unaccounted.num == pytest.approx(110, abs=1)


# Which requests are exported.


def tracer(**settings: Any) -> Tracer:
    return Tracer(GatewaySettings(otlp_traces_endpoint="http://127.0.0.1:9", **settings), "tiny")


def test_failed_and_slow_requests_are_sampled_whatever_the_head_says() -> None:
    found = tracer(trace_sample_ratio=0.0, trace_slow_s=2.0)
    context = found.context(None, None)
    assert not context.is_sampled
    assert found.rule(context, "answered", 1.9) is None and found.rule(context, "gone", 1.9) is None
    assert found.rule(context, "answered", 2.0) == "slow"
    assert found.rule(context, "deadline", 0.1) == "failed"
    assert found.rule(context._replace(is_sampled=True), "deadline", 9.0) == "head"
    found.close()


def test_head_samples_the_share_of_the_setting_and_follows_the_caller() -> None:
    found = tracer(trace_sample_ratio=0.25)
    num_sampled = sum(found.context(None, None).is_sampled for _ in range(2000))
    assert 400 < num_sampled < 600
    for flag in (0, 1):
        context = found.context(f"00-{'a' * 32}-{'b' * 16}-0{flag}", "vendor=1")
        assert context.is_sampled is bool(flag)
        assert context.trace_id == int("a" * 32, 16) and (parent := context.parent) is not None
        assert parent.span_id == int("b" * 16, 16) and parent.trace_state.to_header() == "vendor=1"
    found.close()


def test_header_names_the_root_span() -> None:
    assert TraceContext(0xAB, 0xCD, True).header == f"00-{'0' * 30}ab-{'0' * 14}cd-01"


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://c:4318", "http://c:4318/v1/traces"),
        ("http://c:4318/", "http://c:4318/v1/traces"),
        ("https://c/otlp/v1/traces", "https://c/otlp/v1/traces"),
    ],
)
def test_endpoint_without_a_path_gets_the_standard_one(endpoint: str, url: str) -> None:
    assert traces_url(endpoint) == url


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4317", "grpc://c:4317", "http://", ""])
def test_endpoint_that_is_no_http_url_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="otlp_traces_endpoint"):
        GatewaySettings(otlp_traces_endpoint=endpoint)


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[otel\]'"):
        tracer()


def test_span_names_the_model_that_answered() -> None:
    with Collector() as collector:
        exporting = Tracer(GatewaySettings(otlp_traces_endpoint=collector.endpoint), "first")
        history, contexts = History(exporting), [exporting.context(None, None) for _ in range(2)]
        history.end(1.0, model="second", served="second", trace=contexts[0])
        history.end(1.0, model="first", trace=contexts[1])  # of a gateway of one model
        exporting.close()
        for context, name in zip(contexts, ("second", "first"), strict=True):
            spans = collector.wait_for(f"{context.trace_id:032x}")
            (root,) = (span for span in spans if "gen_ai.request.model" in span.attributes)
            assert root.attributes["gen_ai.response.model"] == name


def test_close_waits_only_a_while_for_a_collector_that_does_not_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as stalled:
        endpoint = f"http://127.0.0.1:{stalled.getsockname()[1]}"
        found = Tracer(GatewaySettings(otlp_traces_endpoint=endpoint), "tiny")
        timeline = RequestTimeline(request_id="a" * 32, outcome="answered", began_s=CALENDAR_S, total_s=1.0)
        asked = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "tiny"}
        found.export(found.context(None, None), timeline, asked, "head")
        began_s = time.monotonic()
        found.close()
        assert time.monotonic() - began_s < CLOSE_S + 3.0
    for thread in threading.enumerate():  # the collector is gone: the export fails and is not tried again
        if thread.name in ("tracer", "OtelBatchSpanRecordProcessor"):
            thread.join(2.0)
            assert not thread.is_alive()
