"""From bytes and moments to latencies; what does not count, and why."""

import json
from typing import Any

import pytest

from baton.bench.serve.client import Answer
from baton.bench.serve.figures import Bad, Run, Sample, Slo, aiperf_export, events_of, streamed, unary
from baton.errors import ConfigError


def event(text: str, reason: str | None = None, **fields: Any) -> bytes:
    content = {"choices": [{"index": 0, "text": text, "finish_reason": reason}], **fields}
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def usage(num_tokens: int) -> bytes:
    return (
        b"data: " + json.dumps({"choices": [], "usage": {"completion_tokens": num_tokens}}).encode() + b"\n\n"
    )


DONE = b"data: [DONE]\n\n"


def answer(*pieces: tuple[float, bytes], status: int = 200) -> Answer:
    return Answer(10.0, status, list(pieces), pieces[-1][0] if pieces else 10.0)


class TestEvents:
    def test_an_event_has_the_moment_of_its_last_byte(self) -> None:
        whole = event("a") + event("b")
        cut = len(event("a")) + 3
        found = list(events_of([(1.0, whole[:5]), (2.0, whole[5:cut]), (3.0, whole[cut:])]))
        assert [(each.moment_s, each.content["choices"][0]["text"]) for each in found] == [
            (2.0, "a"),
            (3.0, "b"),
        ]

    def test_comments_are_none_and_done_is_one(self) -> None:
        assert list(events_of([(1.0, b": ping\n\n" + DONE + b":\n\n")])) == [(1.0, "", None)]

    def test_lines_may_end_as_windows_has_it(self) -> None:
        assert list(events_of([(1.0, b'id: 7\r\ndata: {"a":1}\r\n\r\n')])) == [(1.0, "7", {"a": 1})]

    @pytest.mark.parametrize("tail", [b"data: {", b"data: {}\n"])
    def test_a_stream_does_not_end_within_one(self, tail: bytes) -> None:
        with pytest.raises(Bad, match="within an event"):
            list(events_of([(1.0, event("a") + tail)]))
        assert len(list(events_of([(1.0, event("a") + tail)], may_be_cut=True))) == 1

    def test_data_is_json(self) -> None:
        with pytest.raises(Bad, match="no JSON"):
            list(events_of([(1.0, b"data: {oops}\n\n")]))


def test_latencies_are_as_defined() -> None:
    came = answer(
        (10.5, event("a")), (10.6, event("b")), (11.1, event("c", "length")), (11.2, usage(3) + DONE)
    )
    sample = streamed(came, start_s=10.0, num_tokens=3)
    assert sample.num_tokens == 3
    assert sample.ttft_s == pytest.approx(0.5)
    assert sample.e2el_s == pytest.approx(1.1)  # to the last event with a token
    assert sample.tpot_s == pytest.approx((1.1 - 0.5) / 2)
    assert sample.gaps_s == pytest.approx((0.1, 0.5))
    assert sample.tbt_s == pytest.approx(0.5)


def test_latency_counts_from_the_due_time() -> None:
    came = answer((10.5, event("a", "stop") + usage(1) + DONE))
    assert streamed(came, start_s=9.0, num_tokens=1).ttft_s == pytest.approx(1.5)


def test_tokens_that_came_together_count_by_the_usage() -> None:
    came = answer((10.5, event("a b")), (11.5, event("c d", "length") + usage(4) + DONE))
    sample = streamed(came, start_s=10.0, num_tokens=4)
    assert sample.tpot_s == pytest.approx(1.0 / 3) and sample.gaps_s == pytest.approx((1.0,))


def test_without_a_usage_events_are_tokens() -> None:
    came = answer((10.5, event("a") + event("b", "length") + DONE))
    assert streamed(came, start_s=10.0, num_tokens=2).num_tokens == 2
    with pytest.raises(Bad, match="2 tokens instead of 3"):
        streamed(came, start_s=10.0, num_tokens=3)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (event("a") + usage(2) + DONE, "no finish_reason"),
        (event("a", "length") + usage(1) + DONE, "1 tokens instead of 2"),
        (event("a", "length") + usage(2), r"no \[DONE\]"),
        (b'data: {"error": {"code": "worker_crash"}}\n\n', "worker_crash"),
        (usage(2) + DONE, "no finish_reason"),
    ],
)
def test_stream_counts_only_when_it_is_whole(body: bytes, message: str) -> None:
    with pytest.raises(Bad, match=message):
        streamed(answer((10.5, body)), start_s=10.0, num_tokens=2)


def test_refusal_has_its_status_and_code() -> None:
    refused = answer((10.1, b'{"error": {"code": "rate_limited", "type": "x"}}'), status=429)
    for read in (streamed, unary):
        with pytest.raises(Bad, match="status 429 rate_limited"):
            read(refused, 10.0, 1)
    with pytest.raises(Bad, match="status 502"):
        unary(answer((10.1, b"<html>"), status=502), 10.0, 1)


class TestUnary:
    def _body(self, reason: str | None, num_tokens: int) -> bytes:
        return json.dumps(
            {"choices": [{"finish_reason": reason}], "usage": {"completion_tokens": num_tokens}}
        ).encode()

    def test_its_first_token_comes_with_its_last(self) -> None:
        sample = unary(answer((10.2, self._body("stop", 4)[:9]), (10.7, self._body("stop", 4)[9:])), 10.0, 4)
        assert sample.ttft_s == sample.e2el_s == pytest.approx(0.7)
        assert sample.tpot_s is None and sample.tbt_s is None

    def test_it_counts_only_when_it_is_whole(self) -> None:
        for body, message in (
            (self._body(None, 4), "no finish_reason"),
            (self._body("stop", 3), "3 tokens instead of 4"),
            (b"{}", "no completion"),
            (b"[1]", "no completion"),
            (b"<", "no completion"),
        ):
            with pytest.raises(Bad, match=message):
                unary(answer((10.2, body)), 10.0, 4)


def test_figures_of_a_run_are_of_answers_that_count() -> None:
    samples = [Sample(2, ttft, 1.0, (1.0 - ttft,)) for ttft in (0.1, 0.2, 0.4)]
    run = Run(samples, ["late", "late", "lost"], 2.0, Slo(ttft_s=0.2))
    assert (run.num_tokens, run.tokens_per_s, run.requests_per_s, run.goodput) == (6, 3.0, 1.5, 1.0)
    assert run.values_s("itl") == pytest.approx([0.9, 0.8, 0.6])
    content = json.loads(json.dumps(run.as_json()))
    assert (content["num_ok"], content["failures"]) == (3, {"late": 2, "lost": 1})
    assert content["ttft_p50_ms"] == pytest.approx(200)


def test_goodput_needs_every_limit_met() -> None:
    sample = Sample(3, 0.1, 0.5, (0.2, 0.2))
    assert Slo(0.1, 0.2, 0.5).is_met(sample)
    for limits in (Slo(ttft_s=0.09), Slo(tpot_s=0.19), Slo(e2el_s=0.49)):
        assert not limits.is_met(sample)
    assert Run([sample], [], 1.0).goodput is None
    assert Slo(tpot_s=0.1).is_met(Sample(1, 0.1, 0.1, ()))  # an answer of one token has no TPOT


def test_run_without_answers_has_no_percentiles() -> None:
    assert "ttft_p50_ms" not in Run([], ["lost"], 1.0).as_json()


@pytest.mark.parametrize(
    "given",
    [
        ["ttft:200", "tpot:50", "e2el:1000"],
        ["time_to_first_token:200 inter_token_latency:50 request_latency:1000"],
        ["ttft:2e2", "inter_token_latency:50.0", "e2el:1000"],
    ],
)
def test_goodput_is_spelled_as_by_vllm_and_aiperf(given: list[str]) -> None:
    assert Slo.parse(given) == Slo(ttft_s=0.2, tpot_s=0.05, e2el_s=1.0)


def test_goodput_of_nothing_has_no_objective() -> None:
    assert not Slo.parse([]).is_any


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("tttft:200", "did you mean 'ttft'"),
        ("latency:5", "expected one of ttft, tpot, e2el, time_to_first_token"),
        ("ttft", "such as ttft:200, got 'ttft'"),
        ("ttft:fast", "such as ttft:200, got 'ttft:fast'"),
        ("tpot:0", "expected tpot:MILLISECONDS"),
        ("e2el:nan", "expected e2el:MILLISECONDS"),
        ("ttft:1 time_to_first_token:2", "twice"),
    ],
)
def test_wrong_goodput_says_why(given: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Slo.parse([given])


def test_export_has_the_keys_and_units_of_aiperf() -> None:
    samples = [Sample(3, 0.1 * number, 0.1 * number + 0.04, (0.01, 0.03)) for number in range(1, 5)]
    slo = Slo(ttft_s=0.25)
    runs = [Run(samples[:2], ["no [DONE]"], 2.0, slo), Run(samples[2:], [], 2.0, slo)]
    export = json.loads(json.dumps(aiperf_export(runs)))
    assert export["request_throughput"] == {"unit": "requests/sec", "avg": 1.0}
    assert export["output_token_throughput"] == {"unit": "tokens/sec", "avg": 3.0}
    assert export["request_count"]["avg"] == 4.0 and export["error_request_count"]["avg"] == 1.0
    assert export["goodput"] == {"unit": "requests/sec", "avg": 0.5}
    ttft = export["time_to_first_token"]
    assert (
        ttft["unit"] == "ms" and ttft["avg"] == pytest.approx(250.0) and ttft["max"] == pytest.approx(400.0)
    )
    percentiles = [f"p{each}" for each in (1, 5, 10, 25, 50, 75, 90, 95, 99)]
    assert list(ttft) == ["unit", "avg", *percentiles, "min", "max", "std"]
    assert export["inter_token_latency"]["avg"] == pytest.approx(20.0)
    assert export["error_summary"] == [
        {"error_details": {"code": None, "type": "BadAnswer", "message": "no [DONE]"}, "count": 1}
    ]
    assert export["was_cancelled"] is False
