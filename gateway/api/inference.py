"""`/v1/chat/completions`, `/v1/completions` and the WebSocket `/v1/stream`: calls are answered and counted.

A client that leaves before the end has cancelled, wherever its call is. A call that fails before its first
token is refused with a status; a call that fails later ends its stream with an error event.

Over the WebSocket a client makes one call at a time. It sends the body of a chat or of a completion; `stream`
need not be set. The chunks of the answer come as messages, then `[DONE]`. A message that comes meanwhile ends
the answer: `{"cancel": true}` does no more than that, another body is the next call. Closing ends the answer
as well. A client that asks for nothing is closed: soon when it never has, later between two calls.
"""

import asyncio
import math
from array import array
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from io import StringIO
from typing import Final, TypeAlias

import msgspec
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from baton.clock import Clock
from baton.config.gateway import GatewayConfig
from baton.errors import BatonError, Overloaded, Refused
from baton.gateway.api.answer import Answer, AnswerChoice, AnswerFormat, Delta
from baton.gateway.api.answer_stream import (
    DONE,
    SERVER_SENT_EVENTS,
    AnswerStream,
    Framing,
    StreamProgress,
    WriteCoalescer,
)
from baton.gateway.api.call import Call
from baton.gateway.api.errors import ClientGone, as_api_error, unsupported
from baton.gateway.api.format import PackedLogprobs, answer_format
from baton.gateway.api.prompt_reader import BodyKind
from baton.gateway.http.asgi import read_body, respond_in_turns
from baton.gateway.http.auth import log_failure
from baton.gateway.http.response_body import EXTENSION, ResponseWriter
from baton.gateway.http.websocket import EXTENSION as SOCKET
from baton.gateway.http.websocket import LimitedSocket
from baton.gateway.metrics.metrics import Metrics
from baton.gateway.streams.resume import EventIds, ResumePoint, Shown
from baton.gateway.tenants.limiter import Charge, Limiter, Permit
from baton.gateway.text.tools import ToolCall
from baton.gateway.text.work import ServedModel
from baton.tenants import Refusal

BYTES_PER_CHARACTER: Final = 4
BYTES_PER_TOKEN_ID: Final = 4
LAST_EVENT: Final = SERVER_SENT_EVENTS.before + DONE + SERVER_SENT_EVENTS.after
HEADLESS_S: Final = 45.0  # the longest wait for the headers of a stream: proxies give up after a minute
EVENT_STREAM: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
# WebSocket
LINES: Final = Framing(b"", b"\n", b"")  # a line is a message; the connection has pings of its own
MAX_UNSENT: Final = 8  # messages; with more, the client lags
IDLE_TIMES: Final = 4  # the idle timeouts between two calls; an HTTP connection is simply opened again
MAX_CANCEL_BYTES: Final = 4096
GOING_AWAY: Final = 1001  # the code of a close

ReadCall: TypeAlias = Callable[[BodyKind, bytes, Scope], Awaitable[Call]]
_FIELDS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


class AnswerCollector:
    """An AnswerListener that keeps the answer until its end, in little memory, charged as it grows."""

    def __init__(
        self, answer: Answer, observe: Callable[[AnswerChoice, Delta], None], charge: Charge
    ) -> None:
        self._answer = answer
        self._observe = observe
        self._charge = charge
        call = answer.call
        keeps_ids = call.returns_token_ids or call.sampling.logprobs is not None
        self._kept = [_Kept(keeps_ids=keeps_ids) for _ in answer.choices]
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def wait(self) -> list[Delta]:
        """Return each whole choice. Raises the error that ended the answer, or ClientGone."""
        await self._end
        kept, self._kept = self._kept, []
        return [choice.joined() for choice in kept]

    def advanced(self, choice: AnswerChoice, delta: Delta) -> None:
        """See AnswerListener."""
        self._observe(choice, delta)
        try:
            self._charge.add(self._kept[choice.index].add(delta))
        except BatonError as error:
            self._kept.clear()
            self._charge.release()  # at once: the next call finds the room
            self._answer.fail(error)

    def finished(self) -> None:
        """See AnswerListener."""
        if not self._end.done():
            self._end.set_result(None)

    def failed(self, error: Exception) -> None:
        """See AnswerListener."""
        if not self._end.done():
            self._end.set_exception(error)

    def gone(self) -> None:
        """Cancel the answer: the client has left."""
        self._answer.cancel()
        self.failed(ClientGone())


class _Kept:
    """The deltas of one choice."""

    def __init__(self, *, keeps_ids: bool) -> None:
        self._text = StringIO()
        self._keeps_ids = keeps_ids
        self._token_ids = array("i")
        self._logprobs = PackedLogprobs()
        self._tool_calls: list[ToolCall] = []

    def add(self, delta: Delta) -> int:
        """Keep a delta; returns the approximate bytes that it takes."""
        before = self._logprobs.num_bytes + BYTES_PER_TOKEN_ID * len(self._token_ids)
        self._text.write(delta.text)
        if self._keeps_ids:
            self._token_ids.extend(delta.token_ids)
        self._logprobs.extend(delta.logprobs)
        self._tool_calls += delta.tool_calls
        num_chars = len(delta.text) + sum(len(call.arguments) for call in delta.tool_calls)
        after = self._logprobs.num_bytes + BYTES_PER_TOKEN_ID * len(self._token_ids)
        return BYTES_PER_CHARACTER * num_chars + after - before

    def joined(self) -> Delta:
        return Delta(self._text.getvalue(), self._token_ids.tolist(), self._logprobs, self._tool_calls)


class Inference:
    """Answers the calls of one gateway. To be made on the event loop that serves them."""

    def __init__(
        self,
        read_call: ReadCall,
        model: ServedModel,
        metrics: Metrics,
        limiter: Limiter,
        clock: Clock,
        config: GatewayConfig,
        event_ids: EventIds,
        calendar_s: Callable[[], float],
    ) -> None:
        """calendar_s: seconds since 1970, which clients see."""
        self._read_call = read_call
        self._model = model
        self._metrics = metrics
        self._limiter = limiter
        self._clock = clock
        self._config = config
        self._event_ids = event_ids
        self._calendar_s = calendar_s
        self._coalescer = WriteCoalescer()
        self._open: dict[Answer, Permit] = {}

    async def chat(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application of `/v1/chat/completions`."""
        await self._serve("chat", scope, receive, send)

    async def completions(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application of `/v1/completions`."""
        await self._serve("completion", scope, receive, send)

    async def websocket(self, websocket: WebSocket) -> None:
        """Serve `/v1/stream` until the client closes or is idle for too long."""
        connection: LimitedSocket = websocket.scope["extensions"][SOCKET]
        with self._charge(websocket.scope) as charge:
            connection.charge = charge.set
            try:
                await websocket.accept()
                await self._serve_socket(websocket, connection)
            finally:
                connection.charge = None

    def give_up(self, error: BatonError) -> None:
        """End every call that is being answered."""
        for answer in list(self._open):
            answer.fail(error)

    def _charge(self, scope: Scope) -> Charge:
        """Return a charge for the tenant's input bytes, for a `with`."""
        tenant = scope["state"]["tenant"]
        return self._limiter.inputs.charge(tenant.name, tenant.policy.quotas)

    @contextmanager
    def _answering(self, call: Call) -> Iterator[Answer]:
        """Give an answer that has not started. It is counted however it ends, and nothing of it runs on.

        Raises the errors of Limiter.enter.
        """
        answer = Answer(call, self._model.service, self._model.text.tokenizer)
        permit = self._open[answer] = self._limiter.enter(call)
        failure: Exception | None = None
        self._metrics.num_open += 1
        self._metrics.prompt_tokens += call.num_prompt_tokens
        try:
            yield answer
        except ClientGone:
            self._metrics.clients_gone += 1
            raise
        except Exception as error:
            failure = error
            raise
        finally:
            answer.cancel()
            del self._open[answer]
            permit.leave(_outcome(answer, failure or answer.error))
            self._metrics.num_open -= 1
            self._metrics.cached_tokens += answer.num_cached_tokens
            answer.choices.clear()  # they refer to the answer: the ring would wait for the collector
            self._metrics.duration.observe(self._clock.now_s() - call.arrival_s)

    async def _serve(self, kind: BodyKind, scope: Scope, receive: Receive, send: Send) -> None:
        with self._charge(scope) as charge:
            call = await self._read_call(kind, await read_body(scope, receive, charge.set), scope)
            charge.set(call.held_bytes)
            writer: ResponseWriter = scope["extensions"][EXTENSION]
            if call.resumed is not None and call.resumed.is_whole(has_usage=call.has_usage):
                await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM})
                await send({"type": "http.response.body", "body": LAST_EVENT, "more_body": False})
                return
            with self._answering(call) as answer:
                if writer.is_gone:
                    raise ClientGone
                if call.is_streamed:
                    await self._serve_stream(answer, writer, send)
                else:
                    await self._serve_whole(answer, writer, send)

    async def _serve_whole(self, answer: Answer, writer: ResponseWriter, send: Send) -> None:
        call = answer.call
        quotas = call.scheduling_key.quotas
        with self._limiter.answers.charge(call.tenant.name, quotas, is_counted=False) as charge:
            charge.add(call.unpacked_bytes)
            collector = AnswerCollector(answer, self._observer(answer), charge)
            writer.on_gone = collector.gone
            answer.start(collector)
            form = answer_format(answer, int(self._calendar_s()))
            await respond_in_turns(send, form.whole(await collector.wait()), self._clock, writer)

    async def _serve_stream(self, answer: Answer, writer: ResponseWriter, send: Send) -> None:
        stream = self._stream(answer, SERVER_SENT_EVENTS)
        writer.on_gone = stream.gone
        answer.start(stream)
        # The headers go out after the first token: until then the call may still be refused with a status.
        # That is likely while no worker has the call; a worker may be silent for longer than clients wait.
        is_late, wait_until_s = False, self._clock.now_s() + HEADLESS_S
        while not await stream.wait(self._config.ping_interval_s):
            is_late = True
            if answer.is_placed or self._clock.now_s() >= wait_until_s:
                break
        if stream.error is not None:
            raise stream.error
        if stream.is_gone:
            raise ClientGone
        await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM})
        stream.begin(writer)
        if is_late:
            stream.ping()
        await self._follow(stream)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _stream(self, answer: Answer, framing: Framing) -> AnswerStream:
        resumed = answer.call.resumed
        created_s = int(self._calendar_s()) if resumed is None else resumed.created_s
        form = answer_format(answer, created_s)
        progress = self._progress(answer, form, created_s) if answer.call.is_resumable else None
        return AnswerStream(answer, form, framing, self._coalescer, self._observer(answer), progress)

    async def _follow(self, stream: AnswerStream) -> None:
        """Wait for the end of a stream that has begun. Raises ClientGone when its client has left."""
        while not stream.is_over:
            if not await stream.wait(self._config.ping_interval_s):
                stream.ping()
        if stream.is_given_up:
            self._metrics.clients_given_up += 1
        if stream.is_gone:
            raise ClientGone

    def _progress(self, answer: Answer, form: AnswerFormat, created_s: int) -> StreamProgress:
        """Return the progress of a resumable stream. An id expires `resume_window_s` after it was sent."""
        call, point = answer.call, answer.call.resumed
        if point is None:
            seed = call.sampling.seed
            assert seed is not None
            point = ResumePoint(
                answer=answer.name,
                digest=call.digest(self._model.fingerprint),
                seed=seed,
                created_s=created_s,
                expires_s=0,
                has_shown_usage=False,
                choices=(Shown(),) * len(answer.choices),
            )

        def seal(point: ResumePoint) -> bytes:
            expires_s = math.ceil(self._calendar_s() + self._config.resume_window_s)
            return self._event_ids.seal(msgspec.structs.replace(point, expires_s=expires_s), call.tenant.name)

        return StreamProgress(point, form, seal)

    def _observer(self, answer: Answer) -> Callable[[AnswerChoice, Delta], None]:
        """Return the function that counts tokens and their times."""
        metrics, now_s, call, permit = self._metrics, self._clock.now_s, answer.call, self._open[answer]
        last_s: dict[int, float] = {}

        def observe(choice: AnswerChoice, delta: Delta) -> None:
            at_s = now_s()
            metrics.generated_tokens += len(delta.token_ids)
            permit.tokens(len(delta.token_ids), at_s)
            before_s = last_s.get(choice.index)
            if before_s is not None:
                metrics.itl.observe(at_s - before_s)
            elif not last_s:
                metrics.ttft.observe(at_s - call.arrival_s)
            last_s[choice.index] = at_s

        return observe

    async def _serve_socket(self, websocket: WebSocket, connection: LimitedSocket) -> None:
        writer = WebSocketWriter(websocket)
        receiving = asyncio.create_task(_receive(websocket))
        patience_s = self._config.idle_timeout_s
        try:
            while True:
                await asyncio.wait((receiving,), timeout=patience_s)
                if not receiving.done():
                    await websocket.close(GOING_AWAY, "nothing was asked for")
                    return
                data, patience_s = receiving.result(), self._config.idle_timeout_s * IDLE_TIMES
                connection.taken()
                receiving = asyncio.create_task(_receive(websocket))
                if not _is_cancel(data):
                    await self._answer_message(data, websocket.scope, writer, receiving)
        except (WebSocketDisconnect, ClientGone):
            pass  # the end of every conversation
        finally:
            receiving.cancel()
            with suppress(asyncio.CancelledError, WebSocketDisconnect):
                await receiving
            await writer.close()

    async def _answer_message(
        self, data: bytes, scope: Scope, writer: "WebSocketWriter", receiving: "asyncio.Task[bytes]"
    ) -> None:
        try:
            with self._charge(scope) as charge:
                charge.add(len(data))
                call = await self._read_call("either", data, scope)
                if call.is_resumable:
                    name = "stream_options.resumable"
                    raise unsupported("resuming an answer of a WebSocket", param=name)
                charge.set(call.held_bytes)
                del data
                await self._stream_messages(call, writer, receiving)
        except (ClientGone, WebSocketDisconnect):
            raise
        except Exception as error:  # a bug of ours too ends this answer, not the connection
            answered = as_api_error(error)
            if answered.status >= 500:
                log_failure(error, scope["state"]["request_id"])
            writer.write(answered.body() + b"\n" + DONE + b"\n")

    async def _stream_messages(
        self, call: Call, writer: "WebSocketWriter", receiving: "asyncio.Task[bytes]"
    ) -> None:
        with self._answering(call) as answer:
            stream = self._stream(answer, LINES)
            receiving.add_done_callback(lambda _: stream.gone())
            writer.on_gone = stream.gone
            answer.start(stream)
            stream.begin(writer)
            with suppress(ClientGone):  # also when another message has come, which the next turn reads
                await self._follow(stream)
            if stream.is_given_up:
                raise ClientGone


def _outcome(answer: Answer, error: Exception | None) -> str:
    """Return a key of TenantCounts.calls."""
    if answer.is_whole:
        return "answered"
    if error is None:
        return "gone"
    if isinstance(error, Refused):
        return error.refusal.value
    return Refusal.NO_ROOM.value if isinstance(error, Overloaded) else "failed"


class WebSocketWriter:
    """A ResponseWriter over a WebSocket: each line is a message, and a task sends them in order."""

    def __init__(self, websocket: WebSocket) -> None:
        self.on_gone: Callable[[], None] | None = None
        self.on_writable: Callable[[], None] | None = None
        self.is_gone = False
        self._websocket = websocket
        self._unsent: deque[bytes] = deque()
        self._has_unsent = asyncio.Event()
        self._sending = asyncio.create_task(self._send())

    @property
    def lags(self) -> bool:
        """See ResponseWriter."""
        return len(self._unsent) > MAX_UNSENT

    def write(self, data: bytes) -> None:
        """See ResponseWriter."""
        if not self.is_gone:
            self._unsent += data.splitlines()
            self._has_unsent.set()

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
                    if self.on_gone is not None:
                        self.on_gone()
                    return
            if has_lagged and self.on_writable is not None:
                self.on_writable()


async def _receive(websocket: WebSocket) -> bytes:
    """Return the next message. Raises WebSocketDisconnect at the end."""
    message = await websocket.receive()
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message.get("code", 1000))
    text: str | None = message.get("text")
    data: bytes | None = message.get("bytes")
    return (data or b"") if text is None else text.encode("utf-8", "surrogatepass")


def _is_cancel(data: bytes) -> bool:
    """Tell `{"cancel": true}` from a body; a message above MAX_CANCEL_BYTES is a body and is not decoded."""
    if len(data) > MAX_CANCEL_BYTES:
        return False
    try:
        return bytes(_FIELDS.decode(data).get("cancel", b"")) == b"true"
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return False
