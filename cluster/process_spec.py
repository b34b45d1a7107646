"""What a runtime is asked to start, and what a process says of its start: one JSON line each."""

from collections.abc import Callable, Sequence
from typing import Annotated, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from baton.config.environment import LogFormat, log_format
from baton.errors import BatonError
from baton.messages.bounds import Kind, Name
from baton.messages.workers import Address
from baton.rpc.auth import ClusterKeys, Generations, KeyRing

ProcessKind: TypeAlias = Literal["router", "gateway", "worker"]

# Exit statuses beside 0, which says that it was told to end, by whomever.
USER_ERROR: Final = 2  # the operator must change something, as for the command line
ALIVE_EVERY_S: Final = 1.0
MAX_REASON_CHARS: Final = 8192  # a compiler's output can be longer than a report may be
DRAINED: Final = 4  # the operator has drained it, and nothing else has told it to end


class ProcessSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A process and the place it needs. `config` is its kind's own struct, without any secret."""

    kind: ProcessKind
    name: Name  # unique in the cluster, and the same after a restart
    config: msgspec.Struct
    num_ranks: int = 0  # of a model; 0: it computes nothing, and needs no place
    role: str = ""  # of those that compute: what one role computes at a time, another may wait for
    cores_per_rank: int | None = None  # None: an even share of the machine's
    gpus_per_rank: float = 0.0  # 0: the ranks compute on the CPU
    resources: dict[str, float] = {}  # of Ray, beside those
    incarnation: int = 0  # of the start, as in worker.Worker; 0: it has no supervisor


class Assignment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a process reads before anything else; it holds the keys of the process's kind."""

    kind: ProcessKind
    name: Name
    generations: Annotated[Generations, Meta(min_length=1, max_length=2)]
    config: msgspec.Raw
    incarnation: int = 0  # as in ProcessSpec
    log_format: LogFormat | None = None  # None: as the environment says, which is the raylet's on Ray


class Loading(msgspec.Struct, frozen=True, tag=True):
    """How much of the weights has been read; any number of times, before the report."""

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
        """Of an error that is not Baton's own, the type is named too."""
        reason = str(error) if isinstance(error, BatonError) else f"{type(error).__name__}: {error}"
        is_users_error = isinstance(error, BatonError) and isinstance(error, ValueError)
        return cls(reason[:MAX_REASON_CHARS], is_users_error)


Report: TypeAlias = ProcessStarted | ProcessFailed
Progress: TypeAlias = Callable[[int, int], None]  # bytes read so far, and in all


def generations_of(kind: str, keys: ClusterKeys) -> Generations:
    """Derive what a process of this kind, a ProcessKind or an operator, is given of the cluster's keys."""
    return KeyRing.of(keys, Kind(kind)).generations


def assignment(spec: ProcessSpec, keys: ClusterKeys) -> bytes:
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
    """Cores for each process that computes, by its name: those that fight over one stand still."""
    num_ranks = sum(spec.num_ranks for spec in specs)
    return {
        spec.name: spec.num_ranks * (spec.cores_per_rank or max(1, num_cores // num_ranks))
        for spec in specs
        if spec.num_ranks
    }


def share_out_threads(specs: Sequence[ProcessSpec], num_cores: int) -> dict[str, int]:
    """Threads for each process that computes, by its name, where they may use all cores.

    Those of one role share the cores; those of another have them too: prefill and decode workers are seldom
    busy together for long, and a thread without work sleeps. One prefill and one decode worker on two cores
    answer a fifth more so than with a core each, and a third sooner (`baton bench serve`).
    """
    threads: dict[str, int] = {}
    for role in {spec.role for spec in specs}:
        threads |= share_out([spec for spec in specs if spec.role == role], num_cores)
    return threads
