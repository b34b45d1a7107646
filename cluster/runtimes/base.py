"""The interface of runtimes, and the messages between a runtime and its processes, one JSON line each."""

import os
import select
import signal
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Final, NamedTuple, Protocol, TypeAlias

import msgspec
from msgspec import Meta

from baton.cluster.cluster_key import Keys
from baton.config.environment import LogFormat, log_format
from baton.errors import BatonError, ConfigError, WorkerLost, is_users_error
from baton.messages.bounds import Kind, Name
from baton.messages.workers import Address
from baton.rpc.auth import ClusterKeys, Generations, KeyRing

LOOPBACK: Final = "127.0.0.1"
ALIVE_EVERY_S: Final = 1.0
MAX_REPORT_CHARS: Final = 8192  # a compiler's output can be longer than a report may be


class ProcessSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A process and the resources that it needs."""

    kind: Kind  # never OPERATOR
    name: Name  # unique in the cluster, and the same after a restart
    config: msgspec.Struct  # the struct of its kind, without any secret
    num_ranks: int = 0  # ranks of a model; 0: a router or gateway, which needs no cores of its own
    num_nodes: int = 1  # over which the ranks are spread evenly
    role: str = ""  # of a worker: roles are seldom busy together
    cores_per_rank: int | None = None  # None: an even share of the machine
    gpus_per_rank: float = 0.0  # 0: the ranks compute on the CPU
    mps_priority: int | None = None  # among the clients of CUDA's MPS, 0 before 1; None: MPS decides
    resources: dict[str, float] = {}  # custom resources of Ray on each node, beside cores and GPUs
    incarnation: int = 0  # number of the start, see messages/workers.Worker; 0: there is no supervisor


class Assignment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first line of a process's stdin, with the keys of the process's kind."""

    kind: Kind  # never OPERATOR
    name: Name
    generations: Annotated[Generations, Meta(min_length=1, max_length=2)]
    config: msgspec.Raw
    incarnation: int = 0  # as in ProcessSpec
    log_format: LogFormat | None = None  # None: that of the environment, which on Ray is the raylet's


class Loading(msgspec.Struct, frozen=True, tag=True):
    """Reports a worker's progress of reading weights, any number of times before the Report."""

    num_bytes: int
    total_bytes: int


class LoopAlive(msgspec.Struct, frozen=True, tag=True):
    """Reports every ALIVE_EVERY_S that the event loop of a router or a gateway runs."""


class ProcessStarted(msgspec.Struct, frozen=True, tag=True):
    """Reports that the process serves at this address."""

    address: Address


class ProcessFailed(msgspec.Struct, frozen=True, tag=True):
    """Reports that the process could not start."""

    reason: str  # at most MAX_REPORT_CHARS
    is_users_error: bool  # it will fail again unless the operator changes something

    @classmethod
    def of(cls, error: BaseException) -> "ProcessFailed":
        """Describe an error. The text of an error that is not Baton's begins with its type."""
        reason = str(error) if isinstance(error, BatonError) else f"{type(error).__name__}: {error}"
        return cls(reason[:MAX_REPORT_CHARS], is_users_error(error))


class ActorPlace(NamedTuple):
    """The process of a Ray actor. Containers of one node have process ids of their own."""

    pid: int
    started: int  # see `started_at`
    node_id: str


Report: TypeAlias = ProcessStarted | ProcessFailed
ProcessMessage: TypeAlias = Report | Loading | LoopAlive  # one line of a process
Progress: TypeAlias = Callable[[int, int], None]  # called with the bytes read so far, and in all


def address_in(report: Report, name: str) -> Address:
    """Return the address in the report of the process `name`.

    Raises ConfigError or WorkerLost when the process has failed.
    """
    match report:
        case ProcessStarted(address):
            return address
        case ProcessFailed(reason, is_users_error):
            raise (ConfigError if is_users_error else WorkerLost)(f"{name}: {reason}")


def generations_of(kind: Kind, keys: ClusterKeys) -> Generations:
    """Derive the keys of a process of this kind from the cluster's keys."""
    return KeyRing.of(keys, kind).generations


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
    """Return name -> cores of each worker: its `cores_per_rank`, or an even share, for each of its ranks."""
    num_ranks = sum(spec.num_ranks for spec in specs)
    return {
        spec.name: spec.num_ranks * (spec.cores_per_rank or max(1, num_cores // num_ranks))
        for spec in specs
        if spec.num_ranks
    }


def share_out_threads(specs: Sequence[ProcessSpec], num_cores: int) -> dict[str, int]:
    """Return name -> threads of each worker. The workers of one role share all cores.

    Prefill and decode workers are seldom busy together for long, and idle threads sleep. On two cores, one
    prefill and one decode worker answer a fifth more requests, and a third sooner, than with one core each
    (`baton bench serve`).
    """
    threads: dict[str, int] = {}
    for role in {spec.role for spec in specs}:
        threads |= share_out([spec for spec in specs if spec.role == role], num_cores)
    return threads


class ManagedProcess(Protocol):
    """One life of a process. All methods are called on one asyncio loop, and may be called again."""

    async def ready(self) -> Address:
        """Wait until the process serves, and return its address. Raises ConfigError or WorkerLost."""

    async def loading(self) -> Loading | None:
        """Return the progress of loading weights; None: unknown."""

    async def watch(self) -> str:
        """Wait for the end of the process. Return the cause; "" after `stop` or a drain by an operator."""

    def stop(self) -> None:
        """Ask the process to drain and end. Later calls change nothing."""

    def kill(self) -> None:
        """End the process now, and all processes that it has started."""

    def give_up(self) -> None:
        """End a process that may not answer, as on a machine that hangs. Returns at once.

        The next process of the same name is placed on another machine if one has room.
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
        """The address that workers listen on; "": each worker listens on its own machine's address."""

    @property
    def head_away_s(self) -> float:
        """Seconds since Ray's head last answered; 0 while the head answers, and without Ray.

        While the head is away, running processes go on and no process can be started.
        """

    async def open(self) -> None:
        """Prepare the machines. Raises ConfigError."""

    async def place(self, specs: list[ProcessSpec]) -> None:
        """Reserve resources for those of the cluster's processes that have none yet. Call before `spawn`.

        specs: all processes, present and new. ConfigError: too few resources; none are reserved then.
        """

    def release(self, name: str) -> None:
        """Give up the resources of a worker that has ended and is not started again."""

    async def spawn(self, spec: ProcessSpec) -> ManagedProcess:
        """Start a process without waiting until it serves."""

    def use_keys(self, keys: Keys) -> None:
        """Give these cluster keys to all running and later processes. Returns at once."""

    async def close(self) -> None:
        """End all processes that still run."""


# Process trees of this machine: Linux alone.


def descendants(pid: int) -> list[int]:
    """Return the ids of all descendants of `pid`, parents first.

    Processes that the present process may not read are left out; psutil raises AccessDenied for them.
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


def kill_tree(pid: int, started: int) -> None:
    """Send SIGKILL to a process and its descendants, such as a worker's ranks. Stopped processes die too.

    started: the clock tick at which the process started. Nothing happens when the process has ended.
    """
    if not started or started_at(pid) != started:
        return
    for each in (*reversed(descendants(pid)), pid):
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def started_at(pid: int) -> int:
    """Return the clock tick since boot at which the process started; 0: the process has ended.

    A process id and this tick together identify one process, also where containers have the same ids.
    """
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return 0


def wait_for_end(pid: int, started: int) -> None:
    """Block until the process `pid` that started at clock tick `started` has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if started_at(pid) == started:
            select.select([descriptor], [], [])
    finally:
        os.close(descriptor)
