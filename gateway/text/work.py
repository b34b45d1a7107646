"""Bodies to prompts and text to token ids: small ones at once, large ones in helper processes.

Decoding JSON, rendering a template and making lists hold the interpreter's lock, so a thread would hold the
event loop as well; a process does not. Tenants take turns for the helpers (text_turns.py), by bytes.
"""

import asyncio
import contextlib
import logging
import sys
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from baton.errors import InvalidRequest, Overloaded
from baton.fair_queue import FairShare
from baton.gateway.api.call import Prompt
from baton.gateway.api.prompt_reader import Chat, Kind, PromptReader, ReadCall, ReadTerms, TextAnswer
from baton.gateway.streams.request_stream import Service
from baton.gateway.tenants.tenants import Tenant
from baton.gateway.text.chat_template import ChatTemplate
from baton.gateway.text.helper import (
    LENGTH_BYTES,
    RESULTS,
    Result,
    TextDone,
    TextFailed,
    TextJob,
    frame,
    raise_failed,
    unpacked_prompt,
)
from baton.gateway.text.model_files import SamplingDefaults
from baton.gateway.text.tokenizer import Tokenizer
from baton.gateway.text.tools import ToolForm
from baton.tenants import has_place

MAX_WAITING: Final = 256
RETRY_AFTER_S: Final = 1.0


class _Waiting:
    __slots__ = ("num_chars", "turn")

    def __init__(self, num_chars: int) -> None:
        self.num_chars = num_chars
        self.turn = asyncio.get_running_loop().create_future()


class TextTurns:
    """Whose long text is worked on next: tenants take turns for the threads, by characters.

    1. `take`: a place at once, if one is free; else it waits, behind its tenant's own. Too many wait, or too
       many of its tenant's: it is sent away.
    2. Whoever leaves gives its place to the tenant that has had least of those that wait
       (baton/fair_queue.py).
    3. Who is cancelled meanwhile takes nothing: a place that it was just given goes on to the next.
    """

    def __init__(self, num_places: int) -> None:
        self._num_places = num_places
        self._num_free = num_places
        self._num_waiting = 0
        self._share = FairShare()
        self._lanes: dict[str, deque[_Waiting]] = {}  # by tenant, none empty

    @property
    def num_taken(self) -> int:
        """Places that are taken, and those who wait for one."""
        return self._num_places - self._num_free + self._num_waiting

    async def take(self, tenant: str, num_chars: int) -> None:
        """Wait for a place; `leave` is due then. Raises Overloaded."""
        if self._num_free:
            self._num_free -= 1
            return
        lane = self._lanes.get(tenant, deque[_Waiting]())
        if not has_place(tenant, 1, len(lane), MAX_WAITING - self._num_waiting):
            message = f"{self._num_waiting} texts wait for their turn, {len(lane)} of them the tenant's"
            raise Overloaded(message, retry_after_s=RETRY_AFTER_S)
        waiting = _Waiting(num_chars)
        lane.append(waiting)
        self._lanes[tenant] = lane
        self._num_waiting += 1
        self._share.join(tenant, 1.0)
        try:
            await waiting.turn
        except asyncio.CancelledError:
            if not waiting.turn.cancelled():
                self.leave()
            elif waiting in self._lanes.get(tenant, ()):
                self._remove(tenant, waiting)
            raise

    def leave(self) -> None:
        self._share.age()  # who was away may have what its share of the last few turns was
        while (tenant := self._share.first()) is not None:
            waiting = self._lanes[tenant][0]
            is_there = not waiting.turn.cancelled()  # else it has gone, and its task has not run since
            if is_there:
                self._share.serve(tenant, waiting.num_chars)
                waiting.turn.set_result(None)
            self._remove(tenant, waiting)
            if is_there:
                return
        self._num_free += 1

    def _remove(self, tenant: str, waiting: _Waiting) -> None:
        lane = self._lanes[tenant]
        lane.remove(waiting)
        self._num_waiting -= 1
        if not lane:
            del self._lanes[tenant]
            self._share.leave(tenant)


# The helper processes of one gateway, and who has them.
#
# 1. `do` waits for its tenant's turn, takes a helper that is idle, and hands it the job.
# 2. The helper is given back when the result is there, also where the caller has been cancelled meanwhile.
# 3. A job that takes longer than MAX_JOB_S, or a helper that ends, is the end of both: the helper is killed,
# and the next job starts another.
#
# One of the helpers takes no job above EXPRESS_BYTES: ordinary prompts never wait for the largest ones alone.

EXPRESS_BYTES: Final = 64 * 2**10
MAX_JOB_S: Final = 30.0
START_S: Final = 60.0  # a helper's imports and tokenizer on a busy machine
logger = logging.getLogger(__name__)


class HelperSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The model that a helper reads for."""

    directory: Path
    chat_template: str | None = None  # a file in place of the model's own


class TextPool:
    """To be used on one loop; `close` ends it."""

    def __init__(self, spec: HelperSpec) -> None:
        self._express = _Lane(spec)
        self._any = _Lane(spec)
        self._running: set[asyncio.Task[Result]] = set()

    async def start(self) -> None:
        """Start the processes before somebody waits for one."""
        await asyncio.gather(self._express.helper.start(), self._any.helper.start())

    async def do(self, tenant: str, job: TextJob) -> Result:
        """Raises Overloaded when too many wait, or the helper failed, and InvalidRequest for a job that takes
        too long.
        """
        lane = self._lane(len(job.data))
        await lane.turns.take(tenant, len(job.data))
        task = asyncio.create_task(lane.helper.do(job))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        task.add_done_callback(lambda _: lane.turns.leave())
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Kill the processes; what they work on fails."""
        for lane in (self._express, self._any):
            await lane.helper.close()

    def _lane(self, num_bytes: int) -> "_Lane":
        """Small jobs go where fewer jobs are."""
        if num_bytes > EXPRESS_BYTES or self._any.turns.num_taken < self._express.turns.num_taken:
            return self._any
        return self._express


class _Lane:
    """One helper, and the jobs that wait for it."""

    def __init__(self, spec: HelperSpec) -> None:
        self.helper = _Helper(spec)
        self.turns = TextTurns(1)


class _Helper:
    """One process, started when it is first needed; it has at most one job."""

    def __init__(self, spec: HelperSpec) -> None:
        self._spec = spec
        self._process: Process | None = None
        self._is_closed = False

    async def start(self) -> Process:
        if self._process is None or self._process.returncode is not None:
            if self._is_closed:
                raise Overloaded("the gateway is being stopped", retry_after_s=RETRY_AFTER_S)
            arguments = [str(self._spec.directory)]
            if self._spec.chat_template is not None:
                arguments.append(self._spec.chat_template)
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "baton.gateway.text.helper", *arguments, stdin=PIPE, stdout=PIPE
            )
        return self._process

    async def do(self, job: TextJob) -> Result:
        process = await self.start()
        try:
            async with asyncio.timeout(MAX_JOB_S):
                return await _exchange(process, job)
        except TimeoutError:
            await self._kill()
            raise InvalidRequest(f"the body takes longer than {MAX_JOB_S:g} s to be read") from None
        except (OSError, EOFError, msgspec.MsgspecError) as error:
            await self._kill()
            logger.warning("a text helper failed: %r", error)
            raise Overloaded("a text helper failed", retry_after_s=RETRY_AFTER_S) from None

    async def close(self) -> None:
        self._is_closed = True
        await self._kill()

    async def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            assert process.stdin is not None
            process.stdin.close()
            await process.wait()


async def _exchange(process: Process, job: TextJob) -> Result:
    """Raises OSError and EOFError when the process has ended."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(frame(job))
    await process.stdin.drain()
    head = await process.stdout.readexactly(LENGTH_BYTES)
    return RESULTS.decode(await process.stdout.readexactly(int.from_bytes(head, "big")))


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

    async def read_call(
        self, kind: Kind, data: bytes, request_policy: ReadTerms, tenant: str = ""
    ) -> ReadCall:
        """Raises InvalidRequest and ApiError, which say what the client should change."""
        read = await self._read(kind, data, request_policy, tenant)
        if isinstance(read, ReadCall):
            return read
        assert isinstance(read, TextDone)
        body = read.chat or read.completion
        assert body is not None
        prompts = list[Prompt]()
        for text, token_ids in read.prompts:
            prompts.append(unpacked_prompt(text, token_ids))
            await asyncio.sleep(0)  # a prompt of the longest takes two milliseconds
        return ReadCall(body, tuple(prompts), read.has_tools, read.num_unknown)

    async def read_text(
        self, kind: Kind, data: bytes, request_policy: ReadTerms, tenant: str = ""
    ) -> TextAnswer:
        """The answer of `/tokenize` or `/detokenize`. Raises InvalidRequest and ApiError."""
        read = await self._read(kind, data, request_policy, tenant)
        if isinstance(read, TextAnswer):
            return read
        assert isinstance(read, TextDone) and read.answer is not None
        return TextAnswer(read.answer, read.num_unknown)

    async def _read(
        self, kind: Kind, data: bytes, request_policy: ReadTerms, tenant: str
    ) -> ReadCall | TextAnswer | TextDone:
        if len(data) <= SMALL_BYTES or self._pool is None:
            return self._reader.read(kind, data, request_policy)
        result = await self._pool.do(tenant, TextJob(kind, request_policy, data))
        if isinstance(result, TextFailed):
            raise_failed(result)
        assert isinstance(result, TextDone)
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


class ServedModel(msgspec.Struct, kw_only=True):
    """The model that a gateway serves: its name, its text, its limits."""

    name: str
    text: TextWork
    service: Service
    created_s: int  # when it began to be served, by the calendar
    defaults: SamplingDefaults = SamplingDefaults()  # of sampling, for requests that give none
    known_length: int | None = None  # tokens that workers took when there last were any

    def request_policy(self, tenant: Tenant, *, is_strict: bool = False) -> ReadTerms:
        """What a body of the tenant is checked against."""
        return ReadTerms(
            model=self.name,
            may_use=tenant.may_use(self.name),
            max_model_len=self.find_length(),
            is_strict=is_strict,
        )

    @property
    def fingerprint(self) -> str:
        """Of the weights, as the workers say; of all, while workers are replaced by others."""
        return " ".join(sorted({worker.fingerprint for worker in self.service.workers}))

    def check(self, asked_for: str | None, tenant: Tenant) -> None:
        """None asks for whatever there is. Raises ApiError 404 and 403."""
        self.request_policy(tenant).check_model(asked_for)

    def find_length(self) -> int | None:
        """Tokens that the worker takes which takes the fewest, so that any may be chosen.

        Where all are away, as it was: whoever is started again takes as many. None where there has never been
        one.
        """
        self.known_length = min(
            (worker.max_model_len for worker in self.service.workers), default=self.known_length
        )
        return self.known_length
