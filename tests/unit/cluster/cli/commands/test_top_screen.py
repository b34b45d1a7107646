"""The screen of `baton top`, driven by keys, over a gateway with simulated workers."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from http.client import HTTPResponse

import httpx2
import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal

from baton.bench.serve.simulated_cluster import TENANTS, SimulatedCluster, served
from baton.cluster.cli.connections import HttpClient
from tests.event_loop import on_loop

pytest.importorskip("textual", reason="textual is not installed")

from textual.pilot import Pilot
from textual.widgets import Static

from baton.cluster.cli.commands import top
from baton.cluster.cli.commands.top import REQUESTS, WORKERS, TopApp
from baton.gateway.metrics.snapshot import WorkerRow

TIMEOUT_S = 30.0
SIZE = (130, 30)


@pytest.fixture(scope="module")
def portal() -> Iterator[BlockingPortal]:
    with start_blocking_portal() as portal:
        yield portal


@pytest.fixture(scope="module")
def url(portal: BlockingPortal) -> Iterator[str]:
    with portal.wrap_async_context_manager(served(SimulatedCluster(12, 30), history_s=30.0)) as address:
        url = f"http://{address.host}:{address.port}"
        for num_tokens in (4, 30):
            body = {"model": "tiny", "prompt": "a b", "max_tokens": num_tokens}
            assert httpx2.post(f"{url}/v1/completions", json=body).status_code == 200
        yield url


@contextlib.asynccontextmanager
async def running(gateway: str | HttpClient) -> AsyncIterator[tuple[TopApp, Pilot[None]]]:
    """Yield the app once it shows a snapshot. gateway: its URL, or a client of it."""
    client = HttpClient(gateway, timeout_s=10.0) if isinstance(gateway, str) else gateway
    app = TopApp(client)
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: bool(app.listing.rows))
        yield app, pilot


async def until(pilot: Pilot[None], holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not holds():
            await pilot.pause(0.02)


def lines(app: TopApp) -> list[str]:
    """Return what the list shows, line by line."""
    return [app.listing.render_line(y).text for y in range(app.listing.size.height)]


def details(app: TopApp) -> str:
    """Return the text of the open details."""
    screen = app.screen
    with app.console.capture() as captured:
        app.console.print(screen.query_one(Static).content)
    return captured.get()


@on_loop
async def test_workers_are_listed_with_their_load(url: str) -> None:
    async with running(url) as (app, _):
        head, first, *_ = lines(app)
        assert head.split()[:4] == ["name\u25b2", "role", "node", "state"]
        assert first.split()[:4] == ["decode-0", "decode", "node-001", "serves"]
        names = [line.split()[0] for line in lines(app)[1:]]
        assert names == [f"decode-{number}" for number in range(len(names))], "decode-2 before decode-10"


@on_loop
async def test_cursor_moves_by_vim_keys_and_the_list_scrolls(url: str) -> None:
    async with running(url) as (app, pilot):
        listing = app.listing
        await pilot.press("j", "j", "k")
        assert listing.cursor == 1
        await pilot.press("G")
        assert listing.rows[listing.cursor].name == "prefill-11" and "prefill-11" in lines(app)[-1]
        await pilot.press("g")
        assert listing.cursor == 41, "one g is not enough"
        await pilot.press("g")
        assert listing.cursor == 0 and "decode-0 " in lines(app)[1]
        await pilot.press("ctrl+d")
        assert listing.cursor == listing.size.height // 2


@on_loop
async def test_cursor_stays_on_its_row_when_the_order_changes(url: str) -> None:
    async with running(url) as (app, pilot):
        await pilot.press("j", "j", "S")
        assert app.listing.rows[app.listing.cursor].name == "decode-2"
        assert app.listing.rows[0].name == "prefill-11"


@on_loop
async def test_tab_goes_through_the_lists(url: str) -> None:
    async with running(url) as (app, pilot):
        await pilot.press("tab")
        assert [row.status.tenant for row in app.listing.rows] == sorted(TENANTS)
        assert any(line.startswith(TENANTS[-1]) for line in lines(app)), "names are shown as they are"
        await pilot.press("tab")
        await until(pilot, lambda: len(app.listing.rows) == 2)
        assert [row.num_tokens for row in app.listing.rows] == [30, 4], "the slowest comes first"
        await pilot.press("tab", "shift+tab")
        assert app.listing.kind is REQUESTS


@on_loop
async def test_filter_is_typed_and_cleared(url: str) -> None:
    async with running(url) as (app, pilot):
        await pilot.press("slash", *"prefill", "enter")
        assert {row.role for row in app.listing.rows} == {"prefill"} and len(app.listing.rows) == 12
        await pilot.press("j")
        assert app.listing.cursor == 1
        await pilot.press("escape")
        assert len(app.listing.rows) == 42


@on_loop
async def test_worker_shows_everything_and_q_closes_before_it_quits(url: str) -> None:
    async with running(url) as (app, pilot):
        await pilot.press("G", "enter")
        assert len(app.screen_stack) == 2
        assert "prefix hits tokens" in details(app) and "MB/s" in details(app)
        await pilot.press("q")
        assert len(app.screen_stack) == 1 and app.is_running
        await pilot.press("q")
        await until(pilot, lambda: not app.is_running)


@on_loop
async def test_request_shows_its_waterfall_and_its_decision(url: str) -> None:
    async with running(url) as (app, pilot):
        await pilot.press("tab", "tab")
        await until(pilot, lambda: len(app.listing.rows) == 2)
        await pilot.press("enter")
        await until(pilot, lambda: "prefill_computing" in details(app))
        assert "decode-0 < prefill-0" in details(app) and "first token after 0.0710 s" in details(app)


@on_loop
async def test_lost_gateway_is_said(portal: BlockingPortal) -> None:
    serving = portal.wrap_async_context_manager(served(SimulatedCluster(1, 1), history_s=10.0))
    with contextlib.ExitStack() as stack:
        address = await asyncio.to_thread(stack.enter_context, serving)
        async with running(f"http://{address.host}:{address.port}") as (app, pilot):
            await asyncio.to_thread(stack.close)
            await until(pilot, lambda: "the connection is lost" in str(app.state.content))


class BehindLogin(HttpClient):
    """A client behind a proxy that answers what admins ask with a page."""

    def ask(self, method: str, route: str, body: bytes | None = None) -> HTTPResponse:
        return super().ask(method, "/ui" if route.startswith("/admin/") else route, body)


class Counting(HttpClient):
    """A client that counts the questions for the slowest requests."""

    num_asked = 0

    def ask(self, method: str, route: str, body: bytes | None = None) -> HTTPResponse:
        self.num_asked += route.startswith("/admin/requests")
        return super().ask(method, route, body)


@on_loop
async def test_requests_are_asked_for_at_one_pace_however_often_their_list_is_opened(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(top, "REQUESTS_EVERY_S", 0.25)
    client = Counting(url, timeout_s=10.0)
    async with running(client) as (app, pilot):
        app.action_list(-1)
        for _ in range(4):
            for _ in top.LISTS:
                app.action_list(1)
            await pilot.pause(0.06)
        num_opened = client.num_asked
        await pilot.pause(1.0)
        assert client.num_asked - num_opened <= 6


@on_loop
async def test_answer_that_is_no_list_of_requests_is_said(url: str) -> None:
    async with running(BehindLogin(url)) as (app, pilot):
        await pilot.press("tab", "tab")
        await until(pilot, lambda: "the API's answer cannot be read" in str(app.state.content))


def test_shares_are_sorted_as_numbers_and_names_by_their_numbers() -> None:
    columns = {column.name: column for column in WORKERS.columns}
    rows = [
        WorkerRow(id="0", name="decode-10", role="decode", prefix_queries_tokens=100, prefix_hits_tokens=9),
        WorkerRow(id="1", name="decode-9", role="decode", prefix_queries_tokens=100, prefix_hits_tokens=100),
        WorkerRow(id="2", name="decode-1", role="decode"),
    ]
    by_hits = sorted(rows, key=columns["hits"].key)
    assert [columns["hits"].cell(row) for row in by_hits] == ["-", "9%", "100%"]
    by_name = sorted(rows, key=columns["name"].key)
    assert [row.name for row in by_name] == ["decode-1", "decode-9", "decode-10"]
