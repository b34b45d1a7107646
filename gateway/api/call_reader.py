"""From a request to a Call: the body is read, the headers are checked, a seed is drawn.

The routes `/tokenize` and `/detokenize` read a body in the same way, and answer with what they have read.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from starlette.types import Receive, Scope, Send

from baton.clock import Clock
from baton.config.gateway import GatewayConfig
from baton.gateway.api.call import Call, Prompt, make_call
from baton.gateway.api.errors import ApiError, invalid
from baton.gateway.api.prompt_reader import BodyKind, unpack_token_ids
from baton.gateway.http.asgi import BLOCK_BYTES, header, read_body, respond_in_turns
from baton.gateway.http.response_body import EXTENSION
from baton.gateway.metrics.metrics import Metrics
from baton.gateway.streams.resume import HEADER, MAX_RESUMABLE_CHOICES, PARAM, EventIds
from baton.gateway.tenants.limiter import Limiter
from baton.gateway.tenants.public_prefixes import PublicPrefixes
from baton.gateway.tenants.tenants import Tenant, asked_for, scheduling_key_of, sla_of
from baton.gateway.text.work import ServedModel

LARGE_PROMPT_BYTES: Final = 64 * 2**10  # packed; unpacking the longest prompt takes two milliseconds


class CallReader:
    """Reads the calls of one gateway. Raises InvalidRequest and ApiError for what the client can mend."""

    def __init__(
        self,
        model: ServedModel,
        metrics: Metrics,
        clock: Clock,
        config: GatewayConfig,
        event_ids: EventIds,
        calendar_s: Callable[[], float],
        draw_seed: Callable[[], int],
    ) -> None:
        """calendar_s: seconds since 1970. draw_seed: for a call without a seed."""
        self._model = model
        self._metrics = metrics
        self._clock = clock
        self._draw_seed = draw_seed
        self._config = config
        self._event_ids = event_ids
        self._calendar_s = calendar_s
        self._public = PublicPrefixes(model.text.reader)

    async def call(self, kind: BodyKind, data: bytes, scope: Scope) -> Call:
        """Return the call of a body. kind: "chat", "completion" or "either"."""
        tenant = scope["state"]["tenant"]
        asked = asked_for(scope)
        sla, scheduling_key = sla_of(asked, tenant), scheduling_key_of(asked, tenant)
        arrival_s = self._clock.now_s()
        policy = self._model.read_policy(tenant, is_strict=self._config.strict)
        read = await self._model.text.read(kind, data, policy, tenant.name)
        del data
        self._metrics.unknown_keys += read.num_unknown
        event_id = header(scope, HEADER) if scope["type"] == "http" else None
        resumed = self._event_ids.open(event_id, tenant.name, self._calendar_s()) if event_id else None
        body = read.chat or read.completion
        assert body is not None
        call = make_call(
            body,
            tuple([await self._prompt(text, packed, tenant) for text, packed in read.prompts]),
            new_seed=self._draw_seed() if resumed is None else resumed.seed,
            defaults=self._model.defaults,
            tool_form=self._model.text.tool_form if read.has_tools else None,
            model=self._model.name,
            tenant=tenant,
            sla=sla,
            scheduling_key=scheduling_key,
            arrival_s=arrival_s,
            resumed=resumed,
        )
        self._check(call, policy.longest())
        return call

    async def text(self, kind: BodyKind, data: bytes, scope: Scope) -> bytes:
        """Return the answer of `/tokenize` or `/detokenize` as JSON."""
        tenant = scope["state"]["tenant"]
        policy = self._model.read_policy(tenant, is_strict=self._config.strict)
        read = await self._model.text.read(kind, data, policy, tenant.name)
        self._metrics.unknown_keys += read.num_unknown
        assert read.answer is not None
        return read.answer

    async def _prompt(self, text: str | None, packed: bytes, tenant: Tenant) -> Prompt:
        token_ids = unpack_token_ids(packed)
        if len(packed) > LARGE_PROMPT_BYTES:
            await asyncio.sleep(0)
        num_public_tokens = await self._public.num_tokens(tenant, token_ids) if tenant.public_texts else 0
        return Prompt(text, token_ids, num_public_tokens)

    def _check(self, call: Call, longest: int) -> None:
        if call.is_resumable or call.resumed is not None:
            self._check_resumable(call)
        num_entries, most = call.num_answer_entries(longest), self._config.max_answer_entries
        if num_entries > most:
            raise invalid(
                f"the answer may have {num_entries} entries, which are tokens x n x (logprobs + 1) over all "
                f"prompts; at most {most} are written for a call (gateway.max_answer_entries): ask for fewer"
            )

    def _check_resumable(self, call: Call) -> None:
        """Raise ApiError 400 for a call whose events can have no ids, and for an id of another call."""
        name = "stream_options.resumable"
        if not call.is_streamed:
            raise invalid(f"{name}: only a stream can be resumed; set stream as well", param=name)
        if call.num_answers > MAX_RESUMABLE_CHOICES:
            limit = f"at most {MAX_RESUMABLE_CHOICES} answers over all prompts, got {call.num_answers}"
            raise invalid(f"{name}: {limit}", param=name)
        resumed = call.resumed
        if resumed is not None and resumed.digest != call.digest(self._model.fingerprint):
            raise ApiError(
                400,
                f"{PARAM}: the id is of another request, or the model has been replaced since; "
                "send the same body as before, or no id to begin anew",
                code="other_request",
                param=PARAM,
            )


class TextRoutes:
    """`/tokenize` and `/detokenize`, as vLLM has them; bounded and charged as calls are."""

    def __init__(self, reader: CallReader, limiter: Limiter, clock: Clock) -> None:
        self._reader = reader
        self._limiter = limiter
        self._clock = clock

    async def tokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        await self._serve("tokenize", scope, receive, send)

    async def detokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        await self._serve("detokenize", scope, receive, send)

    async def _serve(self, kind: BodyKind, scope: Scope, receive: Receive, send: Send) -> None:
        tenant = scope["state"]["tenant"]
        quotas = tenant.policy.quotas
        with self._limiter.answers.charge(tenant.name, quotas) as held:
            with self._limiter.inputs.charge(tenant.name, quotas) as charge:
                body = await self._reader.text(kind, await read_body(scope, receive, charge.set), scope)
            held.add(len(body))  # until the client has read it
            blocks = (body[start : start + BLOCK_BYTES] for start in range(0, len(body), BLOCK_BYTES))
            await respond_in_turns(send, blocks, self._clock, scope["extensions"][EXTENSION])
