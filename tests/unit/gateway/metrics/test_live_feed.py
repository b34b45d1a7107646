import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from baton.clock import ManualClock
from baton.gateway.api.errors import ApiError
from baton.gateway.metrics.dashboard import HISTORY_S, IDLE_EVERY_S, MAX_VIEWERS, WINDOW_S, LiveFeed
from baton.gateway.metrics.exporter import Exporter
from baton.gateway.metrics.metrics import Metrics
from baton.messages.operations import Status
from tests.event_loop import on_loop
from tests.node_peers import a_worker_status
from tests.scripted_service import ScriptedService, worker


class Host:
    """A feed on a clock that stands still, and the counts that it reads."""

    def __init__(self) -> None:
        self.clock, self.service, self.metrics = ManualClock(100.0), ScriptedService(), Metrics(gateway="g0")
        self.service.status = Status(workers=(a_worker_status(worker()),))
        exporter = Exporter(self.metrics, self.service, models=["tiny"], vllm_names=False)
        self.feed = LiveFeed(exporter, self.service, self.clock, model="tiny")

    async def take(self, num: int = 1, seconds: float = 1.0) -> None:
        for _ in range(num):
            self.clock.advance(seconds)
            await self.feed.take()


async def event(viewer: AsyncIterator[bytes]) -> tuple[str, Any]:
    """Return the name and the value of the next event."""
    text = (await asyncio.wait_for(anext(viewer), 10)).decode()
    name, data = text.removesuffix("\n\n").split("\n")
    return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


async def watching(host: Host) -> AsyncIterator[bytes]:
    """Return a viewer that waits for the next snapshot."""
    viewer = host.feed.admit()
    await event(viewer)
    return viewer


async def begun() -> None:
    """Let other tasks run until they wait."""
    for _ in range(10):
        await asyncio.sleep(0)


async def next_snapshot(host: Host, viewer: AsyncIterator[bytes]) -> Any:
    coming = asyncio.create_task(event(viewer))
    await begun()
    await host.take()
    return (await coming)[1]


@on_loop
async def test_viewer_gets_the_history_then_each_snapshot() -> None:
    host = Host()
    await host.take(3)
    viewer = host.feed.admit()
    name, points = await event(viewer)
    assert name == "history" and [point["time_s"] for point in points] == [101.0, 102.0, 103.0]
    host.metrics.generated_tokens += 30
    snapshot = await next_snapshot(host, viewer)
    assert snapshot["point"]["tokens_per_s"] == 10.0, "30 tokens in the 3 seconds of the readings"
    assert (snapshot["model"], snapshot["workers"][0]["name"]) == ("tiny", "decode-0")


@on_loop
async def test_history_has_fifteen_minutes() -> None:
    host = Host()
    await host.take(num=400, seconds=IDLE_EVERY_S)
    _, points = await event(host.feed.admit())
    assert points[-1]["time_s"] - points[0]["time_s"] == HISTORY_S


@on_loop
async def test_rates_forget_what_was_before_their_window() -> None:
    host = Host()
    host.metrics.generated_tokens = 1000
    await host.take(num=int(WINDOW_S) + 1)
    host.metrics.generated_tokens += 100
    await host.take(num=int(WINDOW_S))
    _, points = await event(host.feed.admit())
    assert points[-1]["tokens_per_s"] == 100 / WINDOW_S
    await host.take()
    _, points = await event(host.feed.admit())
    assert points[-1]["tokens_per_s"] == 0.0


@on_loop
async def test_slow_viewer_misses_snapshots_and_gets_later_ones() -> None:
    host = Host()
    viewer = await watching(host)
    await host.take(5)  # no client waits for these
    assert (await next_snapshot(host, viewer))["point"]["time_s"] == 106.0


@on_loop
async def test_viewer_that_left_is_not_counted() -> None:
    host = Host()
    viewer = host.feed.admit()
    await event(viewer)
    assert host.feed.num_viewers == 1
    await viewer.aclose()  # type: ignore[attr-defined]
    assert host.feed.num_viewers == 0


@on_loop
async def test_too_many_viewers_are_refused() -> None:
    host = Host()
    viewers = [await watching(host) for _ in range(MAX_VIEWERS)]
    with pytest.raises(ApiError, match="16 viewers"):
        host.feed.admit()
    assert host.feed.num_viewers == len(viewers)


@on_loop
async def test_close_ends_the_streams() -> None:
    host = Host()
    viewer = await watching(host)
    coming = asyncio.ensure_future(anext(viewer))
    await begun()
    host.feed.close()
    assert (await coming).startswith(b":")
    with pytest.raises(StopAsyncIteration):
        await anext(viewer)
    with pytest.raises(ApiError, match="draining"):
        host.feed.admit()


@on_loop
async def test_first_viewer_asks_for_a_reading_at_once() -> None:
    """The pause between readings is long without a viewer; a page need not wait for it."""
    host = Host()
    reading = asyncio.create_task(host.feed.keep_reading())
    await asyncio.sleep(0)
    viewer = await watching(host)
    name, _ = await asyncio.wait_for(event(viewer), IDLE_EVERY_S / 2)
    assert name == "snapshot"
    reading.cancel()
