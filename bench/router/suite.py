"""The worth of each routing policy: the production router on simulated workers.

All times are those of the time model in sim/timed/fast.py. docs/benchmarks.md explains the figures.
"""

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Final, NamedTuple

from baton.bench.report import Report, Row, at_least, at_most, option, percentile, suite
from baton.config.router import RouterConfig
from baton.messages.workers import WorkerRole
from baton.sim.timed.fast import FastCluster
from baton.sim.timed.fleet import ClientCall, Fleet
from baton.sim.timed.times import Machine
from baton.sim.timed.workload import TraceRequest, arrivals, read_trace, tokens_of

BLOCK_TOKENS: Final = 16


def chat(num_requests: int, seed: int) -> list[TraceRequest]:
    """Return short turns that grow: most of a prompt is known, and answers are as long."""
    random = Random(seed)
    turns: dict[int, list[int]] = {}
    requests = []
    for number, now_s in zip(range(num_requests), arrivals(6.0, random), strict=False):
        blocks = turns.setdefault(random.randrange(num_requests // 8 + 1), [])
        blocks.extend(10_000 * (number + 1) + at for at in range(random.randint(4, 40)))
        requests.append(_request(now_s, tuple(blocks[:600]), random.randint(50, 400)))
    return requests


def documents(num_requests: int, seed: int) -> list[TraceRequest]:
    """Return questions about a few long documents: long prompts, short answers."""
    random = Random(seed)
    sizes = [random.randint(300, 900) for _ in range(24)]
    requests = []
    for number, now_s in zip(range(num_requests), arrivals(2.5, random), strict=False):
        document = random.randrange(len(sizes))
        known = [10_000_000 + 10_000 * document + at for at in range(sizes[document])]
        asked = [10_000 * (number + 1) + at for at in range(random.randint(2, 12))]
        requests.append(_request(now_s, (*known, *asked), random.randint(20, 150)))
    return requests


def mixed(num_requests: int, seed: int) -> list[TraceRequest]:
    """Return completions of all lengths, in bursts, that share nothing."""
    random = Random(seed)
    requests, now_s = [], 0.0
    for number in range(num_requests):
        now_s += random.expovariate(8.0 if number % 60 < 30 else 2.0)
        num_blocks = min(800, max(1, round(random.lognormvariate(4.0, 1.3))))
        blocks = tuple(10_000 * (number + 1) + at for at in range(num_blocks))
        requests.append(_request(now_s, blocks, max(2, round(random.lognormvariate(4.5, 0.8)))))
    return requests


def _request(arrival_s: float, block_ids: tuple[int, ...], output_tokens: int) -> TraceRequest:
    return TraceRequest(
        arrival_s=arrival_s,
        input_tokens=len(block_ids) * BLOCK_TOKENS - 5,
        output_tokens=output_tokens,
        block_ids=block_ids,
        block_tokens=BLOCK_TOKENS,
    )


WORKLOADS: Final[Mapping[str, Callable[[int, int], list[TraceRequest]]]] = {
    "chat": chat,
    "documents": documents,
    "mixed": mixed,
}

SCALE: Final = 32.0  # the trace's tokens in one replayed token: a block of 512 is a page of 16
POLICIES: Final[tuple[str, ...]] = ("round-robin", "least-loaded", "prefix", "cost")
THRESHOLDS: Final = (0, 128, 512, 2048, 2**30)  # tokens; the last: all prompts are local
MIN_HIT: Final = 0.33
MAX_IMBALANCE: Final = 1.10
MAX_OF_ROUND_ROBIN: Final = 0.5


class Result(NamedTuple):
    """The figures of one replay."""

    hit: float  # share of prompt tokens that were not computed
    imbalance: float  # prompt tokens of the most loaded prefill worker over the mean
    ttft_mean_s: float
    ttft_p99_s: float
    latency_mean_s: float  # to the last token
    counters: dict[str, int]


def run_trace(
    trace: Sequence[TraceRequest],
    policy: str,
    *,
    seed: int = 0,
    fleet: Fleet | None = None,
    scale: float = SCALE,
    local_prefill_tokens: int = 0,
) -> Result:
    """Replay a trace."""
    config = RouterConfig(
        policy=policy, seed=seed, local_prefill_tokens=local_prefill_tokens, max_attempts=2**19
    )
    rehearsal = FastCluster(
        config, fleet or Fleet(), dict.fromkeys(WorkerRole, Machine()), BLOCK_TOKENS, scale
    )
    outcomes = rehearsal.run(
        ClientCall(at_s=each.arrival_s, token_ids=tokens_of(each, number), num_answered=each.output_tokens)
        for number, each in enumerate(trace)
    )
    given = [worker.given_tokens for worker in rehearsal.prefill_workers]
    waits_s = [each.ttft_s for each in outcomes]
    return Result(
        hit=sum(each.num_held for each in outcomes) / sum(each.call.num_tokens for each in outcomes),
        imbalance=max(given) / fmean(given) if sum(given) else 1.0,
        ttft_mean_s=fmean(waits_s),
        ttft_p99_s=percentile(waits_s, 99),
        latency_mean_s=fmean(each.ended_s - each.asked_s for each in outcomes),
        counters=dict(rehearsal.router.counters),
    )


def trace_rows(trace: Sequence[TraceRequest], seed: int) -> list[Row]:
    """Replay a trace under every policy."""
    rows: list[Row] = []
    results = {policy: run_trace(trace, policy, seed=seed) for policy in POLICIES}
    for policy, result in results.items():
        name = f"trace, {policy}"
        if policy != "cost":
            rows.append(Row(f"{name}: hit", result.hit, ""))
            rows.append(Row(f"{name}: imbalance", result.imbalance, ""))
            rows.append(Row(f"{name}: TTFT mean", result.ttft_mean_s, "s"))
            continue
        pulls = f"{result.counters['pulls']} prefixes pulled from a peer"
        rows.append(at_least(f"{name}: hit", result.hit, "", MIN_HIT, pulls))
        rows.append(at_most(f"{name}: imbalance", result.imbalance, "", MAX_IMBALANCE))
        bar_s = MAX_OF_ROUND_ROBIN * results["round-robin"].ttft_mean_s
        rows.append(at_most(f"{name}: TTFT mean", result.ttft_mean_s, "s", bar_s, "half of round-robin's"))
        rows.append(Row(f"{name}: TTFT p99", result.ttft_p99_s, "s"))
    return rows


def workload_row(name: str, num_requests: int, seed: int) -> Row:
    """Measure the mean time to the last token, which contains the cost of local prompts to other requests."""
    fleet = Fleet(num_prefill=2, num_decode=2, num_prefill_pages=4000, decode_keeps=True)
    trace = WORKLOADS[name](num_requests, seed)
    run = partial(run_trace, trace, seed=seed, fleet=fleet, scale=1.0)
    loaded = {each: run("least-loaded", local_prefill_tokens=each).latency_mean_s for each in THRESHOLDS}
    tuned = run("cost")
    share = tuned.counters.get("computed_locally", 0) / num_requests
    best = min(loaded, key=loaded.__getitem__)
    note = f"least-loaded at its best threshold, {best} tokens; {share:.0%} local"
    return at_most(f"{name}: mean latency", tuned.latency_mean_s, "s", loaded[best], note)


@suite(
    "router",
    "the router on simulated workers",
    option("--trace", type=Path, metavar="FILE", help="in Mooncake's format"),
    option("--limit", type=int, help="the trace's first N requests (all)"),
    option("--requests", 600, "of each workload"),
    option("--seed", 0),
)
def measure(options: Namespace, report: Report) -> None:
    """Replay the trace, and the made workloads."""
    report.extra = {"seed": options.seed}
    if options.trace is not None:
        trace = read_trace(options.trace, scale=SCALE, limit=options.limit)
        report.tell("trace")
        report.rows += trace_rows(trace, options.seed)
    for name in WORKLOADS:
        report.tell(name)
        report.rows.append(workload_row(name, options.requests, options.seed))
