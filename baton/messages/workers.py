"""Descriptions of workers: identity, load, the running step, and measured times."""

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, Final, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta

from baton.messages.bounds import MAX_NODES, MAX_ROUTERS, Attempt, Count, Id, Moment, Name, Seconds
from baton.messages.status import Sizes, TimesByName


class Address(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A TCP address."""

    host: Annotated[str, Meta(min_length=1, max_length=255)]
    port: Annotated[int, Meta(ge=1, le=65_535)]


ReplicaNonce: TypeAlias = Annotated[bytes, Meta(max_length=32)]


class RankZero(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A listener of rank 0, where other ranks of its replica meet it, or their agents."""

    address: Address
    replica: ReplicaNonce  # random: ranks of another replica, or of an earlier start, are refused


class HostPlace(NamedTuple):
    """A process that hosts ranks of a worker: its address for rank 0's process, and the name of its node."""

    host: str
    port: int
    node: str


Routers: TypeAlias = Annotated[tuple[Address, ...], Meta(min_length=1, max_length=MAX_ROUTERS)]


class WorkerRole(StrEnum):
    """The phase of inference that a worker computes."""

    PREFILL = "prefill"
    DECODE = "decode"


class Worker(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A worker's description of itself. `id` names one life of the worker's process."""

    id: Id
    name: Name  # given by the operator, such as "decode-0"; a restart keeps it
    # The number of the start. The supervisor's first start has the milliseconds since 1970, each later start
    # one more; 0: the process was started by hand. Of two processes of one name, the process with the higher
    # number is the worker; of equal numbers, the process that joins last.
    incarnation: Count = 0
    role: WorkerRole
    model: Name  # the model's name in the API
    fingerprint: Name  # of the weights; requests move only between equal fingerprints
    address: Address  # of its control connections
    kv_address: Address
    page_size: Count
    num_pages: Count
    max_num_seqs: Count
    max_model_len: Count
    tensor_parallel_size: Count = 1
    pipeline_parallel_size: Count = 1
    kv_dtype: Name = ""  # element type of the KV pages; page keys depend on it
    num_host_pages: Count = 0
    max_num_batched_tokens: Count = 0  # in one step; 0: unknown
    node: Name = ""  # name of the machine, for operators
    # The machines of its ranks beside `node`.
    rank_nodes: Annotated[tuple[Name, ...], Meta(max_length=MAX_NODES - 1)] = ()
    pid: Count = 0  # process id on that machine
    is_asleep: bool = False  # it has neither weights nor pages, and takes no work until it is woken
    sleep_level: Annotated[int, Meta(ge=0, le=2)] = 0  # level of the order that it follows; 0: it is awake
    order_number: Count = 0  # of the latest order to sleep or wake that it has followed; see ModelOrder

    @property
    def nodes(self) -> frozenset[str]:
        """The names of the machines of its ranks, as far as they are known."""
        return frozenset(filter(None, (self.node, *self.rank_nodes)))

    def serves(self, model: str) -> bool:
        """Return whether requests for the model may run here; "": the model of a cluster that has one."""
        return not model or self.model == model


def are_asleep(workers: Iterable[Worker], model: str) -> bool:
    """Return whether the model has decode workers and all of them sleep. model: as in `Worker.serves`."""
    decoders = [each for each in workers if each.role is WorkerRole.DECODE and each.serves(model)]
    return bool(decoders) and all(each.is_asleep for each in decoders)


MAX_DESTINATIONS: Final = 8  # decode workers in a prefill worker's load
REMOTE_PREFILLS: Final = "remote_prefills"  # counter of a decode worker: prompts with pages that all arrived


MAX_PAIRS: Final = 64  # in one Load; pairs that fell back come first
Transport: TypeAlias = Annotated[str, Meta(max_length=64)]


class PairTransport(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The transport that carries pages from a worker to a peer."""

    peer: Name  # the peer's name
    transport: Transport  # in use
    best: Transport  # the first of those that can serve the two; another one is a fallback

    @property
    def has_fallen_back(self) -> bool:
        """True when the best transport did not open, or broke."""
        return self.transport != self.best


class Tier(StrEnum):
    """The memory in which a worker keeps a page."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class Load(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A worker's own count of its load, for operators and for a router that has just started."""

    num_running: Count = 0
    num_waiting: Count = 0  # sequences without pages
    num_incoming: Count = 0  # transfers that hold pages here
    num_outgoing: Count = 0
    pages: dict[Annotated[str, Meta(max_length=16)], Count] = {}  # by state: free, active, cached ...
    prefix_queries_tokens: Count = 0  # since the worker's start, as are all counts below
    prefix_hits_tokens: Count = 0
    num_preemptions: Count = 0
    num_drafts: Count = 0  # steps of sequences with drafts
    num_draft_tokens: Count = 0
    num_accepted_tokens: Count = 0  # of the drafts
    num_masks: Count = 0  # of structured outputs: token masks, compiled grammars, and their time
    mask_us: Count = 0
    num_compiled_forms: Count = 0
    compile_us: Count = 0
    num_failed_forms: Count = 0  # sequences: a grammar did not compile, or refused a token
    num_tokens: Count = 0  # generated
    kv_bytes: Count = 0  # sent to other workers
    # Of these, by decode worker, the latest last; a worker that was left out starts again from 0.
    kv_bytes_to: Annotated[dict[Id, Count], Meta(max_length=MAX_DESTINATIONS)] = {}
    num_padded_tokens: Count = 0  # computed beside those of `step_tokens`, for nothing
    # Measured nanoseconds to bring the KV of one token to the device, from host memory and from disk.
    tier_token_ns: dict[Tier, Count] = {}
    step_tokens: Sizes = msgspec.field(default_factory=Sizes)  # of each step, without padding
    times: TimesByName = {}
    pairs: Annotated[tuple[PairTransport, ...], Meta(max_length=MAX_PAIRS)] = ()
    # Transports, fall-backs, dropped peers. The worker names its counters and gauges itself.
    counters: dict[Annotated[str, Meta(max_length=64)], Count] = {}
    gauges: Annotated[dict[Annotated[str, Meta(max_length=64)], Count], Meta(max_length=64)] = {}


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A worker as a router sees it."""

    worker: Worker
    load: Load
    num_attempts: Count  # in flight by the router's own count
    beat_age_s: Seconds  # since the last heartbeat
    is_draining: bool = False


class RunningStep(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A worker's current step: see baton/rpc/liveness.py."""

    age_s: Seconds
    num_tokens: Count = 0  # in the batch; 0: there is no batch yet
    bound_s: Seconds

    @property
    def is_overdue(self) -> bool:
        return self.age_s > self.bound_s

    @property
    def complaint(self) -> str:
        """The reason to remove a worker with an overdue step."""
        return (
            f"a step of {self.num_tokens} tokens takes {self.age_s:.0f} s, its bound is {self.bound_s:.0f} s"
        )


class PrefillTimes(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Times and sizes of one computed prompt.

    Workers measure them; the router's cost model learns from them.
    """

    request_id: Id
    attempt: Attempt
    waited_s: Seconds  # from the arrival to the first step
    computed_s: Seconds  # from the first step to the first token
    num_new_tokens: Count  # computed
    num_tokens: Count  # of the prompt
    pulled_bytes: Count = 0
    pulled_s: Seconds = 0.0
    moved_bytes: Count = 0  # sent to the decode worker
    exposed_s: Seconds = 0.0  # of the hand-off after the first token
    own_s: Seconds = 0.0  # this prompt's part of computed_s in shared steps; 0: unknown

    @property
    def used_s(self) -> float:
        """The time that the prompt's computation used."""
        return self.own_s or self.computed_s

    @property
    def queued_s(self) -> float:
        """The rest of the time to the first token: the wait, and the other prompts' part of shared steps."""
        return max(0.0, self.waited_s + self.computed_s - self.used_s)


class WorkerTimes(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """The phases of one attempt at one worker, by that worker's clock; a moment of 0 did not come.

    The worker of the prompt sends them with the first token, and has `started_s` and `first_token_s`. The
    decode worker sends them with the last token; after a remote prompt it has `granted_s` and `pages_s`.
    """

    arrived_s: Moment  # the router's order
    started_s: Moment = 0.0  # the first step with a part of the prompt began
    first_token_s: Moment = 0.0
    granted_s: Moment = 0.0  # there was room for the pages, and the prefill worker was told
    pages_s: Moment = 0.0  # all pages of the prompt had arrived
    ended_s: Moment = 0.0  # the last token
    pulled_s: Seconds = 0.0  # waiting for a prefix of another worker, before started_s
    prompt_s: Seconds = 0.0  # of the steps that computed a part of the sequence, until first_token_s
    prompt_preempted_s: Seconds = 0.0  # between started_s and first_token_s
    decode_s: Seconds = 0.0  # of such steps after that
    decode_preempted_s: Seconds = 0.0
    hidden_s: Seconds = 0.0  # of sending pages, until first_token_s
    num_draft_tokens: Count = 0  # that were checked
    num_accepted_tokens: Count = 0  # of these, those that were kept
    used_s: Seconds = 0.0  # the attempt's part of the time of steps, by tokens, since the worker last told it


class StepTimes(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Size and duration of one step of an engine.

    A step in which drafts were accepted counts as several: `step_s` is the time in which each sequence gained
    one token.
    """

    num_sequences: Count
    num_new_tokens: Count  # of prompts, computed in the step
    num_context_tokens: Count  # that the sequences attend to
    step_s: Seconds
