"""The plot of bench/serve.py: how latencies are spread, target beside target."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from baton.bench.serve_figures import Sample

PANELS: Final = ("TTFT", "TPOT", "ITL", "E2EL")
LEAST_MS: Final = 1e-3


def values_ms(samples: Sequence[Sample], panel: str) -> list[float]:
    """Ranked. What came in the same moment is LEAST_MS apart: a logarithmic axis has no zero."""
    seconds = {
        "TTFT": lambda: [sample.ttft_s for sample in samples],
        "TPOT": lambda: [sample.tpot_s for sample in samples if sample.tpot_s is not None],
        "ITL": lambda: [gap for sample in samples for gap in sample.gaps_s],
        "E2EL": lambda: [sample.e2el_s for sample in samples],
    }[panel]()
    return sorted(max(LEAST_MS, 1e3 * each) for each in seconds)


def plot_latencies(samples: Mapping[str, Sequence[Sample]], path: Path) -> None:
    """samples: by target, of all rounds. A panel a figure, with the share of answers over milliseconds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(PANELS), 3.5), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(PANELS)), PANELS, strict=True):
        for name, of_target in samples.items():
            ranked = values_ms(of_target, panel)
            if not ranked:  # an answer in one piece has no gaps
                continue
            shares = [(place + 1) / len(ranked) for place in range(len(ranked))]
            axes.plot(ranked, shares, drawstyle="steps-post", label=name)
        axes.set_xlabel(f"{panel}, ms")
        axes.set_xscale("log" if axes.lines else "linear")
        axes.set_ylim(0, 1)
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize="small")
    figure.supylabel("share that was no slower")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
