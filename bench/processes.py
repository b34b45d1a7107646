"""The processes that suites start: a child that talks in lines, `baton serve`, and a Redis on a TCP port."""

import asyncio
import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Final, NamedTuple, Self

import yaml

from baton.config.environment import environment_of_child
from baton.errors import ConfigError, WorkerLost
from baton.tenants import Sla

HOST: Final = "127.0.0.1"
MODEL: Final = "tiny"
SERVE: Final = (sys.executable, "-m", "baton")
BANNER: Final = re.compile(rb"http://127\.0\.0\.1:(\d+)/v1")
START_S: Final = 180.0
STOP_S: Final = 60.0
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


class Served(NamedTuple):
    """A running `baton serve`."""

    port: int
    pid: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"


@asynccontextmanager
async def serve(
    folder: Path,
    options: Sequence[str],
    *,
    command: Sequence[str] = SERVE,
    environment: Mapping[str, str] | None = None,
) -> AsyncIterator[Served]:
    """Run `baton serve tiny` on a free port; serve.log in the folder has its stderr.

    Every process computes with one thread, for on few cores more would get in each other's way. WorkerLost:
    it ended before it served.
    """
    log_path = folder / "serve.log"
    with log_path.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(*command, "serve", MODEL, "--port", "0", *options),
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=log,
            env=environment or environment_of_child(num_threads=1),
        )
    try:
        async with asyncio.timeout(START_S):
            port = await _port(process, log_path)
        yield Served(port, process.pid, log_path)
    finally:
        await _stop(process)


async def _port(process: asyncio.subprocess.Process, log: Path) -> int:
    assert process.stdout is not None
    port = 0
    async for line in process.stdout:
        found = BANNER.search(line)
        port = int(found[1]) if found else port
        if line.startswith(b"curl"):
            return port
    text = log.read_text()[-2000:]
    raise WorkerLost(f"baton serve ended before it served; {log.name} says: {text}")


async def _stop(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(STOP_S):
            await process.communicate()
    except TimeoutError:
        process.kill()
        await process.communicate()


def tenants_yaml(
    keys: Mapping[str, str], slas: Mapping[str, Sla] | None = None, stopped: Collection[str] = ()
) -> str:
    """Return a tenants file: equal weights, and no quota except a token a second for `stopped`."""
    tenants: dict[str, object] = {}
    for name, key in keys.items():
        sla = (slas or {}).get(name, Sla())
        limits = {"ttft_ms": sla.ttft_ms, "tpot_ms": sla.tpot_ms}
        digest = sha256(key.encode()).hexdigest()
        tenants[name] = {
            "keys": [f"sha256:{digest}"],
            "sla": {limit: limit_ms for limit, limit_ms in limits.items() if limit_ms is not None},
            "quotas": {"tokens_per_s": 1, "burst_tokens": 1} if name in stopped else {},
        }
    return yaml.safe_dump({"tenants": tenants}, sort_keys=False)


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
    with contextlib.suppress(OSError):
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    return None
