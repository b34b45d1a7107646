"""Isolation of tenants and behaviour under overload: the production router and queues on simulated workers.

    baton bench tenants [--quick] [--seed 0] [--output FOLDER]
    baton bench tenants --real [--seed 0] [--output FOLDER]    the same with real processes

Four prefill and two decode workers of an 8B model, each on a GPU (sim/timed/fast.py). All times are
simulated. docs/benchmarks.md explains the figures.
"""

from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from random import Random
from typing import Final

from baton.bench.report import Plot, Report, Row, at_least, at_most, option, suite
from baton.bench.tenants.calls import (
    BIN_S,
    NUM_VICTIMS,
    OverloadSpan,
    TenantWorkload,
    goodput,
    goodputs,
    noisy_rows,
    overload_rows,
    share_good,
    ttft_s,
    victims_among,
)
from baton.bench.tenants.real import Size, measure_real
from baton.config.router import RouterConfig
from baton.messages.workers import WorkerRole
from baton.sim.timed.fast import FastCluster
from baton.sim.timed.fleet import ClientCall, Fleet
from baton.sim.timed.times import H200
from baton.tenants import Sla

NUM_PREFILL: Final = 4
FLEET: Final = Fleet(
    num_prefill=NUM_PREFILL,
    num_decode=2,
    num_prefill_pages=58_000,
    num_decode_pages=58_000,
    num_decode_seqs=256,
    prefill_keeps=False,
    prefill_budget=512,
    decode_budget=512,
)
TOKENS_PER_S: Final = 30_000.0 * NUM_PREFILL  # about what the fleet computes
WARM_S: Final = 10.0
VICTIM_LOAD: Final = 0.6
TIMES_SHARE: Final = 50.0  # that the noisy tenant asks for
WEIGHTS: Final = {"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0, "e": 6.0}
LOADS: Final = (0.7, 0.8, 0.9, 1.0, 1.1)
OVERLOAD: Final = 3.0
BEFORE_S: Final = 30.0  # of nearly the capacity, before the overload
AFTER: Final = 0.7
MOST_TOLD_S: Final = 120.0


@cache
def _ones(num_tokens: int) -> tuple[int, ...]:
    return (1,) * num_tokens


WORKLOAD: Final = TenantWorkload(
    prompt=lambda random, num_tokens: _ones(num_tokens),
    sla=Sla(ttft_ms=2000.0, tpot_ms=50.0),
    victim_mean=1500,
    victim_lognormal=(6.9, 0.9),
    victim_answers=(16, 128),
    longest=16_000,
    noisy_answer=64,
    service_prompts=(200, 3800),
    service_answers=(16, 128),
)


class ProbedCluster(FastCluster):
    """A FastCluster that counts how long workers are idle while calls wait, and notes the overload level."""

    def __init__(self, seed: int) -> None:
        self.levels: list[tuple[float, int]] = []  # time, overload level
        self.waiting_s = self.idle_s = 0.0  # worker-seconds in which a call waited; of these, idle
        self._seen_s = 0.0
        config = RouterConfig(policy="least-loaded", seed=seed, max_attempts=2**19)
        super().__init__(config, FLEET, dict.fromkeys(WorkerRole, H200), seed=seed)

    def served(self) -> Iterator[tuple[float, str, int]]:
        """Yield the time, the tenant and the tokens of each computed prompt and of each whole answer."""
        for each in self.outcomes:
            if each.first_token_s >= 0:
                yield each.first_token_s, each.call.tenant, each.call.num_tokens
            if each.ended_s >= 0:
                yield each.ended_s, each.call.tenant, each.call.num_answered

    def at(self, when_s: float, call: Callable[[], None]) -> None:
        super().at(when_s, partial(self._probe, call))

    def _probe(self, call: Callable[[], None]) -> None:
        passed_s, self._seen_s = self.events.now_s - self._seen_s, self.events.now_s
        if len(self.router.admission_queue):
            workers = self.prefill_workers
            self.waiting_s += passed_s * len(workers)
            self.idle_s += passed_s * sum(not each.is_stepping for each in workers)
        call()

    def _tick(self, number: int) -> None:
        super()._tick(number)
        self.levels.append((self.events.now_s, int(self.router.admission_queue.overload.level)))


def simulate(calls: Sequence[ClientCall], until_s: float, seed: int) -> ProbedCluster:
    """Simulate all calls until then."""
    rehearsal = ProbedCluster(seed)
    rehearsal.run(calls, until_s)
    rehearsal.router.admission_queue.check_integrity()
    return rehearsal


def measure_noisy(seconds: float, seed: int) -> list[Row]:
    """Measure victims alone and beside a tenant at 50 times its share, with long prompts."""
    calls = WORKLOAD.victims(VICTIM_LOAD * TOKENS_PER_S, seconds, Random(seed))
    noisy_tokens_per_s = TIMES_SHARE * TOKENS_PER_S / (NUM_VICTIMS + 1)
    noise = WORKLOAD.noisy(noisy_tokens_per_s, seconds, Random(seed + 1))
    runs = [simulate(each, seconds + 10, seed) for each in (calls, [*calls, *noise])]
    alone, beside = (victims_among(each.outcomes, WARM_S, seconds - 5) for each in runs)
    p99_s = ttft_s(alone, 99), ttft_s(beside, 99)
    note = f"{p99_s[1]:.3f} s, alone {p99_s[0]:.3f} s; {len(beside)} requests"
    attainment = share_good(beside) / share_good(alone)
    return [
        *noisy_rows(p99_s[1] / p99_s[0], attainment, note, ""),
        _idle_row("noisy tenant", runs[1]),
    ]


def _idle_row(name: str, rehearsal: ProbedCluster) -> Row:
    percent = 100 * rehearsal.idle_s / max(1e-9, rehearsal.waiting_s)
    return at_most(f"{name}: prefill idle while anyone waits", percent, "%", 2.0)


def measure_shares(seconds: float, seed: int) -> list[Row]:
    """Measure five tenants that ask for more than there is, by weights 1 to 6, over spans of 10 s."""
    until_s = WARM_S + seconds
    rehearsal = simulate(WORKLOAD.flood(WEIGHTS, 2 * TOKENS_PER_S, until_s, Random(seed)), until_s, seed)
    worst, jain = 0.0, 1.0
    for number in range(round(seconds / BIN_S)):
        since_s = WARM_S + number * BIN_S
        served: Counter[str] = Counter()
        for at_s, tenant, num_tokens in rehearsal.served():
            if since_s <= at_s < since_s + BIN_S:
                served[tenant] += num_tokens
        parts = [
            served[tenant] / served.total() * sum(WEIGHTS.values()) / weight
            for tenant, weight in WEIGHTS.items()
        ]
        worst = max(worst, *(abs(part - 1.0) for part in parts))
        jain = min(jain, sum(parts) ** 2 / (len(parts) * sum(part * part for part in parts)))
    return [
        at_most("shares: most off its weight in any 10 s", 100 * worst, "%", 5.0),
        at_least("shares: least Jain index of any 10 s", jain, "", 0.95),
        _idle_row("shares", rehearsal),
    ]


def measure_overload(seconds: float, seed: int, report: Report) -> None:
    """Measure three times the capacity, with openai-python's retries."""
    points = [
        simulate(WORKLOAD.service([(40, load * TOKENS_PER_S)], Random(seed)), 45, seed) for load in LOADS
    ]
    peak = max(goodput(each.outcomes, 10, 40) for each in points)
    peak_tokens = max(goodput(each.outcomes, 10, 40, _size) for each in points)
    span = OverloadSpan(BEFORE_S, BEFORE_S + seconds, BEFORE_S + seconds + 54)
    loads = [(BEFORE_S, 0.9), (seconds, OVERLOAD), (60.0, AFTER)]
    calls = WORKLOAD.service([(each_s, load * TOKENS_PER_S) for each_s, load in loads], Random(seed))
    rehearsal = simulate(calls, span.end_s + 65, seed)
    outcomes = rehearsal.outcomes
    least_tokens = min(goodputs(outcomes, span.begin_s + BIN_S, span.end_s, _size))
    later = Counter(int(each.asked_s) for each in outcomes if each.retry and each.asked_s > span.end_s)
    note = f"peak {peak_tokens:,.0f} tokens/s; short prompts find a place more easily"
    report.rows += overload_rows(outcomes, peak, span, moment_s=1.0, most_told_s=MOST_TOLD_S, most_calls=1.2)
    report.rows += [
        at_least("overload: the same in tokens", least_tokens / peak_tokens, "x", 0.9, note),
        at_most("overload: returns after it, most in 1 s", max(later.values(), default=0), "", 0.5 * peak),
    ]
    starts = [BIN_S * number for number in range(round((span.end_s + 60) / BIN_S))]
    asked = Counter(int(each.asked_s // BIN_S) for each in outcomes)
    curves = {
        "requests/s": {
            "HTTP requests": [(start_s, asked[round(start_s / BIN_S)] / BIN_S) for start_s in starts],
            "goodput": list(zip(starts, goodputs(outcomes, 0.0, span.end_s + 60), strict=True)),
            "peak goodput": [(starts[0], peak), (starts[-1], peak)],
        },
        "overload level": {"level": [(at_s, float(level)) for at_s, level in rehearsal.levels]},
    }
    report.extra |= {"overload": curves["requests/s"]}
    report.plot = Plot(curves, x_label="simulated seconds", is_stepped=True)


def _size(call: ClientCall) -> int:
    return call.num_tokens + call.num_answered


@suite(
    "tenants",
    "tenants on simulated workers",
    option("--quick", False, "a minute of each case"),
    option("--real", False, "processes, HTTP and keys: a quarter of an hour"),
    option("--seed", 0),
)
async def measure(options: Namespace, report: Report) -> None:
    """Simulate every case, or run two of them for real, whose results have a file of their own."""
    seed, is_quick = options.seed, options.quick
    report.extra = {"seed": seed}
    if options.real:
        report.name, report.title = "tenants_real", "tenants of real processes"
        size = Size(rounds=1, round_s=8.0, point_s=4.0, overload_s=20.0, after_s=10.0) if is_quick else Size()
        await measure_real(size, seed, report)
        return
    report.tell("noisy tenant")
    report.rows += measure_noisy(60.0 if is_quick else 120.0, seed)
    report.tell("shares")
    report.rows += measure_shares(20.0 if is_quick else 60.0, seed)
    report.tell("overload")
    measure_overload(60.0 if is_quick else 300.0, seed, report)
