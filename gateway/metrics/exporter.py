"""Metrics in Prometheus' text format: of the gateways behind one port, and of workers.

Whoever of these gateways is scraped shows all of them, each with its own name in a label: so sums are
sums, and no series ever goes back from one scrape to the next.
"""

import platform
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeAlias

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

import baton
from baton.gateway.metrics.metrics import (
    ITL_BOUNDS_S,
    REQUEST_BOUNDS_S,
    TTFT_BOUNDS_S,
    Counts,
    HistogramCounts,
    Metrics,
    gateway_tenant_families,
    histogram_family,
    queue_families,
    router_tenant_families,
)
from baton.gateway.metrics.peer_gateways import PeerGateways
from baton.gateway.streams.request_stream import Service
from baton.messages.operations import Status
from baton.messages.status import ROUTING_BOUNDS_S, RouterStatus
from baton.messages.workers import Load, WorkerStatus

WorkerReading: TypeAlias = tuple[
    str, str, Callable[[Load], int]
]  # name, documentation, of a worker's own count
WORKER_GAUGES: Final[tuple[WorkerReading, ...]] = (
    ("running_sequences", "Sequences that have pages.", lambda load: load.num_running),
    ("waiting_sequences", "Sequences that have none yet.", lambda load: load.num_waiting),
    ("incoming_transfers", "Transfers that hold pages here.", lambda load: load.num_incoming),
    ("outgoing_transfers", "Transfers that hold pages here.", lambda load: load.num_outgoing),
)
WORKER_COUNTERS: Final[tuple[WorkerReading, ...]] = (
    ("generated_tokens", "Tokens generated.", lambda load: load.num_tokens),
    ("prefix_queries_tokens", "Looked up in the prefix cache.", lambda load: load.prefix_queries_tokens),
    ("prefix_hits_tokens", "Of these, found.", lambda load: load.prefix_hits_tokens),
    ("preemptions", "Sequences that had to make room.", lambda load: load.num_preemptions),
    ("kv_sent_bytes", "Moved to other workers.", lambda load: load.kv_bytes),
)


def worker_families(status: Status) -> Iterator[Metric]:
    """What the router last said of workers, as Prometheus reads it."""
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


ROUTER: Final = ("router",)
OWN_COUNTERS: Final = {
    "decisions": "Choices of workers by what they hold and cost.",
    "blind_decisions": "Of these, about a worker that had not told what it holds.",
}


def router_families(status: Status) -> Iterator[Metric]:
    """Metrics of the routers from their last status. The label `router` is the start of a router's id."""
    routers = {router.id[:8]: router for router in status.routers}
    routing = HistogramMetricFamily("baton_router_routing_seconds", "To choose workers.", labels=ROUTER)
    attempts = GaugeMetricFamily("baton_router_attempts", "Under way, that it has sent out.", labels=ROUTER)
    redis = GaugeMetricFamily("baton_router_redis_up", "1 when its link to Redis is up.", labels=ROUTER)
    for name, router in routers.items():
        routing.add_metric([name], _buckets(router), router.routing_s)
        attempts.add_metric([name], router.num_attempts)
        if router.redis != "none":
            redis.add_metric([name], float(router.redis == "up"))
    yield from (routing, attempts, redis)
    away = "Seconds since Ray's head last answered; nothing can be started meanwhile. 0: it does."
    yield GaugeMetricFamily("baton_ray_head_away_seconds", away, value=status.head_away_s)
    yield from _counters(routers)


def _counters(routers: dict[str, RouterStatus]) -> Iterator[Metric]:
    for counter, documentation in OWN_COUNTERS.items():
        family = CounterMetricFamily(f"baton_router_{counter}", documentation, labels=ROUTER)
        for name, router in routers.items():
            family.add_metric([name], router.counters.get(counter, 0))
        yield family
    events = CounterMetricFamily("baton_router_events", "By kind.", labels=("router", "event"))
    for name, router in routers.items():
        for event, count in router.counters.items():
            if event not in OWN_COUNTERS:
                events.add_metric([name, event], count)
    yield events


def _buckets(router: RouterStatus) -> list[tuple[str, float]]:
    buckets, total = [], 0
    for bound, count in zip((*map(str, ROUTING_BOUNDS_S), "+Inf"), router.routing_counts, strict=True):
        total += count
        buckets.append((bound, float(total)))
    return buckets


# What dashboards and llm-d's endpoint picker read of vLLM, by vLLM's names; off unless it is asked for.
#
# The label `engine`, vLLM's for one of several, names the gateway or the worker that has counted.

LABELS: Final = ("model_name", "engine")


def vllm_gateway_families(gateways: Sequence[Counts], model: str) -> Iterator[Metric]:
    for name, documentation, bounds, counted in (
        ("time_to_first_token", "To the first token.", TTFT_BOUNDS_S, [each.ttft for each in gateways]),
        ("inter_token_latency", "Between tokens.", ITL_BOUNDS_S, [each.itl for each in gateways]),
        ("e2e_request_latency", "To the end.", REQUEST_BOUNDS_S, [each.duration for each in gateways]),
    ):
        values = [(model, each.gateway) for each in gateways]
        rows = zip(values, counted, strict=True)
        yield histogram_family(f"vllm:{name}_seconds", documentation, bounds, LABELS, rows)
    for name, documentation, counts in (
        ("prompt_tokens", "Of prompts.", [each.prompt_tokens for each in gateways]),
        ("generation_tokens", "Generated.", [each.generated_tokens for each in gateways]),
    ):
        counter = CounterMetricFamily(f"vllm:{name}", documentation, labels=LABELS)
        for each, count in zip(gateways, counts, strict=True):
            counter.add_metric((model, each.gateway), count)
        yield counter


def vllm_worker_families(workers: Sequence[WorkerStatus], model: str) -> Iterator[Metric]:
    """The five that llm-d's endpoint picker reads, of all workers together; and what caches have found."""
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
    for name, documentation, found in (
        ("prefix_cache_queries", "Tokens looked up.", [each.load.prefix_queries_tokens for each in workers]),
        ("prefix_cache_hits", "Of these, found.", [each.load.prefix_hits_tokens for each in workers]),
    ):
        counter = CounterMetricFamily(f"vllm:{name}", documentation, labels=LABELS)
        for worker, count in zip(workers, found, strict=True):
            counter.add_metric((model, worker.worker.name), count)
        yield counter
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


GATEWAY: Final = ("gateway",)
Reading: TypeAlias = tuple[str, str, Callable[[Counts], int]]  # name, documentation, of a gateway's counts
COUNTERS: Final[tuple[Reading, ...]] = (
    ("prompt_tokens", "Tokens of prompts.", lambda counts: counts.prompt_tokens),
    ("cached_prompt_tokens", "Of these, found in a prefix cache.", lambda counts: counts.cached_tokens),
    ("generation_tokens", "Tokens generated.", lambda counts: counts.generated_tokens),
    ("clients_gone", "Clients that left before their answer's end.", lambda counts: counts.clients_gone),
    ("clients_given_up", "Clients that read too slowly.", lambda counts: counts.clients_given_up),
    ("unknown_body_keys", "Keys of bodies that are not known.", lambda counts: counts.unknown_keys),
)
ByKey: TypeAlias = tuple[str, str, str, Callable[[Counts], Mapping[str, int]]]  # the third is the key's label
BY_KEY: Final[tuple[ByKey, ...]] = (
    ("connections_refused", "What the server refused.", "reason", lambda counts: counts.refused),
    ("frontend", "Replays, drops, retries.", "event", lambda counts: counts.events),
    ("tenants_file_changes", "Taken or refused.", "outcome", lambda counts: counts.tenants_file),
)
Timing: TypeAlias = tuple[str, str, Sequence[float], Callable[[Counts], HistogramCounts]]
TIMINGS: Final[tuple[Timing, ...]] = (
    (
        "time_to_first_token",
        "From the call to its first token.",
        TTFT_BOUNDS_S,
        lambda counts: counts.ttft,
    ),
    (
        "inter_token_latency",
        "Between two batches of a choice's tokens.",
        ITL_BOUNDS_S,
        lambda counts: counts.itl,
    ),
    ("request", "From the call to its end.", REQUEST_BOUNDS_S, lambda counts: counts.duration),
)


class Exporter:
    """Of one gateway, and of those that it can ask."""

    def __init__(
        self,
        metrics: Metrics,
        service: Service,
        siblings: PeerGateways | None = None,
        *,
        model: str,
        vllm_names: bool,
    ) -> None:
        self.metrics = metrics
        self._service = service
        self._siblings = siblings
        self._model = model
        self._vllm_names = vllm_names

    async def scraped(self) -> bytes:
        """Everything, as it is now."""
        return self.text(await self._others())

    async def counts(self) -> list[Counts]:
        """Of every gateway, this one first."""
        others = await self._others()
        return [self.metrics.counts(self._service.counters), *others]

    def text(self, others: Iterable[Counts] = ()) -> bytes:
        own = self.metrics.counts(self._service.counters)
        registry = CollectorRegistry()
        registry.register(_Families(list(self._families([own, *others]))))
        return generate_latest(registry)

    async def _others(self) -> list[Counts]:
        return [] if self._siblings is None else await self._siblings.others()

    def _families(self, gateways: Sequence[Counts]) -> Iterator[Metric]:
        yield _build_info()
        yield from gateway_families(gateways)
        if self._vllm_names:
            yield from vllm_gateway_families(gateways, self._model)
        status = self._service.status
        if status is not None:
            yield from worker_families(status)
            yield from router_families(status)
            yield from queue_families(status.queue)
            yield from router_tenant_families(status.routers)
            if self._vllm_names:
                yield from vllm_worker_families(status.workers, self._model)


def _build_info() -> Metric:
    labels = {"version": baton.__version__, "python": platform.python_version()}
    info = GaugeMetricFamily("baton_build_info", "Always 1; the build is in its labels.", labels=list(labels))
    info.add_metric(list(labels.values()), 1)
    return info


class _Families(Collector):
    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families

    def describe(self) -> Iterable[Metric]:
        """Nothing: names are not asked for before there are values."""
        return ()


def gateway_families(gateways: Sequence[Counts]) -> Iterator[Metric]:
    requests = CounterMetricFamily(
        "baton_requests", "Requests answered.", labels=(*GATEWAY, "route", "status")
    )
    for each in gateways:
        for route, status, count in each.requests:
            requests.add_metric((each.gateway, route, str(status)), count)
    yield requests
    for name, documentation, label, read_by_key in BY_KEY:
        by_key = CounterMetricFamily(f"baton_{name}", documentation, labels=(*GATEWAY, label))
        for each in gateways:
            for key, count in read_by_key(each).items():
                by_key.add_metric((each.gateway, key), count)
        yield by_key
    for name, documentation, read in COUNTERS:
        counter = CounterMetricFamily(f"baton_{name}", documentation, labels=GATEWAY)
        for each in gateways:
            counter.add_metric((each.gateway,), read(each))
        yield counter
    num_open = GaugeMetricFamily("baton_open_requests", "Calls being answered.", labels=GATEWAY)
    for each in gateways:
        num_open.add_metric((each.gateway,), each.num_open)
    yield num_open
    yield from gateway_tenant_families([(each.gateway, each.tenants) for each in gateways])
    for name, documentation, bounds, read_timing in TIMINGS:
        counted = [((each.gateway,), read_timing(each)) for each in gateways]
        yield histogram_family(f"baton_{name}_seconds", documentation, bounds, GATEWAY, counted)
