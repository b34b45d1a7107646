"""uvicorn's HTTP/1.1 with the limits that a server on its own is not safe without.

A connection is always in exactly one of these states:

1. It awaits a header block, or part of one has come: `header_timeout_s`, MAX_HEADERS and MAX_HEADER_BYTES
   hold, and at most MAX_PIPELINED earlier requests have no answer yet.
2. The body arrives: `body_timeout_s` and `max_body_bytes` hold, counted as it comes.
3. The request is being answered, for any time, unless the client reads nothing for `stall_timeout_s`.
4. The connection is idle, for `idle_timeout_s`.

A request that breaks a limit gets an answer, unless one has already begun, and the connection ends. The
server reads and drops bytes for LINGER_S after that: a client that is still writing may not read the answer
before.
"""

import asyncio
import uuid
from collections.abc import Callable
from typing import Any, Final

import httptools
import msgspec
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from baton.gateway.api.errors import ApiError
from baton.gateway.http.response_body import EXTENSION, ResponseBody

# Errors of the server itself, before any route sees the request.
REASONS: Final = {
    400: b"Bad Request",
    408: b"Request Timeout",
    413: b"Content Too Large",
    431: b"Request Header Fields Too Large",
    503: b"Service Unavailable",
}
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
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"connection", b"close"),
        (b"x-request-id", f"req-{uuid.uuid4().hex}".encode()),
        *error.headers(),
    ]
    lines = [b"HTTP/1.1 %d %s" % (error.status, REASONS[error.status])]
    lines += [b"%s: %s" % entry for entry in headers]
    return b"\r\n".join([*lines, b"", body])


MAX_HEADERS: Final = 64
MAX_PIPELINED: Final = 16  # unanswered requests of a connection
MAX_HEADER_BYTES: Final = 32 * 2**10
HEADER_OVERHEAD_BYTES: Final = 4  # ": " and the line's end
WRITE_HIGH_BYTES: Final = 32 * 2**10  # in memory, beside the kernel's buffer: more, and the client lags
WRITE_LOW_BYTES: Final = 8 * 2**10
RESERVED_PATHS: Final = frozenset({b"/health", b"/ping", b"/metrics"})


class HttpLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits that all connections of a server share."""

    max_connections: int
    max_body_bytes: int
    header_timeout_s: float
    body_timeout_s: float
    stall_timeout_s: float
    refused: Callable[[str], None]  # called with the code of each refusal
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
        self._deadline: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
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
        self._must_come_within(self._limits.header_timeout_s)
        is_full = len(self.connections) > self._limits.max_connections
        if is_full and not self._evict():
            self._refuse(TOO_MANY)
            return
        self._limits.waiting[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._limits.waiting.pop(self, None)
        self._forget_deadline()
        self._forget_stall()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._leave_bodies()

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            return
        if self._in_header:
            self._num_raw_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._upgrade()
        except httptools.HttpParserError:
            self._refuse(BAD_REQUEST)
        if self._in_header and self._num_raw_bytes > MAX_HEADER_BYTES:
            self._refuse(HEADERS_TOO_LARGE)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._forget_stall()
        self._stall = self.loop.call_later(self._limits.stall_timeout_s, self._stalled)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._forget_stall()
        for writer in self._bodies[:1]:  # later responses have not begun
            writer.writable()

    # What the parser calls.

    def on_message_begin(self) -> None:
        if self._refusal is not None:
            raise httptools.HttpParserError("refused")  # or the rest of what came would be parsed
        super().on_message_begin()
        self._unset_keepalive_if_required()
        self._in_header = True
        self._num_header_bytes = 0
        self._num_body_bytes = 0
        self._must_come_within(self._limits.header_timeout_s)
        self.scope["extensions"] = {}

    def on_url(self, url: bytes) -> None:
        self._count_header_bytes(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_header_bytes(len(name) + len(value) + HEADER_OVERHEAD_BYTES)
        if self._refusal is None:
            super().on_header(name, value)
            name, value = self.headers[-1]
            if name == b"content-length" and _length(value) > self._limits.max_body_bytes:
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
        self._must_come_within(self._limits.body_timeout_s)
        super().on_headers_complete()
        if is_upgrade:
            return
        # The task that serves the request runs later: it finds this in its scope.
        writer = ResponseBody(self.cycle)
        self._bodies.append(writer)
        extensions: Any = self.scope["extensions"]
        extensions[EXTENSION] = writer

    def on_body(self, body: bytes) -> None:
        if self._refusal is not None:
            return
        self._num_body_bytes += len(body)
        if self._num_body_bytes > self._limits.max_body_bytes:
            self._refuse(BODY_TOO_LARGE)
            return
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._forget_deadline()
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
        self._limits.refused("evicted")
        oldest.transport.abort()
        return True

    def _uses_the_reserve(self) -> bool:
        """The last tenth of the connections is reserved for RESERVED_PATHS."""
        most = self._limits.max_connections
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
        self._forget_deadline()
        if self._refusal is None and self._should_upgrade():
            self.handle_websocket_upgrade()

    def _must_come_within(self, seconds: float) -> None:
        self._forget_deadline()
        self._deadline = self.loop.call_later(seconds, self._late)

    def _late(self) -> None:
        self._deadline = None
        if self.flow.read_paused:  # an earlier answer is on its way: the client is not to blame
            self._must_come_within(self._limits.body_timeout_s)
        elif self._num_raw_bytes or not self._in_header:
            self._refuse(TOO_SLOW)
        else:
            self.transport.close()

    def _stalled(self) -> None:
        self._limits.refused("stalled")
        self.transport.abort()

    def _refuse(self, error: ApiError) -> None:
        if self._refusal is not None:
            return
        self._refusal = error
        self._limits.refused(error.code or "")
        self._forget_deadline()
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

    def _forget_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _forget_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None


def _length(value: bytes) -> int:
    return int(value) if value.isdigit() else 0  # the parser refuses other values
