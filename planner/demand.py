"""The demand on a cluster: the rates and lengths of requests that arrive, and a forecast of the rates.

1. `DemandHistory.add` takes the counts of all gateways, which only grow, and keeps one row of rates an
   interval. It refuses counts that are missing or contradict earlier ones.
2. `predict` predicts the mean rate of each stream over a later window. It tries several simple methods on
   the past, and takes the method whose quantiles would have had the least pinball loss. The quantiles are
   those of the method's past errors: docs/decisions/0037.
3. `DemandHistory.mix` returns the lengths of requests: those of prompts from all arrivals; those of cached
   tokens and answers, for each length of a prompt, from the requests that have ended.

A stream is the requests of one tenant and class. Arrivals are counted at the gateway, refused and queued ones
included, so a full cluster does not hide its demand.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple, TypeAlias, TypeVar

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from baton.messages.status import BUCKETS_AN_OCTAVE, StreamCounts, buckets_of

Floats: TypeAlias = NDArray[np.float64]
KeyT = TypeVar("KeyT")

COARSER: Final = 2  # buckets of prompts in one cell of a mix
FADED: Final = 0.01  # requests; fewer are dropped
LEVELS: Final = (0.1, 0.3, 0.5, 0.7, 0.9, 0.97, 0.995)  # of the quantiles of a forecast
_MIDDLE: Final = LEVELS.index(0.5)
_NINTH: Final = LEVELS.index(0.9)
SEASONS_S: Final = (86_400.0, 7 * 86_400.0)
MAX_HISTORY_S: Final = 8 * 86_400.0
BACKTEST: Final = 240  # past forecasts that are scored
FEW_ERRORS: Final = 40  # measured errors; when there are fewer, assumed ones are added
PRIOR_SPREAD: Final = 0.1  # of assumed errors, relative
BANDS_AN_OCTAVE: Final = 2  # the errors of forecasts in one band count together
PERIODIC: Final = 0.4  # least autocorrelation of a load that repeats itself
MEAN_WINDOWS: Final = (2, 5, 10, 30)  # intervals
TREND_WINDOWS: Final = (6, 12, 30)
SEASON_WINDOW: Final = 20
PROMPT_FADE: Final = 0.85  # each interval, of the counts of prompts
ANSWER_FADE: Final = 0.95  # each interval, of the counts of cached tokens and answers


def tokens_in(number: ArrayLike) -> Floats:
    """Return the length of a bucket, or of each of an array of buckets."""
    return np.exp2(np.asarray(number) / BUCKETS_AN_OCTAVE) - 1


class Stream(NamedTuple):
    """The requests of one tenant and one class."""

    tenant: str = ""
    priority: str = ""  # the class


Counts: TypeAlias = Mapping[str, Mapping[Stream, StreamCounts]]  # id of a gateway -> its streams


class Mix(msgspec.Struct, frozen=True, kw_only=True):
    """The requests of one stream by their lengths: arrays of one entry a cell, with shares that sum to 1."""

    share: Floats
    prompt_tokens: Floats
    cached_tokens: Floats
    output_tokens: Floats

    def with_prompts(self, mean_tokens: float) -> "Mix":
        """Return the mix with prompts of this mean length, within half and twice the present one."""
        present = float(self.share @ self.prompt_tokens)
        ratio = min(2.0, max(0.5, mean_tokens / max(1e-9, present)))
        prompts, cached = self.prompt_tokens * ratio, self.cached_tokens * ratio
        return msgspec.structs.replace(self, prompt_tokens=prompts, cached_tokens=cached)


class Contradiction(Exception):
    """Counts that cannot be right, such as one that has fallen. The message says which."""


class DemandHistory:
    """Rates and lengths of all streams, from the counts of gateways."""

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self.num_met = self.num_missed = 0.0  # since the first counts
        self._at_s: float | None = None
        self._last: Counts = {}
        self._rates: dict[Stream, deque[float]] = {}
        self._tokens: dict[Stream, deque[float]] = {}  # of prompts, each second
        self._length = 0  # rows of rates
        self._max_length = round(MAX_HISTORY_S / interval_s)
        self._arrived: dict[Stream, dict[int, float]] = {}  # faded
        # Buckets of the prompt and of its cached tokens -> requests, and tokens of their answers; faded.
        self._ended: dict[Stream, dict[tuple[int, int], Floats]] = {}

    @property
    def num_rows(self) -> int:
        """The number of intervals that are known."""
        return self._length

    def add(self, now_s: float, counts: Counts) -> None:
        """Add the counts of all gateways. Raises Contradiction, and then changes nothing.

        When several intervals have passed since the last call, each gets their mean rate.
        """
        changes = dict(self._changes(counts)) if self._at_s is not None else {}
        passed_s = 0.0 if self._at_s is None else now_s - self._at_s
        self._at_s = now_s
        self._last = counts
        if passed_s <= 0:
            return
        num_rows = max(1, round(passed_s / self.interval_s))
        for stream in changes:
            if stream not in self._rates:
                self._rates[stream] = deque([0.0] * self._length, self._max_length)
                self._tokens[stream] = deque([0.0] * self._length, self._max_length)
        for stream, rates in self._rates.items():
            change = changes.get(stream)
            rate = sum(change.arrived.values()) / passed_s if change else 0.0
            rates.extend([rate] * num_rows)
            tokens = sum(num * tokens_in(prompt) for prompt, num in change.arrived.items()) if change else 0.0
            self._tokens[stream].extend([float(tokens) / passed_s] * num_rows)
            self._fade(stream, change, num_rows)
        self._length = min(self._length + num_rows, self._max_length)

    def matrix(self) -> tuple[list[Stream], Floats, Floats]:
        """Return the streams, their rates in requests/s, and their rates in prompt tokens/s.

        Both rates are [streams, intervals], the latest last.
        """
        streams = list(self._rates)
        rows = [
            np.array([np.fromiter(kept[stream], float) for stream in streams])
            for kept in (self._rates, self._tokens)
        ]
        rates, tokens = (each.reshape(len(streams), self._length) for each in rows)
        return streams, rates, tokens

    def mix(self, stream: Stream) -> Mix | None:
        """Return the lengths of a stream's requests; None while none of them has lately arrived or ended."""
        arrived, ended = self._arrived.get(stream, {}), self._ended.get(stream, {})
        total = sum(arrived.values())
        if not ended or not total:
            return None
        cells = np.array(list(ended))  # [cells, (prompt, cached tokens)], buckets
        weight, output = np.array(list(ended.values())).T
        # A prompt length without an ended request takes the answers of the nearest length that has one.
        known = np.unique(cells[:, 0])
        sums = np.zeros((len(known), 2))  # arrived requests and tokens, of each known length
        for prompt, num in arrived.items():
            sums[np.abs(known - prompt).argmin()] += num, num * tokens_in(prompt)
        row = np.searchsorted(known, cells[:, 0])
        share = weight / np.bincount(row, weight)[row] * sums[row, 0] / total
        used = share > 0
        prompt_tokens = (sums[:, 1] / np.maximum(1e-9, sums[:, 0]))[row]
        cached_tokens = np.minimum(tokens_in(cells[:, 1]) / tokens_in(cells[:, 0]), 1.0) * prompt_tokens
        cell = np.stack([cells[:, 0] // COARSER, np.log2(1 + prompt_tokens - cached_tokens).round()])
        _, group = np.unique(cell[:, used], axis=1, return_inverse=True)
        shares: Floats = np.bincount(group, share[used]).astype(float)

        def mean(values: Floats) -> Floats:
            means: Floats = np.bincount(group, (share * values)[used]) / shares
            return means

        return Mix(
            share=shares,
            prompt_tokens=mean(prompt_tokens),
            cached_tokens=mean(np.minimum(cached_tokens, prompt_tokens - 1)),
            output_tokens=mean(output / weight),
        )

    def _changes(self, counts: Counts) -> Iterator[tuple[Stream, StreamCounts]]:
        sums: dict[Stream, tuple[dict[int, int], dict[int, int], list[int]]] = {}
        for gateway, streams in counts.items():
            before = self._last.get(gateway, {})
            for stream in before:
                if stream not in streams:
                    raise Contradiction(f"gateway {gateway[:8]} has lost the counts of {stream}")
            for stream, now in streams.items():
                arrived, ended, ends = sums.setdefault(stream, ({}, {}, [0, 0]))
                was = before.get(stream, _NO_COUNTS)
                _add_growth(arrived, now.arrived, was.arrived, gateway)
                _add_growth(ended, now.ended, was.ended, gateway)
                ends[0] += now.num_met - was.num_met
                ends[1] += now.num_missed - was.num_missed
        for stream, (arrived, ended, (num_met, num_missed)) in sums.items():
            self.num_met += num_met
            self.num_missed += num_missed
            yield stream, StreamCounts(arrived=arrived, ended=ended)

    def _fade(self, stream: Stream, change: StreamCounts | None, num_rows: int) -> None:
        arrived = self._arrived.setdefault(stream, {})
        _fade_and_add(arrived, change.arrived if change else {}, PROMPT_FADE**num_rows)
        ended = self._ended.setdefault(stream, {})
        for each in ended.values():
            each *= ANSWER_FADE**num_rows
        for cell, num in change.ended.items() if change else ():
            prompt, cached, output = buckets_of(cell)
            row = np.array([num, num * tokens_in(output)])
            ended[prompt, cached] = ended[prompt, cached] + row if (prompt, cached) in ended else row
        for faded in [lengths for lengths, row in ended.items() if row[0] < FADED]:
            del ended[faded]


_NO_COUNTS: Final = StreamCounts()


def _add_growth(to: dict[KeyT, int], now: Mapping[KeyT, int], was: Mapping[KeyT, int], gateway: str) -> None:
    for key, value in now.items():
        growth = value - was.get(key, 0)
        if growth < 0:
            raise Contradiction(f"a count of gateway {gateway[:8]} fell from {was[key]} to {value}")
        if growth:
            to[key] = to.get(key, 0) + growth


def _fade_and_add(sums: dict[KeyT, float], change: Mapping[KeyT, int], fade: float) -> None:
    for key in list(sums):
        sums[key] *= fade
        if sums[key] < FADED:
            del sums[key]
    for key, value in change.items():
        sums[key] = sums.get(key, 0.0) + value


def predict(rates: Floats, horizon: int, window: int, interval_s: float) -> tuple[str, Floats, Floats]:
    """Predict the mean rates of the `window` intervals that end `horizon` intervals after the last one.

    rates: [streams, intervals]. Returns the method's name, the median of each stream, and the factors at
    LEVELS between the predicted total and the true one.
    """
    sums = np.concatenate([np.zeros((len(rates), 1)), np.cumsum(rates, axis=1)], axis=1)
    num_rows = rates.shape[1]
    total = sums.sum(axis=0, keepdims=True)
    num_expected = max(1.0, float(rates[:, -1].sum()) * window * interval_s)
    assumed = np.exp(np.hypot(PRIOR_SPREAD, num_expected**-0.5) * _NORMAL_POINTS)
    best = "mean of 1", rates[:, -1], np.quantile(assumed, LEVELS)
    least = np.inf
    ahead = horizon - window / 2
    for name, method in _methods(rates.sum(axis=0), horizon, interval_s):
        ends = np.arange(max(method.needs, num_rows - BACKTEST - horizon), num_rows - horizon + 1)
        if len(ends) < 2:
            continue
        past = method.predict(total, ends, ahead, window)[0]
        came = (total[0, ends + horizon] - total[0, ends + horizon - window]) / window
        median = method.predict(sums, np.array([num_rows]), ahead, window)[:, 0]
        factors, loss = _errors(past, came, float(median.sum()), assumed)
        loss += method.complexity * float(came.mean())
        if loss < least:
            least, best = loss, (name, median, factors)
    return best


def _errors(past: Floats, came: Floats, present: float, assumed: Floats) -> tuple[Floats, float]:
    """Return the factors at LEVELS for a forecast of `present`, and the mean loss of past forecasts.

    Errors depend on the forecast: a load that sometimes rises threefold does not rise from its peak. So only
    the errors of forecasts about as high as `present` count; assumed ones are added when these are few.
    """
    errors = came / np.maximum(past, 1e-9)
    bands = np.round(BANDS_AN_OCTAVE * np.log2(np.maximum(past, 1e-9)))
    loss = 0.0
    for band in np.unique(bands):
        inside = bands == band
        factors = np.quantile(_with_assumed(errors[inside], assumed), LEVELS)
        loss += float(pinball(came[inside], past[inside][:, None] * factors).sum())
    near = np.abs(np.log2(np.maximum(past, 1e-9) / max(present, 1e-9))) < 1 / BANDS_AN_OCTAVE
    return np.quantile(_with_assumed(errors[near], assumed), LEVELS), loss / len(past)


def _with_assumed(errors: Floats, assumed: Floats) -> Floats:
    return errors if len(errors) >= FEW_ERRORS else np.concatenate([errors, assumed])


def pinball(came: Floats, quantiles: Floats) -> Floats:
    """Return the pinball loss of each forecast. came: [n]; quantiles: [n, LEVELS]."""
    over = came[:, None] - quantiles
    levels = np.array(LEVELS)
    loss: Floats = np.maximum(levels * over, (levels - 1) * over).mean(axis=1)
    return loss


def without_chance(factors: Floats, num_requests: float) -> Floats:
    """Return the factors of the expected rate, without the random spread of `num_requests` arrivals.

    The queue model adds this spread by itself.
    """
    spread = (factors[_NINTH] - factors[0]) / 2 / 1.2816  # of a normal distribution with these quantiles
    chance = 1 / max(1.0, num_requests)
    kept = np.sqrt(max(0.0, 1 - chance / max(1e-12, spread**2)))
    expected: Floats = factors[_MIDDLE] + (factors - factors[_MIDDLE]) * kept
    return expected


# Evenly likely points of a standard normal distribution.
_NORMAL_POINTS: Final = np.array(
    [-1.9, -1.3, -0.9, -0.7, -0.5, -0.3, -0.1, 0.1, 0.3, 0.5, 0.7, 0.9, 1.3, 1.9]
)


class _Method(NamedTuple):
    """A way to predict. `kind`: mean, trend or season; `window` and `season` in intervals."""

    kind: str
    window: int
    season: int = 0

    @property
    def needs(self) -> int:
        """The number of past intervals that the method reads."""
        return self.season + self.window if self.season else self.window * (2 if self.kind == "trend" else 1)

    @property
    def complexity(self) -> float:
        """A penalty, as a share of the mean rate: with like errors the steadier method is taken."""
        return 0.002 if self.kind == "trend" else 0.0

    def predict(self, sums: Floats, ends: NDArray[np.int64], ahead: float, wide: int) -> Floats:
        """Predict the mean rate of `wide` intervals, with their middle `ahead` intervals after each end.

        sums: of the rates before each interval, [streams, intervals + 1]. Returns [streams, ends].
        """
        window = self.window
        level = (sums[:, ends] - sums[:, ends - window]) / window
        if self.kind == "trend":
            earlier = (sums[:, ends - window] - sums[:, ends - 2 * window]) / window
            # The level is that of the window's middle.
            return np.maximum(0.2 * level, level + (level - earlier) * (ahead + window / 2) / window)
        if self.kind == "season":
            then = ends - self.season
            before = (sums[:, then] - sums[:, then - window]) / window
            wide = max(wide, self.season // 200)
            later = np.minimum(then + round(ahead + wide / 2), sums.shape[1] - 1)
            after = (sums[:, later] - sums[:, later - wide]) / wide
            return after * np.clip(level / np.maximum(before, 1e-9), 0.5, 2.0)
        return level


def _methods(total: Floats, horizon: int, interval_s: float) -> Iterator[tuple[str, _Method]]:
    for window in MEAN_WINDOWS:
        yield f"mean of {window}", _Method("mean", window)
    for window in TREND_WINDOWS:
        yield f"trend of {window}", _Method("trend", window)
    seasons = [round(season_s / interval_s) for season_s in SEASONS_S]
    for season in dict.fromkeys([*seasons, _period(total, horizon)]):
        if season and len(total) >= season + SEASON_WINDOW:
            yield f"season of {season * interval_s / 60:.0f} min", _Method("season", SEASON_WINDOW, season)


def _period(total: Floats, horizon: int) -> int:
    """Return the number of intervals after which the total repeats itself best; 0 when it does not."""
    rest = total - total.mean()
    size = len(rest)
    least, most = horizon + SEASON_WINDOW, size // 2
    if most <= least or not rest.any():
        return 0
    spectrum = np.fft.rfft(rest, 2 * size)
    alike = np.fft.irfft(np.abs(spectrum) ** 2)[:size] / (size - np.arange(size))
    alike /= alike[0]
    peak = least + int(alike[least:most].argmax())
    # A slow change is alike at every short lag: only a peak after a valley is a period.
    return peak if alike[peak] > PERIODIC and alike[:peak].min() < alike[peak] - PERIODIC else 0
