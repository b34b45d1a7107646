"""Isolation of tenants and behaviour under overload: the production router and queues on simulated workers.

python -m baton.bench.tenants.suite [--trace FILE] [--quick] [--seed 0] [--output FOLDER]
python -m baton.bench.tenants.suite --real [--seed 0] [--output FOLDER]    the same with real processes

Four prefill and two decode workers of an 8B model, each on a GPU (bench/tenants/world.py). All times are
those of the simulation, except those of queue operations, which this machine takes. Goodput is the number of
requests a second that meet both objectives, TTFT and TPOT, from when their client sent them; a refused
request does not.
"""

import argparse
import asyncio
import gc
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any, Final

from baton.bench.report import Report, Row, add_output_option, at_least, at_most, run_command, run_suite
from baton.bench.tenants.cases import (
    NUM_DECODE,
    NUM_PREFILL,
    conversation,
    flood,
    noisy,
    operation_times_us,
    service,
    victims,
)
from baton.bench.tenants.real import Size, measure_real
from baton.bench.tenants.world import Call, CallOutcome, TenantClients
from baton.bench.traces import TraceRequest, read_trace

WARM_S: Final = 10.0
BIN_S: Final = 10.0
WEIGHTS: Final = {"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0, "e": 6.0}
LOADS: Final = (0.7, 0.8, 0.9, 1.0, 1.1)
OVERLOAD: Final = 3.0
AFTER: Final = 0.7
SPEED: Final = 2.5  # of the conversation trace: somewhat more than the workers can do


def simulate(calls: Sequence[Call], until_s: float, seed: int) -> TenantClients:
    """Simulate all calls until then."""
    world = TenantClients(NUM_PREFILL, NUM_DECODE, seed=seed)
    world.run(calls, until_s)
    world.router.admission_queue.check_integrity()
    return world


def noisy_rows(seconds: float, seed: int) -> list[Row]:
    """Measure victims alone and beside a tenant at 50 times its share, with long prompts."""
    calls = victims(seconds, seed)
    alone = _victims(simulate(calls, seconds + 10, seed), seconds)
    world = simulate([*calls, *noisy(seconds, seed)], seconds + 10, seed)
    beside = _victims(world, seconds)
    p99_s = [_p99([each.ttft_s for each in found if each.first_token_s >= 0]) for found in (alone, beside)]
    kept = [fmean(each.is_good for each in found) for found in (alone, beside)]
    told = f"{p99_s[1]:.3f} s, alone {p99_s[0]:.3f} s; {len(beside)} requests"
    idle = world.idle_s / max(1e-9, world.waiting_s)
    return [
        at_most("noisy tenant: victims' TTFT p99 / alone", p99_s[1] / p99_s[0], "x", 1.15, told),
        at_least("noisy tenant: victims' SLO attainment / alone", kept[1] / kept[0], "x", 0.95),
        at_most("noisy tenant: prefill idle while anyone waits", 100 * idle, "%", 2.0),
    ]


def share_rows(seconds: float, seed: int) -> list[Row]:
    """Measure five tenants that ask for more than there is, by weights 1 to 6, over spans of 10 s."""
    world = simulate(flood(WEIGHTS, WARM_S + seconds, seed), WARM_S + seconds, seed)
    worst, jain = 0.0, 1.0
    for number in range(round(seconds / BIN_S)):
        since_s = WARM_S + number * BIN_S
        served: Counter[str] = Counter()
        for at_s, tenant, num_tokens in world.answered:
            if since_s <= at_s < since_s + BIN_S:
                served[tenant] += num_tokens
        parts = [
            served[tenant] / served.total() * sum(WEIGHTS.values()) / weight
            for tenant, weight in WEIGHTS.items()
        ]
        worst = max(worst, *(abs(part - 1.0) for part in parts))
        jain = min(jain, sum(parts) ** 2 / (len(parts) * sum(part * part for part in parts)))
    idle = world.idle_s / max(1e-9, world.waiting_s)
    return [
        at_most("shares: most off its weight in any 10 s", 100 * worst, "%", 5.0),
        at_least("shares: least Jain index of any 10 s", jain, "", 0.95),
        at_most("shares: prefill idle while anyone waits", 100 * idle, "%", 2.0),
    ]


def overload_rows(seconds: float, seed: int) -> tuple[list[Row], dict[str, object]]:
    """Measure three times the capacity, with openai-python's retries; return rows and the curves."""
    worlds = [simulate(service([(40, load)], seed), 45, seed) for load in LOADS]
    peak = max(_goodput(each, 10, 40) for each in worlds)
    peak_tokens = max(_good_tokens(each, 10, 40) for each in worlds)
    loads = [(30.0, 0.9), (seconds, OVERLOAD), (60.0, AFTER)]
    end_s = 30.0 + seconds
    world = simulate(service(loads, seed), end_s + 65, seed)
    during = [_goodput(world, at, at + BIN_S) for at in _bins(30.0 + BIN_S, end_s)]
    refused = [each for each in world.outcomes if each.refusal is not None]
    calls = sum(each.retry == 0 for each in world.outcomes)
    recovery_s = _recovery_s(world, end_s)
    returned = [each for each in world.outcomes if each.retry and each.asked_s < end_s - 20]
    later = Counter(int(each.asked_s) for each in world.outcomes if each.retry and each.asked_s > end_s)
    told = sum(0 < each.retry_after_s <= 120 for each in refused) / max(1, len(refused))
    rows = [
        Row("overload: peak goodput", peak, "req/s", note=f"of loads {LOADS[0]:g} to {LOADS[-1]:g}"),
        at_least("overload: least goodput of any 10 s / peak", min(during) / peak, "x", 0.9),
        at_least(
            "overload: the same in tokens",
            min(_good_tokens(world, at, at + BIN_S) for at in _bins(30.0 + BIN_S, end_s)) / peak_tokens,
            "x",
            0.9,
            f"peak {peak_tokens:,.0f} tokens/s; short prompts find a place more easily",
        ),
        at_most("overload: until 95 % are good again", recovery_s, "s", 10.0),
        at_most("overload: HTTP requests a call", len(world.outcomes) / calls, "", 1.2, "3 if all retried"),
        at_most("overload: returns after it, most in 1 s", max(later.values(), default=0), "", 0.5 * peak),
        at_least("overload: refused with a time", 100 * told, "%", 100.0, f"{len(refused)} refused"),
        Row(
            "overload: returned during it, and good",
            100 * _good(returned),
            "%",
            note=f"{len(returned)} returned",
        ),
    ]
    series = {
        "overload_seconds": [at for at in _bins(0.0, end_s + 60)],
        "overload_goodput": [_goodput(world, at, at + BIN_S) for at in _bins(0.0, end_s + 60)],
        "overload_asked": [_asked(world, at, at + BIN_S) for at in _bins(0.0, end_s + 60)],
        "overload_levels": [max(_levels(world, at, at + BIN_S)) for at in _bins(0.0, end_s + 60)],
        "peak_goodput": peak,
    }
    return rows, series


def burst_rows(seed: int) -> list[Row]:
    """Measure whether calls that a short burst had refused find room when they come back as told."""
    end_s = 23.0
    world = simulate(service([(20.0, 0.5), (end_s - 20.0, 4.0), (40.0, 0.5)], seed), 70.0, seed)
    returned = [each for each in world.outcomes if each.retry]
    later = [each for each in returned if each.asked_s > end_s]
    note = f"{len(later)} came back after it, {len(returned) - len(later)} while it went on"
    return [at_least("burst: back after it as told, and good", 100 * _good(later), "%", 95.0, note)]


def _good(outcomes: Sequence[CallOutcome]) -> float:
    return fmean(each.is_good for each in outcomes) if outcomes else 1.0


def conversation_rows(trace: Sequence[TraceRequest], seed: int) -> list[Row]:
    """Measure deadlines and admission against the order of arrival and no refusals."""
    goodputs = []
    for knows_sla in (True, False):
        calls = conversation(trace, SPEED, seed, knows_sla=knows_sla)
        last_s = calls[-1].at_s
        goodputs.append(_goodput(simulate(calls, last_s + 60, seed), 0.0, last_s + 60))
    note = f"{goodputs[0]:.2f} and {goodputs[1]:.2f} requests/s of {len(trace)}, {SPEED:g} times as fast"
    return [
        at_least("conversation: goodput / first come first served", goodputs[0] / goodputs[1], "x", 1.3, note)
    ]


def queue_rows(num_tenants: int, num_each: int) -> list[Row]:
    """Time the operations of the router's queues."""
    gc.collect()
    rows = []
    for name, times_us in operation_times_us(num_tenants, num_each).items():
        note = f"p50 {sorted(times_us)[len(times_us) // 2]:.1f} us; {num_tenants} tenants x {num_each:,}"
        rows.append(at_most(f"queue: {name} p99", _p99(times_us), "us", 20.0, note))
    return rows


def _victims(world: TenantClients, until_s: float) -> list[CallOutcome]:
    return [
        each
        for each in world.outcomes
        if each.call.tenant.startswith("victim") and WARM_S <= each.asked_s < until_s - 5
    ]


def _goodput(world: TenantClients, since_s: float, until_s: float) -> float:
    good = sum(each.is_good and since_s <= each.asked_s < until_s for each in world.outcomes)
    return good / (until_s - since_s)


def _good_tokens(world: TenantClients, since_s: float, until_s: float) -> float:
    """Return tokens a second of prompts and answers that were good."""
    good = [each.call for each in world.outcomes if each.is_good and since_s <= each.asked_s < until_s]
    return sum(call.num_tokens + call.num_answered for call in good) / (until_s - since_s)


def _asked(world: TenantClients, since_s: float, until_s: float) -> float:
    return sum(since_s <= each.asked_s < until_s for each in world.outcomes) / (until_s - since_s)


def _levels(world: TenantClients, since_s: float, until_s: float) -> list[int]:
    return [level for at_s, level in world.levels if since_s <= at_s < until_s] or [0]


def _recovery_s(world: TenantClients, end_s: float) -> float:
    """Return the seconds from the overload's end until 95 % of the calls of every later second are good."""
    for after_s in range(60, 0, -1):
        span = [each for each in world.outcomes if end_s + after_s - 1 <= each.asked_s < end_s + after_s]
        if span and fmean(each.is_good for each in span) < 0.95 and after_s < 55:
            return float(after_s)
    return 0.0


def _bins(since_s: float, until_s: float) -> list[float]:
    return [since_s + BIN_S * number for number in range(round((until_s - since_s) / BIN_S))]


def _p99(values: Sequence[float]) -> float:
    return quantiles(values, n=100)[98]


def plot(series: dict[str, Any], path: Path) -> None:
    """Draw goodput and load over the time of the overload; below, the overload level."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    seconds = series["overload_seconds"]
    above.step(seconds, series["overload_asked"], where="post", color="grey", label="HTTP requests")
    above.step(seconds, series["overload_goodput"], where="post", label="goodput")
    above.axhline(series["peak_goodput"], color="grey", linestyle="--", linewidth=0.8, label="peak goodput")
    above.set_ylabel("requests/s")
    above.set_ylim(bottom=0)
    above.legend(fontsize="small")
    below.step(seconds, series["overload_levels"], where="post")
    below.set_ylabel("overload level")
    below.set_xlabel("simulated seconds")
    figure.savefig(path, dpi=150)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the suite's options."""
    parser.add_argument("--trace", type=Path, metavar="FILE", help="of conversations, in Mooncake's format")
    parser.add_argument("--limit", type=int, default=3000, metavar="N", help="its first N requests (3000)")
    parser.add_argument("--quick", action="store_true", help="a minute of each case, fewer requests")
    parser.add_argument("--real", action="store_true", help="processes, HTTP and keys: a quarter of an hour")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    add_output_option(parser)


def measure(options: argparse.Namespace, report: Report) -> None:
    """Simulate every case, or run two of them for real."""
    seed, is_quick = options.seed, options.quick
    if options.real:
        size = Size(rounds=1, round_s=8.0, point_s=4.0, overload_s=20.0, after_s=10.0) if is_quick else Size()
        asyncio.run(measure_real(size, seed, report))
        return
    report.tell("noisy tenant")
    report.rows += noisy_rows(60.0 if is_quick else 120.0, seed)
    report.tell("shares")
    report.rows += share_rows(20.0 if is_quick else 60.0, seed)
    report.tell("overload")
    rows, series = overload_rows(60.0 if is_quick else 300.0, seed)
    report.rows += [*rows, *burst_rows(seed)]
    if options.trace is not None:
        report.tell("conversations")
        report.rows += conversation_rows(read_trace(options.trace, limit=options.limit), seed)
    report.tell("queue operations")
    report.rows += queue_rows(100, 1000 if is_quick else 10_000)
    report.extra = {"seed": seed, **series}
    report.plot = partial(plot, series)


def run(options: argparse.Namespace) -> Report:
    """Measure, print and keep; results of real processes have a file of their own."""
    kind = (
        ("tenants_real", "tenants of real processes")
        if options.real
        else ("tenants", "tenants on simulated workers")
    )
    return run_suite(measure, options, *kind)


if __name__ == "__main__":
    sys.exit(run_command(__doc__, add_options, run))
