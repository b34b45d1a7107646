"""Checks forms of answers (structured output) before requests with them are accepted.

To compile a hostile schema can take minutes and gigabytes, and the grammar library cannot be interrupted.
Each form is therefore compiled in a process of its own:

1. `FormChecker.check` knows the forms of a tenant that were checked lately, and lets a tenant check one new
   form at a time: a tenant with hostile forms waits for itself alone.
2. The gateway makes a pair of sockets for the job, passes one of them to the form server, a process that has
   the library loaded, and writes the form to the other one.
3. The form server forks a child for the job. The child compiles the form within limits of processor time and
   memory, and writes BEGUN, then DONE and what it found, to the socket.

The form server is this module run as a program. It ends with the socket that it gets jobs from, which the
gateway holds.
"""

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
import sys
import time
from asyncio.subprocess import Process
from collections import Counter, OrderedDict
from hashlib import blake2b
from typing import Final, NamedTuple, NoReturn
from weakref import WeakValueDictionary

import msgspec

from baton.errors import InvalidRequest, Overloaded
from baton.gateway.metrics.metrics import CheckTimes
from baton.json_schema.patterns import byte_tokenizer
from baton.request import StructuredOutputs
from baton.rpc.process import lower_priority
from baton.structured_output import check_form

MAX_CHECKED: Final = 256  # forms that are remembered for each tenant
MAX_TENANTS: Final = 1024  # with forms that are remembered
DIGEST_BYTES: Final = 32
MAX_CPU_S: Final = 0.25  # real schemas take a few milliseconds; an engine compiles the form once more
MAX_MEMORY_BYTES: Final = 2**30
MAX_WAIT_S: Final = 10.0
MAX_CHILDREN: Final = 16
RETRY_AFTER_S: Final = 1.0
BEGUN: Final = b"."  # a child has the job
DONE: Final = b":"  # before the error message of a child, which is empty for a form that can be honoured
TOO_MUCH: Final = f"it takes more than {1000 * MAX_CPU_S:.0f} ms, or too much memory, to compile"

logger = logging.getLogger(__name__)


class FormChecker:
    """Checks the forms of one gateway, on one event loop; `close` ends its process."""

    def __init__(self) -> None:
        # Checks by outcome: "known" (checked before), "accepted", "refused", "too_long", "failed".
        self.outcomes: Counter[str] = Counter()
        self.times = CheckTimes()  # seconds of the checks that were not known
        self._server: _Server | None = None
        self._starting = asyncio.Lock()
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # of tenants that wait
        self._at_once = asyncio.Semaphore(MAX_CHILDREN)
        self._checked: OrderedDict[str, OrderedDict[bytes, None]] = OrderedDict()  # digests of forms
        self._is_closed = False

    async def check(self, tenant: str, form: StructuredOutputs) -> None:
        """Raise InvalidRequest for a form that cannot be honoured, Overloaded when the server fails."""
        digest = blake2b(msgspec.msgpack.encode(form), digest_size=DIGEST_BYTES).digest()
        if self._knows(tenant, digest):
            return
        turn = self._turns.setdefault(tenant, asyncio.Lock())
        async with turn, self._at_once:
            if self._knows(tenant, digest):  # from the turn of another call
                return
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
            await self._end(self._server)

    async def _ask(self, form: StructuredOutputs) -> str | None:
        """Return why a form cannot be honoured, or None. Raises Overloaded when the server fails."""
        server = await self._started()
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        try:
            with theirs:
                socket.send_fds(server.jobs, [b"."], [theirs.fileno()])
            writer.write(msgspec.msgpack.encode(form))
            writer.write_eof()
            async with asyncio.timeout(MAX_WAIT_S):
                begun, is_done, error = (await reader.read()).partition(DONE)
            if not begun:
                raise ConnectionResetError("the form server has ended")
        except OSError as failure:
            logger.warning("the form server failed: %r", failure)
            if not isinstance(failure, TimeoutError):
                await self._end(server)
            raise Overloaded("a form could not be checked", retry_after_s=RETRY_AFTER_S) from None
        finally:
            writer.transport.abort()
        return (error.decode() or None) if is_done else TOO_MUCH

    async def _started(self) -> "_Server":
        async with self._starting:
            if self._is_closed:
                raise Overloaded("the gateway is being stopped", retry_after_s=RETRY_AFTER_S)
            if self._server is None:
                ours, theirs = socket.socketpair()
                ours.setblocking(False)
                with theirs:
                    command = (sys.executable, "-m", "baton.gateway.api.form_checker")
                    process = await asyncio.create_subprocess_exec(*command, stdin=theirs.fileno())
                self._server = _Server(process, ours)
            return self._server

    async def _end(self, server: "_Server | None") -> None:
        """End a form server; the next check starts another one."""
        if server is not None:
            self._server = None if self._server is server else self._server
            server.jobs.close()
            with contextlib.suppress(ProcessLookupError):
                server.process.kill()
            await server.process.wait()

    def _knows(self, tenant: str, digest: bytes) -> bool:
        """Return whether a form was checked lately, and count that."""
        is_known = digest in self._checked.get(tenant, ())
        self.outcomes["known"] += is_known
        return is_known

    def _remember(self, tenant: str, digest: bytes) -> None:
        forms = self._checked.setdefault(tenant, OrderedDict())
        forms[digest] = None
        self._checked.move_to_end(tenant)
        if len(forms) > MAX_CHECKED:
            forms.popitem(last=False)
        if len(self._checked) > MAX_TENANTS:
            self._checked.popitem(last=False)


class _Server(NamedTuple):
    process: Process
    jobs: socket.socket  # takes a byte with the socket of each job


# The form server.


def serve(jobs: socket.socket) -> None:
    """Fork a child for each socket that comes, until the end of the jobs. Single-threaded: a fork is safe."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel keeps no children that have ended
    while received := socket.recv_fds(jobs, 1, 1)[1]:
        if os.fork() == 0:
            jobs.close()
            _check_and_exit(socket.socket(fileno=received[0]))
        os.close(received[0])


def _check_and_exit(job: socket.socket) -> NoReturn:
    """Do a job in a child, which always ends afterwards; the gateway sees how far the job came."""
    try:
        job.sendall(BEGUN)
        signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)  # of processor time; the signal ends the process
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # the library's last words
        error = ""
        try:
            check_form(msgspec.msgpack.decode(job.makefile("rb").read(), type=StructuredOutputs))
        except InvalidRequest as refused:
            error = str(refused)
        job.sendall(DONE + error.encode("utf-8", "backslashreplace"))
    finally:
        os._exit(0)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the gateway ends this one
    lower_priority()
    byte_tokenizer()  # children inherit it
    serve(socket.socket(fileno=sys.stdin.fileno()))
