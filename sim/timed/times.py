"""The times of real workers, as `baton calibrate` has measured them: what a rehearsal predicts with.

1. `fit_steps` fits the seconds of a step to its work (`StepWork`): least squares of relative errors with
   coefficients of at least 0. Each quantity has a `Curve`, which gets a knot where a knot improves the
   prediction of held-out shapes.
2. A model has its errors: the quantiles of measured over predicted seconds, of shapes that were held out of
   the fit.
3. A model has its ranges. `Validity` counts the time that a rehearsal spends outside of them.

`Machine` gives the times of machines that were not measured, by roofline.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np

from baton.config.engine import EngineSettings
from baton.errors import ConfigError, reason_of
from baton.router.policies.cost_model import solve_nonnegative

QUANTILES: Final = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95)  # of errors
OUTLIERS: Final = 0.02  # share of the longest steps that is left out: other processes delayed them
KNOT_PLACES: Final = (0.1, 0.25, 0.4, 0.5, 0.6, 0.75, 0.9)  # candidates, as quantiles of the values
MAX_KNOTS: Final = 2  # of one curve
KNOT_GAIN: Final = 0.93  # a knot must make the error of held-out shapes this much smaller
NUM_FOLDS: Final = 5
TOLERATED: Final = 0.01  # share of a rehearsal's time that may be outside of the calibrated ranges
BEYOND: Final = 1.05  # multiple of the largest measured value that is still inside
FADE_S: Final = 0.5  # of the processors that other processes take
# Busy processors of gateway, router and clients that a rehearsal tolerates beyond the calibrated range: the
# slowdown that they cause is small, and is ignored.
SPARE_LOAD: Final = 0.5
VERSION: Final = 3


class StepWork(NamedTuple):
    """The work of one step."""

    num_sequences: int  # with a token or a chunk in the step
    num_context: int  # tokens that single tokens attend to, summed
    num_new: int  # tokens of prompts
    num_pairs: float  # of a prompt's token and a token that it attends to

    @property
    def quantities(self) -> tuple[float, ...]:
        """The quantities that seconds are fitted to, in the order of QUANTITIES."""
        return self.num_sequences + self.num_new, self.num_sequences, self.num_context, self.num_pairs


QUANTITIES: Final = ("rows", "sequences", "context", "pairs")


class StepSample(NamedTuple):
    """A measured step."""

    work: StepWork
    seconds: float


class TransferSample(NamedTuple):
    """A measured transfer of pages."""

    num_bytes: int
    num_transfers: int  # transfers under way at once, itself included
    seconds: float


class WorkTimes(Protocol):
    """The seconds that a worker's work takes."""

    @property
    def num_stages(self) -> int:
        """Pipeline stages of the worker: as many steps are in flight."""
        ...

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of the pages of one token."""
        ...

    def step_s(self, work: StepWork) -> float:
        """Seconds of a step, on its way through all stages."""
        ...

    def transfer_s(self, num_bytes: int, num_transfers: int = 1) -> float:
        """Seconds of a transfer, with so many under way."""
        ...

    def handoff_s(self, num_tokens: int, num_transfers: int = 1) -> float:
        """Seconds until a sequence can go on elsewhere, once a last chunk of so many tokens is computed.

        num_transfers: transfers of the worker under way, this one included.
        """
        ...


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Times by roofline: seconds, of a token unless said otherwise.

    The default is a 70B model on eight A800.
    """

    prefill_s: float = 0.01  # of a step without decodes
    prefill_token_s: float = 1.2e-4
    prefill_pair_s: float = 2e-9  # of a new token and a token that it attends to
    step_base_s: float = 0.02
    step_sequence_s: float = 5e-5
    step_context_s: float = 1e-8
    kv_token_bytes: int = 320 * 1024
    exposed_s: float = 5e-3  # of a hand-off: not hidden behind the prompt's computation
    transfer_base_s: float = 5e-3
    transfer_bytes_per_s: float = 10e9
    num_stages: int = 1

    def step_s(self, work: StepWork) -> float:
        prompt_s = work.num_new * self.prefill_token_s + work.num_pairs * self.prefill_pair_s
        if work.num_context == 0 and work.num_new:
            return self.prefill_s + prompt_s
        return (
            self.step_base_s
            + work.num_sequences * self.step_sequence_s
            + work.num_context * self.step_context_s
            + prompt_s
        )

    def compute_s(self, num_new: int, num_tokens: int) -> float:
        """Return the time of a step that computes `num_new` tokens of a prompt of `num_tokens` so far."""
        return self.step_s(StepWork(0, 0, num_new, num_new * (num_tokens - num_new / 2)))

    def transfer_s(self, num_bytes: int, num_transfers: int = 1) -> float:
        return self.transfer_base_s + num_bytes * num_transfers / self.transfer_bytes_per_s

    def handoff_s(self, num_tokens: int, num_transfers: int = 1) -> float:
        return self.exposed_s


# An 8B model on one H200.
H200: Final = Machine(
    prefill_s=2e-3,
    prefill_token_s=2.8e-5,
    prefill_pair_s=4e-10,
    step_base_s=4e-3,
    step_sequence_s=2e-5,
    step_context_s=2.7e-8,
    kv_token_bytes=2**17,
    exposed_s=2e-3,
)


class Curve(msgspec.Struct, frozen=True):
    """A function that is piecewise linear, 0 at 0, and never falls."""

    slopes: tuple[float, ...]  # one more than knots
    knots: tuple[float, ...] = ()

    def at(self, value: float) -> float:
        """Return the function's value."""
        result = begin = 0.0
        for knot, slope in zip(self.knots, self.slopes, strict=False):
            if value <= knot:
                return result + slope * (value - begin)
            result += slope * (knot - begin)
            begin = knot
        return result + self.slopes[-1] * (value - begin)


class StepModel(msgspec.Struct, frozen=True, kw_only=True):
    """The seconds of a step, the calibrated ranges, and the errors."""

    fixed_s: float
    curves: dict[str, Curve]  # by QUANTITIES
    most: dict[str, float]  # of each field of StepWork, that was measured
    errors: tuple[float, ...]  # QUANTILES of measured over predicted seconds of shapes that were held out

    def seconds(self, work: StepWork) -> float:
        """Return the mean seconds of such a step."""
        total_s = self.fixed_s
        for name, value in zip(QUANTITIES, work.quantities, strict=True):
            if value:
                total_s += self.curves[name].at(value)
        return total_s


class TransferModel(msgspec.Struct, frozen=True, kw_only=True):
    """The seconds of a transfer between two processes."""

    fixed_s: float
    curve: Curve  # of bytes
    streams: tuple[float, ...]  # multiple of the seconds, by the transfers under way less one
    most_bytes: int
    errors: tuple[float, ...]


class Cost(msgspec.Struct, frozen=True):
    """The processor seconds that processes take to serve, beside the steps of workers."""

    request_s: float = 0.0
    message_s: float = 0.0  # of the tokens of one step
    token_s: float = 0.0


class Overheads(msgspec.Struct, frozen=True, kw_only=True):
    """The time of a served request outside of steps and transfers, in seconds."""

    # Where nothing else is asked.
    first_token_s: float = 0.0  # of the way to the worker, and of the first token to the client
    handoff_s: float = 0.0  # more, until the second token, where another worker has computed the prompt
    step_s: float = 0.0  # of a worker's loop, in each step beside the engine's part
    gateway: Cost = Cost()  # a gateway does one thing after the other
    others: Cost = Cost()  # routers, clients, and the threads of workers that compute no step


class ReplicaTimes(msgspec.Struct, frozen=True, kw_only=True):
    """One worker of some tensor parallel size."""

    steps: StepModel  # a step of a pipeline alone, on its way through all stages
    num_pages: int
    start_s: tuple[float, ...]  # measured starts, until the model is loaded
    num_stages: int = 1  # of a pipeline, each of which takes the same part of a step


class TimeModel(msgspec.Struct, frozen=True, kw_only=True):
    """The file of `baton calibrate`."""

    model: str  # the last part of its name or directory
    fingerprint: str
    engine: EngineSettings = EngineSettings()  # of the calibrated workers
    machine: dict[str, str]
    replicas: dict[int, ReplicaTimes]  # by tensor parallel size
    transfer: TransferModel
    kv_token_bytes: int
    page_size: int
    max_model_len: int
    # Multiple of a step's seconds by the number of other workers of this machine that compute; empty: workers
    # have devices of their own.
    neighbours: tuple[float, ...] = ()
    overheads: Overheads = Overheads()
    drift: float = 0.0  # relative spread of one shape of steps over the calibration
    version: int = VERSION

    def save(self, path: Path) -> None:
        """Write the file. ConfigError: it cannot be written."""
        try:
            path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {reason_of(error)}") from None

    @classmethod
    def read(cls, path: Path) -> "TimeModel":
        """Read a file of `baton calibrate`. ConfigError: there is none, or it is another version's."""
        try:
            model = msgspec.json.decode(path.read_bytes(), type=cls)
        except OSError as error:
            raise ConfigError(f"--times: {path} cannot be read: {reason_of(error)}") from None
        except msgspec.MsgspecError as error:
            raise ConfigError(f"--times: {path} is no file of `baton calibrate`: {error}") from None
        if model.version != VERSION:
            raise ConfigError(
                f"--times: {path} has version {model.version}, expected {VERSION}; calibrate anew"
            )
        return model

    @property
    def error(self) -> float:
        """The relative error of the model: that of most held-out shapes of steps, or the machine's drift."""
        errors = [abs(each.steps.errors[at] - 1) for each in self.replicas.values() for at in (1, -2)]
        return max([self.drift, *errors])


class Contention:
    """The gateway that requests wait for, and the processors that workers share with it.

    The gateway's backlog is the work that it has been given and not done. The processors that all processes
    take, as a fading mean, slow down workers that have no devices of their own.
    """

    def __init__(
        self,
        model: TimeModel | None = None,
        *,
        shares_machine: bool = True,
        validity: "Validity | None" = None,
    ) -> None:
        """model: None for requests that wait for nothing. shares_machine: workers run on one machine.
        validity: counts the time in which more compute at once than were calibrated.
        """
        self._validity = validity or Validity()
        self.neighbours = model.neighbours if model is not None and shares_machine else ()
        self._over = model.overheads if model is not None else Overheads()
        self._load = self._backlog_s = self._now_s = 0.0

    def ask(self, num_busy: int, now_s: float) -> float:
        """Take a request beside so many busy workers; return the seconds of its way outside of steps.

        Busy workers slow down the work of processes, not the time in which messages wake them.
        """
        slowdown = self.slowdown(num_busy, now_s)
        wait_s = self._backlog_s
        own_s, others_s = self._over.gateway.request_s, self._over.others.request_s
        self._add(own_s, others_s, slowdown)
        return wait_s + self._over.first_token_s + (slowdown - 1.0) * (own_s + others_s)

    def wait_s(self, now_s: float) -> float:
        """Return how long a message of tokens that comes now waits for the gateway."""
        self._pass(now_s)
        return self._backlog_s

    def add_steps(self, num_steps: int, num_tokens: int, num_busy: int, now_s: float) -> None:
        """Take the messages of a worker's steps, with so many tokens in all."""
        gateway, others = self._over.gateway, self._over.others
        self._add(
            num_steps * gateway.message_s + num_tokens * gateway.token_s,
            num_steps * others.message_s + num_tokens * others.token_s,
            self.slowdown(num_busy, now_s),
        )

    def slowdown(self, num_others: int, now_s: float) -> float:
        """Return the multiple of the seconds of work that begins now, with so many other workers busy."""
        self._pass(now_s)
        neighbours = self.neighbours
        if not neighbours:
            return 1.0
        place = min(num_others + self._load, len(neighbours) - 1.0)
        low = int(place)
        high = min(low + 1, len(neighbours) - 1)
        return neighbours[low] + (place - low) * (neighbours[high] - neighbours[low])

    def stretched_s(self, seconds: float, num_others: int, now_s: float) -> float:
        """Return the seconds of a step that begins now, with so many other workers busy.

        seconds: of the step alone.
        """
        slowdown = self.slowdown(num_others, now_s)
        if self.neighbours:
            num_busy = 1 + num_others + max(0.0, self._load - SPARE_LOAD)
            self._validity.count("busy processes", num_busy, max(2, len(self.neighbours)), seconds)
        return slowdown * seconds

    def _add(self, gateway_s: float, others_s: float, slowdown: float) -> None:
        self._load += (gateway_s + others_s) / FADE_S
        self._backlog_s += slowdown * gateway_s

    def _pass(self, now_s: float) -> None:
        passed_s = now_s - self._now_s
        if passed_s > 0:
            self._load *= math.exp(-passed_s / FADE_S)
            self._backlog_s = max(0.0, self._backlog_s - passed_s)
            self._now_s = now_s


class Validity:
    """Counts the time that steps and transfers take, and of it the time outside of the calibrated ranges."""

    def __init__(self) -> None:
        self.inside_s = 0.0
        self.outside_s: defaultdict[str, float] = defaultdict(float)  # by quantity
        self.found: dict[str, tuple[float, float]] = {}  # quantity -> the most that was asked for, the bound

    def count(self, name: str, value: float, most: float, seconds: float) -> None:
        """Count seconds that depend on a value; `most` was measured."""
        if value > most * BEYOND:
            self.outside_s[name] += seconds
            self.found[name] = max(value, self.found.get(name, (0.0, 0.0))[0]), most

    @property
    def complaints(self) -> list[str]:
        """Say which quantities make the figures worthless."""
        total_s = max(self.inside_s, 1e-12)
        return [
            f"{name}: up to {_shown(self.found[name][0])}, calibrated to {_shown(self.found[name][1])}, "
            f"in {100 * min(1.0, outside_s / total_s):.1f} % of the time"
            for name, outside_s in sorted(self.outside_s.items())
            if outside_s > TOLERATED * total_s
        ]


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


class FittedTimes:
    """The `WorkTimes` of one replica by a time model, which counts what lies outside of its ranges."""

    def __init__(
        self, model: TimeModel, size: int = 1, validity: Validity | None = None, scale: float = 1.0
    ) -> None:
        """size: tensor parallel size, which the model must have. scale: multiple of all seconds."""
        if size not in model.replicas:
            known = ", ".join(map(str, sorted(model.replicas)))
            raise ConfigError(f"tensor parallel size {size} was not calibrated, only {known} was")
        self.kv_token_bytes = model.kv_token_bytes
        self.num_stages = model.replicas[size].num_stages
        self.validity = validity or Validity()
        self._steps, self._transfer = model.replicas[size].steps, model.transfer
        self._loop_s, self._handoff_s = model.overheads.step_s, model.overheads.handoff_s
        self._scale = scale

    def step_s(self, work: StepWork) -> float:
        seconds, validity = self._scale * (self._steps.seconds(work) + self._loop_s), self.validity
        validity.inside_s += seconds
        for (name, most), value in zip(self._steps.most.items(), work, strict=True):
            if value > most:
                validity.count(name.removeprefix("num_"), value, most, seconds)
        return seconds

    def transfer_s(self, num_bytes: int, num_transfers: int = 1) -> float:
        transfer = self._transfer
        streams = transfer.streams[min(num_transfers, len(transfer.streams)) - 1]
        seconds = self._scale * streams * (transfer.fixed_s + transfer.curve.at(num_bytes))
        self.validity.count("bytes of a transfer", num_bytes, transfer.most_bytes, seconds)
        self.validity.count("transfers at once", num_transfers, len(transfer.streams), seconds)
        return seconds

    def handoff_s(self, num_tokens: int, num_transfers: int = 1) -> float:
        num_bytes = num_tokens * self.kv_token_bytes
        return self._scale * self._handoff_s + self.transfer_s(num_bytes, num_transfers)


# Fits.


class _Shape(NamedTuple):
    quantities: tuple[float, ...]
    seconds: float  # the mean


def fit_steps(samples: Iterable[StepSample]) -> StepModel:
    """Fit the times of steps. ConfigError for fewer than NUM_FOLDS shapes."""
    by_work: defaultdict[StepWork, list[float]] = defaultdict(list)
    for sample in samples:
        by_work[sample.work].append(sample.seconds)
    means = _means(by_work)
    shapes = [_Shape(work.quantities, mean_s) for work, mean_s in means.items()]
    fixed_s, curves, ratios = _fit(shapes, QUANTITIES)
    return StepModel(
        fixed_s=fixed_s,
        curves=curves,
        most={name: max(getattr(work, name) for work in by_work) for name in StepWork._fields},
        errors=_quantiles(ratios),
    )


def fit_transfers(samples: Iterable[TransferSample]) -> TransferModel:
    """Fit the times of transfers; of several at once, the multiple of the time of one."""
    by_kind: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    for sample in samples:
        by_kind[sample.num_transfers, sample.num_bytes].append(sample.seconds)
    means = _means(by_kind)
    alone = [_Shape((num_bytes,), mean_s) for (num, num_bytes), mean_s in means.items() if num == 1]
    fixed_s, curves, ratios = _fit(alone, ("bytes",))
    curve = curves["bytes"]
    multiples = [1.0]
    for number in range(2, 1 + max(number for number, _ in by_kind)):
        found = [
            mean_s / (fixed_s + curve.at(num_bytes))
            for (num, num_bytes), mean_s in means.items()
            if num == number
        ]
        multiples.append(max(multiples[-1], float(np.median(found))) if found else multiples[-1])
    return TransferModel(
        fixed_s=fixed_s,
        curve=curve,
        streams=tuple(multiples),
        most_bytes=max(num_bytes for _, num_bytes in by_kind),
        errors=_quantiles(ratios),
    )


_KindT = TypeVar("_KindT")


def _means(by_kind: Mapping[_KindT, Sequence[float]]) -> dict[_KindT, float]:
    """Return the mean seconds of each kind.

    The middle half of a kind's measurements gives its size, and all kinds together the ratio of the mean to
    the middle: few measurements of one kind have a mean that a single pause decides.
    """
    middles = {kind: _middle(seconds) for kind, seconds in by_kind.items()}
    ratios = sorted(each / middles[kind] for kind, seconds in by_kind.items() for each in seconds)
    kept = ratios[: max(1, math.ceil(len(ratios) * (1 - OUTLIERS)))]
    return {kind: middle * float(np.mean(kept)) for kind, middle in middles.items()}


def _middle(seconds: Sequence[float]) -> float:
    ranked, quarter = sorted(seconds), len(seconds) // 4
    return float(np.mean(ranked[quarter : len(ranked) - quarter]))


def _quantiles(ratios: Sequence[float]) -> tuple[float, ...]:
    return tuple(float(each) for each in np.quantile(ratios, QUANTILES))


def _fit(shapes: Sequence[_Shape], names: Sequence[str]) -> tuple[float, dict[str, Curve], Sequence[float]]:
    """Return the fixed seconds, the curves, and measured over predicted seconds of held-out shapes."""
    if len(shapes) < NUM_FOLDS:
        raise ConfigError(f"{len(shapes)} shapes were measured, expected {NUM_FOLDS} or more")
    knots: dict[str, tuple[float, ...]] = dict.fromkeys(names, ())
    ratios = _held_out(shapes, knots)
    while True:
        tried = [knots | {name: own} for name in names for own in _with_another(shapes, knots, names, name)]
        found = [_held_out(shapes, each) for each in tried]
        sizes = list(map(_size, found))
        if not sizes or min(sizes) >= KNOT_GAIN * _size(ratios):
            break
        best = sizes.index(min(sizes))
        knots, ratios = tried[best], found[best]
    solved = _solve(shapes, knots)
    curves, at = {}, 1
    for name, own in knots.items():
        curves[name] = Curve(tuple(solved[at : at + len(own) + 1]), own)
        at += len(own) + 1
    return solved[0], curves, ratios


def _with_another(
    shapes: Sequence[_Shape], knots: Mapping[str, tuple[float, ...]], names: Sequence[str], name: str
) -> list[tuple[float, ...]]:
    """Return the knots of a curve with one more, at each candidate."""
    place, own = list(names).index(name), knots[name]
    values = sorted({shape.quantities[place] for shape in shapes if shape.quantities[place]})
    if len(values) <= 3 or len(own) >= MAX_KNOTS:
        return []
    places = {float(np.quantile(values, at)) for at in KNOT_PLACES} - set(own)
    return [tuple(sorted((*own, each))) for each in sorted(places)]


def _size(ratios: Sequence[float]) -> float:
    """Return the mean size of errors."""
    return float(np.mean(np.abs(np.log(ratios))))


def _held_out(shapes: Sequence[_Shape], knots: Mapping[str, tuple[float, ...]]) -> list[float]:
    """Return measured over predicted seconds of each shape, fitted without its fold."""
    ratios = []
    for fold in range(NUM_FOLDS):
        kept = [shape for at, shape in enumerate(shapes) if at % NUM_FOLDS != fold]
        solved = _solve(kept, knots)
        for shape in shapes[fold::NUM_FOLDS]:
            predicted_s = float(np.dot(_columns(shape, knots), solved))
            ratios.append(shape.seconds / max(predicted_s, 1e-9))
    return ratios


def _columns(shape: _Shape, knots: Mapping[str, tuple[float, ...]]) -> list[float]:
    """Return 1 and the length of each quantity within each segment of its curve."""
    columns = [1.0]
    for value, own in zip(shape.quantities, knots.values(), strict=True):
        for begin, end in pairwise((0.0, *own, math.inf)):
            columns.append(max(0.0, min(value, end) - begin))
    return columns


def _solve(shapes: Sequence[_Shape], knots: Mapping[str, tuple[float, ...]]) -> list[float]:
    """Return the coefficients of `_columns`, by least squares of relative errors."""
    seconds = np.array([shape.seconds for shape in shapes])
    columns = np.array([_columns(shape, knots) for shape in shapes])
    scales = np.maximum(columns.max(axis=0), 1e-12)
    relative = columns / scales / seconds[:, None]
    squares = relative.T @ relative
    squares += np.diag(np.full(len(squares), 1e-9 * squares.trace() / len(squares)))
    solved = solve_nonnegative(squares, relative.sum(axis=0))
    return [float(each) for each in solved / scales]
