"""Texts that prompts of several tenants begin with, and whose pages they share: see `public_prefixes`.

A text is known in two forms: as a prompt that begins with it, and as the system message of a chat, in the
model's own template. Only tokens that are those of a public text are ever shared, never what follows them.
"""

import logging
from collections.abc import Sequence
from typing import Final, TypeAlias

from baton.errors import InvalidRequest, Overloaded
from baton.gateway.api.prompt_reader import Chat
from baton.gateway.tenants.tenants import Tenant
from baton.gateway.text.work import TextWork

MAX_TOKENS: Final = 2**17  # of one text
MAX_KEPT: Final = 1024  # texts, of former files as well

logger = logging.getLogger(__name__)

Forms: TypeAlias = tuple[tuple[int, ...], ...]


class PublicPrefixes:
    def __init__(self, text: TextWork) -> None:
        self._text = text
        self._forms: dict[str, Forms] = {}

    async def num_tokens(self, tenant: Tenant, token_ids: Sequence[int]) -> int:
        """How many of a prompt's first tokens are those of a text that the tenant shares with others."""
        longest = 0
        for text in tenant.public_texts:
            for form in await self._forms_of(text):
                longest = max(longest, _num_common(form, token_ids))
        return longest

    async def _forms_of(self, text: str) -> Forms:
        forms = self._forms.get(text)
        if forms is None:
            try:
                forms = await self._encode(text)
            except Overloaded:
                return ()  # this prompt shares nothing; the next one asks again
            if len(self._forms) >= MAX_KEPT:
                self._forms.clear()
            self._forms[text] = forms
        return forms

    async def _encode(self, text: str) -> Forms:
        """Overloaded: there is no room to tokenise it now."""
        forms = list[tuple[int, ...]]()
        for encode in (self._as_prompt, self._as_system_message):
            try:
                forms.append(tuple(await encode(text)))
            except InvalidRequest as error:  # no tokenizer, no template, or one without system messages
                told = {"form": encode.__name__, "num_chars": len(text), "error": str(error)}
                logger.info("a public text lacks a form", extra=told)
        return tuple(forms)

    async def _as_prompt(self, text: str) -> Sequence[int]:
        return await self._text.encode(text, max_tokens=MAX_TOKENS)

    async def _as_system_message(self, text: str) -> Sequence[int]:
        chat = Chat([{"role": "system", "content": text}])
        _, token_ids = await self._text.encode_chat(chat, max_tokens=MAX_TOKENS, add_generation_prompt=False)
        return token_ids


def _num_common(form: Sequence[int], token_ids: Sequence[int]) -> int:
    num_tokens = 0
    for one, other in zip(form, token_ids, strict=False):
        if one != other:
            break
        num_tokens += 1
    return num_tokens
