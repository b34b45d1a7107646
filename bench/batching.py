"""Static, dynamic and continuous batching of the same requests by the same engine.

python -m baton.bench.batching [--repeats N] [--out FOLDER]

1. Burst: all requests at once; what a full machine yields. 10 % short, 80 % medium, 10 % long answers.
2. Open loop: Poisson arrivals in real time, at 70 % of what continuous batching yielded in 1, then at 70 %
   of what static batching did, where all policies keep up.
3. Sweep: bursts of equal mean answer length and growing variance.

Every figure is the median over repeats, policies taking turns within each; ratios are of the same repeat.
Repeats differ in the order of the same lengths.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Final, TypeAlias

from baton.bench.batching_runs import (
    NUM_SEATS,
    PROMPT_TOKENS,
    SHAPE,
    Outcome,
    Requests,
    burst,
    load_policies,
    mixed_lengths,
    poisson,
    run,
    varied_lengths,
)
from baton.bench.replica import LlamaShape, Replica
from baton.bench.report import RESULTS, Row, at_least, can_plot, format_number, print_table, write_json

THROUGHPUT_BAR: Final = 1.9  # continuous / static
LATENCY_BAR: Final = 5.0  # static / continuous, means
LOAD: Final = 0.7  # of a policy's measured capacity
Outcomes: TypeAlias = dict[str, list[Outcome]]  # policy -> one outcome a repeat
Measure: TypeAlias = Callable[[Outcome], float]


@dataclass(frozen=True)
class Workload:
    num_requests: int = 160
    sweep_requests: int = 240
    sweep_mean: int = 16  # tokens
    variations: tuple[float, ...] = (0.0, 0.5, 1.0, 1.5, 2.0)
    repeats: int = 3


@dataclass(frozen=True)
class Point:
    """One variance of the sweep."""

    requests: Requests  # of the first repeat; the others have much the same lengths in another order
    outcomes: Outcomes

    @property
    def gain(self) -> float:
        return ratio(self.outcomes, "continuous", "static", tokens_per_s)

    @property
    def step_gain(self) -> float:
        """The gain if all steps cost the same: it depends on no clock."""
        return ratio(self.outcomes, "static", "continuous", num_steps)


def tokens_per_s(outcome: Outcome) -> float:
    return outcome.tokens_per_s


def mean_latency_s(outcome: Outcome) -> float:
    return outcome.mean_latency_s


def num_steps(outcome: Outcome) -> float:
    return outcome.num_steps


def take_turns(replicas: Mapping[str, Replica], requests_of_repeats: Sequence[Requests]) -> Outcomes:
    """Every policy runs the requests of each repeat, in an order that is turned round each time."""
    outcomes: Outcomes = {policy: [] for policy in replicas}
    for repeat, requests in enumerate(requests_of_repeats):
        for policy in list(replicas)[:: 1 if repeat % 2 == 0 else -1]:
            outcomes[policy].append(run(replicas[policy], requests))
    return outcomes


def middle(outcomes: Sequence[Outcome], measure: Measure) -> float:
    return median(map(measure, outcomes))


def ratio(outcomes: Outcomes, above: str, below: str, measure: Measure) -> float:
    pairs = zip(outcomes[above], outcomes[below], strict=True)
    return median(measure(one) / measure(other) for one, other in pairs)


def sweep(replicas: Mapping[str, Replica], workload: Workload) -> list[Point]:
    two = {policy: replicas[policy] for policy in ("static", "continuous")}
    points = []
    for variation in workload.variations:
        size = (workload.sweep_requests, workload.sweep_mean, variation)
        requests = [burst(varied_lengths(*size, seed)) for seed in range(workload.repeats)]
        points.append(Point(requests[0], take_turns(two, requests)))
    return points


def burst_rows(outcomes: Outcomes) -> list[Row]:
    rows = []
    for policy, runs in outcomes.items():
        rows.append(Row(f"burst, {policy}: throughput", middle(runs, tokens_per_s), "tok/s"))
        rows.append(Row(f"burst, {policy}: padding", runs[0].padding_percent, "% of rows"))
    rows += latency_rows("burst", outcomes)
    rows.append(
        Row("burst: steps, static / continuous", ratio(outcomes, "static", "continuous", num_steps), "x")
    )
    dynamic_gain = ratio(outcomes, "dynamic", "static", tokens_per_s)
    rows.append(Row("burst: throughput, dynamic / static", dynamic_gain, "x"))
    gain = ratio(outcomes, "continuous", "static", tokens_per_s)
    return [*rows, at_least("burst: throughput, continuous / static", gain, "x", THROUGHPUT_BAR)]


def latency_rows(name: str, outcomes: Outcomes, bar: float | None = None) -> list[Row]:
    """Seconds from arrival to a request's own last token, and how many times less continuous takes."""
    rows = []
    for policy, runs in outcomes.items():
        p99_s = middle(runs, lambda outcome: outcome.p99_latency_s)
        rows.append(Row(f"{name}, {policy}: mean latency", middle(runs, mean_latency_s), "s"))
        rows.append(Row(f"{name}, {policy}: p99 latency", p99_s, "s"))
    times_less = ratio(outcomes, "static", "continuous", mean_latency_s)
    label = f"{name}: mean latency, static / continuous"
    return [*rows, Row(label, times_less, "x") if bar is None else at_least(label, times_less, "x", bar)]


def sweep_rows(points: Sequence[Point]) -> list[Row]:
    rows = []
    for point in points:
        note = f"{format_number(point.step_gain)} in steps"
        rows.append(
            Row(f"sweep: gain at variation {point.requests.variation:.2f}", point.gain, "x", note=note)
        )
    gains = [point.gain for point in points]
    least_rise = min(after - before for before, after in pairwise(gains))
    return [*rows, Row("sweep: least rise of the gain", least_rise, "x", "> 0", least_rise > 0)]


def open_loop(replicas: Mapping[str, Replica], num_requests: int, rate: float, repeats: int) -> Outcomes:
    """`rate`: requests a second."""
    lists = [mixed_lengths(num_requests, seed) for seed in range(repeats)]
    return take_turns(replicas, [poisson(lengths, rate, seed) for seed, lengths in enumerate(lists)])


def measure(workload: Workload, out: Path, shape: LlamaShape = SHAPE) -> list[Row]:
    """Run everything, write batching.json and, where it can be drawn, batching.png into `out`; the rows."""
    replicas = load_policies(shape)
    run_warmup(replicas)
    num_requests, repeats = workload.num_requests, workload.repeats
    full = take_turns(replicas, [burst(mixed_lengths(num_requests, seed)) for seed in range(repeats)])
    rows, samples = burst_rows(full), {"burst": _samples(full)}
    for policy, bar in (("continuous", LATENCY_BAR), ("static", None)):
        rate = LOAD * num_requests / middle(full[policy], lambda outcome: outcome.seconds)
        # At the lower rate half as many requests take the time.
        outcomes = open_loop(replicas, num_requests if bar else num_requests // 2, rate, repeats)
        name = f"{LOAD:.0%} of {policy}"
        rows.append(Row(f"{name}: arrivals", rate, "requests/s"))
        rows += latency_rows(name, outcomes, bar)
        samples[name] = _samples(outcomes)
    points = sweep(replicas, workload)
    rows += sweep_rows(points)
    setting = {"workload": asdict(workload), "model": asdict(shape), "seats": NUM_SEATS}
    extra = {**setting, "prompt_tokens": PROMPT_TOKENS, "samples": samples}
    write_json(out / "batching.json", "batching", rows, {**extra, "sweep": [_sweep_point(p) for p in points]})
    if can_plot():
        plot(points, out / "batching.png")
    return rows


def run_warmup(replicas: Mapping[str, Replica]) -> None:
    for replica in replicas.values():
        run(replica, burst((8,) * NUM_SEATS))


def plot(points: Sequence[Point], path: Path) -> None:
    from matplotlib.figure import Figure  # only here: `can_plot` says whether it is there

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    variations = [point.requests.variation for point in points]
    axes.plot(variations, [point.gain for point in points], "o-", label="throughput")
    axes.plot(variations, [point.step_gain for point in points], "s--", label="if all steps cost the same")
    axes.legend()
    axes.set_xlabel(
        f"variation of answer length (deviation / mean), mean {points[0].requests.mean:.0f} tokens"
    )
    axes.set_ylabel("continuous / static")
    axes.set_ylim(bottom=0)
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set_title(f"Continuous batching gains with variance ({NUM_SEATS} seats)")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _sweep_point(point: Point) -> dict[str, object]:
    return {
        "variation": point.requests.variation,
        "gain": point.gain,
        "step_gain": point.step_gain,
        "samples": _samples(point.outcomes),
    }


def _samples(outcomes: Outcomes) -> dict[str, list[dict[str, object]]]:
    return {policy: [asdict(outcome) for outcome in runs] for policy, runs in outcomes.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=Workload.repeats)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of batching.json and batching.png")
    arguments = parser.parse_args()
    if not can_plot():
        print("note: no batching.png without matplotlib: pip install matplotlib", flush=True)
    print_table("batching", measure(Workload(repeats=arguments.repeats), arguments.out))


if __name__ == "__main__":
    main()
