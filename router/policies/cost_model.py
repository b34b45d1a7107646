"""How long work takes at each worker, learnt from what work has taken.

Times are linear in a few known quantities, with coefficients of at least nothing: a `Fit`. Each worker has
its own, which begins as what is known of all workers, and that as a plain guess (the PRIORs). Coefficients
are in seconds: a byte's, a token's.

Steps are fitted over all workers that are alike, and each worker has a pace (`StepFit`). The steps of one
worker alone are too uniform to tell what a sequence takes: fits of equal workers differed tenfold by chance,
and the worker whose sequences seemed to be free was given every request until it had measured better.
"""

from collections import OrderedDict
from collections.abc import Callable
from math import exp
from typing import Final

import msgspec
import numpy as np

from baton.messages.control import Measured
from baton.messages.workers import PrefillTimes, StepTimes

MAX_PAIRS: Final = 4096
_FADE: Final = 0.999  # of the size of a token that was seen once and not again
_NOISE: Final = 0.1  # of a measurement, as a share of it
_LEAST_NOISE_S: Final = 2e-4
_SURPRISE: Final = 3.0  # times the noise
_BELIEVED: Final = 4  # surprises in a row
_FORGET: Final = 0.99  # of what was learnt, at each measurement
_FORGET_SURPRISED: Final = 0.5
_MOST_PENDING: Final = 16
_LEAST_PULL: Final = 1e-9  # of the prior, as a share of all that was learnt: no matrix of these is singular
_DOUBT: Final = 1e4  # of a prior: its standard deviation as a multiple of it; it is to be found, not kept

# seconds; a new token; a pair of a new token and one that it attends to
PREFILL_PRIOR: Final = (5e-3, 1e-4, 2e-9)
# seconds; a sequence; a token that is attended to; a new token of a prompt
STEP_PRIOR: Final = (8e-3, 5e-5, 5e-8, 1e-4)
LEAST_SEQUENCE: Final = 0.002  # what a sequence adds to a step, as a share of its fixed part
_PACE_GAIN: Final = 1 / 64  # of a step, in its worker's pace
_MOST_PACE: Final = 64.0  # times as slow as other workers, or as fast
# seconds; a byte
PULL_PRIOR: Final = (5e-3, 1e-9)
HANDOFF_PRIOR: Final = (2e-3, 2e-11)
BYTES_A_TOKEN_PRIOR: Final = 2**17


class Fit:
    """`coefficients`: seconds for one of each quantity; the least squares of relative errors, none below 0.

    What took much longer than it should weighs little, as errors are relative; where it goes on, what was
    learnt before is forgotten. A measurement is added up in a few microseconds; the coefficients, which take
    ten times as long, follow after the 1st, 3rd, 7th, 15th and then each 16th, after what changes much, and
    when `settle` is called.
    """

    __slots__ = (
        *("_expected", "_num_pending", "_num_surprises", "_scales", "_squares", "_sums"),
        *("coefficients", "num_measured"),
    )

    def __init__(self, prior: tuple[float, ...], scales: tuple[float, ...] | None = None) -> None:
        """scales: what is a usual value of each coefficient, where the prior may be much less."""
        self.coefficients = prior
        self.num_measured = 0
        self._num_pending = 0  # measurements that the coefficients do not know of
        self._num_surprises = 0  # in a row; below 0: it took less than was expected
        self._scales = [max(pair) for pair in zip(prior, scales or prior, strict=True)]  # of what follows
        self._expected = [each / scale for each, scale in zip(prior, self._scales, strict=True)]
        self._squares = [[0.0 for _ in prior] for _ in prior]  # of quantities, weighted and fading
        self._sums = [0.0 for _ in prior]  # of quantities times seconds

    def predict(self, *quantities: float) -> float:
        predicted_s = 0.0
        for each, of in zip(self.coefficients, quantities, strict=True):
            predicted_s += each * of
        return predicted_s

    def learn(self, taken_s: float, *quantities: float) -> None:
        self.num_measured += 1
        predicted_s = self.predict(*quantities)
        noise_s = _NOISE * max(predicted_s, taken_s) + _LEAST_NOISE_S
        forget = self._forget(taken_s - predicted_s, noise_s)
        inputs = [of * scale for of, scale in zip(quantities, self._scales, strict=True)]
        weight = 1 / noise_s**2
        for row, sums_to in enumerate(inputs):
            self._sums[row] = self._sums[row] * forget + weight * sums_to * taken_s
            squares = self._squares[row]
            for column, other in enumerate(inputs):
                squares[column] = squares[column] * forget + weight * sums_to * other
        self._num_pending += 1
        if forget == _FORGET_SURPRISED or self._num_pending >= min(_MOST_PENDING, 1 + self.num_measured // 2):
            self.settle()

    def settle(self) -> None:
        """Take everything into account that was learnt."""
        if self._num_pending:
            self._num_pending = 0
            self._solve()

    def heir(self) -> "Fit":
        """A new one, which expects what this one has found."""
        return Fit(self.coefficients, tuple(self._scales))

    def _forget(self, surprise_s: float, noise_s: float) -> float:
        if abs(surprise_s) < _SURPRISE * noise_s:
            self._num_surprises = 0
            return _FORGET
        direction = 1 if surprise_s > 0 else -1
        self._num_surprises = max(0, self._num_surprises * direction) * direction + direction
        return _FORGET if abs(self._num_surprises) < _BELIEVED else _FORGET_SURPRISED

    def _solve(self) -> None:
        """What would be below 0 is left out, the worst first.

        Of what fits alike, as where all prompts are of one length, it is what is nearest to the prior.
        """
        squares, sums = np.array(self._squares), np.array(self._sums)
        pull = 1 / _DOUBT**2 + _LEAST_PULL * squares.diagonal()
        squares, sums = squares + np.diag(pull), sums + pull * self._expected
        kept = list(range(len(sums)))
        state = np.zeros(len(kept))
        while kept:
            found = np.linalg.solve(squares[np.ix_(kept, kept)], sums[kept])
            if found.min() >= 0:
                state[kept] = found
                break
            del kept[int(found.argmin())]
        self.coefficients = tuple((state * self._scales).tolist())


class Transfer(msgspec.Struct, frozen=True):
    """Between two workers."""

    pull: Fit
    handoff: Fit


class StepFit:
    """How long one worker's steps take: those of workers like it, times its pace."""

    __slots__ = ("_alike", "num_measured", "pace")

    def __init__(self, alike: Fit) -> None:
        self.num_measured = 0
        self.pace = 1.0
        self._alike = alike

    @property
    def coefficients(self) -> tuple[float, float, float, float]:
        """Seconds: fixed, of a sequence, of a token attended to, of a prompt's new token.

        A sequence is never free: the more a worker has, the less it is the one to be given another.
        """
        fixed_s, sequence_s, context_s, token_s = self._alike.coefficients
        pace, least_s = self.pace, fixed_s * LEAST_SEQUENCE
        if sequence_s < least_s:
            sequence_s = least_s
        return pace * fixed_s, pace * sequence_s, pace * context_s, pace * token_s

    def predict(self, *quantities: float) -> float:
        return sum(each * of for each, of in zip(self.coefficients, quantities, strict=True))

    def learn(self, taken_s: float, *quantities: float) -> None:
        self.num_measured += 1
        self._alike.learn(taken_s / self.pace, *quantities)
        predicted_s = max(_LEAST_NOISE_S, self._alike.predict(*quantities))
        pace = max(_LEAST_NOISE_S, taken_s) / predicted_s
        self.pace *= (pace / self.pace) ** _PACE_GAIN
        self.pace = min(_MOST_PACE, max(1 / _MOST_PACE, self.pace))

    def settle(self) -> None:
        self._alike.settle()

    def heir(self) -> Fit:
        """For workers of another kind: it expects what these have found."""
        return self._alike.heir()


class Speeds:
    """One worker's."""

    __slots__ = ("mean_compute_s", "prefill", "step")

    def __init__(self, prefill: Fit, step: StepFit) -> None:
        self.prefill = prefill
        self.step = step
        self.mean_compute_s = 0.0  # of a prompt

    def compute_s(self, num_new_tokens: int, num_tokens: int) -> float:
        fixed_s, token_s, pair_s = self.prefill.coefficients
        num_pairs = num_new_tokens * (num_tokens - 0.5 * num_new_tokens)
        return fixed_s + token_s * num_new_tokens + pair_s * num_pairs

    def learn_prefill(self, times: PrefillTimes) -> None:
        taken_s = max(0.0, times.own_s or times.computed_s)
        num_pairs = times.num_new_tokens * max(0.0, times.num_tokens - 0.5 * times.num_new_tokens)
        self.prefill.learn(taken_s, 1.0, times.num_new_tokens, num_pairs)
        self.mean_compute_s += (taken_s - self.mean_compute_s) * max(0.05, 1 / self.prefill.num_measured)

    def learn_step(self, times: StepTimes) -> None:
        quantities = (times.num_sequences, times.num_context_tokens, times.num_new_tokens)
        self.step.learn(times.step_s, 1.0, *quantities)


class CostModel:
    """Of all workers. What one says changes its own numbers, and a little what newcomers begin with."""

    def __init__(self) -> None:
        self.bytes_a_token = float(BYTES_A_TOKEN_PRIOR)
        self._has_size = False  # been told one
        self._all = Speeds(Fit(PREFILL_PRIOR), StepFit(Fit(STEP_PRIOR)))
        self._steps: dict[str, Fit] = {}  # by what workers that are alike have in common
        self._alike: dict[str, str] = {}  # worker -> the same; "" for who has not joined
        self._between_all = Transfer(Fit(PULL_PRIOR), Fit(HANDOFF_PRIOR))
        self._workers: dict[str, Speeds] = {}  # that have measured something, until they are forgotten
        self._newcomers: dict[str, Speeds] = {}  # by what is alike; made when somebody asks
        self._pairs: OrderedDict[tuple[str, str], Transfer] = OrderedDict()  # least lately measured first

    def of(self, worker_id: str) -> Speeds:
        """To read, not to teach. Who has said nothing yet is as newcomers begin; nothing is kept of it."""
        speeds = self._workers.get(worker_id)
        if speeds is None:
            alike = self._alike.get(worker_id, "")
            speeds = self._newcomers.get(alike)
            if speeds is None:
                speeds = self._newcomers[alike] = self._heir(alike)
        return speeds

    def join(self, worker_id: str, alike: str) -> None:
        """Workers with the same `alike` have steps that differ by their pace alone."""
        self._alike[worker_id] = alike

    def forget(self, worker_id: str) -> None:
        self._workers.pop(worker_id, None)
        alike = self._alike.pop(worker_id, "")
        if alike and alike not in self._alike.values():
            self._steps.pop(alike, None)
            self._newcomers.pop(alike, None)

    def pull_s(self, source: str, worker: str, num_tokens: int) -> float:
        return self.pulls_from(source)(worker, num_tokens)

    def pulls_from(self, source: str) -> Callable[[str, int], float]:
        """From a worker and how many tokens it would pull from there to seconds: for one who asks of many."""
        pairs, between_all, bytes_a_token = self._pairs, self._between_all, self.bytes_a_token

        def pull_s(worker: str, num_tokens: int) -> float:
            fixed_s, byte_s = pairs.get((source, worker), between_all).pull.coefficients
            return fixed_s + byte_s * num_tokens * bytes_a_token

        return pull_s

    def handoff_s(self, prefill: str, decode: str, num_tokens: int) -> float:
        """After the first token, until decoding can go on."""
        pair = self._pairs.get((prefill, decode), self._between_all)
        fixed_s, byte_s = pair.handoff.coefficients
        return fixed_s + byte_s * num_tokens * self.bytes_a_token

    def learn(self, worker_id: str, measured: Measured) -> None:
        speeds = self._own(worker_id)
        self._newcomers.clear()
        for prefill in measured.prefills:
            if prefill.num_new_tokens:
                speeds.learn_prefill(prefill)
                self._all.learn_prefill(prefill)
        for step in measured.steps:
            speeds.learn_step(step)
            self._all.learn_step(step)
        speeds.prefill.settle()
        speeds.step.settle()

    def learn_pull(self, source: str, worker: str, times: PrefillTimes) -> None:
        own = self._pair(source, worker)
        for pair in (own, self._between_all):
            pair.pull.learn(times.pulled_s, 1.0, times.pulled_bytes)
        own.pull.settle()

    def learn_handoff(self, prefill: str, decode: str, times: PrefillTimes) -> None:
        own = self._pair(prefill, decode)
        for pair in (own, self._between_all):
            pair.handoff.learn(times.exposed_s, 1.0, times.moved_bytes)
        own.handoff.settle()

    def learn_size(self, num_bytes: int, num_tokens: int) -> None:
        """That so many tokens' pages had so many bytes, or more: some may have been there already."""
        if num_bytes > 0 and num_tokens > 0:
            least = num_bytes / num_tokens
            self.bytes_a_token = least if not self._has_size else max(least, self.bytes_a_token * _FADE)
            self._has_size = True

    def _own(self, worker_id: str) -> Speeds:
        if worker_id not in self._workers:
            self._workers[worker_id] = self._heir(self._alike.get(worker_id, ""))
        return self._workers[worker_id]

    def _heir(self, alike: str) -> Speeds:
        if alike not in self._steps:
            self._steps[alike] = self._all.step.heir()
        speeds = Speeds(self._all.prefill.heir(), StepFit(self._steps[alike]))
        speeds.mean_compute_s = self._all.mean_compute_s
        return speeds

    def _pair(self, one: str, other: str) -> Transfer:
        key = (one, other)
        if key not in self._pairs:
            self._pairs[key] = Transfer(self._between_all.pull.heir(), self._between_all.handoff.heir())
        self._pairs.move_to_end(key)
        if len(self._pairs) > MAX_PAIRS:
            self._pairs.popitem(last=False)
        return self._pairs[key]


class DecayedSum:
    """A sum in which what was added long ago counts little."""

    def __init__(self, memory_s: float, now_s: float) -> None:
        """What was added memory_s ago counts e times less; a steady flow of 1 a second comes to memory_s."""
        self._memory_s = memory_s
        self._sum = 0.0
        self._at_s = now_s

    def add(self, amount: float, now_s: float) -> None:
        self._sum = self.at(now_s) + amount
        self._at_s = now_s

    def at(self, now_s: float) -> float:
        return self._sum * exp((self._at_s - now_s) / self._memory_s)
