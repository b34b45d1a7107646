"""Traces of a real cluster: spans of OpenTelemetry at a real collector, and timelines at the gateways."""

import secrets
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import httpx2
import pytest

from baton.bench.serve.waterfall import timeline_of
from tests.otlp_collector import CollectedSpan, Collector
from tests.served import SERVE, Served, served

SERVER, ERROR = 2, 2  # a span's kind, a span's status
PROMPT = "copy(sun moon star)=" * 8


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as found:
        yield found


@pytest.fixture(scope="module")
def cluster(collector: Collector) -> Iterator[Served]:
    settings = {"BATON_GATEWAY_TRACE_SAMPLE_RATIO": "0", "BATON_GATEWAY_TRACE_SLOW_S": "30"}
    endpoint = ("--otlp-traces-endpoint", collector.endpoint, "--router-policy", "prefix", "--gateways", "2")
    with served(*SERVE, *endpoint, OTEL_BSP_SCHEDULE_DELAY="100", OTEL_SERVICE_NAME="east", **settings) as it:
        yield it


def ask(cluster: Served, body: dict[str, Any], **headers: str) -> tuple[int, dict[str, Any], str]:
    """Return the status, the answer and the traceparent of the answer."""
    url = f"{cluster.url}/v1/completions"
    answer = httpx2.post(url, json={"model": "tiny", **body}, headers=headers, timeout=60)
    return answer.status_code, answer.json(), answer.headers["traceparent"]


def only(spans: list[CollectedSpan], name: str) -> CollectedSpan:
    (found,) = [span for span in spans if span.name == name]
    return found


def test_sampled_trace_has_spans_of_every_process_and_adds_up(cluster: Served, collector: Collector) -> None:
    trace_id, caller = secrets.token_hex(16), secrets.token_hex(8)
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    status, answer, told = ask(cluster, body, traceparent=f"00-{trace_id}-{caller}-01", tracestate="a=b")
    assert status == 200
    spans = collector.wait_for(trace_id)
    root, attempt = only(spans, "text_completion tiny"), only(spans, "attempt 0")
    assert told == f"00-{trace_id}-{root.span_id}-01"
    assert (root.parent_id, root.kind, root.trace_state) == (caller, SERVER, "a=b")
    assert root.events == ["first_token"]
    attributes = root.attributes
    assert attributes["gen_ai.request.model"] == "tiny" and attributes["gen_ai.request.max_tokens"] == 12
    assert attributes["gen_ai.response.id"] == answer["id"].rpartition("-")[2]
    assert attributes["gen_ai.usage.input_tokens"] == answer["usage"]["prompt_tokens"]
    assert attributes["gen_ai.usage.output_tokens"] == 12
    assert attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert 0 < attributes["gen_ai.server.time_to_first_token"] < attributes["gen_ai.latency.e2e"]
    assert attributes["baton.sampled_by"] == "head"
    assert attempt.attributes["baton.prefill_worker"] == "prefill-0"

    parts = [span for span in spans if span.parent_id in (root.span_id, attempt.span_id) and span != attempt]
    assert only(parts, "received").parent_id == root.span_id
    assert only(parts, "decode_computing").parent_id == attempt.span_id
    taken_ns = sum(span.end_ns - span.begin_ns for span in parts)
    assert taken_ns >= 0.98 * (root.end_ns - root.begin_ns)
    ordered = sorted(parts, key=lambda span: span.begin_ns)
    for before, after in pairwise(ordered):
        assert after.begin_ns >= before.end_ns - 1000, (before.name, after.name)
    resources = {(s.resource["service.name"], s.resource["service.instance.id"]) for s in parts}
    assert {("east-prefill", "prefill-0"), ("east-decode", "decode-0")} <= resources
    assert {"east-gateway", "east-router"} <= {name for name, _ in resources}


def test_trace_that_neither_head_nor_tail_samples_is_not_exported(
    cluster: Served, collector: Collector
) -> None:
    status, _, told = ask(cluster, {"prompt": PROMPT, "max_tokens": 2})
    assert status == 200 and told.endswith("-00")
    _, _, sampled = ask(cluster, {"prompt": PROMPT, "max_tokens": 2}, traceparent=parent())
    collector.wait_for(sampled[3:35])  # it ended later, and is here
    assert not collector.trace(told[3:35])


def test_failed_request_is_exported_although_it_is_not_sampled(cluster: Served, collector: Collector) -> None:
    body = {"prompt": PROMPT, "max_tokens": 2, "vllm_xargs": {"nothing_takes_this": 1}}
    status, _, told = ask(cluster, body)
    assert status == 400 and told.endswith("-00")
    root = only(collector.wait_for(told[3:35]), "text_completion tiny")
    assert root.status == ERROR and root.attributes["error.type"] == "failed"
    assert root.attributes["baton.sampled_by"] == "failed"


@pytest.mark.parametrize("header", ["00-x", "ff-" + "a" * 32 + "-" + "b" * 16 + "-01", "00-" + "0" * 32])
def test_traceparent_that_is_not_valid_counts_as_none(cluster: Served, header: str) -> None:
    status, _, told = ask(cluster, {"prompt": PROMPT, "max_tokens": 1}, traceparent=header)
    assert status == 200 and told[3:35] not in header and told.endswith("-00")


# Timelines of the same requests, at the gateways' own paths.


def test_any_gateway_behind_the_port_shows_a_request_of_another(cluster: Served) -> None:
    status, answer = cluster.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 8})
    assert status == 200
    gateways = set()
    for _ in range(16):  # each over a new connection, so of either gateway
        gateways.add(timeline_of(cluster.get(f"/admin/requests/{answer['id']}").content).gateway)
        slowest = cluster.get("/admin/requests?order=slowest").json()["data"]
        ids = [each["request_id"] for each in slowest]
        assert answer["id"].rpartition("-")[2] in ids and len(ids) == len(set(ids))
    assert len(gateways) == 1


def test_explain_shows_the_waterfall_under_the_decision(cluster: Served) -> None:
    _, answer = cluster.post("/v1/completions", {"prompt": PROMPT + "x", "max_tokens": 8})
    told = cluster.baton("explain", answer["id"], "--port", str(cluster.port))
    decision, _, waterfall = told.partition("answered in ")
    assert "prefill-0" in decision and "prefill_computing" in waterfall
    assert "unaccounted" in waterfall and "100.0%" in waterfall


def parent() -> str:
    return f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01"
