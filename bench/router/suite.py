"""Which worker serves a request, and what that is worth: the production router on simulated workers.

python -m baton.bench.router.suite [--trace FILE] [--limit N] [--seed 0] [--json FILE]
python -m baton.bench.router.suite --replay LOG --policy NAME

With a trace of Mooncake's format: its prompts on 8 prefill workers that keep 8,000 blocks of 512 tokens each,
by each policy; arrivals as they are, and spread within their 3 s. In any case: made workloads, in which the
policy `cost` has to find by itself which prompts a decode worker had better compute; against fixed thresholds
of `least-loaded`, which does not look at what is held where, and of `cost` itself, in tokens to be computed.
The second form replays what a router has logged (--decision-log), as it went and under another policy.
All times are the simulation's, of a model and machines that bench/router/world.py describes.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from math import floor
from pathlib import Path
from random import Random
from statistics import fmean, quantiles
from time import perf_counter
from typing import Final, NamedTuple

import msgspec

from baton.bench.report import Row, at_least, at_most, print_table, write_json
from baton.bench.router.world import Fleet, Machine, PrefillSim, RouterWorld, config_of
from baton.bench.traces import TraceRequest, read_trace
from baton.errors import ConfigError
from baton.router.decisions import DispatchedLine, EndedLine, decode_lines, keys_in
from baton.router.policies.costs import PairCandidate, Select, cheapest


class Log(NamedTuple):
    """A router's decision log as a trace: the same prompts at the same times, for another policy."""

    trace: list[TraceRequest]  # first attempts alone: what was replayed would not be under another policy
    page_size: int
    num_prefill: int
    num_decode: int
    ttft_mean_s: float | None  # as it was measured


def read_log(path: Path, step_s: float) -> Log:
    """step_s: a decode step, by which a duration is taken for a number of tokens."""
    sent: dict[str, DispatchedLine] = {}
    ended: dict[str, EndedLine] = {}
    for line in _lines(path):
        if isinstance(line, DispatchedLine):
            if line.decision.attempt == 0:
                sent[line.decision.request_id] = line
        elif line.attempt == 0:
            ended[line.request_id] = line
    if not sent:
        raise ConfigError(f"decision log {path}: there is no request in it")
    blocks: dict[bytes, int] = {}
    begun_s = min(line.at_s for line in sent.values())
    trace = [_traced(line, ended.get(id_), blocks, begun_s, step_s) for id_, line in sent.items()]
    waits_s = [each.first_token_s for each in ended.values() if each.first_token_s is not None]
    weighed = [each for line in sent.values() for each in (line.decision.chosen, *line.decision.weighed)]
    return Log(
        trace=trace,
        page_size=next(iter(sent.values())).page_size,
        num_prefill=len({each.prefill for each in weighed if each.prefill}),
        num_decode=len({each.decode for each in weighed}),
        ttft_mean_s=sum(waits_s) / len(waits_s) if waits_s else None,
    )


def _lines(path: Path) -> Iterator[DispatchedLine | EndedLine]:
    try:
        with path.open("rb") as file:
            yield from decode_lines(file, str(path))
    except OSError as error:
        raise ConfigError(f"decision log {path} cannot be read: {error}") from error


def _traced(
    line: DispatchedLine, end: EndedLine | None, blocks: dict[bytes, int], begun_s: float, step_s: float
) -> TraceRequest:
    """blocks: a number for each page's name, grown here."""
    ids = [blocks.setdefault(key, len(blocks)) for key in keys_in(line)]
    if len(ids) * line.page_size < line.decision.num_tokens:
        ids.append(blocks.setdefault(line.decision.request_id.encode(), len(blocks)))
    num_output = line.num_output_tokens
    if end is not None and end.first_token_s is not None:
        num_output = round((end.at_s - line.at_s - end.first_token_s) / step_s)
    return TraceRequest(
        arrival_s=line.at_s - begun_s,
        input_tokens=line.decision.num_tokens,
        output_tokens=max(1, num_output),
        block_ids=tuple(ids),
        block_tokens=line.page_size,
    )


# Made traces, one for each way in which prompts and answers relate to each other.

BLOCK_TOKENS: Final = 16


def chat(num_requests: int, seed: int) -> list[TraceRequest]:
    """Short turns that grow: most of a prompt is known, and answers are as long."""
    random = Random(seed)
    turns: dict[int, list[int]] = {}
    requests, now_s = [], 0.0
    for number in range(num_requests):
        now_s += random.expovariate(6.0)
        blocks = turns.setdefault(random.randrange(num_requests // 8 + 1), [])
        blocks.extend(10_000 * (number + 1) + at for at in range(random.randint(4, 40)))
        requests.append(_request(now_s, tuple(blocks[:600]), random.randint(50, 400)))
    return requests


def documents(num_requests: int, seed: int) -> list[TraceRequest]:
    """Questions about a few long documents: long prompts, short answers."""
    random = Random(seed)
    sizes = [random.randint(300, 900) for _ in range(24)]
    requests, now_s = [], 0.0
    for number in range(num_requests):
        now_s += random.expovariate(2.5)
        document = random.randrange(len(sizes))
        known = [10_000_000 + 10_000 * document + at for at in range(sizes[document])]
        asked = [10_000 * (number + 1) + at for at in range(random.randint(2, 12))]
        requests.append(_request(now_s, (*known, *asked), random.randint(20, 150)))
    return requests


def mixed(num_requests: int, seed: int) -> list[TraceRequest]:
    """Completions of all lengths, nothing shared, in bursts."""
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

SCALE: Final = 32.0  # the trace's tokens in one that is replayed: a block of 512 is a page of 16
PAGE_TOKENS: Final = 16
BIN_S: Final = 3.0  # of the trace's arrivals
POLICIES: Final[tuple[str, ...]] = ("round-robin", "least-loaded", "prefix", "cost")
THRESHOLDS: Final = (0, 128, 512, 2048, 2**30)  # tokens; the last: all prompts are local
MIN_HIT: Final = 0.33
MAX_IMBALANCE: Final = 1.10
MAX_OF_ROUND_ROBIN: Final = 0.5


class Result(NamedTuple):
    hit: float  # of all prompt tokens, those that were not computed
    imbalance: float  # the prompt tokens of the worker that was given most, by the mean
    ttft_mean_s: float
    ttft_p99_s: float
    latency_mean_s: float  # to the last token
    wall_s: float
    counters: dict[str, int]


def run_trace(
    trace: Sequence[TraceRequest],
    policy: str,
    *,
    seed: int = 0,
    fleet: Fleet | None = None,
    scale: float = SCALE,
    local_prefill_tokens: int = 0,
    select: Select | None = None,
    page_tokens: int = PAGE_TOKENS,
) -> Result:
    """The trace's blocks are pages, of page_tokens tokens as replayed. select: in place of the policy's."""
    config = config_of(policy, seed, local_prefill_tokens)
    world = RouterWorld(config, fleet or Fleet(), Machine(), scale, page_tokens)
    if select is not None:
        world.select(select)
    begun_s = perf_counter()
    outcomes = world.replay(trace)
    wall_s = perf_counter() - begun_s
    given = [worker.given_tokens for worker in world.workers.values() if isinstance(worker, PrefillSim)]
    waits_s = [each.first_token_s - each.arrival_s for each in outcomes]
    return Result(
        hit=sum(each.num_held for each in outcomes) / sum(each.num_tokens for each in outcomes),
        imbalance=max(given) / fmean(given) if sum(given) else 1.0,
        ttft_mean_s=fmean(waits_s),
        ttft_p99_s=quantiles(waits_s, n=100)[98],
        latency_mean_s=fmean(each.ended_s - each.arrival_s for each in outcomes),
        wall_s=wall_s,
        counters=dict(world.router.counters),
    )


def spread(trace: Sequence[TraceRequest]) -> list[TraceRequest]:
    """The same requests, evenly within the bin of their arrival."""
    evenly: list[TraceRequest] = []
    for number, group in groupby(trace, key=lambda each: floor(each.arrival_s / BIN_S)):
        requests = list(group)
        for place, request in enumerate(requests):
            arrival_s = BIN_S * (number + (place + 0.5) / len(requests))
            evenly.append(msgspec.structs.replace(request, arrival_s=arrival_s))
    return evenly


def trace_rows(trace: Sequence[TraceRequest], arrivals: str, seed: int) -> list[Row]:
    rows: list[Row] = []
    results = {policy: run_trace(trace, policy, seed=seed) for policy in POLICIES}
    for policy, result in results.items():
        name = f"{policy}, {arrivals}"
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


def workload_rows(num_requests: int, seed: int) -> list[Row]:
    """Mean time to the last token: it has the wait of the prompt, and what local prompts cost others."""
    rows: list[Row] = []
    fleet = Fleet(num_prefill=2, num_decode=2, num_prefill_pages=4000, publishes_decode=True)
    for name, make in WORKLOADS.items():
        trace = make(num_requests, seed)
        alike, loaded = (_of_thresholds(trace, seed, fleet, same_costs) for same_costs in (True, False))
        tuned = run_trace(trace, "cost", seed=seed, fleet=fleet, scale=1.0)
        share = tuned.counters.get("computed_locally", 0) / num_requests
        best = min(loaded, key=lambda threshold: loaded[threshold])
        note = f"least-loaded at its best threshold, {best} tokens; {share:.0%} local"
        rows.append(at_most(f"{name}: mean latency", tuned.latency_mean_s, "s", loaded[best], note))
        best = min(alike, key=lambda threshold: alike[threshold])
        note = f"{best} tokens to be computed; what it is to find by itself"
        rows.append(Row(f"{name}: cost at its best threshold", alike[best], "s", note=note))
    return rows


def _of_thresholds(
    trace: Sequence[TraceRequest], seed: int, fleet: Fleet, same_costs: bool
) -> dict[int, float]:
    """Mean latency by the threshold up to which prompts are computed where they are decoded."""
    found = {}
    for threshold in THRESHOLDS:
        if same_costs:
            result = run_trace(trace, "cost", seed=seed, fleet=fleet, scale=1.0, select=up_to(threshold))
        else:
            result = run_trace(
                trace, "least-loaded", seed=seed, fleet=fleet, scale=1.0, local_prefill_tokens=threshold
            )
        found[threshold] = result.latency_mean_s
    return found


def up_to(threshold: int) -> Select:
    """All that `cost` knows but this: prompts with at most so many tokens to compute are computed locally."""

    def select(
        candidates: Sequence[PairCandidate], random: int, given: Callable[[str], float]
    ) -> PairCandidate:
        near = [each for each in candidates if not each.prefill and each.num_new_tokens <= threshold]
        return cheapest(near or [each for each in candidates if each.prefill], random, given)

    return select


def replay_rows(log: Log, policy: str, seed: int) -> list[Row]:
    """By the simulation's machines, so only the ratio of the two policies means anything."""
    fleet = Fleet(num_prefill=log.num_prefill, num_decode=max(1, log.num_decode), publishes_decode=True)
    rows = [Row("as it was: TTFT mean", log.ttft_mean_s, "s", note="measured, on the machines that ran it")]
    for name in dict.fromkeys((policy, "round-robin", "cost")):
        result = run_trace(log.trace, name, seed=seed, fleet=fleet, scale=1.0, page_tokens=log.page_size)
        rows.append(Row(f"{name}: TTFT mean", result.ttft_mean_s, "s"))
        rows.append(Row(f"{name}: hit", result.hit, ""))
        rows.append(Row(f"{name}: mean latency", result.latency_mean_s, "s"))
    return rows


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", type=Path, metavar="FILE", help="in Mooncake's format")
    parser.add_argument("--replay", type=Path, metavar="LOG", help="a router's decision log")
    parser.add_argument("--policy", choices=POLICIES, default="cost", help="for --replay (cost)")
    parser.add_argument("--limit", type=int, metavar="N", help="the trace's first N requests (all)")
    parser.add_argument("--requests", type=int, default=600, metavar="N", help="of each workload (600)")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the figures there")


def run(arguments: argparse.Namespace) -> None:
    rows = []
    if arguments.replay is not None:
        log = read_log(arguments.replay, Machine().step_s)
        rows += replay_rows(log, arguments.policy, arguments.seed)
    elif arguments.trace is not None:
        trace = read_trace(arguments.trace, scale=SCALE, limit=arguments.limit)
        rows += trace_rows(trace, "as they come", arguments.seed)
        rows += trace_rows(spread(trace), "spread", arguments.seed)
    if arguments.replay is None:
        rows += workload_rows(arguments.requests, arguments.seed)
    print_table("the router on simulated workers", rows)
    if arguments.json is not None:
        write_json(arguments.json, "the router on simulated workers", rows, {"seed": arguments.seed})


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    run(parser.parse_args(words))


if __name__ == "__main__":
    main()
