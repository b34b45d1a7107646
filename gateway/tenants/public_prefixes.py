"""Texts that prompts of several tenants begin with, and whose pages they share (`public_prefixes`).

A text is known in two forms: as a prompt that begins with it, and as the system message of a chat in the
model's own template. Only the tokens of a public text are ever shared, never the tokens after them.
"""

import asyncio
import logging
from collections.abc import Sequence
from itertools import takewhile
from typing import Final, TypeAlias

from baton.errors import InvalidRequest
from baton.gateway.api.prompt_reader import PromptReader
from baton.gateway.tenants.tenants import Tenant

MAX_TOKENS: Final = 2**17  # of one text
MAX_KEPT: Final = 1024  # texts, those of former files included

logger = logging.getLogger(__name__)

Forms: TypeAlias = tuple[tuple[int, ...], ...]  # token ids of each form


class PublicPrefixes:
    """The public texts of one gateway as token ids. Each text is tokenised once, in a thread."""

    def __init__(self, reader: PromptReader) -> None:
        self._reader = reader
        self._forms: dict[str, asyncio.Future[Forms]] = {}

    async def num_tokens(self, tenant: Tenant, token_ids: Sequence[int]) -> int:
        """Return how many of a prompt's first tokens belong to a text that the tenant shares with others."""
        longest = 0
        for text in tenant.public_texts:
            for form in await asyncio.shield(self._forms_of(text)):
                pairs = zip(form, token_ids, strict=False)
                longest = max(longest, sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)))
        return longest

    def _forms_of(self, text: str) -> asyncio.Future[Forms]:
        forms = self._forms.get(text)
        if forms is None:
            if len(self._forms) >= MAX_KEPT:
                self._forms.clear()
            forms = self._forms[text] = asyncio.ensure_future(asyncio.to_thread(self._encode, text))
        return forms

    def _encode(self, text: str) -> Forms:
        forms = list[tuple[int, ...]]()
        for encode in (self._as_prompt, self._as_system_message):
            try:
                forms.append(tuple(encode(text)))
            except InvalidRequest as error:  # no tokenizer, no template, or one without system messages
                told = {"form": encode.__name__, "num_chars": len(text), "error": str(error)}
                logger.info("a public text lacks a form", extra=told)
        return tuple(forms)

    def _as_prompt(self, text: str) -> list[int]:
        return self._reader.encode(text, max_tokens=MAX_TOKENS)

    def _as_system_message(self, text: str) -> list[int]:
        messages = [{"role": "system", "content": text}]
        return self._reader.encode_chat(messages, max_tokens=MAX_TOKENS, add_generation_prompt=False)
