"""The batching suite: equal work for every policy, padding in static batches alone, figures in the file."""

import json
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
    burst,
    load_policies,
    measure_policies,
    mixed_lengths,
    poisson,
    ratio,
    serve,
    take_turns,
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


def test_policies_take_turns_and_ratios_pair_runs_of_one_repeat(
    replicas: dict[str, RecordedEngine], tmp_path: Path
) -> None:
    report = Report("batching", "batching", tmp_path)
    outcomes = take_turns(replicas, [burst((1, 2)), burst((2, 1))], "burst", report)
    assert [len(runs) for runs in outcomes.values()] == [2, 2, 2]
    assert ratio(outcomes, "static", "static", lambda outcome: outcome.tokens_per_s) == 1.0


def test_rate_and_padding_of_an_outcome() -> None:
    outcome = Outcome(2.0, 10, (1.0, 3.0), num_steps=5, num_rows=40, num_padded_rows=10)
    assert (outcome.tokens_per_s, outcome.mean_latency_s, outcome.padding_percent) == (5.0, 2.0, 25.0)


def test_toy_run_writes_rows_with_bars_and_samples(tmp_path: Path) -> None:
    report = Report("batching", "batching", tmp_path)
    measure_policies(6, 1, report, SMALL)
    report.finish()
    assert {row.limit for row in report.rows} == {None, f">= {THROUGHPUT_BAR}", f">= {LATENCY_BAR:g}"}
    content = json.loads((tmp_path / "batching.json").read_text())
    assert set(content["samples"]) == {"burst", "70% of continuous"}
