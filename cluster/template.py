"""The template of this machine's workers: a process that has imported their code and forks each of them.

To import torch and the engine takes seconds of a core and 160 MB in each process that does it. A fork takes
milliseconds, and forked processes share that memory.

1. The runtime starts the template. Its stdin is one end of a pair of sockets.
2. The template imports the code of workers and sends READY. It has one thread and leaves the GPU alone.
3. For each worker the runtime sends two descriptors, the worker's stdin and stdout. The template forks a
   child, which forks the worker and ends. The runtime adopts the orphan: it waits for the worker as for a
   subprocess, and workers outlive the template.
4. When its parent has ended, the worker writes its process id to its stdout. It takes its environment from
   the first line of its stdin, and runs the program of a subprocess.
5. The template ends with the runtime, also in the middle of an import.
"""

import asyncio
import ctypes
import logging
import os
import signal
import socket
import sys
from asyncio import StreamReader, StreamReaderProtocol, WriteTransport
from asyncio.subprocess import Process
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from io import FileIO
from typing import Final, NoReturn

import msgspec
from setproctitle import setproctitle

from baton.cluster.end_with_parent import ending_with_this_process
from baton.config.environment import environment_of_template, replace_environment
from baton.errors import ORPHANED
from baton.rpc.process import frozen_imports

READY: Final = b"r"
FORK: Final = b"f"
START_TIMEOUT_S: Final = 120.0  # importing torch takes a minute from a cold disk on a busy machine
FORK_TIMEOUT_S: Final = 10.0
UNKNOWN_STATUS: Final = 255  # of a child that another part of the program has waited for, as asyncio has it
SET_CHILD_SUBREAPER, GET_CHILD_SUBREAPER = 36, 37  # of prctl
STDIN: Final = 0
STDOUT: Final = 1
THREADS: Final = "OMP_NUM_THREADS"
WORKER_CODE: Final = "baton.cluster.worker_process"

logger = logging.getLogger(__name__)


# In the process of the runtime.


class ForkedProcess:
    """A child of the present process that a template has forked; used as an asyncio.subprocess.Process."""

    def __init__(self, pid: int, stdin: WriteTransport, stdout: StreamReader) -> None:
        self.pid = pid
        self.stdin, self.stdout = stdin, stdout
        self.returncode: int | None = None  # -N: signal N ended the process
        self._has_ended = asyncio.Event()
        pidfd = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(pidfd, self._end, pidfd)

    async def wait(self) -> int:
        """Wait for the end of the process; return `returncode`."""
        await self._has_ended.wait()
        assert self.returncode is not None
        return self.returncode

    def terminate(self) -> None:
        """Send SIGTERM to a process that has no `returncode` yet."""
        os.kill(self.pid, signal.SIGTERM)

    def _end(self, pidfd: int) -> None:
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)
        try:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        except ChildProcessError:
            self.returncode = UNKNOWN_STATUS
        self.stdin.close()
        self._has_ended.set()


class Template:
    """The runtime's end of a template. `fork` starts the template, and starts it again after its death.

    A template that cannot start, or hangs, fails for good.
    """

    def __init__(self, program: Sequence[str], *, limit: int, preload: str = WORKER_CODE) -> None:
        """program: a module and its arguments, see `main`. limit: bytes of a line of a worker's stdout.

        preload: the module with the code of workers.
        """
        self._command = (sys.executable, "-m", "baton.cluster.template", preload, *program)
        self._limit = limit
        self._process: Process | None = None
        self._socket: socket.socket | None = None
        self._one_at_a_time = asyncio.Lock()
        self._has_failed = self._is_closed = False

    async def fork(self, environment: Mapping[str, str]) -> ForkedProcess | None:
        """Start a worker with this environment; None: the template has failed."""
        async with self._one_at_a_time:
            if self._has_failed:
                return None
            try:
                if self._socket is not None:
                    with suppress(ConnectionError):  # the template was killed
                        return await self._fork(self._socket, environment)
                return await self._fork(await self._start(), environment)
            except OSError as error:
                logger.warning("workers start as subprocesses, because their template fails: %s", error)
                self._has_failed = True
                await self._end()
                return None
            except BaseException:
                await self._end()
                raise

    async def close(self) -> None:
        """End the template for good; workers run on."""
        self._is_closed = True
        await self._end()

    async def _end(self) -> None:
        process, self._process = self._process, None
        connection, self._socket = self._socket, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            _reap_group(process.pid)
        if connection is not None:
            connection.close()

    async def _start(self) -> socket.socket:
        await self._end()
        if self._is_closed:
            raise ConnectionError("it has been closed")
        self._socket, theirs = socket.socketpair()
        connection = self._socket
        connection.setblocking(False)
        environment = environment_of_template(len(os.sched_getaffinity(0)))
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                *ending_with_this_process(self._command),
                stdin=theirs.fileno(),
                process_group=0,
                env=environment,
            )
        async with asyncio.timeout(START_TIMEOUT_S):
            answer = await asyncio.get_running_loop().sock_recv(connection, len(READY))
        if not answer:
            raise ConnectionError("it ended before it was ready")
        return connection

    async def _fork(self, template: socket.socket, environment: Mapping[str, str]) -> ForkedProcess:
        loop, lines = asyncio.get_running_loop(), StreamReader(self._limit)
        with ExitStack() as failing:
            stdin, into = _open_pipe(failing)
            out, stdout = _open_pipe(failing)
            writer, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, into)
            failing.callback(writer.abort)  # a worker that was forked after all ends when its stdin does
            reader, _ = await loop.connect_read_pipe(lambda: StreamReaderProtocol(lines), out)
            failing.callback(reader.close)
            with _adopting_orphans():
                socket.send_fds(template, [FORK], [stdin.fileno(), stdout.fileno()])
                stdout.close()  # the worker, or the template, has the only one, and closes it when it ends
                async with asyncio.timeout(FORK_TIMEOUT_S):
                    pid = await lines.readline()
            if not pid:
                raise ConnectionError("it has ended")
            # Raises ChildProcessError when the worker was not adopted.
            os.waitid(os.P_PID, int(pid), os.WEXITED | os.WNOHANG | os.WNOWAIT)
            process = ForkedProcess(int(pid), writer, lines)
            failing.pop_all()
        stdin.close()
        variables = [(os.fsencode(name), os.fsencode(value)) for name, value in environment.items()]
        writer.write(msgspec.json.encode(variables) + b"\n")
        return process


def _reap_group(group: int) -> None:
    """Wait for the dead children of this process group: a template that is killed in a fork leaves one."""
    with suppress(ChildProcessError):
        while os.waitpid(-group, os.WNOHANG)[0]:
            continue


def _open_pipe(ends: ExitStack) -> tuple[FileIO, FileIO]:
    """Return the read end and the write end of a pipe, which `ends` closes."""
    reader, writer = os.pipe()
    return ends.enter_context(FileIO(reader)), ends.enter_context(FileIO(writer, "w"))


@contextmanager
def _adopting_orphans() -> Iterator[None]:
    """Make the present process the parent of each descendant that loses its parent; Linux only.

    When a worker dies meanwhile, its ranks become children, too, and stay zombies until this process ends.
    """
    prctl, adopted = ctypes.CDLL(None).prctl, ctypes.c_int()
    prctl(GET_CHILD_SUBREAPER, ctypes.byref(adopted), 0, 0, 0)
    prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(SET_CHILD_SUBREAPER, adopted.value, 0, 0, 0)


# In the template and in workers.


def main() -> NoReturn:
    """Run the template: `python -m baton.cluster.template PRELOADED MODULE ARGUMENT ...`.

    Each worker runs `main` of the second module, which returns the worker's exit status.
    """
    setproctitle("baton template")
    with frozen_imports():
        import_module(sys.argv[1])
        module = import_module(sys.argv[2])
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError("a process with several threads must not fork: locks of other threads stay locked")
    with socket.socket(fileno=STDIN) as runtime:
        runtime.sendall(READY)
        _fork_on_request(runtime)
    sys.argv = sys.argv[2:]
    status = module.main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # to free every object takes a second of a core, most of it to copy shared memory


def _fork_on_request(runtime: socket.socket) -> None:
    """Fork a worker for each request until the runtime ends; return in each worker."""
    while True:
        request, descriptors, _, _ = socket.recv_fds(runtime, len(FORK), 2)
        if not request:
            os._exit(0)
        if _fork_orphan():
            runtime.detach()
            _become_subprocess(*descriptors)
            return
        for descriptor in descriptors:
            os.close(descriptor)


def _fork_orphan() -> bool:
    """Fork an orphan: its parent has ended. Return True in that process."""
    if child := os.fork():
        os.waitpid(child, 0)
        return False
    parent = os.getpid()
    if os.fork():
        os._exit(0)
    while os.getppid() == parent:
        os.sched_yield()
    return True


def _become_subprocess(stdin: int, stdout: int) -> None:
    """Give the present process what it would have as a subprocess of the runtime."""
    setproctitle("baton worker")
    os.setpgid(0, 0)
    os.write(stdout, b"%d\n" % os.getpid())
    for given, wanted in ((stdin, STDIN), (stdout, STDOUT)):
        os.dup2(given, wanted)
        os.close(given)
    with open(STDIN, "rb", 0, closefd=False) as lines:  # unbuffered: the other lines are for the program
        line = lines.readline()
    if not line:
        os._exit(ORPHANED)
    variables = msgspec.json.decode(line, type=list[tuple[bytes, bytes]])
    environment = {os.fsdecode(name): os.fsdecode(value) for name, value in variables}
    if THREADS in replace_environment(environment):  # torch has read that of the template
        from baton.kernels.native import lower_num_threads

        lower_num_threads(int(environment[THREADS]))


if __name__ == "__main__":
    main()
