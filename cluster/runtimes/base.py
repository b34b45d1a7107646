"""The interface of runtimes, and their messages with the processes that they start, one JSON line each."""

import os
import select
import signal
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Final, Literal, Protocol, TypeAlias

import msgspec
from msgspec import Meta

from baton.cluster.cluster_key import Keys
from baton.config.environment import LogFormat, log_format
from baton.errors import BatonError, ConfigError, WorkerLost
from baton.messages.bounds import Kind, Name
from baton.messages.workers import Address
from baton.rpc.auth import ClusterKeys, Generations, KeyRing

ProcessKind: TypeAlias = Literal["router", "gateway", "worker"]

# Exit statuses. A process that was told to end, by any process, ends with 0.
USER_ERROR: Final = 2  # the operator must change something, as for the command line
DRAINED: Final = 4  # an operator has drained the process, and no signal has told it to end
ALIVE_EVERY_S: Final = 1.0
MAX_REASON_CHARS: Final = 8192  # a compiler's output can be longer than a report may be


class ProcessSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A process and the resources that it needs."""

    kind: ProcessKind
    name: Name  # unique in the cluster, and the same after a restart
    config: msgspec.Struct  # the struct of its kind, without any secret
    num_ranks: int = 0  # ranks of a model; 0: a router or gateway, which needs no cores of its own
    role: str = ""  # of a worker: roles are seldom busy together
    cores_per_rank: int | None = None  # None: an even share of the machine
    gpus_per_rank: float = 0.0  # 0: the ranks compute on the CPU
    resources: dict[str, float] = {}  # custom resources of Ray, beside cores and GPUs
    incarnation: int = 0  # number of the start, see messages/workers.Worker; 0: there is no supervisor


class Assignment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first line that a process reads. It holds the keys of the process's kind."""

    kind: ProcessKind
    name: Name
    generations: Annotated[Generations, Meta(min_length=1, max_length=2)]
    config: msgspec.Raw
    incarnation: int = 0  # as in ProcessSpec
    log_format: LogFormat | None = None  # None: that of the environment, which on Ray is the raylet's


class Loading(msgspec.Struct, frozen=True, tag=True):
    """A worker's progress of reading weights, any number of times before the report."""

    num_bytes: int
    total_bytes: int


class LoopAlive(msgspec.Struct, frozen=True, tag=True):
    """The event loop of a router or a gateway runs; once every ALIVE_EVERY_S, from its start on."""


class ProcessStarted(msgspec.Struct, frozen=True, tag=True):
    """The process serves at this address."""

    address: Address


class ProcessFailed(msgspec.Struct, frozen=True, tag=True):
    """The process could not start."""

    reason: str  # at most MAX_REASON_CHARS
    is_users_error: bool  # it will fail again unless the operator changes something

    @classmethod
    def of(cls, error: BaseException) -> "ProcessFailed":
        """Describe an error. The text of an error that is not Baton's begins with its type."""
        reason = str(error) if isinstance(error, BatonError) else f"{type(error).__name__}: {error}"
        is_users_error = isinstance(error, BatonError) and isinstance(error, ValueError)
        return cls(reason[:MAX_REASON_CHARS], is_users_error)


Report: TypeAlias = ProcessStarted | ProcessFailed
Progress: TypeAlias = Callable[[int, int], None]  # called with the bytes read so far, and in all


def address_in(report: Report, name: str) -> Address:
    """Return the address of the process `name`. ConfigError or WorkerLost: the process has not started."""
    match report:
        case ProcessStarted(address):
            return address
        case ProcessFailed(reason, is_users_error):
            raise (ConfigError if is_users_error else WorkerLost)(f"{name}: {reason}")


def generations_of(kind: str, keys: ClusterKeys) -> Generations:
    """Derive the keys of a process of this kind (a ProcessKind or an operator) from the cluster's keys."""
    return KeyRing.of(keys, Kind(kind)).generations


def assignment(spec: ProcessSpec, keys: ClusterKeys) -> bytes:
    """Encode the Assignment of a process."""
    config = msgspec.Raw(msgspec.json.encode(spec.config))
    return msgspec.json.encode(
        Assignment(
            kind=spec.kind,
            name=spec.name,
            generations=generations_of(spec.kind, keys),
            config=config,
            incarnation=spec.incarnation,
            log_format=log_format(),
        )
    )


def share_out(specs: Sequence[ProcessSpec], num_cores: int) -> dict[str, int]:
    """Return name -> cores of each worker. Workers that share a core would slow each other down."""
    num_ranks = sum(spec.num_ranks for spec in specs)
    return {
        spec.name: spec.num_ranks * (spec.cores_per_rank or max(1, num_cores // num_ranks))
        for spec in specs
        if spec.num_ranks
    }


def share_out_threads(specs: Sequence[ProcessSpec], num_cores: int) -> dict[str, int]:
    """Return name -> threads of each worker, where all workers may use all cores.

    The workers of each role share all cores: prefill and decode workers are seldom busy together for long,
    and an idle thread sleeps. On two cores, one prefill and one decode worker answer a fifth more requests, a
    third sooner, than with a core each (`baton bench serve`).
    """
    threads: dict[str, int] = {}
    for role in {spec.role for spec in specs}:
        threads |= share_out([spec for spec in specs if spec.role == role], num_cores)
    return threads


class ManagedProcess(Protocol):
    """One life of a process. Its calls may be repeated, and come from one asyncio loop."""

    async def ready(self) -> Address:
        """Wait until the process serves, and return its address. ConfigError or WorkerLost: it failed."""

    async def loading(self) -> Loading | None:
        """Return the progress of loading weights; None: unknown."""

    async def watch(self) -> str:
        """Wait for the end of the process, and return its cause; "": it was drained, or told to by `stop`."""

    def stop(self) -> None:
        """Ask the process to drain and end."""

    def kill(self) -> None:
        """End the process now, and all processes that it has started."""

    def give_up(self) -> None:
        """End a process that may not answer, as on a machine that hangs; wait for nothing.

        The next process of its name is placed on another machine if one has room.
        """

    async def silent_s(self) -> float:
        """Return the seconds since the event loop of a router or a gateway last ran; 0: unknown."""


class Runtime(Protocol):
    """Starts processes on one kind of machines."""

    @property
    def num_gpus(self) -> int:
        """GPUs for all workers together, once the runtime is open."""

    @property
    def host(self) -> str:
        """The address of this machine that the cluster's processes connect to."""

    @property
    def worker_host(self) -> str:
        """The address that workers listen on; "": that of the machine of each."""

    @property
    def head_away_s(self) -> float:
        """Seconds since Ray's head last answered; 0 while it answers, and without Ray.

        Meanwhile running processes go on, and none can be started.
        """

    async def open(self) -> None:
        """Prepare the machines. Raises ConfigError."""

    async def place(self, specs: list[ProcessSpec]) -> None:
        """Reserve resources for all of these before any is started. ConfigError: there are too few."""

    async def spawn(self, spec: ProcessSpec) -> ManagedProcess:
        """Start a process; do not wait for `ready`."""

    def use_keys(self, keys: Keys) -> None:
        """Give these cluster keys to all running and later processes. Returns at once."""

    async def close(self) -> None:
        """End all processes that still run."""


# Process trees of this machine: Linux alone.


def descendants(pid: int) -> list[int]:
    """Return the ids of the processes that `pid` has started, and of their descendants, parents first.

    Processes that this one may not read are left out; psutil raises AccessDenied for them.
    """
    children = defaultdict[int, list[int]](list)
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            children[parent].append(int(folder.name))
    found = list(children[pid])
    for child in found:
        found += children[child]
    return found


def kill_tree(pid: int) -> None:
    """Send SIGKILL to `pid` and its descendants, such as a worker's ranks; stopped processes die too.

    Nothing happens when `pid` has ended.
    """
    for each in (*reversed(descendants(pid)), pid):
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def started_at(pid: int) -> int:
    """Return the clock ticks at the process's start, which identify it with its id; 0: it has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return 0


def wait_for_end(pid: int, started: int) -> None:
    """Return when the process has ended for which `started_at` returned `started`."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if started_at(pid) == started:
            select.select([descriptor], [], [])
    finally:
        os.close(descriptor)
