"""What the server itself refuses, before any route sees it: whole responses, ready to be written."""

import asyncio
import uuid
from typing import Final

from baton.gateway.api_errors import ApiError

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
    """Write no more, and abort in LINGER_S; until then the caller throws away what comes. A connection that
    is closed before it takes what the client has been told with it, if that has not been read.
    """
    if transport.can_write_eof():
        transport.write_eof()
    loop.call_later(LINGER_S, transport.abort)


def response(error: ApiError) -> bytes:
    """Bytes of a response after which the connection ends."""
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
