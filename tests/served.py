"""`baton serve` as a user runs it."""

import asyncio
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any, Final, TypeAlias

import httpx2
import psutil

from baton.cluster.cli.main import main
from baton.cluster.cluster_record import find_record
from baton.cluster.operator_node import connected
from baton.cluster.runtimes.base import descendants
from baton.messages.operations import Status
from baton.messages.status import RouterStatus
from baton.messages.workers import WorkerStatus
from tests.event_stream import stream
from tests.forked_baton import ForkedBaton
from tests.http_calls import HttpCalls
from tests.waiting import wait_for

ROOT: Final = Path(__file__).resolve().parents[1]
BATON: Final = ("-m", "baton")  # as users run it
START_TIMEOUT_S: Final = 120.0  # for a start on a machine with a core for each running process
STOP_TIMEOUT_S: Final = 60.0
# Arguments of a small cluster; of an option that comes again, the last one counts.
SERVE: Final = ("tiny", "--runtime", "local", "--kv-cache-memory", "64MiB", "--drain-timeout", "5")


Process: TypeAlias = "ForkedBaton | subprocess.Popen[str]"


class Served(HttpCalls):
    """A cluster that has printed its banner."""

    def __init__(self, process: Process, banner: str, said: list[str]) -> None:
        self.process = process
        self.banner = banner
        self.said = said  # its stderr, line by line, as it comes
        found = re.search(r"http://127\.0\.0\.1:(\d+)/v1", banner)
        assert found is not None, banner
        self.port = int(found[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def post(self, route: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Return the HTTP status and the JSON body."""
        answer = self.http("POST", route, **body)
        return answer.status_code, answer.json()

    def complete(self, prompt: str, max_tokens: int = 32) -> str:
        """Return the greedy continuation."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        return str(self.ask("/v1/completions", **body)["choices"][0]["text"])

    def answers(self) -> bool:
        """Return whether the cluster answers requests now; a gateway without a router refuses them."""
        body = {"model": "tiny", "prompt": "copy(sun)=", "max_tokens": 1}
        try:
            status, answer = self.post("/v1/completions", body)
        except httpx2.HTTPError:
            return False
        assert status in (200, 503), answer
        return status == 200

    def stream(self, prompt: str, **settings: Any) -> Generator[Any, None, None]:
        """Yield the chunks of a completion. Raises as `tests.event_stream.stream` does."""
        body = {"model": "tiny", "prompt": prompt, "stream": True, "temperature": 0, **settings}
        with closing(stream(self.port, body)) as events:
            for event in events:
                if event.data != "[DONE]":
                    yield json.loads(event.data)

    def baton(self, *arguments: str) -> str:
        """Run another command of baton, in this process; return its output."""
        command, out, errors = ("baton", *arguments), io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(errors):
            status = main(arguments)
        if status:
            error = subprocess.CalledProcessError(status, command, out.getvalue(), errors.getvalue())
            error.add_note(errors.getvalue())
            raise error
        return out.getvalue()

    def status(self) -> dict[str, WorkerStatus]:
        """Return worker name -> status by a router."""
        return {entry.worker.name: entry for entry in self._status().workers}

    def routers(self) -> list[RouterStatus]:
        """Return the status of every router that answers."""
        return list(self._status().routers)

    def gateways(self) -> set[int]:
        """Return the pids of the gateways that listen for clients."""
        return {gateway.pid for gateway in self._status().gateways if gateway.address is not None}

    def num_open(self) -> int:
        """Return the number of choices that the gateways wait for or answer."""
        return sum(gateway.num_open for gateway in self._status().gateways)

    def _status(self) -> Status:
        record = find_record(self.port)

        async def ask() -> Status:
            async with connected(record.routers, record.keys) as operator:
                return await operator.status()

        return asyncio.run(ask())

    def has_replaced(self, worker: str, before: str) -> bool:
        """Return whether the worker of this name has another id than `before`."""
        entry = self.status().get(worker)
        return entry is not None and entry.worker.id != before

    def pid_of(self, worker: str) -> int:
        """Return the pid of the process that listens on the worker's port."""
        return self.listening_on(self.status()[worker].worker.address.port)

    def listening_on(self, port: int) -> int:
        for pid in descendants(self.process.pid):
            with suppress(psutil.Error):  # it may end meanwhile
                if port in _listens(psutil.Process(pid)):
                    return pid
        raise AssertionError(f"no process of the cluster listens on port {port}")


def kill_unless(has_ended: threading.Event, process: Process) -> None:
    """Kill a process whose start takes longer than START_TIMEOUT_S, and longer still on a busy machine.

    The load average counts the processes that run, or wait for a core or a disk: with twice as many as cores,
    a start may take twice as long.
    """
    began_s, slowness = time.monotonic(), 1.0
    while not has_ended.wait(1.0):
        slowness = max(slowness, os.getloadavg()[0] / len(os.sched_getaffinity(0)))
        if time.monotonic() - began_s > START_TIMEOUT_S * slowness:
            process.kill()
            return


@contextmanager
def served(*arguments: str, program: Sequence[str] = (), **environment: str) -> Iterator[Served]:
    """Run `baton serve` with these arguments and variables, and stop it in the end.

    program: what Python runs as `baton`; without one, the command is forked (tests/forked_baton.py).
    """
    options, variables = (*arguments, "--port", "0"), os.environ | {"PYTHONPATH": str(ROOT)} | environment
    process: Process
    if not program:
        process = ForkedBaton(("serve", *options), variables)
    else:
        process = subprocess.Popen(
            [sys.executable, *program, "serve", *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=variables,
        )
    said: list[str] = []
    assert process.stdout is not None and process.stderr is not None
    errors = process.stderr
    listening = threading.Thread(target=lambda: said.extend(errors), daemon=True)
    listening.start()
    has_ended = threading.Event()  # the start
    threading.Thread(target=kill_unless, args=(has_ended, process), daemon=True).start()
    try:
        banner = ""
        for line in process.stdout:
            banner += line
            if line.startswith("curl"):
                break
        has_ended.set()
        if "curl" not in banner:
            raise AssertionError(f"no banner came: {banner}{''.join(said)}")
        yield Served(process, banner, said)
    finally:
        has_ended.set()
        stop(process)
        listening.join(10)
        process.stdout.close()
        errors.close()


def stop(process: Process) -> int:
    """End the process with SIGTERM; return its exit status."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        return process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise


def accepts(port: int) -> bool:
    """True when a process listens on this port of 127.0.0.1."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Wait for what a whole server does, on a busy machine; each look asks processes."""
    wait_for(condition, timeout_s, interval_s=0.2)


def _listens(process: psutil.Process) -> set[int]:
    return {one.laddr.port for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN}


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def is_alive(pid: int) -> bool:
    """Return whether the process runs; a zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def are_gone(pids: Iterable[int]) -> bool:
    return not any(map(is_alive, pids))
