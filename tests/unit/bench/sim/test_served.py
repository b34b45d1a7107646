"""Advice against measured layouts: which layout is best, by how much another is worse, and the loads."""

from pathlib import Path

import pytest

from baton.bench.serve.figures import Run, Sample, Slo
from baton.bench.sim.served import (
    GOAL,
    WORKLOADS,
    Measured,
    Workload,
    advised,
    at_rate,
    attained_by,
    distance,
    rows_of,
    workload_of,
    workloads_of,
)
from baton.bench.sim.suite import usual_times
from baton.sim.rehearsal import Layout
from baton.sim.timed.workload import synthetic
from baton.tenants import Sla

TIMES = usual_times()


def measured(layout: str, attained: float, headroom: float = 0.0) -> Measured:
    return Measured(Layout.parse(layout), attained, headroom)


def best(*every: Measured) -> str:
    return max(every, key=lambda each: each.merit).layout.name


def test_best_layout_keeps_the_objectives_with_the_fewest_devices_and_the_most_headroom() -> None:
    assert best(measured("1M", 0.7), measured("2M", 0.91, 1.0)) == "2M"
    assert best(measured("2M", 0.92, 1.0), measured("1P1D", 0.91, 1.25), measured("2P1D", 1.0, 1.0)) == "1P1D"
    assert best(measured("1M", 0.7), measured("2P1D", 0.8)) == "2P1D"


def test_distance_is_that_of_the_first_difference() -> None:
    two = measured("2M", 0.95, 1.25)
    assert distance(two, two) == 0.0
    assert distance(measured("1P1D", 0.93, 1.0), two) == pytest.approx(20.0)
    assert distance(measured("2P1D", 0.99, 1.0), two) == pytest.approx(50.0)
    assert distance(measured("1M", 0.45), two) == pytest.approx(100 * (1 - 0.45 / GOAL))
    assert distance(None, two) == 100.0
    assert distance(None, measured("1M", 0.5)) == 0.0
    assert distance(measured("1M", 0.4), measured("2M", 0.5)) == pytest.approx(20.0)


def test_failed_answers_miss_the_objectives() -> None:
    samples = [Sample(3, ttft_s, ttft_s + 0.2, (0.1, 0.1)) for ttft_s in (0.1, 0.2, 0.9)]
    assert attained_by(Run(samples, ["status 500"], 1.0, Slo(ttft_s=0.5, tpot_s=0.15))) == 0.5


def test_rate_and_objectives_follow_from_the_time_model() -> None:
    requests = synthetic(1.0, 400.0, WORKLOADS["chat"], 1)
    layouts = [Layout.parse(name) for name in ("1M", "2M")]
    low, high = (workload_of("chat", requests, layouts, TIMES, share, 2.0) for share in (0.3, 0.6))
    assert high.sla == low.sla and len(high.requests) == pytest.approx(2 * len(low.requests), abs=1)
    assert low.slo.ttft_s is not None and 0.005 < low.slo.ttft_s < 0.5
    assert high.requests[-1].arrival_s == pytest.approx(2.0, rel=0.05)


def test_advice_is_compared_with_the_measured_layouts() -> None:
    layouts = [Layout.parse(name) for name in ("1M", "2M")]
    requests = at_rate(synthetic(1.0, 100.0, WORKLOADS["chat"], 1), 10.0, 4.0)
    workload = Workload("chat", requests, Sla(ttft_ms=500.0, tpot_ms=20.0))
    advice = advised(workload, layouts, TIMES)
    found = {"1M": measured("1M", 0.99, 2.0), "2M": measured("2M", 1.0, 2.0)}
    *each, choice = rows_of(workload, found, advice)
    assert [row.value for row in each] == [99.0, 100.0] and choice.met
    assert choice.note.startswith("chosen: 1M, measured best: 1M")
    found["1M"] = measured("1M", 0.72)
    assert rows_of(workload, found, advice)[-1].met is False


def test_traces_become_workloads(tmp_path: Path) -> None:
    mooncake, azure = tmp_path / "conversation.jsonl", tmp_path / "code.csv"
    line = '{"timestamp": %d, "input_length": %d, "output_length": 320, "hash_ids": [0, %d]}\n'
    mooncake.write_text("".join(line % (3000 * at, 800 + 8000 * (at % 2), at) for at in range(8)))
    rows = (f"2023-11-16 18:17:0{at}.5,4000,40" for at in range(3))
    azure.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows) + "\n")
    found = workloads_of([mooncake, azure], 100, 1, 8192)
    assert {each.input_tokens for each in found["chat"]} == {100}
    assert not any(each.block_ids for each in found["chat"]) and len(found["chat"]) == 4
    assert len(found["mixed"]) == 8 and all(each.block_ids[0] == 0 for each in found["mixed"])
    assert {(each.input_tokens, each.output_tokens) for each in found["documents"]} == {(1000, 10)}
    made = workloads_of([], 100, 1, 1000)
    assert made.keys() == found.keys() and {len(each) for each in made.values()} == {100}
    longest = [max(each.input_tokens + each.output_tokens for each in requests) for requests in made.values()]
    assert max(longest) <= 1000
