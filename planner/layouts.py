"""Predictions of a cluster's latency under a demand, for each layout of its workers.

`Rehearser` is the Protocol of both ways to predict. `QueueModel` uses queueing theory over the time model of
the simulator; it takes microseconds a layout, so the planner compares dozens each tick. `SimRehearser` runs
the simulator, and confirms the layout that the planner has found.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from baton.messages.workers import WorkerRole
from baton.planner.demand import Mix, Stream
from baton.sim.rehearsal import Layout, Rehearsal, RehearsalSettings, rehearse
from baton.sim.timed.times import Machine, StepWork, TimeModel, WorkTimes
from baton.sim.timed.workload import TraceRequest
from baton.tenants import Sla

Floats: TypeAlias = NDArray[np.float64]
Phase: TypeAlias = tuple[Floats, Floats, Floats]  # P(objective met), seconds, use
# The probability that each of demand.LEVELS stands for.
WEIGHTS: Final = (0.2, 0.2, 0.2, 0.2, 0.14, 0.045, 0.015)
REHEARSED_S: Final = 120.0  # of a load, in the simulator
WARM_S: Final = 60.0  # before the load begins: a worker computes the prefix that prompts share
REHEARSED: Final = {"fast": 400, "full": 60}  # requests at most, by the simulator's mode
MOST_USE: Final = 100.0  # in a prediction, when the workers are far from enough
WINDOW_S: Final = 240.0  # over which the wait for prefill workers is predicted
MAX_PHASES: Final = 512  # that are remembered
FITTED_TOKENS: Final = 8192  # of a prompt, at most, in the works that `linear` fits
FITTED_SEQS: Final = 128  # of a decode step, likewise


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
        """Join the mixes of streams at these rates. At least one has a mix; those without are left out."""
        streams = tuple(stream for stream in rates if stream in mixes)
        parts = [mixes[stream] for stream in streams]
        sizes = [len(part.share) for part in parts]
        shares = [rates[stream] * part.share for stream, part in zip(streams, parts, strict=True)]
        return cls(
            rate=np.concatenate(shares),
            prompt_tokens=np.concatenate([part.prompt_tokens for part in parts]),
            cached_tokens=np.concatenate([part.cached_tokens for part in parts]),
            output_tokens=np.concatenate([part.output_tokens for part in parts]),
            stream=np.repeat(np.arange(len(streams)), sizes),
            streams=streams,
        )

    def by_stream(self, values: Floats) -> dict[str, float]:
        """Return the sums of the cells' values, by tenant/class."""
        sums = np.bincount(self.stream, values, len(self.streams)).tolist()
        return dict(zip(map("/".join, self.streams), sums, strict=True))

    @property
    def spread(self) -> float:
        """The mean of the squares of the prompts' lengths, divided by the square of their mean."""
        square = float(self.rate @ self.prompt_tokens**2) * self.total_rate
        return square / max(1e-12, float(self.rate @ self.prompt_tokens)) ** 2 or 1.0

    @property
    def total_rate(self) -> float:
        """Requests/s of all cells."""
        return float(self.rate.sum())


class Outlook(msgspec.Struct, frozen=True, kw_only=True):
    """A forecast that layouts are rehearsed against."""

    demand: Demand
    factors: tuple[float, ...]  # multiples of the demand's rates
    weights: tuple[float, ...] = WEIGHTS  # their probabilities
    backlog: float = 0.0  # requests that wait
    method: str = ""  # of the forecast
    horizon_s: float = 0.0


class LayoutPrediction(msgspec.Struct, frozen=True, kw_only=True):
    """The predicted latency and use of workers under one layout."""

    attainment: float  # share of the requests that meet their objectives
    attainment_low: float  # at the high quantile of the demand
    attainment_high: float
    ttft_s: float  # mean
    tpot_s: float  # mean
    prefill_use: float  # share of the prefill workers' time
    decode_use: float  # share of the sequences that decode workers can hold within the objectives
    by_stream: Mapping[str, float] = {}  # attainment, by tenant/class; streams without load are left out


# The prediction without any request: nothing misses an objective.
IDLE: Final = LayoutPrediction(
    attainment=1.0,
    attainment_low=1.0,
    attainment_high=1.0,
    ttft_s=0.0,
    tpot_s=0.0,
    prefill_use=0.0,
    decode_use=0.0,
)


class Rehearser(Protocol):
    """Predicts the latency of a layout under a demand."""

    def rehearse(self, outlook: Outlook, layout: Layout) -> LayoutPrediction | None:
        """Predict the latency of the next minutes; None: the load is beyond what this rehearser knows."""
        ...


class Room(msgspec.Struct, frozen=True, kw_only=True):
    """The room of a decode worker."""

    num_seqs: int = 256
    num_tokens: int = 1_000_000  # of KV

    def of_lane(self, num_lanes: int) -> "Room":
        """Return the room that each of so many lanes has."""
        return Room(num_seqs=max(1, self.num_seqs // num_lanes), num_tokens=self.num_tokens // num_lanes)


def linear(times: WorkTimes) -> Machine:
    """Return the roofline with the least relative errors, up to FITTED_TOKENS and FITTED_SEQS."""
    works = [
        StepWork(0, 0, new, new * (begun + new / 2))
        for new in _sizes(FITTED_TOKENS)
        for begun in (0, FITTED_TOKENS)
    ]
    works += [
        StepWork(seqs, seqs * context, 0, 0)
        for seqs in _sizes(FITTED_SEQS)
        for context in _sizes(FITTED_TOKENS)
    ]
    taken_s = np.array([times.step_s(work) for work in works])
    rows = [
        (
            *(not each.num_context, each.num_new, each.num_pairs),
            *(each.num_context > 0, each.num_sequences, each.num_context),
        )
        for each in works
    ]
    found = np.linalg.lstsq(np.array(rows, float) / taken_s[:, None], np.ones(len(rows)), rcond=None)[0]
    prefill_s, token_s, pair_s, base_s, sequence_s, context_s = np.maximum(found, 0.0).tolist()
    return Machine(
        prefill_s=prefill_s,
        prefill_token_s=token_s,
        prefill_pair_s=pair_s,
        step_base_s=base_s,
        step_sequence_s=sequence_s,
        step_context_s=context_s,
        kv_token_bytes=times.kv_token_bytes,
        num_stages=times.num_stages,
        exposed_s=times.handoff_s(FITTED_TOKENS // 4),
    )


def _sizes(most: int) -> list[int]:
    return [most // 16, most // 4, most]


class QueueModel:
    """Predicts by queueing theory.

    A prompt waits for the first free prefill worker. The wait per worker is a Brownian motion that cannot
    fall below 0, with the mean and the variance of the prompts' seconds, over WINDOW_S seconds. So it also
    holds beyond saturation, where the wait only grows. The number of decoding sequences has the variance of a
    Poisson process, and each decode worker has an equal part of them. The step's time and the number of
    sequences are solved together: each follows from the other.

    A worker with pipeline stages has a lane for each step in flight. The lanes share the worker's room, and
    compute in parallel.
    """

    def __init__(self, machine: Machine, room: Room, sla: Sla, prefill: Machine | None = None) -> None:
        """machine, room: of decode workers. prefill: the machine of prefill workers; None: the same."""
        self.machine = machine
        self.prefill = prefill or machine
        self.room = room
        self._ttft_s = math.inf if sla.ttft_ms is None else sla.ttft_ms / 1e3
        self._tpot_s = math.inf if sla.tpot_ms is None else sla.tpot_ms / 1e3
        self._phases: dict[tuple[object, ...], tuple[Demand, Phase]] = {}

    def rehearse(
        self, outlook: Outlook, layout: Layout, local_share: float = 0.0, shed_share: float = 0.0
    ) -> LayoutPrediction:
        """See Rehearser.

        local_share: share of the prompts that decode workers compute. shed_share: share of the requests that
        is refused.
        """
        demand, backlog, probability = outlook.demand, outlook.backlog, np.array(outlook.weights)
        if not demand.total_rate:
            return IDLE
        local = local_share if layout.num_prefill else 1.0
        keeps = 1.0 - shed_share
        load = np.array(outlook.factors)[:, None] * keeps  # [factors, 1]
        given = outlook.factors, keeps, local
        in_ttft, wait_s, use = self._once(
            demand,
            ("prefill", layout.num_prefill, backlog, *given),
            lambda: self._prefill(demand, load * (1 - local), layout.num_prefill, backlog * keeps),
        )
        in_tpot, tpot_s, decode_use = self._once(
            demand,
            ("decode", layout.num_decode, *given),
            lambda: self._decode(demand, load[:, 0], layout.num_decode, local),
        )
        share = demand.rate / demand.total_rate
        met = in_ttft * in_tpot * keeps  # [factors, cells]
        by_factor = met @ share
        by_cell = probability @ met
        of_stream = demand.by_stream(share)
        return LayoutPrediction(
            attainment=float(probability @ by_factor),
            attainment_low=float(by_factor.min()),
            attainment_high=float(by_factor.max()),
            ttft_s=float(probability @ (wait_s @ share)),
            tpot_s=float(probability @ tpot_s),
            prefill_use=float(probability @ use),
            decode_use=float(probability @ decode_use),
            by_stream={
                name: value / of_stream[name]
                for name, value in demand.by_stream(share * by_cell).items()
                if of_stream[name]
            },
        )

    def _once(self, demand: Demand, key: tuple[object, ...], predict: Callable[[], Phase]) -> Phase:
        """Return the prediction of one phase, from memory when it was made before."""
        of, phase = self._phases.get((id(demand), *key), (None, None))
        if of is not demand or phase is None:
            if len(self._phases) >= MAX_PHASES:
                self._phases.clear()
            phase = predict()
            self._phases[id(demand), *key] = demand, phase
        return phase

    def work(self, demand: Demand) -> dict[str, float]:
        """Return the workers of both roles that each stream keeps busy, by tenant/class."""
        machine, context = self.machine, demand.prompt_tokens + demand.output_tokens / 2
        room = self.room.of_lane(machine.num_stages)
        together = np.minimum(room.num_seqs, room.num_tokens / np.maximum(1.0, context))
        token_s = machine.step_base_s / together + machine.step_sequence_s + machine.step_context_s * context
        prompt_s = _compute_s(demand, self.prefill) / self.prefill.num_stages
        return demand.by_stream(
            demand.rate * (prompt_s + demand.output_tokens * token_s / machine.num_stages)
        )

    def _prefill(self, demand: Demand, load: Floats, workers: int, backlog: float) -> Phase:
        """Return P(TTFT is met) and the mean TTFT, [factors, cells], and the use of workers, [factors]."""
        machine = self.prefill if workers else self.machine
        service_s, workers = _compute_s(demand, machine), workers * machine.num_stages
        first = (load * demand.rate) @ service_s  # [factors], worker-seconds each second
        second = (load * demand.rate) @ service_s**2
        handoff_s = machine.exposed_s
        slack_s = self._ttft_s - service_s - handoff_s  # [cells]
        if not workers:
            met = (self._ttft_s >= 1.5 * service_s) * np.ones_like(load)
            return met, service_s * np.ones_like(load), np.zeros(len(load))
        use, mean_s = first / workers, float(service_s @ demand.rate) / demand.total_rate
        begun_s = backlog * mean_s / workers
        waits = _delayed(workers, use)[:, None]
        drift, spread = use - 1, np.sqrt(second) / workers
        late, wait_s = np.zeros((len(load), len(service_s))), np.zeros(len(load))
        for passed_s in (0.5 * WINDOW_S, WINDOW_S):
            within = _wait_within(slack_s[None, :], begun_s, drift[:, None], spread[:, None], passed_s)
            late += 0.5 * (1 - within)
            calm = waits[:, 0] * spread**2 / 2 / np.maximum(1e-3, np.abs(drift))
            grown = np.maximum(0.0, begun_s + drift * passed_s)
            wait_s += 0.5 * np.maximum(grown, np.minimum(calm, spread * math.sqrt(passed_s)))
        met = np.where(slack_s > 0, 1 - late * np.maximum(waits, min(1.0, begun_s)), 0.0)
        return met, wait_s[:, None] + service_s[None, :] + handoff_s, use

    def _decode(self, demand: Demand, load: Floats, workers: int, local_share: float) -> Phase:
        """Return P(TPOT is met), [factors, 1], the mean TPOT and the use, [factors]."""
        machine, room = self.machine, self.room.of_lane(self.machine.num_stages)
        workers *= machine.num_stages
        tokens = load * float(demand.rate @ demand.output_tokens) / workers  # tokens/s a worker
        local = load * float(demand.rate @ _compute_s(demand, machine)) * local_share / workers
        weight = demand.rate * demand.output_tokens
        context = float(weight @ (demand.prompt_tokens + demand.output_tokens / 2)) / max(weight.sum(), 1e-12)
        sequence_s = machine.step_sequence_s + machine.step_context_s * context
        free = np.maximum(1e-9, 1 - local)  # share of the time that is left of local prompts
        # n sequences make n tokens a step of (step_s + n * sequence_s) / free.
        rest = np.maximum(1e-9, free - tokens * sequence_s)
        num = tokens * machine.step_base_s / rest
        most = min(room.num_seqs, room.num_tokens / max(1.0, context))
        num_allowed = np.minimum(most, (self._tpot_s * free - machine.step_base_s) / sequence_s)
        step_s = (machine.step_base_s + np.minimum(num, most) * sequence_s) / free
        spread = 1 + np.sqrt(num / workers)  # routers level the workers, so only the sum is random
        met = np.where(num_allowed > 0, _normal((num_allowed - num) / spread), 0.0)
        met = np.where(local >= 1, 0.0, met)
        return met[:, None], step_s, np.minimum(MOST_USE, num / np.maximum(1e-9, num_allowed))


class SimRehearser:
    """Rehearses in the simulator (sim/rehearsal.py), at the LEVELS of a demand that matter.

    The cluster is idle at first, and one worker has the prefix that prompts share. Each prompt begins with as
    many tokens of this prefix as prompts of its length had cached lately.
    """

    def __init__(self, times: TimeModel, sla: Sla, sizes: Mapping[WorkerRole, int], policy: str) -> None:
        """times: of `baton calibrate`. sizes: tensor parallel sizes of the workers, which the times have.
        policy: of routing.
        """
        self._times = times
        self._sizes = sizes
        has_stages = any(times.replicas[size].num_stages > 1 for size in sizes.values())
        self._most = REHEARSED["full" if has_stages else "fast"]
        self._settings = RehearsalSettings(policy=policy, sla=sla, has_intervals=False, num_warmup=1)

    def rehearse(self, outlook: Outlook, layout: Layout) -> LayoutPrediction | None:
        """See Rehearser. None: the load leaves the calibrated ranges. The backlog is not rehearsed."""
        if not outlook.demand.total_rate:
            return IDLE
        factors, edges = outlook.factors, np.cumsum(outlook.weights)
        chosen = (1, len(factors) // 2, len(factors) - 2)
        parts = np.diff([0.0, edges[2], edges[-3], 1.0])
        found = [self._run(outlook.demand, factors[at], layout) for at in chosen]
        runs = [run for run in found if run is not None]
        if len(runs) < len(found):
            return None
        attained = [run.figures["attainment"].value for run in runs]
        middle = runs[1]
        return LayoutPrediction(
            attainment=float(np.dot(parts, attained)),
            attainment_low=min(attained),
            attainment_high=max(attained),
            ttft_s=middle.figures["ttft_p50_ms"].value / 1e3,
            tpot_s=middle.figures["tpot_p50_ms"].value / 1e3,
            prefill_use=middle.busy.get("prefill", 0.0),
            decode_use=middle.busy.get("decode", middle.busy.get("worker", 0.0)),
        )

    def _run(self, demand: Demand, factor: float, layout: Layout) -> Rehearsal | None:
        """Rehearse REHEARSED_S of a demand, in a bounded number of requests; None without figures."""
        random = np.random.default_rng(0)
        rate = max(1e-9, demand.total_rate * factor)
        number = int(min(self._most, max(1.0, rate * REHEARSED_S)))
        cells = random.choice(len(demand.rate), number, p=demand.rate / demand.total_rate)
        arrivals_s = WARM_S + np.cumsum(random.exponential(1 / rate, number))
        requests = _requests(demand, cells.tolist(), arrivals_s.tolist(), self._times.page_size)
        prefill_tp, decode_tp = self._sizes[WorkerRole.PREFILL], self._sizes[WorkerRole.DECODE]
        layout = msgspec.structs.replace(layout, prefill_tp=prefill_tp, decode_tp=decode_tp)
        result = rehearse(requests, layout, self._times, self._settings)
        return result if result.is_valid and "attainment" in result.figures else None


def _requests(
    demand: Demand, cells: Sequence[int], arrivals_s: Sequence[float], page_size: int
) -> list[TraceRequest]:
    """Return a request of each cell, after one that has the pages which all prompts begin with."""
    prompts, outputs = (
        np.maximum(1, np.rint([demand.prompt_tokens, demand.output_tokens])).astype(int).tolist()
    )
    num_shared = (demand.cached_tokens // page_size).astype(int).tolist()  # pages
    most = max(num_shared[cell] for cell in cells)
    num_ids = most + 1
    requests = [
        TraceRequest(
            arrival_s=0.0,
            input_tokens=most * page_size + 1,
            output_tokens=1,
            block_ids=tuple(range(most + 1)),
            block_tokens=page_size,
        )
    ]
    for at_s, cell in zip(arrivals_s, cells, strict=True):
        begin, shared = num_ids, num_shared[cell]
        num_ids += -(-prompts[cell] // page_size) - shared
        requests.append(
            TraceRequest(
                arrival_s=at_s,
                input_tokens=prompts[cell],
                output_tokens=outputs[cell],
                block_ids=(*range(shared), *range(begin, num_ids)),
                block_tokens=page_size,
            )
        )
    return requests


def _compute_s(demand: Demand, machine: Machine) -> Floats:
    """Return the seconds of each cell's prompt on a worker."""
    new = np.maximum(1.0, demand.prompt_tokens - demand.cached_tokens)
    pairs = new * (demand.prompt_tokens - new / 2)
    return machine.prefill_s + new * machine.prefill_token_s + pairs * machine.prefill_pair_s


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
