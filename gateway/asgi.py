"""The little of ASGI that is written by hand, for the routes that must be fast."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from starlette.types import Receive, Scope, Send

from baton.gateway.api_errors import ApiError, ClientGone, Headers

JSON: Final = b"application/json"
BLOCK_BYTES: Final = 64 * 2**10


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


async def respond_in_blocks(send: Send, status: int, parts: Sequence[bytes]) -> None:
    """JSON of any length: the client's pace is kept, and what parts share is not copied before its time."""
    num_bytes = sum(map(len, parts))
    if num_bytes <= BLOCK_BYTES:
        await respond(send, status, b"".join(parts))
        return
    headers = [(b"content-type", JSON), (b"content-length", b"%d" % num_bytes)]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    for block in _blocks(parts):
        await send({"type": "http.response.body", "body": block, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _blocks(parts: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes, in blocks of BLOCK_BYTES or somewhat more."""
    gathered, num_bytes = list[bytes](), 0
    for part in parts:
        gathered.append(part)
        num_bytes += len(part)
        if num_bytes >= BLOCK_BYTES:
            yield b"".join(gathered)
            gathered, num_bytes = [], 0
    if num_bytes:
        yield b"".join(gathered)


async def respond_error(send: Send, error: ApiError) -> None:
    await respond(send, error.status, error.body(), headers=error.headers())


def header(scope: Scope, name: bytes) -> str | None:
    """The first of that name (in lower case); None when there is none."""
    headers: Headers = scope["headers"]
    for key, value in headers:
        if key == name:
            return value.decode("latin-1")
    return None
