"""Static, dynamic and continuous batching of the same requests by the same engine.

A burst, and Poisson arrivals; docs/benchmarks.md explains the figures. Each is the median over repeats, which
differ in the order of the same lengths; ratios are of one repeat.
"""

import math
import random
import time
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from operator import attrgetter
from statistics import fmean, median
from typing import Final, NamedTuple, TypeAlias

from baton.bench.engine.replica import LLAMA_56M, LlamaShape, RecordedEngine, greedy, load_replica
from baton.bench.report import Report, Row, at_least, option, paired_ratio, percentile, suite
from baton.request import Request
from baton.sim.timed.workload import arrivals

POLICIES: Final = ("static", "dynamic", "continuous")
NUM_SEATS: Final = 16  # sequences a batch
PROMPT_TOKENS: Final = 32
MAX_OUTPUT_TOKENS: Final = 512

# Large enough that reading the weights is most of a step, as on a GPU: a step of one row then costs
# nearly what a step of sixteen does, and rows that are computed for nothing are not cheaper than others.
SHAPE: Final = replace(
    LLAMA_56M,
    intermediate_size=1536,
    num_layers=4,
    num_kv_heads=2,
    vocab_size=1024,
    max_positions=PROMPT_TOKENS + MAX_OUTPUT_TOKENS,
)
DYNAMIC_WINDOW_MS: Final = 10.0  # a request-level batcher waits this long for a full batch


class Requests(NamedTuple):
    """The answer lengths and arrival times that every policy gets."""

    output_lengths: tuple[int, ...]  # tokens
    arrivals_s: tuple[float, ...]  # since the start, ascending


@dataclass(frozen=True)
class Outcome:
    """The result of one run of `Requests` under one policy."""

    seconds: float  # from the first arrival to the last token
    num_tokens: int  # generated
    latencies_s: tuple[float, ...]  # from each arrival to its own last token, in order of arrival
    num_steps: int
    num_rows: int  # computed, prompts and padding included
    num_padded_rows: int

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def mean_latency_s(self) -> float:
        return fmean(self.latencies_s)

    @property
    def p99_latency_s(self) -> float:
        return percentile(self.latencies_s, 99)

    @property
    def padding_percent(self) -> float:
        return 100 * self.num_padded_rows / self.num_rows


def mixed_lengths(num_requests: int, seed: int = 0) -> tuple[int, ...]:
    """Return 10 % short (4 tokens), 80 % medium (32) and 10 % long (256) answers, shuffled."""
    num_tails = num_requests // 10
    lengths = [4] * num_tails + [256] * num_tails + [32] * (num_requests - 2 * num_tails)
    random.Random(seed).shuffle(lengths)
    return tuple(lengths)


def burst(output_lengths: tuple[int, ...]) -> Requests:
    """Return requests that all arrive at once."""
    return Requests(output_lengths, (0.0,) * len(output_lengths))


def poisson(output_lengths: tuple[int, ...], requests_per_s: float, seed: int = 0) -> Requests:
    """Return requests with Poisson arrivals."""
    moments_s = islice(arrivals(requests_per_s, random.Random(seed)), len(output_lengths))
    return Requests(output_lengths, tuple(moments_s))


def load_policies(shape: LlamaShape = SHAPE) -> dict[str, RecordedEngine]:
    """Load one engine a policy, with the same weights, seats and pages, and without a prefix cache."""
    return {policy: _load(policy, shape) for policy in POLICIES}


def serve(replica: RecordedEngine, requests: Requests) -> Outcome:
    """Run all requests to the end in real time; an idle engine sleeps until the next arrival."""
    engine = replica.engine
    replica.steps.clear()
    rng = random.Random(len(requests.output_lengths))
    asked = [(_request(length, rng), arrival_s) for length, arrival_s in zip(*requests, strict=True)]
    to_come = deque(asked)
    ended_s: dict[str, float] = {}
    num_tokens, started_s = 0, time.perf_counter()
    while len(ended_s) < len(asked):
        while to_come and to_come[0][1] <= time.perf_counter() - started_s:
            engine.add(to_come.popleft()[0])
        outputs = engine.step() if engine.has_work() else []
        num_tokens += len(outputs)
        now_s = time.perf_counter() - started_s
        ended_s.update({output.request_id: now_s for output in outputs if output.finish_reason})
        # An idle engine waits for the next arrival, a queue window that holds every request for its end too.
        window_s = engine.wait_s if engine.has_work() else math.inf
        if window_s is not None:
            pause_s = min(window_s, to_come[0][1] - now_s if to_come else math.inf)
            time.sleep(pause_s if 0 < pause_s < math.inf else 0.0)
    return Outcome(
        seconds=max(ended_s.values()) - requests.arrivals_s[0],
        num_tokens=num_tokens,
        latencies_s=tuple(ended_s[request.request_id] - arrival_s for request, arrival_s in asked),
        num_steps=len(replica.steps),
        num_rows=sum(step.num_tokens for step in replica.steps),
        num_padded_rows=sum(step.num_padded for step in replica.steps),
    )


def _request(num_tokens: int, rng: random.Random) -> Request:
    prompt = tuple(rng.randrange(SHAPE.vocab_size) for _ in range(PROMPT_TOKENS))
    return greedy(prompt, num_tokens)


def _load(policy: str, shape: LlamaShape) -> RecordedEngine:
    scheduler: dict[str, object] = {"policy": policy, "max_num_seqs": NUM_SEATS}
    if policy == "dynamic":
        window = {"max_queue_delay_ms": DYNAMIC_WINDOW_MS, "preferred_batch_sizes": [NUM_SEATS]}
        scheduler |= window
    cache = {"kv_cache_memory_bytes": 2**27, "enable_prefix_caching": False}
    return RecordedEngine(load_replica(shape, {"scheduler": scheduler, "cache": cache}))


THROUGHPUT_BAR: Final = 1.9  # continuous / static
LATENCY_BAR: Final = 5.0  # static / continuous, means
LOAD: Final = 0.7  # of the measured capacity of continuous batching
Outcomes: TypeAlias = dict[str, list[Outcome]]  # policy -> one outcome a repeat
OutcomeFigure: TypeAlias = Callable[[Outcome], float]
tokens_per_s: Final[OutcomeFigure] = attrgetter("tokens_per_s")
mean_latency_s: Final[OutcomeFigure] = attrgetter("mean_latency_s")
num_steps: Final[OutcomeFigure] = attrgetter("num_steps")


def take_turns(
    replicas: Mapping[str, RecordedEngine], repeats: Sequence[Requests], name: str, report: Report
) -> Outcomes:
    """Run the requests of each repeat under every policy, in turns."""
    outcomes: Outcomes = {policy: [] for policy in replicas}
    for repeat, policy in report.turns(replicas, len(repeats), f"{name}, "):
        outcomes[policy].append(serve(replicas[policy], repeats[repeat]))
    return outcomes


def ratio(outcomes: Outcomes, above: str, below: str, figure: OutcomeFigure) -> float:
    """Return the median over the repeats of one policy's figure over another's."""
    return paired_ratio(map(figure, outcomes[above]), map(figure, outcomes[below]))


def burst_rows(outcomes: Outcomes) -> list[Row]:
    """Return throughput, padding and latency of the burst."""
    rows = []
    for policy, runs in outcomes.items():
        rows.append(Row(f"burst, {policy}: throughput", median(map(tokens_per_s, runs)), "tok/s"))
        rows.append(Row(f"burst, {policy}: padding", runs[0].padding_percent, "% of rows"))
    rows += latency_rows("burst", outcomes)
    steps = ratio(outcomes, "static", "continuous", num_steps)
    rows.append(Row("burst: steps, static / continuous", steps, "x"))
    dynamic_gain = ratio(outcomes, "dynamic", "static", tokens_per_s)
    rows.append(Row("burst: throughput, dynamic / static", dynamic_gain, "x"))
    gain = ratio(outcomes, "continuous", "static", tokens_per_s)
    return [*rows, at_least("burst: throughput, continuous / static", gain, "x", THROUGHPUT_BAR)]


def latency_rows(name: str, outcomes: Outcomes, bar: float | None = None) -> list[Row]:
    """Return the seconds from arrival to a request's last token, and how many times less continuous takes."""
    rows = []
    for policy, runs in outcomes.items():
        p99_s = median(outcome.p99_latency_s for outcome in runs)
        rows.append(Row(f"{name}, {policy}: mean latency", median(map(mean_latency_s, runs)), "s"))
        rows.append(Row(f"{name}, {policy}: p99 latency", p99_s, "s"))
    times_less = ratio(outcomes, "static", "continuous", mean_latency_s)
    return [*rows, at_least(f"{name}: mean latency, static / continuous", times_less, "x", bar)]


def measure_policies(num_requests: int, num_repeats: int, report: Report, shape: LlamaShape = SHAPE) -> None:
    """Run the burst, then Poisson arrivals at LOAD of what continuous batching did in the burst."""
    report.tell("loading")
    replicas = load_policies(shape)
    for replica in replicas.values():
        serve(replica, burst((8,) * NUM_SEATS))  # the first steps are slow
    seeds = range(num_repeats)
    bursts = [burst(mixed_lengths(num_requests, seed)) for seed in seeds]
    full = take_turns(replicas, bursts, "burst", report)
    report.rows += burst_rows(full)
    name = f"{LOAD:.0%} of continuous"
    rate = LOAD * num_requests / median(outcome.seconds for outcome in full["continuous"])
    arrivals_ = [poisson(mixed_lengths(num_requests, seed), rate, seed) for seed in seeds]
    partial_ = take_turns(replicas, arrivals_, name, report)
    report.rows.append(Row(f"{name}: arrivals", rate, "requests/s"))
    report.rows += latency_rows(name, partial_, LATENCY_BAR)
    report.extra = {"model": asdict(shape), "samples": {"burst": _samples(full), name: _samples(partial_)}}


def _samples(outcomes: Outcomes) -> dict[str, list[dict[str, object]]]:
    return {policy: [asdict(outcome) for outcome in runs] for policy, runs in outcomes.items()}


@suite("batching", "batching", option("--repeats", 3, "of every load"), option("--requests", 160, "a load"))
def measure(options: Namespace, report: Report) -> None:
    """Measure every policy."""
    measure_policies(options.requests, options.repeats, report)
