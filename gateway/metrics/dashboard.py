"""`/ui`: the cluster on one page that needs no script and nothing from elsewhere; it loads itself again.

It shows what `/metrics` has, and so does to whom: operators alone.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import minijinja

import baton
from baton.clock import Clock
from baton.gateway.metrics.metrics import ITL_BOUNDS_S, TTFT_BOUNDS_S, Counts, HistogramCounts
from baton.messages.operations import Status
from baton.messages.status import TenantStatus
from baton.messages.workers import WorkerStatus

REFRESH_S: Final = 2
LEAST_S: Final = 0.5  # between two readings that a rate is taken of
HEADERS: Final = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
}
SHOWN_STATES: Final = ("active", "cached", "leased", "quarantined")
NAME: Final = "dashboard.html"  # by its ending, what is written into it is escaped


class Dashboard:
    def __init__(self, model: str, clock: Clock) -> None:
        self._model = model
        self._clock = clock
        self._environment = minijinja.Environment(
            templates={NAME: Path(__file__).with_name("dashboard.jinja").read_text("utf-8")}
        )
        self._before: tuple[float, Sequence[Counts]] | None = None
        self._rates = (0.0, 0.0)  # requests and tokens a second

    def page(self, gateways: Sequence[Counts], status: Status | None) -> str:
        """gateways: what each has counted by now. status: what the router last said."""
        self._measure(gateways)
        shown = status or Status()
        return self._environment.render_template(
            NAME,
            model=self._model,
            version=baton.__version__,
            refresh_s=REFRESH_S,
            tiles=self._tiles(gateways, shown),
            workers=[_worker(worker) for worker in shown.workers],
            tenants=[_tenant(tenant) for tenant in shown.queue.tenants if tenant.tenant],
            gateways=[_gateway(counts) for counts in gateways],
        )

    def _measure(self, gateways: Sequence[Counts]) -> None:
        now_s = self._clock.now_s()
        if self._before is not None:
            before_s, before = self._before
            if now_s - before_s < LEAST_S:
                return
            self._rates = rates(before, gateways, now_s - before_s)
        self._before = now_s, gateways

    def _tiles(self, gateways: Sequence[Counts], status: Status) -> list[dict[str, str]]:
        requests_per_s, tokens_per_s = self._rates
        ttft = [counts.ttft for counts in gateways]
        itl = [counts.itl for counts in gateways]
        shown = {
            "calls being answered": str(sum(counts.num_open for counts in gateways)),
            "requests/s": f"{requests_per_s:,.1f}",
            "tokens/s": f"{tokens_per_s:,.0f}",
            "first token, half of all": quantile(ttft, TTFT_BOUNDS_S, 0.5),
            "first token, 99 %": quantile(ttft, TTFT_BOUNDS_S, 0.99),
            "between tokens, 99 %": quantile(itl, ITL_BOUNDS_S, 0.99),
            "wait at the router": str(status.queue.num_queued),
            "overload": status.queue.level.name.lower(),
        }
        return [{"name": name, "value": value} for name, value in shown.items()]


def rates(before: Sequence[Counts], after: Sequence[Counts], seconds: float) -> tuple[float, float]:
    """Requests and tokens a second, of the gateways that were there both times."""
    former = {counts.gateway: counts for counts in before}
    pairs = [(former[counts.gateway], counts) for counts in after if counts.gateway in former]
    num_requests = sum(_num_requests(new) - _num_requests(old) for old, new in pairs)
    num_tokens = sum(new.generated_tokens - old.generated_tokens for old, new in pairs)
    return num_requests / seconds, num_tokens / seconds


def quantile(counted: Sequence[HistogramCounts], bounds: Sequence[float], share: float) -> str:
    """The bound that at least this share is below, of all together since they were started."""
    counts = [each.counts for each in counted if len(each.counts) == len(bounds) + 1]
    total = sum(map(sum, counts))
    if not total:
        return "-"
    num_below = 0
    for bound, column in zip(bounds, zip(*counts, strict=True), strict=False):
        num_below += sum(column)
        if num_below >= share * total:
            return f"\u2264 {bound:g} s" if bound >= 1 else f"\u2264 {bound * 1000:g} ms"
    return f"> {bounds[-1]:g} s"


def _worker(status: WorkerStatus) -> dict[str, Any]:
    worker, load = status.worker, status.load
    num_pages = max(1, worker.num_pages)
    num_active = sum(load.pages.get(state, 0) for state in SHOWN_STATES if state != "cached")
    found = load.prefix_hits_tokens / load.prefix_queries_tokens if load.prefix_queries_tokens else None
    return {
        "name": worker.name,
        "role": worker.role,
        "num_running": load.num_running,
        "num_waiting": load.num_waiting,
        "shares": [(state, round(100 * load.pages.get(state, 0) / num_pages, 2)) for state in SHOWN_STATES],
        "title": ", ".join(f"{count} {state}" for state, count in load.pages.items()),
        "in_use": f"{num_active / num_pages:.0%}",
        "found": "-" if found is None else f"{found:.0%}",
        "note": "drains" if status.is_draining else "",
    }


def _tenant(status: TenantStatus) -> dict[str, Any]:
    return {
        "name": status.tenant,
        "num_active": status.num_active,
        "num_queued": status.num_queued,
        "wait": f"{status.oldest_wait_s:.1f} s",
        "weight": f"{status.weight:g}",
    }


def _gateway(counts: Counts) -> dict[str, Any]:
    return {
        "name": counts.gateway,
        "num_open": counts.num_open,
        "num_requests": _num_requests(counts),
        "num_tokens": counts.generated_tokens,
        "num_replays": sum(count for event, count in counts.events.items() if event.startswith("replays_")),
    }


def _num_requests(counts: Counts) -> int:
    """Calls for answers, however they ended."""
    return sum(count for route, _, count in counts.requests if route.startswith("/v1/c"))
