"""Every metric of `/metrics`, as one table: of the gateways behind one port, of routers, of workers.

A `Metric` says its name, its help text, the rows that it has (a `Source`), and how to read a row. METRICS is
the registry: an entry more is a metric more. `prometheus_client` writes the text format.

A scrape of any gateway returns the counts of every gateway behind the port, each with the label `gateway`, so
sums are complete and no counter decreases. The names that begin with `vllm:` are those that vLLM's
dashboards and llm-d's endpoint picker read; they are off unless asked for.
"""

import platform
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from operator import attrgetter
from typing import Any, Final, Generic, Literal, NamedTuple, TypeAlias, TypeVar

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

import baton
from baton.gateway.metrics.metrics import MAX_TENANTS, Metrics, TenantCounts
from baton.gateway.peer_gateways import PeerGateways
from baton.gateway.streams.request_stream import Service
from baton.messages.operations import Status
from baton.messages.status import Histogram, QueueStatus, RouterStatus, TenantStatus
from baton.messages.workers import WorkerStatus


class Scrape(NamedTuple):
    """The values that one scrape shows."""

    model: str
    gateways: Sequence[Metrics]
    status: Status | None  # None: no router has answered

    @property
    def workers(self) -> Sequence[WorkerStatus]:
        """The workers by the routers' last word."""
        return () if self.status is None else self.status.workers

    @property
    def routers(self) -> Sequence[RouterStatus]:
        """The routers by their last word."""
        return () if self.status is None else self.status.routers


RowT = TypeVar("RowT")
Labels: TypeAlias = tuple[str, ...]
# A number, a histogram, or a mapping from the value of one more label (or from the values of several).
Value: TypeAlias = float | Histogram | Mapping[str, float] | Mapping[tuple[Any, ...], float]


Read: TypeAlias = str | Callable[[RowT], Value | None]  # a str is the path of an attribute


class Source(NamedTuple, Generic[RowT]):
    """Rows of a scrape, each with the values of its labels."""

    labels: Labels
    rows: Callable[[Scrape], Iterable[tuple[Labels, RowT]]]


class Metric(NamedTuple, Generic[RowT]):
    """One metric. `read` gives the Value of one row, or None to leave the row out."""

    kind: Literal["counter", "gauge", "histogram"]
    name: str
    source: Source[RowT]
    help: str
    read: Read[RowT]
    keys: Labels = ()  # the labels of a mapping


def counter(name: str, source: Source[RowT], help: str, read: Read[RowT], *keys: str) -> Metric[RowT]:
    """Return a Metric that only grows; its series end in `_total`."""
    return Metric("counter", name, source, help, read, keys)


def gauge(name: str, source: Source[RowT], help: str, read: Read[RowT], *keys: str) -> Metric[RowT]:
    """Return a Metric that may fall."""
    return Metric("gauge", name, source, help, read, keys)


def histogram(name: str, source: Source[RowT], help: str, read: Read[RowT]) -> Metric[RowT]:
    """Return a Metric of a Histogram."""
    return Metric("histogram", name, source, help, read)


def _tenant_rows(scrape: Scrape) -> Iterator[tuple[Labels, TenantCounts]]:
    for each in scrape.gateways:
        for name, counts in each.tenants.items():
            yield (each.gateway, name), counts


def _router_tenant_rows(scrape: Scrape) -> Iterator[tuple[Labels, TenantStatus]]:
    for router in scrape.routers:
        for tenant in router.queue.tenants[:MAX_TENANTS]:
            yield (router.id[:8], tenant.tenant), tenant


def _queued_tenant_rows(scrape: Scrape) -> Iterator[tuple[Labels, TenantStatus]]:
    if scrape.status is not None:
        for tenant in scrape.status.queue.tenants[:MAX_TENANTS]:
            yield (tenant.tenant,), tenant


def _cluster_rows(scrape: Scrape) -> Iterator[tuple[Labels, Status]]:
    if scrape.status is not None:
        yield (), scrape.status


def _queue_rows(scrape: Scrape) -> Iterator[tuple[Labels, QueueStatus]]:
    if scrape.status is not None:
        yield (), scrape.status.queue


SCRAPE: Final = Source[Scrape]((), lambda scrape: [((), scrape)])
GATEWAYS: Final = Source[Metrics](
    ("gateway",), lambda scrape: [((each.gateway,), each) for each in scrape.gateways]
)
TENANTS: Final = Source[TenantCounts](("gateway", "tenant"), _tenant_rows)
CLUSTER: Final = Source[Status]((), _cluster_rows)
WORKERS: Final = Source[WorkerStatus](
    ("worker", "role"),
    lambda scrape: [((each.worker.name, each.worker.role), each) for each in scrape.workers],
)
ROUTERS: Final = Source[RouterStatus](
    ("router",), lambda scrape: [((each.id[:8],), each) for each in scrape.routers]
)
# The queues of all routers together: sums, and the maximum of levels and waits. All are gauges, because they
# drop when a router dies.
QUEUE: Final = Source[QueueStatus]((), _queue_rows)
QUEUED_TENANTS: Final = Source[TenantStatus](("tenant",), _queued_tenant_rows)
# Counts of each router since its start. When a router dies, its series ends and no other series decreases.
# A tenant's share is its part of work_tokens. The tenant of a cluster without a tenants file has no name.
ROUTER_TENANTS: Final = Source[TenantStatus](("router", "tenant"), _router_tenant_rows)
# vLLM's label `engine`, for one of several, names the gateway or the worker that has counted.
ENGINES: Final = Source[Metrics](
    ("model_name", "engine"),
    lambda scrape: [((scrape.model, each.gateway), each) for each in scrape.gateways],
)
WORKER_ENGINES: Final = Source[WorkerStatus](
    ("model_name", "engine"),
    lambda scrape: [((scrape.model, each.worker.name), each) for each in scrape.workers],
)
MODEL: Final = Source[Sequence[WorkerStatus]](
    ("model_name",),
    lambda scrape: [] if scrape.status is None else [((scrape.model,), scrape.status.workers)],
)

OWN_ROUTER_COUNTERS: Final = frozenset({"decisions", "blind_decisions"})


def _build_info(_: Scrape) -> Value:
    return {(baton.__version__, platform.python_version()): 1}


def _num_workers(status: Status) -> Value:
    return Counter(
        (each.worker.role, each.worker.node, "draining" if each.is_draining else "serving")
        for each in status.workers
    )


def _redis_up(router: RouterStatus) -> Value | None:
    return None if router.redis == "none" else float(router.redis == "up")


def _router_events(router: RouterStatus) -> Value:
    return {name: count for name, count in router.counters.items() if name not in OWN_ROUTER_COUNTERS}


def _objectives(counts: TenantCounts) -> Value:
    both = (("yes", counts.met), ("no", counts.missed))
    return {(objective, kept): num for kept, found in both for objective, num in found.items()}


def _num_pages(workers: Sequence[WorkerStatus]) -> int:
    return sum(each.worker.num_pages for each in workers)


def _page_usage(workers: Sequence[WorkerStatus]) -> Value:
    num_pages = _num_pages(workers)
    num_free = sum(each.load.pages.get("free", 0) + each.load.pages.get("cached", 0) for each in workers)
    return 1 - num_free / num_pages if num_pages else 0.0


def _cache_config(status: Status) -> Value:
    page_size = max((each.worker.page_size for each in status.workers), default=0)
    return {(page_size, _num_pages(status.workers)): 1}


METRICS: Final[list[Metric[Any]]] = [
    gauge(
        "baton_build_info", SCRAPE, "Always 1; the labels have the build.", _build_info, "version", "python"
    ),
    # Gateways
    counter("baton_requests", GATEWAYS, "Answered requests.", "requests", "route", "status"),
    counter("baton_connections_refused", GATEWAYS, "Refused connections.", "refused", "reason"),
    counter("baton_frontend", GATEWAYS, "Replays, drops, retries.", "events", "event"),
    counter("baton_tenants_file_changes", GATEWAYS, "Taken and refused changes.", "tenants_file", "outcome"),
    counter("baton_prompt_tokens", GATEWAYS, "Tokens of prompts.", "prompt_tokens"),
    counter("baton_cached_prompt_tokens", GATEWAYS, "Prompt tokens that a cache had.", "cached_tokens"),
    counter("baton_generation_tokens", GATEWAYS, "Generated tokens.", "generated_tokens"),
    counter("baton_clients_gone", GATEWAYS, "Clients that left early.", "clients_gone"),
    counter("baton_clients_given_up", GATEWAYS, "Clients that read too slowly.", "clients_given_up"),
    counter("baton_unknown_body_keys", GATEWAYS, "Unknown keys of bodies.", "unknown_keys"),
    counter("baton_forms", GATEWAYS, "Checked forms of structured output.", "forms", "outcome"),
    histogram("baton_form_check_seconds", GATEWAYS, "Time to check a new form.", "form_check"),
    gauge("baton_open_requests", GATEWAYS, "Calls being answered.", "num_open"),
    histogram("baton_time_to_first_token_seconds", GATEWAYS, "From the call to its first token.", "ttft"),
    histogram("baton_inter_token_latency_seconds", GATEWAYS, "Between batches of tokens.", "itl"),
    histogram("baton_request_seconds", GATEWAYS, "From the call to its end.", "duration"),
    counter(
        "baton_request_part_seconds",
        GATEWAYS,
        "Seconds of ended requests by the part of their timeline.",
        lambda counts: {name: us / 1e6 for name, us in counts.parts_us.items()},
        "part",
    ),
    histogram(
        "baton_request_unaccounted_seconds",
        GATEWAYS,
        "Time of a request that no part of its timeline explains.",
        "unaccounted",
    ),
    # Tenants at gateways
    gauge("baton_tenant_open_requests", TENANTS, "Choices being answered.", "num_open"),
    counter("baton_tenant_prompt_tokens", TENANTS, "Tokens of prompts.", "prompt_tokens"),
    counter("baton_tenant_generation_tokens", TENANTS, "Generated tokens.", "generated_tokens"),
    counter("baton_tenant_calls", TENANTS, "Calls by their end.", "calls", "outcome"),
    counter(
        "baton_tenant_objectives", TENANTS, "Kept and missed objectives.", _objectives, "objective", "kept"
    ),
    # Workers
    gauge("baton_workers", CLUSTER, "Workers, serving or draining.", _num_workers, "role", "node", "state"),
    gauge("baton_worker_running_sequences", WORKERS, "Sequences that have pages.", "load.num_running"),
    gauge("baton_worker_waiting_sequences", WORKERS, "Sequences without pages.", "load.num_waiting"),
    gauge(
        "baton_worker_incoming_transfers", WORKERS, "Incoming transfers that hold pages.", "load.num_incoming"
    ),
    gauge(
        "baton_worker_outgoing_transfers", WORKERS, "Outgoing transfers that hold pages.", "load.num_outgoing"
    ),
    counter("baton_worker_generated_tokens", WORKERS, "Generated tokens.", "load.num_tokens"),
    counter(
        "baton_worker_prefix_queries_tokens",
        WORKERS,
        "Tokens looked up in the prefix cache.",
        "load.prefix_queries_tokens",
    ),
    counter(
        "baton_worker_prefix_hits_tokens",
        WORKERS,
        "Tokens found in the prefix cache.",
        "load.prefix_hits_tokens",
    ),
    counter("baton_worker_preemptions", WORKERS, "Preempted sequences.", "load.num_preemptions"),
    counter("baton_worker_drafts", WORKERS, "Steps of sequences with drafts.", "load.num_drafts"),
    counter("baton_worker_draft_tokens", WORKERS, "Computed drafts.", "load.num_draft_tokens"),
    counter("baton_worker_accepted_tokens", WORKERS, "Accepted drafts.", "load.num_accepted_tokens"),
    counter("baton_worker_masks", WORKERS, "Token masks of structured outputs.", "load.num_masks"),
    counter(
        "baton_worker_mask_seconds",
        WORKERS,
        "Time to compute the masks.",
        lambda status: status.load.mask_us / 1e6,
    ),
    counter("baton_worker_compiled_forms", WORKERS, "Compiled grammars.", "load.num_compiled_forms"),
    counter(
        "baton_worker_form_compile_seconds",
        WORKERS,
        "Time to compile grammars.",
        lambda status: status.load.compile_us / 1e6,
    ),
    counter(
        "baton_worker_failed_forms",
        WORKERS,
        "Sequences that failed because of their grammar.",
        "load.num_failed_forms",
    ),
    counter("baton_worker_kv_sent_bytes", WORKERS, "Bytes of KV sent to other workers.", "load.kv_bytes"),
    gauge("baton_kv_pages", WORKERS, "KV pages by state.", "load.pages", "state"),
    counter("baton_worker_events", WORKERS, "Events by kind.", "load.counters", "event"),
    # A worker names these itself: a new one needs no change here (docs/extending.md).
    gauge("baton_worker_gauge", WORKERS, "Gauges by name.", "load.gauges", "name"),
    # Routers
    histogram("baton_router_routing_seconds", ROUTERS, "Time to choose workers.", "routing"),
    gauge("baton_router_attempts", ROUTERS, "Dispatched attempts under way.", "num_attempts"),
    gauge("baton_router_redis_up", ROUTERS, "1 when the link to Redis is up.", _redis_up),
    gauge("baton_ray_head_away_seconds", CLUSTER, "Silence of Ray's head; 0: it answers.", "head_away_s"),
    counter(
        "baton_router_decisions",
        ROUTERS,
        "Choices of workers by cost.",
        lambda r: r.counters.get("decisions", 0),
    ),
    counter(
        "baton_router_blind_decisions",
        ROUTERS,
        "Choices without reported pages.",
        lambda r: r.counters.get("blind_decisions", 0),
    ),
    counter("baton_router_events", ROUTERS, "Events by kind.", _router_events, "event"),
    counter(
        "baton_overload_escalations", ROUTERS, "Escalations to each level.", "queue.escalations", "level"
    ),
    # The queue
    gauge("baton_overload_level", QUEUE, "Overload level; 0 is calm.", lambda q: int(q.level)),
    gauge("baton_queued_requests", QUEUE, "Requests queued at routers.", "num_queued"),
    gauge("baton_oldest_wait_seconds", QUEUE, "Longest wait in the queue.", "oldest_wait_s"),
    gauge("baton_tenant_queued_requests", QUEUED_TENANTS, "Requests queued at routers.", "num_queued"),
    gauge("baton_tenant_active_requests", QUEUED_TENANTS, "Requests that workers have.", "num_active"),
    gauge("baton_tenant_oldest_wait_seconds", QUEUED_TENANTS, "Longest wait in the queue.", "oldest_wait_s"),
    gauge("baton_tenant_weight", QUEUED_TENANTS, "Weight of the tenant's share.", "weight"),
    counter("baton_tenant_work_tokens", ROUTER_TENANTS, "Tokens computed.", "work_tokens"),
    counter("baton_tenant_dispatched_requests", ROUTER_TENANTS, "Dispatched requests.", "num_dispatched"),
    counter("baton_tenant_wait_seconds", ROUTER_TENANTS, "Wait of dispatched requests.", "waited_s"),
    counter("baton_tenant_degraded_requests", ROUTER_TENANTS, "Degraded under overload.", "num_degraded"),
    counter("baton_tenant_refused", ROUTER_TENANTS, "Refused by the router.", "refused", "reason"),
    # vLLM's names
    histogram("vllm:time_to_first_token_seconds", ENGINES, "Time to first token.", "ttft"),
    histogram("vllm:inter_token_latency_seconds", ENGINES, "Time between tokens.", "itl"),
    histogram("vllm:e2e_request_latency_seconds", ENGINES, "Time to the end.", "duration"),
    counter("vllm:prompt_tokens", ENGINES, "Tokens of prompts.", "prompt_tokens"),
    counter("vllm:generation_tokens", ENGINES, "Generated tokens.", "generated_tokens"),
    gauge(
        "vllm:num_requests_waiting",
        MODEL,
        "Waiting sequences.",
        lambda workers: sum(each.load.num_waiting for each in workers),
    ),
    gauge(
        "vllm:num_requests_running",
        MODEL,
        "Running sequences.",
        lambda workers: sum(each.load.num_running for each in workers),
    ),
    gauge("vllm:kv_cache_usage_perc", MODEL, "Share of KV pages in use.", _page_usage),
    counter(
        "vllm:prefix_cache_queries",
        WORKER_ENGINES,
        "Tokens that were looked up.",
        "load.prefix_queries_tokens",
    ),
    counter("vllm:prefix_cache_hits", WORKER_ENGINES, "Tokens that were found.", "load.prefix_hits_tokens"),
    counter(
        "vllm:spec_decode_num_drafts", WORKER_ENGINES, "Steps of sequences with drafts.", "load.num_drafts"
    ),
    counter("vllm:spec_decode_num_draft_tokens", WORKER_ENGINES, "Computed drafts.", "load.num_draft_tokens"),
    counter(
        "vllm:spec_decode_num_accepted_tokens", WORKER_ENGINES, "Accepted drafts.", "load.num_accepted_tokens"
    ),
    gauge(
        "vllm:cache_config_info",
        CLUSTER,
        "KV cache configuration; always 1.",
        _cache_config,
        "block_size",
        "num_gpu_blocks",
    ),
    gauge(
        "vllm:lora_requests_info",
        CLUSTER,
        "No adapters are served.",
        lambda _: {("0", "", ""): 1},
        "max_lora",
        "waiting_lora_adapters",
        "running_lora_adapters",
    ),
]


class Exporter:
    """Writes the metrics of one gateway and of the gateways of its port."""

    def __init__(
        self,
        metrics: Metrics,
        service: Service,
        peers: PeerGateways | None = None,
        *,
        model: str,
        vllm_names: bool,
    ) -> None:
        """vllm_names: write the metrics that have vLLM's names as well."""
        self.metrics = metrics
        self._service = service
        self._peers = peers
        self._model = model
        self._vllm_names = vllm_names

    async def gateways(self) -> list[Metrics]:
        """Return the counts of every gateway of the port, of this one first."""
        return [self.metrics, *([] if self._peers is None else await self._peers.others())]

    def text(self, gateways: Sequence[Metrics]) -> bytes:
        """Return the metrics of these gateways and of the cluster in Prometheus' text format."""
        scrape = Scrape(self._model, gateways, self._service.status)
        shown = (each for each in METRICS if self._vllm_names or not each.name.startswith("vllm:"))
        return generate_latest(_Families([_family(metric, scrape) for metric in shown]))


class _Families(Collector):
    def __init__(self, families: Sequence[Family]) -> None:
        self._families = families

    def collect(self) -> Iterable[Family]:
        return self._families


_FAMILIES: Final = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


def _family(metric: Metric[RowT], scrape: Scrape) -> Any:
    labels = (*metric.source.labels, *metric.keys)
    family: Any = _FAMILIES[metric.kind](metric.name, metric.help, labels=labels)
    read = attrgetter(metric.read) if isinstance(metric.read, str) else metric.read
    for values, row in metric.source.rows(scrape):
        value: Value | None = read(row)
        if isinstance(value, Histogram):
            bounds = (*map(str, value.bounds), "+Inf")
            family.add_metric(values, list(zip(bounds, accumulate(value.counts), strict=True)), value.sum)
        elif isinstance(value, Mapping):
            for key, number in value.items():
                names = key if isinstance(key, tuple) else (key,)
                family.add_metric((*values, *map(str, names)), number)
        elif value is not None:
            family.add_metric(values, value)
    return family
