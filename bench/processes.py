"""The processes that suites start: a child that talks in lines, and a Redis on a TCP port."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from asyncio.subprocess import DEVNULL
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from textwrap import shorten
from threading import Timer
from typing import Final

from baton.cluster.redis_server import find_program
from baton.errors import ConfigError

HOST: Final = "127.0.0.1"
READ_S: Final = 1800.0  # a child that loads a model may compile for minutes before its first line


class ProcessEnded(RuntimeError):
    """A child has ended; it was expected to say a line."""


class Child(subprocess.Popen[str]):
    """A Python process that reads lines and writes lines; it ends when its input does."""

    STOP_S = 5.0  # that `close` gives it

    def __init__(
        self,
        *words: str,
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
        python: str = sys.executable,
    ) -> None:
        self._words = words
        command, pipe = [python, *words], subprocess.PIPE
        super().__init__(command, stdin=pipe, stdout=pipe, text=True, cwd=cwd, env=environment)

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, timeout_s: float = READ_S) -> str:
        """Return the next line.

        ProcessEnded: the child has ended by itself, or was killed because it was silent for `timeout_s`.
        """
        assert self.stdout is not None
        killing = Timer(timeout_s, self.kill)
        killing.start()
        try:
            if line := self.stdout.readline():
                return line.strip()
            status = self.wait()
        finally:
            killing.cancel()
        words = shorten(" ".join(self._words), 80)
        raise ProcessEnded(f"{words}: has ended with status {status}; stderr has its messages")

    def tell(self, line: str) -> None:
        """Send a line."""
        assert self.stdin is not None
        self.stdin.write(line + "\n")
        self.stdin.flush()

    def close(self) -> None:
        """End the process, by force if it does not end by itself in time."""
        try:
            self.communicate(timeout=self.STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
            self.communicate()


def free_ports(number: int, host: str = HOST) -> list[int]:
    """Return distinct TCP ports that nothing listens on now."""
    with ExitStack() as probes:
        found = [probes.enter_context(socket.create_server((host, 0))) for _ in range(number)]
        return [int(probe.getsockname()[1]) for probe in found]


def free_port(host: str = HOST) -> int:
    """Return a TCP port that nothing listens on now."""
    return free_ports(1, host)[0]


@asynccontextmanager
async def redis_on_tcp(folder: Path) -> AsyncIterator[tuple[str, int]]:
    """Run a Redis of our own; yield its address. ConfigError where there is no redis-server."""
    program, port = find_program(), free_port()
    if program is None:
        raise ConfigError("redis-server is not installed")
    options = ("--port", str(port), "--bind", HOST, "--save", "", "--appendonly", "no", "--dir", str(folder))
    process = await asyncio.create_subprocess_exec(program, *options, stdout=DEVNULL, stderr=DEVNULL)
    try:
        yield HOST, port
    finally:
        process.kill()
        await process.wait()


@contextmanager
def stopped(*pids: int) -> Iterator[None]:
    """Stop processes, and have those that are left go on after the block."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def resident_mib(pid: int) -> float | None:
    """Return the resident set size of a process; None where there is no such process."""
    import psutil  # the GPU suite runs without it

    try:
        return float(psutil.Process(pid).memory_info().rss / 2**20)
    except psutil.NoSuchProcess:
        return None
