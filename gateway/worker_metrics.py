"""What the router last said of workers, as Prometheus reads it."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final, TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from baton.operating import Status
from baton.worker import Load, WorkerStatus

Reading: TypeAlias = tuple[str, str, Callable[[Load], int]]  # name, documentation, of a worker's own count
WORKER_GAUGES: Final[tuple[Reading, ...]] = (
    ("running_sequences", "Sequences that have pages.", lambda load: load.num_running),
    ("waiting_sequences", "Sequences that have none yet.", lambda load: load.num_waiting),
    ("incoming_transfers", "Transfers that hold pages here.", lambda load: load.num_incoming),
    ("outgoing_transfers", "Transfers that hold pages here.", lambda load: load.num_outgoing),
)
WORKER_COUNTERS: Final[tuple[Reading, ...]] = (
    ("generated_tokens", "Tokens generated.", lambda load: load.num_tokens),
    ("prefix_queries_tokens", "Looked up in the prefix cache.", lambda load: load.prefix_queries_tokens),
    ("prefix_hits_tokens", "Of these, found.", lambda load: load.prefix_hits_tokens),
    ("preemptions", "Sequences that had to make room.", lambda load: load.num_preemptions),
    ("kv_sent_bytes", "Moved to other workers.", lambda load: load.kv_bytes),
)


def worker_families(status: Status) -> Iterator[Metric]:
    yield _num_workers(status)
    labels = ("worker", "role")
    for name, documentation, read in WORKER_GAUGES:
        gauge = GaugeMetricFamily(f"baton_worker_{name}", documentation, labels=labels)
        for worker in status.workers:
            gauge.add_metric(_names(worker), read(worker.load))
        yield gauge
    for name, documentation, read in WORKER_COUNTERS:
        counter = CounterMetricFamily(f"baton_worker_{name}", documentation, labels=labels)
        for worker in status.workers:
            counter.add_metric(_names(worker), read(worker.load))
        yield counter
    yield from _labelled_worker_families(status)


def _num_workers(status: Status) -> Metric:
    gauge = GaugeMetricFamily(
        "baton_workers", "Workers of the cluster: 'serving' or 'draining'.", labels=("role", "node", "state")
    )
    counts = Counter(
        (each.worker.role, each.worker.node, "draining" if each.is_draining else "serving")
        for each in status.workers
    )
    for labels, count in counts.items():
        gauge.add_metric(labels, count)
    return gauge


def _labelled_worker_families(status: Status) -> Iterator[Metric]:
    pages = GaugeMetricFamily("baton_kv_pages", "KV pages by state.", labels=("worker", "role", "state"))
    events = CounterMetricFamily("baton_worker_events", "By kind.", labels=("worker", "role", "event"))
    for worker in status.workers:
        for state, count in worker.load.pages.items():
            pages.add_metric((*_names(worker), state), count)
        for event, count in worker.load.counters.items():
            events.add_metric((*_names(worker), event), count)
    yield pages
    yield events


def _names(worker: WorkerStatus) -> tuple[str, str]:
    return worker.worker.name, worker.worker.role
