"""From what a client sends to a Call: parsed, checked, tokenised."""

from collections.abc import Callable

from starlette.types import Scope

from baton.clock import Clock
from baton.gateway.api_errors import ApiError, invalid
from baton.gateway.api_types import AnyBody, ChatBody, CompletionBody, decode_body
from baton.gateway.asgi import header
from baton.gateway.call import (
    Call,
    Prompt,
    Terms,
    chat_call,
    completion_call,
    digest_of,
    num_answer_entries,
    refuse_unsupported_chat,
    refuse_unsupported_completion,
)
from baton.gateway.event_ids import HEADER, MAX_RESUMABLE_CHOICES, PARAM, EventIds
from baton.gateway.metrics import Metrics
from baton.gateway.prompts import GivenPrompt, list_prompts
from baton.gateway.served_model import ServedModel
from baton.gateway.tenants import Tenant
from baton.gateway.tenants_public import PublicPrefixes
from baton.gateway.tenants_terms import sla_of, standing_of
from baton.gateway.text_work import Chat
from baton.gateway.tools import usable_tools


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
        """`strict`: refuse unknown keys instead of counting them. `max_answer_entries`: see call.py.
        `calendar_s`: seconds since 1970.
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
        body = self.decode(data, ChatBody)
        refuse_unsupported_chat(body)
        tools = usable_tools(body.tools, body.tool_choice)
        terms = self._terms(body.model, scope)
        text, token_ids = await self._model.text.of(terms.tenant.name).encode_chat(
            Chat(body.messages, tools),
            max_tokens=self._model.max_model_len,
            add_generation_prompt=body.add_generation_prompt is not False,
        )
        self._model.check_length(len(token_ids))
        prompt = await self._of_tenant(Prompt(text, tuple(token_ids)), terms.tenant)
        return self._checked(chat_call(body, prompt, terms, has_tools=bool(tools)))

    async def completion(self, data: bytes, scope: Scope) -> Call:
        body = self.decode(data, CompletionBody)
        refuse_unsupported_completion(body)
        terms = self._terms(body.model, scope)
        needs_text = bool(body.echo)
        tenant = terms.tenant
        prompts = [
            await self._of_tenant(await self._prompt(given, tenant, needs_text=needs_text), tenant)
            for given in list_prompts(body.prompt)
        ]
        return self._checked(completion_call(body, tuple(prompts), terms))

    def decode(self, data: bytes, kind: type[AnyBody]) -> AnyBody:
        body, unknown = decode_body(data, kind)
        if unknown:
            self._metrics.unknown_keys += len(unknown)
            if self._strict:
                raise invalid(f"unknown key {unknown[0][:64]!r}", param=unknown[0][:64])
        return body

    async def _prompt(self, given: GivenPrompt, tenant: Tenant, *, needs_text: bool) -> Prompt:
        text = self._model.text.of(tenant.name)
        if isinstance(given, str):
            token_ids = await text.encode(given, max_tokens=self._model.max_model_len)
            self._model.check_length(len(token_ids))
            return Prompt(given, tuple(token_ids))
        self._model.check_length(len(given))
        return Prompt(await text.decode(given) if needs_text else None, tuple(given))

    async def _of_tenant(self, prompt: Prompt, tenant: Tenant) -> Prompt:
        if not tenant.public_texts:
            return prompt
        num_public_tokens = await self._public.num_tokens(tenant, prompt.token_ids)
        return prompt._replace(num_public_tokens=num_public_tokens)

    def _checked(self, call: Call) -> Call:
        if call.is_resumable or call.resumed is not None:
            self._check_resumable(call)
        num_entries, most = num_answer_entries(call, self._model.max_model_len), self._max_answer_entries
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

    def _terms(self, model: str | None, scope: Scope) -> Terms:
        tenant = scope["state"]["tenant"]
        name = self._model.check(model, tenant)
        event_id = header(scope, HEADER) if scope["type"] == "http" else None
        resumed = self._event_ids.open(event_id, tenant.name, self._calendar_s()) if event_id else None
        return Terms(
            tenant=tenant,
            model=name,
            seed=self._draw_seed() if resumed is None else resumed.seed,
            resumed=resumed,
            arrival_s=self._clock.now_s(),
            sla=sla_of(scope, tenant),
            standing=standing_of(scope, tenant),
            tool_form=self._model.text.tool_form,
        )
