"""Throughput and latency of a server over HTTP, beside other servers; the cost of the control plane alone.

    baton bench serve --target URL                   32 requests at once, as other engines were measured
    baton bench serve --target URL --rival vllm=URL  the same, in turns with another OpenAI server
    baton bench serve --target URL --rate 4          open loop, Poisson: for claims about latency
    baton bench serve --target URL --trace PATH      a real trace's lengths, moments and shared prefixes
    baton bench serve --overhead                     gateway and router before workers of no model

Without --rate and --trace the load is closed-loop: --concurrency requests at once, for throughput only. An
answer counts if it has a finish reason and all its tokens. docs/benchmarks.md explains the figures.
"""

import json
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

import uvloop

from baton.bench.report import (
    Curve,
    Plot,
    Report,
    Row,
    at_least,
    at_most,
    format_number,
    option,
    percentile,
    ranked_shares,
    spread,
    suite,
)
from baton.bench.serve.client import Address, Client
from baton.bench.serve.figures import FIGURES, PERCENTILES, Run, Slo, aiperf_export
from baton.bench.serve.load import (
    INPUT,
    OUTPUT,
    Job,
    LengthBounds,
    Load,
    Model,
    Server,
    Shape,
    VllmPair,
    model_of,
    poisson,
    random_jobs,
    trace_jobs,
)
from baton.bench.serve.overhead import measure_overhead
from baton.config.environment import api_key
from baton.config.router import RouterConfig
from baton.errors import ConfigError
from baton.router.policies.registry import POLICIES
from baton.sim.timed.workload import read_trace

MIN_FOR_P99: Final = 1000
LEAST_MS: Final = 1e-3
NUM_REQUESTS: Final = 32
WARM_UP_SEED: Final = 999
NUM_WARM_UP: Final = 4
VOCAB_SIZE: Final = 32_000  # where a server does not list it


class Bars(NamedTuple):
    """Limits of the first target's throughput and median TTFT over each rival's; None: no limit."""

    throughput: float | None = None
    ttft: float | None = None


def rows_of(runs: Mapping[str, Sequence[Run]], bars: Bars) -> list[Row]:
    """Return medians over the rounds. runs: by target, ours first."""
    ours, *rivals = runs
    rows = [row for name in runs for row in _target_rows(name, runs[name])]
    for rival in rivals:
        rows += _ratio_rows(ours, rival, runs, bars)
    return rows


def _target_rows(name: str, runs: Sequence[Run]) -> list[Row]:
    failures = Counter(failure for run in runs for failure in run.failures)
    why = "; ".join(f"{count} x {reason}" for reason, count in failures.most_common())
    said = next((f": {run.said}" for run in runs if run.said), "")
    rows = [at_most(f"{name}: failed requests", failures.total(), "", 0, (why + said)[:240])]
    if not any(run.samples for run in runs):
        return rows
    rates = [run.tokens_per_s for run in runs]
    requests = median(run.requests_per_s for run in runs)
    note = f"{spread(rates)}, {format_number(requests)} requests/s"
    rows.append(Row(f"{name}: output", median(rates), "tokens/s", note=note))
    goodputs = [run.goodput for run in runs if run.goodput is not None]
    if goodputs:
        rows.append(Row(f"{name}: goodput", median(goodputs), "requests/s"))
    rows += [
        _latency_row(name, figure, runs) for figure in FIGURES if all(run.values_s(figure) for run in runs)
    ]
    lag_ms = 1e3 * max(run.max_lag_s for run in runs)
    if lag_ms:
        rows.append(Row(f"{name}: client's lag at worst", lag_ms, "ms", note="the lag counts as latency"))
    return rows


def _latency_row(name: str, figure: str, runs: Sequence[Run]) -> Row:
    """Return medians over the rounds, in milliseconds."""
    p50, p90, p99 = (
        1e3 * median(percentile(run.values_s(figure), percent) for run in runs) for percent in PERCENTILES
    )
    note = f"p90 {format_number(p90)}, p99 {format_number(p99)}"
    if figure == "itl" and p50:
        note += f", p99/p50 {p99 / p50:.1f}"
    elif figure != "itl" and min(len(run.samples) for run in runs) < MIN_FOR_P99:
        note += f" (of fewer than {MIN_FOR_P99:,} requests a round)"
    return Row(f"{name}: {figure.upper()} p50", p50, "ms", note=note)


def _ratio_rows(ours: str, rival: str, runs: Mapping[str, Sequence[Run]], bars: Bars) -> list[Row]:
    name = f"{ours} / {rival}"
    if not all(run.samples for each in (ours, rival) for run in runs[each]):
        return [Row(name, None, "", note="one target has answered nothing", met=False)]
    pairs = list(zip(runs[ours], runs[rival], strict=True))
    throughput = median(mine.tokens_per_s / theirs.tokens_per_s for mine, theirs in pairs)
    ttft = median(
        percentile(mine.values_s("ttft"), 50) / percentile(theirs.values_s("ttft"), 50)
        for mine, theirs in pairs
    )
    return [
        at_least(f"{name}: output", throughput, "x", bars.throughput),
        at_most(f"{name}: TTFT p50", ttft, "x", bars.ttft),
    ]


def curves_of(runs: Mapping[str, Sequence[Run]]) -> dict[str, dict[str, Curve]]:
    """Return the share of answers over milliseconds, by latency and target, of all rounds.

    Values are at least LEAST_MS: a logarithmic axis has no zero.
    """
    return {
        f"{figure.upper()}, ms": {
            name: ranked_shares(
                max(LEAST_MS, 1e3 * value) for run in of_one for value in run.values_s(figure)
            )
            for name, of_one in runs.items()
        }
        for figure in ("ttft", "tpot", "itl", "e2el")
    }


@suite(
    "serve",
    "Serving over HTTP",
    option("--target", metavar="URL", help="the server to measure, as http://127.0.0.1:8000"),
    option("--name", "baton", "of the target in the table"),
    option(
        "--rival",
        [],
        "measured in turns with the target; PREFILL_URL+DECODE_URL are vLLM's, joined here",
        action="append",
        metavar="NAME=URL",
    ),
    option("--model", help="named in requests (the first that each server lists)"),
    option("--api-key", api_key() or "", "for all servers (BATON_API_KEY)"),
    option("--requests", NUM_REQUESTS, "a round"),
    option("--rounds", 5, "of which the medians are taken"),
    option("--concurrency", type=int, help="closed loop: requests at once (all)"),
    option("--rate", type=float, help="open loop: requests a second on average, Poisson"),
    option("--input", INPUT, "tokens (16-256)", type=LengthBounds.parse, metavar="LOW-HIGH"),
    option("--output-tokens", OUTPUT, "(16-128)", type=LengthBounds.parse, metavar="LOW-HIGH"),
    option("--vocab-size", type=int, help="prompts have ids below (what servers list, or 32000)"),
    option("--seed", 0, "of the first round; the next has the next"),
    option("--trace", type=Path, help="a Mooncake JSON-lines or an Azure CSV file, open loop"),
    option("--scale", 1.0, "divides the trace's lengths"),
    option("--speed", 1.0, "2: the trace in half its time"),
    option("--unary", False, "answers in one piece, not as server-sent events"),
    option(
        "--goodput",
        [],
        "objectives that goodput counts, as ttft:200 tpot:50 e2el:1000, or by AIPerf's names",
        nargs="+",
        metavar="NAME:MS",
    ),
    option("--bar-throughput", type=float, help="target over rival, at least"),
    option("--bar-ttft", type=float, help="target's median over rival's, at most"),
    option("--overhead", False, "measure the control plane alone"),
    option("--before", type=Path, metavar="CHECKOUT", help="of an earlier Baton: compare CPU time a request"),
    option("--trace-ratio", type=float, metavar="SHARE", help="of traces: measure with OpenTelemetry, too"),
    option("--gateways", 1, "processes behind the port"),
    option("--prefill", 0, "stub prefill workers; 0: decode alone"),
    option("--decode", 1, "stub decode workers"),
    option("--policy", RouterConfig().policy, choices=POLICIES),
    option("--step-ms", 0.0, "a stub's step"),
    option("--seconds", 3.0, "a point, a round"),
    output=Path(),
)
def measure(options: Namespace, report: Report) -> None:
    """Measure servers, or the control plane. ConfigError: options do not fit, or a server does not answer."""
    if options.rounds < 1 or options.requests < 1:
        raise ConfigError("--rounds and --requests: expected 1 or more")
    for name in ("rate", "scale", "speed", "seconds", "concurrency"):
        value = getattr(options, name)
        if value is not None and not value > 0:
            raise ConfigError(f"--{name}: expected more than 0, got {value}")
    if options.overhead == (options.target is not None):
        raise ConfigError("give --target URL, or --overhead, which starts what it measures")
    if options.before is not None and not (options.overhead and (options.before / "bench").is_dir()):
        raise ConfigError("--before: expected the folder of a Baton checkout, and --overhead")
    if options.overhead:
        measure_overhead(options, _rivals(options.rival), report)
    else:
        _measure_servers(options, report)


def _measure_servers(options: Namespace, report: Report) -> None:
    report.title = f"Serving over HTTP, {_describe(options)}"
    runs = uvloop.run(_load({options.name: options.target} | _rivals(options.rival), options, report))
    report.rows += rows_of(runs, Bars(options.bar_throughput, options.bar_ttft))
    given = {name: value for name, value in vars(options).items() if name != "api_key"}
    report.extra = {
        "options": {name: str(value) if isinstance(value, Path) else value for name, value in given.items()},
        "rounds": {name: [run.as_json() for run in of_one] for name, of_one in runs.items()},
    }
    aiperf = report.folder / f"{report.name}-aiperf.json"
    aiperf.parent.mkdir(parents=True, exist_ok=True)
    aiperf.write_text(json.dumps(aiperf_export(runs[options.name]), indent=1) + "\n")
    label, panels = "share that was no slower", curves_of(runs)
    report.plot = Plot(panels, y_label=label, is_log=True, is_stepped=True)


async def _load(servers: Mapping[str, str], options: Namespace, report: Report) -> dict[str, list[Run]]:
    clients = {name: _client(url, options.api_key) for name, url in servers.items()}
    models = await _find_models(clients, options)
    shape = _shape(options)
    warm_up = random_jobs(NUM_WARM_UP, WARM_UP_SEED, vocab_size=options.vocab_size)
    for name, client in clients.items():
        warmed = await Load(client, models[name], shape._replace(concurrency=NUM_WARM_UP)).run(warm_up)
        if not warmed.samples:
            why = ", ".join(dict.fromkeys(warmed.failures)) + (f": {warmed.said}" if warmed.said else "")
            raise ConfigError(f"{name} answers nothing that counts: {why}")
    runs: defaultdict[str, list[Run]] = defaultdict(list)
    for number, name in report.turns(clients, options.rounds):
        jobs = _jobs(options, options.seed + number)
        runs[name].append(await Load(clients[name], models[name], shape).run(jobs))
    for client in clients.values():
        client.close()
    return {name: runs[name] for name in servers}


async def _find_models(clients: Mapping[str, Server], options: Namespace) -> dict[str, str]:
    """Return model names by server. An absent --vocab-size becomes the smallest that a server lists."""
    if options.model is None:
        listed = {name: await model_of(client) for name, client in clients.items()}
    else:
        listed = dict.fromkeys(clients, Model(options.model, None))
    sizes = [model.vocab_size for model in listed.values() if model.vocab_size is not None]
    options.vocab_size = options.vocab_size or min(sizes, default=VOCAB_SIZE)
    return {name: model.name for name, model in listed.items()}


def _client(url: str, api_key: str) -> Server:
    prefill, plus, decode = url.partition("+")
    if plus:
        return VllmPair(Address(prefill, api_key), Address(decode, api_key))
    return Client(Address(url, api_key))


def _shape(options: Namespace) -> Shape:
    is_open = options.rate is not None or options.trace is not None
    return Shape(
        stream=not options.unary,
        concurrency=None if is_open else options.concurrency or options.requests,
        slo=Slo.parse(options.goodput),
    )


def _jobs(options: Namespace, seed: int) -> list[Job]:
    if options.trace is not None:
        requests = read_trace(options.trace, scale=options.scale, limit=options.requests)
        return trace_jobs(requests, vocab_size=options.vocab_size, speed=options.speed)
    lengths = {"num_input": options.input, "num_output": options.output_tokens}
    jobs = random_jobs(options.requests, seed, vocab_size=options.vocab_size, **lengths)
    return jobs if options.rate is None else poisson(jobs, options.rate, seed)


def _describe(options: Namespace) -> str:
    kind = "unary" if options.unary else "SSE"
    if options.trace is not None:
        return f"{kind}, open loop, {options.trace.name}"
    if options.rate is not None:
        return f"{kind}, open loop, {options.requests} requests, {options.rate:g} a second"
    return (
        f"{kind}, closed loop, {options.requests} requests, {options.concurrency or options.requests} at once"
    )


def _rivals(given: Sequence[str]) -> dict[str, str]:
    rivals = dict(each.partition("=")[::2] for each in given)
    for name, url in rivals.items():
        if not name or not url:
            raise ConfigError(f"--rival: expected NAME=URL, got {name}={url}")
    return rivals
