"""From what a client sends to a Call: parsed, checked, tokenised."""

from collections.abc import Callable

from starlette.types import Scope

from baton.clock import Clock
from baton.gateway.api.call import (
    Call,
    Prompt,
    RequestPolicy,
    chat_call,
    completion_call,
    digest_of,
    num_answer_entries,
)
from baton.gateway.api.errors import ApiError, invalid
from baton.gateway.api.prompt_reader import Kind, ReadTerms
from baton.gateway.api.types import ChatBody
from baton.gateway.http.asgi import header
from baton.gateway.metrics.metrics import Metrics
from baton.gateway.streams.resume import HEADER, MAX_RESUMABLE_CHOICES, PARAM, EventIds
from baton.gateway.tenants.public_prefixes import PublicPrefixes
from baton.gateway.tenants.tenants import Tenant, asked_for, scheduling_key_of, sla_of
from baton.gateway.text.work import ServedModel


class CallReader:
    """Raises InvalidRequest and ApiError, which say what the client should change."""

    def __init__(
        self,
        model: ServedModel,
        metrics: Metrics,
        clock: Clock,
        *,
        draw_seed: Callable[[], int],
        max_answer_entries: int,
        event_ids: EventIds,
        calendar_s: Callable[[], float],
        strict: bool = False,
    ) -> None:
        """`strict`: refuse unknown keys instead of counting them. `max_answer_entries`: see
        gateway/api/call.py. `calendar_s`: seconds since 1970.
        """
        self._model = model
        self._metrics = metrics
        self._clock = clock
        self._draw_seed = draw_seed
        self._max_answer_entries = max_answer_entries
        self._event_ids = event_ids
        self._calendar_s = calendar_s
        self._strict = strict
        self._public = PublicPrefixes(model.text)

    async def chat(self, data: bytes, scope: Scope) -> Call:
        return await self._call("chat", data, scope)

    async def completion(self, data: bytes, scope: Scope) -> Call:
        return await self._call("completion", data, scope)

    async def either(self, data: bytes, scope: Scope) -> Call:
        """A chat where the body has messages, else a completion."""
        return await self._call("either", data, scope)

    async def text(self, kind: Kind, data: bytes, scope: Scope) -> bytes:
        """The answer of `/tokenize` or `/detokenize`, as JSON."""
        tenant = scope["state"]["tenant"]
        read = await self._model.text.read_text(kind, data, self._read_terms(tenant), tenant.name)
        self._metrics.unknown_keys += read.num_unknown
        return read.body

    async def _call(self, kind: Kind, data: bytes, scope: Scope) -> Call:
        tenant = scope["state"]["tenant"]
        asked = asked_for(scope)
        sla, scheduling_key = sla_of(asked, tenant), scheduling_key_of(asked, tenant)
        arrival_s = self._clock.now_s()
        read_terms = self._read_terms(tenant)
        read = await self._model.text.read_call(kind, data, read_terms, tenant.name)
        del data
        self._metrics.unknown_keys += read.num_unknown
        event_id = header(scope, HEADER) if scope["type"] == "http" else None
        resumed = self._event_ids.open(event_id, tenant.name, self._calendar_s()) if event_id else None
        request_policy = RequestPolicy(
            tenant=tenant,
            model=self._model.name,
            seed=self._draw_seed() if resumed is None else resumed.seed,
            resumed=resumed,
            arrival_s=arrival_s,
            sla=sla,
            scheduling_key=scheduling_key,
            tool_form=self._model.text.tool_form,
            defaults=self._model.defaults,
        )
        prompts = tuple([await self._of_tenant(prompt, tenant) for prompt in read.prompts])
        if isinstance(read.body, ChatBody):
            call = chat_call(read.body, prompts[0], request_policy, has_tools=read.has_tools)
        else:
            call = completion_call(read.body, prompts, request_policy)
        return self._checked(call, read_terms.longest())

    def _read_terms(self, tenant: Tenant) -> ReadTerms:
        return self._model.request_policy(tenant, is_strict=self._strict)

    async def _of_tenant(self, prompt: Prompt, tenant: Tenant) -> Prompt:
        if not tenant.public_texts:
            return prompt
        num_public_tokens = await self._public.num_tokens(tenant, prompt.token_ids)
        return prompt._replace(num_public_tokens=num_public_tokens)

    def _checked(self, call: Call, longest: int) -> Call:
        if call.is_resumable or call.resumed is not None:
            self._check_resumable(call)
        num_entries, most = num_answer_entries(call, longest), self._max_answer_entries
        if num_entries > most:
            raise invalid(
                f"the answer may have {num_entries} entries, which are tokens x n x (logprobs + 1) over all "
                f"prompts; at most {most} are written for a call (gateway.max_answer_entries): ask for fewer"
            )
        return call

    def _check_resumable(self, call: Call) -> None:
        """Raises ApiError 400 for a call whose events can have no ids, and for an id of another call."""
        name = "stream_options.resumable"
        if not call.is_streamed:
            raise invalid(f"{name}: only a stream can be resumed; set stream as well", param=name)
        num_choices = len(call.prompts) * call.num_choices
        if num_choices > MAX_RESUMABLE_CHOICES:
            message = f"{name}: at most {MAX_RESUMABLE_CHOICES} answers over all prompts, got {num_choices}"
            raise invalid(message, param=name)
        resumed = call.resumed
        if resumed is not None and resumed.digest != digest_of(call, self._model.fingerprint):
            raise ApiError(
                400,
                f"{PARAM}: the id is of another request, or the model has been replaced since; "
                "send the same body as before, or no id to begin anew",
                code="other_request",
                param=PARAM,
            )
