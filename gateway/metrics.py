"""What a gateway counts, and how Prometheus reads it.

Plain integers and lists, written on the event loop alone: an observation for each token must cost nothing
that shows. Labels have few values, which no client chooses.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeAlias

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from baton.control import Status
from baton.gateway.service import Service
from baton.worker import Load, WorkerStatus

TTFT_BOUNDS_S: Final = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
ITL_BOUNDS_S: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.08, 0.1, 0.2, 0.5, 1.0, 5.0)
REQUEST_BOUNDS_S: Final = (0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 600.0)
ROUTES: Final = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize", "/detokenize"}
    | {"/health", "/ping", "/metrics", "/version", "/v1/stream"}
)
GATEWAY: Final = ("gateway",)

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


class Histogram:
    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self, name: str, documentation: str, gateway: str) -> HistogramMetricFamily:
        buckets, total = [], 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        family = HistogramMetricFamily(name, documentation, labels=GATEWAY)
        family.add_metric((gateway,), buckets, self._sum)
        return family


class Metrics:
    """Of one gateway process. Several may answer behind one port, whoever is scraped: so each says its name,
    in a label, and no series ever goes back.
    """

    def __init__(self, gateway: str = "") -> None:
        self.gateway = gateway
        self.requests: Counter[tuple[str, int]] = Counter()  # by route and status
        self.refused: Counter[str] = Counter()  # connections, by the server, before any route
        self.num_open = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generated_tokens = 0
        self.clients_gone = 0
        self.clients_given_up = 0  # they read too slowly
        self.unknown_keys = 0
        self.ttft = Histogram(TTFT_BOUNDS_S)
        self.itl = Histogram(ITL_BOUNDS_S)
        self.duration = Histogram(REQUEST_BOUNDS_S)

    def answered(self, path: str, status: int) -> None:
        self.requests[path if path in ROUTES else "other", status] += 1

    def families(self) -> Iterator[Metric]:
        yield self._counter("requests", "Requests answered.", ("route", "status"), self.requests)
        refused = {(reason,): count for reason, count in self.refused.items()}
        yield self._counter("connections_refused", "What the server refused.", ("reason",), refused)
        for name, documentation, value in (
            ("prompt_tokens", "Tokens of prompts.", self.prompt_tokens),
            ("cached_prompt_tokens", "Of these, found in a prefix cache.", self.cached_tokens),
            ("generation_tokens", "Tokens generated.", self.generated_tokens),
            ("clients_gone", "Clients that left before their answer's end.", self.clients_gone),
            ("clients_given_up", "Clients that read too slowly.", self.clients_given_up),
            ("unknown_body_keys", "Keys of bodies that are not known.", self.unknown_keys),
        ):
            yield self._counter(name, documentation, (), {(): value})
        num_open = GaugeMetricFamily("baton_open_requests", "Calls being answered.", labels=GATEWAY)
        num_open.add_metric((self.gateway,), self.num_open)
        yield num_open
        for name, documentation, histogram in (
            ("time_to_first_token", "From the call to its first token.", self.ttft),
            ("inter_token_latency", "Between two batches of a choice's tokens.", self.itl),
            ("request", "From the call to its end.", self.duration),
        ):
            yield histogram.family(f"baton_{name}_seconds", documentation, self.gateway)

    def _counter(
        self,
        name: str,
        documentation: str,
        labels: tuple[str, ...],
        counts: Mapping[tuple[str, int], int] | Mapping[tuple[str], int] | Mapping[tuple[()], int],
    ) -> Metric:
        family = CounterMetricFamily(f"baton_{name}", documentation, labels=GATEWAY + labels)
        for values, count in counts.items():
            family.add_metric((self.gateway, *map(str, values)), count)
        return family


class Exporter(Collector):
    """This gateway's metrics, and the workers' by what the router last said of them."""

    def __init__(self, metrics: Metrics, service: Service, *, model: str, vllm_names: bool) -> None:
        self._metrics = metrics
        self._service = service
        self._model = model
        self._vllm_names = vllm_names
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        yield from self._metrics.families()
        yield from self._service_counters()
        status = self._service.status
        if status is not None:
            yield from _worker_families(status)
            if self._vllm_names:
                yield from _vllm_families(status.workers, self._model)

    def _service_counters(self) -> Iterator[Metric]:
        labels = (*GATEWAY, "event")
        family = CounterMetricFamily("baton_frontend", "Replays, drops, retries.", labels=labels)
        for event, count in self._service.counters.items():
            family.add_metric((self._metrics.gateway, event), count)
        yield family

    def describe(self) -> Iterable[Metric]:
        """Nothing: names are not asked for before there are values."""
        return ()


def _worker_families(status: Status) -> Iterator[Metric]:
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


def _vllm_families(workers: Sequence[WorkerStatus], model: str) -> Iterator[Metric]:
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
