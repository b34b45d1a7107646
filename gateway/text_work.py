"""Text to token ids for requests: short ones at once, long ones on threads, beside the event loop.

The tokenizer lets go of the interpreter's lock while it works, so threads do help.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from typing import Final, NamedTuple, TypeVar

from baton.errors import InvalidRequest
from baton.gateway.api_errors import unsupported
from baton.gateway.chat_template import ChatTemplate, Message
from baton.gateway.messages import read_messages
from baton.gateway.text_turns import TextTurns
from baton.gateway.tokenizer import Tokenizer
from baton.gateway.tool_forms import ToolForm
from baton.gateway.tools import Tool

NUM_THREADS: Final = 2
SHORT_CHARS: Final = 4096  # takes well below a millisecond; a change of threads takes 0.1 ms
MAX_CHARS_PER_TOKEN: Final = 16  # on average: a prompt with more for what the model takes is not tokenised

ResultT = TypeVar("ResultT")


class Chat(NamedTuple):
    messages: Sequence[Message]
    tools: Sequence[Tool] | None = None


class TextWork:
    def __init__(self, tokenizer: Tokenizer | None, chat_template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="text")
        self._turns = TextTurns(NUM_THREADS)
        self._tenant = ""

    def of(self, tenant: str) -> "TextWork":
        """The same, on behalf of a tenant: long texts of several take turns."""
        own = copy(self)
        own._tenant = tenant
        return own

    @property
    def has_tokenizer(self) -> bool:
        return self._tokenizer is not None

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises InvalidRequest when the model has none."""
        if self._tokenizer is None:
            raise InvalidRequest("the model has no tokenizer: prompts are token ids")
        return self._tokenizer

    @property
    def tool_form(self) -> ToolForm | None:
        """In which the model calls tools; None: it does not, or not in a form that is read here."""
        return None if self._chat_template is None else self._chat_template.tool_form

    async def encode(self, text: str, *, max_tokens: int, add_special_tokens: bool = True) -> list[int]:
        """Raises InvalidRequest for what cannot be within `max_tokens`, before it is tokenised."""
        tokenizer = self.tokenizer
        _check_length(len(text), max_tokens)
        return await self._run(
            len(text), lambda: tokenizer.encode(text, add_special_tokens=add_special_tokens)
        )

    async def encode_chat(
        self, chat: Chat, *, max_tokens: int, add_generation_prompt: bool = True
    ) -> tuple[str, list[int]]:
        """The conversation as the model's template writes it, and its token ids."""
        tokenizer, template = self.tokenizer, self._chat_template
        if template is None:
            raise InvalidRequest("the model has no chat template: it completes text and cannot chat")
        if chat.tools and template.tool_form is None:
            raise unsupported("calling tools, by the chat template of this model,", param="tools")
        read = read_messages(chat.messages)
        num_chars = sum(len(str(message.get("content"))) + 16 for message in read)
        num_chars += sum(len(str(tool)) for tool in chat.tools or ())
        _check_length(num_chars, max_tokens)

        def encode() -> tuple[str, list[int]]:
            text = template.render(read, tools=chat.tools, add_generation_prompt=add_generation_prompt)
            _check_length(len(text), max_tokens)
            return text, tokenizer.encode(text, add_special_tokens=False)

        return await self._run(num_chars, encode)

    async def decode(self, token_ids: Sequence[int]) -> str:
        tokenizer = self.tokenizer
        return await self._run(len(token_ids) * 8, lambda: tokenizer.decode(token_ids))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, num_chars: int, work: Callable[[], ResultT]) -> ResultT:
        if num_chars <= SHORT_CHARS:
            return work()
        await self._turns.take(self._tenant, num_chars)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._turns.leave()


def _check_length(num_chars: int, max_tokens: int) -> None:
    if num_chars > max_tokens * MAX_CHARS_PER_TOKEN:
        raise InvalidRequest(
            f"the prompt has {num_chars} characters, which can't fit the model's {max_tokens} tokens"
        )
