"""What a routing policy is, what it sees, and what it answers.

A router makes one policy (router/policies/registry.py) and calls it from one thread. `choose` changes nothing
but the random state; `expect` tells the policy that its choice was dispatched.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import ClassVar, Final, NamedTuple, Protocol, TypeAlias

from baton.clock import Clock
from baton.messages.control import PullSource
from baton.request import Request
from baton.router.in_flight import InFlight
from baton.router.index.prefix_index import PrefixIndex
from baton.router.index.prompt_keys import PromptKeys
from baton.router.membership import Member
from baton.router.policies.cost_model import CostModel
from baton.router.policies.costs import PairCandidate, WorkerPool, WorkerView
from baton.router.policies.prompts_ahead import LeadOf


@dataclass(frozen=True)
class KnownWorkers:
    """What is known of all workers."""

    in_flight: InFlight
    index: PrefixIndex
    model: CostModel
    keys: PromptKeys


HasPlace: TypeAlias = Callable[[str], bool]  # id of a worker


class PolicyContext(NamedTuple):
    """What a router gives to its policy."""

    clock: Clock
    known: KnownWorkers
    random: Random


class RoutingChoice(NamedTuple):
    """The workers of one attempt, and why."""

    decode: str  # ids
    prefill: str  # "": the decode worker computes the prompt
    candidate: PairCandidate | None = None  # the chosen pair, where the policy predicts costs
    candidates: Sequence[PairCandidate] = ()  # every pair that was compared
    source: PullSource | None = None  # a worker to pull a prefix from
    keys: Mapping[str, bytes] = {}  # worker id -> keys of the prompt's pages as that worker will name them
    is_blind: bool = False  # the prefix index does not know the worker that computes the prompt
    is_owed: bool = False  # the tenant has had less than its share

    @property
    def computer(self) -> str:
        """The worker that computes the prompt."""
        return self.prefill or self.decode


class ClusterView(NamedTuple):
    """The workers that could serve an attempt: at least one decode worker, and prefill workers."""

    decoders: WorkerPool
    fillers: WorkerPool
    partners: Mapping[str, Collection[str]]  # decode worker -> prefill workers that can hand over to it
    left_out: Collection[str] = ()  # decode workers that may not take the attempt; never all
    avoided: Collection[str] = ()  # prefill workers to avoid while others are left

    def open_decoders(self) -> Sequence[Member]:
        """Decode workers that may take the attempt."""
        members = self.decoders.members
        return [each for each in members if each.id not in self.left_out] if self.left_out else members

    def worker_view(self, worker_id: str) -> WorkerView:
        """Of one that was compared."""
        return self.decoders.by_id.get(worker_id) or self.fillers.by_id[worker_id]


class TenantClaim(NamedTuple):
    """What a request's tenant is due."""

    lead: float | None = None  # see router/policies/prompts_ahead.py
    lead_of: LeadOf | None = None  # the same
    has_place: HasPlace | None = None  # to compute it at once; a decode worker without one computes no prompt
    needs_place: bool = False  # at a prefill worker too: it waits where that is best and has none
    wanted: Collection[str] = ()  # workers where others wait for a place, before it: it has none there

    def has_place_at(self, worker_id: str) -> bool:
        return worker_id not in self.wanted and (self.has_place is None or self.has_place(worker_id))

    @property
    def is_owed(self) -> bool:
        """Its tenant has had less than others."""
        return self.lead is not None and self.lead < 0


NO_TURN: Final = TenantClaim()


class RoutingPolicy(Protocol):
    """Chooses the workers of each attempt."""

    uses_prefix_index: ClassVar[bool]  # the router keeps a prefix index, and workers report their KV events
    weighs_local_prefill: ClassVar[bool]  # a prompt of any length may be computed on its decode worker

    def choose(self, request: Request, view: ClusterView, claim: TenantClaim = NO_TURN) -> RoutingChoice:
        """Choose among the workers of `view`. Changes nothing but the random state."""

    def expect(self, choice: RoutingChoice, num_tokens: int) -> None:
        """Take note that a prompt of `num_tokens` tokens was dispatched to this choice."""

    def forget(self, worker_id: str) -> None:
        """Drop all state of a worker that has left."""
