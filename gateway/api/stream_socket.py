"""WebSocket `/v1/stream`: calls and answers over one connection, one call at a time.

The client sends a message, the body of a chat or of a completion; `stream` need not be set. The chunks of its
answer come as messages of their own, then `[DONE]`. A message that comes meanwhile ends the answer:
`{"cancel": true}` does no more than that, another body is the next call. Closing ends it as well.

A client that asks for nothing is closed: soon while it never has, later between two calls.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import msgspec
from starlette.types import Scope
from starlette.websockets import WebSocket, WebSocketDisconnect

from baton.gateway.api.answer_stream import DONE, Framing
from baton.gateway.api.call import Call, held_bytes
from baton.gateway.api.errors import ClientGone, as_api_error, unsupported
from baton.gateway.api.inference import Inference
from baton.gateway.http.auth import log_failure
from baton.gateway.http.websocket import EXTENSION, LimitedSocket

# An outlet over a WebSocket: lines are messages, sent one after the other by a task.

MAX_UNSENT: Final = 8  # messages: with more, the client lags


class WebSocketWriter:
    """See outlet.Outlet."""

    def __init__(self, websocket: WebSocket) -> None:
        self.on_gone: Callable[[], None] | None = None
        self.on_writable: Callable[[], None] | None = None
        self.is_gone = False
        self._websocket = websocket
        self._unsent: deque[bytes] = deque()
        self._has_unsent = asyncio.Event()
        self._writer = asyncio.create_task(self._write())

    @property
    def lags(self) -> bool:
        return len(self._unsent) > MAX_UNSENT

    def write(self, data: bytes) -> None:
        if not self.is_gone:
            self._unsent += data.splitlines()
            self._has_unsent.set()

    async def close(self) -> None:
        self._writer.cancel()
        with suppress(asyncio.CancelledError):
            await self._writer

    async def _write(self) -> None:
        while True:
            await self._has_unsent.wait()
            self._has_unsent.clear()
            has_lagged = False
            while self._unsent:
                has_lagged = has_lagged or self.lags
                try:
                    await self._websocket.send_text(self._unsent.popleft().decode())
                except (WebSocketDisconnect, RuntimeError, OSError):  # however the server says it
                    self._leave()
                    return
            if has_lagged and self.on_writable is not None:
                self.on_writable()

    def _leave(self) -> None:
        self.is_gone = True
        self._unsent.clear()
        if self.on_gone is not None:
            self.on_gone()


_FIELDS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
LINES: Final = Framing(b"", b"\n", b"")  # a line is a message; the connection has pings of its own

IDLE_TIMES: Final = 4  # as long as an HTTP connection, which clients take up again by themselves
MAX_CANCEL_BYTES: Final = 4096
GOING_AWAY: Final = 1001  # the code of a close


class StreamSocket:
    def __init__(self, inference: Inference, idle_timeout_s: float) -> None:
        self._inference = inference
        self._idle_timeout_s = idle_timeout_s

    async def serve(self, websocket: WebSocket) -> None:
        """Until the client closes, or is idle for too long."""
        connection: LimitedSocket = websocket.scope["extensions"][EXTENSION]
        with self._inference.arriving(websocket.scope) as charge:
            connection.charge = charge
            try:
                await websocket.accept()
                await self._serve(websocket, connection)
            finally:
                connection.charge = None

    async def _serve(self, websocket: WebSocket, connection: LimitedSocket) -> None:
        writer = WebSocketWriter(websocket)
        hearing = asyncio.create_task(_hear(websocket))
        patience_s = self._idle_timeout_s
        try:
            while True:
                await asyncio.wait((hearing,), timeout=patience_s)
                if not hearing.done():
                    await websocket.close(GOING_AWAY, "nothing was asked for")
                    return
                data, patience_s = hearing.result(), self._idle_timeout_s * IDLE_TIMES
                connection.taken()
                hearing = asyncio.create_task(_hear(websocket))
                if not _is_cancel(data):
                    await self._answer(data, websocket.scope, writer, hearing)
        except (WebSocketDisconnect, ClientGone):
            pass  # how every conversation ends
        finally:
            hearing.cancel()
            with suppress(asyncio.CancelledError, WebSocketDisconnect):
                await hearing
            await writer.close()

    async def _answer(
        self, data: bytes, scope: Scope, writer: WebSocketWriter, hearing: "asyncio.Task[bytes]"
    ) -> None:
        try:
            with self._inference.reading(data, scope) as charge:
                call = await self._inference.reader.either(data, scope)
                if call.is_resumable:
                    name = "stream_options.resumable"
                    raise unsupported("resuming an answer of a WebSocket", param=name)
                charge.set(held_bytes(call))
                del data
                await self._stream(call, writer, hearing)
        except (ClientGone, WebSocketDisconnect):
            raise
        except Exception as error:  # also a bug of ours: it ends this answer, not the connection
            answered = as_api_error(error)
            if answered.status >= 500:
                log_failure(error, scope["state"]["request_id"])
            writer.write(answered.body() + b"\n" + DONE + b"\n")

    async def _stream(self, call: Call, writer: WebSocketWriter, hearing: "asyncio.Task[bytes]") -> None:
        with self._inference.answering(call) as answer:
            stream = self._inference.stream(answer, LINES)
            hearing.add_done_callback(lambda _: stream.gone())
            writer.on_gone = stream.gone
            answer.start(stream)
            stream.begin(writer)
            with suppress(ClientGone):  # or another message has come: the loop above reads it
                await self._inference.follow(stream)
            if stream.is_given_up:
                raise ClientGone


async def _hear(websocket: WebSocket) -> bytes:
    """The next message. Raises WebSocketDisconnect when there will be none."""
    message = await websocket.receive()
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message.get("code", 1000))
    text: str | None = message.get("text")
    data: bytes | None = message.get("bytes")
    return (data or b"") if text is None else text.encode("utf-8", "surrogatepass")


def _is_cancel(data: bytes) -> bool:
    """A longer message than MAX_CANCEL_BYTES is a body: it is not looked into here."""
    if len(data) > MAX_CANCEL_BYTES:
        return False
    try:
        return bytes(_FIELDS.decode(data).get("cancel", b"")) == b"true"
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return False
