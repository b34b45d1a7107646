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
    """The seconds of steps by their number of tokens: plain ones without drafts, drafted ones with some."""

    def __init__(self, plain_s: Mapping[int, float], drafted_s: Mapping[int, float]) -> None:
        """Both by number of tokens, ascending. Steps of more tokens take in proportion to the last."""
        self._plain_s = _by_size(plain_s)  # the index is the number of tokens
        self._drafted_s = _by_size(drafted_s)

    def plain_s(self, num_tokens: int) -> float:
        """The seconds of a step of so many decodes."""
        return _seconds(self._plain_s, num_tokens, 1)[0]

    def drafted_s(self, num_tokens: int) -> float:
        """The seconds of a step of so many tokens, some of which are drafts."""
        return _seconds(self._drafted_s, num_tokens, 1)[0]

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
        none, longest = [0] * len(lengths), max(lengths, default=0)
        if not longest:
            return none
        plain_s = self.plain_s if num_tokens == num_decodes else self.drafted_s
        least_rate = MIN_GAIN * num_decodes / plain_s(num_tokens)
        # As a rule no draft pays, or many do: the first case is told by a bound.
        pairs = zip(estimates, lengths, strict=True)
        bound = sum(min(length, each / (1 - each)) if each < 1 else length for each, length in pairs)
        if num_decodes + bound < least_rate * (self.drafted_s(num_tokens + 1) + token_s):
            return none
        places = np.arange(1, longest + 1)
        chances_BK = np.array(estimates)[:, None] ** places
        chances_BK[places > np.array(lengths)[:, None]] = 0.0
        chances = chances_BK.ravel()
        order = np.argsort(-chances, kind="stable")[: sum(lengths)]
        nums = np.arange(1, len(order) + 1)
        seconds = np.array(_seconds(self._drafted_s, num_tokens + 1, len(order))) + nums * token_s
        rates = (num_decodes + np.cumsum(chances[order])) / seconds
        best = int(np.argmax(rates))
        if rates[best] < least_rate:
            return none
        chosen = np.bincount(order[: best + 1] // longest, minlength=len(lengths))
        return [int(each) for each in chosen]


def _by_size(measured_s: Mapping[int, float]) -> list[float]:
    """The seconds of every size up to the largest. A size never counts as slower than a larger one."""
    sizes, seconds = np.array([*measured_s]), np.array([*measured_s.values()])
    seconds = np.minimum.accumulate(seconds[::-1])[::-1]
    by_size: list[float] = np.interp(np.arange(sizes[-1] + 1), sizes, seconds).tolist()
    return by_size


def _seconds(by_size: list[float], first: int, num_sizes: int) -> list[float]:
    """The seconds of sizes [first, first + num_sizes)."""
    known = by_size[first : first + num_sizes]
    largest = len(by_size) - 1
    beyond = range(first + len(known), first + num_sizes)
    return known + [by_size[-1] * size / largest for size in beyond]


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
