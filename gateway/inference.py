"""`/v1/chat/completions` and `/v1/completions`: a call is read, answered, and counted.

Who leaves before the end has cancelled, wherever the call is. A call that fails before its first token is
refused with a status; one that fails later ends its stream with an error event.
"""

import math
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeAlias

import msgspec
from starlette.types import Receive, Scope, Send

from baton.clock import Clock
from baton.errors import BatonError, Overloaded, Refused
from baton.gateway.answer import Answer, Choice, Delta
from baton.gateway.answer_collector import AnswerCollector
from baton.gateway.answer_format import AnswerFormat, answer_format
from baton.gateway.answer_stream import DONE, SERVER_SENT_EVENTS, AnswerStream, Framing
from baton.gateway.api_errors import ClientGone
from baton.gateway.asgi import read_body
from baton.gateway.call import Call, digest_of, held_bytes, unpacked_bytes
from baton.gateway.call_reader import CallReader
from baton.gateway.event_ids import EventIds, ResumePoint
from baton.gateway.metrics import Metrics
from baton.gateway.outlet import EXTENSION, Outlet
from baton.gateway.served_model import ServedModel
from baton.gateway.stream_progress import NOTHING_SHOWN, StreamProgress
from baton.gateway.tenants_door import Charge, Door, Visit
from baton.gateway.turn import Turn, respond_in_turns
from baton.tenancy import Refusal

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
        door: Door,
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
        self._turn = Turn()
        self._open: dict[Answer, Visit] = {}

    async def chat(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        await self._serve(self.reader.chat, scope, receive, send)

    async def completions(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        await self._serve(self.reader.completion, scope, receive, send)

    def arriving(self, scope: Scope) -> Charge:
        """Charge the tenant for what comes, for a `with`."""
        tenant = scope["state"]["tenant"]
        return self.door.inputs.charge(tenant.name, tenant.policy.quotas)

    @contextmanager
    def reading(self, data: bytes, scope: Scope) -> Iterator[Charge]:
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
        visit = self._open[answer] = self.door.enter(call)
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
            visit.leave(_outcome(answer, failure or answer.error))
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
            outlet: Outlet = scope["extensions"][EXTENSION]
            if call.resumed is not None and call.resumed.is_whole(has_usage=call.has_usage):
                await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM})
                await send({"type": "http.response.body", "body": LAST_EVENT, "more_body": False})
                return
            with self.answering(call) as answer:
                if outlet.is_gone:
                    raise ClientGone
                if call.is_streamed:
                    await self._serve_stream(answer, outlet, send)
                else:
                    await self._serve_whole(answer, outlet, send)

    async def _serve_whole(self, answer: Answer, outlet: Outlet, send: Send) -> None:
        call = answer.call
        quotas = call.standing.quotas
        with self.door.answers.charge(call.tenant.name, quotas, is_counted=False) as charge:
            charge.add(unpacked_bytes(call))
            collector = AnswerCollector(answer, self._observer(answer), charge)
            outlet.on_gone = collector.gone
            answer.start(collector)
            parts = self._form(answer, int(self._calendar_s())).whole(await collector.wait())
            await respond_in_turns(send, parts, self._clock, outlet)

    async def _serve_stream(self, answer: Answer, outlet: Outlet, send: Send) -> None:
        stream = self.stream(answer, SERVER_SENT_EVENTS)
        outlet.on_gone = stream.gone
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
        stream.begin(outlet)
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

    def _observer(self, answer: Answer) -> Callable[[Choice, Delta], None]:
        """Times of its tokens."""
        metrics, now_s, call, visit = self._metrics, self._clock.now_s, answer.call, self._open[answer]
        last_s: dict[int, float] = {}

        def observe(choice: Choice, delta: Delta) -> None:
            at_s = now_s()
            metrics.generated_tokens += len(delta.token_ids)
            visit.tokens(len(delta.token_ids), at_s)
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
