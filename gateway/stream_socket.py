"""WebSocket `/v1/stream`: calls and answers over one connection, one call at a time.

The client sends a message, the body of a chat or of a completion; `stream` need not be set. The chunks of its
answer come as messages of their own, then `[DONE]`. A message that comes meanwhile ends the answer:
`{"cancel": true}` does no more than that, another body is the next call. Closing ends it as well.

A client that asks for nothing is closed: soon while it never has, later between two calls.
"""

import asyncio
from contextlib import suppress
from typing import Final

import msgspec
from starlette.types import Scope
from starlette.websockets import WebSocket, WebSocketDisconnect

from baton.gateway.answer_stream import DONE, Framing
from baton.gateway.api_errors import ClientGone, as_api_error, unsupported
from baton.gateway.call import Call, held_bytes
from baton.gateway.gate import log_failure
from baton.gateway.inference import Inference
from baton.gateway.socket_outlet import SocketOutlet
from baton.gateway.socket_protocol import EXTENSION, LimitedSocket

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
        outlet = SocketOutlet(websocket)
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
                    await self._answer(data, websocket.scope, outlet, hearing)
        except (WebSocketDisconnect, ClientGone):
            pass  # how every conversation ends
        finally:
            hearing.cancel()
            with suppress(asyncio.CancelledError, WebSocketDisconnect):
                await hearing
            await outlet.close()

    async def _answer(
        self, data: bytes, scope: Scope, outlet: SocketOutlet, hearing: "asyncio.Task[bytes]"
    ) -> None:
        try:
            with self._inference.reading(data, scope) as charge:
                call = await self._inference.reader.either(data, scope)
                if call.is_resumable:
                    name = "stream_options.resumable"
                    raise unsupported("resuming an answer of a WebSocket", param=name)
                charge.set(held_bytes(call))
                del data
                await self._stream(call, outlet, hearing)
        except (ClientGone, WebSocketDisconnect):
            raise
        except Exception as error:  # also a bug of ours: it ends this answer, not the connection
            answered = as_api_error(error)
            if answered.status >= 500:
                log_failure(error, scope["state"]["request_id"])
            outlet.write(answered.body() + b"\n" + DONE + b"\n")

    async def _stream(self, call: Call, outlet: SocketOutlet, hearing: "asyncio.Task[bytes]") -> None:
        with self._inference.answering(call) as answer:
            stream = self._inference.stream(answer, LINES)
            hearing.add_done_callback(lambda _: stream.gone())
            outlet.on_gone = stream.gone
            answer.start(stream)
            stream.begin(outlet)
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
