"""What a gateway counts.

Plain integers and lists, written on the event loop alone: an observation for each token must cost nothing
that shows. Labels have few values, which no client chooses.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from baton.messages.status import QueueStatus, RouterStatus, TenantStatus
from baton.tenants import Refusal

# What a gateway counts of each tenant, and how Prometheus reads it, beside what the router says of them.
#
# Labels are names from the tenants file, and of these no more than MAX_TENANTS; no key, prompt or request id.

MAX_TENANTS: Final = 256  # that are counted by name; the others are counted together
REFUSALS: Final = frozenset(refusal.value for refusal in Refusal)
OTHERS: Final = "(others)"  # no name of a tenant
Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]
ByName: TypeAlias = Annotated[dict[Annotated[str, Meta(max_length=64)], Count], Meta(max_length=64)]


class TenantCounts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of one tenant, at one gateway, since it began."""

    num_open: Count = 0  # choices that are being answered
    prompt_tokens: Count = 0
    generated_tokens: Count = 0
    calls: ByName = {}  # by how they ended: "answered", "gone" (the client left), "failed", or a Refusal
    met: ByName = {}  # objectives, "ttft", "tpot" and "deadline", of the calls that had them
    missed: ByName = {}


class TenantCounter:
    """What TenantCounts is made of."""

    __slots__ = ("calls", "generated_tokens", "met", "missed", "num_open", "prompt_tokens")

    def __init__(self) -> None:
        self.num_open = 0
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.calls: Counter[str] = Counter()
        self.met: Counter[str] = Counter()
        self.missed: Counter[str] = Counter()

    def counts(self) -> TenantCounts:
        return TenantCounts(
            num_open=self.num_open,
            prompt_tokens=self.prompt_tokens,
            generated_tokens=self.generated_tokens,
            calls=dict(self.calls),
            met=dict(self.met),
            missed=dict(self.missed),
        )


class TenantCounters:
    """One for each tenant that has called."""

    def __init__(self) -> None:
        self._tallies: dict[str, TenantCounter] = {}

    def of(self, tenant: str) -> TenantCounter:
        tally = self._tallies.get(tenant)
        if tally is None:
            name = tenant if len(self._tallies) < MAX_TENANTS else OTHERS
            tally = self._tallies.setdefault(name, TenantCounter())
        return tally

    def refused(self) -> dict[str, dict[str, int]]:
        """Return tenant -> reason -> calls that were refused, of the tenants that had some."""
        found = {
            name: {reason: count for reason, count in tally.calls.items() if reason in REFUSALS}
            for name, tally in self._tallies.items()
        }
        return {name: reasons for name, reasons in found.items() if reasons}

    def counts(self) -> dict[str, TenantCounts]:
        return {name: tally.counts() for name, tally in self._tallies.items()}


Reading: TypeAlias = tuple[str, str, Callable[[TenantCounts], int]]  # name, documentation
COUNTERS: Final[tuple[Reading, ...]] = (
    ("prompt_tokens", "Tokens of prompts.", lambda counts: counts.prompt_tokens),
    ("generation_tokens", "Tokens generated.", lambda counts: counts.generated_tokens),
)
RouterReading: TypeAlias = tuple[str, str, Callable[[TenantStatus], float]]
ROUTER_GAUGES: Final[tuple[RouterReading, ...]] = (
    ("queued_requests", "Requests that wait at the router.", lambda status: status.num_queued),
    ("active_requests", "Requests that workers have.", lambda status: status.num_active),
    ("oldest_wait_seconds", "Of those that wait.", lambda status: status.oldest_wait_s),
    ("weight", "Of the tenant's share.", lambda status: status.weight),
)
ROUTER_COUNTERS: Final[tuple[RouterReading, ...]] = (
    ("work_tokens", "Computed for the tenant.", lambda status: status.work_tokens),
    ("dispatched_requests", "Handed to workers.", lambda status: status.num_dispatched),
    ("wait_seconds", "Waited by those, together.", lambda status: status.waited_s),
    ("degraded_requests", "Made shorter or narrower.", lambda status: status.num_degraded),
)
ByTenant: TypeAlias = Mapping[str, TenantCounts]


def gateway_tenant_families(gateways: Sequence[tuple[str, ByTenant]]) -> Iterator[Metric]:
    """gateways: the name of each, with what it has counted."""
    each = [(gateway, name, counts) for gateway, tenants in gateways for name, counts in tenants.items()]
    labels = ("gateway", "tenant")
    num_open = GaugeMetricFamily("baton_tenant_open_requests", "Choices being answered.", labels=labels)
    for gateway, name, counts in each:
        num_open.add_metric((gateway, name), counts.num_open)
    yield num_open
    for metric, documentation, read in COUNTERS:
        counter = CounterMetricFamily(f"baton_tenant_{metric}", documentation, labels=labels)
        for gateway, name, counts in each:
            counter.add_metric((gateway, name), read(counts))
        yield counter
    calls = CounterMetricFamily("baton_tenant_calls", "By how they ended.", labels=(*labels, "outcome"))
    objectives = CounterMetricFamily(
        "baton_tenant_objectives", "Kept or missed, by calls.", labels=(*labels, "objective", "kept")
    )
    for gateway, name, counts in each:
        for outcome, count in counts.calls.items():
            calls.add_metric((gateway, name, outcome), count)
        for kept, by_objective in (("yes", counts.met), ("no", counts.missed)):
            for objective, count in by_objective.items():
                objectives.add_metric((gateway, name, objective, kept), count)
    yield calls
    yield objectives


def queue_families(queue: QueueStatus) -> Iterator[Metric]:
    """What routers say of their queues now, all together: none of it is counted."""
    for metric, documentation, value in (
        ("overload_level", "Overload level; 0 is calm.", int(queue.level)),
        ("queued_requests", "Requests that wait at the router.", queue.num_queued),
        ("oldest_wait_seconds", "Of those that wait.", queue.oldest_wait_s),
    ):
        yield GaugeMetricFamily(f"baton_{metric}", documentation, value=value)
    for metric, documentation, read in ROUTER_GAUGES:
        gauge = GaugeMetricFamily(f"baton_tenant_{metric}", documentation, labels=("tenant",))
        for status in queue.tenants[:MAX_TENANTS]:
            gauge.add_metric((status.tenant,), read(status))
        yield gauge


def router_tenant_families(routers: Sequence[RouterStatus]) -> Iterator[Metric]:
    """What each has counted since it began: a router that dies takes its series along, and lowers no other.

    A tenant's share is its part of the work_tokens, its due that of the weights. The tenant of a cluster
    without a file has no name.
    """
    each = [(router.id[:8], status) for router in routers for status in router.queue.tenants[:MAX_TENANTS]]
    labels = ("router", "tenant")
    for metric, documentation, read in ROUTER_COUNTERS:
        counter = CounterMetricFamily(f"baton_tenant_{metric}", documentation, labels=labels)
        for name, status in each:
            counter.add_metric((name, status.tenant), read(status))
        yield counter
    escalations = CounterMetricFamily(
        "baton_overload_escalations", "Escalations to each overload level.", labels=("router", "level")
    )
    for router in routers:
        for level, count in router.queue.escalations.items():
            escalations.add_metric((router.id[:8], level), count)
    yield escalations
    refused = CounterMetricFamily("baton_tenant_refused", "By the router.", labels=(*labels, "reason"))
    for name, status in each:
        for refusal, count in status.refused.items():
            refused.add_metric((name, status.tenant, refusal.value), count)
    yield refused


# What one gateway process has counted, as a value: to be shown, and sent to the gateways beside it.

Name: TypeAlias = Annotated[str, Meta(max_length=64)]
MAX_SERIES = 4096


class HistogramCounts(msgspec.Struct, frozen=True, array_like=True):
    counts: Annotated[tuple[Count, ...], Meta(max_length=64)]  # the last is of what is above every bound
    sum: float


class Counts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    gateway: Name  # its name, another in each life of the process
    requests: Annotated[tuple[tuple[Name, Count, Count], ...], Meta(max_length=MAX_SERIES)]  # route, status
    refused: Annotated[dict[Name, Count], Meta(max_length=MAX_SERIES)]  # connections, by reason
    events: Annotated[dict[Name, Count], Meta(max_length=MAX_SERIES)]  # of the service
    num_open: Count
    prompt_tokens: Count
    cached_tokens: Count
    generated_tokens: Count
    clients_gone: Count
    clients_given_up: Count
    unknown_keys: Count
    tenants: Annotated[dict[Name, TenantCounts], Meta(max_length=MAX_TENANTS + 1)]
    tenants_file: Annotated[dict[Name, Count], Meta(max_length=MAX_SERIES)]  # changes of it, by outcome
    ttft: HistogramCounts
    itl: HistogramCounts
    duration: HistogramCounts


TTFT_BOUNDS_S: Final = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
ITL_BOUNDS_S: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.08, 0.1, 0.2, 0.5, 1.0, 5.0)
REQUEST_BOUNDS_S: Final = (0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 600.0)
ROUTES: Final = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize", "/detokenize"}
    | {"/health", "/ping", "/metrics", "/version", "/v1/stream", "/ui"}
)


class Histogram:
    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def counts(self) -> HistogramCounts:
        return HistogramCounts(tuple(self._counts), self._sum)


class Metrics:
    """Of one gateway process; `counts` is what is shown of it."""

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
        self.tenants = TenantCounters()
        self.tenants_file: Counter[str] = Counter()  # what came of its changes
        self.ttft = Histogram(TTFT_BOUNDS_S)
        self.itl = Histogram(ITL_BOUNDS_S)
        self.duration = Histogram(REQUEST_BOUNDS_S)

    def answered(self, path: str, status: int) -> None:
        self.requests[path if path in ROUTES else "other", status] += 1

    def counts(self, events: Mapping[str, int]) -> Counts:
        """events: of the service, by name."""
        return Counts(
            gateway=self.gateway,
            requests=tuple((route, status, count) for (route, status), count in self.requests.items()),
            refused=dict(self.refused),
            events=dict(events),
            num_open=self.num_open,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            generated_tokens=self.generated_tokens,
            clients_gone=self.clients_gone,
            clients_given_up=self.clients_given_up,
            unknown_keys=self.unknown_keys,
            tenants=self.tenants.counts(),
            tenants_file=dict(self.tenants_file),
            ttft=self.ttft.counts(),
            itl=self.itl.counts(),
            duration=self.duration.counts(),
        )


# What has been counted in buckets, as Prometheus reads it.


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
