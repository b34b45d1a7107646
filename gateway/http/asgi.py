"""The little of ASGI that is written by hand, for the routes that must be fast."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from starlette.types import Receive, Scope, Send

from baton.clock import Clock
from baton.gateway.api.errors import ApiError, ClientGone, Headers
from baton.gateway.http.response_body import ResponseWriter
from baton.gateway.tenants.limiter import TextCharge

JSON: Final = b"application/json"
BLOCK_BYTES: Final = 64 * 2**10


async def read_body(scope: Scope, receive: Receive, charge: TextCharge) -> bytes:
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


# What is written at the end of a turn of the event loop, and what takes many of them.
#
# A turn may bring several batches of tokens for one stream, the more so the busier the process is. They leave
# in one chunk, by one system call, when the turn ends: so what a token costs falls as the load rises.

JSON_HEADERS: Final = [(b"content-type", JSON)]
TURN_S: Final = 0.002  # so long a large answer may be written before others have a turn


class WriteCoalescer:
    """Of one event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._writers: list[Callable[[], None]] = []

    def add(self, write: Callable[[], None]) -> None:
        """Call `write` once this turn is over."""
        if not self._writers:
            self._loop.call_soon(self._end)
        self._writers.append(write)

    def _end(self) -> None:
        writers, self._writers = self._writers, []
        for write in writers:
            write()


async def respond_in_turns(send: Send, parts: Iterable[bytes], clock: Clock, writer: ResponseWriter) -> None:
    """Answer 200 with JSON that is written while `parts` are made; others have a turn every TURN_S.

    What is longer than a block goes out in chunks as the client reads it, so no more than a block is kept.
    Raises ClientGone when nobody waits any more.
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
