"""From what a client sends to a Call: parsed, checked, tokenised."""

import math
from collections.abc import Callable
from typing import Final

from starlette.types import Scope

from baton.clock import Clock
from baton.gateway.api_errors import invalid
from baton.gateway.api_types import AnyBody, ChatBody, CompletionBody, decode_body
from baton.gateway.asgi import header
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
from baton.tenancy import Sla

TTFT_HEADER: Final = b"x-llm-d-slo-ttft-ms"
TPOT_HEADER: Final = b"x-llm-d-slo-tpot-ms"
MAX_SLO_MS: Final = 86_400_000.0


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

    async def chat(self, data: bytes, scope: Scope) -> Call:
        body = self.decode(data, ChatBody)
        refuse_unsupported_chat(body)
        terms = self._terms(body.model, scope)
        text, token_ids = await self._model.text.encode_chat(
            body.messages,
            max_tokens=self._model.max_model_len,
            add_generation_prompt=body.add_generation_prompt is not False,
        )
        self._model.check_length(len(token_ids))
        return self._bounded(chat_call(body, Prompt(text, tuple(token_ids)), terms))

    async def completion(self, data: bytes, scope: Scope) -> Call:
        body = self.decode(data, CompletionBody)
        refuse_unsupported_completion(body)
        terms = self._terms(body.model, scope)
        needs_text = bool(body.echo)
        prompts = [await self._prompt(given, needs_text=needs_text) for given in list_prompts(body.prompt)]
        return self._bounded(completion_call(body, tuple(prompts), terms))

    def decode(self, data: bytes, kind: type[AnyBody]) -> AnyBody:
        body, unknown = decode_body(data, kind)
        if unknown:
            self._metrics.unknown_keys += len(unknown)
            if self._strict:
                raise invalid(f"unknown key {unknown[0][:64]!r}", param=unknown[0][:64])
        return body

    async def _prompt(self, given: GivenPrompt, *, needs_text: bool) -> Prompt:
        text = self._model.text
        if isinstance(given, str):
            token_ids = await text.encode(given, max_tokens=self._model.max_model_len)
            self._model.check_length(len(token_ids))
            return Prompt(given, tuple(token_ids))
        self._model.check_length(len(given))
        return Prompt(await text.decode(given) if needs_text else None, tuple(given))

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
            sla=_sla(scope),
        )


def _sla(scope: Scope) -> Sla:
    ttft_ms, tpot_ms = header(scope, TTFT_HEADER), header(scope, TPOT_HEADER)
    if ttft_ms is None and tpot_ms is None:
        return Sla()
    return Sla(ttft_ms=_milliseconds(ttft_ms, TTFT_HEADER), tpot_ms=_milliseconds(tpot_ms, TPOT_HEADER))


def _milliseconds(text: str | None, name: bytes) -> float | None:
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= MAX_SLO_MS:
        raise invalid(f"the header {name.decode()}: expected milliseconds, got {text[:32]!r}")
    return value
