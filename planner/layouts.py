"""Layouts of a cluster, and what a rehearsal predicts of them.

`Rehearser` is the Protocol by which the planner rehearses; `QueueModel` implements it by queueing theory
over the
time model of the simulator: microseconds a layout, so that a planner compares dozens of them each tick.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Final, Protocol, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from baton.planner.demand import Mix, Stream
from baton.sim.rehearsal import Machine

Floats: TypeAlias = NDArray[np.float64]


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """A number of workers of each role, and settings that take effect at once."""

    num_prefill: int
    num_decode: int
    local_share: float = 0.0  # of the prompts, computed on their decode worker; 1 without prefill workers
    chunk_tokens: int = 0  # of such a prompt in a decode step; 0: as configured
    shed_share: float = 0.0  # of the requests, of the lowest class first

    @property
    def num_workers(self) -> int:
        """The workers of both roles."""
        return self.num_prefill + self.num_decode


class Objectives(msgspec.Struct, frozen=True, kw_only=True):
    """Latency objectives, and the share of requests that must meet them."""

    ttft_s: float = math.inf
    tpot_s: float = math.inf
    attainment: float = 0.99


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that come at a rate: arrays of one entry a cell of the joint distribution of lengths."""

    rate: Floats  # requests/s
    prompt_tokens: Floats
    cached_tokens: Floats
    output_tokens: Floats
    stream: NDArray[np.int64]  # number of the cell's stream
    streams: tuple[Stream, ...]

    @classmethod
    def of(cls, rates: Mapping[Stream, float], mixes: Mapping[Stream, Mix]) -> "Demand":
        """Join the mixes of all streams at these rates. Streams without a mix are left out."""
        streams = tuple(stream for stream in rates if stream in mixes)
        parts = [mixes[stream] for stream in streams]
        sizes = [len(part.share) for part in parts]
        shares = [rates[stream] * part.share for stream, part in zip(streams, parts, strict=True)]
        return cls(
            rate=np.concatenate([*shares, np.empty(0)]),
            prompt_tokens=np.concatenate([*(part.prompt_tokens for part in parts), np.empty(0)]),
            cached_tokens=np.concatenate([*(part.cached_tokens for part in parts), np.empty(0)]),
            output_tokens=np.concatenate([*(part.output_tokens for part in parts), np.empty(0)]),
            stream=np.repeat(np.arange(len(streams)), sizes),
            streams=streams,
        )

    @property
    def total_rate(self) -> float:
        """Requests/s of all cells."""
        return float(self.rate.sum())


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """The course of a window under one layout."""

    attainment: float  # share of the requests that meet their objectives
    attainment_low: float  # at the high quantile of the demand
    attainment_high: float
    ttft_s: float  # mean
    tpot_s: float  # mean
    prefill_use: float  # share of the prefill workers' time
    decode_use: float  # share of the sequences that decode workers can hold within the objectives
    by_stream: Mapping[Stream, float] = {}  # attainment


class Rehearser(Protocol):
    """Predicts a layout's course under a demand."""

    def rehearse(
        self,
        demand: Demand,
        factors: Sequence[float],
        weights: Sequence[float],
        layout: Layout,
        backlog: float,
    ) -> Prediction:
        """Predict the course of the next minutes.

        factors, weights: multiples of the demand's rates and their probabilities. backlog: requests that
        wait.
        """
        ...


class Room(msgspec.Struct, frozen=True, kw_only=True):
    """The room of a decode worker."""

    num_seqs: int = 256
    num_tokens: int = 1_000_000  # of KV


class QueueModel:
    """Predicts by queueing theory.

    Prompts wait for the first free of c prefill workers. The wait per worker is a Brownian motion that
    cannot fall below 0, with the mean and the variance of the prompts' seconds, over `window_s` seconds:
    this holds beyond saturation, too, where the wait only grows. Decode workers hold a number of sequences
    with the variance of a Poisson process; the step's time follows from the number, and the number from the
    step's time.
    """

    def __init__(self, machine: Machine, room: Room, objectives: Objectives, window_s: float = 240.0) -> None:
        self.machine = machine
        self.room = room
        self.objectives = objectives
        self.window_s = window_s

    def rehearse(
        self,
        demand: Demand,
        factors: Sequence[float],
        weights: Sequence[float],
        layout: Layout,
        backlog: float,
    ) -> Prediction:
        """See Rehearser."""
        probability = np.array(weights)
        keeps = 1.0 - layout.shed_share
        load = np.array(factors)[:, None] * keeps  # [factors, 1]
        in_ttft, wait_s, use = self._prefill(demand, load, layout, backlog * keeps)
        in_tpot, tpot_s, decode_use = self._decode(demand, load[:, 0], layout)
        share = demand.rate / max(demand.total_rate, 1e-12)
        met = in_ttft * in_tpot * keeps  # [factors, cells]
        by_factor = met @ share
        by_cell = probability @ met
        num_streams = len(demand.streams)
        of_stream = np.bincount(demand.stream, share, num_streams)
        met_of_stream = np.bincount(demand.stream, share * by_cell, num_streams)
        return Prediction(
            attainment=float(probability @ by_factor),
            attainment_low=float(by_factor.min()),
            attainment_high=float(by_factor.max()),
            ttft_s=float(probability @ (wait_s @ share)),
            tpot_s=float(probability @ tpot_s),
            prefill_use=float(probability @ use),
            decode_use=float(probability @ decode_use),
            by_stream={
                stream: float(met_of_stream[number] / max(of_stream[number], 1e-12))
                for number, stream in enumerate(demand.streams)
            },
        )

    def compute_s(self, demand: Demand) -> Floats:
        """Return the seconds of each cell's prompt on a prefill worker."""
        machine = self.machine
        new = np.maximum(1.0, demand.prompt_tokens - demand.cached_tokens)
        pairs = new * (demand.prompt_tokens - new / 2)
        return machine.prefill_s + new * machine.prefill_token_s + pairs * machine.prefill_pair_s

    def _prefill(
        self, demand: Demand, load: Floats, layout: Layout, backlog: float
    ) -> tuple[Floats, Floats, Floats]:
        """Return P(TTFT is met) and the mean TTFT, [factors, cells], and the use of workers, [factors]."""
        service_s = self.compute_s(demand)
        rate = load * (1 - self._local_share(layout))
        first = (rate * demand.rate) @ service_s  # [factors], worker-seconds each second
        second = (rate * demand.rate) @ service_s**2
        handoff_s = self.machine.handoff_s
        slack_s = self.objectives.ttft_s - service_s - handoff_s  # [cells]
        if not layout.num_prefill:
            met = (self.objectives.ttft_s >= 1.5 * service_s) * np.ones_like(load)
            return met, service_s * np.ones_like(load), np.zeros(len(load))
        workers = layout.num_prefill
        use, mean_s = first / workers, float(service_s @ demand.rate) / max(demand.total_rate, 1e-12)
        begun_s = backlog * mean_s / workers
        waits = _delayed(workers, use)[:, None]
        met, wait_s = np.zeros((len(load), len(service_s))), np.zeros(len(load))
        for part in (0.5, 1.0):
            passed_s = part * self.window_s
            drift, spread = (use - 1)[:, None], np.sqrt(second)[:, None] / workers
            within = _wait_within(slack_s[None, :], begun_s, drift, spread, passed_s)
            late = 1 - within
            met += 0.5 * np.where(slack_s > 0, 1 - late * np.maximum(waits, min(1.0, begun_s)), 0.0)
            grown = np.maximum(0.0, begun_s + drift[:, 0] * passed_s)
            calm = waits[:, 0] * spread[:, 0] ** 2 / 2 / np.maximum(1e-3, np.abs(drift[:, 0]))
            wait_s += 0.5 * np.maximum(grown, np.minimum(calm, spread[:, 0] * math.sqrt(passed_s)))
        return met, wait_s[:, None] + service_s[None, :] + handoff_s, use

    def _local_share(self, layout: Layout) -> float:
        return layout.local_share if layout.num_prefill else 1.0

    def _decode(self, demand: Demand, load: Floats, layout: Layout) -> tuple[Floats, Floats, Floats]:
        """Return P(TPOT is met), [factors, 1], the mean TPOT and the use, [factors]."""
        machine, room = self.machine, self.room
        workers = max(1e-9, layout.num_decode)
        tokens = load * float(demand.rate @ demand.output_tokens) / workers  # tokens/s a worker
        local = load * float(demand.rate @ self.compute_s(demand)) * self._local_share(layout) / workers
        weight = demand.rate * demand.output_tokens
        context = float(weight @ (demand.prompt_tokens + demand.output_tokens / 2)) / max(weight.sum(), 1e-12)
        sequence_s = machine.step_sequence_s + machine.step_context_s * context
        free = np.maximum(1e-9, 1 - local)  # share of the time that is left of local prompts
        # n sequences make n tokens a step of (step_s + n * sequence_s) / free.
        rest = np.maximum(1e-9, free - tokens * sequence_s)
        num = tokens * machine.step_s / rest
        objective_s = self.objectives.tpot_s
        most = min(room.num_seqs, room.num_tokens / max(1.0, context))
        num_allowed = np.minimum(most, (objective_s * free - machine.step_s) / sequence_s)
        step_s = (machine.step_s + np.minimum(num, most) * sequence_s) / free
        spread = np.sqrt(np.maximum(1.0, num))
        met = np.where(num_allowed > 0, _normal((num_allowed - num) / spread), 0.0)
        met = np.where(local >= 1, 0.0, met)
        return met[:, None], step_s, num / np.maximum(1e-9, num_allowed)


def _delayed(workers: int, use: Floats) -> Floats:
    """Return the probability that all workers are busy, by Sakasegawa's approximation of Erlang's C."""
    delayed: Floats = np.minimum(1.0, use) ** (math.sqrt(2 * (workers + 1)) - 1)
    return delayed


def _wait_within(most_s: Floats, begun_s: float, drift: Floats, spread: Floats, passed_s: float) -> Floats:
    """Return P(wait <= most_s) after `passed_s`, of a Brownian motion that is reflected at 0."""
    deviation = np.maximum(1e-9, spread * math.sqrt(passed_s))
    bound = np.maximum(0.0, most_s)
    direct = _normal((bound - begun_s - drift * passed_s) / deviation)
    exponent = np.clip(2 * drift * bound / np.maximum(1e-12, spread**2), -700, 50)
    mirrored = _normal((-bound - begun_s - drift * passed_s) / deviation)
    return np.clip(direct - np.exp(exponent) * mirrored, 0.0, 1.0)


_GRID: Final = np.linspace(-6, 6, 2401)
_AREA: Final = np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in _GRID])


def _normal(value: Floats) -> Floats:
    """Return the standard normal distribution function."""
    area: Floats = np.interp(value, _GRID, _AREA)
    return area
