"""The rules that come before the policy: which workers an attempt may have, and when one worker does both.

`Pairing.pair` answers a `PairQuestion` with a `Pair`, or says why there is none: `Unpaired`, or `NoSlot`.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple, TypeAlias

from baton.config.router import RouterConfig
from baton.messages.control import Submit
from baton.messages.workers import WorkerRole
from baton.router.checkpoint import attributes_of
from baton.router.membership import Member, Membership
from baton.router.policies.base import (
    NO_CLAIM,
    ClusterView,
    Pair,
    RoutingPolicy,
    TenantClaim,
    WorkerPool,
    without,
)


class Unpaired(Enum):
    """The reason why an attempt cannot be dispatched now."""

    UNREACHED = "no decode worker can be reached"
    NO_PREFILL = "no prefill worker can be reached"
    FULL = "no decode worker has room"


class NoSlot(NamedTuple):
    """The best worker for an attempt has other prompts to compute first."""

    worker: str


# The key of the caches: a model, and the ids of the workers that a gateway reaches.
_Reach: TypeAlias = tuple[str, frozenset[str]]


class PairQuestion(NamedTuple):
    """An attempt that needs workers, and the bounds of the choice."""

    submit: Submit
    reached: frozenset[str]  # ids of the workers that the gateway reaches
    # Decode workers without room; they are chosen only when they hold the prompt already.
    full: frozenset[str]
    claim: TenantClaim
    local_tokens: int  # the decode worker computes prompts of up to so many tokens; the policy is not asked


class Pairing:
    """Chooses the decode worker of an attempt, and a prefill worker for its prompt, if any.

    1. Decode workers of the request's model that take work and that the gateway reaches; without those that
       failed the request, as long as others are left. Full workers are left out, even if none is left then.
    2. The worker that holds the prompt already, if the gateway names one, computes the rest of the prompt.
    3. A short prompt, or a prompt without a reachable prefill worker, is computed by the decode worker.
    4. Else the policy chooses among the decode workers that have a partner, then among its partners: prefill
       workers that the gateway and the decode worker reach, that reach the decode worker, and that have the
       same weights.

    A policy that weighs local prefill decides itself which prompts decode workers compute. A prompt may have
    to wait when its best worker has no slot. The workers that reach each other are cached until the
    membership changes.
    """

    def __init__(
        self,
        config: RouterConfig,
        members: Membership,
        policy: RoutingPolicy,
        by_load: RoutingPolicy,
    ) -> None:
        """by_load: chooses for probes, and for prompts that any decode worker may compute."""
        self._config = config
        self._policy = policy
        self._by_load = by_load
        self._members = members
        self._version = -1
        self._local_tokens = 0 if policy.weighs_local_prefill else config.local_prefill_tokens
        self._decoders: dict[_Reach, list[Member]] = {}
        self._views: dict[_Reach, ClusterView] = {}
        # Called with each question and its answer, to compare the choices of another policy.
        self.on_pair: Callable[[PairQuestion, Pair | Unpaired | NoSlot], object] | None = None

    def __getstate__(self) -> dict[str, object]:
        """Everything but the caches, which follow from the membership."""
        return attributes_of(self) | {"_version": -1, "_decoders": {}, "_views": {}, "on_pair": None}

    def pair(self, question: PairQuestion) -> Pair | Unpaired | NoSlot:
        """Choose the workers of an attempt, or return why there are none now."""
        answer = self._pair(*question)
        if self.on_pair is not None:
            self.on_pair(question, answer)
        return answer

    def _pair(
        self,
        submit: Submit,
        reached: frozenset[str],
        full: frozenset[str],
        claim: TenantClaim,
        local_tokens: int,
    ) -> Pair | Unpaired | NoSlot:
        reach = submit.request.model, reached
        decoders = self._decoders_for(reach)
        holder = next((member for member in decoders if member.id == submit.sticky_worker), None)
        if holder is not None and holder.id not in submit.avoid:
            return Pair(holder, None, "it holds the prompt")
        decoders = without(decoders, submit.avoid)
        if not decoders:
            return Unpaired.UNREACHED
        if full:
            decoders = [member for member in decoders if member.id not in full]
            if not decoders:
                return Unpaired.FULL
        if submit.request.is_probe:
            paired = self._paired(decoders, reach)
            if not paired:
                return Unpaired.NO_PREFILL
            return self._choose(self._by_load, "a probe", submit, paired, reach)
        if submit.request.num_tokens <= max(local_tokens, self._local_tokens):
            return self._choose(self._by_load, "a short prompt", submit, decoders, reach, is_local=True)
        if self._policy.weighs_local_prefill:
            return self._choose(self._policy, self._config.policy, submit, decoders, reach, claim)
        paired = self._paired(decoders, reach)
        if not paired:
            return self._choose(self._by_load, "no prefill worker", submit, decoders, reach, is_local=True)
        return self._choose(self._policy, self._config.policy, submit, paired, reach, claim)

    def migration(
        self, submit: Submit, reached: frozenset[str], has_room: Callable[[Member], bool]
    ) -> Pair | Unpaired:
        """Choose the decode worker that a running request moves to, by load; `sticky_worker` alone if set."""
        source = self._members.get(submit.migrates_from)
        reach = submit.request.model, reached
        others = [
            member
            for member in self._decoders_for(reach)
            if source is not None
            and member is not source
            and member.worker.fingerprint == source.worker.fingerprint
            and submit.sticky_worker in ("", member.id)
        ]
        if not others:
            return Unpaired.UNREACHED
        others = [member for member in without(others, submit.avoid) if has_room(member)]
        if not others:
            return Unpaired.FULL
        pair = self._choose(self._by_load, "a migration", submit, others, reach, is_local=True)
        assert isinstance(pair, Pair), "without a claim no slot is needed"
        return pair

    def forget(self) -> None:
        """Drop the cache; to be called when a gateway reaches other workers."""
        self._decoders.clear()
        self._views.clear()

    def _choose(
        self,
        policy: RoutingPolicy,
        reason: str,
        submit: Submit,
        decoders: Sequence[Member],
        reach: _Reach,
        claim: TenantClaim = NO_CLAIM,
        *,
        is_local: bool = False,
    ) -> Pair | NoSlot:
        """decoders: those that may take the attempt, of all that the gateway reaches."""
        view = self.view_of(*reach)
        if len(decoders) < len(view.decoders):
            taking = {member.id for member in decoders}
            left_out = {each.id for each in view.decoders.members if each.id not in taking}
            view = view._replace(left_out=left_out)
        if is_local:
            view = view._replace(partners=defaultdict(tuple))
        elif submit.avoid and any(member.id not in submit.avoid for member in view.prefills.members):
            view = view._replace(avoided=submit.avoid)
        choice = policy.choose(submit.request, view, claim)
        if choice.candidate is not None and claim.needs_slot and not claim.has_slot_at(choice.computed_by):
            return NoSlot(choice.computed_by)
        decode = self._members.get(choice.decode)
        assert decode is not None, "the view has members alone"
        is_own = policy is self._policy and not is_local  # else the policy has nothing to take note of
        return Pair(decode, self._members.get(choice.prefill), reason, choice if is_own else None)

    def view_of(self, model: str, reached: frozenset[str]) -> ClusterView:
        """Return the workers of a model among those that a gateway reaches. reached: their ids."""
        reach = model, reached
        if reach not in self._views:
            decoders = self._decoders_for(reach)
            partners = {each.id: self._partners_of(each, reach) for each in decoders}
            prefills = {member.id: member for each in partners.values() for member in each}
            ids = {decode: frozenset(member.id for member in each) for decode, each in partners.items()}
            self._views[reach] = ClusterView(WorkerPool(decoders), WorkerPool(list(prefills.values())), ids)
        return self._views[reach]

    def _decoders_for(self, reach: _Reach) -> list[Member]:
        if self._version != self._members.version:
            self._version = self._members.version
            self.forget()
        if reach not in self._decoders:
            decoders = self._members.of_role(WorkerRole.DECODE)
            self._decoders[reach] = [member for member in decoders if _takes_work(member, reach)]
        return self._decoders[reach]

    def _paired(self, decoders: Sequence[Member], reach: _Reach) -> list[Member]:
        """The decode workers that have a partner."""
        partners = self.view_of(*reach).partners
        return [member for member in decoders if partners[member.id]]

    def _partners_of(self, decode: Member, reach: _Reach) -> list[Member]:
        return [
            member
            for member in self._members.of_role(WorkerRole.PREFILL)
            if _takes_work(member, reach)
            and member.id in decode.reached
            and decode.id in member.reached
            and member.worker.fingerprint == decode.worker.fingerprint
        ]


def _takes_work(member: Member, reach: _Reach) -> bool:
    model, reached = reach
    return member.id in reached and not member.is_draining and member.worker.serves(model)
