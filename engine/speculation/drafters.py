"""Speculative decoding: tokens that sequences may sample next, proposed without the model.

A step computes drafts beside the tokens it must compute and samples after each of them. A draft is accepted
if the sampler draws the same token, so drafts change how many tokens a step yields and never which.

- `LookupDrafter` finds the latest tokens earlier in the sequence, or in earlier answers to the same tenant,
  and proposes what followed.
- `Acceptance` estimates how likely the next draft of a sequence is right.
- `StepCosts` chooses how many drafts are worth their seconds.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from typing import Final, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np

from baton.config.engine import SchedulerConfig, SpeculativeConfig
from baton.engine.runner.step_inputs import StepArrays, padding_step, powers_of_two
from baton.engine.scheduler.sequence import Sequence, SequenceKey
from baton.engine.speculation.token_index import EarlierAnswers, Match, TokenIndex

# The tokens that a form forces after the tokens of a sequence so far.
ForcedTokens: TypeAlias = Callable[[Sequence], Ordered[int]]

WEIGHT: Final = 0.2  # of a new observation in an estimate
FIRST_ESTIMATE: Final = 0.5  # that a draft is accepted
FORCED_ESTIMATE: Final = 0.95  # the model may spell forced text by other tokens
NUM_TIMED: Final = 3
MAX_TIMED_TOKENS: Final = 256
MIN_GAIN: Final = 1.02  # a smaller one is within the error of the step times


class StepCosts:
    """The seconds of steps by their number of tokens: `plain` without drafts, `drafted` with some."""

    def __init__(self, plain_s: Mapping[int, float], drafted_s: Mapping[int, float]) -> None:
        """Both by number of tokens, ascending."""
        self._plain = np.array([*plain_s]), np.array([*plain_s.values()])
        self._drafted = np.array([*drafted_s]), np.array([*drafted_s.values()])

    def lengths(
        self,
        estimates: Ordered[float],
        lengths: Ordered[int],
        *,
        num_decodes: int,
        num_tokens: int,
        token_s: float = 0.0,
    ) -> list[int]:
        """How many drafts of each sequence yield the most tokens a second.

        estimates: that a draft is accepted, of each sequence. lengths: the most drafts of each.
        num_decodes, num_tokens: of the step without drafts.
        token_s: what it costs to propose one draft.
        """
        longest = max(lengths, default=0)
        if not longest:
            return [0] * len(lengths)
        places = np.arange(1, longest + 1)
        chances_BK = np.array(estimates)[:, None] ** places
        chances_BK[places > np.array(lengths)[:, None]] = 0.0
        chances = chances_BK.ravel()
        order = np.argsort(-chances, kind="stable")[: sum(lengths)]
        nums = np.arange(1, len(order) + 1)
        seconds = np.interp(num_tokens + nums, *self._drafted) + nums * token_s
        rates = (num_decodes + np.cumsum(chances[order])) / seconds
        best = int(np.argmax(rates))
        curve = self._plain if num_tokens == num_decodes else self._drafted
        plain_rate = num_decodes / float(np.interp(num_tokens, *curve))
        if rates[best] < MIN_GAIN * plain_rate:
            return [0] * len(lengths)
        chosen = np.bincount(order[: best + 1] // longest, minlength=len(lengths))
        return [int(each) for each in chosen]


def time_steps(time_step: Callable[[StepArrays], float], scheduler: SchedulerConfig) -> StepCosts:
    """Measure steps of padding, each the fastest of several."""
    plain_s, drafted_s = {}, {}
    for num_tokens in powers_of_two(min(scheduler.max_num_batched_tokens, MAX_TIMED_TOKENS)):
        drafted_s[num_tokens] = _fastest(time_step, padding_step(num_tokens, num_tokens))
        if num_tokens <= scheduler.max_num_seqs:
            decodes = padding_step(1, num_tokens, num_decodes=num_tokens - 1)
            plain_s[num_tokens] = _fastest(time_step, decodes)
    return StepCosts(plain_s, drafted_s)


def _fastest(time_step: Callable[[StepArrays], float], arrays: StepArrays) -> float:
    return min(time_step(arrays) for _ in range(NUM_TIMED))


@dataclass(slots=True)
class Acceptance:
    """How likely the next draft of one sequence is right, estimated from what was proposed and what came.

    Proposals count whether or not a step computed them: it costs nothing to see that they would have been
    right.
    """

    estimate: float = FIRST_ESTIMATE
    _proposal: Ordered[int] = ()
    _start: int = 0  # the place of the proposal in the sequence

    def observe(self, token_ids: list[int]) -> int:
        """Compare the last proposal with the tokens that came.

        Returns how many came if all of them were proposed, else -1.
        """
        came = token_ids[self._start :]
        for proposed, token_id in zip(self._proposal, came, strict=False):
            self.estimate += WEIGHT * ((proposed == token_id) - self.estimate)
            if proposed != token_id:
                return -1
        return len(came) if len(came) <= len(self._proposal) else -1

    def propose(self, token_ids: list[int], proposal: Ordered[int]) -> None:
        """Remember what is proposed after these tokens."""
        self._proposal, self._start = proposal, len(token_ids)


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
