"""Bodies to prompts and text to token ids: small ones at once, large ones in helper processes.

Decoding JSON, rendering a template and making lists hold the interpreter's lock, so a thread would hold the
event loop as well; a process does not. Tenants take turns for the helpers (text_turns.py), by bytes.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from baton.gateway.call import Prompt
from baton.gateway.chat_template import ChatTemplate
from baton.gateway.prompt_reader import Chat, Kind, PromptReader, ReadCall, ReadTerms, TextAnswer
from baton.gateway.text_helper import Done, Failed, Job, raise_failed, unpacked_prompt
from baton.gateway.text_pool import HelperSpec, TextPool
from baton.gateway.text_turns import TextTurns
from baton.gateway.tokenizer import Tokenizer
from baton.gateway.tool_forms import ToolForm

SMALL_BYTES: Final = 4096  # read in well below a millisecond, unless it was made to take long
NUM_THREADS: Final = 2  # for texts of the operator's files

ResultT = TypeVar("ResultT")


class TextWork:
    def __init__(
        self,
        tokenizer: Tokenizer | None,
        chat_template: ChatTemplate | None,
        *,
        vocab_size: int | None = None,
        helpers: HelperSpec | None = None,
    ) -> None:
        """helpers: how to start them; None: every body is read at once, for those who serve nobody else."""
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._reader = PromptReader(tokenizer, chat_template, vocab_size)
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="text")
        self._turns = TextTurns(NUM_THREADS)
        self._pool = None if helpers is None else TextPool(helpers)

    @property
    def has_tokenizer(self) -> bool:
        return self._tokenizer is not None

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises InvalidRequest when the model has none."""
        return self._reader.tokenizer

    @property
    def tool_form(self) -> ToolForm | None:
        """In which the model calls tools; None: it does not, or not in a form that is read here."""
        return None if self._chat_template is None else self._chat_template.tool_form

    @property
    def vocab_size(self) -> int | None:
        return self._reader.vocab_size

    async def start(self) -> None:
        """Start the helpers before somebody waits for one."""
        if self._pool is not None:
            await self._pool.start()

    async def read_call(self, kind: Kind, data: bytes, terms: ReadTerms, tenant: str = "") -> ReadCall:
        """Raises InvalidRequest and ApiError, which say what the client should change."""
        read = await self._read(kind, data, terms, tenant)
        if isinstance(read, ReadCall):
            return read
        assert isinstance(read, Done)
        body = read.chat or read.completion
        assert body is not None
        prompts = list[Prompt]()
        for text, token_ids in read.prompts:
            prompts.append(unpacked_prompt(text, token_ids))
            await asyncio.sleep(0)  # a prompt of the longest takes two milliseconds
        return ReadCall(body, tuple(prompts), read.has_tools, read.num_unknown)

    async def read_text(self, kind: Kind, data: bytes, terms: ReadTerms, tenant: str = "") -> TextAnswer:
        """The answer of `/tokenize` or `/detokenize`. Raises InvalidRequest and ApiError."""
        read = await self._read(kind, data, terms, tenant)
        if isinstance(read, TextAnswer):
            return read
        assert isinstance(read, Done) and read.answer is not None
        return TextAnswer(read.answer, read.num_unknown)

    async def _read(
        self, kind: Kind, data: bytes, terms: ReadTerms, tenant: str
    ) -> ReadCall | TextAnswer | Done:
        if len(data) <= SMALL_BYTES or self._pool is None:
            return self._reader.read(kind, data, terms)
        result = await self._pool.do(tenant, Job(kind, terms, data))
        if isinstance(result, Failed):
            raise_failed(result)
        assert isinstance(result, Done)
        return result

    async def encode(self, text: str, *, max_tokens: int, add_special_tokens: bool = True) -> list[int]:
        """For texts of the operator's files. Raises InvalidRequest for what cannot be within `max_tokens`."""

        def work() -> list[int]:
            return self._reader.encode(text, max_tokens=max_tokens, add_special_tokens=add_special_tokens)

        return await self._run(len(text), work)

    async def encode_chat(
        self, chat: Chat, *, max_tokens: int, add_generation_prompt: bool = True
    ) -> tuple[str, list[int]]:
        """A conversation of the operator's files as the template writes it, and its token ids."""
        return await self._run(
            sum(len(str(message)) for message in chat.messages),
            lambda: self._reader.encode_chat(
                chat, max_tokens=max_tokens, add_generation_prompt=add_generation_prompt
            ),
        )

    async def close(self) -> None:
        """Stop what works on texts. May be called twice."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._pool is not None:
            await self._pool.close()

    async def _run(self, num_chars: int, work: Callable[[], ResultT]) -> ResultT:
        if num_chars <= SMALL_BYTES:
            return work()
        await self._turns.take("", num_chars)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._turns.leave()
