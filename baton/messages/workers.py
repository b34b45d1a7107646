"""What the cluster knows of a worker: who it is, and what it has."""

from enum import StrEnum
from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta

from baton.messages.bounds import MAX_ROUTERS, Attempt, Count, Id, Name, Seconds


class Address(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    host: Annotated[str, Meta(min_length=1, max_length=255)]
    port: Annotated[int, Meta(ge=1, le=65_535)]


Routers: TypeAlias = Annotated[tuple[Address, ...], Meta(min_length=1, max_length=MAX_ROUTERS)]


class WorkerRole(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


class Worker(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a worker says of itself; it holds for one life of its process, which `id` names."""

    id: Id
    name: Name  # the operator's, as "decode-0": the same after a restart
    # The number of the start. The supervisor's first has the milliseconds since 1970, each later one
    # has one more; 0: the process was started by hand. Of two processes of one name the one with the higher
    # number is the worker; of equal numbers, the one that joins last.
    incarnation: Count = 0
    role: WorkerRole
    model: Name  # as the API names it
    fingerprint: Name  # of the weights; requests move only between equal ones
    address: Address  # of its control connections
    kv_address: Address
    page_size: Count
    num_pages: Count
    max_num_seqs: Count
    max_model_len: Count
    tensor_parallel_size: Count = 1
    kv_dtype: Name = ""  # of the elements in its pages: part of their names
    num_host_pages: Count = 0
    max_num_batched_tokens: Count = 0  # that a step computes; 0: it does not say
    node: Name = ""  # the machine, by the name that operators know
    pid: Count = 0  # of the process, on that machine


REMOTE_PREFILLS: Final = "remote_prefills"  # of a decode worker's counters: prompts whose pages all came


class Load(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A worker's own count of what it has, for operators and for a router that has just started."""

    num_running: Count = 0
    num_waiting: Count = 0  # sequences that have no pages yet
    num_incoming: Count = 0  # transfers that hold pages here
    num_outgoing: Count = 0
    pages: dict[Annotated[str, Meta(max_length=16)], Count] = {}  # by state: free, active, cached ...
    prefix_queries_tokens: Count = 0  # in all, and of these the ones found
    prefix_hits_tokens: Count = 0
    num_preemptions: Count = 0
    num_tokens: Count = 0  # generated in all
    kv_bytes: Count = 0  # moved in all, out of this worker
    counters: dict[
        Annotated[str, Meta(max_length=64)], Count
    ] = {}  # of transports, fall-backs, dropped peers


class Tier(StrEnum):
    """Where a worker keeps a page."""

    DEVICE = "device"
    HOST = "host"


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    worker: Worker
    load: Load
    num_attempts: Count  # by the router's own books
    beat_age_s: Seconds
    is_draining: bool = False


# What work has taken: workers measure it, the router predicts from it.


class PrefillTimes(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a prompt has taken where it was computed."""

    request_id: Id
    attempt: Attempt
    waited_s: Seconds  # from its arrival until its first step
    computed_s: Seconds  # from then to its first token
    num_new_tokens: Count  # computed
    num_tokens: Count  # of the prompt
    pulled_bytes: Count = 0
    pulled_s: Seconds = 0.0
    moved_bytes: Count = 0  # handed to the decode worker
    exposed_s: Seconds = 0.0  # of the hand-off: after the first token
    own_s: Seconds = 0.0  # of computed_s: its part, where others were computed too; 0: not known


class StepTimes(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One step of an engine, of those that a worker tells of."""

    num_sequences: Count
    num_new_tokens: Count  # of prompts, computed in it
    num_context_tokens: Count  # that its sequences attend to
    step_s: Seconds
