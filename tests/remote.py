"""An object in a process of its own, whose methods are called from the test's process.

The processes are forked from one that has imported what they need: importing torch takes seconds of a core.
"""

import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, Final, Self

import psutil

from baton.errors import TransferFailed

CONTEXT: Final = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "tests.endpoint_host",
        "tests.transfer_ends",
        "tests.tensor_parallel_peer",
        "tests.forked_ranks",
        "tests.forked_baton",
    ]
)
END_S: Final = 20.0


class Forked:
    """The part of subprocess.Popen that tests and Baton use."""

    def __init__(self, target: Callable[..., object], *arguments: object) -> None:
        """target: runs in the process. The target and its arguments are pickled."""
        self._process = CONTEXT.Process(target=target, args=arguments)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def wait(self, timeout_s: float | None = None) -> int:
        """Return the exit status. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout_s)
        if self._process.exitcode is None:
            assert timeout_s is not None
            raise subprocess.TimeoutExpired(self._process.name, timeout_s)
        return self._process.exitcode

    def poll(self) -> int | None:
        """Return the exit status; None: it runs."""
        self._process.join(0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()


class Remote:
    """`factory` makes the object. The factory, arguments and results are pickled."""

    def __init__(self, factory: Callable[..., object], *arguments: object, **settings: object) -> None:
        self._connection, there = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=_serve, args=(there, factory, arguments, settings))
        self.process.start()
        there.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return the object's method of this name. TransferFailed has the text of its error."""
        if name.startswith("_"):
            raise AttributeError(name)

        def call(*arguments: object, **settings: object) -> Any:
            self.start_call(name, *arguments, **settings)
            return self.result()

        return call

    def start_call(self, name: str, /, *arguments: object, **settings: object) -> None:
        """Call a method and do not wait; no other call may follow before `result`."""
        with suppress(ConnectionError):  # the process has died, as `result` says
            self._connection.send((name, arguments, settings))

    def result(self) -> Any:
        """Return the result of the call that has begun. TransferFailed: it raised, or the process died."""
        try:
            result, error = self._connection.recv()
        except (EOFError, ConnectionError) as ended:
            raise TransferFailed("the process has died") from ended
        if error is not None:
            raise TransferFailed(error)
        return result

    def signal(self, number: signal.Signals) -> None:
        """Send SIGSTOP or SIGCONT, and wait until it has taken effect."""
        process = psutil.Process(self.process.pid)
        process.send_signal(number)
        while (process.status() == psutil.STATUS_STOPPED) != (number == signal.SIGSTOP):
            time.sleep(0.001)

    def end_input(self) -> None:
        """Close the object; its process ends."""
        self._connection.close()

    def wait(self) -> None:
        self.process.join(END_S)
        assert self.process.exitcode is not None, "the process does not end"

    def kill(self) -> None:
        self.process.kill()
        self.wait()
        self.end_input()


def _serve(connection: Connection, factory: Callable[..., Any], arguments: Any, settings: Any) -> None:
    served = factory(*arguments, **settings)
    with suppress(EOFError):  # no more calls come
        while True:
            name, values, options = connection.recv()
            try:
                result, error = getattr(served, name)(*values, **options), None
            except Exception as raised:
                result, error = None, repr(raised)
            connection.send((result, error))
    served.close()
