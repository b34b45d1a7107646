"""Metrics in Prometheus' text format: of the gateways behind one port, and of workers.

Whoever of these gateways is scraped shows all of them, each with its own name in a label: so sums are
sums, and no series ever goes back from one scrape to the next.
"""

import importlib.metadata
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeAlias

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from baton.gateway.counts import Counts, HistogramCounts
from baton.gateway.histograms import histogram_family
from baton.gateway.metrics import ITL_BOUNDS_S, REQUEST_BOUNDS_S, TTFT_BOUNDS_S, Metrics
from baton.gateway.router_metrics import router_families
from baton.gateway.service import Service
from baton.gateway.siblings import Siblings
from baton.gateway.tenants_counts import gateway_tenant_families, queue_families, router_tenant_families
from baton.gateway.vllm_metrics import vllm_gateway_families, vllm_worker_families
from baton.gateway.worker_metrics import worker_families

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
        siblings: Siblings | None = None,
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
    labels = {"version": importlib.metadata.version("baton"), "python": platform.python_version()}
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
