"""The little of ASGI that is written by hand, for the routes that must be fast."""

from collections.abc import Iterable
from typing import Final

from starlette.types import Receive, Scope, Send

from baton.gateway.api_errors import ApiError, ClientGone, Headers

JSON: Final = b"application/json"


async def read_body(receive: Receive) -> bytes:
    """All of it; the server bounds its size and its time. Raises ClientGone when it does not come."""
    parts = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise ClientGone
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


async def respond(
    send: Send,
    status: int,
    body: bytes,
    *,
    content_type: bytes = JSON,
    headers: Iterable[tuple[bytes, bytes]] = (),
) -> None:
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [
                (b"content-type", content_type),
                (b"content-length", b"%d" % len(body)),
                *headers,
            ],
        }
    )
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def respond_error(send: Send, error: ApiError) -> None:
    await respond(send, error.status, error.body(), headers=error.headers())


def header(scope: Scope, name: bytes) -> str | None:
    """The first of that name (in lower case); None when there is none."""
    headers: Headers = scope["headers"]
    for key, value in headers:
        if key == name:
            return value.decode("latin-1")
    return None
