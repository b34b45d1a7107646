"""Reads bodies: small ones on the event loop, large ones in two helper processes.

Reading a large body holds the interpreter's lock: a thread would delay the event loop, a process does not.

1. `TextWork.read` chooses a helper. One of the two takes no job above EXPRESS_BYTES: ordinary prompts never
   wait for the largest ones alone.
2. The job waits for its tenant's turn: tenants share a helper fairly, by bytes (baton/fair_queue.py).
3. The gateway writes a frame to the helper's standard input: the length, then a `ReadJob`. The helper answers
   on its standard output with a frame that holds a `ReadBody` or a `ReadFailed`.
4. The helper takes the next job when the result is there, also when the caller has been cancelled meanwhile.
5. A job that takes longer than MAX_JOB_S fails, and so does the job of a helper that ends. The gateway kills
   that helper, and the next job starts another one.

A helper is this module run as a program: `python -m baton.gateway.text.work DIRECTORY [TEMPLATE]`. It has the
model's directory alone, no key and no socket, and a lower priority than the gateway. It ends at the end of
its input, which is also the end of the gateway.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections import deque
from pathlib import Path
from typing import BinaryIO, Final, TypeAlias

import msgspec

from baton.errors import BatonError, InvalidRequest, ModelError, Overloaded
from baton.fair_queue import FairShare
from baton.gateway.api.errors import ApiError, as_api_error
from baton.gateway.api.prompt_reader import BodyKind, PromptReader, ReadBody, ReadPolicy
from baton.gateway.streams.request_stream import Service
from baton.gateway.tenants.tenants import Tenant
from baton.gateway.text.chat_template import ChatTemplate
from baton.gateway.text.model_files import SamplingDefaults, read_vocab_size
from baton.gateway.text.tokenizer import Tokenizer
from baton.gateway.text.tools import ToolForm
from baton.tenants import has_slots

SMALL_BYTES: Final = 4096  # a body of this size is read in well below a millisecond
EXPRESS_BYTES: Final = 64 * 2**10
MAX_WAITING: Final = 256  # jobs a helper
MAX_JOB_S: Final = 30.0
RETRY_AFTER_S: Final = 1.0
LENGTH_BYTES: Final = 4
NICENESS: Final = 10  # of a helper

logger = logging.getLogger(__name__)


class ReadJob(msgspec.Struct, frozen=True):
    """A body for a helper to read."""

    kind: BodyKind
    policy: ReadPolicy
    data: bytes


class ReadFailed(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The fields of an ApiError. With a status of 500 the message is for the log, not for the client."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    retry_after_s: float | None = None


ReadResult: TypeAlias = ReadBody | ReadFailed
_JOBS: Final = msgspec.msgpack.Decoder(ReadJob)
_RESULTS: Final[msgspec.msgpack.Decoder[ReadResult]] = msgspec.msgpack.Decoder(ReadResult)


class HelperSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The model that a helper reads for."""

    directory: Path
    chat_template: str | None = None  # a file in place of the model's own


class TextWork:
    """Reads the bodies of one gateway, on one event loop; `close` ends its helpers."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        chat_template: ChatTemplate | None,
        *,
        vocab_size: int | None = None,
        helpers: HelperSpec | None = None,
    ) -> None:
        """helpers: how to start them; None: every body is read on the event loop."""
        self.reader = PromptReader(tokenizer, chat_template, vocab_size)
        self.tokenizer = tokenizer  # None when the model has none
        # The form in which the model calls tools; None when Baton does not read that form.
        self.tool_form: ToolForm | None = None if chat_template is None else chat_template.tool_form
        self._helpers = () if helpers is None else (_Helper(helpers), _Helper(helpers))

    async def start(self) -> None:
        """Start the helpers, so that no request waits for their start."""
        await asyncio.gather(*(helper.start() for helper in self._helpers))

    async def read(self, kind: BodyKind, data: bytes, policy: ReadPolicy, tenant: str = "") -> ReadBody:
        """Read one body.

        Raises InvalidRequest and ApiError for what the client can mend, Overloaded when too many bodies wait
        or a helper fails, and ModelError for a fault of the model's files.
        """
        if len(data) <= SMALL_BYTES or not self._helpers:
            return self.reader.read(kind, data, policy)
        express, largest = self._helpers
        is_express = len(data) <= EXPRESS_BYTES and express.turns.num_taken <= largest.turns.num_taken
        result = await (express if is_express else largest).do(tenant, ReadJob(kind, policy, data))
        if isinstance(result, ReadBody):
            return result
        if result.status == 500:
            raise ModelError(f"a text helper failed: {result.message}")
        raise ApiError(
            result.status,
            result.message,
            code=result.code,
            param=result.param,
            retry_after_s=result.retry_after_s,
        )

    async def close(self) -> None:
        """Kill the helpers; their jobs fail. May be called twice."""
        for helper in self._helpers:
            await helper.close()


class ServedModel(msgspec.Struct, kw_only=True):
    """The model that a gateway serves: its name, its text, its limits."""

    name: str
    text: TextWork
    service: Service
    created_s: int  # start of serving, in seconds since 1970
    defaults: SamplingDefaults = SamplingDefaults()
    known_length: int | None = None  # the last known context length of the workers

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the weights; several while workers are being replaced."""
        return " ".join(sorted({worker.fingerprint for worker in self.service.workers}))

    def read_policy(self, tenant: Tenant, *, is_strict: bool = False) -> ReadPolicy:
        """Return the limits for a body of the tenant.

        The context length is the shortest of all workers, so that any worker may be chosen. While there are
        no workers the last known length holds: a restarted worker takes as many tokens.
        """
        self.known_length = min(
            (worker.max_model_len for worker in self.service.workers), default=self.known_length
        )
        return ReadPolicy(
            model=self.name,
            may_use=tenant.may_use(self.name),
            max_model_len=self.known_length,
            is_strict=is_strict,
        )


class _Waiting:
    __slots__ = ("num_bytes", "turn")

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.turn = asyncio.get_running_loop().create_future()


class TextTurns:
    """The order in which jobs have one helper: tenants take turns, by bytes."""

    def __init__(self) -> None:
        self._is_free = True
        self._num_waiting = 0
        self._share = FairShare()
        self._lanes: dict[str, deque[_Waiting]] = {}  # by tenant, none empty

    @property
    def num_taken(self) -> int:
        """The job that has the helper, and the jobs that wait for it."""
        return self._num_waiting + (not self._is_free)

    async def take(self, tenant: str, num_bytes: int) -> None:
        """Wait for the helper; the caller must then call `leave`.

        Raises Overloaded when too many jobs wait, of the tenant or of all.
        """
        if self._is_free:
            self._is_free = False
            return
        lane = self._lanes.get(tenant, deque[_Waiting]())
        if not has_slots(tenant, 1, len(lane), MAX_WAITING - self._num_waiting):
            message = f"{self._num_waiting} texts wait for their turn, {len(lane)} of them the tenant's"
            raise Overloaded(message, retry_after_s=RETRY_AFTER_S)
        waiting = _Waiting(num_bytes)
        lane.append(waiting)
        self._lanes[tenant] = lane
        self._num_waiting += 1
        self._share.join(tenant, 1.0)
        try:
            await waiting.turn
        except asyncio.CancelledError:
            if not waiting.turn.cancelled():
                self.leave()  # the turn came in the same moment; the next job has it
            elif waiting in self._lanes.get(tenant, ()):
                self._remove(tenant, waiting)
            raise

    def leave(self) -> None:
        """Give the helper to the waiting tenant that has had least of it."""
        self._share.age()  # a tenant that was away may have its share of the last few turns
        while (tenant := self._share.first()) is not None:
            waiting = self._lanes[tenant][0]
            is_there = not waiting.turn.cancelled()  # a cancelled job's task may not have run since
            if is_there:
                self._share.serve(tenant, waiting.num_bytes)
                waiting.turn.set_result(None)
            self._remove(tenant, waiting)
            if is_there:
                return
        self._is_free = True

    def _remove(self, tenant: str, waiting: _Waiting) -> None:
        lane = self._lanes[tenant]
        lane.remove(waiting)
        self._num_waiting -= 1
        if not lane:
            del self._lanes[tenant]
            self._share.leave(tenant)


class _Helper:
    """One helper process, started when it is first needed, and the jobs that wait for it."""

    def __init__(self, spec: HelperSpec) -> None:
        self.turns = TextTurns()
        self._spec = spec
        self._process: Process | None = None
        self._running: asyncio.Task[ReadResult] | None = None
        self._is_closed = False

    async def start(self) -> Process:
        if self._process is None or self._process.returncode is not None:
            if self._is_closed:
                raise Overloaded("the gateway is being stopped", retry_after_s=RETRY_AFTER_S)
            arguments = [str(self._spec.directory)]
            if self._spec.chat_template is not None:
                arguments.append(self._spec.chat_template)
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "baton.gateway.text.work", *arguments, stdin=PIPE, stdout=PIPE
            )
        return self._process

    async def do(self, tenant: str, job: ReadJob) -> ReadResult:
        await self.turns.take(tenant, len(job.data))
        self._running = task = asyncio.create_task(self._do(job))
        task.add_done_callback(lambda _: self.turns.leave())
        return await asyncio.shield(task)  # the helper is busy until the result is there

    async def close(self) -> None:
        self._is_closed = True
        await self._kill()

    async def _do(self, job: ReadJob) -> ReadResult:
        process = await self.start()
        assert process.stdin is not None and process.stdout is not None
        try:
            async with asyncio.timeout(MAX_JOB_S):
                process.stdin.write(_frame(job))
                await process.stdin.drain()
                head = await process.stdout.readexactly(LENGTH_BYTES)
                return _RESULTS.decode(await process.stdout.readexactly(int.from_bytes(head, "big")))
        except TimeoutError:
            await self._kill()
            raise InvalidRequest(f"the body takes longer than {MAX_JOB_S:g} s to be read") from None
        except (OSError, EOFError, msgspec.MsgspecError) as error:
            await self._kill()
            logger.warning("a text helper failed: %r", error)
            raise Overloaded("a text helper failed", retry_after_s=RETRY_AFTER_S) from None

    async def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            assert process.stdin is not None
            process.stdin.close()
            await process.wait()


def _frame(message: ReadJob | ReadResult) -> bytes:
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


def serve_jobs(reader: PromptReader, jobs: BinaryIO, results: BinaryIO) -> None:
    """Read the bodies of `jobs` until it ends; a failure ends one job alone."""
    while len(head := jobs.read(LENGTH_BYTES)) == LENGTH_BYTES:
        job = _JOBS.decode(jobs.read(int.from_bytes(head, "big")))
        results.write(_frame(_read(reader, job)))
        del job
        results.flush()


def _read(reader: PromptReader, job: ReadJob) -> ReadResult:
    try:
        return reader.read(job.kind, job.data, job.policy)
    except (RecursionError, MemoryError) as error:
        message = f"the body is too much to be read: {type(error).__name__}"
        return ReadFailed(status=400, message=message)
    except Exception as error:
        if not isinstance(error, BatonError):
            logger.exception("a body could not be read")
        answer = as_api_error(error)
        return ReadFailed(
            status=answer.status,
            message=str(error).encode("utf-8", "backslashreplace").decode(),
            code=answer.code,
            param=answer.param,
            retry_after_s=answer.retry_after_s,
        )


def _main(directory: str, template: str | None = None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: the gateway ends a helper
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    path = Path(directory)
    try:
        chat_template = ChatTemplate.from_directory(path, template)
        reader = PromptReader(Tokenizer.find(path), chat_template, read_vocab_size(path))
        serve_jobs(reader, sys.stdin.buffer, sys.stdout.buffer)
    except (BrokenPipeError, BatonError) as error:
        sys.exit(f"text helper: {error}")


if __name__ == "__main__":
    _main(*sys.argv[1:])
