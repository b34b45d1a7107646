"""Draft tokens by lookup: those that followed the latest tokens where these occurred before.

`LookupDrafter` looks in the sequence itself (n-gram, prompt lookup), or also in earlier answers to the same
tenant (suffix).
"""

from collections.abc import Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from typing import Final
from weakref import WeakKeyDictionary

from baton.config.engine import SpeculativeConfig
from baton.engine.scheduler.sequence import Batch, Sequence, SequenceKey
from baton.engine.speculation.draft_lengths import FORCED_RATE, Acceptance, ForcedTokens, StepCosts
from baton.engine.speculation.token_index import EarlierAnswers, Match, TokenIndex
from baton.request import FinishReason

MAX_INDEXED: Final = 2**16  # the last tokens of a prompt that are indexed; each takes about 100 bytes
INDEXED_A_STEP: Final = 4096  # tokens of prompts, for all sequences together


@dataclass(slots=True)
class _Lookup:
    """The index and the acceptance rate of one sequence."""

    index: TokenIndex
    first: int  # the token of the sequence that the index begins with
    acceptance: Acceptance = field(default_factory=Acceptance)
    followed: Match | None = None  # the place that the last proposal was copied from


def lookup_drafter(
    config: SpeculativeConfig, costs: StepCosts, forced_tokens: ForcedTokens
) -> "LookupDrafter":
    """The drafter of the methods ngram and suffix."""
    earlier = None
    if config.chosen_method == "suffix":
        earlier = EarlierAnswers(config.shortest_match, config.prompt_lookup_max)
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
        self._num_indexable = 0  # tokens that may still be indexed in this step

    def propose(self, decodes: Ordered[Sequence], num_tokens: int) -> Mapping[SequenceKey, Ordered[int]]:
        """As `Drafter.propose`."""
        self._num_indexable = INDEXED_A_STEP
        proposals, rates = [], []
        for sequence in decodes:
            proposal, rate = self._propose(sequence)
            proposals.append(proposal)
            rates.append(rate)
        nums = self._costs.choose_num_drafts(
            rates, [len(each) for each in proposals], num_decodes=len(decodes), num_tokens=num_tokens
        )
        return {
            sequence.key: proposal[:num]
            for sequence, proposal, num in zip(decodes, proposals, nums, strict=True)
            if num
        }

    def observe(self, batch: Batch, step_s: float) -> None:
        """As `Drafter.observe`."""
        if not batch.prompt_chunks:
            self._costs.observe(batch.num_tokens, step_s, has_drafts=bool(batch.drafts))

    def finish(self, sequence: Sequence) -> None:
        """Forget the sequence; learn its answer if it is whole."""
        self._lookups.pop(sequence, None)
        if self._earlier is not None and sequence.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._earlier.add(sequence)

    def _propose(self, sequence: Sequence) -> tuple[Ordered[int], float]:
        """Draft tokens of one sequence, and its acceptance rate."""
        most, token_ids = self._config.num_speculative_tokens, sequence.token_ids
        forced = self._forced_tokens(sequence)
        if forced:
            return forced[:most], FORCED_RATE
        lookup = self._lookups.get(sequence)
        if lookup is None:
            index = TokenIndex(self._config.shortest_match, self._config.prompt_lookup_max)
            first = max(0, len(token_ids) - MAX_INDEXED)
            lookup = self._lookups[sequence] = _Lookup(index, first)
        num_right = lookup.acceptance.observe(token_ids)
        if not self._index(lookup, token_ids):
            return (), 0.0
        followed = lookup.followed
        if followed is not None:
            followed = None if num_right is None else followed.moved(num_right)
        match = lookup.index.find_earlier(followed)
        if self._earlier is not None:
            match = self._earlier.find(sequence, match)
        lookup.followed = match
        # One more than a step may accept: the token after the last accepted one is compared, too.
        proposal = [] if match is None else match.copy(most + 1)
        lookup.acceptance.remember(token_ids, proposal)
        return proposal[:most], lookup.acceptance.rate

    def _index(self, lookup: _Lookup, token_ids: list[int]) -> bool:
        """Index the new tokens, those of a long prompt over several steps; return True once all are."""
        start = lookup.first + len(lookup.index)
        new = token_ids[start : start + max(self._num_indexable, self._config.num_speculative_tokens + 1)]
        lookup.index.extend(new)
        self._num_indexable -= len(new)
        return start + len(new) == len(token_ids)
