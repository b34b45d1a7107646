"""`/ui`, the page that shows the cluster live, and the feed that it shares with `baton top`.

| path | |
|---|---|
| `/ui` | the page; its files are in `ui/` and load nothing from elsewhere |
| `/ui/NAME` | a script or the style sheet of the page |
| `/ui/events` | 15 minutes of points, then a snapshot a second, as server-sent events |
| `/ui/workers/ID` | every field of one worker |

The page also asks `/admin/requests` and `/admin/decisions/ID`. The feed:

1. `keep_reading` takes a reading every second while a viewer is connected, every IDLE_EVERY_S otherwise.
2. Each reading becomes a point, from the readings of the last WINDOW_S. Points are kept for HISTORY_S.
3. While viewers are connected each reading becomes a snapshot as well, encoded once for all of them.
4. A viewer gets the event `history`, a list of points, then the event `snapshot` of each reading. A viewer
   that reads slowly misses snapshots and gets later ones.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import msgspec
from fastapi import FastAPI, Response
from starlette.responses import StreamingResponse

from baton.clock import Clock
from baton.gateway.api.errors import ApiError
from baton.gateway.metrics.exporter import Exporter
from baton.gateway.metrics.snapshot import Point, Reading, ReadingWindow, read
from baton.gateway.streams.request_stream import Service
from baton.messages.operations import Status

EVERY_S: Final = 1.0
IDLE_EVERY_S: Final = 5.0
WINDOW_S: Final = 10.0
HISTORY_S: Final = 900.0
MAX_POINTS: Final = 1024  # a bound for clocks that jump; HISTORY_S ends points before
MAX_VIEWERS: Final = 16


class LiveFeed:
    """The points and the viewers of one gateway."""

    def __init__(self, exporter: Exporter, service: Service, clock: Clock, *, model: str) -> None:
        """exporter: tells the counts of the gateways. service: tells the status. model: its name."""
        self._exporter = exporter
        self._service = service
        self._clock = clock
        self._model = model
        self._points: deque[Point] = deque(maxlen=MAX_POINTS)
        self._readings: deque[Reading] = deque()  # of the last WINDOW_S, and one before
        self.num_viewers = 0  # that are connected
        self._is_closed = False
        self._latest = b""  # the last snapshot as an event
        self._next = asyncio.Event()  # set when a snapshot is written, then replaced
        self._wanted = asyncio.Event()  # set by the first viewer

    async def keep_reading(self) -> None:
        """Take readings until cancelled."""
        while True:
            await self.take()
            pause_s = EVERY_S if self.num_viewers else IDLE_EVERY_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._wanted.wait()
            self._wanted.clear()

    async def take(self) -> None:
        """Take one reading: keep its point, and send its snapshot to the viewers."""
        gateways = await self._exporter.gateways()
        status = self._service.status or Status()
        reading = read(self._clock.now_s(), gateways, status)
        self._readings.append(reading)
        while len(self._readings) > 2 and self._readings[1].time_s <= reading.time_s - WINDOW_S:
            self._readings.popleft()
        window = ReadingWindow(self._readings[0], reading, status)
        point = window.point()
        self._keep(point)
        if self.num_viewers:
            self._tell(_event("snapshot", window.snapshot(self._model, point)))

    def _keep(self, point: Point) -> None:
        self._points.append(point)
        while self._points[0].time_s < point.time_s - HISTORY_S:
            self._points.popleft()

    def _tell(self, event: bytes) -> None:
        told, self._latest, self._next = self._next, event, asyncio.Event()
        told.set()

    def admit(self) -> AsyncIterator[bytes]:
        """Return the events of a new viewer. Raises ApiError 503 when there are too many."""
        if self.num_viewers >= MAX_VIEWERS or self._is_closed:
            message = "draining" if self._is_closed else f"{MAX_VIEWERS} viewers watch this gateway already"
            raise ApiError(503, message, code="too_many_viewers", retry_after_s=IDLE_EVERY_S)
        return self._events()

    async def _events(self) -> AsyncIterator[bytes]:
        self.num_viewers += 1
        try:
            if self.num_viewers == 1:
                self._wanted.set()
            yield _event("history", list(self._points))
            while not self._is_closed:
                await self._next.wait()
                yield self._latest
        finally:
            self.num_viewers -= 1

    def close(self) -> None:
        """End the streams of all viewers. May be called twice."""
        self._is_closed = True
        self._tell(b": draining\n\n")


def _event(name: str, value: object) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode(value))


FOLDER: Final = Path(__file__).with_name("ui")
PAGE: Final = "index.html"
TYPES: Final = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
HEADERS: Final = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "cache-control": "no-store",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def add_dashboard_routes(app: FastAPI, feed: LiveFeed, service: Service) -> None:
    """Add `/ui` and the paths below it."""
    files = {path.name: path.read_bytes() for path in FOLDER.iterdir() if path.suffix in TYPES}

    @app.get("/ui", include_in_schema=False)
    async def page() -> Response:
        return _file(PAGE, files[PAGE])

    @app.get("/ui/events", include_in_schema=False)
    async def events() -> Response:
        return StreamingResponse(feed.admit(), media_type="text/event-stream", headers=HEADERS)

    @app.get("/ui/workers/{worker_id}", include_in_schema=False)
    async def worker(worker_id: str) -> Response:
        workers = () if service.status is None else service.status.workers
        found = next((each for each in workers if each.worker.id == worker_id), None)
        if found is None:
            raise ApiError(404, "there is no such worker", code="not_found")
        return Response(msgspec.json.encode(found), media_type="application/json", headers=HEADERS)

    @app.get("/ui/{name}", include_in_schema=False)
    async def file(name: str) -> Response:
        if name not in files:
            raise ApiError(404, "there is no such file", code="not_found")
        return _file(name, files[name])


def _file(name: str, content: bytes) -> Response:
    return Response(content, media_type=TYPES[Path(name).suffix], headers=HEADERS)
