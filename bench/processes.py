"""The processes that suites start: a child that talks in lines, and a Redis on a TCP port."""

import asyncio
import shutil
import socket
import subprocess
import sys
from asyncio.subprocess import DEVNULL
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, Self

import psutil

from baton.errors import ConfigError

HOST: Final = "127.0.0.1"
CHILD_STOP_S: Final = 5.0


class Child:
    """A Python process that reads lines and answers some of them; it ends when its input does."""

    def __init__(self, *words: str, cwd: Path | None = None, environment: Mapping[str, str] | None = None):
        command = [sys.executable, *words]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=cwd, env=environment
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def read(self) -> str:
        """Return the next line; "" when the process has ended."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def tell(self, line: str) -> None:
        """Send a line that has no answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def ask(self, line: str) -> str:
        """Send a line and return the answer."""
        self.tell(line)
        return self.read()

    def close(self) -> None:
        """End the process, by force if it does not end by itself."""
        try:
            self._process.communicate(timeout=CHILD_STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End the process at once."""
        self._process.kill()
        self._process.communicate()


def free_port(host: str = HOST) -> int:
    """Return a TCP port that nothing listens on now."""
    with socket.create_server((host, 0)) as probe:
        return int(probe.getsockname()[1])


@asynccontextmanager
async def redis_on_tcp(folder: Path) -> AsyncIterator[tuple[str, int]]:
    """Run a Redis of our own; yield its address. ConfigError where there is no redis-server."""
    program, port = shutil.which("redis-server"), free_port()
    if program is None:
        raise ConfigError("redis-server is not installed")
    options = ("--port", str(port), "--bind", HOST, "--save", "", "--appendonly", "no", "--dir", str(folder))
    process = await asyncio.create_subprocess_exec(program, *options, stdout=DEVNULL, stderr=DEVNULL)
    try:
        yield HOST, port
    finally:
        process.kill()
        await process.wait()


def resident_mib(pid: int) -> float | None:
    """Return the resident set size of a process; None where there is no such process."""
    try:
        return float(psutil.Process(pid).memory_info().rss / 2**20)
    except psutil.NoSuchProcess:
        return None
