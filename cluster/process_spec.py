"""The messages between a runtime and the processes that it starts, one JSON line each."""

from collections.abc import Callable, Sequence
from typing import Annotated, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

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
