"""Commands of baton without their imports, which take a cluster five seconds of a core.

1. The fork server of tests/remote.py, which has imported all code, forks the process of the command.
2. While that process has one thread, it forks the template of its cluster.
3. The cluster's runtime forks routers and gateways from the template, as it forks workers.

The clusters of tests/process_cluster.py have no process of a command. The fork server forks their templates.

test_serve_local.py starts the command and all processes of its cluster as users do.
"""

import asyncio
import ctypes
import gc
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Final, NoReturn, TypeAlias

import psutil
from setproctitle import setproctitle

import baton.cluster.serve
import baton.cluster.worker_process
import baton.gateway.process
import baton.router.router  # noqa: F401
from baton.cluster import template
from baton.cluster.cli.main import main
from baton.cluster.end_with_parent import SET_DEATH_SIGNAL
from baton.cluster.runtimes import local
from baton.cluster.runtimes.local import COMMAND, MAX_REPORT_BYTES, LocalRuntime
from baton.cluster.template import READY, STDIN, STDOUT, WORKER_CODE, Template
from baton.config.environment import environment_of_template, replace_environment
from baton.rpc.auth import ClusterKeys
from tests.remote import Forked

STDERR: Final = 2


class ForkedBaton(Forked):
    """The process of the command, with pipes from its stdout and its stderr."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        """arguments: a command and its options. `serve` has the runtime `local`."""
        (out, stdout), (errors, stderr) = os.pipe(), os.pipe()
        self.stdout, self.stderr = open(out), open(errors)  # noqa: SIM115  # closed by their user
        with Connection(stdout, readable=False) as first, Connection(stderr, readable=False) as second:
            super().__init__(_run, first, second, tuple(arguments), dict(environment))

    def close(self) -> None:
        """Close the pipes."""
        self.stdout.close()
        self.stderr.close()


class ForkedTemplate:
    """The process of a forked template; used as an asyncio.subprocess.Process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._process = psutil.Process(pid)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    async def wait(self) -> None:
        await asyncio.to_thread(self._process.wait)


Fork: TypeAlias = Callable[[socket.socket, Sequence[str]], int]  # of a template: (stdin, program) -> pid


def fork_by_server(stdin: socket.socket, program: Sequence[str]) -> int:
    """Fork a template from the fork server of tests/remote.py."""
    return Forked(_run_template, stdin, program).pid


def fork_here(stdin: socket.socket, program: Sequence[str]) -> int:
    """Fork a template from the present process, which has one thread."""
    return os.fork() or _run_template(stdin, program)


class StartedTemplate(Template):
    """A template that runs already. After its death another one starts as that of a user."""

    def __init__(self, program: Sequence[str], fork: Fork) -> None:
        super().__init__(program, limit=MAX_REPORT_BYTES)
        ours, theirs = socket.socketpair()
        with theirs:
            self._first: tuple[Any, socket.socket] | None = (ForkedTemplate(fork(theirs, program)), ours)

    async def _start(self) -> socket.socket:
        if self._first is None:
            return await super()._start()
        (self._process, connection), self._first = self._first, None
        self._socket = connection
        connection.setblocking(False)
        assert await asyncio.get_running_loop().sock_recv(connection, len(READY)) == READY
        return connection


class ForkingRuntime(LocalRuntime):
    """A LocalRuntime that forks every process from the template."""

    def __init__(self, template: Template, keys: ClusterKeys, *, command: Sequence[str] = COMMAND) -> None:
        super().__init__(keys, command=command)
        self._template = template

    async def _start(self, environment: dict[str, str]) -> Any:
        return await self._template.fork(environment) or await super()._start(environment)


def _run(
    stdout: Connection, stderr: Connection, arguments: Sequence[str], environment: dict[str, str]
) -> NoReturn:
    with open(os.devnull) as stdin:
        for given, wanted in ((stdin, STDIN), (stdout, STDOUT), (stderr, STDERR)):
            os.dup2(given.fileno(), wanted)
    stdout.close()
    stderr.close()
    sys.stdout = open(STDOUT, "w", closefd=False)  # noqa: SIM115  # what the fork server had may be no pipe
    sys.stderr = open(STDERR, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    setproctitle(" ".join(("baton", *arguments)))  # it finds no place in a replaced environment
    replace_environment(environment)
    gc.freeze()  # what the fork server has imported
    if arguments[0] == "serve":
        started = StartedTemplate(COMMAND[2:], fork_here)
        local.LocalRuntime = partial(ForkingRuntime, started)  # type: ignore[assignment, misc]
    _exit_with(lambda: main(arguments))


def _run_template(stdin: socket.socket, program: Sequence[str]) -> NoReturn:
    ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    os.setpgid(0, 0)
    with stdin:  # else workers would keep it open after the template's death
        os.dup2(stdin.fileno(), STDIN)
    setproctitle("baton template")  # it finds no place in a replaced environment
    replace_environment(environment_of_template(len(os.sched_getaffinity(0))))
    sys.argv = [template.__name__, WORKER_CODE, *program]
    _exit_with(template.main)


def _exit_with(program: Callable[[], int]) -> NoReturn:
    """Run the program, and end this process with its status; 1: the program raised an error."""
    status = 1
    try:
        status = program()
    except SystemExit as ended:
        status = int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
