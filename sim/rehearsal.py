"""Rehearsals: what a cluster would do with a load, by the production code and the times of real workers.

    times = TimeModel.read(Path("times.json"))  # of `baton calibrate`
    result = rehearse(synthetic(4.0, 60.0, lengths), Layout.parse("2P6D"), times)
    if result.is_valid:
        result.figures["ttft_p90_ms"].value

`rehearse` is pure: the same arguments give the same figures. It has two modes:

- `fast` (sim/timed/fast.py) sums the steps of a batch between two events in closed form. A DirectRouter runs
  production's rules and policy, without queues of tenants and messages.
- `full` (sim/timed/full.py) runs the whole production control plane, step by step.

Each figure has an interval: the cluster is rehearsed, in the fast mode, with all work as long as predicted,
shorter and longer by the error of the time model, and the requests of all three are drawn anew in blocks.
The interval of the attainment is at least as wide as Wilson's for this number of requests.
A rehearsal that spends more than TOLERATED of its time outside of the calibrated ranges has no figures.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from re import fullmatch
from statistics import NormalDist
from typing import Final, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np

from baton.config.router import RouterConfig
from baton.errors import ConfigError
from baton.messages.bounds import SHORT_KEY_BYTES
from baton.messages.workers import WorkerRole
from baton.request import TOKEN_ID_BYTES, TokenIds
from baton.sim.timed.fast import FastCluster
from baton.sim.timed.fleet import BODY_S, CallOutcome, ClientCall, Fleet
from baton.sim.timed.times import Contention, FittedTimes, TimeModel, Validity
from baton.sim.timed.workload import TraceRequest, page_keys, tokens_of
from baton.tenants import Sla

Mode: TypeAlias = Literal["fast", "full"]
NUM_HOPS: Final = 3  # gateway, router, worker, gateway
PERCENTILES: Final = (50, 90)
NUM_DRAWS: Final = 200  # of the requests, for an interval
BLOCK: Final = 16  # consecutive requests that are drawn together: they wait for each other
CONFIDENCE: Final = 0.9
LEAST_ERROR: Final = 0.02  # of a time model: figures of other runs differ by as much
MAX_ATTEMPTS: Final = 2**20


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """The workers of a cluster, and the settings that a search varies. None: as the time model's worker."""

    num_prefill: int  # 0: workers compute the prompts that they answer
    num_decode: int
    prefill_tp: int = 1  # ranks of each worker
    decode_tp: int = 1
    prefill_pp: int = 1  # pipeline stages of each worker
    decode_pp: int = 1
    step_tokens: int | None = None  # scheduler.max_num_batched_tokens
    page_size: int | None = None

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """Read 2P6D, or 4M for workers without roles. ConfigError for others."""
        pair, alone = fullmatch(r"(\d{1,4})[Pp](\d{1,4})[Dd]", text), fullmatch(r"(\d{1,4})[Mm]", text)
        numbers = [int(each) for each in pair.groups()] if pair else [0, int(alone[1])] if alone else []
        if not numbers or numbers[1] < 1:
            raise ConfigError(
                "workers: expected such as 2P6D, or 4M for workers without roles, and at most 9,999 workers "
                f"of a role, got {text!r}"
            )
        return cls(num_prefill=numbers[0], num_decode=numbers[1])

    @property
    def name(self) -> str:
        """The layout as text, with the settings that are not the usual ones."""
        roles = f"{self.num_prefill}P{self.num_decode}D" if self.num_prefill else f"{self.num_decode}M"
        more = {"step of": self.step_tokens, "page": self.page_size}
        told = [f"{name} {value}" for name, value in more.items() if value is not None]
        if self.prefill_pp > 1 and self.num_prefill:
            told.insert(0, f"prefill PP {self.prefill_pp}")
        if self.decode_pp > 1:
            told.insert(0, f"PP {self.decode_pp}")
        if self.prefill_tp > 1 and self.num_prefill:
            told.insert(0, f"prefill TP {self.prefill_tp}")
        if self.decode_tp > 1:
            told.insert(0, f"TP {self.decode_tp}")
        return ", ".join([roles, *told])

    @property
    def num_workers(self) -> int:
        """The number of workers."""
        return self.num_prefill + self.num_decode

    @property
    def num_ranks(self) -> int:
        """The number of devices."""
        prefill, decode = self.prefill_tp * self.prefill_pp, self.decode_tp * self.decode_pp
        return self.num_prefill * prefill + self.num_decode * decode

    @property
    def has_stages(self) -> bool:
        """True when workers are pipelines of several stages."""
        return max(self.prefill_pp, self.decode_pp) > 1

    def with_stages(self, times: TimeModel) -> "Layout":
        """Return the layout with as many pipeline stages as the calibrated workers have."""
        stages = {size: each.num_stages for size, each in times.replicas.items()}
        return msgspec.structs.replace(
            self, prefill_pp=stages.get(self.prefill_tp, 1), decode_pp=stages.get(self.decode_tp, 1)
        )


class RehearsalSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a rehearsal."""

    mode: Mode = "fast"
    policy: str = RouterConfig().policy
    sla: Sla = Sla()  # objectives that goodput counts
    shares_machine: bool = True  # all workers run on one machine, as the calibrated ones
    has_intervals: bool = True
    num_warmup: int = 0  # first requests, which no latency counts: they fill the prefix caches
    seed: int = 0


_DEFAULT: Final = RehearsalSettings()
_NO_LATENCY: Final = {f"{name}_p{at}_ms": 0.0 for name in ("ttft", "tpot", "e2el") for at in PERCENTILES}


class Figure(NamedTuple):
    """A predicted figure and its interval, which has the truth with CONFIDENCE."""

    value: float
    low: float
    high: float


class Rehearsal(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a rehearsal. Without validity there are no figures."""

    layout: Layout
    mode: Mode
    num_requests: int
    num_refused: int = 0
    duration_s: float = 0.0  # virtual, from the first arrival to the last end
    # ttft, tpot (0 where all answers have one token) and e2el by PERCENTILES as "ttft_p50_ms";
    # output_tokens_per_s, requests_per_s; goodput_requests_per_s and attainment (0 to 1) for objectives.
    figures: dict[str, Figure] = {}
    parts: dict[str, float] = {}  # mean seconds of a request, by the parts of its timeline
    busy: dict[str, float] = {}  # share of time that workers compute, by role
    complaints: tuple[str, ...] = ()  # why the figures would be worthless

    @property
    def is_valid(self) -> bool:
        """True when there are figures."""
        return not self.complaints


class Course(NamedTuple):
    """One simulated run: milliseconds and tokens of each answered request, by arrival."""

    ttft_ms: np.ndarray
    tpot_ms: np.ndarray  # nan for answers of one token
    e2el_ms: np.ndarray
    num_tokens: np.ndarray
    duration_s: float
    num_refused: int
    parts: dict[str, float]
    busy: dict[str, float]


def rehearse(
    trace: Sequence[TraceRequest], layout: Layout, times: TimeModel, settings: RehearsalSettings = _DEFAULT
) -> Rehearsal:
    """Rehearse a load on a layout. ConfigError for an empty trace, and for ranks that were not calibrated.

    Workers have as many pipeline stages as the calibrated ones. With several the mode is full, because the
    fast mode has one step of a worker at a time.
    """
    if not trace:
        raise ConfigError("the trace has no request")
    layout = layout.with_stages(times)
    if layout.has_stages:
        settings = msgspec.structs.replace(settings, mode="full")
    validity = Validity()
    course = _run(trace, layout, times, settings, 1.0, validity)
    complaints = (*_neighbour_complaints(layout, times, settings), *validity.complaints)
    result = Rehearsal(layout=layout, mode=settings.mode, num_requests=len(trace), complaints=complaints)
    if complaints or not len(course.ttft_ms):
        none = () if complaints else ("no request was answered",)
        return msgspec.structs.replace(
            result, complaints=(*complaints, *none), num_refused=course.num_refused
        )
    courses = []
    if settings.has_intervals:
        error, mode = max(LEAST_ERROR, times.error), "full" if layout.has_stages else "fast"
        quick = msgspec.structs.replace(settings, mode=mode)
        for scale in (1.0, 1 / (1 + error), 1 + error):
            is_known = scale == 1.0 and settings.mode == mode
            courses.append(course if is_known else _run(trace, layout, times, quick, scale, Validity()))
    return msgspec.structs.replace(
        result,
        num_refused=course.num_refused,
        duration_s=course.duration_s,
        figures=_figures(course, courses, settings),
        parts=course.parts,
        busy=course.busy,
    )


def rehearse_each(
    trace: Sequence[TraceRequest], layout: Layout, times: TimeModel, settings: RehearsalSettings = _DEFAULT
) -> Course:
    """Rehearse once, and return the latencies of each answered request, also outside of calibrated ranges."""
    return _run(trace, layout, times, settings, 1.0, Validity())


def _neighbour_complaints(layout: Layout, times: TimeModel, settings: RehearsalSettings) -> list[str]:
    most = len(times.neighbours)
    if not settings.shares_machine or not most or layout.num_workers <= most:
        return []
    return [f"{layout.num_workers} workers share the machine, calibrated to {most}"]


def _run(
    trace: Sequence[TraceRequest],
    layout: Layout,
    times: TimeModel,
    settings: RehearsalSettings,
    scale: float,
    validity: Validity,
) -> Course:
    """Simulate a trace with all work `scale` times as long."""
    page_size = layout.page_size or times.page_size
    config = RouterConfig(policy=settings.policy, seed=settings.seed, max_attempts=MAX_ATTEMPTS)
    prefill_tp = layout.prefill_tp if layout.num_prefill else layout.decode_tp
    sizes = {WorkerRole.PREFILL: prefill_tp, WorkerRole.DECODE: layout.decode_tp}
    by_role = {role: FittedTimes(times, size, validity, scale) for role, size in sizes.items()}
    contention = Contention(times, shares_machine=settings.shares_machine, validity=validity)
    arguments = config, _fleet(layout, times, page_size), by_role, page_size
    if settings.mode == "fast":
        cluster = FastCluster(*arguments, seed=settings.seed, contention=contention, is_direct=True)
        outcomes = cluster.run(_fast_calls(trace, page_size))[settings.num_warmup :]
        busy_s = {worker.worker.name: worker.busy_s for worker in cluster.workers.values()}
        return _course(outcomes, layout, busy_s, cluster.parts, NUM_HOPS * BODY_S)
    from baton.sim.timed.full import FullCluster  # torch, which the fast mode and --help do not wait for

    full = FullCluster(*arguments, seed=settings.seed, contention=contention)
    outcomes = full.run(
        ClientCall(at_s=each.arrival_s, token_ids=tokens_of(each, number), num_answered=each.output_tokens)
        for number, each in enumerate(trace)
    )
    return _course(outcomes[settings.num_warmup :], layout, full.busy_s, full.parts)


def _fleet(layout: Layout, times: TimeModel, page_size: int) -> Fleet:
    scheduler, keeps = times.engine.scheduler, times.engine.cache.enable_prefix_caching
    step_tokens = layout.step_tokens or scheduler.max_num_batched_tokens
    num_tokens = {size: each.num_pages * times.page_size for size, each in times.replicas.items()}
    return Fleet(
        num_prefill=layout.num_prefill,
        num_decode=layout.num_decode,
        num_prefill_pages=num_tokens.get(layout.prefill_tp, 0) // page_size,
        num_decode_pages=num_tokens.get(layout.decode_tp, 0) // page_size,
        num_decode_seqs=scheduler.max_num_seqs,
        prefill_keeps=keeps,
        decode_keeps=keeps,
        prefill_budget=step_tokens,
        decode_budget=step_tokens,
        max_model_len=times.max_model_len,
    )


@cache
def _zeros(num_tokens: int) -> TokenIds:
    return TokenIds(bytes(TOKEN_ID_BYTES * num_tokens))


def _fast_calls(trace: Sequence[TraceRequest], page_size: int) -> Iterator[ClientCall]:
    """Yield calls with keys of the pages that several prompts begin with; others are only counted."""
    shared = _shared_keys(trace, page_size)
    for number, each in enumerate(trace):
        keys = shared.get(number, b"")
        yield ClientCall(
            at_s=each.arrival_s,
            token_ids=_zeros(each.input_tokens),
            num_answered=each.output_tokens,
            max_tokens=each.output_tokens,
            page_keys=keys,
            num_more_pages=each.input_tokens // page_size - len(keys) // SHORT_KEY_BYTES,
        )


def _shared_keys(trace: Sequence[TraceRequest], page_size: int) -> dict[int, bytes]:
    """Return the keys of the leading pages that a prompt shares with others, by the prompt's number."""
    begins = [each.block_ids[0] if each.block_ids else -1 - number for number, each in enumerate(trace)]
    num_alike = Counter(begins)
    keys = {
        number: np.frombuffer(page_keys(each, page_size, number), np.uint64)
        for number, each in enumerate(trace)
        if num_alike[begins[number]] > 1
    }
    if not keys:
        return {}
    _, places, counts = np.unique(
        np.concatenate(list(keys.values())), return_inverse=True, return_counts=True
    )
    is_shared, end, found = counts[places] > 1, 0, {}
    for number, own in keys.items():
        begin, end = end, end + len(own)
        shared = np.flatnonzero(is_shared[begin:end])
        if len(shared):
            found[number] = own[: int(shared[-1]) + 1].tobytes()
    return found


def _course(
    outcomes: Sequence[CallOutcome],
    layout: Layout,
    busy_s: Mapping[str, float],
    parts: Mapping[str, float],
    hops_s: float = 0.0,
) -> Course:
    """Return the latencies of the answered requests, with what no step has.

    hops_s: of messages until a first token, where the simulation sends none.
    """
    answered = [each for each in outcomes if each.ended_s >= 0]
    num_tokens = np.array([each.call.num_answered for each in answered], float)
    asked_s, first_s, ended_s, way_s, first_wait_s, last_wait_s = (
        np.array([getattr(each, name) for each in answered], float)
        for name in ("asked_s", "first_token_s", "ended_s", "way_s", "first_wait_s", "last_wait_s")
    )
    num_later = np.where(num_tokens > 1, num_tokens - 1, np.nan)
    first_s, ended_s = first_s + first_wait_s, ended_s + last_wait_s
    ttft_s = first_s - asked_s + way_s + hops_s
    later_s = ended_s - first_s
    duration_s = float(ended_s.max() - min(each.asked_s for each in outcomes)) if answered else 0.0
    roles = {name: name.rpartition("-")[0] if layout.num_prefill else "worker" for name in busy_s}
    busy = {
        role: float(np.mean([busy_s[name] for name in busy_s if roles[name] == role])) / max(duration_s, 1e-9)
        for role in dict.fromkeys(roles.values())
    }
    return Course(
        ttft_ms=1e3 * ttft_s,
        tpot_ms=1e3 * later_s / num_later,
        e2el_ms=1e3 * (ttft_s + later_s),
        num_tokens=num_tokens,
        duration_s=duration_s,
        num_refused=len(outcomes) - len(answered),
        parts={name: seconds / max(1, len(answered)) for name, seconds in parts.items()},
        busy=busy,
    )


def _figures(course: Course, others: Sequence[Course], settings: RehearsalSettings) -> dict[str, Figure]:
    """Return each figure of a course.

    others: three courses in the quickest mode, with predicted, shorter and longer work. The interval is the
    spread of their draws, relative to the first of them.
    """
    whole = _NO_LATENCY | _values(course, np.arange(len(course.ttft_ms)), settings.sla)
    if not others:
        return {name: Figure(value, value, value) for name, value in whole.items()}
    base = _values(others[0], np.arange(len(others[0].ttft_ms)), settings.sla)
    drawn: dict[str, list[float]] = {name: [] for name in whole}
    random, rest = np.random.default_rng(settings.seed), (1 - CONFIDENCE) / 2
    for other in others:
        for _ in range(NUM_DRAWS):
            for name, value in _values(other, _draw(random, len(other.ttft_ms)), settings.sla).items():
                drawn.setdefault(name, []).append(value)
    figures = {}
    for name, value in whole.items():
        low, high = np.quantile(drawn[name] or [base.get(name, value)], (rest, 1 - rest))
        ratio = value / base[name] if base.get(name) else 1.0
        figures[name] = Figure(value, min(value, float(low) * ratio), max(value, float(high) * ratio))
    if (attained := figures.get("attainment")) is not None:
        low, high = _wilson(attained.value, len(course.ttft_ms) + course.num_refused)
        figures["attainment"] = Figure(
            attained.value, min(low, attained.low), max(high, min(1.0, attained.high))
        )
    return figures


def _wilson(share: float, number: int) -> tuple[float, float]:
    """Return Wilson's interval of a share: draws of requests that all met have no width."""
    normal = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    spread = normal**2 / number
    middle = (share + spread / 2) / (1 + spread)
    half = math.sqrt(share * (1 - share) * spread + spread**2 / 4) / (1 + spread)
    return max(0.0, middle - half), min(1.0, middle + half)


def _draw(random: np.random.Generator, number: int) -> np.ndarray:
    """Draw as many requests, in blocks of consecutive ones."""
    size = min(BLOCK, max(1, number // 8))
    begins = random.integers(0, number - size + 1, -(-number // size))
    return (begins[:, None] + np.arange(size)).ravel()[:number]


def _values(course: Course, chosen: np.ndarray, sla: Sla) -> dict[str, float]:
    ttft_ms, tpot_ms, e2el_ms = course.ttft_ms[chosen], course.tpot_ms[chosen], course.e2el_ms[chosen]
    several = tpot_ms[~np.isnan(tpot_ms)]
    figures: dict[str, float] = {}
    for name, values in (("ttft", ttft_ms), ("tpot", several), ("e2el", e2el_ms)):
        if len(values):
            cuts = np.percentile(values, PERCENTILES)
            figures |= {f"{name}_p{at}_ms": float(cut) for at, cut in zip(PERCENTILES, cuts, strict=True)}
    duration_s = max(course.duration_s, 1e-9)
    figures["output_tokens_per_s"] = float(course.num_tokens[chosen].sum()) / duration_s
    figures["requests_per_s"] = len(chosen) / duration_s
    if sla.ttft_ms is not None or sla.tpot_ms is not None:
        is_good = np.ones(len(chosen), bool)
        if sla.ttft_ms is not None:
            is_good &= ttft_ms <= sla.ttft_ms
        if sla.tpot_ms is not None:
            is_good &= ~(tpot_ms > sla.tpot_ms)
        figures["goodput_requests_per_s"] = float(is_good.sum()) / duration_s
        figures["attainment"] = float(is_good.sum()) / (len(chosen) + course.num_refused)
    return figures
