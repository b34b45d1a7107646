"""The little of ASGI that is written by hand, for the routes that must be fast."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from starlette.types import Receive, Scope, Send

from baton.gateway.api_errors import ApiError, ClientGone, Headers
from baton.gateway.tenants_door import Charge

JSON: Final = b"application/json"
BLOCK_BYTES: Final = 64 * 2**10


async def read_body(scope: Scope, receive: Receive, charge: Charge) -> bytes:
    """All of it; the server bounds its size and its time. Raises ClientGone when it does not come.

    charge: set to what has come, and at once to what the client announces. Raises what it raises.
    """
    parts, num_bytes = [], 0
    announced = header(scope, b"content-length") or ""
    num_announced = int(announced) if announced.isdecimal() else 0
    charge.set(num_announced)
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise ClientGone
        part = message.get("body", b"")
        num_bytes += len(part)
        if num_bytes > num_announced:
            charge.set(num_bytes)
        parts.append(part)
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
    """The same bytes, in blocks of BLOCK_BYTES or less: what a client does not read is not copied."""
    gathered = bytearray()
    for part in parts:
        view = memoryview(part)
        while view:
            taken = view[: BLOCK_BYTES - len(gathered)]
            gathered += taken
            view = view[len(taken) :]
            if len(gathered) == BLOCK_BYTES:
                yield bytes(gathered)
                gathered.clear()
    if gathered:
        yield bytes(gathered)


async def respond_error(send: Send, error: ApiError) -> None:
    await respond(send, error.status, error.body(), headers=error.headers())


def header(scope: Scope, name: bytes) -> str | None:
    """The first of that name (in lower case); None when there is none."""
    headers: Headers = scope["headers"]
    for key, value in headers:
        if key == name:
            return value.decode("latin-1")
    return None
