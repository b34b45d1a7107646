"""Checks forms of answers (structured output) before requests with them are accepted.

To compile a hostile schema can take minutes and gigabytes, and the grammar library cannot be interrupted.
Each form is therefore compiled in a process of its own:

1. `FormChecker.check` knows the forms of a tenant that were checked lately, and lets a tenant check one new
   form at a time: a tenant with hostile forms waits for itself alone.
2. The gateway writes a `CheckJob` to the form server, a process that has the library loaded.
3. The form server forks a child for the job. The child compiles the form within limits of processor time and
   memory, and writes what it found to a pipe.
4. The form server answers with a `Checked`, in the order in which children end.

The form server is this module run as a program. It ends at the end of its input, the end of the gateway.
"""

import asyncio
import contextlib
import logging
import os
import resource
import selectors
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections import Counter, OrderedDict
from hashlib import blake2b
from itertools import count
from typing import Final, NoReturn
from weakref import WeakValueDictionary

import msgspec

from baton.errors import InvalidRequest, Overloaded
from baton.gateway.metrics.metrics import CheckTimes
from baton.json_schema.patterns import byte_tokenizer
from baton.request import StructuredOutputs
from baton.rpc.process import LENGTH_BYTES, frame, lower_priority
from baton.structured_output import check_form

MAX_CHECKED: Final = 256  # forms that are remembered for each tenant
MAX_TENANTS: Final = 1024  # with forms that are remembered
DIGEST_BYTES: Final = 32
MAX_CPU_S: Final = 0.25  # real schemas take a few milliseconds; an engine compiles the form once more
MAX_MEMORY_BYTES: Final = 2**30
MAX_WAIT_S: Final = 10.0
MAX_CHILDREN: Final = 16
RETRY_AFTER_S: Final = 1.0
DONE: Final = b"."  # before the error message of a child, which is empty for a form that can be honoured
TOO_MUCH: Final = f"it takes more than {1000 * MAX_CPU_S:.0f} ms, or too much memory, to compile"

logger = logging.getLogger(__name__)


class CheckJob(msgspec.Struct, frozen=True):
    """A form for the form server to check."""

    number: int
    form: StructuredOutputs


class Checked(msgspec.Struct, frozen=True):
    """The answer to a job; `error` is None for a form that can be honoured."""

    number: int
    error: str | None


_JOBS: Final = msgspec.msgpack.Decoder(CheckJob)
_RESULTS: Final = msgspec.msgpack.Decoder(Checked)


class FormChecker:
    """Checks the forms of one gateway, on one event loop; `close` ends its process."""

    def __init__(self) -> None:
        # Checks by outcome: "known" (checked before), "accepted", "refused", "too_long", "failed".
        self.outcomes: Counter[str] = Counter()
        self.times = CheckTimes()  # seconds of the checks that were not known
        self._process: Process | None = None
        self._starting = asyncio.Lock()
        self._reading: asyncio.Task[None] | None = None
        self._numbers = count()
        self._waiting: dict[int, asyncio.Future[str | None]] = {}
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # of tenants that wait
        self._at_once = asyncio.Semaphore(MAX_CHILDREN)
        self._checked: OrderedDict[str, OrderedDict[bytes, None]] = OrderedDict()  # digests of forms
        self._is_closed = False

    async def check(self, tenant: str, form: StructuredOutputs) -> None:
        """Raise InvalidRequest for a form that cannot be honoured, Overloaded when the server fails."""
        digest = blake2b(msgspec.msgpack.encode(form), digest_size=DIGEST_BYTES).digest()
        if digest in self._checked.get(tenant, ()):
            self.outcomes["known"] += 1
            return
        turn = self._turns.setdefault(tenant, asyncio.Lock())
        async with turn, self._at_once:
            began_s, outcome = time.monotonic(), "failed"
            try:
                error = await self._ask(form)
                outcome = "accepted" if error is None else "too_long" if error == TOO_MUCH else "refused"
            finally:
                self.outcomes[outcome] += 1
                self.times.observe(time.monotonic() - began_s)
        if error is not None:
            raise InvalidRequest(error)
        self._remember(tenant, digest)

    async def close(self) -> None:
        """Kill the form server; checks under way fail. May be called twice."""
        async with self._starting:
            self._is_closed = True
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        if self._reading is not None:
            await self._reading

    async def _ask(self, form: StructuredOutputs) -> str | None:
        process, number = await self._started(), next(self._numbers)
        answered: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answered
        try:
            assert process.stdin is not None
            process.stdin.write(frame(CheckJob(number, form)))
            async with asyncio.timeout(MAX_WAIT_S):
                return await answered
        except (OSError, TimeoutError) as error:
            logger.warning("the form server failed: %r", error)
            raise Overloaded("a form could not be checked", retry_after_s=RETRY_AFTER_S) from None
        finally:
            del self._waiting[number]

    async def _started(self) -> Process:
        async with self._starting:
            if self._is_closed:
                raise Overloaded("the gateway is being stopped", retry_after_s=RETRY_AFTER_S)
            if self._process is None:
                command = (sys.executable, "-m", "baton.gateway.api.form_checker")
                self._process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
                self._reading = asyncio.create_task(self._read(self._process))
            return self._process

    async def _read(self, process: Process) -> None:
        assert process.stdout is not None
        with contextlib.suppress(EOFError, OSError):
            while head := await process.stdout.readexactly(LENGTH_BYTES):
                checked = _RESULTS.decode(await process.stdout.readexactly(int.from_bytes(head, "big")))
                answered = self._waiting.get(checked.number)
                if answered is not None and not answered.done():
                    answered.set_result(checked.error)
        self._process = None
        for answered in self._waiting.values():
            if not answered.done():
                answered.set_exception(ConnectionResetError("the form server has ended"))
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()

    def _remember(self, tenant: str, digest: bytes) -> None:
        forms = self._checked.setdefault(tenant, OrderedDict())
        forms[digest] = None
        self._checked.move_to_end(tenant)
        if len(forms) > MAX_CHECKED:
            forms.popitem(last=False)
        if len(self._checked) > MAX_TENANTS:
            self._checked.popitem(last=False)


# The form server.


class FormServer:
    """Forks a child for each job. Single-threaded, so that a fork is safe."""

    def __init__(self, jobs: int, results: int) -> None:
        """The descriptors that jobs are read from and results are written to."""
        self._jobs = jobs
        self._results = results
        self._sources = selectors.DefaultSelector()
        self._unread = bytearray()

    def run(self) -> None:
        """Serve until the end of the jobs."""
        self._sources.register(self._jobs, selectors.EVENT_READ, None)
        while self._jobs in {key.fd for key in self._sources.get_map().values()}:
            for key, _ in self._sources.select():
                if key.data is None:
                    self._read_jobs()
                else:
                    self._answer(key.fd, *key.data)

    def _read_jobs(self) -> None:
        data = os.read(self._jobs, 2**20)
        if not data:
            self._sources.unregister(self._jobs)
        self._unread += data
        while (end := LENGTH_BYTES + int.from_bytes(self._unread[:LENGTH_BYTES], "big")) <= len(self._unread):
            job = _JOBS.decode(self._unread[LENGTH_BYTES:end])
            del self._unread[:end]
            self._fork(job)

    def _fork(self, job: CheckJob) -> None:
        readable, writable = os.pipe()
        pid = os.fork()
        if pid == 0:
            _check_and_exit(job.form, writable)
        os.close(writable)
        self._sources.register(readable, selectors.EVENT_READ, (job.number, pid))

    def _answer(self, readable: int, number: int, pid: int) -> None:
        """A child has written its answer, or has ended without one."""
        self._sources.unregister(readable)
        with open(readable, "rb") as pipe:
            found = pipe.read()
        os.waitpid(pid, 0)
        error = found[1:].decode() if found else TOO_MUCH
        os.write(self._results, frame(Checked(number, error or None)))


def _check_and_exit(form: StructuredOutputs, writable: int) -> NoReturn:
    signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)  # of processor time; the signal ends the process
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # the library's last words
    error = ""
    try:
        check_form(form)
    except InvalidRequest as refused:
        error = str(refused)
    except BaseException:
        os._exit(1)
    os.write(writable, DONE + error.encode("utf-8", "backslashreplace"))
    os._exit(0)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the gateway ends this one
    lower_priority()
    byte_tokenizer()  # children inherit it
    FormServer(sys.stdin.fileno(), sys.stdout.fileno()).run()
