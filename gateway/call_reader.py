"""From what a client sends to a Call: parsed, checked, tokenised."""

from collections.abc import Callable

from starlette.types import Scope

from baton.clock import Clock
from baton.gateway.api_errors import invalid
from baton.gateway.api_types import AnyBody, ChatBody, CompletionBody, decode_body
from baton.gateway.call import (
    Call,
    Prompt,
    Terms,
    chat_call,
    completion_call,
    num_answer_entries,
    refuse_unsupported_chat,
    refuse_unsupported_completion,
)
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
        strict: bool = False,
    ) -> None:
        """`strict`: refuse unknown keys instead of counting them. `max_answer_entries`: see call.py."""
        self._model = model
        self._metrics = metrics
        self._clock = clock
        self._draw_seed = draw_seed
        self._max_answer_entries = max_answer_entries
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
        return self._bounded(chat_call(body, prompt, terms, has_tools=bool(tools)))

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
        return self._bounded(completion_call(body, tuple(prompts), terms))

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

    def _bounded(self, call: Call) -> Call:
        num_entries, most = num_answer_entries(call, self._model.max_model_len), self._max_answer_entries
        if num_entries > most:
            raise invalid(
                f"the answer may have {num_entries} entries, which are tokens x n x (logprobs + 1) over all "
                f"prompts; at most {most} are written for a call (gateway.max_answer_entries): ask for fewer"
            )
        return call

    def _terms(self, model: str | None, scope: Scope) -> Terms:
        tenant = scope["state"]["tenant"]
        name = self._model.check(model, tenant)
        return Terms(
            tenant=tenant,
            model=name,
            seed=self._draw_seed(),
            arrival_s=self._clock.now_s(),
            sla=sla_of(scope, tenant),
            standing=standing_of(scope, tenant),
            tool_form=self._model.text.tool_form,
        )
