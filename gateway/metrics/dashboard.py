"""`/ui`: the cluster on one page for operators. It needs no script and no other file, and reloads itself."""

from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any, Final, TypeAlias

import minijinja

import baton
from baton.clock import Clock
from baton.gateway.metrics.metrics import Metrics
from baton.messages.operations import Status
from baton.messages.status import Histogram
from baton.messages.workers import Load, WorkerStatus

REFRESH_S: Final = 2
LEAST_S: Final = 0.5  # between the two readings of a rate
HEADERS: Final = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
}
SHOWN_STATES: Final = ("active", "cached", "leased", "quarantined")
NAME: Final = "dashboard.html"  # minijinja escapes values because of the ending
Totals: TypeAlias = Mapping[str, tuple[int, int]]  # gateway -> requests, tokens


class Dashboard:
    """The page, and the rates between two views of it."""

    def __init__(self, model: str, clock: Clock) -> None:
        self._model = model
        self._clock = clock
        self._environment = minijinja.Environment(
            templates={NAME: Path(__file__).with_name("dashboard.jinja").read_text("utf-8")}
        )
        self._before: tuple[float, Totals] | None = None
        self._rates = (0.0, 0.0)  # requests and tokens a second

    def page(self, gateways: Sequence[Metrics], status: Status | None) -> str:
        """Return the page. status: the last one of the routers."""
        self._measure(gateways)
        shown = status or Status()
        return self._environment.render_template(
            NAME,
            model=self._model,
            version=baton.__version__,
            refresh_s=REFRESH_S,
            tiles=self._tiles(gateways, shown),
            workers=[_worker(worker) for worker in shown.workers],
            tenants=[tenant for tenant in shown.queue.tenants if tenant.tenant],
            gateways=[_gateway(counts) for counts in gateways],
        )

    def _measure(self, gateways: Sequence[Metrics]) -> None:
        now_s, now = self._clock.now_s(), totals(gateways)
        if self._before is not None:
            before_s, before = self._before
            if now_s - before_s < LEAST_S:
                return
            self._rates = rates(before, now, now_s - before_s)
        self._before = now_s, now

    def _tiles(self, gateways: Sequence[Metrics], status: Status) -> list[dict[str, str]]:
        requests_per_s, tokens_per_s = self._rates
        ttft = [counts.ttft for counts in gateways]
        itl = [counts.itl for counts in gateways]
        shown = {
            "calls being answered": str(sum(counts.num_open for counts in gateways)),
            "requests/s": f"{requests_per_s:,.1f}",
            "tokens/s": f"{tokens_per_s:,.0f}",
            "TTFT p50": quantile(ttft, 0.5),
            "TTFT p99": quantile(ttft, 0.99),
            "ITL p99": quantile(itl, 0.99),
            "queued requests": str(status.queue.num_queued),
            "overload": status.queue.level.name.lower(),
        }
        return [{"name": name, "value": value} for name, value in shown.items()]


def totals(gateways: Sequence[Metrics]) -> Totals:
    """Return the calls, however they ended, and the tokens of each gateway."""
    return {each.gateway: (_num_requests(each), each.generated_tokens) for each in gateways}


def rates(before: Totals, after: Totals, seconds: float) -> tuple[float, float]:
    """Return requests and tokens a second, of the gateways that are in both readings."""
    pairs = [(before[name], after[name]) for name in after if name in before]
    num_requests = sum(new[0] - old[0] for old, new in pairs)
    num_tokens = sum(new[1] - old[1] for old, new in pairs)
    return num_requests / seconds, num_tokens / seconds


def quantile(histograms: Sequence[Histogram], share: float) -> str:
    """Return the bound that at least this share of all values is below, since the gateways started."""
    bounds = histograms[0].bounds
    alike = [each.counts for each in histograms if each.bounds == bounds]
    total = Histogram(bounds, [sum(column) for column in zip(*alike, strict=True)])
    if not total.num:
        return "-"
    bound = total.quantile(share)
    if bound == inf:
        return f"> {bounds[-1]:g} s"
    return f"\u2264 {bound:g} s" if bound >= 1 else f"\u2264 {bound * 1000:g} ms"


def _worker(status: WorkerStatus) -> dict[str, Any]:
    worker, load = status.worker, status.load
    num_pages = max(1, worker.num_pages)
    num_active = sum(load.pages.get(state, 0) for state in SHOWN_STATES if state != "cached")
    mask_us = f"{load.mask_us / load.num_masks:.0f} \u00b5s" if load.num_masks else "-"
    return {
        "name": worker.name,
        "role": worker.role,
        "num_running": load.num_running,
        "num_waiting": load.num_waiting,
        "shares": [(state, round(100 * load.pages.get(state, 0) / num_pages, 2)) for state in SHOWN_STATES],
        "title": ", ".join(f"{count} {state}" for state, count in load.pages.items()),
        "in_use": f"{num_active / num_pages:.0%}",
        "found": _share(load.prefix_hits_tokens, load.prefix_queries_tokens),
        "accepted": _share(load.num_accepted_tokens, load.num_draft_tokens),
        "accepted_title": f"{load.num_accepted_tokens} of {load.num_draft_tokens} draft tokens",
        "mask": mask_us,
        "mask_title": _forms_of(load),
        "note": "drains" if status.is_draining else "",
    }


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def _forms_of(load: Load) -> str:
    compile_ms = load.compile_us / 1e3 / max(1, load.num_compiled_forms)
    return (
        f"{load.num_masks} masks; {load.num_compiled_forms} grammars, {compile_ms:.1f} ms to compile one; "
        f"{load.num_failed_forms} failed"
    )


def _gateway(counts: Metrics) -> dict[str, Any]:
    return {
        "name": counts.gateway,
        "num_open": counts.num_open,
        "num_requests": _num_requests(counts),
        "num_tokens": counts.generated_tokens,
        "num_refused_forms": counts.forms.get("refused", 0) + counts.forms.get("too_long", 0),
        "form_check": quantile([counts.form_check], 0.99),
        "num_replays": sum(count for event, count in counts.events.items() if event.startswith("replays_")),
    }


def _num_requests(counts: Metrics) -> int:
    return sum(count for (route, _), count in counts.requests.items() if route.startswith("/v1/c"))
