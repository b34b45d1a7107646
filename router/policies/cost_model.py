"""The cost model: seconds of work at each worker, learnt from measurements.

A `Fit` is linear in a few known quantities, with coefficients of at least 0, in seconds per byte, token and
so on. Each worker has fits of its own, which start from the fits of all workers; those start from the PRIORs.

Steps are fitted over all workers of one kind, and each worker has a pace (`StepFit`). The steps of one worker
are too uniform to tell what a sequence takes: fits of equal workers differed tenfold by chance, and the
worker with sequences that seemed to be free received every request until it had measured better.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Final

import msgspec
import numpy as np

from baton.messages.control import Measured
from baton.messages.workers import PrefillTimes, StepTimes, Tier

MAX_PAIRS: Final = 4096
_FADE: Final = 0.999  # at each measurement, of a token's size that is not measured again
_NOISE: Final = 0.1  # share of a measurement
_LEAST_NOISE_S: Final = 2e-4
_SURPRISE: Final = 3.0  # multiple of the noise
_BELIEVED: Final = 4  # surprises in a row
_FORGET: Final = 0.99  # share of earlier measurements that is kept, at each measurement
_FORGET_SURPRISED: Final = 0.5
_MOST_PENDING: Final = 16
_LEAST_PULL: Final = 1e-9  # weight of the prior as a share of all measurements: keeps matrices regular
_DOUBT: Final = 1e4  # standard deviation of a prior, as a multiple of the prior

# seconds: fixed; a new token; a pair of a new token and a token it attends to
PREFILL_PRIOR: Final = (5e-3, 1e-4, 2e-9)
# seconds: fixed; a sequence; a token that is attended to; a new token of a prompt
STEP_PRIOR: Final = (8e-3, 5e-5, 5e-8, 1e-4)
LEAST_SEQUENCE: Final = 0.002  # time that a sequence adds to a step, as a share of the fixed part
_PACE_GAIN: Final = 1 / 64  # weight of one step in its worker's pace
_MOST_PACE: Final = 64.0  # a worker is at most this many times as slow, or as fast, as its kind
# seconds: fixed; a byte
PULL_PRIOR: Final = (5e-3, 1e-9)
HANDOFF_PRIOR: Final = (2e-3, 2e-11)
BYTES_A_TOKEN_PRIOR: Final = 2**17


def solve_nonnegative(squares: np.ndarray, sums: np.ndarray) -> np.ndarray:
    """Return the solution of the normal equations, with coefficients of at least 0.

    squares: [n, n], not singular. sums: [n]. Negative coefficients are left out, the most negative first.
    """
    kept = list(range(len(sums)))
    solution = np.zeros(len(kept))
    while kept:
        found = np.linalg.solve(squares[np.ix_(kept, kept)], sums[kept])
        if found.min() >= 0:
            solution[kept] = found
            break
        del kept[int(found.argmin())]
    return solution


class Fit:
    """Least squares of relative errors. `coefficients`: seconds for one of each quantity, at least 0.

    A measurement that takes much longer than predicted has little weight, because errors are relative.
    Several in a row make the fit forget earlier measurements. A measurement is added in a few microseconds;
    the coefficients take ten times as long. They follow after the 1st, 3rd, 7th, 15th and then each 16th
    measurement, after surprises, and when `settle` is called.
    """

    __slots__ = (
        *("_expected", "_num_pending", "_num_surprises", "_scales", "_squares", "_sums"),
        *("coefficients", "num_measured"),
    )

    def __init__(self, prior: tuple[float, ...], scales: tuple[float, ...] | None = None) -> None:
        """scales: a usual value of each coefficient, where the prior may be much less."""
        self.coefficients = prior
        self.num_measured = 0
        self._num_pending = 0  # measurements that are not in the coefficients yet
        self._num_surprises = 0  # in a row; negative: shorter than predicted
        self._scales = [max(pair) for pair in zip(prior, scales or prior, strict=True)]
        self._expected = [each / scale for each, scale in zip(prior, self._scales, strict=True)]
        self._squares = [[0.0 for _ in prior] for _ in prior]  # of quantities, weighted and decayed
        self._sums = [0.0 for _ in prior]  # of quantities times seconds

    def predict(self, *quantities: float) -> float:
        """Seconds for these quantities."""
        predicted_s = 0.0
        for each, of in zip(self.coefficients, quantities, strict=True):
            predicted_s += each * of
        return predicted_s

    def learn(self, taken_s: float, *quantities: float) -> None:
        """Add a measurement."""
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
        """Update the coefficients with all measurements."""
        if self._num_pending:
            self._num_pending = 0
            self._solve()

    def successor(self) -> "Fit":
        """A new fit that starts from these coefficients."""
        return Fit(self.coefficients, tuple(self._scales))

    def _forget(self, surprise_s: float, noise_s: float) -> float:
        if abs(surprise_s) < _SURPRISE * noise_s:
            self._num_surprises = 0
            return _FORGET
        direction = 1 if surprise_s > 0 else -1
        self._num_surprises = max(0, self._num_surprises * direction) * direction + direction
        return _FORGET if abs(self._num_surprises) < _BELIEVED else _FORGET_SURPRISED

    def _solve(self) -> None:
        """Update the coefficients; among those that fit alike, as when all prompts have one length, take the
        nearest to the prior.
        """
        squares, sums = np.array(self._squares), np.array(self._sums)
        pull = 1 / _DOUBT**2 + _LEAST_PULL * squares.diagonal()
        squares, sums = squares + np.diag(pull), sums + pull * self._expected
        state = solve_nonnegative(squares, sums)
        self.coefficients = tuple((state * self._scales).tolist())


class PairSpeeds(msgspec.Struct, frozen=True):
    """Times of page transfers between two workers."""

    pull: Fit
    handoff: Fit


class StepFit:
    """The time of one worker's steps: that of all workers of its kind, times its pace."""

    __slots__ = ("_coefficients", "_kind_coefficients", "_kind_fit", "num_measured", "pace")

    def __init__(self, kind_fit: Fit) -> None:
        self.num_measured = 0
        self.pace = 1.0
        self._kind_fit = kind_fit
        self._kind_coefficients: tuple[float, ...] | None = None  # those that `_coefficients` were made of
        self._coefficients = (0.0, 0.0, 0.0, 0.0)

    @property
    def coefficients(self) -> tuple[float, float, float, float]:
        """Seconds: fixed, of a sequence, of a token attended to, of a prompt's new token.

        A sequence is never free, so a worker with more sequences is never as cheap as one with fewer.
        """
        if self._kind_coefficients is not self._kind_fit.coefficients:
            self._kind_coefficients = self._kind_fit.coefficients
            fixed_s, sequence_s, context_s, token_s = self._kind_coefficients
            sequence_s, pace = max(sequence_s, fixed_s * LEAST_SEQUENCE), self.pace
            self._coefficients = (pace * fixed_s, pace * sequence_s, pace * context_s, pace * token_s)
        return self._coefficients

    def predict(self, *quantities: float) -> float:
        """Seconds of a step with these quantities."""
        return sum(each * of for each, of in zip(self.coefficients, quantities, strict=True))

    def learn(self, taken_s: float, *quantities: float) -> None:
        """Add a measured step."""
        self.num_measured += 1
        self._kind_fit.learn(taken_s / self.pace, *quantities)
        predicted_s = max(_LEAST_NOISE_S, self._kind_fit.predict(*quantities))
        pace = max(_LEAST_NOISE_S, taken_s) / predicted_s
        self.pace *= (pace / self.pace) ** _PACE_GAIN
        self.pace = min(_MOST_PACE, max(1 / _MOST_PACE, self.pace))
        self._kind_coefficients = None

    def settle(self) -> None:
        """See `Fit.settle`."""
        self._kind_fit.settle()

    def successor(self) -> Fit:
        """A new fit for workers of another kind, which starts from these coefficients."""
        return self._kind_fit.successor()


class Speeds:
    """The speed of one worker: of prefills and of steps."""

    __slots__ = ("mean_compute_s", "prefill", "step")

    def __init__(self, prefill: Fit, step: StepFit) -> None:
        self.prefill = prefill
        self.step = step
        self.mean_compute_s = 0.0  # of prompts

    def compute_s(self, num_new_tokens: int, num_tokens: int) -> float:
        """Seconds to compute the last `num_new_tokens` of a prompt of `num_tokens`."""
        fixed_s, token_s, pair_s = self.prefill.coefficients
        num_pairs = num_new_tokens * (num_tokens - 0.5 * num_new_tokens)
        return fixed_s + token_s * num_new_tokens + pair_s * num_pairs

    def learn_prefill(self, times: PrefillTimes) -> None:
        """Add a measured prefill."""
        taken_s = max(0.0, times.used_s)
        num_pairs = times.num_new_tokens * max(0.0, times.num_tokens - 0.5 * times.num_new_tokens)
        self.prefill.learn(taken_s, 1.0, times.num_new_tokens, num_pairs)
        self.mean_compute_s += (taken_s - self.mean_compute_s) * max(0.05, 1 / self.prefill.num_measured)

    def learn_step(self, times: StepTimes) -> None:
        """Add a measured step."""
        quantities = (times.num_sequences, times.num_context_tokens, times.num_new_tokens)
        self.step.learn(times.step_s, 1.0, *quantities)


class CostModel:
    """The speeds of all workers. A worker's measurements change its own speeds, and what new workers start
    with.
    """

    def __init__(self) -> None:
        self.bytes_a_token = float(BYTES_A_TOKEN_PRIOR)
        self._has_size = False  # `bytes_a_token` was measured
        self._all = Speeds(Fit(PREFILL_PRIOR), StepFit(Fit(STEP_PRIOR)))
        self._steps: dict[str, Fit] = {}  # kind of worker -> fit of its steps
        self._kinds: dict[str, str] = {}  # worker -> its kind; "" before it joins
        self._between_all = PairSpeeds(Fit(PULL_PRIOR), Fit(HANDOFF_PRIOR))
        # worker -> seconds to bring a token to its device from host memory, and from a disk
        self.tier_token_s: dict[str, tuple[float, float]] = {}
        self._workers: dict[str, Speeds] = {}  # workers with measurements
        self._untrained: dict[str, Speeds] = {}  # kind -> the start of its workers; made on demand
        self._pairs: OrderedDict[tuple[str, str], PairSpeeds] = OrderedDict()  # least recently measured first

    def of(self, worker_id: str) -> Speeds:
        """The speeds of a worker, read-only; those that new workers start with until it has measured."""
        speeds = self._workers.get(worker_id)
        if speeds is None:
            kind = self._kinds.get(worker_id, "")
            speeds = self._untrained.get(kind)
            if speeds is None:
                speeds = self._untrained[kind] = self._speeds_of_new(kind)
        return speeds

    def join(self, worker_id: str, kind: str) -> None:
        """A worker has joined. The steps of workers of one kind differ only by the workers' pace."""
        self._kinds[worker_id] = kind

    def forget(self, worker_id: str) -> None:
        """Drop a worker that has left."""
        self._workers.pop(worker_id, None)
        self.tier_token_s.pop(worker_id, None)
        kind = self._kinds.pop(worker_id, "")
        if kind and kind not in self._kinds.values():
            self._steps.pop(kind, None)
            self._untrained.pop(kind, None)

    def pulls_from(self, source: str) -> Callable[[str, int], float]:
        """A function (pulling worker, number of tokens) -> seconds of a pull from `source`."""
        pairs, between_all, bytes_a_token = self._pairs, self._between_all, self.bytes_a_token

        def pull_s(worker: str, num_tokens: int) -> float:
            fixed_s, byte_s = pairs.get((source, worker), between_all).pull.coefficients
            return fixed_s + byte_s * num_tokens * bytes_a_token

        return pull_s

    def handoff_s(self, prefill: str, decode: str, num_tokens: int) -> float:
        """Seconds from the first token until decoding can continue on the decode worker."""
        pair = self._pairs.get((prefill, decode), self._between_all)
        fixed_s, byte_s = pair.handoff.coefficients
        return fixed_s + byte_s * num_tokens * self.bytes_a_token

    def learn(self, worker_id: str, measured: Measured) -> None:
        """Add what a worker has measured of its prefills and steps."""
        speeds = self._own(worker_id)
        self._untrained.clear()
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
        """Add a measured pull."""
        for pair in (self._pair(source, worker), self._between_all):
            pair.pull.learn(times.pulled_s, 1.0, times.pulled_bytes)

    def learn_handoff(self, prefill: str, decode: str, times: PrefillTimes) -> None:
        """Add a measured hand-off."""
        for pair in (self._pair(prefill, decode), self._between_all):
            pair.handoff.learn(times.exposed_s, 1.0, times.moved_bytes)

    def learn_transfers(self, worker_id: str, times: PrefillTimes, source: str, decode: str) -> None:
        """Add the measured pull and hand-off of a prompt that this worker has computed.

        source: the worker that a prefix was pulled from. decode: the worker of the hand-off. "": there was
        none.
        """
        if times.pulled_bytes and source:
            self.learn_pull(source, worker_id, times)
        if times.moved_bytes and decode:
            self.learn_handoff(worker_id, decode, times)
            self.learn_size(times.moved_bytes, times.num_tokens)

    def learn_tiers(self, worker_id: str, token_ns: Mapping[Tier, int]) -> None:
        """Take the measured times of a worker's host memory and disk."""
        if token_ns:
            host_ns, disk_ns = (token_ns.get(tier, 0) for tier in (Tier.HOST, Tier.DISK))
            self.tier_token_s[worker_id] = 1e-9 * host_ns, 1e-9 * disk_ns

    def learn_size(self, num_bytes: int, num_tokens: int) -> None:
        """The pages of `num_tokens` have at least `num_bytes`; the destination may have held some already."""
        if num_bytes > 0 and num_tokens > 0:
            least = num_bytes / num_tokens
            self.bytes_a_token = least if not self._has_size else max(least, self.bytes_a_token * _FADE)
            self._has_size = True

    def _own(self, worker_id: str) -> Speeds:
        if worker_id not in self._workers:
            self._workers[worker_id] = self._speeds_of_new(self._kinds.get(worker_id, ""))
        return self._workers[worker_id]

    def _speeds_of_new(self, kind: str) -> Speeds:
        if kind not in self._steps:
            self._steps[kind] = self._all.step.successor()
        speeds = Speeds(self._all.prefill.successor(), StepFit(self._steps[kind]))
        speeds.mean_compute_s = self._all.mean_compute_s
        return speeds

    def _pair(self, one: str, other: str) -> PairSpeeds:
        key = (one, other)
        if key not in self._pairs:
            self._pairs[key] = PairSpeeds(
                self._between_all.pull.successor(), self._between_all.handoff.successor()
            )
        self._pairs.move_to_end(key)
        if len(self._pairs) > MAX_PAIRS:
            self._pairs.popitem(last=False)
        return self._pairs[key]
