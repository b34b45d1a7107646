"""HTTP/1.1 of the gateway: uvicorn's protocol with limits, and the bodies of requests and responses.

A connection is always in exactly one of these states:

1. The connection awaits a header block, or part of a block has come. `header_timeout_s`, MAX_HEADERS and
   MAX_HEADER_BYTES hold, and at most MAX_PIPELINED earlier requests have no answer yet.
2. The body arrives: `body_timeout_s` and `max_body_bytes` hold. Bytes are counted as they come.
3. The request is being answered, for any time, unless the client reads nothing for `stall_timeout_s`.
4. The connection is idle, for `idle_timeout_s`.

A request that breaks a limit gets an answer, unless an answer has already begun, and the connection ends. The
server reads and drops bytes for LINGER_S after that: a client that is still writing may not read the answer
before.

A stream writes its body past ASGI, from callbacks, through the `ResponseWriter` in its scope
(docs/decisions/0008). The other routes answer with `respond` or `respond_in_turns`.
"""

import asyncio
import re
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from http import HTTPStatus
from typing import Any, Final, Protocol, cast

import httptools
import msgspec
from starlette.types import Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from baton.clock import Clock
from baton.config.gateway import GatewayConfig
from baton.gateway.api.errors import ApiError, ClientGone, Headers

RECEIVED_S: Final = "baton.received_s"  # the extension that has the time of the request's first byte
RESPONSE_WRITER: Final = "baton.response_writer"  # the extension of an ASGI scope that has the ResponseWriter
JSON: Final = b"application/json"
JSON_HEADERS: Final = [(b"content-type", JSON)]
BLOCK_BYTES: Final = 64 * 2**10
TURN_S: Final = 0.002  # writing a large answer may hold the event loop for this long
RETRY_AFTER_S: Final = 1.0
LINGER_S: Final = 2.0
BAD_REQUEST: Final = ApiError(400, "the request is not valid HTTP/1.1", code="bad_request")
BAD_UPGRADE: Final = ApiError(
    400, "a WebSocket begins with a GET that has no body and a valid handshake", code="bad_upgrade"
)
HEADERS_TOO_LARGE: Final = ApiError(431, "the request's headers are too large", code="headers_too_large")
BODY_TOO_LARGE: Final = ApiError(413, "the request's body is too large", code="body_too_large")
TOO_MANY_AT_ONCE: Final = ApiError(
    400, "too many requests of one connection wait for their answers", code="too_many_pipelined"
)
TOO_SLOW: Final = ApiError(408, "the request did not arrive in time", code="request_timeout")
TOO_MANY: Final = ApiError(
    503, "too many connections are open", code="overloaded", retry_after_s=RETRY_AFTER_S
)
# The header that offers a protocol other than WebSockets: Java's HttpClient offers HTTP/2 (h2c). The parser
# drops the body of a request with an Upgrade. IGNORED has the same length; a body of JSON has no such line.
OTHER_PROTOCOL: Final = re.compile(rb"\r\nupgrade:(?![ \t]*websocket)", re.IGNORECASE)
IGNORED: Final = b"\r\nignored:"
MAX_HEADERS: Final = 64
MAX_PIPELINED: Final = 16  # unanswered requests of a connection
MAX_HEADER_BYTES: Final = 32 * 2**10
HEADER_OVERHEAD_BYTES: Final = 4  # ": " and the line's end
WRITE_HIGH_BYTES: Final = 32 * 2**10  # in memory, beside the kernel's buffer: more, and the client lags
WRITE_LOW_BYTES: Final = 8 * 2**10
RESERVED_PATHS: Final = frozenset({b"/health", b"/ping", b"/metrics"})


class ResponseWriter(Protocol):
    """The body of a streamed response, written from callbacks, without a task.

    A response begins and ends as ASGI says; in between it writes to the ResponseWriter in its scope.
    """

    on_gone: Callable[[], None] | None  # called when the client has left
    on_writable: Callable[[], None] | None  # called when the client no longer lags

    @property
    def is_gone(self) -> bool:
        """The client has left."""

    @property
    def lags(self) -> bool:
        """The client does not keep up: more bytes would wait in memory."""

    def write(self, data: bytes) -> None:
        """Write a part of the body; without effect when the client has left."""


def check_content_type(given: str | None) -> None:
    """Raise ApiError 400 for a Content-Type other than JSON. None: the client sent none."""
    kind = (given or JSON.decode()).partition(";")[0].strip().lower()
    if kind != JSON.decode():
        message = f"Content-Type: expected {JSON.decode()}, got {kind[:80]!r}"
        raise ApiError(400, message, code="unsupported_media_type", param="Content-Type")


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


def blocks_of(body: bytes) -> Iterator[bytes]:
    """Return the parts of a body for `respond_in_turns`."""
    return (body[start : start + BLOCK_BYTES] for start in range(0, len(body), BLOCK_BYTES))


def header(scope: Scope, name: bytes) -> str | None:
    """Return the first header of that name, which is in lower case; None when there is none."""
    headers: Headers = scope["headers"]
    for key, value in headers:
        if key == name:
            return value.decode("latin-1")
    return None


def end(transport: asyncio.WriteTransport, loop: asyncio.AbstractEventLoop) -> None:
    """Write no more, and abort in LINGER_S; until then the caller drops incoming bytes.

    Closing at once would discard an answer that the client has not read yet.
    """
    if transport.can_write_eof():
        transport.write_eof()
    loop.call_later(LINGER_S, transport.abort)


def response(error: ApiError) -> bytes:
    """Return the bytes of a response after which the connection ends."""
    body = error.body()
    headers = [
        *JSON_HEADERS,
        (b"content-length", b"%d" % len(body)),
        (b"connection", b"close"),
        (b"x-request-id", f"req-{uuid.uuid4().hex}".encode()),
        *error.headers(),
    ]
    lines = [b"HTTP/1.1 %d %s" % (error.status, HTTPStatus(error.status).phrase.encode())]
    lines += [b"%s: %s" % entry for entry in headers]
    return b"\r\n".join([*lines, b"", body])


class Deadline:
    """A timer of one connection. Only the running timer refers to the connection, so no cycle outlives it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self._planned_s: float | None = None

    def set(self, seconds: float, passed: Callable[[], None]) -> None:
        """Start the timer, or start it again. passed: called when the time is over."""
        self.clear()
        self._timer = self._loop.call_later(seconds, passed)

    def plan(self, seconds: float) -> None:
        """Plan the timer; `start` starts it.

        A request that arrives in one piece clears the plan first, and costs no timer.
        """
        self._planned_s = seconds

    def start(self, passed: Callable[[], None]) -> None:
        """Start the timer if that is planned. passed: as in `set`."""
        if self._planned_s is not None:
            self.set(self._planned_s, passed)

    def clear(self) -> None:
        """Stop the timer."""
        self._planned_s = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class HttpLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits and counts that all connections of a server share."""

    config: GatewayConfig
    refused: Counter[str]  # connections, by the code of the refusal
    waiting: dict[Any, None] = {}  # connections without a request, the longest first: they are evicted first


class LimitedProtocol(HttpToolsProtocol):
    """One connection. Its `ResponseBody`s wait in the order of their requests."""

    def __init__(
        self,
        limits: HttpLimits,
        *,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits = limits
        self._settings = limits.config
        self._deadline = Deadline(self.loop)
        self._stall = Deadline(self.loop)
        self._refusal: ApiError | None = None  # nothing is parsed or answered any more
        self._in_header = True
        self._num_raw_bytes = 0  # that came while a header block was not whole
        self._num_header_bytes = 0
        self._num_body_bytes = 0
        self._bodies: list[ResponseBody] = []  # of requests that are not answered yet, the oldest first

    # What asyncio calls.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(WRITE_HIGH_BYTES, WRITE_LOW_BYTES)
        self._deadline.set(self._settings.header_timeout_s, self._late)
        is_full = len(self.connections) > self._settings.max_connections
        if is_full and not self._evict():
            self._refuse(TOO_MANY)
            return
        self._limits.waiting[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._limits.waiting.pop(self, None)
        self._deadline.clear()
        self._stall.clear()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._leave_bodies()

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            return
        if self._in_header:
            self._num_raw_bytes += len(data)
        if b"pgrade:" in data:  # a quick look, before the expression
            data = OTHER_PROTOCOL.sub(IGNORED, data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._upgrade()
        except httptools.HttpParserError:
            self._refuse(BAD_REQUEST)
        if self._in_header and self._num_raw_bytes > MAX_HEADER_BYTES:
            self._refuse(HEADERS_TOO_LARGE)
        self._deadline.start(self._late)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall.set(self._settings.stall_timeout_s, self._stalled)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stall.clear()
        for writer in self._bodies[:1]:  # later responses have not begun
            writer.writable()

    # What the parser calls.

    def on_message_begin(self) -> None:
        if self._refusal is not None:
            raise httptools.HttpParserError("refused")  # or the rest of what came would be parsed
        super().on_message_begin()
        self._unset_keepalive_if_required()
        self._in_header = True
        # The block has begun, perhaps behind another request.
        self._num_raw_bytes = max(1, self._num_raw_bytes)
        self._num_header_bytes = 0
        self._num_body_bytes = 0
        self._deadline.plan(self._settings.header_timeout_s)
        extensions: Any = {RECEIVED_S: time.monotonic()}
        self.scope["extensions"] = extensions

    def on_url(self, url: bytes) -> None:
        self._count_header_bytes(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_header_bytes(len(name) + len(value) + HEADER_OVERHEAD_BYTES)
        if self._refusal is None:
            super().on_header(name, value)
            name, value = self.headers[-1]
            if name == b"content-length" and _length(value) > self._settings.max_body_bytes:
                self._refuse(BODY_TOO_LARGE)

    def on_headers_complete(self) -> None:
        self._in_header = False
        self._limits.waiting.pop(self, None)
        self._num_raw_bytes = 0
        if len(self.headers) > MAX_HEADERS:
            self._refuse(HEADERS_TOO_LARGE)
        if self._refusal is not None:
            return
        if len(self._bodies) >= MAX_PIPELINED:
            self._refuse(TOO_MANY_AT_ONCE)
            return
        if self._uses_the_reserve():
            self._refuse(TOO_MANY)
            return
        is_upgrade = self.parser.should_upgrade() and self._should_upgrade()
        if is_upgrade and not self._may_upgrade():
            self._refuse(BAD_UPGRADE)
            return
        self._deadline.plan(self._settings.body_timeout_s)
        super().on_headers_complete()
        if is_upgrade:
            return
        # The task that serves the request runs later: it finds this in its scope.
        writer = ResponseBody(self.cycle)
        self._bodies.append(writer)
        extensions: Any = self.scope["extensions"]
        extensions[RESPONSE_WRITER] = writer

    def on_body(self, body: bytes) -> None:
        if self._refusal is not None:
            return
        self._num_body_bytes += len(body)
        if self._num_body_bytes > self._settings.max_body_bytes:
            self._refuse(BODY_TOO_LARGE)
            return
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._deadline.clear()
        self._num_raw_bytes = 0
        if self._refusal is None:
            super().on_message_complete()

    # Ends.

    def on_response_complete(self) -> None:
        for writer in self._bodies:
            if writer.is_complete:
                writer.end()
        self._bodies = [writer for writer in self._bodies if not writer.is_complete]
        super().on_response_complete()
        if not self._bodies and not self.transport.is_closing():
            self._limits.waiting[self] = None

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection, with a short time for unwritten bytes."""
        super().timeout_keep_alive_handler()
        self.loop.call_later(LINGER_S, self.transport.abort)

    def _count_header_bytes(self, num_bytes: int) -> None:
        self._num_header_bytes += num_bytes
        if self._num_header_bytes > MAX_HEADER_BYTES or len(self.headers) > MAX_HEADERS:
            self._refuse(HEADERS_TOO_LARGE)

    def _evict(self) -> bool:
        """End the connection that has been idle for longest. Returns False when none is idle."""
        oldest = next(iter(self._limits.waiting), None)
        if oldest is None:
            return False
        del self._limits.waiting[oldest]
        self._limits.refused["evicted"] += 1
        oldest.transport.abort()
        return True

    def _uses_the_reserve(self) -> bool:
        """Return whether this request takes one of the last connections, which are for RESERVED_PATHS."""
        most = self._settings.max_connections
        return len(self.connections) > most - most // 10 and self.url not in RESERVED_PATHS

    def _may_upgrade(self) -> bool:
        """Allow a GET without a body, when no earlier request of the connection is being answered."""
        has_body = any(
            name == b"transfer-encoding" or (name == b"content-length" and value != b"0")
            for name, value in self.headers
        )
        return self.parser.get_method() == b"GET" and not has_body and not self._bodies

    def _upgrade(self) -> None:
        """Hand the connection on to the WebSocket protocol, which has a deadline of its own."""
        self._deadline.clear()
        if self._refusal is None and self._should_upgrade():
            self.handle_websocket_upgrade()

    def _late(self) -> None:
        if self.flow.read_paused:  # an earlier answer is on its way: the client is not to blame
            self._deadline.set(self._settings.body_timeout_s, self._late)
        elif self._num_raw_bytes or not self._in_header:
            self._refuse(TOO_SLOW)
        else:
            self.transport.close()

    def _stalled(self) -> None:
        self._limits.refused["stalled"] += 1
        self.transport.abort()

    def _refuse(self, error: ApiError) -> None:
        if self._refusal is not None:
            return
        self._refusal = error
        self._limits.refused[error.code or ""] += 1
        self._deadline.clear()
        has_begun = any(writer.has_begun for writer in self._bodies)
        self._leave_bodies()
        self.pipeline.clear()
        self.flow.resume_reading()
        if not has_begun:
            self.transport.write(response(error))
        end(self.transport, self.loop)

    def _leave_bodies(self) -> None:
        bodies, self._bodies = self._bodies, []
        for body in bodies:
            body.leave()


def _length(value: bytes) -> int:
    return int(value) if value.isdigit() else 0  # the parser refuses other values


class ResponseBody:
    """A ResponseWriter for a response with chunked encoding, which uvicorn begins and ends."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self.on_gone: Callable[[], None] | None = None
        self.on_writable: Callable[[], None] | None = None
        self._cycle = cycle
        self._transport = _HeadFirst(cycle)
        cycle.transport = cast(Any, self._transport)

    @property
    def is_gone(self) -> bool:
        return self._cycle.disconnected

    @property
    def lags(self) -> bool:
        return self._cycle.flow.write_paused

    @property
    def has_begun(self) -> bool:
        return self._cycle.response_started

    @property
    def is_complete(self) -> bool:
        return self._cycle.response_complete

    def write(self, data: bytes) -> None:
        cycle = self._cycle
        if not cycle.disconnected and not cycle.response_complete:
            self._transport.write(b"%x\r\n%s\r\n" % (len(data), data))

    def end(self) -> None:
        """Release the response when it is complete."""
        self._transport.flush()
        self._cycle.transport = self._transport.below
        # A ring of references would wait for the collector.
        self.on_gone = self.on_writable = None
        extensions: Any = self._cycle.scope["extensions"]
        extensions.clear()

    def leave(self) -> None:
        """Note that the client has left, or is no longer listened to."""
        if not self._cycle.response_complete:
            self._cycle.disconnected = True
            self._cycle.message_event.set()
            if self.on_gone is not None:
                self.on_gone()

    def writable(self) -> None:
        if not self._cycle.response_complete and self.on_writable is not None:
            self.on_writable()


class _HeadFirst:
    """The transport of a cycle. The first write after the response has started is the head."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self.below = cycle.transport
        self._head: bytes | None = None  # b"" once it has been written

    def write(self, data: bytes) -> None:
        if self._head is None and self._cycle.response_started:
            self._head = data
        elif self._head:
            self.below.write(self._head + data)
            self._head = b""
        else:
            self.below.write(data)

    def flush(self) -> None:
        if self._head:
            self.below.write(self._head)
            self._head = b""

    def close(self) -> None:
        self.flush()
        self.below.close()

    def is_closing(self) -> bool:
        return self.below.is_closing()
