"""Reads the bodies of requests, on the event loop or in helper processes, and names the served models.

`PromptReader` (gateway/api/prompt_reader.py) reads one body; reading is pure. Decoding JSON and rendering
templates hold the interpreter's lock, so a thread that read a large body would delay the event loop.
`BodyReader` reads small bodies on the event loop. Two helper processes read the large ones, and small chats
of which the template makes a long text:

1. `BodyReader.read` chooses a helper. One of the two takes no job above EXPRESS_BYTES: ordinary prompts never
   wait for the largest ones alone.
2. The job waits in the helper's queue: tenants share a helper fairly, by bytes (baton/fair_queue.py).
3. The gateway writes a frame with a `ReadJob` to the helper's standard input, then the body as it is. The
   helper answers on its standard output with a frame that holds an `AskedCall`, a `TextAnswer` or a
   `ReadFailed`. A frame is a length and a message in msgpack.
4. The helper takes the next job when the result is there, also when the caller has been cancelled meanwhile.
5. A job that takes longer than MAX_JOB_S fails, and so does the job of a helper that ends. The gateway kills
   that helper, and the next job starts another one.

A helper is this module run as a program: `python -m baton.gateway.api.body_reader DIRECTORY SETTINGS`. The
helper has the model's directory, no key and no socket, and a lower priority than the gateway. The helper ends
at the end of its input, which is also the end of the gateway.
"""

import asyncio
import contextlib
import logging
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import BinaryIO, Final, Generic, NamedTuple, TypeAlias, TypeVar

import msgspec

from baton.adapters import NamedAdapter
from baton.config.gateway import TextSettings
from baton.errors import BatonError, InvalidRequest, ModelError, Overloaded
from baton.fair_queue import FairShare
from baton.gateway.api.body import early_text
from baton.gateway.api.call import AskedCall
from baton.gateway.api.errors import ApiError, as_api_error
from baton.gateway.api.prompt_reader import (
    BodyKind,
    LongText,
    PromptReader,
    ReadPolicy,
    TextAnswer,
)
from baton.gateway.streams.request_stream import Service
from baton.gateway.tenants.tenants import Tenant
from baton.messages.orders import Sleep, Wake
from baton.messages.workers import Worker, WorkerRole, are_asleep
from baton.request import SamplingParams
from baton.rpc.process import LENGTH_BYTES, frame, lower_priority
from baton.tenants import has_slots

SMALL_BYTES: Final = 4096  # bodies and chats of this size are read on the event loop, in a millisecond or two
EXPRESS_BYTES: Final = 64 * 2**10
MAX_WAITING: Final = 256  # jobs a helper
MAX_JOB_S: Final = 30.0
RETRY_AFTER_S: Final = 1.0

MAX_PUBLIC_TOKENS: Final = 2**17  # of one text of `public_prefixes`
MAX_PUBLIC_TEXTS: Final = 1024  # that are kept, those of former tenants files included
PublicForms: TypeAlias = tuple[tuple[int, ...], ...]  # token ids of each form of a public text

logger = logging.getLogger(__name__)


class PublicPrefixes:
    """The texts of `public_prefixes`: prompts of several tenants begin with them and share their pages.

    A text is known in two forms: as a prompt that begins with it, and as the system message of a chat in the
    model's own template. Only the tokens of a public text are ever shared, never the tokens after them. Each
    text is tokenised once, in a thread.
    """

    def __init__(self, reader: PromptReader) -> None:
        self._reader = reader
        self._forms: dict[str, asyncio.Future[PublicForms]] = {}

    async def num_tokens(self, texts: Sequence[str], token_ids: Sequence[int]) -> int:
        """Return how many of a prompt's first tokens belong to one of the texts."""
        longest = 0
        for text in texts:
            for form in await asyncio.shield(self._forms_of(text)):
                pairs = zip(form, token_ids[: len(form)], strict=False)
                longest = max(longest, sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)))
        return longest

    def _forms_of(self, text: str) -> asyncio.Future[PublicForms]:
        forms = self._forms.get(text)
        if forms is None:
            if len(self._forms) >= MAX_PUBLIC_TEXTS:
                self._forms.clear()
            forms = self._forms[text] = asyncio.ensure_future(asyncio.to_thread(self._encode, text))
        return forms

    def _encode(self, text: str) -> PublicForms:
        forms = list[tuple[int, ...]]()
        for encode in (self._as_prompt, self._as_system_message):
            try:
                forms.append(tuple(encode(text)))
            # No tokenizer, no template, one without system messages, or a damaged one.
            except (InvalidRequest, ModelError) as error:
                told = {"form": encode.__name__, "num_chars": len(text), "error": str(error)}
                logger.info("a public text lacks a form", extra=told)
        return tuple(forms)

    def _as_prompt(self, text: str) -> list[int]:
        return self._reader.encode(text, max_tokens=MAX_PUBLIC_TOKENS)

    def _as_system_message(self, text: str) -> list[int]:
        messages = [{"role": "system", "content": text}]
        return self._reader.encode_chat(messages, max_tokens=MAX_PUBLIC_TOKENS, add_generation_prompt=False)


class ReadJob(msgspec.Struct, frozen=True):
    """A body for a helper to read."""

    kind: BodyKind
    policy: ReadPolicy
    num_bytes: int  # of the body, which follows
    history: bytes = b""  # the conversation before the body of a response


class ReadFailed(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The fields of an ApiError. With a status of 500 the message is for the log, not for the client."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    retry_after_s: float | None = None


ResultT = TypeVar("ResultT")
Job: TypeAlias = Callable[[], Awaitable[ResultT]]
ReadResult: TypeAlias = AskedCall | TextAnswer | ReadFailed
_JOBS: Final = msgspec.msgpack.Decoder(ReadJob)
_RESULTS: Final[msgspec.msgpack.Decoder[ReadResult]] = msgspec.msgpack.Decoder(ReadResult)


class BodyReader:
    """Reads the bodies of one gateway, on one event loop; `close` ends its helpers."""

    def __init__(self, reader: PromptReader, helper_arguments: Sequence[str] = ()) -> None:
        """helper_arguments: of a helper's program; none: every body is read on the event loop."""
        self.reader = reader
        self.public = PublicPrefixes(reader)
        self._helpers = (_Helper(helper_arguments), _Helper(helper_arguments)) if helper_arguments else ()

    @classmethod
    def from_directory(cls, directory: Path, settings: TextSettings | None = None) -> "BodyReader":
        """Return the reader for the model of `PromptReader.from_directory`, with helpers."""
        settings = settings or TextSettings()
        reader = PromptReader.from_directory(directory, settings)
        return cls(reader, [str(directory), msgspec.json.encode(settings).decode()])

    async def start(self) -> None:
        """Start the helpers, so that no request waits for their start."""
        await asyncio.gather(*(helper.start() for helper in self._helpers))

    async def read(
        self, kind: BodyKind, data: bytes, policy: ReadPolicy, tenant: str = "", history: bytes = b""
    ) -> AskedCall | TextAnswer:
        """Read one body. history: the conversation before the body of a response.

        Raises InvalidRequest and ApiError for faults of the client, Overloaded when too many bodies wait or a
        helper fails, and ModelError for a fault of the model's files.
        """
        if not self._helpers:
            return self.reader.read(kind, data, policy, history)
        size = len(data) + len(history)
        if size <= SMALL_BYTES:
            try:
                small = msgspec.structs.replace(policy, max_chars=SMALL_BYTES)
                return self.reader.read(kind, data, small, history)
            except LongText as found:
                size = found.num_chars
        express, largest = self._helpers
        is_express = size <= EXPRESS_BYTES and express.jobs.num_taken <= largest.jobs.num_taken
        helper = express if is_express else largest
        result = await helper.do(tenant, size, ReadJob(kind, policy, len(data), history), data)
        if not isinstance(result, ReadFailed):
            return result
        if result.status == 500:
            raise ModelError(f"a text helper failed: {result.message}")
        raise ApiError(**msgspec.structs.asdict(result))

    async def close(self) -> None:
        """Kill the helpers; their jobs fail. May be called twice."""
        for helper in self._helpers:
            await helper.close()


class ModelView(NamedTuple):
    """The workers of one model."""

    workers: Sequence[Worker]
    is_asleep: bool  # all decode workers of the model sleep
    # The shortest context length of the workers, so that any worker may be chosen. Without workers the last
    # known length holds: a restarted worker takes as many tokens.
    max_model_len: int | None


class OpenOrder(msgspec.Struct, frozen=True):
    """An operator's order that not all workers of a model have followed."""

    order: Sleep | Wake
    workers: frozenset[str]  # names; one that falls asleep, or wakes, is absent for a while


class ServedModel(msgspec.Struct, kw_only=True):
    """A model that a gateway serves: its name, the reader of its bodies, its limits."""

    name: str
    key: str = ""  # `Request.model` of its requests: its name, or "" where the gateway serves one model
    open_order: OpenOrder | None = None  # the latest of this gateway
    bodies: BodyReader
    service: Service
    created_s: int  # start of serving, in seconds since 1970
    defaults: SamplingParams = SamplingParams(max_tokens=None)  # max_tokens caps every answer
    adapters: dict[str, NamedAdapter] = msgspec.field(default_factory=dict)  # by name
    _viewed: Sequence[Worker] | None = None  # the workers of the service that `_view` was made of
    _view: ModelView = ModelView((), is_asleep=False, max_model_len=None)

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the weights; several while workers are being replaced."""
        return " ".join(sorted({worker.fingerprint for worker in self.view.workers}))

    @property
    def view(self) -> ModelView:
        """The workers of the model.

        The view is cached until the list of workers changes: each call asks several times, and there may be a
        thousand workers.
        """
        listed = self.service.workers
        if listed is not self._viewed:
            workers = [worker for worker in listed if worker.serves(self.key)]
            length = min((each.max_model_len for each in workers), default=self._view.max_model_len)
            self._view = ModelView(workers, are_asleep(listed, self.key), length)
            self._viewed = listed
        return self._view

    @property
    def orders(self) -> list[Sleep | Wake]:
        """The orders that this gateway has given, or has heard of from the routers."""
        status = self.service.status
        own = () if self.open_order is None else (self.open_order.order,)
        return [*own, *(() if status is None else status.orders)]

    @property
    def is_changing(self) -> bool:
        """True while the model falls asleep, sleeps or wakes by order: no decode worker takes requests."""
        workers, draining = self.view.workers, self.service.draining
        awake = [each for each in workers if not each.is_asleep and each.id not in draining]
        takes_requests = any(each.role is WorkerRole.DECODE for each in awake)
        return self.open_order is not None or (not takes_requests and any(each.is_asleep for each in workers))

    def read_policy(
        self,
        tenant: Tenant,
        *,
        is_strict: bool = False,
        may_store: bool = False,
    ) -> ReadPolicy:
        """Return the limits for a body of the tenant. may_store: responses are stored."""
        return ReadPolicy(
            model=self.name,
            may_use=tenant.may_use(self.name),
            adapters={name: tenant.may_use(name) for name in self.adapters},
            max_model_len=self.view.max_model_len,
            is_strict=is_strict,
            may_store=may_store,
            defaults=self.defaults,
        )


class ServedModels:
    """The models that a gateway serves, by name. A request that names no model gets the first."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self._models = {model.name: model for model in models}
        self.first = models[0]

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models.values())

    @property
    def names(self) -> list[str]:
        """The names of the models, the first model's first."""
        return list(self._models)

    def find(self, name: str) -> ServedModel | None:
        """Return the model of this name, or with an adapter of this name."""
        return self._models.get(name) or next((each for each in self if name in each.adapters), None)

    def of(self, name: str | None) -> ServedModel:
        """Return the model of this name.

        None and an unknown name give the first model; its policy refuses unknown names.
        """
        return (None if name is None else self.find(name)) or self.first

    def of_body(self, data: bytes) -> ServedModel:
        """Return the model that a body names."""
        return self.first if len(self._models) == 1 else self.of(early_text(data, "model"))


class HelperQueue(Generic[ResultT]):
    """Runs the jobs of one helper, one at a time: tenants take turns, by bytes."""

    def __init__(self) -> None:
        self.num_taken = 0  # jobs that run or wait
        self._share = FairShare()
        # By tenant, none empty: the result of each job that waits, oldest first -> the job and its bytes.
        self._lanes: dict[str, dict[asyncio.Future[ResultT], tuple[Job[ResultT], int]]] = {}
        self._runner: asyncio.Task[None] | None = None  # while there are jobs

    async def run(self, tenant: str, num_bytes: int, job: Job[ResultT]) -> ResultT:
        """Return the result of a job, or raise its error.

        The job is dropped if the caller is cancelled before its turn; a job that has begun runs to its end.
        Raises Overloaded when too many jobs wait, of the tenant or of all.
        """
        lane, num_waiting = self._lanes.get(tenant, {}), max(0, self.num_taken - 1)
        if not has_slots(tenant, 1, len(lane), MAX_WAITING - num_waiting):
            message = f"{num_waiting} texts wait for their turn, {len(lane)} of them the tenant's"
            raise Overloaded(message, retry_after_s=RETRY_AFTER_S)
        result: asyncio.Future[ResultT] = asyncio.get_running_loop().create_future()
        lane[result] = job, num_bytes
        self._lanes[tenant] = lane
        self._share.join(tenant, 1.0)
        self.num_taken += 1
        if self._runner is None:
            self._runner = asyncio.create_task(self._run_all())
        try:
            return await result
        except asyncio.CancelledError:
            if result in self._lanes.get(tenant, ()):
                self._remove(tenant, result)
                self.num_taken -= 1
            raise

    async def _run_all(self) -> None:
        while (tenant := self._share.first()) is not None:
            result, (job, num_bytes) = next(iter(self._lanes[tenant].items()))
            if not result.cancelled():  # a cancelled caller may not have run since
                self._share.age()  # a tenant that was away may have its share of the last few turns
                self._share.serve(tenant, num_bytes)
            self._remove(tenant, result)
            if not result.cancelled():
                await _settle(result, job)
            self.num_taken -= 1
        self._runner = None

    def _remove(self, tenant: str, result: asyncio.Future[ResultT]) -> None:
        lane = self._lanes[tenant]
        del lane[result]
        if not lane:
            del self._lanes[tenant]
            self._share.leave(tenant)


async def _settle(result: asyncio.Future[ResultT], job: Job[ResultT]) -> None:
    """Run a job and set its result, unless its caller has been cancelled."""
    try:
        value = await job()
    except Exception as error:
        if not result.cancelled():
            result.set_exception(error)
    else:
        if not result.cancelled():
            result.set_result(value)


class _Helper:
    """One helper process, started when it is first needed, and the jobs that wait for it."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self.jobs: HelperQueue[ReadResult] = HelperQueue()
        self._arguments = arguments
        self._process: Process | None = None
        self._is_closed = False

    async def start(self) -> Process:
        if self._process is None or self._process.returncode is not None:
            if self._is_closed:
                raise Overloaded("the gateway is being stopped", retry_after_s=RETRY_AFTER_S)
            command = (sys.executable, "-m", "baton.gateway.api.body_reader", *self._arguments)
            self._process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
        return self._process

    async def do(self, tenant: str, size: int, job: ReadJob, data: bytes) -> ReadResult:
        """size: what the tenant is charged for the job: bytes, or the characters of a longer text."""
        return await self.jobs.run(tenant, size, partial(self._do, job, data))

    async def close(self) -> None:
        self._is_closed = True
        await self._kill()

    async def _do(self, job: ReadJob, data: bytes) -> ReadResult:
        """Do the job. If a helper that has done others dies, a new one tries: it may have been killed."""
        for _ in range(2):
            former, process = self._process, await self.start()
            assert process.stdin is not None and process.stdout is not None
            try:
                async with asyncio.timeout(MAX_JOB_S):
                    process.stdin.writelines((frame(job), data))  # no copy of a large body
                    await process.stdin.drain()
                    head = await process.stdout.readexactly(LENGTH_BYTES)
                    return _RESULTS.decode(await process.stdout.readexactly(int.from_bytes(head, "big")))
            except TimeoutError:
                await self._kill()
                raise InvalidRequest(f"the body takes longer than {MAX_JOB_S:g} s to be read") from None
            except (OSError, EOFError, msgspec.MsgspecError) as error:
                await self._kill()
                logger.warning("a text helper failed: %r", error)
                if process is not former:
                    break
        raise Overloaded("a text helper failed", retry_after_s=RETRY_AFTER_S)

    async def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            assert process.stdin is not None
            process.stdin.close()
            await process.wait()


def serve_jobs(reader: PromptReader, jobs: BinaryIO, results: BinaryIO) -> None:
    """Read the bodies of `jobs` until their end; a failure ends only its own job."""
    while len(head := jobs.read(LENGTH_BYTES)) == LENGTH_BYTES:
        job = _JOBS.decode(jobs.read(int.from_bytes(head, "big")))
        results.write(frame(_read(reader, job, jobs.read(job.num_bytes))))
        results.flush()


def _read(reader: PromptReader, job: ReadJob, data: bytes) -> ReadResult:
    try:
        return reader.read(job.kind, data, job.policy, job.history)
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


def _main(directory: str, settings: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: the gateway ends a helper
    lower_priority()
    try:
        reader = PromptReader.from_directory(
            Path(directory), msgspec.json.decode(settings, type=TextSettings)
        )
        serve_jobs(reader, sys.stdin.buffer, sys.stdout.buffer)
    except (BrokenPipeError, BatonError) as error:
        sys.exit(f"text helper: {error}")


if __name__ == "__main__":
    _main(*sys.argv[1:])
