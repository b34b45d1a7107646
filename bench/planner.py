"""The planner on traces, against a static cluster, threshold scaling and an oracle in hindsight.

Each trace runs through bench/elastic.py under each policy, with the time model of a 70B model on eight A800.
A worker is paid for from its order to its end, start-up included. `static` is the smallest fixed layout that
meets the objectives. `threshold` scales each role by its use as a horizontal pod autoscaler does, at the
best of four thresholds. `reactive` knows exactly the work of each minute that has passed, and nothing of
later minutes; its margin, and the time for which it keeps workers, are the best of several. An objective that
it misses cannot be met without a forecast. `oracle` knows all arrivals: it orders workers ahead of need, and
keeps a worker through a gap that is shorter than a start-up. Traces of files are superposed on themselves so
that they need about ten workers.
"""

import math
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from copy import copy, deepcopy
from functools import partial
from itertools import product, takewhile
from pathlib import Path
from random import Random
from typing import Final, NamedTuple

import numpy as np

from baton.bench.elastic import ElasticCall, ElasticFleet
from baton.bench.report import Report, Row, at_least, at_most, option, suite
from baton.config.planner import PlannerConfig
from baton.messages.status import StreamCounts
from baton.planner.demand import Stream
from baton.planner.layouts import QueueModel, Room
from baton.planner.planner import Figures, Planner, ScalingPlan
from baton.sim.rehearsal import Layout
from baton.sim.timed.times import Machine
from baton.sim.timed.workload import read_trace
from baton.tenants import Sla

INTERVAL_S: Final = 30.0
GOAL: Final = 0.99
MAX_WORKERS: Final = 64
MACHINE: Final = Machine()
ROOM: Final = Room()
THRESHOLDS: Final = (0.5, 0.6, 0.7, 0.8)
MARGINS: Final = (1.0, 1.15, 1.3)  # workers over the work that is known
KEPT_S: Final = (300.0, 1800.0, math.inf)  # how long workers that were needed are kept
KNOWN_S: Final = 60.0  # the work of each stretch of this length is known when it has passed
POLICIES: Final = ("static", "threshold", "reactive", "planner")  # beside the oracle
STABLE_S: Final = 300.0  # the time for which a pod autoscaler keeps the most that it has wanted


class Workload(NamedTuple):
    """A trace, of which every run has a copy, and its objectives."""

    name: str
    calls: list[ElasticCall]
    ttft_s: float
    tpot_s: float
    startup_s: float = 120.0


class Result(NamedTuple):
    """The course of one run."""

    worker_h: float
    attainment: float
    actions_an_hour: float
    plans: list[ScalingPlan]
    by_tenant: dict[str, float]  # attainment


# Decides at each tick: the moment, the fleet -> prefill and decode workers to order, or None for no change.
Policy = Callable[[float, ElasticFleet], tuple[int, int] | None]


def simulate(
    workload: Workload, begin: tuple[int, int], policy: Policy, startup_s: float | None = None
) -> Result:
    """Run a workload under a policy, from `begin` prefill and decode workers on."""
    calls, random = [copy(call) for call in workload.calls], Random(1)
    mean_s = workload.startup_s if startup_s is None else startup_s
    fleet = ElasticFleet(
        MACHINE,
        *begin,
        startup_s=lambda: mean_s * random.uniform(0.85, 1.15),
        max_seqs=ROOM.num_seqs,
        max_tokens=ROOM.num_tokens,
    )
    feed = getattr(policy, "ended", lambda call: None)

    def control(now_s: float) -> None:
        if now_s > calls[-1].at_s:
            return
        order = policy(now_s, fleet)
        if order is not None:
            fleet.scale(*order)

    fleet.run(calls, control, every_s=INTERVAL_S, ended=feed)
    met: dict[str, list[bool]] = {}
    for call in calls:
        is_met = call.meets(workload.ttft_s, workload.tpot_s)
        met.setdefault(call.tenant, []).append(is_met)
    by_tenant = {tenant: sum(each) / len(each) for tenant, each in met.items()}
    attainment = sum(map(sum, met.values())) / len(calls)
    hours = fleet.events.now_s / 3600
    plans = getattr(policy, "plans", [])
    return Result(
        worker_h=fleet.paid_s / 3600,
        attainment=attainment,
        actions_an_hour=fleet.num_orders / hours,
        plans=plans,
        by_tenant=by_tenant,
    )


class Planned:
    """The planner as a policy."""

    def __init__(
        self, workload: Workload, lost_s: tuple[float, float] = (0.0, 0.0), **settings: object
    ) -> None:
        """lost_s: the beginning and the end of a time without metrics."""
        config = PlannerConfig(
            **{"interval_s": INTERVAL_S, "max_workers": MAX_WORKERS, "max_change": 16, "attainment": GOAL}
            | {"startup_s": workload.startup_s}
            | settings  # type: ignore[arg-type]
        )
        self.plans: list[ScalingPlan] = []
        self._ttft_s, self._tpot_s = workload.ttft_s, workload.tpot_s
        self._lost_s = lost_s
        sla = Sla(ttft_ms=1e3 * workload.ttft_s, tpot_ms=1e3 * workload.tpot_s)
        self._planner = Planner(config, QueueModel(MACHINE, ROOM, sla))
        self._to_come = deque(workload.calls)
        self._num_startups = 0
        self._counts: dict[Stream, StreamCounts] = {}

    def ended(self, call: ElasticCall) -> None:
        """Count a request that has ended."""
        counts = self._counts_of(call)
        counts.end(call.prompt_tokens, call.cached_tokens, call.output_tokens)
        is_met = call.meets(self._ttft_s, self._tpot_s)
        counts.num_met += is_met
        counts.num_missed += not is_met

    def _counts_of(self, call: ElasticCall) -> StreamCounts:
        return self._counts.setdefault(Stream(call.tenant), StreamCounts(arrived={}, ended={}))

    def __call__(self, now_s: float, fleet: ElasticFleet) -> tuple[int, int] | None:
        while self._to_come and self._to_come[0].at_s <= now_s:
            call = self._to_come.popleft()
            self._counts_of(call).arrive(call.prompt_tokens)
        is_lost = self._lost_s[0] <= now_s < self._lost_s[1]
        figures = Figures(
            counts={} if is_lost else {"gateway": deepcopy(self._counts)},
            num_gateways=1,
            ordered=Layout(num_prefill=fleet.number("prefill"), num_decode=fleet.number("decode")),
            ready=Layout(
                num_prefill=fleet.number("prefill", only_ready=True),
                num_decode=fleet.number("decode", only_ready=True),
            ),
            startups_s=tuple(fleet.startups_s[self._num_startups :]),
            num_queued=fleet.num_waiting,
        )
        self._num_startups = len(fleet.startups_s)
        plan = self._planner.plan(now_s, figures)
        self.plans.append(plan)
        target = plan.target.num_prefill, plan.target.num_decode
        return None if target == (figures.ordered.num_prefill, figures.ordered.num_decode) else target


class Threshold:
    """Scales each role so that its use is near a threshold, as a horizontal pod autoscaler does."""

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._before = {"prefill": 0.0, "decode": 0.0}
        self._wanted: list[tuple[float, dict[str, int]]] = []

    def __call__(self, now_s: float, fleet: ElasticFleet) -> tuple[int, int] | None:
        wanted = {}
        for role, busy_s in fleet.busy_s.items():
            number = fleet.number(role)
            ready = max(1, fleet.number(role, only_ready=True))
            use = (busy_s - self._before[role]) / INTERVAL_S / ready
            ratio = use / self._threshold
            wanted[role] = number if abs(ratio - 1) < 0.1 else max(1, math.ceil(ready * ratio))
            self._before[role] = busy_s
        self._wanted = [(at_s, each) for at_s, each in self._wanted if at_s > now_s - STABLE_S]
        self._wanted.append((now_s, wanted))
        most = {role: max(each[role] for _, each in self._wanted) for role in wanted}
        numbers = [
            wanted[role] if wanted[role] > fleet.number(role) else min(fleet.number(role), most[role])
            for role in ("prefill", "decode")
        ]
        return numbers[0], numbers[1]


def static(workload: Workload) -> tuple[tuple[int, int], Result]:
    """Return the smallest fixed layout that meets the objectives, and its course."""

    def run(prefill: int, decode: int) -> Result:
        return simulate(workload, (prefill, decode), lambda now_s, fleet: None)

    decode = _least(
        lambda number: run(MAX_WORKERS, number).attainment >= GOAL + 0.3 * (1 - GOAL), low=1, high=16
    )
    prefill = _least(lambda number: run(number, decode).attainment >= GOAL, low=1, high=MAX_WORKERS)
    return (prefill, decode), run(prefill, decode)


def _least(is_enough: Callable[[int], bool], low: int, high: int) -> int:
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle + 1, high)
    return low


def best_of(results: Iterable[Result]) -> Result:
    """Return the cheapest result that attains the goal; the one that attains most where none does."""
    return max(results, key=lambda result: (min(result.attainment, GOAL), -result.worker_h))


class PastWork:
    """Orders workers for the largest work of any recent minute. Each past minute is known exactly."""

    def __init__(self, workload: Workload, margin: float, kept_s: float) -> None:
        """margin: workers over the work. kept_s: how far back a minute is recent."""
        self._work = _work(workload, KNOWN_S)
        self._margin, self._kept_s = margin, kept_s

    def __call__(self, now_s: float, fleet: ElasticFleet) -> tuple[int, int] | None:
        end = int((now_s + 1e-6) / KNOWN_S)
        known = slice(end - int(min(now_s, self._kept_s) / KNOWN_S), end)
        if known.start >= end:
            return None
        prefill, decode = (max(1, math.ceil(each[known].max() * self._margin)) for each in self._work)
        return prefill, decode


def oracle(workload: Workload) -> Result:
    """Return the course of the cheapest schedule found in hindsight."""
    return min(
        (_scheduled(workload, bin_s) for bin_s in (60.0, 120.0, 300.0)), key=lambda result: result.worker_h
    )


def _scheduled(workload: Workload, bin_s: float) -> Result:
    prefill, decode = _work(workload, bin_s)

    def run(prefill_room: float, decode_room: float) -> Result:
        steps = [
            _closed(np.maximum(1, np.ceil(work * room)).astype(int), gap=round(workload.startup_s / bin_s))
            for work, room in ((prefill, prefill_room), (decode, decode_room))
        ]

        def policy(now_s: float, fleet: ElasticFleet) -> tuple[int, int] | None:
            at = min(len(steps[0]) - 1, int((now_s + 1e-6) / bin_s))
            return int(steps[0][at]), int(steps[1][at])

        begin = int(steps[0][0]), int(steps[1][0])
        result = simulate(workload, begin, policy, startup_s=0.0)
        num_started = sum(int(np.maximum(0, np.diff(each)).sum()) for each in steps)
        started_h = num_started * workload.startup_s / 3600
        return result._replace(worker_h=result.worker_h + started_h)

    def least(run_at: Callable[[float], Result], goal: float) -> float:
        low, high = 0.8, 3.0
        for _ in range(6):
            middle = (low + high) / 2
            low, high = (low, middle) if run_at(middle).attainment >= goal else (middle, high)
        return high

    decode_room = least(lambda room: run(4.0, room), GOAL + 0.3 * (1 - GOAL))
    prefill_room = least(lambda room: run(room, decode_room), GOAL)
    return run(prefill_room, decode_room)


def _work(workload: Workload, bin_s: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the prefill and decode workers that each bin keeps busy."""
    num_bins = int(workload.calls[-1].at_s / bin_s) + 2
    prefill, decode = np.zeros(num_bins), np.zeros(num_bins)
    tpot_s = min(workload.tpot_s, 0.2)
    for call in workload.calls:
        at = int(call.at_s / bin_s)
        prefill[at] += (
            MACHINE.compute_s(max(1, call.prompt_tokens - call.cached_tokens), call.prompt_tokens) / bin_s
        )
        context = call.prompt_tokens + call.output_tokens / 2
        sequence_s = MACHINE.step_sequence_s + MACHINE.step_context_s * context
        allowed = min(ROOM.num_seqs, ROOM.num_tokens / context, (tpot_s - MACHINE.step_base_s) / sequence_s)
        share = call.output_tokens * (MACHINE.step_base_s + allowed * sequence_s) / max(1.0, allowed) / bin_s
        spread = max(1, math.ceil(call.output_tokens * tpot_s / bin_s))
        for later in range(spread):
            decode[min(num_bins - 1, at + later)] += share / spread
    return prefill, decode


def _closed(numbers: np.ndarray, gap: int) -> np.ndarray:
    """Fill gaps of at most `gap` bins: ending a worker and starting it again costs as much."""
    if gap < 1:
        return numbers
    size = len(numbers)
    dilated = np.array([numbers[max(0, at - gap) : at + 1].max() for at in range(size)])
    return np.array([dilated[at : min(size, at + gap + 1)].min() for at in range(size)])


# Workloads.


def made(
    name: str,
    hours: float,
    rate: Callable[[float], float],
    seed: int,
    prompt: Callable[[float], float] = lambda at_s: 16_000.0,
    tenant: Callable[[float, Random], str] = lambda at_s, random: "",
    startup_s: float = 120.0,
) -> Workload:
    """Return Poisson arrivals at `rate(at_s)`, with log-normal lengths around `prompt(at_s)` and 600."""
    random, calls, now_s = Random(seed), list[ElasticCall](), 0.0
    most = max(rate(at_s) for at_s in range(0, round(hours * 3600), 10))
    while now_s < hours * 3600:
        now_s += random.expovariate(most)
        if random.random() * most > rate(now_s):
            continue
        whose = tenant(now_s, random)
        mean = prompt(now_s) * (0.25 if whose == "chat" else 1.0)
        tokens = max(16, round(random.lognormvariate(math.log(mean), 0.5)))
        calls.append(
            ElasticCall(
                at_s=now_s,
                prompt_tokens=tokens,
                cached_tokens=round(tokens * random.uniform(0.0, 0.6)),
                output_tokens=max(2, round(random.lognormvariate(math.log(600.0), 0.6))),
                tenant=whose,
            )
        )
    return Workload(name, calls, ttft_s=15.0, tpot_s=0.05, startup_s=startup_s)


def synthetic(seed: int) -> Iterator[tuple[str, Callable[[], Workload]]]:
    """Yield six synthetic workloads by name, the diurnal workload with two start-up times."""
    day, hour = 86_400.0, 3600.0

    def diurnal(at_s: float) -> float:
        return 4.0 - 3.0 * math.cos(2 * math.pi * at_s / day)

    def bursts(at_s: float) -> float:
        return 3.0 + (5.0 if at_s % 1500 > 1080 else 0.0)

    def ramps(at_s: float) -> float:
        return 1.5 + 7.0 * abs(((at_s / hour / 1.5) % 2) - 1)

    def shifting(at_s: float, random: Random) -> str:
        return "chat" if random.random() < 0.1 + 0.8 * (at_s > 1.5 * hour) else "documents"

    def growing(at_s: float) -> float:
        return 8_000.0 + 16_000.0 * min(1.0, max(0.0, at_s / hour - 1))

    seeded = partial(made, seed=seed)
    workloads: dict[str, Callable[..., Workload]] = {
        "steady": partial(seeded, hours=3, rate=lambda at_s: 5.0),
        "ramps": partial(seeded, hours=6, rate=ramps),
        "bursts": partial(seeded, hours=4, rate=bursts),
        "tenant shift": partial(seeded, hours=3, rate=lambda at_s: 6.0, tenant=shifting),
        "length shift": partial(seeded, hours=3, rate=lambda at_s: 5.0, prompt=growing),
        "diurnal": partial(seeded, hours=24, rate=diurnal),
        "diurnal, start-up 300 s": partial(seeded, hours=24, rate=diurnal, startup_s=300.0),
    }
    for name, make in workloads.items():
        yield name, partial(make, name)


def traced(path: Path, seed: int) -> Workload:
    """Return a trace of a file, superposed on itself, its arrivals spread within 3 s."""
    requests, random, seen = read_trace(path), Random(seed), set[int]()
    is_code = path.suffix == ".csv"
    copies, ttft_s, tpot_s = (12, 5.0, 0.05) if is_code else (3, 30.0, 0.1)
    calls = []
    for request in requests:
        held = len([*takewhile(seen.__contains__, request.block_ids)]) * request.block_tokens
        seen.update(request.block_ids)
        for _ in range(copies):
            calls.append(
                ElasticCall(
                    at_s=request.arrival_s + random.uniform(0, 3.0),
                    prompt_tokens=request.input_tokens,
                    cached_tokens=min(held, request.input_tokens - 1),
                    output_tokens=request.output_tokens,
                )
            )
    calls.sort(key=lambda call: call.at_s)
    return Workload(path.stem[:24], calls, ttft_s=ttft_s, tpot_s=tpot_s)


@suite(
    "planner",
    "the planner on simulated workers",
    option("--trace", [], action="append", type=Path, metavar="FILE"),
    option("--only", [], "this workload alone", action="append", metavar="NAME"),
    option("--policy", [], "beside the oracle (all)", action="append", choices=POLICIES),
    option("--seed", 0),
)
def measure(options: Namespace, report: Report) -> None:
    """Add the rows of each workload."""
    files: list[tuple[str, Callable[[], Workload]]] = [
        (path.stem, partial(traced, path, options.seed)) for path in options.trace
    ]
    workloads = [*synthetic(options.seed), *files]
    for name, make in workloads:
        if not options.only or name in options.only:
            report.tell(name)
            report.show(name, workload_rows(make(), options.policy or POLICIES))


def workload_rows(workload: Workload, policies: Collection[str] = POLICIES) -> Iterator[Row]:
    """Yield the worker-hours and the attainment of one workload under each policy, with the bars."""
    begin, fixed = static(workload)
    best = oracle(workload)
    courses: dict[str, Callable[[], Result]] = {
        "static": lambda: fixed,
        "threshold": lambda: best_of(simulate(workload, begin, Threshold(each)) for each in THRESHOLDS),
        "reactive": lambda: best_of(
            simulate(workload, begin, PastWork(workload, margin=margin, kept_s=kept_s))
            for margin, kept_s in product(MARGINS, KEPT_S)
        ),
        "planner": lambda: simulate(workload, begin, Planned(workload)),
    }
    results = {"oracle": best} | {name: run() for name, run in courses.items() if name in policies}
    for name, result in results.items():
        is_planner, is_late = name == "planner", workload.startup_s > 120 or "diurnal" in workload.name
        yield Row(f"{workload.name}, {name}, worker-hours", result.worker_h, "h")
        bar = (0.97 if is_late else GOAL) if is_planner else None
        yield at_least(f"{workload.name}, {name}, attainment", result.attainment, "", bar)
    if "planner" in results:
        yield from _planner_rows(workload, results["planner"], best, fixed)


def _planner_rows(workload: Workload, planned: Result, best: Result, fixed: Result) -> Iterator[Row]:
    """Yield how the planner compares with the oracle and with a static cluster."""
    yield at_most(f"{workload.name}, hours over the oracle's", planned.worker_h / best.worker_h, "x", 1.1)
    yield at_most(f"{workload.name}, hours over static's", planned.worker_h / fixed.worker_h, "x", 1.0)
    if workload.name == "steady":
        yield at_most("steady, actions", planned.actions_an_hour, "an hour", 6)
    for tenant in sorted({call.tenant for call in workload.calls} - {""}):
        yield at_least(f"{workload.name}, {tenant}, attainment", planned.by_tenant[tenant], "", GOAL)
