"""The cost model: seconds of work at each worker, learnt from measurements, and the cost of a prompt at
each pair of workers.

A `Fit` is linear in a few known quantities, with coefficients of at least 0, in seconds per byte, token and
so on. Each worker has fits of its own, which start from the fits of all workers; those start from the PRIORs.

Steps are fitted over all workers of one kind, and each worker has a pace (`StepFit`). The steps of one worker
are too uniform to tell what a sequence takes: fits of equal workers differed tenfold by chance, and the
worker with sequences that seemed to be free received every request until it had measured better.

The cost of an attempt at a pair, in seconds, is

    wait for the prompts before it, and meanwhile for pages from a peer; compute the missing tokens;
    hand the pages over, as far as computing does not hide that; join the batch;
    plus the delay of all other requests: a second counts the same for every client.

A prompt of a tenant with a deficit delays only later prompts of tenants with a deficit: all others come after
it at any worker. Computing the prompt on its decode worker is one more candidate. Nothing is handed over
then, and the running batch waits while the prompt is computed. A prefix that only a busy worker holds is
pulled or computed elsewhere when that is cheaper, and later prompts find it there: hot prefixes spread by
themselves.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Final, TypeAlias

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
        own = self._pair(source, worker)
        for pair in (own, self._between_all):
            pair.pull.learn(times.pulled_s, 1.0, times.pulled_bytes)
        own.pull.settle()

    def learn_handoff(self, prefill: str, decode: str, times: PrefillTimes) -> None:
        """Add a measured hand-off."""
        own = self._pair(prefill, decode)
        for pair in (own, self._between_all):
            pair.handoff.learn(times.exposed_s, 1.0, times.moved_bytes)
        own.handoff.settle()

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


TIE: Final = 0.02  # costs that differ by a smaller share are equal: predictions are no better
# Fingerprint, kv_dtype: workers can use each other's pages of one format.
PageFormat: TypeAlias = tuple[str, str]
Coefficients: TypeAlias = tuple[float, ...]  # of a prefill, as PREFILL_PRIOR


class CostTerms(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The parts of a pair's cost, in seconds."""

    queue_s: float = 0.0  # behind other prompts
    # To bring a prefix to the device, from a peer or from the worker's host memory and disk, less the time in
    # the queue.
    pull_s: float = 0.0
    compute_s: float = 0.0
    handoff_s: float = 0.0
    join_s: float = 0.0
    decode_delay_s: float = 0.0  # the delay of running requests, summed
    queue_delay_s: float = 0.0  # the delay of later prompts behind this one

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token."""
        return self.queue_s + self.pull_s + self.compute_s

    @property
    def total_s(self) -> float:
        """The sum of all terms."""
        return self.ttft_s + self.handoff_s + self.join_s + self.decode_delay_s + self.queue_delay_s


class PrefillCandidate(msgspec.Struct, frozen=True, gc=False):
    """A worker that could compute the prompt."""

    worker: str
    wait_s: float  # until it could begin
    num_held_tokens: int  # of the prompt, in its prefix cache
    coefficients: Coefficients  # of its prefill time
    page_format: PageFormat = ("", "")
    load_s: float = 0.0  # to bring the held tokens to its device from host memory and disk


class PullCandidate(msgspec.Struct, frozen=True, gc=False):
    """A worker that holds the first tokens of the prompt, for others to pull."""

    worker: str
    num_tokens: int
    pull_s: Callable[[str, int], float]  # (pulling worker, number of tokens) -> seconds
    page_format: PageFormat = ("", "")
    load_s: float = 0.0  # for the peer to bring the tokens to its own device before the pull


class DecodeCandidate(msgspec.Struct, frozen=True, gc=False):
    """A worker that could decode, and perhaps compute the prompt too."""

    as_prefill: PrefillCandidate  # the same worker, as the one that computes the prompt
    num_delayed: int  # running sequences that a prompt computed here would delay
    room_s: float  # until there is room for the attempt
    join_s: float  # `room_s`, and until a step of the batch ends
    decode_delay_s: float  # the delay that the attempt's tokens cost the running sequences
    patience_s: float = inf  # the longest delay of one of them, beyond the wait that it has anyway

    @property
    def total_s(self) -> float:
        """The cost of decoding here, without the prompt."""
        return self.join_s + self.decode_delay_s

    def local_decode_delay_s(self, compute_s: float) -> float:
        """`decode_delay_s` and the delay of running sequences while the prompt is computed here."""
        return self.decode_delay_s + self.num_delayed * min(compute_s, self.patience_s)


class PromptCost(msgspec.Struct, frozen=True, gc=False):
    """The cost of the prompt at the worker that computes it."""

    total_s: float
    candidate: PrefillCandidate
    source: str
    num_held_tokens: int
    num_new_tokens: int
    pull_s: float
    compute_s: float
    queue_delay_s: float


class PairCandidate(msgspec.Struct, frozen=True, gc=False):
    """A pair of workers, or a decode worker alone, with their cost. `terms` is computed on demand."""

    total_s: float
    prefill: str  # "": the decode worker computes the prompt
    prompt_cost: PromptCost
    decode_candidate: DecodeCandidate
    handoff_s: float = 0.0

    @property
    def decode(self) -> str:
        """The id of the decode worker."""
        return self.decode_candidate.as_prefill.worker

    @property
    def computed_by(self) -> str:
        """The id of the worker that computes the prompt."""
        return self.prompt_cost.candidate.worker

    @property
    def source(self) -> str:
        """The worker that a prefix is pulled from; "": none."""
        return self.prompt_cost.source

    @property
    def num_held_tokens(self) -> int:
        """Tokens of the prompt that are not computed."""
        return self.prompt_cost.num_held_tokens

    @property
    def num_new_tokens(self) -> int:
        """Tokens of the prompt that are computed."""
        return self.prompt_cost.num_new_tokens

    @property
    def terms(self) -> CostTerms:
        """The cost by its parts."""
        prompt_cost, decode = self.prompt_cost, self.decode_candidate
        join_s, decode_delay_s = decode.join_s, decode.decode_delay_s
        if not self.prefill:  # the batch waits for the prompt, and the prompt for no step of the batch
            join_s, decode_delay_s = decode.room_s, decode.local_decode_delay_s(prompt_cost.compute_s)
        return CostTerms(
            queue_s=prompt_cost.candidate.wait_s,
            pull_s=prompt_cost.pull_s,
            compute_s=prompt_cost.compute_s,
            handoff_s=self.handoff_s,
            join_s=join_s,
            decode_delay_s=decode_delay_s,
            queue_delay_s=prompt_cost.queue_delay_s,
        )


def prompt_costs(
    prefills: Sequence[PrefillCandidate],
    num_tokens: int,
    sources: Sequence[PullCandidate] = (),
    arrival_rate: float = 0.0,
) -> list[PromptCost]:
    """Return the cheapest way for each worker: compute all missing tokens, or first pull some from a source.

    arrival_rate: prompts that arrive at a worker a second, and more where these delay others in turn. Calls
    are inlined: this function takes most of the time of a decision.
    """
    last = num_tokens - 1  # the last token is always computed
    offers = []
    for source in sources:
        num_there = min(source.num_tokens, last)
        num_left = num_tokens - num_there
        num_pairs = num_left * (num_tokens - 0.5 * num_left)
        offer = (source.worker, source.page_format, num_there, num_left, num_pairs, source.pull_s)
        offers.append((*offer, source.load_s))
    costs = []
    for prefill in prefills:
        worker, wait_s, num_held = prefill.worker, prefill.wait_s, prefill.num_held_tokens
        fixed_s, token_s, pair_s = prefill.coefficients
        held = num_held if num_held < last else last
        num_new, pulled_from = num_tokens - held, ""
        pull_s = prefill.load_s - wait_s if prefill.load_s > wait_s else 0.0
        compute_s = fixed_s + num_new * (token_s + pair_s * (num_tokens - 0.5 * num_new))
        # Prompts that arrive before this one is done wait that much longer.
        queue_delay_s = compute_s * (wait_s + compute_s) * arrival_rate
        least_s = pull_s + compute_s + queue_delay_s
        for holder, page_format, num_there, num_left, num_pairs, pull_s_of, load_s in offers:
            if num_there <= num_held or holder == worker or page_format != prefill.page_format:
                continue
            left_s = fixed_s + num_left * token_s + num_pairs * pair_s
            left_queue_delay_s = left_s * (wait_s + left_s) * arrival_rate
            if left_s + left_queue_delay_s >= least_s:
                continue  # however fast the pull is
            shown_s = load_s + pull_s_of(worker, num_there - num_held) - wait_s
            if shown_s < 0.0:
                shown_s = 0.0
            if shown_s + left_s + left_queue_delay_s < least_s:
                held, num_new, pulled_from = num_there, num_left, holder
                pull_s, compute_s, queue_delay_s = shown_s, left_s, left_queue_delay_s
                least_s = pull_s + compute_s + queue_delay_s
        total_s = wait_s + least_s
        costs.append(
            PromptCost(total_s, prefill, pulled_from, held, num_new, pull_s, compute_s, queue_delay_s)
        )
    return costs


def local_pair(cost: PromptCost, decode: DecodeCandidate) -> PairCandidate:
    """Return the candidate that computes the prompt on its decode worker."""
    total_s = cost.total_s + decode.room_s + decode.local_decode_delay_s(cost.compute_s)
    return PairCandidate(total_s, "", cost, decode)


def remote_pair(cost: PromptCost, decode: DecodeCandidate, handoff_s: float) -> PairCandidate:
    """Return the candidate that computes the prompt on a prefill worker and hands it over in `handoff_s`."""
    total_s = cost.total_s + handoff_s + decode.join_s + decode.decode_delay_s
    return PairCandidate(total_s, cost.candidate.worker, cost, decode, handoff_s)


# (candidates, random bits, tokens that a worker was given lately) -> the chosen candidate
Select: TypeAlias = Callable[[Sequence[PairCandidate], int, Callable[[str], float]], PairCandidate]


def cheapest(
    candidates: Sequence[PairCandidate], random: int, given: Callable[[str], float]
) -> PairCandidate:
    """Return one of the cheapest candidates: of two drawn at random, that with the less used worker.

    Two candidates are drawn because every router would otherwise send to the one best worker. Among equal
    totals the candidates with less to compute come first: waiting for a sibling's prefix costs the same as
    computing the prefix again.
    """
    least_s = min([each.total_s for each in candidates])
    tie_s = least_s * TIE
    most_s = least_s + tie_s
    equals = [each for each in candidates if each.total_s <= most_s]
    if len(equals) > 1:
        most_s = min([each.prompt_cost.compute_s for each in equals]) + tie_s
        equals = [each for each in equals if each.prompt_cost.compute_s <= most_s]
    one, other = equals[random % len(equals)], equals[random // len(equals) % len(equals)]
    if one is other:
        return one
    return other if given(other.computed_by) < given(one.computed_by) else one


def longest(candidates: Sequence[PairCandidate], random: int, given: Callable[[str], float]) -> PairCandidate:
    """Return the candidate that holds most of the prompt; among equals the one that waits least.

    Computing on the decode worker is chosen only when there is no other candidate.
    """
    remotes = [candidate for candidate in candidates if candidate.prefill] or candidates
    ranks = [(-each.num_held_tokens, each.prompt_cost.candidate.wait_s) for each in remotes]
    best = min(ranks)
    equals = [each for each, rank in zip(remotes, ranks, strict=True) if rank == best]
    return equals[random % len(equals)]
