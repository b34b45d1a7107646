"""The table of bench/serve.py."""

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Final, NamedTuple

from baton.bench.report import Row, at_least, at_most, format_number
from baton.bench.serve_load import Run

LATENCIES: Final = ("ttft", "tpot", "itl", "tbt", "e2el")
MIN_FOR_P99: Final = 1000


class Bars(NamedTuple):
    """What the first target's throughput and median TTFT, over each rival's, are held to; None: nothing."""

    throughput: float | None = None
    ttft: float | None = None


def rows_of(runs: Mapping[str, Sequence[Run]], bars: Bars) -> list[Row]:
    """runs: by target, ours first. Figures are medians over the rounds."""
    ours, *rivals = runs
    rows = [row for name in runs for row in _target_rows(name, runs[name])]
    for rival in rivals:
        rows += _ratio_rows(ours, rival, runs, bars)
    return rows


def _target_rows(name: str, runs: Sequence[Run]) -> list[Row]:
    summaries = [run.summary for run in runs]
    num_ok = sum(summary.num_ok for summary in summaries)
    failures: Counter[str] = Counter()
    for summary in summaries:
        failures.update(summary.failures)
    why = "; ".join(f"{count} x {reason}" for reason, count in failures.most_common())
    said = next((f": {run.said}" for run in runs if run.said), "")
    rows = [at_most(f"{name}: failed requests", failures.total(), "", 0, (why + said)[:240])]
    if not num_ok:
        return rows
    rates = [summary.tokens_per_s for summary in summaries]
    spread = f"{format_number(min(rates))} to {format_number(max(rates))} in {len(rates)} rounds"
    requests = median(summary.requests_per_s for summary in summaries)
    rows.append(
        Row(
            f"{name}: output",
            median(rates),
            "tokens/s",
            note=f"{spread}, {format_number(requests)} requests/s",
        )
    )
    goodputs = [summary.goodput for summary in summaries if summary.goodput is not None]
    if goodputs:
        rows.append(Row(f"{name}: goodput", median(goodputs), "requests/s"))
    rows += [_latency_row(name, figure, runs) for figure in LATENCIES if _has(runs, figure)]
    lag_ms = 1e3 * max(run.max_lag_s for run in runs)
    if lag_ms:
        rows.append(Row(f"{name}: client's lag at worst", lag_ms, "ms", note="it counts as latency"))
    return rows


def _has(runs: Sequence[Run], figure: str) -> bool:
    return all((figure, 50) in run.summary.quantiles for run in runs)


def _of(runs: Sequence[Run], figure: str, percent: int) -> float:
    """Milliseconds: the median over the rounds."""
    return 1e3 * median(run.summary.quantiles[figure, percent] for run in runs)


def _latency_row(name: str, figure: str, runs: Sequence[Run]) -> Row:
    p50, p90, p99 = (_of(runs, figure, percent) for percent in (50, 90, 99))
    note = f"p90 {format_number(p90)}, p99 {format_number(p99)}"
    if figure == "itl" and p50:
        note += f", p99/p50 {p99 / p50:.1f}"
    elif figure != "itl" and min(run.summary.num_ok for run in runs) < MIN_FOR_P99:
        note += f" (of fewer than {MIN_FOR_P99:,} requests a round)"
    return Row(f"{name}: {figure.upper()} p50", p50, "ms", note=note)


def _ratio_rows(ours: str, rival: str, runs: Mapping[str, Sequence[Run]], bars: Bars) -> list[Row]:
    if not all(run.summary.num_ok for name in (ours, rival) for run in runs[name]):
        return [Row(f"{ours} / {rival}", None, "", note="one of them has answered nothing", met=False)]
    pairs = list(zip(runs[ours], runs[rival], strict=True))
    throughput = median(mine.summary.tokens_per_s / theirs.summary.tokens_per_s for mine, theirs in pairs)
    ttft = median(
        mine.summary.quantiles["ttft", 50] / theirs.summary.quantiles["ttft", 50] for mine, theirs in pairs
    )
    name = f"{ours} / {rival}"
    return [
        Row(f"{name}: output", throughput, "x")
        if bars.throughput is None
        else at_least(f"{name}: output", throughput, "x", bars.throughput),
        Row(f"{name}: TTFT p50", ttft, "x")
        if bars.ttft is None
        else at_most(f"{name}: TTFT p50", ttft, "x", bars.ttft),
    ]
