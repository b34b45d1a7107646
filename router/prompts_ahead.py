"""How much of a worker's prompts would be computed before another one: workers serve tenants by turns.

Of a higher class all, of a lower one nothing; of the tenant's own all; of any other tenant's no more than its
share is by the time that the new prompt's tenant has had all of its own, less what that is owed already; of
those that are owed as much, no less.
"""

from collections.abc import Callable
from math import ceil
from typing import NamedTuple, TypeAlias


class Party(NamedTuple):
    """Whose a prompt is, and by what standing."""

    tenant: str = ""
    weight: float = 1.0
    rank: int = 0


LeadOf: TypeAlias = Callable[[Party], float | None]


class Claim(NamedTuple):
    """A prompt that comes, and what it may come before.

    lead: tokens, for its weight, that its tenant has had more than others of its class, or is to have of what
    waits anywhere; below 0, it is owed them. None: it has had as much, but for what waits at the same worker.
    lead_of: the same of others, who are charged already for what they have waiting there. None, or of one
    None: they have nothing but that.
    """

    party: Party
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
        self._tokens: dict[Party, int] = {}
        self._charged: dict[Party, float] = {}  # what their tenants were charged for them
        self._num: dict[Party, int] = {}
        self.total = 0  # tokens of prompts

    def add(self, party: Party, num_tokens: int, charged: float = 0.0) -> None:
        """charged: work that its tenant's lead has grown by, for it and its answer."""
        self._tokens[party] = self._tokens.get(party, 0) + num_tokens
        self._charged[party] = self._charged.get(party, 0.0) + charged
        self._num[party] = self._num.get(party, 0) + 1
        self.total += num_tokens

    def remove(self, party: Party, num_tokens: int, charged: float = 0.0) -> None:
        """What was added."""
        self._num[party] -= 1
        self._tokens[party] -= num_tokens
        self._charged[party] -= charged
        self.total -= num_tokens
        if not self._num[party]:
            del self._num[party], self._tokens[party], self._charged[party]

    def before(self, claim: Claim) -> Before:
        """Of what is here."""
        party, num_tokens, lead, lead_of = claim
        own, num = self._tokens.get(party, 0), self._num.get(party, 0)
        before = float(own)
        turn = (own if lead is None else lead * party.weight) + num_tokens
        turn /= party.weight
        for other, waiting in self._tokens.items():
            if other.rank < party.rank:
                before += waiting
                num += self._num[other]
            elif other.rank == party.rank and other != party:
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
        if self.total <= 0 or (len(self._tokens) == 1 and claim.party in self._tokens):
            return 1.0
        return self.before(claim).num_tokens / self.total
