"""The local runtime: processes of this machine, which end with the present process.

Routers, gateways and a cluster's only worker are subprocesses. Several workers are forked from a template.
"""

import asyncio
import logging
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import Sequence
from typing import Final

import msgspec

from baton.cluster.cluster_key import Keys
from baton.cluster.runtimes.base import (
    LOOPBACK,
    Loading,
    LoopAlive,
    ProcessFailed,
    ProcessMessage,
    ProcessSpec,
    Report,
    address_in,
    assignment,
    generations_of,
    kill_tree,
    share_out_threads,
    started_at,
)
from baton.cluster.runtimes.gpus import usable_gpus
from baton.cluster.template import ForkedProcess, Template
from baton.config.environment import environment_of_child
from baton.errors import DRAINED, ConfigError
from baton.messages.bounds import Kind
from baton.messages.workers import Address
from baton.rpc.auth import ClusterKeys

logger = logging.getLogger(__name__)

COMMAND: Final = (sys.executable, "-m", "baton.cluster.process")
MAX_REPORT_BYTES: Final = 1 << 16
_LINES: Final[msgspec.json.Decoder[ProcessMessage]] = msgspec.json.Decoder(ProcessMessage)


class LocalProcess:
    """A ManagedProcess that is a child of the present process."""

    def __init__(self, spec: ProcessSpec, process: Process | ForkedProcess) -> None:
        self.name = spec.name
        self._kind = spec.kind
        self._process = process
        self._loading: Loading | None = None
        self._is_asked = False  # `stop` was called: SIGTERM from elsewhere is no order of the operator
        self._alive_s: float | None = None  # when the latest LoopAlive came, by the loop's clock
        self._report: asyncio.Future[Report] = asyncio.get_running_loop().create_future()
        self._reading = asyncio.create_task(self._read())

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """The process has not ended."""
        return self._process.returncode is None

    async def ready(self) -> Address:
        return address_in(await asyncio.shield(self._report), self.name)

    async def loading(self) -> Loading | None:
        return self._loading

    async def watch(self) -> str:
        status = await self._process.wait()
        if status < 0:
            return f"ended by {signal.Signals(-status).name}"
        if status == DRAINED or (status == 0 and self._is_asked):
            return ""
        return f"ended with status {status}"

    def stop(self) -> None:
        if self.is_alive and not self._is_asked:  # a second SIGTERM would end the process at once
            self._process.terminate()
        self._is_asked = True

    def use_keys(self, keys: Keys) -> None:
        """Derive the keys of the process's kind from these cluster keys, and send them to the process."""
        assert self._process.stdin is not None
        if self.is_alive:
            self._process.stdin.write(msgspec.json.encode(generations_of(self._kind, keys)) + b"\n")

    def kill(self) -> None:
        if self.is_alive:
            kill_tree(self._process.pid, started_at(self._process.pid))

    def give_up(self) -> None:
        self.kill()

    async def silent_s(self) -> float:
        return 0.0 if self._alive_s is None else asyncio.get_running_loop().time() - self._alive_s

    async def _read(self) -> None:
        """Take the process's lines until the process has ended."""
        assert self._process.stdout is not None
        while True:
            try:
                line = await self._process.stdout.readline()
                if not line:
                    break
                self._take(_LINES.decode(line))
            except ValueError as error:  # too long, or printed by a library before the reports began
                logger.warning("%s wrote a line that is no report: %s", self.name, error)
        why = f"it {await self.watch() or 'ended'} before it served"
        if not self._report.done():
            self._report.set_result(ProcessFailed(why, is_users_error=False))

    def _take(self, said: ProcessMessage) -> None:
        match said:
            case Loading():
                self._loading = said
            case LoopAlive():
                self._alive_s = asyncio.get_running_loop().time()
            case _ if not self._report.done():
                self._report.set_result(said)


class LocalRuntime:
    """A Runtime of processes on this machine."""

    def __init__(self, keys: ClusterKeys, *, command: Sequence[str] = COMMAND) -> None:
        """command: starts a process that reads an Assignment from stdin, as cluster/process.py does.

        Only workers of a command `python -m MODULE ...` are forked from a template.
        """
        self.host = self.worker_host = LOOPBACK
        self.num_gpus = 0
        self.head_away_s = 0.0
        self._gpus: Sequence[str] = ()
        self._keys = keys
        self._command = command
        self._template = Template(command[2:], limit=MAX_REPORT_BYTES)
        self._forks_workers = False
        self._processes: list[LocalProcess] = []  # those that have ended leave at the next start
        self._num_threads: dict[str, int] = {}  # by the name of a process that computes
        self._gpus_of: dict[str, Sequence[str]] = {}  # by the name of a process

    async def open(self) -> None:
        self._gpus = await asyncio.to_thread(usable_gpus)  # may run a program
        self.num_gpus = len(self._gpus)

    async def place(self, specs: list[ProcessSpec]) -> None:
        """Share the cores among the ranks of each role, and give each rank the GPU with the fewest ranks.

        A process that runs keeps its threads until it is started again.
        """
        for spec in specs:
            if spec.gpus_per_rank and spec.num_ranks > self.num_gpus:
                raise ConfigError(
                    f"{spec.name}: {spec.num_ranks} ranks need a GPU each, this machine has {self.num_gpus}: "
                    "lower tensor_parallel_size, or serve on a Ray cluster"
                )
        gpus_of = dict(self._gpus_of)
        for spec in specs:
            if spec.gpus_per_rank and spec.name not in gpus_of:
                used = Counter(gpu for gpus in gpus_of.values() for gpu in gpus)
                least_used = sorted(self._gpus, key=used.__getitem__)[: spec.num_ranks]
                if used[least_used[-1]] >= round(1 / spec.gpus_per_rank):
                    raise ConfigError(f"{spec.name}: all {self.num_gpus} GPUs of this machine are in use")
                gpus_of[spec.name] = least_used
        self._gpus_of = gpus_of
        num_workers = sum(spec.kind is Kind.WORKER for spec in specs)
        self._forks_workers = num_workers > 1 and tuple(self._command[:2]) == COMMAND[:2]
        self._num_threads = share_out_threads(specs, len(os.sched_getaffinity(0)))

    def release(self, name: str) -> None:
        self._gpus_of.pop(name, None)

    async def spawn(self, spec: ProcessSpec) -> LocalProcess:
        environment = environment_of_child(
            num_threads=self._num_threads.get(spec.name, 1),
            gpus=self._gpus_of.get(spec.name),
            mps_priority=spec.mps_priority,
        )
        process: Process | ForkedProcess | None = None
        if spec.kind is Kind.WORKER and self._forks_workers:
            process = await self._template.fork(environment)
        if process is None:
            process = await self._start(environment)
        assert process.stdin is not None
        process.stdin.write(assignment(spec, self._keys) + b"\n")  # and never closed: see cluster/process.py
        local = LocalProcess(spec, process)
        self._processes = [*(each for each in self._processes if each.is_alive), local]
        return local

    async def _start(self, environment: dict[str, str]) -> Process:
        return await asyncio.create_subprocess_exec(
            *self._command,
            stdin=PIPE,
            stdout=PIPE,
            limit=MAX_REPORT_BYTES,
            process_group=0,  # Ctrl-C in the terminal reaches the parent alone, which drains the others
            env=environment,
        )

    def use_keys(self, keys: Keys) -> None:
        self._keys = keys
        for process in self._processes:
            process.use_keys(keys)

    async def close(self) -> None:
        for process in self._processes:
            process.kill()
        await asyncio.gather(*(process.watch() for process in self._processes))
        await self._template.close()
