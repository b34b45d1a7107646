"""Chooses the number of draft tokens of each sequence, from measured step times and acceptance rates."""

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

FORGETTING: Final = 0.01  # each plain step moves the drafted scale this far towards the plain one
WEIGHT: Final = 0.2  # of a new observation in an estimate
FIRST_RATE: Final = 0.5  # of acceptance
FORCED_RATE: Final = 0.95  # the model may spell forced text by other tokens
NUM_TIMED: Final = 5
MAX_TIMED_TOKENS: Final = 256
TIMING_S: Final = 2.0  # after which a slow model is timed no more
MIN_GAIN: Final = 1.03  # a smaller one is within the error of the step times
CLEAR_GAIN: Final = 1.3  # a smaller one is compared with a plain step now and then
DRAFTED_STEPS: Final = 32  # without a plain step, after which a gain that is not clear is compared


class StepCosts:
    """The seconds of steps by their number of tokens: plain steps have no draft tokens, drafted ones have."""

    def __init__(self, plain_s: Mapping[int, float], drafted_s: Mapping[int, float]) -> None:
        """Both by number of tokens, ascending. Steps of more tokens take in proportion to the last."""
        self._plain_s = _by_size(plain_s)  # the index is the number of tokens
        self._drafted_s = _by_size(drafted_s)
        # Real steps also build, sample and attend to contexts: multiples of the measured times.
        self._plain_scale = self._drafted_scale = 1.0
        self._num_drafted = 0  # steps since the last plain one

    def observe(self, num_tokens: int, step_s: float, *, has_drafts: bool) -> None:
        """Correct the measured times by a real step. Plain steps have decodes alone."""
        if has_drafts:
            scale = step_s / _seconds(self._drafted_s, num_tokens, 1)[0]
            self._drafted_scale += WEIGHT * (scale - self._drafted_scale)
            self._num_drafted += 1
            return
        self._num_drafted = 0
        scale = step_s / _seconds(self._plain_s, num_tokens, 1)[0]
        self._plain_scale += WEIGHT * (scale - self._plain_scale)
        # A step with draft tokens that other work delayed is forgotten in time.
        self._drafted_scale += FORGETTING * (self._plain_scale - self._drafted_scale)

    def plain_s(self, num_tokens: int) -> float:
        """The seconds of a step of so many decodes."""
        return self._plain_scale * _seconds(self._plain_s, num_tokens, 1)[0]

    def drafted_s(self, num_tokens: int) -> float:
        """The seconds of a step of so many tokens, draft tokens among them."""
        return self._drafted_scale * _seconds(self._drafted_s, num_tokens, 1)[0]

    def choose_num_drafts(
        self,
        rates: Ordered[float],
        most: Ordered[int],
        *,
        num_decodes: int,
        num_tokens: int,
        token_s: float = 0.0,
    ) -> list[int]:
        """Return the number of draft tokens of each sequence that yields the most tokens a second.

        rates, most: the acceptance rate and the most draft tokens of each sequence.
        num_decodes, num_tokens: of the step without draft tokens.
        token_s: the seconds that it takes to propose a draft token.
        """
        none, longest = [0] * len(most), max(most, default=0)
        if not longest:
            return none
        plain_s = self.plain_s if num_tokens == num_decodes else self.drafted_s
        plain_rate = num_decodes / plain_s(num_tokens)
        # An upper bound finds the common case in which no draft token pays.
        pairs = zip(rates, most, strict=True)
        bound = sum(min(limit, rate / (1 - rate)) if rate < 1 else limit for rate, limit in pairs)
        if num_decodes + bound < MIN_GAIN * plain_rate * (self.drafted_s(num_tokens + 1) + token_s):
            return none
        places = np.arange(1, longest + 1)
        chances_BK = np.array(rates)[:, None] ** places
        chances_BK[places > np.array(most)[:, None]] = 0.0
        chances = chances_BK.ravel()
        order = np.argsort(-chances, kind="stable")[: sum(most)]
        nums = np.arange(1, len(order) + 1)
        seconds = self._drafted_scale * np.array(_seconds(self._drafted_s, num_tokens + 1, len(order)))
        seconds += nums * token_s
        token_rates = (num_decodes + np.cumsum(chances[order])) / seconds
        best = int(np.argmax(token_rates))
        needs_gain = MIN_GAIN if self._num_drafted < DRAFTED_STEPS else CLEAR_GAIN
        if token_rates[best] < needs_gain * plain_rate:
            return none
        chosen = np.bincount(order[: best + 1] // longest, minlength=len(most))
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
    """Measure steps of padding, each the fastest of several rounds. The engine observes real steps later."""
    most = min(scheduler.max_num_batched_tokens, MAX_TIMED_TOKENS)
    drafted = {size: padding_step(size, size) for size in powers_of_two(most)}
    plain = {
        size: padding_step(0, size, num_decodes=size)
        for size in powers_of_two(min(most, scheduler.largest_batch))
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
    """The acceptance rate of one sequence: a running mean over proposed tokens.

    Proposed tokens count even if no step computed them.
    """

    rate: float = FIRST_RATE
    _proposal: Ordered[int] = ()
    _start: int = 0  # the place of the proposal in the sequence

    @property
    def is_open(self) -> bool:
        """True when a proposal has not been compared yet."""
        return bool(self._proposal)

    def observe(self, token_ids: list[int]) -> int | None:
        """Compare the new tokens with the last proposal, once.

        Return the number of new tokens if all of them were proposed, else None.
        """
        proposal, new = self._proposal, token_ids[self._start :]
        self.remember(token_ids, ())
        for proposed, token_id in zip(proposal, new, strict=False):
            self.rate += WEIGHT * ((proposed == token_id) - self.rate)
            if proposed != token_id:
                return None
        return len(new) if len(new) <= len(proposal) else None

    def remember(self, token_ids: list[int], proposal: Ordered[int]) -> None:
        """Keep the tokens that are proposed after these."""
        self._proposal, self._start = proposal, len(token_ids)
