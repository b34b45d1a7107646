"""Policies that look at load alone: `round-robin` and `least-loaded`."""

from collections.abc import Sequence
from typing import ClassVar

from baton.messages.workers import WorkerRole
from baton.request import Request
from baton.router.in_flight import NewPrompt, scheduling_class_of
from baton.router.membership import Member
from baton.router.policies.base import (
    NO_CLAIM,
    ClusterView,
    PolicyContext,
    RoutingChoice,
    TenantClaim,
    without,
)


class LoadPolicy:
    """Chooses a decode worker that has a partner, then one of its partners; each by `pick`."""

    uses_prefix_index: ClassVar[bool] = False
    weighs_local_prefill: ClassVar[bool] = False

    def __init__(self, context: PolicyContext) -> None:
        self._in_flight = context.in_flight
        self._random = context.random
        self._num_choices = {WorkerRole.PREFILL: 0, WorkerRole.DECODE: 0}

    def pick(self, loads: Sequence[float], num_before: int, random: int) -> int:
        """The index of one of at least two workers, given their loads.

        num_before: choices of this role so far. random: 32 bits.
        """
        raise NotImplementedError

    def choose(self, request: Request, view: ClusterView, claim: TenantClaim = NO_CLAIM) -> RoutingChoice:
        """The prompt is computed on the decode worker where no prefill worker is left."""
        decoders = view.open_decoders()
        paired = [member for member in decoders if view.partners[member.id]]
        decode = self._choose_worker(paired or decoders, WorkerRole.DECODE, request)
        partners = [member for member in view.prefills.members if member.id in view.partners[decode.id]]
        partners = without(partners, view.avoided)
        prefill = self._choose_worker(partners, WorkerRole.PREFILL, request).id if partners else ""
        return RoutingChoice(decode.id, prefill)

    def expect(self, choice: RoutingChoice, num_tokens: int) -> None:
        """Nothing to do: `InFlight` holds the load of dispatched attempts."""

    def forget(self, worker_id: str) -> None:
        """Nothing to do: a policy by load keeps no state of a worker."""

    def _choose_worker(self, members: Sequence[Member], role: WorkerRole, request: Request) -> Member:
        num_before = self._num_choices[role]
        self._num_choices[role] = num_before + 1
        if len(members) == 1:
            return members[0]
        loads = [self._load(member, role, request) for member in members]
        return members[self.pick(loads, num_before, self._random.getrandbits(32))]

    def _load(self, member: Member, role: WorkerRole, request: Request) -> float:
        account = self._in_flight.account(member.id)
        if role is WorkerRole.DECODE:
            return account.share_of(member.worker)
        prompt = NewPrompt(scheduling_class_of(request), request.num_tokens)
        return account.prompts.total * account.prompts.share_ahead_of(prompt)


class RoundRobin(LoadPolicy):
    """Takes workers in turn, whatever their load."""

    def pick(self, loads: Sequence[float], num_before: int, random: int) -> int:
        return num_before % len(loads)


class LeastLoaded(LoadPolicy):
    """Takes the worker with the least load; among equals one at random.

    The load of a decode worker is the share of its KV pages or batch slots in use, whichever is larger.
    The load of a prefill worker is the number of prompt tokens that it would compute before this prompt.
    """

    def pick(self, loads: Sequence[float], num_before: int, random: int) -> int:
        least = min(loads)
        equals = [index for index, load in enumerate(loads) if load == least]
        return equals[random % len(equals)]
