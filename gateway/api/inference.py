"""`/v1/chat/completions` and `/v1/completions`: a call is read, answered, and counted.

Who leaves before the end has cancelled, wherever the call is. A call that fails before its first token is
refused with a status; one that fails later ends its stream with an error event.
"""

import asyncio
import math
from array import array
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from io import StringIO
from typing import Final, TypeAlias

import msgspec
from starlette.types import Receive, Scope, Send

from baton.clock import Clock
from baton.errors import BatonError, Overloaded, Refused
from baton.gateway.api.answer import Answer, AnswerChoice, Delta
from baton.gateway.api.answer_stream import (
    DONE,
    NOTHING_SHOWN,
    SERVER_SENT_EVENTS,
    AnswerStream,
    Framing,
    StreamProgress,
)
from baton.gateway.api.call import Call, digest_of, held_bytes, unpacked_bytes
from baton.gateway.api.call_reader import CallReader
from baton.gateway.api.errors import ClientGone
from baton.gateway.api.format import AnswerFormat, PackedLogprobs, answer_format
from baton.gateway.api.prompt_reader import Kind
from baton.gateway.http.asgi import WriteCoalescer, read_body, respond_in_blocks, respond_in_turns
from baton.gateway.http.response_body import EXTENSION, ResponseWriter
from baton.gateway.metrics.metrics import Metrics
from baton.gateway.streams.resume import EventIds, ResumePoint
from baton.gateway.tenants.limiter import Limiter, Permit, TextCharge
from baton.gateway.text.tools import ToolCall
from baton.gateway.text.work import ServedModel
from baton.tenants import Refusal

# An answer that is sent in one piece.

BYTES_PER_CHARACTER: Final = 4
BYTES_PER_TOKEN_ID: Final = 4


class AnswerCollector:
    """A Listener that keeps everything until the end, in little memory, which is charged as it grows."""

    def __init__(
        self, answer: Answer, observe: Callable[[AnswerChoice, Delta], None], charge: TextCharge
    ) -> None:
        self._answer = answer
        self._observe = observe
        self._charge = charge
        self._kept = [_Kept() for _ in answer.choices]
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def wait(self) -> list[Delta]:
        """What each choice has become. Raises the error that ended it; ClientGone when nobody waits."""
        await self._end
        kept, self._kept = self._kept, []
        return [choice.joined() for choice in kept]

    def advanced(self, choice: AnswerChoice, delta: Delta) -> None:
        self._observe(choice, delta)
        try:
            self._charge.add(self._kept[choice.index].add(delta))
        except BatonError as error:
            self._kept.clear()
            self._charge.release()  # at once: the next call that asks finds the room
            self._answer.fail(error)

    def finished(self) -> None:
        if not self._end.done():
            self._end.set_result(None)

    def failed(self, error: BatonError) -> None:
        if not self._end.done():
            self._end.set_exception(error)

    def gone(self) -> None:
        """The client has left."""
        self._answer.cancel()
        if not self._end.done():
            self._end.set_exception(ClientGone())


class _Kept:
    """The deltas of one choice."""

    def __init__(self) -> None:
        self._text = StringIO()
        self._token_ids = array("i")
        self._logprobs = PackedLogprobs()
        self._tool_calls: list[ToolCall] = []

    def add(self, delta: Delta) -> int:
        """Keep a delta; returns how many bytes that takes, about."""
        before = self._logprobs.num_bytes
        self._text.write(delta.text)
        self._token_ids.extend(delta.token_ids)
        self._logprobs.extend(delta.logprobs)
        self._tool_calls += delta.tool_calls
        num_chars = len(delta.text) + sum(len(call.arguments) for call in delta.tool_calls)
        num_bytes = BYTES_PER_CHARACTER * num_chars + BYTES_PER_TOKEN_ID * len(delta.token_ids)
        return num_bytes + self._logprobs.num_bytes - before

    def joined(self) -> Delta:
        return Delta(self._text.getvalue(), self._token_ids.tolist(), self._logprobs, self._tool_calls)


ReadCall: TypeAlias = Callable[[bytes, Scope], Awaitable[Call]]
LAST_EVENT: Final = SERVER_SENT_EVENTS.before + DONE + SERVER_SENT_EVENTS.after
HEADLESS_S: Final = 45.0  # that a stream may be without a head: proxies give up after a minute of silence
EVENT_STREAM: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Inference:
    def __init__(
        self,
        reader: CallReader,
        model: ServedModel,
        metrics: Metrics,
        clock: Clock,
        *,
        calendar_s: Callable[[], float],
        ping_interval_s: float,
        door: Limiter,
        event_ids: EventIds,
        resume_window_s: float,
    ) -> None:
        """To be made on the loop that serves. `calendar_s`: seconds since 1970, for clients to see."""
        self.reader = reader
        self.ping_interval_s = ping_interval_s
        self._model = model
        self._metrics = metrics
        self._clock = clock
        self._calendar_s = calendar_s
        self._event_ids = event_ids
        self._resume_window_s = resume_window_s
        self.door = door
        self._turn = WriteCoalescer()
        self._open: dict[Answer, Permit] = {}

    async def chat(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        await self._serve(self.reader.chat, scope, receive, send)

    async def completions(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        await self._serve(self.reader.completion, scope, receive, send)

    def arriving(self, scope: Scope) -> TextCharge:
        """Charge the tenant for what comes, for a `with`."""
        tenant = scope["state"]["tenant"]
        return self.door.inputs.charge(tenant.name, tenant.policy.quotas)

    @contextmanager
    def reading(self, data: bytes, scope: Scope) -> Iterator[TextCharge]:
        """Charge the tenant for a body that has come. Raises Refused and Overloaded."""
        with self.arriving(scope) as charge:
            charge.add(len(data))
            yield charge

    @contextmanager
    def answering(self, call: Call) -> Iterator[Answer]:
        """An answer, not started yet. Whatever way it ends, it is counted, and nothing of it runs on.

        Raises Refused, Overloaded and ApiError, where there is no room for it; see Door.
        """
        text = self._model.text
        answer = Answer(call, self._model.service, text.tokenizer if text.has_tokenizer else None)
        permit = self._open[answer] = self.door.enter(call)
        failure: Exception | None = None
        self._metrics.num_open += 1
        self._metrics.prompt_tokens += answer.num_prompt_tokens
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
            answer.choices.clear()  # they refer to it: the ring would wait for the collector
            self._metrics.duration.observe(self._clock.now_s() - call.arrival_s)

    def give_up(self, error: BatonError) -> None:
        """End every call that is being answered."""
        for answer in list(self._open):
            answer.fail(error)

    def stream(self, answer: Answer, framing: Framing) -> AnswerStream:
        resumed = answer.call.resumed
        created_s = int(self._calendar_s()) if resumed is None else resumed.created_s
        form = self._form(answer, created_s)
        progress = self._progress(answer, form, created_s) if answer.call.is_resumable else None
        return AnswerStream(answer, form, framing, self._turn, self._observer(answer), progress)

    async def follow(self, stream: AnswerStream) -> None:
        """Wait for the end of a stream that has begun. Raises ClientGone when its client has left."""
        while not stream.is_over:
            if not await stream.wait(self.ping_interval_s):
                stream.ping()
        if stream.is_given_up:
            self._metrics.clients_given_up += 1
        if stream.is_gone:
            raise ClientGone

    async def _serve(self, read: ReadCall, scope: Scope, receive: Receive, send: Send) -> None:
        with self.arriving(scope) as charge:
            call = await read(await read_body(scope, receive, charge), scope)
            charge.set(held_bytes(call))
            writer: ResponseWriter = scope["extensions"][EXTENSION]
            if call.resumed is not None and call.resumed.is_whole(has_usage=call.has_usage):
                await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM})
                await send({"type": "http.response.body", "body": LAST_EVENT, "more_body": False})
                return
            with self.answering(call) as answer:
                if writer.is_gone:
                    raise ClientGone
                if call.is_streamed:
                    await self._serve_stream(answer, writer, send)
                else:
                    await self._serve_whole(answer, writer, send)

    async def _serve_whole(self, answer: Answer, writer: ResponseWriter, send: Send) -> None:
        call = answer.call
        quotas = call.scheduling_key.quotas
        with self.door.answers.charge(call.tenant.name, quotas, is_counted=False) as charge:
            charge.add(unpacked_bytes(call))
            collector = AnswerCollector(answer, self._observer(answer), charge)
            writer.on_gone = collector.gone
            answer.start(collector)
            parts = self._form(answer, int(self._calendar_s())).whole(await collector.wait())
            await respond_in_turns(send, parts, self._clock, writer)

    async def _serve_stream(self, answer: Answer, writer: ResponseWriter, send: Send) -> None:
        stream = self.stream(answer, SERVER_SENT_EVENTS)
        writer.on_gone = stream.gone
        answer.start(stream)
        # The head goes out after the first token: until then the call may still be refused with a status.
        # While no worker has it, that is likely; one that has it may be silent for longer than clients wait.
        is_late, wait_until_s = False, self._clock.now_s() + HEADLESS_S
        while not await stream.wait(self.ping_interval_s):
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
        await self.follow(stream)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _form(self, answer: Answer, created_s: int) -> AnswerFormat:
        text = self._model.text
        return answer_format(answer, text.tokenizer if text.has_tokenizer else None, created_s)

    def _progress(self, answer: Answer, form: AnswerFormat, created_s: int) -> StreamProgress:
        """Where the stream begins, or goes on. Its ids expire `resume_window_s` after each was sent."""
        call, point = answer.call, answer.call.resumed
        if point is None:
            seed = call.sampling.seed
            assert seed is not None  # the reader has drawn one
            point = ResumePoint(
                answer=answer.name,
                digest=digest_of(call, self._model.fingerprint),
                seed=seed,
                created_s=created_s,
                expires_s=0,
                has_shown_usage=False,
                choices=(NOTHING_SHOWN,) * len(answer.choices),
            )

        def seal(point: ResumePoint) -> bytes:
            expires_s = math.ceil(self._calendar_s() + self._resume_window_s)
            return self._event_ids.seal(msgspec.structs.replace(point, expires_s=expires_s), call.tenant.name)

        return StreamProgress(point, form, seal)

    def _observer(self, answer: Answer) -> Callable[[AnswerChoice, Delta], None]:
        """Times of its tokens."""
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


def _outcome(answer: Answer, error: Exception | None) -> str:
    """In the words of TenantCounts.calls."""
    if answer.is_whole:
        return "answered"
    if error is None:
        return "gone"
    if isinstance(error, Refused):
        return error.refusal.value
    return Refusal.NO_ROOM.value if isinstance(error, Overloaded) else "failed"


class TextRoutes:
    """`/tokenize` and `/detokenize`, as vLLM has them; bounded and charged as calls are."""

    def __init__(self, reader: CallReader, door: Limiter) -> None:
        self._reader = reader
        self._door = door

    async def tokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        await self._serve("tokenize", scope, receive, send)

    async def detokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        await self._serve("detokenize", scope, receive, send)

    async def _serve(self, kind: Kind, scope: Scope, receive: Receive, send: Send) -> None:
        tenant = scope["state"]["tenant"]
        quotas = tenant.policy.quotas
        with self._door.answers.charge(tenant.name, quotas) as held:
            with self._door.inputs.charge(tenant.name, quotas) as charge:
                body = await self._reader.text(kind, await read_body(scope, receive, charge), scope)
            held.add(len(body))  # until the client has read it
            await respond_in_blocks(send, 200, [body])
