"""Every metric of `/metrics`, as one table: of the gateways behind one port, of routers, of workers.

A `Metric` has a name, a help text, a `Source` of rows, and a way to read its value from a row. METRICS is the
registry: a new metric is a new entry. `prometheus_client` writes the text format. A figure that vLLM has too
is written a second time, by vLLM's name and with vLLM's labels.

A scrape of any gateway returns the counts of every gateway behind the port, each with the label `gateway`, so
sums are complete and no counter decreases. The names that begin with `vllm:` are those that vLLM's
dashboards and llm-d's endpoint picker read; the setting `gateway.vllm_metric_names` turns them off.
"""

import platform
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, zip_longest
from operator import attrgetter
from typing import Any, Final, Generic, Literal, NamedTuple, TypeAlias, TypeVar

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

import baton
from baton.gateway.metrics.metrics import MAX_TENANTS, CountsQuery, Metrics, TenantCounts
from baton.gateway.peer_gateways import PeerGateways
from baton.gateway.streams.request_stream import Service
from baton.messages.bounds import short_id
from baton.messages.operations import Status
from baton.messages.status import Histogram, QueueStatus, RouterStatus, TenantStatus, Times
from baton.messages.workers import WorkerStatus


class Scrape(NamedTuple):
    """The values that one scrape shows."""

    models: Sequence[str]  # their names
    gateways: Sequence[Metrics]
    status: Status | None  # None: no router has answered

    @property
    def workers(self) -> Sequence[WorkerStatus]:
        """The workers, as the routers reported them last."""
        return () if self.status is None else self.status.workers

    def workers_of(self, model: str) -> Sequence[WorkerStatus]:
        """Return the workers of a model; all workers where there is one model."""
        is_one = len(self.models) == 1
        return [each for each in self.workers if is_one or each.worker.model == model]

    @property
    def routers(self) -> Sequence[RouterStatus]:
        """The routers, as they reported themselves last."""
        return () if self.status is None else self.status.routers


RowT = TypeVar("RowT")
Labels: TypeAlias = tuple[str, ...]
Number: TypeAlias = float | Histogram
# A number, a histogram, or a mapping from the value of one more label (or from the values of several).
Value: TypeAlias = Number | Mapping[str, Number] | Mapping[tuple[Any, ...], Number]
Read: TypeAlias = str | Callable[[RowT], Value | None]  # a str is the path of an attribute


class Source(NamedTuple, Generic[RowT]):
    """Rows of a scrape, each with the values of its labels."""

    labels: Labels
    rows: Callable[[Scrape], Iterable[tuple[Labels, RowT]]]


class Metric(NamedTuple, Generic[RowT]):
    """One metric. `read` returns the Value of a row, or None to leave the row out."""

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


def histogram(name: str, source: Source[RowT], help: str, read: Read[RowT], *keys: str) -> Metric[RowT]:
    """Return a Metric of histograms."""
    return Metric("histogram", name, source, help, read, keys)


def _tenant_rows(scrape: Scrape) -> Iterator[tuple[Labels, TenantCounts]]:
    for each in scrape.gateways:
        for name, counts in each.tenants.items():
            yield (each.gateway, name), counts


def _router_tenant_rows(scrape: Scrape) -> Iterator[tuple[Labels, TenantStatus]]:
    for router in scrape.routers:
        for tenant in router.queue.tenants[:MAX_TENANTS]:
            yield (short_id(router.id), tenant.tenant), tenant


def _queued_tenant_rows(scrape: Scrape) -> Iterator[tuple[Labels, TenantStatus]]:
    if scrape.status is not None:
        for tenant in scrape.status.queue.tenants[:MAX_TENANTS]:
            yield (tenant.tenant,), tenant


SCRAPE: Final = Source[Scrape]((), lambda scrape: [((), scrape)])
GATEWAYS: Final = Source[Metrics](
    ("gateway",), lambda scrape: [((each.gateway,), each) for each in scrape.gateways]
)
TENANTS: Final = Source[TenantCounts](("gateway", "tenant"), _tenant_rows)
CLUSTER: Final = Source[Status]((), lambda scrape: [] if scrape.status is None else [((), scrape.status)])
WORKERS: Final = Source[WorkerStatus](
    ("worker", "role"),
    lambda scrape: [((each.worker.name, each.worker.role), each) for each in scrape.workers],
)
ROUTERS: Final = Source[RouterStatus](
    ("router",), lambda scrape: [((short_id(each.id),), each) for each in scrape.routers]
)
# The queues of all routers together: sums, and the maximum of levels and waits. All are gauges, because they
# drop when a router dies.
QUEUE: Final = Source[QueueStatus](
    (), lambda scrape: [] if scrape.status is None else [((), scrape.status.queue)]
)
QUEUED_TENANTS: Final = Source[TenantStatus](("tenant",), _queued_tenant_rows)
# Counts of each router since its start. When a router dies, its series ends and no other series decreases.
# A tenant's share is its part of work_tokens. The tenant of a cluster without a tenants file has no name.
ROUTER_TENANTS: Final = Source[TenantStatus](("router", "tenant"), _router_tenant_rows)
MODEL: Final = Source[Sequence[WorkerStatus]](
    ("model_name",),
    lambda scrape: (
        [] if scrape.status is None else [((name,), scrape.workers_of(name)) for name in scrape.models]
    ),
)

VLLM: Final = "vllm:"
OWN_ROUTER_COUNTERS: Final = frozenset(
    {"decisions", "blind_decisions", "routed_prompt_tokens", "repeated_prompt_tokens"}
    | {"measured_prompt_tokens", "predicted_prefix_tokens", "realised_prefix_tokens"}
)
TRANSFERS: Final = "transfers_"  # before the outcome, in the name of a worker's counter
OWN_WORKER_COUNTERS: Final = frozenset({"verified_shards", "digest_mismatches"})
PHASES: Final = "step_"  # before the phase, in the name of a worker's histogram
OWN_WORKER_TIMES: Final = frozenset({"step", "queue", "prefill", "transfer", "exposed_transfer"})


def _build_info(_: Scrape) -> Value:
    return {(baton.__version__, platform.python_version()): 1}


def _num_workers(status: Status) -> Value:
    entries = ((each.worker, _state_of(each)) for each in status.workers)
    return Counter((worker.model, worker.role, worker.node, state) for worker, state in entries)


def _num_ordered(status: Status) -> Value:
    return {(each.model, each.role): each.number for each in status.ordered}


def _state_of(status: WorkerStatus) -> str:
    return "asleep" if status.worker.is_asleep else "draining" if status.is_draining else "serving"


def _redis_up(router: RouterStatus) -> Value | None:
    return None if router.redis == "none" else float(router.redis == "up")


def _router_events(router: RouterStatus) -> Value:
    return {name: count for name, count in router.counters.items() if name not in OWN_ROUTER_COUNTERS}


def _terms(prefix: str) -> Callable[[RouterStatus], Value]:
    """Read the router's histograms named `prefix` and a term, by term."""
    return lambda router: _by_rest(router.times, prefix)


def _by_rest(values: Mapping[str, Number], prefix: str) -> Value:
    return {name.removeprefix(prefix): each for name, each in values.items() if name.startswith(prefix)}


def _times(name: str) -> Callable[[WorkerStatus | RouterStatus], Value]:
    """Read a histogram that a worker or a router has named; it is empty before the first value."""
    return lambda row: (row.load if isinstance(row, WorkerStatus) else row).times.get(name, Times())


def _count(name: str) -> Callable[[WorkerStatus | RouterStatus], Value]:
    """Read a counter that a worker or a router has named."""
    return lambda row: (row.load if isinstance(row, WorkerStatus) else row).counters.get(name, 0)


def _other_times(status: WorkerStatus) -> Value:
    return {
        name: each
        for name, each in status.load.times.items()
        if name not in OWN_WORKER_TIMES and not name.startswith(PHASES)
    }


def _worker_events(status: WorkerStatus) -> Value:
    return {
        name: count
        for name, count in status.load.counters.items()
        if name not in OWN_WORKER_COUNTERS and not name.startswith(TRANSFERS)
    }


def _objectives(counts: TenantCounts) -> Value:
    both = (("yes", counts.met), ("no", counts.missed))
    return {(objective, kept): num for kept, found in both for objective, num in found.items()}


def _num_pages(workers: Sequence[WorkerStatus]) -> int:
    return sum(each.worker.num_pages for each in workers)


def _page_usage(workers: Sequence[WorkerStatus]) -> Value:
    num_pages = _num_pages(workers)
    num_free = sum(each.load.pages.get("free", 0) + each.load.pages.get("cached", 0) for each in workers)
    return 1 - num_free / num_pages if num_pages else 0.0


def _open_adapters(scrape: Scrape) -> Value:
    waiting = {name for each in scrape.gateways for name in each.waiting_adapters}
    running = {name for each in scrape.gateways for name in each.running_adapters}
    return {("0", ",".join(sorted(waiting)), ",".join(sorted(running))): 1}


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
    histogram("baton_decode_seconds", GATEWAYS, "From the first token of a call to its end.", "decode"),
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
    counter(
        "baton_tenant_worker_seconds",
        GATEWAYS,
        "Time of workers' steps by the tenant's part of their tokens.",
        lambda counts: {name: us / 1e6 for name, us in counts.worker_us.items()},
        "tenant",
    ),
    counter("baton_tenant_calls", TENANTS, "Calls by their end.", "calls", "outcome"),
    counter(
        "baton_tenant_objectives", TENANTS, "Kept and missed objectives.", _objectives, "objective", "kept"
    ),
    # Workers
    gauge(
        "baton_workers",
        CLUSTER,
        "Workers, serving, draining or asleep.",
        _num_workers,
        *("model_name", "role", "node", "state"),
    ),
    gauge("baton_ordered_workers", CLUSTER, "Workers to run.", _num_ordered, "model_name", "role"),
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
    # Steps of the engine. The rate of the sum of `baton_worker_step_seconds` is the busy share.
    histogram(
        "baton_worker_step_seconds", WORKERS, "Time of a step; the sum is the busy time.", _times("step")
    ),
    histogram(
        "baton_worker_step_phase_seconds",
        WORKERS,
        "Time of a step's phase, of one step a second.",
        lambda status: _by_rest(status.load.times, PHASES),
        "phase",
    ),
    histogram(
        "baton_worker_step_tokens", WORKERS, "Computed tokens of a step, without padding.", "load.step_tokens"
    ),
    counter("baton_worker_padded_tokens", WORKERS, "Padding that steps computed.", "load.num_padded_tokens"),
    gauge(
        "baton_worker_max_step_tokens", WORKERS, "Token budget of a step.", "worker.max_num_batched_tokens"
    ),
    gauge("baton_worker_max_sequences", WORKERS, "Most sequences of a step.", "worker.max_num_seqs"),
    # Prompts and transfers
    histogram(
        "baton_worker_queue_seconds", WORKERS, "From a prompt's arrival to its first step.", _times("queue")
    ),
    histogram(
        "baton_worker_prefill_seconds",
        WORKERS,
        "From a prompt's first step to its first token.",
        _times("prefill"),
    ),
    histogram(
        "baton_worker_transfer_seconds", WORKERS, "Transfers that this worker sent.", _times("transfer")
    ),
    histogram(
        "baton_worker_exposed_transfer_seconds",
        WORKERS,
        "Part of a sent transfer after its last page was computed.",
        _times("exposed_transfer"),
    ),
    counter(
        "baton_worker_transfers",
        WORKERS,
        "Ended transfers, sent and received.",
        lambda status: _by_rest(status.load.counters, TRANSFERS),
        "outcome",
    ),
    counter(
        "baton_worker_verified_shards",
        WORKERS,
        "Received shards with compared digests.",
        _count("verified_shards"),
    ),
    counter(
        "baton_worker_digest_mismatches",
        WORKERS,
        "Received shards with a wrong digest.",
        _count("digest_mismatches"),
    ),
    gauge(
        "baton_worker_transport",
        WORKERS,
        "1 for the transport in use to a peer, of at most 64 peers.",
        lambda status: {(pair.peer, pair.transport): 1 for pair in status.load.pairs},
        "peer",
        "transport",
    ),
    gauge(
        "baton_worker_transport_fallback",
        WORKERS,
        "1 when a better transport to a peer failed, 0 otherwise.",
        lambda status: {
            (pair.peer, pair.transport, pair.best): float(pair.has_fallen_back) for pair in status.load.pairs
        },
        "peer",
        "transport",
        "best",
    ),
    # A worker names these itself: a new one needs no change here (docs/extending.md).
    counter("baton_worker_events", WORKERS, "Events by kind.", _worker_events, "event"),
    gauge("baton_worker_gauge", WORKERS, "Gauges by name.", "load.gauges", "name"),
    histogram("baton_worker_seconds", WORKERS, "Other times by name.", _other_times, "name"),
    # Routers
    histogram("baton_router_routing_seconds", ROUTERS, "Time to choose workers.", "routing"),
    gauge("baton_router_attempts", ROUTERS, "Dispatched attempts under way.", "num_attempts"),
    gauge("baton_router_redis_up", ROUTERS, "1 when the link to Redis is up.", _redis_up),
    gauge("baton_ray_head_away_seconds", CLUSTER, "Silence of Ray's head; 0: it answers.", "head_away_s"),
    counter("baton_router_decisions", ROUTERS, "Choices of workers by cost.", _count("decisions")),
    counter(
        "baton_router_blind_decisions", ROUTERS, "Choices without reported pages.", _count("blind_decisions")
    ),
    histogram("baton_router_queue_seconds", ROUTERS, "Wait of a dispatched attempt.", _times("queue")),
    counter(
        "baton_router_prompt_tokens",
        ROUTERS,
        "Prompt tokens of first attempts that were routed by cost.",
        _count("routed_prompt_tokens"),
    ),
    counter(
        "baton_router_repeated_prompt_tokens",
        ROUTERS,
        "Of baton_router_prompt_tokens, tokens of a prefix that an earlier prompt had.",
        _count("repeated_prompt_tokens"),
    ),
    # Predictions against measurements: `Hindsight` in router/decisions.py explains them.
    counter(
        "baton_router_measured_prompt_tokens",
        ROUTERS,
        "Tokens of prompts that were predicted and measured.",
        _count("measured_prompt_tokens"),
    ),
    counter(
        "baton_router_predicted_prefix_tokens",
        ROUTERS,
        "Of baton_router_measured_prompt_tokens, tokens that the router expected in a cache.",
        _count("predicted_prefix_tokens"),
    ),
    counter(
        "baton_router_realised_prefix_tokens",
        ROUTERS,
        "Of baton_router_measured_prompt_tokens, tokens that were not computed.",
        _count("realised_prefix_tokens"),
    ),
    histogram("baton_router_predicted_seconds", ROUTERS, "Predicted times.", _terms("predicted_"), "term"),
    histogram("baton_router_measured_seconds", ROUTERS, "Measured times.", _terms("measured_"), "term"),
    histogram(
        "baton_router_prediction_error_seconds", ROUTERS, "Sizes of the errors.", _terms("error_"), "term"
    ),
    histogram(
        "baton_router_regret_seconds",
        ROUTERS,
        "Measured cost beyond the predicted cost of the best other pair.",
        _times("regret"),
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
    # vLLM's names for figures that have no name of ours
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
        SCRAPE,
        "Adapters of open calls before and after their first token; always 1. There is no maximum.",
        _open_adapters,
        "max_lora",
        "waiting_lora_adapters",
        "running_lora_adapters",
    ),
]
# The metrics that are written once more, by vLLM's name of the same figure; the first label becomes `engine`.
VLLM_NAMES: Final = {
    "baton_prompt_tokens": "prompt_tokens",
    "baton_generation_tokens": "generation_tokens",
    "baton_time_to_first_token_seconds": "time_to_first_token_seconds",
    "baton_inter_token_latency_seconds": "inter_token_latency_seconds",
    "baton_decode_seconds": "request_decode_time_seconds",
    "baton_request_seconds": "e2e_request_latency_seconds",
    "baton_worker_prefix_queries_tokens": "prefix_cache_queries",
    "baton_worker_prefix_hits_tokens": "prefix_cache_hits",
    "baton_worker_preemptions": "num_preemptions",
    "baton_worker_drafts": "spec_decode_num_drafts",
    "baton_worker_draft_tokens": "spec_decode_num_draft_tokens",
    "baton_worker_accepted_tokens": "spec_decode_num_accepted_tokens",
    "baton_worker_step_tokens": "iteration_tokens_total",
    "baton_worker_queue_seconds": "request_queue_time_seconds",
    "baton_worker_prefill_seconds": "request_prefill_time_seconds",
}


def in_vllm(metric: Metric[RowT]) -> Metric[RowT]:
    """Return the metric by vLLM's name. vLLM's label `engine` has the gateway or the worker that counted."""

    def rows(scrape: Scrape) -> Iterator[tuple[Labels, Any]]:
        for labels, row in metric.source.rows(scrape):
            for model, counts in _by_model(row, scrape):
                yield (model, labels[0]), counts

    name = VLLM + VLLM_NAMES[metric.name]
    return metric._replace(name=name, source=Source(("model_name", "engine"), rows))


def _by_model(row: object, scrape: Scrape) -> Iterable[tuple[str, object]]:
    """Return the row of a gateway or of a worker as the rows of the models there."""
    if len(scrape.models) == 1:
        return [(scrape.models[0], row)]
    if isinstance(row, WorkerStatus):
        return [(row.worker.model, row)]
    return row.models.items() if isinstance(row, Metrics) else ()


class Exporter:
    """Writes the metrics of one gateway and of the gateways of its port."""

    def __init__(
        self,
        metrics: Metrics,
        service: Service,
        peers: PeerGateways | None = None,
        *,
        models: Sequence[str],
        vllm_names: bool,
    ) -> None:
        """models: their names. vllm_names: write the metrics that have vLLM's names as well."""
        self.metrics = metrics
        self._service = service
        self._ask = None if peers is None else peers.answer(CountsQuery, Metrics, lambda _: metrics)
        self._models = models
        self._vllm_names = vllm_names

    async def gateways(self) -> list[Metrics]:
        """Return the counts of every gateway of the port, of this one first."""
        return [self.metrics, *([] if self._ask is None else await self._ask(CountsQuery()))]

    def text(self, gateways: Sequence[Metrics]) -> bytes:
        """Return the metrics of these gateways and of the cluster in Prometheus' text format."""
        scrape = Scrape(self._models, gateways, self._service.status)
        shown = [each for each in METRICS if self._vllm_names or not each.name.startswith(VLLM)]
        if self._vllm_names:
            shown += [in_vllm(each) for each in METRICS if each.name in VLLM_NAMES]
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
        if isinstance(value, Mapping):
            for key, number in value.items():
                names = key if isinstance(key, tuple) else (key,)
                _add(family, (*values, *map(str, names)), number)
        elif value is not None:
            _add(family, values, value)
    return family


def _add(family: Any, labels: Labels, number: Number) -> None:
    if isinstance(number, Histogram):
        bounds = (*map(str, number.BOUNDS), "+Inf")
        sums = zip_longest(bounds, accumulate(number.counts), fillvalue=number.num)
        family.add_metric(labels, list(sums), number.sum)
    else:
        family.add_metric(labels, number)
