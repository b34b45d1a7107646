import re
from collections import Counter
from html.parser import HTMLParser

import msgspec

from baton.clock import ManualClock
from baton.gateway.metrics.dashboard import HEADERS, Dashboard, quantile, rates, totals
from baton.gateway.metrics.metrics import Metrics
from baton.messages.operations import Status
from baton.messages.status import OverloadLevel, QueueStatus, RouterStatus, TenantStatus
from baton.messages.workers import Load, WorkerStatus
from tests.scripted_service import worker


class Text(HTMLParser):
    """The texts of a page, and the links that a browser would load."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.links: list[str] = []
        self.tags: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [value or "" for name, value in attributes if name in ("src", "href", "action")]

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append(data.strip())


def counts(name: str = "g0", num_requests: int = 0, num_tokens: int = 0) -> Metrics:
    metrics = Metrics(gateway=name, events=Counter(replays_lost=3, opened=5))
    metrics.requests["/v1/completions", 200] = num_requests
    metrics.requests["/metrics", 200] = 1000
    metrics.generated_tokens = num_tokens
    return metrics


def status(**fields: object) -> Status:
    load = Load(
        num_running=3,
        pages={"free": 16, "cached": 32, "active": 16},
        prefix_queries_tokens=200,
        prefix_hits_tokens=50,
        num_draft_tokens=8,
        num_accepted_tokens=6,
        num_masks=1000,
        mask_us=42_000,
    )
    entry = WorkerStatus(worker=worker(), load=load, num_attempts=5, beat_age_s=0.1)
    queue = QueueStatus(
        level=OverloadLevel.CALM, num_queued=7, tenants=(TenantStatus(tenant="<b>acme</b>", num_queued=7),)
    )
    return msgspec.structs.replace(
        Status(workers=(entry,), routers=(RouterStatus(id="e" * 32, queue=queue),)), **fields
    )


def page(clock: ManualClock | None = None) -> Dashboard:
    return Dashboard("tiny", clock or ManualClock(10.0))


def tile(shown: Text, name: str) -> str:
    return shown.texts[shown.texts.index(name) - 1]


def test_workers_tenants_and_gateways_are_shown() -> None:
    shown = Text(page().page([counts("g0", 12, 90), counts("g1")], status()))
    assert {"decode-0", "decode", "25%", "g0", "g1", "12", "90"} <= set(shown.texts)
    assert tile(shown, "queued requests") == "7" and tile(shown, "overload") == "calm"


def test_accepted_drafts_mask_times_and_refused_forms_are_shown() -> None:
    gateway = counts("g0")
    gateway.forms.update(refused=313, too_long=4)
    gateway.form_check.observe(0.004)
    shown = Text(page().page([gateway], status()))
    assert {"75%", "42 \u00b5s", "317", "\u2264 5 ms"} <= set(shown.texts)


def test_names_are_escaped() -> None:
    text = page().page([counts()], status())
    assert "<b>acme" not in text and "<b>acme</b>" in Text(text).texts


def test_page_has_no_script_and_no_link() -> None:
    shown = Text(page().page([counts()], status()))
    assert not shown.links and "script" not in shown.tags
    assert HEADERS["content-security-policy"].startswith("default-src 'none'")


def test_page_without_a_status_says_so() -> None:
    shown = Text(page().page([counts()], None))
    assert "No workers." in shown.texts and "Tenants" not in shown.texts
    assert tile(shown, "TTFT p99") == "-"


def test_rates_cover_the_time_between_two_views() -> None:
    clock = ManualClock(10.0)
    dashboard = page(clock)
    dashboard.page([counts("g0", 10, 100)], None)
    clock.advance(2.0)
    shown = Text(dashboard.page([counts("g0", 30, 500)], None))
    assert (tile(shown, "requests/s"), tile(shown, "tokens/s")) == ("10.0", "200")
    clock.advance(0.1)  # somebody else looks: too soon for other figures
    shown = Text(dashboard.page([counts("g0", 31, 501)], None))
    assert (tile(shown, "requests/s"), tile(shown, "tokens/s")) == ("10.0", "200")


def test_gateway_that_comes_or_goes_does_not_change_the_rates() -> None:
    assert rates(totals([counts("g0", 10)]), totals([counts("g1", 500)]), 1.0) == (0.0, 0.0)
    before, after = totals([counts("g0", 10), counts("g1", 7)]), totals([counts("g0", 13)])
    assert rates(before, after, 2.0) == (1.5, 0.0)


def test_quantile_joins_all_gateways() -> None:
    one, other = Metrics(gateway="a"), Metrics(gateway="b")
    for _ in range(98):
        one.ttft.observe(0.015)
    other.ttft.observe(1.5)
    other.ttft.observe(1000.0)
    both = [one.ttft, other.ttft]
    shown = [quantile(both, share) for share in (0.5, 0.99, 1.0)]
    assert shown == ["\u2264 20 ms", "\u2264 2 s", "> 60 s"]


def test_bar_shows_the_shares_of_pages() -> None:
    text = page().page([counts()], status())
    assert re.findall(r'class="(\w+)" style="width:([\d.]+)%"', text) == [
        ("active", "25.0"),
        ("cached", "50.0"),
        ("leased", "0.0"),
        ("quarantined", "0.0"),
    ]
