"""The interface of a routing policy: the workers that it sees, the choice that it returns.

A router makes one policy (router/policies/registry.py) and calls it from one thread. `choose` changes nothing
but the random state; `expect` tells the policy that its choice was dispatched.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import ClassVar, Final, NamedTuple, Protocol, TypeAlias

import msgspec

from baton.clock import Clock
from baton.messages.control import PullSource
from baton.messages.workers import WorkerRole
from baton.request import Request
from baton.router.in_flight import InFlight, LagOf
from baton.router.index.prefix_index import Holdings, PrefixIndex
from baton.router.membership import Member
from baton.router.policies.candidates import PageFormat, PairCandidate
from baton.router.policies.cost_model import CostModel
from baton.router.sliced_work import Family, PromptKeys, family_of


@dataclass(frozen=True)
class PolicyContext:
    """The router's knowledge, which a policy reads."""

    clock: Clock
    in_flight: InFlight
    index: PrefixIndex
    model: CostModel
    keys: PromptKeys
    random: Random


class RoutingChoice(NamedTuple):
    """The workers of one attempt, and the reasons."""

    decode: str  # ids
    prefill: str  # "": the decode worker computes the prompt
    candidate: PairCandidate | None = None  # the chosen pair, where the policy predicts costs
    candidates: Sequence[PairCandidate] = ()  # every pair that was compared
    source: PullSource | None = None  # a worker to pull a prefix from
    keys: Mapping[str, bytes] = {}  # worker id -> keys of the prompt's pages as that worker will name them
    is_blind: bool = False  # the prefix index does not know the worker that computes the prompt
    has_deficit: bool = False  # the tenant has had less than its share
    draw: int = 0  # the random number that broke ties, where the policy predicts costs

    @property
    def computed_by(self) -> str:
        """The worker that computes the prompt."""
        return self.prefill or self.decode


class Pair(NamedTuple):
    """The members that an attempt is dispatched to."""

    decode: Member
    prefill: Member | None  # None: the decode worker computes the prompt
    reason: str
    choice: RoutingChoice | None = None  # of the router's policy, where that was asked

    @property
    def prefill_id(self) -> str:
        """Id of the prefill worker; "" when the decode worker computes the prompt."""
        return self.prefill.id if self.prefill is not None else ""

    @property
    def computed_by(self) -> Member:
        """The worker that computes the prompt."""
        return self.prefill or self.decode


class WorkerView(msgspec.Struct, frozen=True, gc=False):
    """The constants of a worker that decisions read."""

    id: str
    family: (
        Family  # workers of one family share this object and `page_format`, so reads stay in the CPU's cache
    )
    page_format: PageFormat
    page_size: int
    num_slots: int  # of KV, at least 1
    max_num_seqs: int  # at least 1
    max_num_batched_tokens: int  # that a step computes; 0: unknown
    is_prefill: bool
    slot: int  # in the index; 0 when the index does not know the worker
    slot_bit: int  # 0 when the index does not know the worker


class WorkerPool:
    """The workers of one role that could serve an attempt. Made once for each change of the membership."""

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = members
        self.families: Sequence[Family] = list({family_of(member.worker): None for member in members})
        self.by_id: dict[str, WorkerView] = {}  # filled by `views`
        self._views: list[WorkerView] = []
        self._by_slot: dict[Family, dict[int, WorkerView]] = {}
        self._slots: dict[Family, int] = {}  # a bit for each slot
        self._version = -1

    def __len__(self) -> int:
        return len(self.members)

    def views(self, index: PrefixIndex) -> Sequence[WorkerView]:
        """A view of each member, in the members' order."""
        if self._version != index.version:
            self._version = index.version
            shared = {family: (family, family[:2]) for family in self.families}
            self._views = [_worker_view(member, shared, index) for member in self.members]
            self.by_id = {view.id: view for view in self._views}
            self._by_slot = {family: {} for family in self.families}
            self._slots = dict.fromkeys(self.families, 0)
            for view in self._views:
                if view.slot_bit:
                    self._by_slot[view.family][view.slot] = view
                    self._slots[view.family] |= view.slot_bit
        return self._views

    def holders(self, family: Family, holdings: Holdings, limit: int, first: WorkerView) -> list[WorkerView]:
        """Up to `limit` members of the family that hold most of a prompt.

        holdings: of the family's page keys, from the index that `views` was called with. first: among members
        that hold the same, those from this one on come first.
        """
        by_slot = self._by_slot[family]
        return [by_slot[slot] for slot in holdings.most(self._slots[family], limit, first.slot)]


def _worker_view(
    member: Member, shared: Mapping[Family, tuple[Family, PageFormat]], index: PrefixIndex
) -> WorkerView:
    worker, slot = member.worker, index.slot(member.id)
    family, page_format = shared[family_of(worker)]
    return WorkerView(
        id=member.id,
        family=family,
        page_format=page_format,
        page_size=worker.page_size,
        num_slots=max(1, worker.num_pages * worker.page_size),
        max_num_seqs=max(1, worker.max_num_seqs),
        max_num_batched_tokens=worker.max_num_batched_tokens,
        is_prefill=worker.role is WorkerRole.PREFILL,
        slot=slot or 0,
        slot_bit=0 if slot is None else 1 << slot,
    )


class ClusterView(NamedTuple):
    """The workers that could serve an attempt: at least one decode worker, and prefill workers."""

    decoders: WorkerPool
    prefills: WorkerPool
    partners: Mapping[str, Collection[str]]  # decode worker -> prefill workers that can hand over to it
    left_out: Collection[str] = ()  # decode workers that may not take the attempt; never all
    avoided: Collection[str] = ()  # prefill workers to avoid while others are left

    def open_decoders(self) -> Sequence[Member]:
        """Decode workers that may take the attempt."""
        members = self.decoders.members
        return [each for each in members if each.id not in self.left_out] if self.left_out else members

    def worker_view(self, worker_id: str) -> WorkerView:
        """The view of a worker that was compared."""
        return self.decoders.by_id.get(worker_id) or self.prefills.by_id[worker_id]


HasSlot: TypeAlias = Callable[[str], bool]  # id of a worker


class TenantClaim(NamedTuple):
    """The rights of a request's tenant at the workers now."""

    lag: float | None = None  # see `NewPrompt` in router/in_flight.py
    lag_of: LagOf | None = None
    has_slot: HasSlot | None = None  # a worker would compute the prompt at once; None: all would
    needs_slot: bool = False  # the prompt waits at the router when the best prefill worker has no slot either
    wanted: Collection[str] = ()  # workers where earlier requests wait for a slot

    def has_slot_at(self, worker_id: str) -> bool:
        """True when the worker would compute the prompt at once, and no earlier request waits for it."""
        return worker_id not in self.wanted and (self.has_slot is None or self.has_slot(worker_id))

    @property
    def has_deficit(self) -> bool:
        """True when the tenant has had less than its share."""
        return self.lag is not None and self.lag > 0


NO_CLAIM: Final = TenantClaim()


class RoutingPolicy(Protocol):
    """Chooses the workers of each attempt."""

    uses_prefix_index: ClassVar[bool]  # the router keeps a prefix index, and workers report their KV events
    weighs_local_prefill: ClassVar[bool]  # a prompt of any length may be computed on its decode worker

    def choose(self, request: Request, view: ClusterView, claim: TenantClaim = NO_CLAIM) -> RoutingChoice:
        """Choose among the workers of `view`. Changes nothing but the random state."""

    def expect(self, choice: RoutingChoice, num_tokens: int) -> None:
        """Take note that a prompt of `num_tokens` tokens was dispatched to this choice."""

    def forget(self, worker_id: str) -> None:
        """Drop all state of a worker that has left."""


def without(members: Sequence[Member], avoided: Collection[str]) -> list[Member]:
    """The members that are not to be avoided; all of them where no other is left."""
    if not avoided:
        return list(members)
    return [member for member in members if member.id not in avoided] or list(members)
