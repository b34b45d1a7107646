"""What a gateway counts of each tenant, and how Prometheus reads it, beside what the router says of them.

Labels are names from the tenants file, and of these no more than MAX_TENANTS; no key, prompt or request id.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from baton.pressure import QueueStatus, TenantStatus
from baton.router_status import RouterStatus
from baton.tenancy import Refusal

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


class Tally:
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


class Tallies:
    """One for each tenant that has called."""

    def __init__(self) -> None:
        self._tallies: dict[str, Tally] = {}

    def of(self, tenant: str) -> Tally:
        tally = self._tallies.get(tenant)
        if tally is None:
            name = tenant if len(self._tallies) < MAX_TENANTS else OTHERS
            tally = self._tallies.setdefault(name, Tally())
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
        ("overload_rung", "Of the overload ladder, 0 is calm.", int(queue.rung)),
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
    climbs = CounterMetricFamily(
        "baton_overload_climbs", "To each rung of the overload ladder.", labels=("router", "rung")
    )
    for router in routers:
        for rung, count in router.queue.climbs.items():
            climbs.add_metric((router.id[:8], rung), count)
    yield climbs
    refused = CounterMetricFamily("baton_tenant_refused", "By the router.", labels=(*labels, "reason"))
    for name, status in each:
        for refusal, count in status.refused.items():
            refused.add_metric((name, status.tenant, refusal.value), count)
    yield refused
