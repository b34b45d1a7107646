"""Drafts by lookup: the tokens that followed the latest tokens where these occurred before.

`LookupDrafter` looks in the sequence itself (n-gram, prompt lookup), or also in earlier answers to the same
tenant (suffix).
"""

from collections.abc import Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from baton.config.engine import SpeculativeConfig
from baton.engine.scheduler.sequence import Sequence, SequenceKey
from baton.engine.speculation.draft_lengths import FORCED_ESTIMATE, Acceptance, ForcedTokens, StepCosts
from baton.engine.speculation.token_index import EarlierAnswers, Match, TokenIndex


@dataclass(slots=True)
class _Lookup:
    """What is kept of one sequence."""

    index: TokenIndex
    acceptance: Acceptance = field(default_factory=Acceptance)
    followed: Match | None = None  # the place that the last proposal was copied from


def lookup_drafter(
    config: SpeculativeConfig, costs: StepCosts, forced_tokens: ForcedTokens
) -> "LookupDrafter":
    """The drafter of the methods ngram and suffix."""
    earlier = None
    if config.chosen_method == "suffix":
        earlier = EarlierAnswers(config.prompt_lookup_min, config.prompt_lookup_max)
    return LookupDrafter(config, costs, forced_tokens, earlier=earlier)


class LookupDrafter:
    """Proposes what followed the latest tokens earlier in the sequence, or in earlier answers."""

    def __init__(
        self,
        config: SpeculativeConfig,
        costs: StepCosts,
        forced_tokens: ForcedTokens,
        *,
        earlier: EarlierAnswers | None = None,
    ) -> None:
        """earlier: None looks at the sequence alone."""
        self._config = config
        self._costs = costs
        self._forced_tokens = forced_tokens
        self._earlier = earlier
        self._lookups: WeakKeyDictionary[Sequence, _Lookup] = WeakKeyDictionary()

    def propose(self, decodes: Ordered[Sequence], num_tokens: int) -> Mapping[SequenceKey, Ordered[int]]:
        """As `Drafter.propose`."""
        proposals, estimates = [], []
        for sequence in decodes:
            proposal, estimate = self._propose(sequence)
            proposals.append(proposal)
            estimates.append(estimate)
        lengths = self._costs.lengths(
            estimates, [len(each) for each in proposals], num_decodes=len(decodes), num_tokens=num_tokens
        )
        return {
            sequence.key: proposal[:length]
            for sequence, proposal, length in zip(decodes, proposals, lengths, strict=True)
            if length
        }

    def finish(self, sequence: Sequence) -> None:
        """Learn a whole answer."""
        if self._earlier is not None:
            self._earlier.add(sequence)

    def _propose(self, sequence: Sequence) -> tuple[Ordered[int], float]:
        """Drafts of one sequence, and the estimate that the first is accepted."""
        config, token_ids = self._config, sequence.token_ids
        forced = self._forced_tokens(sequence)
        if forced:
            return forced[: config.num_speculative_tokens], FORCED_ESTIMATE
        lookup = self._lookups.get(sequence)
        if lookup is None:
            index = TokenIndex(config.prompt_lookup_min, config.prompt_lookup_max)
            lookup = self._lookups[sequence] = _Lookup(index)
        index, acceptance, followed = lookup.index, lookup.acceptance, lookup.followed
        num_right = acceptance.observe(token_ids)
        index.extend(token_ids[len(index) :])
        if followed is not None:
            followed = followed.moved(num_right) if num_right >= 0 else None
        match = index.find_earlier(followed)
        if self._earlier is not None:
            match = self._earlier.find(sequence, match)
        lookup.followed = match
        proposal = match.copy(config.num_speculative_tokens) if match is not None else []
        acceptance.propose(token_ids, proposal)
        return proposal, acceptance.estimate
