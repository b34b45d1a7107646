"""WebSockets of the gateway: uvicorn's protocol with limits on time, memory and frame rate, and a writer.

1. The handshake must end within `header_timeout_s`: the library drops some handshakes silently.
2. Bytes that the application has not received yet are charged to the tenant, from the first byte of a frame
   on, by the function that the application sets as `charge`. When that raises, the connection ends.
3. A message that has begun arrives within `body_timeout_s`, in at most MAX_FRAGMENTS frames.
4. At most MAX_SMALL_FRAMES small frames may come in a second, and at most SLICE_BYTES are parsed before the
   count is checked: so a flood of pings does not hold the event loop.
5. A ping that comes while the client does not read is not answered.

An answer is written through a `WebSocketWriter`, as one over HTTP is through a `ResponseBody`.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, cast

from starlette.websockets import WebSocket, WebSocketDisconnect
from uvicorn.config import Config
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.frames import CloseCode, Frame
from websockets.http11 import Request

from baton.errors import Overloaded, Refused
from baton.gateway.api.errors import ClientGone
from baton.gateway.http.protocol import BAD_UPGRADE, Deadline, HttpLimits, end, response

LIMITED_SOCKET: Final = "baton.socket"  # the extension of an ASGI scope that has the LimitedSocket
CLOSE_TIMEOUT_S: Final = 2.0  # for a client to say that it has heard of the end
MAX_UNCHARGED_BYTES: Final = 64 * 2**10  # before the application sets `charge`; clients send later
MAX_FRAGMENTS: Final = 8192  # of one message
SMALL_FRAME_BYTES: Final = 128
MAX_SMALL_FRAMES: Final = 1024  # in a second
SLICE_BYTES: Final = 8 * 2**10
FULL: Final = "no room for more bytes of this tenant"
MAX_UNSENT: Final = 8  # messages of an answer; with more, the client lags


class LimitedSocket(WebSocketsSansIOProtocol):
    """One WebSocket connection; the HTTP protocol hands on the whole header block in one piece."""

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
        self.charge: Callable[[int], None] | None = None  # called with the bytes that are held
        self.close_timeout = CLOSE_TIMEOUT_S
        self._limits = limits
        self._deadline = Deadline(self.loop)
        self._is_ended = False  # incoming bytes are ignored
        self._is_message_timed = False  # the deadline is that of a message
        self._queued: deque[int] = deque()  # the bytes of each message that the application has not received
        self._num_received_bytes = 0  # of the message that it has received last, until it calls `taken`
        self._second = 0
        self._num_small_frames = 0  # in this second

    def taken(self) -> None:
        """Release the last received message: the application charges it elsewhere from now on."""
        self._num_received_bytes = 0
        self._charge()

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._deadline.set(self._limits.config.header_timeout_s, self._late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), SLICE_BYTES):
            if self._is_ended or self.close_sent:
                return
            super().data_received(data[start : start + SLICE_BYTES])
            self._charge()
        if self.handshake_initiated:
            self._watch_message()
        elif not self.transport.is_closing():
            self._is_ended = True
            self.transport.write(response(BAD_UPGRADE))
            end(self.transport, self.loop)

    # What the library calls.

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if not self.close_sent:  # the application's task runs later: it finds this in its scope
            extensions = cast("dict[str, Any]", self.scope["extensions"])
            extensions[LIMITED_SOCKET] = self

    def handle_text(self, event: Frame) -> None:
        self._count(event)
        super().handle_text(event)
        event.data = b""  # the library keeps the frame until the next one

    def handle_bytes(self, event: Frame) -> None:
        self._count(event)
        super().handle_bytes(event)
        event.data = b""  # the library keeps the frame until the next one

    def handle_cont(self, event: Frame) -> None:
        self._count(event)
        if len(self.frames) >= MAX_FRAGMENTS:
            self._end(CloseCode.MESSAGE_TOO_BIG, "a message in too many frames")
        super().handle_cont(event)
        event.data = b""  # the library keeps the frame until the next one

    def handle_ping(self) -> None:
        self._count(None)
        if self.writable.is_set():
            super().handle_ping()
        else:
            self.conn.data_to_send()

    def handle_pong(self, event: Frame) -> None:
        self._count(event)
        super().handle_pong(event)

    def send_receive_event_to_app(self) -> None:
        num_bytes, num_queued = sum(map(len, self.frames)), self.queue.qsize()
        super().send_receive_event_to_app()
        if self.queue.qsize() > num_queued:
            self._queued.append(num_bytes)

    async def receive(self) -> Any:
        message = await super().receive()
        if message["type"] == "websocket.receive":
            self._num_received_bytes = self._queued.popleft()
        return message

    # Limits.

    def _charge(self) -> None:
        num_unfinished = len(self.conn.reader.buffer) + (self.conn.current_size or 0)
        num_bytes = num_unfinished + sum(self._queued) + self._num_received_bytes
        if self.charge is not None:
            try:
                self.charge(num_bytes)
            except Refused as error:  # without a time it never fits
                is_too_big = not error.retry_after_s
                self._end(CloseCode.MESSAGE_TOO_BIG if is_too_big else CloseCode.TRY_AGAIN_LATER, FULL)
            except Overloaded:
                self._end(CloseCode.TRY_AGAIN_LATER, FULL)
        elif num_bytes > MAX_UNCHARGED_BYTES:
            self._end(CloseCode.POLICY_VIOLATION, "messages before the handshake has ended")

    def _count(self, frame: Frame | None) -> None:
        """Count a frame if it is small. None: a ping, which the library does not show."""
        if frame is not None and len(frame.data) >= SMALL_FRAME_BYTES:
            return
        second = int(self.loop.time())
        if second != self._second:
            self._second, self._num_small_frames = second, 0
        self._num_small_frames += 1
        if self._num_small_frames > MAX_SMALL_FRAMES:
            self._end(CloseCode.POLICY_VIOLATION, "too many small frames")

    def _watch_message(self) -> None:
        has_begun = bool(self.conn.reader.buffer or self.frames)
        if has_begun and not self._is_message_timed:
            self._deadline.set(self._limits.config.body_timeout_s, self._late)
        elif self._is_message_timed and not has_begun:
            self._deadline.clear()
        self._is_message_timed = has_begun

    def _late(self) -> None:
        if not self.handshake_complete:
            self.transport.abort()
        elif self._is_message_timed and self.read_paused:  # for the application: the client is not to blame
            self._deadline.set(self._limits.config.body_timeout_s, self._late)
        elif self._is_message_timed:
            self._end(CloseCode.POLICY_VIOLATION, "a message did not arrive in time")

    def _end(self, code: CloseCode, reason: str) -> None:
        """Tell the client why the connection ends, and the application that the client has left."""
        if self._is_ended or self.close_sent:
            return
        self._is_ended = True
        self._limits.refused[f"websocket_{code.name.lower()}"] += 1
        self._deadline.clear()
        self.stop_keepalive()
        self.conn.fail(code, reason)
        if self.handshake_complete:
            self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        self.queue.put_nowait({"type": "websocket.disconnect", "code": int(code)})
        end(self.transport, self.loop)


class WebSocketWriter:
    """A ResponseWriter over a WebSocket: each line is a message, and a task sends them in order."""

    def __init__(self, websocket: WebSocket) -> None:
        self.on_gone: Callable[[], None] | None = None
        self.on_writable: Callable[[], None] | None = None
        self.is_gone = False
        self._websocket = websocket
        self._unsent: deque[bytes] = deque()
        self._has_unsent = asyncio.Event()
        self._has_sent_all = asyncio.Event()  # set too when the client has left
        self._has_sent_all.set()
        self._sending = asyncio.create_task(self._send())

    @property
    def lags(self) -> bool:
        return len(self._unsent) > MAX_UNSENT

    def write(self, data: bytes) -> None:
        if not self.is_gone:
            self._unsent += data.splitlines()
            self._has_unsent.set()
            self._has_sent_all.clear()

    async def sent_all(self) -> None:
        """Wait until everything is sent. Raises ClientGone when the client has left."""
        await self._has_sent_all.wait()
        if self.is_gone:
            raise ClientGone

    async def close(self) -> None:
        """Stop sending."""
        self._sending.cancel()
        with suppress(asyncio.CancelledError):
            await self._sending

    async def _send(self) -> None:
        while True:
            await self._has_unsent.wait()
            self._has_unsent.clear()
            has_lagged = False
            while self._unsent:
                has_lagged = has_lagged or self.lags
                try:
                    await self._websocket.send_text(self._unsent.popleft().decode())
                except (WebSocketDisconnect, RuntimeError, OSError):  # all mean that the client has left
                    self.is_gone = True
                    self._unsent.clear()
                    self._has_sent_all.set()
                    if self.on_gone is not None:
                        self.on_gone()
                    return
            self._has_sent_all.set()
            if has_lagged and self.on_writable is not None:
                self.on_writable()
