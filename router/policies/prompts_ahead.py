"""How much of a worker's prompts would be computed before another one: workers serve tenants by turns.

Of a higher class all, of a lower one nothing; of the tenant's own all; of any other tenant's no more than its
share is by the time that the new prompt's tenant has had all of its own, less what that is owed already; of
those that are owed as much, no less.
"""

from collections.abc import Callable
from math import ceil
from typing import NamedTuple, TypeAlias


class SchedulingClass(NamedTuple):
    """Whose a prompt is, and by what standing."""

    tenant: str = ""
    weight: float = 1.0
    rank: int = 0


LeadOf: TypeAlias = Callable[[SchedulingClass], float | None]


class Claim(NamedTuple):
    """A prompt that comes, and what it may come before.

    lead: tokens, for its weight, that its tenant has had more than others of its class, or is to have of what
    waits anywhere; below 0, it is owed them. None: it has had as much, but for what waits at the same worker.
    lead_of: the same of others, who are charged already for what they have waiting there. None, or of one
    None: they have nothing but that.
    """

    scheduling_class: SchedulingClass
    num_tokens: int
    lead: float | None = None
    lead_of: LeadOf | None = None


class Before(NamedTuple):
    """What is computed before a prompt."""

    num: int  # prompts, of which a part is at least
    num_tokens: float


class PromptsAhead:
    """Of one worker: prompt tokens that wait for a first token."""

    __slots__ = ("_charged", "_num", "_tokens", "total")

    def __init__(self) -> None:
        self._tokens: dict[SchedulingClass, int] = {}
        self._charged: dict[SchedulingClass, float] = {}  # what their tenants were charged for them
        self._num: dict[SchedulingClass, int] = {}
        self.total = 0  # tokens of prompts

    def add(self, scheduling_class: SchedulingClass, num_tokens: int, charged: float = 0.0) -> None:
        """charged: work that its tenant's lead has grown by, for it and its answer."""
        self._tokens[scheduling_class] = self._tokens.get(scheduling_class, 0) + num_tokens
        self._charged[scheduling_class] = self._charged.get(scheduling_class, 0.0) + charged
        self._num[scheduling_class] = self._num.get(scheduling_class, 0) + 1
        self.total += num_tokens

    def remove(self, scheduling_class: SchedulingClass, num_tokens: int, charged: float = 0.0) -> None:
        """What was added."""
        self._num[scheduling_class] -= 1
        self._tokens[scheduling_class] -= num_tokens
        self._charged[scheduling_class] -= charged
        self.total -= num_tokens
        if not self._num[scheduling_class]:
            del self._num[scheduling_class], self._tokens[scheduling_class], self._charged[scheduling_class]

    def before(self, claim: Claim) -> Before:
        """Of what is here."""
        scheduling_class, num_tokens, lead, lead_of = claim
        own, num = self._tokens.get(scheduling_class, 0), self._num.get(scheduling_class, 0)
        before = float(own)
        turn = (own if lead is None else lead * scheduling_class.weight) + num_tokens
        turn /= scheduling_class.weight
        for other, waiting in self._tokens.items():
            if other.rank < scheduling_class.rank:
                before += waiting
                num += self._num[other]
            elif other.rank == scheduling_class.rank and other != scheduling_class:
                due = turn * other.weight
                others_lead = lead_of(other) if lead_of is not None else None
                if others_lead is not None:
                    due += self._charged[other] - others_lead * other.weight
                if due >= waiting:
                    before += waiting
                    num += self._num[other]
                elif due > 0.0:
                    before += due
                    num += ceil(self._num[other] * due / waiting)
        return Before(num, before)

    def part_before(self, claim: Claim) -> float:
        """Of all tokens that are here, the part that comes before it: 0 to 1."""
        if self.total <= 0 or (len(self._tokens) == 1 and claim.scheduling_class in self._tokens):
            return 1.0
        return self.before(claim).num_tokens / self.total
