"""What the router last said of workers, as Prometheus reads it."""

from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from baton.control import Status
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


def vllm_families(workers: Sequence[WorkerStatus], model: str) -> Iterator[Metric]:
    """The five that llm-d's endpoint picker reads, of all workers together."""
    num_pages = sum(worker.worker.num_pages for worker in workers)
    num_free = sum(
        worker.load.pages.get("free", 0) + worker.load.pages.get("cached", 0) for worker in workers
    )
    for name, documentation, value in (
        ("num_requests_waiting", "Sequences that wait.", sum(each.load.num_waiting for each in workers)),
        ("num_requests_running", "Sequences that run.", sum(each.load.num_running for each in workers)),
        ("kv_cache_usage_perc", "Share of KV pages in use.", 1 - num_free / num_pages if num_pages else 0.0),
    ):
        gauge = GaugeMetricFamily(f"vllm:{name}", documentation, labels=("model_name",))
        gauge.add_metric((model,), value)
        yield gauge
    cache = GaugeMetricFamily(
        "vllm:cache_config_info", "Of the cache.", labels=("block_size", "num_gpu_blocks")
    )
    page_size = max((worker.worker.page_size for worker in workers), default=0)
    cache.add_metric((str(page_size), str(num_pages)), 1)
    yield cache
    adapters = GaugeMetricFamily(
        "vllm:lora_requests_info",
        "None are served.",
        labels=("max_lora", "waiting_lora_adapters", "running_lora_adapters"),
    )
    adapters.add_metric(("0", "", ""), 1)
    yield adapters


def _names(worker: WorkerStatus) -> tuple[str, str]:
    return worker.worker.name, worker.worker.role
