"""Plots of what bench/prefix.py measured."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from baton.bench.prefix_pull import Trial


def plot_prefix(
    workloads: Mapping[str, tuple[Sequence[float], Sequence[float]]], pulls: Sequence[Trial], path: Path
) -> None:
    """Times to first token, with and without reuse, as shares of all requests; and each pull's costs.

    workloads: by name, seconds with and without. path: of the JSON, beside which the picture goes.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * (len(workloads) + 1), 4), layout="constrained")
    *panels, last = figure.subplots(1, len(workloads) + 1, squeeze=False)[0]
    for axes, (name, times) in zip(panels, workloads.items(), strict=True):
        for label, seconds in zip(("with reuse", "without"), times, strict=True):
            shares = [(number + 1) / len(seconds) for number in range(len(seconds))]
            axes.step(sorted(each * 1e3 for each in seconds), shares, where="post", label=label)
        axes.set_xscale("log")
        axes.set_xlabel("ms to the first token")
        axes.set_ylabel("share of requests")
        axes.set_title(name)
        axes.legend(fontsize="small")
    for label, costs in (("pulled", [t.pulled for t in pulls]), ("computed", [t.computed for t in pulls])):
        expected, measured = ([getattr(each, field) * 1e3 for each in costs] for field in _COSTS)
        last.plot(measured, expected, "o", label=label)
    most = max(1e3 * max(*trial.computed[:2]) for trial in pulls)
    last.plot([0, most], [0, most], color="grey", linestyle="--", linewidth=0.8, label="as expected")
    last.set_xlabel("measured, ms")
    last.set_ylabel("expected, ms")
    last.set_title("a prefix that a busy worker holds")
    last.legend(fontsize="small")
    figure.savefig(path.with_suffix(".png"), dpi=150)


_COSTS = ("measured_s", "expected_s")
