"""The pictures of the dashboard and of `baton top` in docs/images, over simulated workers.

python -m baton.bench.serve.dashboard_pictures [FOLDER]
"""

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from baton.bench.serve.client import Address, Client
from baton.bench.serve.dashboard import LIVE, chromium
from baton.bench.serve.simulated_cluster import SimulatedCluster, served
from baton.cluster.cli.http_client import HttpClient

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page

SEEN: Final = """(selector) => {
  const element = document.querySelector(selector);
  const box = element.getBoundingClientRect();
  const parts = [...element.querySelectorAll("*")].map((part) => part.getBoundingClientRect().bottom);
  const bottom = Math.min(Math.max(...parts) + 12, window.innerHeight);
  return { x: box.x, y: box.y, width: box.width, height: bottom - box.y };
}"""  # of an element: what of it is seen
FOLDER: Final = Path(__file__).resolve().parents[2] / "docs" / "images"
SCHEMES: Final[tuple[Literal["light", "dark"], ...]] = ("light", "dark")
COLOURS: Final = 160  # of a PNG's palette
SETTLED_S: Final = 14.0  # the rates of the history's end are over the window by then
REQUEST: Final = b'{"model": "tiny", "prompt": "a b c d e f g", "max_tokens": %d}'


async def draw(folder: Path) -> None:
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
    """Write a picture of what is seen of an element, down to its last child, with few colours."""
    from PIL import Image

    await page.screenshot(path=path, clip=await page.evaluate(SEEN, selector))
    with Image.open(path) as picture:
        small = picture.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    small.save(path, optimize=True)


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


if __name__ == "__main__":
    asyncio.run(draw(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER))
