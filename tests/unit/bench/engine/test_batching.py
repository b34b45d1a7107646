"""The batching suite: equal work for every policy, padding in static batches alone, figures in the file."""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from baton.bench.engine.batching import (
    LATENCY_BAR,
    NUM_SEATS,
    PROMPT_TOKENS,
    SHAPE,
    THROUGHPUT_BAR,
    Outcome,
    Workload,
    burst,
    load_policies,
    measure_workload,
    mixed_lengths,
    poisson,
    ratio,
    serve,
    take_turns,
    varied_lengths,
)
from baton.bench.engine.replica import RecordedEngine
from baton.bench.report import Report

LENGTHS = (1, 2, 2, 3, 9) * 8
SMALL = replace(
    SHAPE, hidden_size=64, intermediate_size=128, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=32
)


@pytest.fixture(scope="module")
def replicas() -> Iterator[dict[str, RecordedEngine]]:
    loaded = load_policies(SMALL)
    yield loaded
    for replica in loaded.values():
        replica.engine.scheduler.check_integrity()


def test_mix_is_a_tenth_short_and_a_tenth_long() -> None:
    lengths = mixed_lengths(100)
    assert [lengths.count(length) for length in (4, 32, 256)] == [10, 80, 10]


@pytest.mark.parametrize("variation", [0.0, 0.5, 1.0, 2.0])
def test_varied_lengths_keep_the_mean_and_near_the_variation(variation: float) -> None:
    requests = burst(varied_lengths(500, 24, variation))
    assert requests.mean == 24
    assert requests.variation == pytest.approx(variation, rel=0.05)


def test_poisson_arrivals_keep_the_rate() -> None:
    arrivals_s = poisson((1,) * 2000, requests_per_s=50.0).arrivals_s
    assert list(arrivals_s) == sorted(arrivals_s)
    assert arrivals_s[-1] == pytest.approx(2000 / 50, rel=0.1)


@pytest.mark.parametrize("policy", ["static", "dynamic", "continuous"])
def test_every_policy_generates_what_was_asked(replicas: dict[str, RecordedEngine], policy: str) -> None:
    outcome = serve(replicas[policy], burst(LENGTHS))
    assert outcome.num_tokens == sum(LENGTHS)
    assert len(outcome.latencies_s) == len(LENGTHS)
    assert outcome.num_rows - outcome.num_padded_rows == sum(LENGTHS) + len(LENGTHS) * (PROMPT_TOKENS - 1)


def test_only_static_pads_and_it_computes_every_row_of_a_batch_to_the_end(
    replicas: dict[str, RecordedEngine],
) -> None:
    lengths = (2,) * (NUM_SEATS - 1) + (10,)
    outcomes = {policy: serve(replica, burst(lengths)) for policy, replica in replicas.items()}
    assert {policy: outcome.num_padded_rows for policy, outcome in outcomes.items()} == {
        "static": 8 * (NUM_SEATS - 1), "dynamic": 0, "continuous": 0,
    }  # fmt: skip


def test_latency_counts_from_arrival(replicas: dict[str, RecordedEngine]) -> None:
    outcome = serve(replicas["dynamic"], poisson((2, 2, 2), requests_per_s=100.0))
    assert all(0 < latency_s < 5 for latency_s in outcome.latencies_s)
    assert outcome.mean_latency_s <= outcome.p99_latency_s <= max(outcome.latencies_s)


def test_policies_take_turns_and_ratios_pair_runs_of_one_repeat(replicas: dict[str, RecordedEngine]) -> None:
    outcomes = take_turns(replicas, [burst((1, 2)), burst((2, 1))])
    assert [len(runs) for runs in outcomes.values()] == [2, 2, 2]
    assert ratio(outcomes, "static", "static", lambda outcome: outcome.tokens_per_s) == 1.0


def test_rate_and_padding_of_an_outcome() -> None:
    outcome = Outcome(2.0, 10, (1.0, 3.0), num_steps=5, num_rows=40, num_padded_rows=10)
    assert (outcome.tokens_per_s, outcome.mean_latency_s, outcome.padding_percent) == (5.0, 2.0, 25.0)


def test_without_matplotlib_all_but_the_plot_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    toy = Workload(num_requests=4, sweep_requests=2, sweep_mean=2, variations=(0.0, 1.0), repeats=1)
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    report_of(toy, tmp_path).finish()
    assert "no picture: pip install matplotlib\n" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"batching.json", "batching.html"}


def test_toy_run_writes_rows_with_bars_samples_and_the_plot(tmp_path: Path) -> None:
    toy = Workload(num_requests=6, sweep_requests=10, sweep_mean=4, variations=(0.0, 1.0), repeats=1)
    report = report_of(toy, tmp_path)
    report.finish()
    assert {row.limit for row in report.rows} == {None, f">= {THROUGHPUT_BAR}", f">= {LATENCY_BAR:g}", "> 0"}
    content = json.loads((tmp_path / "batching.json").read_text())
    assert [point["variation"] for point in content["sweep"]] == pytest.approx([0.0, 1.0], abs=0.5)
    assert set(content["samples"]) == {"burst", "70% of continuous", "70% of static"}
    assert (tmp_path / "batching.png").read_bytes().startswith(b"\x89PNG")


def report_of(workload: Workload, folder: Path) -> Report:
    report = Report("batching", "batching", folder)
    measure_workload(workload, report, SMALL)
    return report
