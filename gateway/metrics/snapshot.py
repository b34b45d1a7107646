"""The cluster at one moment, for operators who watch it: the page `/ui` and `baton top`.

A `Reading` copies those counts behind `/metrics` that rates and percentiles are made from. A `ReadingWindow`
has two readings, and makes from them a `Point` of the charts and the rows of a `ClusterSnapshot`. Nothing is
counted a second time here.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias, TypeVar

import msgspec
from msgspec.structs import replace

import baton
from baton.gateway.metrics.metrics import MAX_TENANTS, FirstTokenTimes, Metrics, TenantCounts, TokenTimes
from baton.messages.bounds import short_id
from baton.messages.operations import GatewayStatus, PlanSummary, Status
from baton.messages.status import Histogram, RouterStatus, TenantStatus
from baton.messages.workers import Load, WorkerStatus

SHARES: Final = (0.5, 0.9, 0.99)  # of the percentiles
HistogramT = TypeVar("HistogramT", bound=Histogram)
Quantiles: TypeAlias = tuple[float, ...]  # seconds, one for each of SHARES; empty: there were no values


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One moment of the charts. Rates and percentiles are over the time since an earlier reading."""

    time_s: float  # of the gateway's clock
    requests_per_s: float = 0.0  # calls of all APIs that ended
    tokens_per_s: float = 0.0
    sent_bytes_per_s: float = 0.0  # of KV, between workers
    ttft_s: Quantiles = ()
    itl_s: Quantiles = ()
    num_open: int = 0  # calls being answered
    num_queued: int = 0  # requests at routers
    num_running: int = 0  # sequences that have pages
    num_waiting: int = 0  # sequences without pages
    pages: dict[str, int] = {}  # by state


class WorkerRow(Load, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=False):
    """One worker, with the fields of its load that a list or the map shows. Counts are since the start."""

    id: str
    name: str
    role: str
    node: str = ""
    is_draining: bool = False
    is_asleep: bool = False
    beat_age_s: float = 0.0
    num_attempts: int = 0
    num_pages: int = 0
    tokens_per_s: float = 0.0
    sent_bytes_per_s: float = 0.0
    # Bytes a second, by the id of the receiving worker.
    sent_to: dict[str, float] = msgspec.field(default_factory=dict)


# Of a load; `/ui/workers/ID` has them too.
LEFT_OUT: Final = {"kv_bytes_to", "tier_token_ns", "step_tokens", "times", "pairs", "counters", "gauges"}
LOAD_FIELDS: Final = set(Load.__struct_fields__) - LEFT_OUT


class TenantRow(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant: as the routers see it, and its counts at the gateways of the port."""

    status: TenantStatus
    counts: TenantCounts


class GatewayRow(msgspec.Struct, frozen=True, kw_only=True):
    """One gateway. Of a gateway of another port only the fields up to `is_here` are known."""

    name: str
    node: str = ""
    pid: int = 0
    address: str = ""
    num_open: int = 0
    num_refused: int = 0
    is_here: bool = False  # it is of this port
    num_requests: int = 0
    requests_per_s: float = 0.0
    num_tokens: int = 0
    tokens_per_s: float = 0.0
    num_replays: int = 0
    num_refused_forms: int = 0
    form_check_p99_s: float = 0.0
    num_clients_gone: int = 0


class RouterRow(msgspec.Struct, frozen=True, kw_only=True):
    """One router. Counts are since its start."""

    id: str
    node: str = ""
    pid: int = 0
    num_attempts: int = 0
    num_queued: int = 0
    oldest_wait_s: float = 0.0
    level: str = ""
    redis: str = "none"
    num_routed: int = 0
    routed_per_s: float = 0.0
    routing_p99_s: float = 0.0
    blind_share: float = 0.0
    counters: dict[str, int] = {}


class ClusterSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The whole cluster at one moment."""

    model: str
    version: str
    point: Point
    level: str  # of overload
    oldest_wait_s: float  # of the queued requests
    head_away_s: float  # silence of Ray's head; 0: it answers
    workers: list[WorkerRow]
    tenants: list[TenantRow]
    routers: list[RouterRow]
    gateways: list[GatewayRow]
    plans: tuple[PlanSummary, ...] = ()  # of the planner, the latest first
    left_out: dict[str, int] = {}  # because the routers' status had no room


class Reading(NamedTuple):
    """The counts at one moment that rates and percentiles are made from."""

    time_s: float
    gateways: Mapping[str, Metrics]  # by name
    workers: Mapping[str, Load]  # by id
    routed: Mapping[str, int]  # requests, by router


def read(time_s: float, gateways: Iterable[Metrics], status: Status) -> Reading:
    """Return a reading. gateways: those of the port, which go on to count."""
    return Reading(
        time_s,
        {
            each.gateway: replace(
                each, duration=each.duration.copy(), ttft=each.ttft.copy(), itl=each.itl.copy()
            )
            for each in gateways
        },
        {each.worker.id: each.load for each in status.workers},
        {each.id: each.routing.num for each in status.routers},
    )


class ReadingWindow:
    """Two readings, and the time between them. A process that is not in both has rates of 0."""

    def __init__(self, before: Reading, after: Reading, status: Status) -> None:
        """status: the one that the later reading was made from."""
        self._before = before
        self._after = after
        self._status = status
        self._seconds = after.time_s - before.time_s

    def point(self) -> Point:
        """Return the point of the charts at the later reading."""
        status, gateways = self._status, self._after.gateways
        pages = Counter[str]()
        for each in status.workers:
            pages.update(each.load.pages)
        elsewhere = (each.num_open for each in status.gateways if short_id(each.id) not in gateways)
        return Point(
            time_s=self._after.time_s,
            requests_per_s=sum(self._gateway_rates(name)[0] for name in gateways),
            tokens_per_s=sum(self._gateway_rates(name)[1] for name in gateways),
            sent_bytes_per_s=sum(map(self._sent_bytes_per_s, self._after.workers)),
            ttft_s=self._quantiles(FirstTokenTimes(), lambda counts: counts.ttft),
            itl_s=self._quantiles(TokenTimes(), lambda counts: counts.itl),
            num_open=sum(each.num_open for each in gateways.values()) + sum(elsewhere),
            num_queued=sum(each.queue.num_queued for each in status.routers),
            num_running=sum(each.load.num_running for each in status.workers),
            num_waiting=sum(each.load.num_waiting for each in status.workers),
            pages=dict(pages),
        )

    def snapshot(self, model: str, point: Point) -> ClusterSnapshot:
        """Return the snapshot at the later reading."""
        status = self._status
        queue = status.queue
        return ClusterSnapshot(
            model=model,
            version=baton.__version__,
            point=point,
            level=queue.level.name.lower(),
            oldest_wait_s=queue.oldest_wait_s,
            head_away_s=status.head_away_s,
            workers=list(map(self._worker, status.workers)),
            tenants=list(_tenants(queue.tenants, self._after.gateways.values())),
            routers=list(map(self._router, status.routers)),
            gateways=list(self._gateway_rows()),
            plans=status.plans,
            left_out=status.left_out,
        )

    def _rate(self, before: float, after: float) -> float:
        return max(0.0, after - before) / self._seconds if self._seconds > 0 else 0.0

    def _gateway_rates(self, name: str) -> tuple[float, float]:
        """Return requests and tokens a second."""
        before, after = self._before.gateways.get(name), self._after.gateways[name]
        if before is None:
            return 0.0, 0.0
        return (
            self._rate(before.duration.num, after.duration.num),
            self._rate(before.generated_tokens, after.generated_tokens),
        )

    def _sent_bytes_per_s(self, worker: str) -> float:
        before = self._before.workers.get(worker)
        return 0.0 if before is None else self._rate(before.kv_bytes, self._after.workers[worker].kv_bytes)

    def _quantiles(self, total: HistogramT, histogram_of: Callable[[Metrics], HistogramT]) -> Quantiles:
        """Return the percentiles of the values between the readings. total: empty."""
        for name, after in self._after.gateways.items():
            if (before := self._before.gateways.get(name)) is not None:
                total.add_since(histogram_of(before), histogram_of(after))
        return tuple(total.estimate(share) for share in SHARES) if total.num else ()

    def _worker(self, status: WorkerStatus) -> WorkerRow:
        worker, load = status.worker, status.load
        before = self._before.workers.get(worker.id)
        return WorkerRow(
            id=worker.id,
            name=worker.name,
            role=worker.role.value,
            node=worker.node,
            is_draining=status.is_draining,
            is_asleep=worker.is_asleep,
            beat_age_s=round(status.beat_age_s, 3),
            num_attempts=status.num_attempts,
            num_pages=worker.num_pages,
            tokens_per_s=0.0 if before is None else self._rate(before.num_tokens, load.num_tokens),
            sent_bytes_per_s=self._sent_bytes_per_s(worker.id),
            sent_to={} if before is None else self._sent_to(before, load),
            **{name: getattr(load, name) for name in LOAD_FIELDS},
        )

    def _sent_to(self, before: Load, after: Load) -> dict[str, float]:
        rates = {
            worker: self._rate(before.kv_bytes_to.get(worker, 0), num_bytes)
            for worker, num_bytes in after.kv_bytes_to.items()
        }
        return {worker: rate for worker, rate in rates.items() if rate}

    def _router(self, router: RouterStatus) -> RouterRow:
        before = self._before.routed.get(router.id)
        return RouterRow(
            id=router.id,
            node=router.node,
            pid=router.pid,
            num_attempts=router.num_attempts,
            num_queued=router.queue.num_queued,
            oldest_wait_s=router.queue.oldest_wait_s,
            level=router.queue.level.name.lower(),
            redis=router.redis,
            num_routed=router.routing.num,
            routed_per_s=0.0 if before is None else self._rate(before, router.routing.num),
            routing_p99_s=router.routing.estimate(0.99),
            blind_share=router.blind_share,
            counters=router.counters,
        )

    def _gateway_rows(self) -> Iterator[GatewayRow]:
        reported = {short_id(each.id): each for each in self._status.gateways}
        for name in sorted({*reported, *self._after.gateways}):
            yield self._gateway(name, reported.get(name, GatewayStatus(id="0" * 32)))

    def _gateway(self, name: str, status: GatewayStatus) -> GatewayRow:
        address, counts = status.address, self._after.gateways.get(name)
        row = GatewayRow(
            name=name,
            node=status.node,
            pid=status.pid,
            address="" if address is None else f"{address.host}:{address.port}",
            num_open=status.num_open,
            num_refused=status.num_refused,
        )
        if counts is None:
            return row
        requests_per_s, tokens_per_s = self._gateway_rates(name)
        return replace(
            row,
            is_here=True,
            num_open=counts.num_open,
            num_requests=counts.duration.num,
            requests_per_s=requests_per_s,
            num_tokens=counts.generated_tokens,
            tokens_per_s=tokens_per_s,
            num_replays=sum(num for event, num in counts.events.items() if event.startswith("replays_")),
            num_refused_forms=counts.forms.get("refused", 0) + counts.forms.get("too_long", 0),
            form_check_p99_s=counts.form_check.estimate(0.99),
            num_clients_gone=counts.clients_gone,
        )


def _tenants(statuses: Sequence[TenantStatus], gateways: Iterable[Metrics]) -> Iterator[TenantRow]:
    """Yield the tenants that have a name: a cluster without a tenants file has none."""
    at_routers = {status.tenant: status for status in statuses}
    at_gateways: dict[str, list[TenantCounts]] = {}
    for each in gateways:
        for name, counts in each.tenants.items():
            at_gateways.setdefault(name, []).append(counts)
    names = [name for name in {**at_routers, **at_gateways} if name]
    for name in names[:MAX_TENANTS]:
        yield TenantRow(
            status=at_routers.get(name) or TenantStatus(tenant=name),
            counts=_sum(at_gateways.get(name, [])),
        )


def _sum(counts: Sequence[TenantCounts]) -> TenantCounts:
    total = TenantCounts()
    for each in counts:
        total.num_open += each.num_open
        total.prompt_tokens += each.prompt_tokens
        total.generated_tokens += each.generated_tokens
        for name in ("calls", "met", "missed"):
            getattr(total, name).update(getattr(each, name))
    return total
