"""The part of ASGI that is written by hand, for the routes that must be fast."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Final

from starlette.types import Receive, Scope, Send

from baton.clock import Clock
from baton.gateway.api.errors import ApiError, ClientGone, Headers
from baton.gateway.http.response_body import ResponseWriter

JSON: Final = b"application/json"
JSON_HEADERS: Final = [(b"content-type", JSON)]
BLOCK_BYTES: Final = 64 * 2**10
TURN_S: Final = 0.002  # writing a large answer may hold the event loop for this long


async def read_body(scope: Scope, receive: Receive, charge: Callable[[int], None]) -> bytes:
    """Return the whole body; the server bounds its size and its time. Raises ClientGone when it ends early.

    charge: called with the bytes that have come, and first with the bytes that the client announces. Its
    errors are raised.
    """
    parts, num_bytes = [], 0
    announced = header(scope, b"content-length") or ""
    num_announced = int(announced) if announced.isdecimal() else 0
    charge(num_announced)
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise ClientGone
        part = message.get("body", b"")
        num_bytes += len(part)
        if num_bytes > num_announced:
            charge(num_bytes)
        parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


async def respond(send: Send, status: int, body: bytes, headers: Headers | None = None) -> None:
    """Answer with JSON in one piece."""
    headers = [*JSON_HEADERS, (b"content-length", b"%d" % len(body)), *(headers or ())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def respond_error(send: Send, error: ApiError) -> None:
    """Answer with an error."""
    await respond(send, error.status, error.body(), error.headers())


async def respond_in_turns(send: Send, parts: Iterable[bytes], clock: Clock, writer: ResponseWriter) -> None:
    """Answer 200 with JSON that is written while `parts` are made; other tasks run every TURN_S.

    An answer longer than a block goes out in chunks at the client's pace, and no more than a block is kept.
    Raises ClientGone when the client has left.
    """
    gathered, since_s, has_begun = bytearray(), clock.now_s(), False
    for part in parts:
        gathered += part
        if len(gathered) > BLOCK_BYTES:
            if not has_begun:
                has_begun = True
                await send({"type": "http.response.start", "status": 200, "headers": JSON_HEADERS})
            await send({"type": "http.response.body", "body": bytes(gathered), "more_body": True})
            gathered.clear()
        if clock.now_s() - since_s > TURN_S:
            await asyncio.sleep(0)
            if writer.is_gone:
                raise ClientGone
            since_s = clock.now_s()
    if has_begun:
        await send({"type": "http.response.body", "body": bytes(gathered), "more_body": False})
    else:
        await respond(send, 200, bytes(gathered))


def header(scope: Scope, name: bytes) -> str | None:
    """Return the first header of that name, which is in lower case; None when there is none."""
    headers: Headers = scope["headers"]
    for key, value in headers:
        if key == name:
            return value.decode("latin-1")
    return None
