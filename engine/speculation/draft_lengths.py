"""How many drafts are worth their seconds: from measured step times and from how many drafts were right."""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from time import perf_counter
from typing import Final, TypeAlias

import numpy as np

from baton.config.engine import SchedulerConfig
from baton.engine.runner.step_inputs import StepArrays, padding_step, powers_of_two
from baton.engine.scheduler.sequence import Sequence

# The tokens that a form forces after the tokens of a sequence so far.
ForcedTokens: TypeAlias = Callable[[Sequence], Ordered[int]]

WEIGHT: Final = 0.2  # of a new observation in an estimate
FIRST_ESTIMATE: Final = 0.5  # that a draft is accepted
FORCED_ESTIMATE: Final = 0.95  # the model may spell forced text by other tokens
NUM_TIMED: Final = 5
MAX_TIMED_TOKENS: Final = 256
TIMING_S: Final = 2.0  # after which a slow model is timed no more
MIN_GAIN: Final = 1.03  # a smaller one is within the error of the step times


class StepCosts:
    """The seconds of steps by their number of tokens: `plain` without drafts, `drafted` with some."""

    def __init__(self, plain_s: Mapping[int, float], drafted_s: Mapping[int, float]) -> None:
        """Both by number of tokens, ascending. More tokens never count as faster."""
        self._plain = np.array([*plain_s]), np.maximum.accumulate([*plain_s.values()])
        self._drafted = np.array([*drafted_s]), np.maximum.accumulate([*drafted_s.values()])

    def plain_s(self, num_tokens: int) -> float:
        """The seconds of a step of so many decodes."""
        return float(np.interp(num_tokens, *self._plain))

    def drafted_s(self, num_tokens: int) -> float:
        """The seconds of a step of so many tokens, some of which are drafts."""
        return float(np.interp(num_tokens, *self._drafted))

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
        plain_s = self.plain_s if num_tokens == num_decodes else self.drafted_s
        if rates[best] < MIN_GAIN * num_decodes / plain_s(num_tokens):
            return [0] * len(lengths)
        chosen = np.bincount(order[: best + 1] // longest, minlength=len(lengths))
        return [int(each) for each in chosen]


def time_steps(time_step: Callable[[StepArrays], float], scheduler: SchedulerConfig) -> StepCosts:
    """Measure steps of padding, each the fastest of several rounds."""
    sizes = powers_of_two(min(scheduler.max_num_batched_tokens, MAX_TIMED_TOKENS))
    drafted = {size: padding_step(size, size) for size in sizes}
    plain = {
        size: padding_step(1, size, num_decodes=size - 1) for size in sizes if size <= scheduler.max_num_seqs
    }
    for arrays in (plain[1], drafted[1]):
        time_step(arrays)  # the first steps touch memory that later ones find in place
    rounds: list[tuple[list[float], list[float]]] = []
    started_s = perf_counter()
    while len(rounds) < NUM_TIMED and (not rounds or perf_counter() - started_s < TIMING_S):
        rounds.append((list(map(time_step, plain.values())), list(map(time_step, drafted.values()))))
    plain_s, drafted_s = (np.array(each).min(axis=0).tolist() for each in zip(*rounds, strict=True))
    return StepCosts(dict(zip(plain, plain_s, strict=True)), dict(zip(drafted, drafted_s, strict=True)))


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
