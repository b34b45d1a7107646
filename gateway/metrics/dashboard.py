"""`/ui`: the page that shows the cluster live. Its files are in `ui/` and load nothing from elsewhere.

| path | |
|---|---|
| `/ui` | the page |
| `/ui/NAME` | a script or the style sheet of the page |
| `/ui/events` | history and snapshots as server-sent events (live_feed.py) |
| `/ui/workers/ID` | every field of one worker |

The page also asks `/admin/requests` and `/admin/decisions/ID`.
"""

from pathlib import Path
from typing import Final

import msgspec
from fastapi import FastAPI, Response
from starlette.responses import StreamingResponse

from baton.gateway.api.errors import ApiError
from baton.gateway.metrics.live_feed import LiveFeed
from baton.gateway.streams.request_stream import Service

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
