"""The routes of inference: calls are read, admitted, answered and counted.

1. A POST to `/v1/chat/completions` or `/v1/completions`, or a message of the WebSocket `/v1/stream`, is read
   into a `Call`: `BodyReader` reads an `AskedCall` from the body, the headers are checked, a seed is drawn.
2. `Limiter` admits the call, and `Answer` opens its choices.
3. `AnswerStream` writes the answer as it comes, or `AnswerCollector` keeps the answer until its end.

A client that leaves before the end cancels its call. A call that fails before its first
token is refused with a status; a call that fails later ends its stream with an error event.

Over the WebSocket a client makes one call at a time. It sends the body of a chat or of a completion; `stream`
need not be set. The chunks of the answer come as messages, then `[DONE]`. A message during an answer ends
the answer; unless the message is `{"cancel": true}`, it is the body of the next call. Closing the connection
ends the answer as well. An idle client is disconnected: soon before its first call, later between two calls.

`/tokenize` and `/detokenize` read a body in the same way, and answer with the tokens or the text.
"""

import asyncio
import math
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Final

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from baton.clock import Clock
from baton.config.gateway import GatewayConfig
from baton.errors import BatonError, InvalidRequest, Overloaded, Refused
from baton.gateway.api.answer import Answer, AnswerFormat
from baton.gateway.api.answer_stream import (
    SERVER_SENT_EVENTS,
    TYPED_EVENTS,
    AnswerCollector,
    AnswerStream,
    Framing,
    StreamProgress,
)
from baton.gateway.api.body import early_text, raw_fields
from baton.gateway.api.body_reader import ServedModel, ServedModels
from baton.gateway.api.call import AskedCall, Call
from baton.gateway.api.dialects import messages, responses
from baton.gateway.api.dialects.response_store import ResponseStore
from baton.gateway.api.dialects.typed_events import MessageFormat, ResponsesFormat
from baton.gateway.api.errors import (
    ApiError,
    ClientGone,
    answer_to,
    invalid,
    renamed,
    unsupported,
)
from baton.gateway.api.form_checker import FormChecker
from baton.gateway.api.format import DONE, answer_format
from baton.gateway.api.prompt_reader import POSTS, BodyKind, ReadPolicy, TextAnswer
from baton.gateway.http.protocol import (
    RECEIVED_S,
    RESPONSE_WRITER,
    ResponseWriter,
    blocks_of,
    check_content_type,
    header,
    read_body,
    respond_in_turns,
)
from baton.gateway.http.websocket import LIMITED_SOCKET, LimitedSocket, WebSocketWriter
from baton.gateway.metrics.metrics import Metrics
from baton.gateway.metrics.requests import RequestHistory
from baton.gateway.metrics.tracing import TRACE, Tracer
from baton.gateway.peer_gateways import PeerGateways
from baton.gateway.streams.resume import (
    HEADER,
    MAX_RESUMABLE_CHOICES,
    PARAM,
    DeliveredChoice,
    EventIds,
    ResumePoint,
)
from baton.gateway.tenants.budget import Charge
from baton.gateway.tenants.limiter import Limiter
from baton.gateway.tenants.objectives import read_objectives
from baton.gateway.tenants.tenants import Tenant
from baton.tenants import Refusal

SEED_BITS: Final = 63
MANY_ANSWERS: Final = 64  # creating more takes milliseconds, so the call yields to the event loop first
LAST_EVENT: Final = SERVER_SENT_EVENTS.before + DONE + SERVER_SENT_EVENTS.after
HEADLESS_S: Final = 45.0  # the longest wait for the headers of a stream: proxies give up after a minute
EVENT_STREAM: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
TEXT_KINDS: Final[frozenset[BodyKind]] = frozenset({"count_tokens", "tokenize", "detokenize"})
KEYS: Final[dict[BodyKind, Mapping[str, str]]] = {"response": responses.KEYS, "message": messages.KEYS}
# WebSocket
LINES: Final = Framing(b"", b"\n", b"")  # a line is a message; the connection has pings of its own
IDLE_TIMES: Final = 4  # the idle timeouts between two calls; an HTTP connection is simply opened again
MAX_CANCEL_BYTES: Final = 4096
ASLEEP: Final = (
    "the model {model!r} sleeps: wake it with `baton wake` or POST /wake_up, or start the gateway with "
    "--wake-on-request"
)
WAKE_S: Final = 10.0  # until a client may ask again for a model that sleeps
GOING_AWAY: Final = 1001  # the code of a close


class Inference:
    """Answers the calls of one gateway. To be made on the event loop that serves them."""

    def __init__(
        self,
        models: ServedModels,
        metrics: Metrics,
        limiter: Limiter,
        clock: Clock,
        config: GatewayConfig,
        event_ids: EventIds,
        forms: FormChecker,
        *,
        peers: PeerGateways | None = None,
        tracer: Tracer | None = None,
        calendar_s: Callable[[], float] = time.time,
        draw_seed: Callable[[], int] = lambda: secrets.randbits(SEED_BITS),
    ) -> None:
        """calendar_s: seconds since 1970, which clients see. draw_seed: for a call without a seed."""
        self._models = models
        self._metrics = metrics
        self._limiter = limiter
        self._clock = clock
        self._config = config
        self._event_ids = event_ids
        self._forms = forms
        self._calendar_s = calendar_s
        self._draw_seed = draw_seed
        self.responses = ResponseStore(
            max_entries=config.max_stored_responses,
            max_bytes=config.max_stored_response_bytes,
            peers=peers,
        )
        self.requests = RequestHistory(metrics, clock, calendar_s, tracer)
        self._open: set[Answer] = set()

    @property
    def posts(self) -> Mapping[str, ASGIApp]:
        """The ASGI applications that answer POSTS, by path."""
        return {
            path: partial(self._serve_text if kind in TEXT_KINDS else self._serve, kind)
            for path, (kind, _) in POSTS.items()
        }

    async def websocket(self, websocket: WebSocket) -> None:
        """Serve `/v1/stream` until the client closes or is idle for too long."""
        connection: LimitedSocket = websocket.scope["extensions"][LIMITED_SOCKET]
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

    async def read_call(self, kind: BodyKind, data: bytes, scope: Scope, charge: Charge) -> Call:
        """Return the call of a body. kind: the route's; "either" over the WebSocket. charge: the body's.

        Raises InvalidRequest and ApiError for a fault of the client, and the errors of `Charge.add`.
        """
        tenant = scope["state"]["tenant"]
        sla, scheduling_key = read_objectives(scope, tenant)
        arrival_s = self._clock.now_s()
        received_s = min(scope.get("extensions", {}).get(RECEIVED_S, arrival_s), arrival_s)
        model = self._models.of_body(data)
        policy, adapters = self._read_policy(model, tenant), dict(model.adapters)  # of one moment
        history = await self._history(data, tenant.name, charge) if kind == "response" else b""
        asked = await model.bodies.read(kind, data, policy, tenant.name, history)
        assert isinstance(asked, AskedCall)
        del data, history
        self._metrics.unknown_keys += asked.num_unknown
        await self._check_form(asked, tenant)
        if asked.response is not None:
            responses.check_conversation(asked.response, self.responses.max_bytes)
        event_id = header(scope, HEADER) if scope["type"] == "http" else None
        resumed = self._event_ids.open(event_id, tenant.name, self._calendar_s()) if event_id else None
        if not asked.cache_salt:  # a salt of the caller's shares no pages with other tenants
            for prompt in asked.prompts:
                num_public = await model.bodies.public.num_tokens(tenant.public_texts, prompt.token_ids)
                prompt.num_public_tokens = num_public
        sampling, adapter = asked.sampling, adapters.get(asked.model)
        if sampling.seed is None:  # choices differ by their number, not by their seed
            seed = self._draw_seed() if resumed is None else resumed.seed
            sampling = msgspec.structs.replace(sampling, seed=seed)
        of_gateway = {
            "sampling": sampling,
            "model": model.name if adapter is None else adapter.name,
            "served": model.key,
            "adapter": None if adapter is None else adapter.adapter,
            "tenant": tenant,
            "sla": sla,
            "scheduling_key": scheduling_key,
            "arrival_s": arrival_s,
            "received_s": received_s,
            "trace": scope["state"].get(TRACE),
            "resumed": resumed,
        }
        call = Call(**msgspec.structs.asdict(asked) | of_gateway)
        if call.is_resumable and scope["type"] == "websocket":
            raise unsupported("stream_options.resumable", "true over a WebSocket")
        self._check(call, policy.longest())
        return call

    async def _check_form(self, asked: AskedCall, tenant: Tenant) -> None:
        form = asked.sampling.structured_outputs
        if form is not None:
            try:
                await self._forms.check(tenant.name, form)
            except InvalidRequest as error:
                raise invalid(asked.form_key, str(error)) from None

    def _model_of(self, call: Call) -> ServedModel:
        return self._models.of(call.served or None)

    def _read_policy(self, model: ServedModel, tenant: Tenant) -> ReadPolicy:
        may_store = self.responses.is_on
        return model.read_policy(tenant, is_strict=self._config.strict, may_store=may_store)

    async def _history(self, data: bytes, tenant: str, charge: Charge) -> bytes:
        """Return the conversation that the body of a response continues, charged. Raises ApiError 404."""
        previous = early_text(data, "previous_response_id")
        if previous is None:
            return b""
        found = await self.responses.find(tenant, previous, param="previous_response_id")
        charge.add(found.num_bytes)  # before it is copied: the copy may wait long for a helper
        return found.conversation

    def _check(self, call: Call, longest: int) -> None:
        if call.num_answers > self._config.max_open_requests:
            raise invalid(
                "n",
                f"the call has {call.num_answers} answers over all prompts; a gateway writes at most "
                f"{self._config.max_open_requests} at once (gateway.max_open_requests)",
            )
        if call.is_resumable or call.resumed is not None:
            self._check_resumable(call)
        num_entries, most = call.num_answer_entries(longest), self._config.max_answer_entries
        if num_entries > most:
            raise InvalidRequest(
                f"the answer may have {num_entries} entries, which are tokens x n x (logprobs + 1) over all "
                f"prompts; at most {most} are written for a call (gateway.max_answer_entries): ask for fewer"
            )

    def _check_resumable(self, call: Call) -> None:
        """Raise ApiError 400 for a call that cannot be resumed, and for the event id of another call."""
        name = "stream_options.resumable"
        if not call.is_streamed:
            raise invalid(name, "only a stream can be resumed; set stream as well")
        if call.num_answers > MAX_RESUMABLE_CHOICES:
            limit = f"at most {MAX_RESUMABLE_CHOICES} answers over all prompts, got {call.num_answers}"
            raise invalid(name, limit)
        resumed = call.resumed
        if resumed is not None and resumed.digest != call.digest(self._model_of(call).fingerprint):
            raise ApiError(
                400,
                f"{PARAM}: the id is of another request, or the model has been replaced since; "
                "send the same body as before, or no id to begin anew",
                code="other_request",
                param=PARAM,
            )

    def _charge(self, scope: Scope) -> Charge:
        """Return a charge for the tenant's input bytes, for a `with`."""
        tenant = scope["state"]["tenant"]
        return self._limiter.inputs.charge(tenant.name, tenant.policy.quotas)

    @asynccontextmanager
    async def _answering(self, call: Call) -> AsyncIterator[tuple[Answer, Charge]]:
        """Yield an answer that has not started, and the charge for the parts of it that are kept.

        The charge has the log probabilities of the prompts already. At the end of the `with` the answer is
        counted and cancelled. Raises the errors of Limiter.enter and of `Charge.add`, and the error of
        `give_up`.
        """
        await self._yield_for(call)
        model = self._model_of(call)
        if model.view.is_asleep and not self._config.wake_on_request:
            raise ApiError(503, ASLEEP.format(model=model.name), code="model_asleep", retry_after_s=WAKE_S)
        permit, now_s = self._limiter.enter(call), self._clock.now_s
        try:
            answer = Answer(call, model.service, model.bodies.reader.tokenizer)
        except Exception:
            permit.leave("failed", 0, now_s())
            raise
        self._open.add(answer)
        answer.observe = lambda choice, delta: permit.tokens(choice.index, len(delta.token_ids), now_s())
        failure: Exception | None = None
        try:
            await self._yield_for(call)
            if answer.error is not None:  # the gateway is being stopped
                raise answer.error
            quotas = call.scheduling_key.quotas
            with self._limiter.answers.charge(call.tenant.name, quotas, is_counted=False) as kept:
                kept.add(call.prompt_logprob_bytes)
                yield answer, kept
        except ClientGone:
            self._metrics.clients_gone += 1
            raise
        except Exception as error:
            failure = error
            raise
        finally:
            answer.cancel()
            self._open.remove(answer)
            outcome = _outcome(answer, failure or answer.error)
            permit.leave(outcome, answer.num_cached_tokens, now_s())
            self.requests.finished(answer, outcome)
            answer.choices.clear()  # a reference cycle: it would wait for the garbage collector

    async def _yield_for(self, call: Call) -> None:
        """End this turn of the event loop before a call of many answers takes the next one."""
        if call.num_answers > MANY_ANSWERS:
            await asyncio.sleep(0)

    async def _serve(self, kind: BodyKind, scope: Scope, receive: Receive, send: Send) -> None:
        with self._charge(scope) as charge:
            check_content_type(header(scope, b"content-type"))
            data = await read_body(scope, receive, charge.set)
            try:
                call = await self.read_call(kind, data, scope, charge)
            except (ApiError, InvalidRequest) as error:
                raise renamed(error, KEYS.get(kind, {})) from None
            del data
            charge.set(call.held_bytes)
            writer: ResponseWriter = scope["extensions"][RESPONSE_WRITER]
            if call.resumed is not None and call.resumed.is_whole(has_usage=call.has_usage):
                await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM})
                await send({"type": "http.response.body", "body": LAST_EVENT, "more_body": False})
                return
            async with self._answering(call) as (answer, kept):
                if writer.is_gone:
                    raise ClientGone
                serve = self._serve_stream if call.is_streamed else self._serve_whole
                await serve(answer, kept, writer, send)

    async def _serve_text(self, kind: BodyKind, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer `/tokenize` and `/detokenize` as vLLM does; bytes are charged as those of calls are."""
        tenant = scope["state"]["tenant"]
        with self._limiter.answers.charge(tenant.name, tenant.policy.quotas) as held:
            with self._charge(scope) as charge:
                check_content_type(header(scope, b"content-type"))
                data = await read_body(scope, receive, charge.set)
                model = self._models.of_body(data)
                policy = self._read_policy(model, tenant)
                read = await model.bodies.read(kind, data, policy, tenant.name)
                del data  # its charge ends here, and the client may take long to read the answer
            assert isinstance(read, TextAnswer)
            self._metrics.unknown_keys += read.num_unknown
            held.add(len(read.json))  # until the client has read it
            await respond_in_turns(
                send, blocks_of(read.json), self._clock, scope["extensions"][RESPONSE_WRITER]
            )

    async def _serve_whole(self, answer: Answer, kept: Charge, writer: ResponseWriter, send: Send) -> None:
        collector = AnswerCollector(answer, kept)
        writer.on_gone = collector.gone
        answer.start(collector)
        form = self._format(answer, int(self._calendar_s()))
        await respond_in_turns(send, form.whole(await collector.wait()), self._clock, writer)

    async def _serve_stream(self, answer: Answer, kept: Charge, writer: ResponseWriter, send: Send) -> None:
        if answer.call.dialect == "openai":
            stream = self._stream(answer, SERVER_SENT_EVENTS)
        else:  # a typed answer is kept to its end: its last events repeat its parts
            stream = self._stream(answer, TYPED_EVENTS, kept)
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

    def _stream(self, answer: Answer, framing: Framing, kept: Charge | None = None) -> AnswerStream:
        """kept: charged with the text of the answer as it comes."""
        resumed = answer.call.resumed
        created_s = int(self._calendar_s()) if resumed is None else resumed.created_s
        form = self._format(answer, created_s)
        progress = self._progress(answer, form, created_s) if answer.call.is_resumable else None
        return AnswerStream(answer, form, framing, progress, kept)

    def _format(self, answer: Answer, created_s: int) -> AnswerFormat:
        if answer.call.dialect == "responses":
            return ResponsesFormat(answer, created_s, self.responses, self._calendar_s)
        if answer.call.dialect == "messages":
            return MessageFormat(answer, created_s)
        return answer_format(answer, created_s)

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
                digest=call.digest(self._model_of(call).fingerprint),
                seed=seed,
                created_s=created_s,
                expires_s=0,
                has_shown_usage=False,
                choices=(DeliveredChoice(),) * len(answer.choices),
            )

        def seal(point: ResumePoint) -> bytes:
            expires_s = math.ceil(self._calendar_s() + self._config.resume_window_s)
            return self._event_ids.seal(msgspec.structs.replace(point, expires_s=expires_s), call.tenant.name)

        return StreamProgress(point, form, seal)

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
                messages, patience_s = [receiving.result()], self._config.idle_timeout_s * IDLE_TIMES
                # The errors of a client that sends wrong bodies and does not read must not fill the memory.
                await writer.sent_all()
                connection.taken()
                receiving = asyncio.create_task(_receive(websocket))
                # This method keeps no name for the body: it would live until the next message.
                await self._answer_message(messages.pop(), websocket.scope, writer, receiving)
        except (WebSocketDisconnect, ClientGone):
            pass  # the end of every conversation
        finally:
            receiving.cancel()
            with suppress(asyncio.CancelledError, WebSocketDisconnect):
                await receiving
            await writer.close()

    async def _answer_message(
        self, data: bytes, scope: Scope, writer: WebSocketWriter, receiving: "asyncio.Task[bytes]"
    ) -> None:
        if _is_cancel(data):
            return
        try:
            with self._charge(scope) as charge:
                charge.add(len(data))
                call = await self.read_call("either", data, scope, charge)
                charge.set(call.held_bytes)
                del data
                await self._stream_messages(call, writer, receiving)
        except (ClientGone, WebSocketDisconnect):
            raise
        except Exception as error:  # a bug of ours too ends this answer, not the connection
            answered = answer_to(error, scope["state"]["request_id"])
            writer.write(answered.body() + b"\n" + DONE + b"\n")

    async def _stream_messages(
        self, call: Call, writer: WebSocketWriter, receiving: "asyncio.Task[bytes]"
    ) -> None:
        async with self._answering(call) as (answer, _):
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
    return len(data) <= MAX_CANCEL_BYTES and bytes(raw_fields(data).get("cancel", b"")) == b"true"
