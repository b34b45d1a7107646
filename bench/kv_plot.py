"""Plots of what bench/kv.py measured."""

from collections.abc import Sequence
from pathlib import Path

from baton.bench.kv_sweep import Limits, Point


def plot_sweep(points: Sequence[Point], limits: Sequence[Limits], path: Path) -> None:
    """Rate over bytes moved, a panel a transport, with memcpy and raw sockets as lines."""
    from matplotlib.figure import Figure

    transports = sorted({point.transport for point in points})
    figure = Figure(figsize=(5 * len(transports), 4), layout="constrained")
    panels = figure.subplots(1, len(transports), squeeze=False)[0]
    for axes, transport in zip(panels, transports, strict=True):
        for limit in limits:
            curve = sorted(
                (point.num_bytes / 2**20, point.gbps)
                for point in points
                if (point.transport, point.shape, point.page_size)
                == (transport, limit.shape, limit.page_size)
            )
            label = f"{limit.shape}, pages of {limit.page_size}"
            axes.plot([x for x, _ in curve], [y for _, y in curve], "o-", label=label)
        name = "memcpy" if transport == "shm" else "raw socket"
        best = max(rate for limit in limits for key, rate in limit.gbps.items() if key.startswith(name))
        axes.axhline(best, color="grey", linestyle="--", linewidth=0.8, label=f"{name}, best of the run")
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("MiB of a transfer")
        axes.set_ylabel("GB/s while bytes move")
        axes.set_title(transport)
        axes.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
