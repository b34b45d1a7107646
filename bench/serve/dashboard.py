"""The dashboard with many workers, in Chromium: frames while it scrolls, first paint, memory, and its cost.

    baton bench dashboard [--workers 1000]
    baton bench dashboard --pictures docs/images

The gateway is real, its cluster is simulated_cluster.py. Needs Debian's chromium and the package playwright.
docs/benchmarks.md explains the figures.
"""

import asyncio
import time
from argparse import Namespace
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Final, Literal, NamedTuple
from urllib.parse import urlsplit

import psutil

from baton.bench.report import Report, at_least, at_most, mean_with_error, option, suite
from baton.bench.serve.client import Address, Client
from baton.bench.serve.load import Hammer, Point
from baton.bench.serve.overhead import Plane, Target, hosted
from baton.bench.serve.simulated_cluster import SimulatedCluster, served
from baton.cluster.cli.connections import HttpClient
from baton.errors import ConfigError, how_to_install

if TYPE_CHECKING:
    from playwright.async_api import Browser, CDPSession, Page

CHROMIUM: Final = "/usr/bin/chromium"
FLAGS: Final = ("--no-sandbox", "--enable-precise-memory-info")
SCROLL_S: Final = 5.0
CORES: Final = "processor time; 60 fps on two cores leave 33"
LATE_MS: Final = 25.0
PLACES: Final = {"list of workers": "#panel-workers .scroll", "page": "#charts"}  # to scroll
LOAD_S: Final = 1.0  # of each half of a round
POINT: Final = Point(64, stream=True, num_connections=16)
WHEEL_PIXELS: Final = 60
WHEEL_EVERY_S: Final = 0.008
LIVE: Final = "#state[data-live]"
COUNT_FRAMES: Final = """() => {
  window.frames_ = [];
  const tick = (now) => { window.frames_.push(now); window.frames_on = requestAnimationFrame(tick); };
  requestAnimationFrame(tick);
}"""
TAKE_FRAMES: Final = "() => { cancelAnimationFrame(window.frames_on); return window.frames_; }"
FIRST_PAINT: Final = "() => performance.getEntriesByName('first-contentful-paint')[0].startTime"
HEAP: Final = "() => performance.memory.usedJSHeapSize"


@asynccontextmanager
async def chromium() -> AsyncIterator["Browser"]:
    """Yield a running browser. Raises ConfigError when the driver is missing."""
    try:
        from playwright.async_api import async_playwright
    except ModuleNotFoundError:
        raise ConfigError(f"playwright is not installed: {how_to_install('dev')}") from None
    async with async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield browser
        await browser.close()


class Scroll(NamedTuple):
    """One stretch of scrolling."""

    gaps_ms: list[float]  # between frames
    work_ms: float  # processor time of the page's main thread, a frame
    browser_ms: float  # of all processes of the browser, a frame

    @property
    def fps(self) -> float:
        return 1000 * len(self.gaps_ms) / sum(self.gaps_ms)


async def scroll(page: "Page", selector: str) -> Scroll:
    """Scroll the part under the selector down and up for SCROLL_S."""
    await page.locator(selector).hover()
    session = await page.context.new_cdp_session(page)
    await session.send("Performance.enable", {"timeDomain": "threadTicks"})
    before_s, browser_before_s = await _task_s(session), _browser_cpu_s()
    await page.evaluate(COUNT_FRAMES)
    begin_s = time.monotonic()
    while (passed_s := time.monotonic() - begin_s) < SCROLL_S:
        down = int(passed_s / 1.25) % 2 == 0
        await page.mouse.wheel(0, WHEEL_PIXELS if down else -WHEEL_PIXELS)
        await asyncio.sleep(WHEEL_EVERY_S)
    at_ms: list[float] = await page.evaluate(TAKE_FRAMES)
    spent_s, browser_s = await _task_s(session) - before_s, _browser_cpu_s() - browser_before_s
    await session.detach()
    gaps_ms = [after - before for before, after in pairwise(at_ms)]
    return Scroll(gaps_ms, 1000 * spent_s / len(at_ms), 1000 * browser_s / len(at_ms))


async def _task_s(session: "CDPSession") -> float:
    """Return the processor seconds of the page's main thread so far."""
    metrics = (await session.send("Performance.getMetrics"))["metrics"]
    return next(float(each["value"]) for each in metrics if each["name"] == "TaskDuration")


def _browser_cpu_s() -> float:
    """Return the processor seconds so far of all processes of Chromium."""
    children = psutil.Process().children(recursive=True)
    times = [each.cpu_times() for each in children if "chromium" in each.name()]
    return sum(each.user + each.system for each in times)


def renderer_bytes() -> int:
    """Return the memory that the largest renderer among this process's children has to itself."""
    sizes = [
        child.memory_full_info().uss
        for child in psutil.Process().children(recursive=True)
        if "--type=renderer" in child.cmdline()
    ]
    return max(sizes, default=0)


# The pictures of the dashboard and of `baton top` in docs/images.

SEEN: Final = """(selector) => {
  const element = document.querySelector(selector);
  const box = element.getBoundingClientRect();
  const parts = [...element.querySelectorAll("*")].map((part) => part.getBoundingClientRect().bottom);
  const bottom = Math.min(Math.max(...parts) + 12, window.innerHeight);
  return { x: box.x, y: box.y, width: box.width, height: bottom - box.y };
}"""  # of an element: what of it is seen
SCHEMES: Final[tuple[Literal["light", "dark"], ...]] = ("light", "dark")
SETTLED_S: Final = 14.0  # the rates of the history's end are over the window by then
REQUEST: Final = b'{"model": "tiny", "prompt": "a b c d e f g", "max_tokens": %d}'


async def draw_pictures(folder: Path) -> None:
    """Write dashboard-light.png, dashboard-dark.png, dashboard-request.png and top.png."""
    async with served(SimulatedCluster(4, 8)) as address:
        url = f"http://{address.host}:{address.port}"
        for num_tokens in (24, 90, 60, 12, 40):
            await Client(Address(url)).post("/v1/completions", REQUEST % num_tokens)
        async with chromium() as browser:
            pages = {}
            for scheme in SCHEMES:
                pages[scheme] = await browser.new_page(
                    color_scheme=scheme, viewport={"width": 1280, "height": 1150}
                )
                await pages[scheme].goto(f"{url}/ui")
                await pages[scheme].wait_for_selector(LIVE)
            await asyncio.sleep(SETTLED_S)
            for scheme, page in pages.items():
                await page.bring_to_front()
                await asyncio.sleep(2.0)
                await _shoot(page, folder / f"dashboard-{scheme}.png")
            await _open_slowest(pages["light"])
            await _shoot(pages["light"], folder / "dashboard-request.png", "#details")
            await _draw_top(browser, url, folder / "top.png")


async def _open_slowest(page: "Page") -> None:
    await page.bring_to_front()
    await page.keyboard.press("3")
    await page.locator("#panel-requests tbody th button").first.click()
    await page.locator("tr.measured").wait_for()
    await page.evaluate("document.activeElement.blur()")


async def _shoot(page: "Page", path: Path, selector: str = "body") -> None:
    """Write a picture of what is seen of an element, down to its last child."""
    await page.screenshot(path=path, clip=await page.evaluate(SEEN, selector))


async def _draw_top(browser: "Browser", url: str, path: Path) -> None:
    from baton.cluster.cli.commands.top import TopApp

    app = TopApp(HttpClient(url))
    async with app.run_test(size=(126, 24)) as pilot:
        while not app.listing.rows:
            await pilot.pause(0.05)
        await pilot.press("j", "j")
        picture = app.export_screenshot(title="baton top")
    page = await browser.new_page(viewport={"width": 1100, "height": 460})
    await page.set_content(f"<body style='margin: 0'>{picture}")
    await _shoot(page, path)


@suite(
    "dashboard",
    "The dashboard in Chromium",
    option("--workers", 1000, "simulated workers"),
    option("--rounds", 40, "under load"),
    option("--tries", 6, "stretches of scrolling"),
    option("--settle", 3.0, "seconds before the first scroll"),
    option("--pictures", type=Path, metavar="FOLDER", help="only draw the guides' pictures"),
)
async def measure(options: Namespace, report: Report) -> None:
    """Measure the page, then its cost; or draw pictures."""
    if options.pictures is not None:
        await draw_pictures(options.pictures)
        return
    cluster = SimulatedCluster(options.workers // 3, options.workers - options.workers // 3)
    async with served(cluster) as address, chromium() as browser:
        page = await browser.new_page(viewport={"width": 1280, "height": 900})
        begin_s = time.monotonic()
        await page.goto(f"http://{address.host}:{address.port}/ui")
        await page.wait_for_selector(LIVE)
        shown_s = time.monotonic() - begin_s
        paint_s = await page.evaluate(FIRST_PAINT) / 1000
        report.rows.append(at_most("first contentful paint", paint_s, "s", 1.0))
        report.rows.append(at_most("first snapshot shown", shown_s, "s", None, "from the call of goto"))
        await asyncio.sleep(options.settle)
        blank = await browser.new_page(viewport={"width": 1280, "height": 900})
        await blank.set_content("<div id=blank style='height: 9000px'></div>")
        for name, selector in PLACES.items():
            tries = []
            for number in range(options.tries):
                report.tell(f"scrolls the {name}, {number + 1} of {options.tries}")
                tries.append(await _scroll_both(page, blank, selector))
            _add_frames(report, name, tries)
        await page.bring_to_front()
        report.rows.append(at_most("heap", await page.evaluate(HEAP) / 1e6, "MB", 200))
        report.rows.append(at_most("memory of the renderer alone", renderer_bytes() / 1e6, "MB", 200))
    await _add_cost_under_load(options, report)


async def _scroll_both(page: "Page", blank: "Page", selector: str) -> tuple[Scroll, Scroll]:
    """Scroll a part of the page, then an empty page."""
    await page.bring_to_front()
    await page.locator(selector).scroll_into_view_if_needed()
    found = await scroll(page, selector)
    await blank.bring_to_front()
    return found, await scroll(blank, "#blank")


def _add_frames(report: Report, name: str, tries: list[tuple[Scroll, Scroll]]) -> None:
    """Add the quietest of several stretches: other programs of the machine only take frames away."""
    best = max((found for found, _ in tries), key=lambda found: found.fps)
    late = sum(gap > LATE_MS for gap in best.gaps_ms)
    all_ = ", ".join(f"{found.fps:.1f} ({blank.fps:.1f})" for found, blank in tries)
    note = f"{late} of {len(best.gaps_ms)} frames late; every stretch (an empty page after it): {all_}"
    work_ms = median(found.work_ms for found, _ in tries)
    browser_ms = median(found.browser_ms for found, _ in tries)
    report.rows += [
        at_least(f"frames, {name} scrolls", best.fps, "fps", 59.0, note),
        at_most(f"main thread, {name} scrolls", work_ms, "ms a frame", 1000 / 60),
        at_most(f"all of the browser, {name} scrolls", browser_ms, "ms a frame", None, CORES),
    ]


async def _add_cost_under_load(options: Namespace, report: Report) -> None:
    """Add the processor time a request with a viewer, over that without."""
    spent_us: dict[bool, list[float]] = {True: [], False: []}
    with hosted(Plane(model="tiny", num_gateways=2, num_prefill=1)) as target:
        await _cpu_us(target)
        for _, is_watched in report.turns(spent_us, options.rounds, "under load, "):
            async with watching(target.url) if is_watched else nullcontext():
                spent_us[is_watched].append(await _cpu_us(target))
    ratios = [with_us / without_us for with_us, without_us in zip(*spent_us.values(), strict=True)]
    note = f"median of {len(ratios)}; {mean_with_error(ratios)}"
    report.rows.append(at_most("CPU time a request, a page open", median(ratios), "times", 1.03, note))
    report.extra["cpu_ratios"] = ratios


async def _cpu_us(target: Target) -> float:
    before_s = target.cpu_s()
    run = await Hammer(Address(target.url), "tiny", POINT).run(LOAD_S)
    return 1e6 * (target.cpu_s() - before_s) / len(run.samples)


@asynccontextmanager
async def watching(url: str) -> AsyncIterator[None]:
    """Read the events of a gateway as a page does."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(f"GET /ui/events HTTP/1.1\r\nhost: {parts.netloc}\r\n\r\n".encode())
    await reader.readuntil(b"event: snapshot")
    reading = asyncio.create_task(reader.read())
    try:
        yield
    finally:
        reading.cancel()
        writer.close()
