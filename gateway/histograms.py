"""What has been counted in buckets, as Prometheus reads it."""

from collections.abc import Iterable, Sequence

from prometheus_client.core import HistogramMetricFamily

from baton.gateway.counts import HistogramCounts


def histogram_family(
    name: str,
    documentation: str,
    bounds: Sequence[float],
    labels: Sequence[str],
    counted: Iterable[tuple[Sequence[str], HistogramCounts]],
) -> HistogramMetricFamily:
    """counted: the labels' values, and what there is of them; those of other bounds are left out, as another
    release of Baton has them while one replaces the other.
    """
    family = HistogramMetricFamily(name, documentation, labels=labels)
    for values, found in counted:
        if len(found.counts) != len(bounds) + 1:
            continue
        total, buckets = 0, []
        for bound, count in zip((*map(str, bounds), "+Inf"), found.counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        family.add_metric(values, buckets, found.sum)
    return family
