"""The page `/ui` in Chromium, over a gateway with simulated workers; all tests share both."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import httpx2
import pytest
from anyio.from_thread import start_blocking_portal

from baton.bench.serve.dashboard import CHROMIUM, FLAGS, LIVE
from baton.bench.serve.simulated_cluster import TENANTS, SimulatedCluster, served

playwright = pytest.importorskip("playwright.sync_api", reason="the driver playwright is not installed")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-core is not installed")
pytestmark = pytest.mark.skipif(not Path(CHROMIUM).exists(), reason=f"there is no {CHROMIUM}")

TIMEOUT_MS: Final = 20_000
NUM_PREFILL, NUM_DECODE = 3, 7
DESKTOP: Final = {"width": 1280, "height": 900}
OpenPage = Callable[..., Any]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A gateway of few workers, which has answered some requests."""
    cluster = SimulatedCluster(NUM_PREFILL, NUM_DECODE)
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(served(cluster)) as address,
        httpx2.Client(base_url=f"http://{address.host}:{address.port}") as web,
    ):
        for num_tokens in (4, 60, 20):
            body = {"model": "tiny", "prompt": "a b", "max_tokens": num_tokens}
            assert web.post("/v1/completions", json=body).status_code == 200
        yield str(web.base_url).rstrip("/")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield browser
        browser.close()


class Seen:
    """The requests and the complaints of a browser."""

    def __init__(self, page: Any) -> None:
        self.urls: list[str] = []
        self.complaints: list[str] = []
        page.on("request", lambda request: self.urls.append(request.url))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", lambda message: self._console(message.type, message.text))

    def _console(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.complaints.append(text)


@pytest.fixture
def open_page(browser: Any, url: str) -> Iterator[OpenPage]:
    """Open the page in a context of its own; it shows a snapshot then. The browser must not complain.

    Nothing moves unless a test asks for it: pictures that move take a core as long as a page is open.
    """
    contexts: list[Any] = []
    all_seen: list[Seen] = []

    def open_(at: str = url, **settings: Any) -> Any:
        context = browser.new_context(**{"viewport": DESKTOP, "reduced_motion": "reduce", **settings})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(TIMEOUT_MS)
        all_seen.append(Seen(page))
        page.seen = all_seen[-1]
        page.goto(f"{at}/ui")
        page.wait_for_selector(LIVE)
        page.wait_for_selector("#panel-workers tbody th button")
        return page

    yield open_
    for context in contexts:
        context.close()
    assert [seen.complaints for seen in all_seen if seen.complaints] == []


@pytest.fixture
def page(open_page: OpenPage) -> Any:
    return open_page()


def test_page_loads_nothing_from_elsewhere(page: Any, url: str) -> None:
    page.wait_for_timeout(200)
    assert {each.partition("/ui")[0] for each in page.seen.urls if not each.startswith("data:")} == {url}


def test_tiles_and_lists_show_the_cluster(page: Any) -> None:
    assert page.title() == "Baton: tiny"
    tiles = page.locator("#tiles").inner_text()
    assert re.search(r"[\d,.]+\s+tokens/s", tiles) and re.search(r"[\d.]+ ms\s+TTFT p99", tiles)
    for name, num_rows in (
        ("Workers", NUM_PREFILL + NUM_DECODE),
        ("Tenants", 4),
        ("Gateways", 1),
        ("Routers", 2),
        ("Plans", 8),
    ):
        page.get_by_role("tab", name=name).click()
        panel = page.get_by_role("tabpanel", name=name)
        panel.locator("tbody tr[aria-rowindex]").nth(num_rows - 1).wait_for()
        assert panel.locator("tbody tr[aria-rowindex]").count() == num_rows


def test_figures_move(page: Any) -> None:
    before = page.locator("#tiles").inner_text()
    page.wait_for_function("before => document.querySelector('#tiles').innerText !== before", arg=before)


def test_page_that_opens_late_has_fifteen_minutes_of_charts(page: Any) -> None:
    drawn = page.locator("#charts canvas").first
    drawn.focus()
    for _ in range(85):
        page.keyboard.press("ArrowLeft")
    label = drawn.get_attribute("aria-label")
    assert re.fullmatch(r"Tokens/s, 850 s ago: generated [\d,.]+( k)?", label)
    assert float(label.split()[-1].replace(",", "") if "k" not in label else 1) > 0


def test_names_from_outside_are_text(page: Any) -> None:
    page.get_by_role("tab", name="Tenants").click()
    page.get_by_role("button", name=TENANTS[-1]).click()
    assert page.locator("#details-title").inner_text() == TENANTS[-1] == "<b>umbrella</b>"
    assert page.locator("#details b, #panels b").count() == 0


def test_worker_opens_and_closes_by_keyboard(page: Any) -> None:
    page.keyboard.press("/")
    page.keyboard.type("prefill")
    rows = page.locator("#panel-workers tbody tr[aria-rowindex]")
    page.wait_for_function("() => document.querySelectorAll('#panel-workers tr[aria-rowindex]').length === 3")
    rows.first.locator("button").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    assert page.locator("#details-title").inner_text() == "prefill-1"
    page.get_by_text("sent_by_tcp").wait_for()  # a counter, of /ui/workers/ID
    assert re.search(r"decode-\d\s+[\d.]+ MiB/s", page.locator("#details").inner_text())
    page.keyboard.press("Escape")
    assert page.locator("#details").is_hidden()
    assert page.evaluate("document.activeElement.textContent") == "prefill-1", "the focus is back"


def test_lists_open_by_number_and_by_arrow(page: Any) -> None:
    page.keyboard.press("6")
    assert page.get_by_role("tab", name="Plans").get_attribute("aria-selected") == "true"
    page.get_by_role("tab", name="Plans").focus()
    page.keyboard.press("ArrowRight")
    assert page.get_by_role("tab", name="Workers").get_attribute("aria-selected") == "true"


def test_plans_show_what_was_predicted_and_what_came(page: Any) -> None:
    page.keyboard.press("6")
    rows = page.locator("#panel-plans tbody tr[aria-rowindex]")
    rows.nth(7).wait_for()
    texts = rows.all_inner_texts()
    assert all(each in texts[0] for each in ("plan-8", "4P8D", "add 1 prefill, add 1 decode", "99.7%", "-"))
    assert "99.3%" in texts[-1] and "210 s" in texts[-1]
    rows.first.get_by_role("button").click()
    assert "the cheapest that meets the objectives" in page.locator("#details").inner_text()


def test_columns_sort(page: Any) -> None:
    head = page.locator("#panel-workers thead th").filter(has_text="name")
    head.get_by_role("button").click()
    assert head.get_attribute("aria-sort") == "descending"
    assert page.locator("#panel-workers tbody tr[aria-rowindex] button").first.inner_text() == "prefill-2"


def test_picture_has_the_cluster_and_its_transfers(page: Any) -> None:
    boxes = page.locator("#map button")
    assert boxes.count() == 1 + 2 + NUM_PREFILL + NUM_DECODE
    boxes.filter(has_text="decode-3").click()
    assert page.locator("#details-title").inner_text() == "decode-3"


COUNT_DASHES: Final = """() => {
  window.draws = 0;
  const old = CanvasRenderingContext2D.prototype.setLineDash;
  CanvasRenderingContext2D.prototype.setLineDash = function (dash) {
    if (dash.length) window.draws += 1;
    return old.call(this, dash);
  };
}"""


def flows(page: Any) -> str:
    """Return the picture of the flows, as it is now."""
    page.locator("#map").scroll_into_view_if_needed()
    return str(page.evaluate("document.querySelectorAll('#map canvas')[1].toDataURL()"))


def test_transfers_flow_unless_motion_is_unwanted(open_page: OpenPage) -> None:
    moving, still = open_page(reduced_motion="no-preference"), open_page()
    before = flows(moving)
    moving.wait_for_function(
        "before => document.querySelectorAll('#map canvas')[1].toDataURL() !== before", arg=before
    )
    still.evaluate(COUNT_DASHES)
    still.locator("#map").scroll_into_view_if_needed()
    still.wait_for_timeout(1500)
    assert still.evaluate("window.draws") <= 4, "once a snapshot, and not each frame"


def test_slow_request_shows_its_waterfall_and_its_candidates(page: Any) -> None:
    page.get_by_role("tab", name="Requests").click()
    rows = page.locator("#panel-requests tbody tr[aria-rowindex]")
    rows.nth(2).wait_for()
    assert rows.first.locator("td").nth(7).inner_text() == "60", "the slowest has most tokens"
    rows.first.get_by_role("button").click()
    parts = page.get_by_role("list", name="Parts of the request's time").get_by_role("listitem")
    parts.first.wait_for(state="attached")
    texts = parts.all_text_contents()
    assert any(text.startswith("prefill computing prefill-0") for text in texts)
    shares = [float(text.rsplit(", ", 1)[1].rstrip("%")) for text in texts]
    assert sum(shares) == pytest.approx(100, abs=1)
    table = page.get_by_role("table", name="Candidates by predicted cost")
    assert table.locator("tbody tr").count() == 7, "six pairs, and what was measured of the chosen one"
    assert table.locator("tr.chosen th").inner_text() == "prefill-0 \u2192 decode-0"
    assert "61.0 ms" in table.locator("tr.measured").inner_text()
    assert "50.0 ms expected" in page.locator("#details").inner_text()


def test_request_is_found_by_the_id_of_its_answer(page: Any, url: str) -> None:
    body = {"model": "tiny", "prompt": "a", "max_tokens": 2}
    answer = httpx2.post(f"{url}/v1/completions", json=body).json()["id"]
    page.keyboard.press("3")
    page.get_by_label("or the answer with id").fill(answer)
    page.keyboard.press("Enter")
    page.get_by_role("heading", name=f"Request {answer.split('-')[1]}").wait_for()
    assert "2 tokens answered" in page.locator("#details").inner_text()


def test_lost_connection_is_said_and_made_again(browser: Any, url: str) -> None:
    page = browser.new_page()
    page.route("**/ui/events", lambda route: route.abort())
    page.goto(f"{url}/ui")
    page.get_by_text("the connection is lost; connecting again").wait_for()
    page.unroute("**/ui/events")
    page.wait_for_selector(LIVE)
    page.close()


@pytest.mark.parametrize(
    ("scheme", "options"),
    [("light", {}), ("dark", {"runOnly": {"type": "rule", "values": ["color-contrast"]}})],
)
def test_axe_finds_no_violation(open_page: OpenPage, scheme: str, options: dict[str, Any]) -> None:
    """Only the rule of contrast depends on the theme."""
    page = open_page(color_scheme=scheme)
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == {"light": "rgb(255, 255, 255)", "dark": "rgb(18, 21, 26)"}[scheme]
    checker = axe.Axe()
    found = {}
    for number, name in enumerate(("workers", "tenants", "requests", "gateways", "routers", "plans"), 1):
        page.keyboard.press(str(number))
        rows = page.locator(f"#panel-{name} tbody tr[aria-rowindex] button")
        rows.first.wait_for()
        found[name] = _violations(checker, page, options)
        if name in ("workers", "requests"):
            rows.first.click()
            page.locator("#details dt, #details table").first.wait_for()
            found[f"{name}, details"] = _violations(checker, page, options)
            page.keyboard.press("Escape")
    assert {where: each for where, each in found.items() if each} == {}


def _violations(checker: Any, page: Any, options: dict[str, Any]) -> list[str]:
    violations = checker.run(page, options={"resultTypes": ["violations"], **options}).response["violations"]
    return [f"{each['id']}: {[node['html'][:200] for node in each['nodes']]}" for each in violations]


def test_narrow_screen_scrolls_in_one_direction(open_page: OpenPage) -> None:
    page = open_page(viewport={"width": 360, "height": 740})
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    page.locator("#panel-workers tbody tr[aria-rowindex] button").first.click()
    box = page.locator("#details").bounding_box()
    assert (box["x"], box["width"]) == (0, 360)
    assert page.evaluate("document.documentElement.scrollWidth") == 360


def test_theme_can_be_chosen_and_stays(page: Any) -> None:
    for theme in ("light", "dark"):
        page.get_by_role("button", name="Theme").click()
        assert page.evaluate("document.documentElement.dataset.theme") == theme
    page.reload()
    page.wait_for_selector(LIVE)
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(18, 21, 26)"


def test_a_thousand_workers_are_few_rows(open_page: OpenPage) -> None:
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(served(SimulatedCluster(334, 666), history_s=2.0)) as address,
    ):
        page = open_page(f"http://{address.host}:{address.port}")
        rows = page.locator("#panel-workers tbody tr[aria-rowindex]")
        assert rows.count() < 40 and page.locator("#map button").count() <= 40
        page.evaluate("document.querySelector('#panel-workers .scroll').scrollTop = 1e6")
        page.get_by_role("button", name="prefill-333").wait_for()
        assert rows.last.get_attribute("aria-rowindex") == "1001"
        page.evaluate("document.querySelector('#panel-workers .scroll').scrollTop = 500 * 34")
        page.wait_for_function(
            "() => document.querySelector('#panel-workers tr[aria-rowindex]').ariaRowIndex % 900 > 400"
        )
        indices = rows.evaluate_all("rows => rows.map((row) => Number(row.getAttribute('aria-rowindex')))")
        assert indices == list(range(indices[0], indices[0] + len(indices)))
        names = rows.locator("button").all_inner_texts()
        assert names == [f"decode-{index - 2}" for index in indices], "each row has its own worker"
