"""Where an attempt runs: a decode worker, and the prefill worker for its prompt, if any.

1. Decode workers that take work and that the gateway reaches; without those that failed the request, as
   long as others are left. Those that are full are left out, though none is left then.
2. The one that holds the prompt already, if the gateway names one: the rest of the prompt is computed there.
3. A short prompt, or one that no prefill worker can be found for, is computed by the decode worker.
4. Else the policy chooses among the decode workers that have a partner, then among its partners: prefill
   workers that the gateway and the decode worker reach, that reach it, and that have the same weights.

The policies that look at prompts (router/policies/cost.py) choose both at once, and `cost` whether a prompt
is short. One that is best computed by a worker that has others before may have to wait.
"""

from collections.abc import Collection, Sequence
from enum import Enum
from random import Random
from typing import NamedTuple

from baton.config.router import RouterSettings
from baton.messages.control import Submit
from baton.messages.workers import WorkerRole
from baton.request import Request
from baton.router.in_flight import InFlight, scheduling_class_of
from baton.router.membership import Member, Membership
from baton.router.policies.cost import NO_TURN, ClusterView, CostPolicy, RoutingChoice, TenantClaim
from baton.router.policies.costs import WorkerPool
from baton.router.policies.load import POLICIES, Draw, LoadView, least_loaded
from baton.router.policies.prompts_ahead import Claim


class Pair(NamedTuple):
    decode: Member
    prefill: Member | None
    reason: str
    choice: RoutingChoice | None = None

    @property
    def computer(self) -> Member:
        """Of the prompt."""
        return self.prefill or self.decode


class Unpaired(Enum):
    """Why an attempt goes nowhere now."""

    UNREACHED = "no decode worker can be reached"
    NO_PREFILL = "no prefill worker can be reached"
    FULL = "no decode worker has room"


class NoPlace(NamedTuple):
    """The worker that is best for an attempt has others' prompts to compute before."""

    worker: str


class Pairing:
    """Remembers who reaches whom until the membership changes."""

    def __init__(
        self,
        config: RouterSettings,
        members: Membership,
        in_flight: InFlight,
        cost_policy: CostPolicy | None = None,
    ) -> None:
        """chooser: of the policies that look at the prompt."""
        self._pressed_tokens = 0
        self._config = config
        self._cost_policy = cost_policy
        self._policy = POLICIES.get(config.policy, least_loaded)
        self._members = members
        self._in_flight = in_flight
        self._random = Random(config.seed)
        self._turns = {WorkerRole.PREFILL: 0, WorkerRole.DECODE: 0}
        self._version = -1
        self._decoders: dict[frozenset[str], list[Member]] = {}
        self._paired: dict[frozenset[str], frozenset[str]] = {}
        self._partners: dict[tuple[frozenset[str], str], list[Member]] = {}
        self._fields: dict[frozenset[str], ClusterView] = {}

    def pair(
        self,
        submit: Submit,
        reached: frozenset[str],
        full: Collection[str] = (),
        turn: TenantClaim = NO_TURN,
    ) -> Pair | Unpaired | NoPlace:
        """reached: the workers that the gateway reaches. full: decode workers that are not to be chosen, but
        for one that holds the prompt already. turn: for the policies that look at the prompt.
        """
        if self._version != self._members.version:
            self._version = self._members.version
            self.forget()
        decoders = self._decoders_for(reached)
        holder = next((member for member in decoders if member.id == submit.sticky_worker), None)
        if holder is not None and holder.id not in submit.avoid:
            return Pair(holder, None, "it holds the prompt")
        decoders = _without(decoders, submit.avoid)
        if not decoders:
            return Unpaired.UNREACHED
        if full:
            decoders = [member for member in decoders if member.id not in full]
            if not decoders:
                return Unpaired.FULL
        if submit.request.is_probe:
            return self._pair_apart(submit, decoders, reached)
        num_tokens = submit.request.num_tokens
        if num_tokens <= self._pressed_tokens:
            return Pair(self._choose(decoders, WorkerRole.DECODE, submit.request), None, "a short prompt")
        if self._cost_policy is not None and self._config.policy == "cost":
            return self._choose_both(submit, decoders, reached, turn)
        if num_tokens <= self._config.local_prefill_tokens:
            return Pair(self._choose(decoders, WorkerRole.DECODE, submit.request), None, "a short prompt")
        if self._cost_policy is not None:
            paired = [member for member in decoders if member.id in self._paired_for(reached)]
            if paired:
                return self._choose_both(submit, paired, reached, turn)
        pair = self._pair_apart(submit, decoders, reached)
        if isinstance(pair, Pair):
            return pair
        return Pair(self._choose(decoders, WorkerRole.DECODE, submit.request), None, "no prefill worker")

    def press(self, local_prefill_tokens: int) -> None:
        """Prompts up to so many tokens are computed where they are decoded, whatever the policy says."""
        self._pressed_tokens = local_prefill_tokens

    def forget(self) -> None:
        """What a gateway reaches has changed."""
        self._decoders.clear()
        self._paired.clear()
        self._partners.clear()
        self._fields.clear()

    def _pair_apart(self, submit: Submit, decoders: list[Member], reached: frozenset[str]) -> Pair | Unpaired:
        """A decode worker that has a partner, and one of its partners; by their load alone."""
        paired = [member for member in decoders if member.id in self._paired_for(reached)]
        if not paired:
            return Unpaired.NO_PREFILL
        decode = self._choose(paired, WorkerRole.DECODE, submit.request)
        partners = _without(self._partners_of(decode, reached), submit.avoid)
        prefill = self._choose(partners, WorkerRole.PREFILL, submit.request)
        return Pair(decode, prefill, "a probe" if submit.request.is_probe else self._config.policy)

    def _choose_both(
        self, submit: Submit, decoders: list[Member], reached: frozenset[str], turn: TenantClaim
    ) -> Pair | NoPlace:
        """decoders: those that may take it, of all that the gateway reaches."""
        assert self._cost_policy is not None, self._config.policy
        if reached not in self._fields:
            self._fields[reached] = self._field(reached)
        field = self._fields[reached]
        if len(decoders) < len(field.decoders):
            taking = {member.id for member in decoders}
            left_out = {member.id for member in field.decoders.members if member.id not in taking}
            field = field._replace(left_out=left_out)
        if submit.avoid and any(member.id not in submit.avoid for member in field.fillers.members):
            field = field._replace(avoided=submit.avoid)
        choice = self._cost_policy.choose(submit.request, field, turn)
        if turn.needs_place and not turn.has_place_at(choice.candidate.computer):
            return NoPlace(choice.candidate.computer)
        decode = self._members.get(choice.candidate.decode)
        assert decode is not None, "the field has members alone"
        prefill = self._members.get(choice.candidate.prefill)
        return Pair(decode, prefill, self._config.policy, choice)

    def _field(self, reached: frozenset[str]) -> ClusterView:
        decoders = self._decoders_for(reached)
        partners = {each.id: self._partners_of(each, reached) for each in decoders}
        fillers = {member.id: member for each in partners.values() for member in each}
        ids = {decode: {member.id for member in each} for decode, each in partners.items()}
        return ClusterView(
            WorkerPool(decoders),
            WorkerPool(list(fillers.values())),
            lambda decode, prefill: prefill in ids[decode],
        )

    def _choose(self, members: Sequence[Member], role: WorkerRole, request: Request) -> Member:
        turn = self._turns[role]
        self._turns[role] = turn + 1
        if len(members) == 1:
            return members[0]
        views = [LoadView(member.id, self._load(member, role, request)) for member in members]
        chosen = self._members.get(self._policy(views, Draw(turn, self._random.getrandbits(32))).worker)
        assert chosen is not None, "the views are of members"
        return chosen

    def _load(self, member: Member, role: WorkerRole, request: Request) -> float:
        """Of prompts, those that would be computed before this one."""
        account = self._in_flight.account(member.id)
        if role is WorkerRole.DECODE:
            return account.share_of(member.worker)
        claim = Claim(scheduling_class_of(request), request.num_tokens)
        return account.num_prompt_tokens * account.prompts.part_before(claim)

    def _decoders_for(self, reached: frozenset[str]) -> list[Member]:
        if reached not in self._decoders:
            decoders = self._members.of_role(WorkerRole.DECODE)
            usable = [member for member in decoders if member.id in reached and not member.is_draining]
            self._decoders[reached] = usable
        return self._decoders[reached]

    def _paired_for(self, reached: frozenset[str]) -> frozenset[str]:
        """The decode workers among them that have a partner."""
        if reached not in self._paired:
            decoders = self._decoders_for(reached)
            self._paired[reached] = frozenset(
                each.id for each in decoders if self._partners_of(each, reached)
            )
        return self._paired[reached]

    def _partners_of(self, decode: Member, reached: frozenset[str]) -> list[Member]:
        key = (reached, decode.id)
        if key not in self._partners:
            self._partners[key] = [
                member
                for member in self._members.of_role(WorkerRole.PREFILL)
                if member.id in reached
                and member.id in decode.reached
                and decode.id in member.reached
                and member.worker.fingerprint == decode.worker.fingerprint
                and not member.is_draining
            ]
        return self._partners[key]


def _without(members: list[Member], avoided: Sequence[str]) -> list[Member]:
    """Those not to be avoided; all, when nobody else is left."""
    return [member for member in members if member.id not in avoided] or members if avoided else members
