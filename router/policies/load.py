"""Policies that look at load alone: `round-robin` and `least-loaded`."""

from collections.abc import Collection, Sequence
from typing import ClassVar, NamedTuple

from baton.messages.workers import WorkerRole
from baton.request import Request
from baton.router.in_flight import scheduling_class_of
from baton.router.membership import Member
from baton.router.policies.base import NO_TURN, ClusterView, PolicyContext, RoutingChoice, TenantClaim
from baton.router.policies.prompts_ahead import Claim


class LoadView(NamedTuple):
    """A worker that could take the work."""

    worker: str  # its id
    load: float  # in any unit, the same for all views of one choice


class LoadPolicy:
    """Chooses a decode worker that has a partner, then one of its partners; each by `pick`."""

    uses_prefix_index: ClassVar[bool] = False
    weighs_local_prefill: ClassVar[bool] = False

    def __init__(self, context: PolicyContext) -> None:
        self._in_flight = context.known.in_flight
        self._random = context.random
        self._num_choices = {WorkerRole.PREFILL: 0, WorkerRole.DECODE: 0}

    def pick(self, views: Sequence[LoadView], num_before: int, random: int) -> LoadView:
        """Pick one of at least one view. num_before: choices of this role so far. random: 32 bits."""
        raise NotImplementedError

    def choose(self, request: Request, view: ClusterView, claim: TenantClaim = NO_TURN) -> RoutingChoice:
        """The prompt is computed on the decode worker where no prefill worker is left."""
        decoders = view.open_decoders()
        paired = [member for member in decoders if view.partners[member.id]]
        decode = self.choose_worker(paired or decoders, WorkerRole.DECODE, request)
        partners = [member for member in view.fillers.members if member.id in view.partners[decode.id]]
        partners = without(partners, view.avoided)
        prefill = self.choose_worker(partners, WorkerRole.PREFILL, request).id if partners else ""
        return RoutingChoice(decode.id, prefill)

    def expect(self, choice: RoutingChoice, num_tokens: int) -> None:
        """Nothing to do: `InFlight` holds the load of dispatched attempts."""

    def forget(self, worker_id: str) -> None:
        """Nothing to do: a policy by load keeps no state of a worker."""

    def choose_worker(self, members: Sequence[Member], role: WorkerRole, request: Request) -> Member:
        """Choose one of at least one worker of this role."""
        num_before = self._num_choices[role]
        self._num_choices[role] = num_before + 1
        if len(members) == 1:
            return members[0]
        views = [LoadView(member.id, self._load(member, role, request)) for member in members]
        picked = self.pick(views, num_before, self._random.getrandbits(32))
        return next(member for member in members if member.id == picked.worker)

    def _load(self, member: Member, role: WorkerRole, request: Request) -> float:
        account = self._in_flight.account(member.id)
        if role is WorkerRole.DECODE:
            return account.share_of(member.worker)
        claim = Claim(scheduling_class_of(request), request.num_tokens)
        return account.num_prompt_tokens * account.prompts.part_before(claim)


class RoundRobin(LoadPolicy):
    """Takes workers in turn, whatever their load."""

    def pick(self, views: Sequence[LoadView], num_before: int, random: int) -> LoadView:
        return views[num_before % len(views)]


class LeastLoaded(LoadPolicy):
    """Takes the worker with the least load; among equals one at random.

    The load of a decode worker is the share of its KV pages or batch slots in use, whichever is larger.
    The load of a prefill worker is the number of prompt tokens that it would compute before this prompt.
    """

    def pick(self, views: Sequence[LoadView], num_before: int, random: int) -> LoadView:
        least = min(view.load for view in views)
        equals = [view for view in views if view.load == least]
        return equals[random % len(equals)]


def without(members: Sequence[Member], avoided: Collection[str]) -> list[Member]:
    """The members whose ids are not to be avoided; all of them where no other is left."""
    if not avoided:
        return list(members)
    return [member for member in members if member.id not in avoided] or list(members)
