"""The cost of the control plane: gateways and a router in front of workers that compute nothing.

The checkouts are compared by CPU time a request, which other programs on the machine disturb less than rates.
Every round starts the servers anew, each alone on the machine: of two control planes of the same code, one
takes up to a tenth more CPU time than the other for as long as they live. docs/benchmarks.md explains the
figures.
"""

import argparse
import asyncio
import contextlib
import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

import psutil
import uvloop

from baton.bench.clusters import WatchedCluster, local_cluster
from baton.bench.processes import Child, ProcessEnded
from baton.bench.report import Report, Row, at_least, at_most, format_number, mean_with_error, percentile
from baton.bench.serve.client import Address, Client
from baton.bench.serve.figures import Run
from baton.bench.serve.load import Hammer, Point, model_of
from baton.config.cluster import ServeConfig, WorkersConfig
from baton.config.engine import EngineSettings
from baton.config.gateway import GatewaySettings
from baton.config.router import RouterConfig
from baton.errors import ConfigError

BATON: Final = "baton"
BEFORE: Final = "before"
TRACED: Final = "baton, traced"
LIMIT: Final = "bare asyncio"
UNARY: Final = tuple(Point(1, stream=False, num_connections=number) for number in (1, 16, 64))
SSE: Final = tuple(Point(64, stream=True, num_connections=number) for number in (1, 16, 64))
IDLE: Final = Point(2, stream=True, num_connections=1)
POINTS: Final = (IDLE, *UNARY, *SSE)
UNARY_BAR, SSE_BAR = 2_000, 50_000  # requests/s and tokens/s, of the largest number of connections
TTFT_BARS_MS: Final = {50: 3.0, 99: 10.0}
WARM_UP_S: Final = 0.5
STATUS_S: Final = 3.0
PREFILLED: Final = re.compile(
    r'^baton_worker_generated_tokens_total\{[^}]*role="prefill"[^}]*\} (\S+)$', re.MULTILINE
)
PREFILLED_BAR: Final = 0.99
CPU_BAR: Final = 1.03  # CPU time a request, over that of the checkout before, or that without traces
STUB: Final = "baton.bench.serve.stub"
STUB_TITLE: Final = re.compile(r"^baton (prefill|decode)-")
# Runs in a checkout and serves its control plane; the checkout needs `Plane` and `served`.
HOST: Final = """
import asyncio, json, sys
from baton.bench.serve.overhead import Plane, served
async def main():
    async with served(Plane(**json.loads(sys.argv[1]))) as url:
        print(url, flush=True)
        await asyncio.to_thread(sys.stdin.read)
asyncio.run(main())
"""

Results = Mapping[tuple[str, Point], Sequence[Run]]


class Plane(NamedTuple):
    """The number of processes of each kind. Without prefill workers decode workers prefill too."""

    model: str
    num_gateways: int = 1
    num_prefill: int = 0
    num_decode: int = 1
    step_s: float = 0.0
    policy: str = RouterConfig().policy
    traces: str | None = None  # the URL of a collector; older checkouts have neither this field nor the next
    trace_ratio: float = 1.0

    def as_json(self) -> str:
        """Return what HOST takes, in any checkout: fields without their defaults."""
        default = Plane(self.model)._asdict()
        given = {name: value for name, value in self._asdict().items() if value != default[name]}
        return json.dumps({"model": self.model} | given)


def stub_cluster(plane: Plane, tenants: str | None = None) -> AbstractAsyncContextManager[WatchedCluster]:
    """Run a router, stub workers and gateways. tenants: a file."""
    config = ServeConfig(
        model=plane.model,
        runtime="local",
        port=0,
        gateways=plane.num_gateways,
        prefill=WorkersConfig(num_workers=plane.num_prefill),
        decode=WorkersConfig(num_workers=plane.num_decode),
        tenants=tenants,
        router=RouterConfig(policy=plane.policy, redis="none"),
        engine=EngineSettings(device="cpu"),
        gateway=GatewaySettings(otlp_traces_endpoint=plane.traces, trace_sample_ratio=plane.trace_ratio),
    )
    return local_cluster(config, (sys.executable, "-m", STUB, str(plane.step_s)))


@contextlib.asynccontextmanager
async def served(plane: Plane) -> AsyncIterator[str]:
    """Run a control plane; yield the URL of its gateways. HOST calls this in every checkout."""
    async with stub_cluster(plane) as cluster:
        yield cluster.url


async def prefilled(url: str) -> int:
    """Return how many prompts prefill workers have computed; the count is up to STATUS_S old."""
    await asyncio.sleep(STATUS_S)
    with contextlib.closing(Client(Address(url))) as client:
        scrape = (await client.get("/metrics")).body.decode()
    return sum(int(float(count)) for count in PREFILLED.findall(scrape))


class Target(NamedTuple):
    """A server to measure."""

    url: str
    pid: int | None = None  # of the process that has started the server's processes; None: not known
    model: str | None = None  # None: the first that the server lists

    def cpu_s(self) -> float:
        """Return the CPU time so far of gateways, router and their helpers: all but the stubs."""
        if self.pid is None:
            return 0.0
        total = 0.0
        for process in psutil.Process(self.pid).children(recursive=True):
            if not STUB_TITLE.search(" ".join(process.cmdline())):
                used = process.cpu_times()
                total += used.user + used.system
        return total


@contextlib.contextmanager
def hosted(plane: Plane, checkout: Path | None = None) -> Iterator[Target]:
    """Run a control plane of this code, or of the code of another checkout.

    ConfigError: it does not start.
    """
    environment = os.environ | ({} if checkout is None else {"PYTHONPATH": str(checkout.resolve())})
    with Child("-c", HOST, plane.as_json(), cwd=checkout, environment=environment) as child:
        try:
            url = child.read()
        except ProcessEnded as error:
            raise ConfigError(f"the control plane of {checkout or 'this code'} does not start") from error
        yield Target(url, child.pid)


@contextlib.contextmanager
def limit() -> Iterator[Target]:
    """Run a server that does nothing but answer (bench/serve/limit.py). ProcessEnded: it does not start."""
    with Child("-m", "baton.bench.serve.limit") as child:
        yield Target(f"http://127.0.0.1:{child.read()}", model="limit")


@contextlib.contextmanager
def traced(plane: Plane, ratio: float) -> Iterator[Target]:
    """Run a control plane of this code that exports this share of traces to a server that takes them."""
    with (
        limit() as collector,
        hosted(plane._replace(traces=collector.url, trace_ratio=ratio)) as target,
    ):
        yield target


def started(url: str) -> AbstractContextManager[Target]:
    """Return a server that the user has started."""
    return nullcontext(Target(url))


def measure_overhead(options: argparse.Namespace, rivals: Mapping[str, str], report: Report) -> None:
    """Measure the control plane in turns with the limit, and with rivals by their URLs.

    ConfigError: a control plane does not start.
    """
    plane = Plane(
        model="tiny",
        num_gateways=options.gateways,
        num_prefill=options.prefill,
        num_decode=options.decode,
        step_s=options.step_ms / 1e3,
        policy=options.policy,
    )
    report.name = "serve-overhead-pd" if plane.num_prefill else "serve-overhead"
    if options.trace_ratio is not None:
        report.name += "-traced"
    report.title = (
        f"Control plane: {plane.num_gateways} gateways, a router, {plane.num_prefill} prefill and "
        f"{plane.num_decode} decode workers of no model, and the client"
    )
    servers: dict[str, Callable[[], AbstractContextManager[Target]]] = {BATON: partial(hosted, plane)}
    if options.before is not None:  # next to the one that it is compared with
        servers[BEFORE] = partial(hosted, plane, options.before)
    if options.trace_ratio is not None:
        servers[TRACED] = partial(traced, plane, options.trace_ratio)
    servers |= {name: partial(started, url) for name, url in rivals.items()}
    servers[LIMIT] = limit
    results: defaultdict[tuple[str, Point], list[Run]] = defaultdict(list)
    num_prefilled = 0
    for _, name in report.turns(servers, options.rounds):
        with servers[name]() as target:
            measured = uvloop.run(measure_points(target, options.seconds, name, report.tell))
            if name == BATON and plane.num_prefill:
                num_prefilled += asyncio.run(prefilled(target.url))
        for point, run in measured.items():
            results[name, point].append(run)
    report.rows += overhead_rows(results, list(servers)) + cpu_rows(results)
    if plane.num_prefill:
        report.rows.append(path_row(plane, results, num_prefilled))
    report.extra = {"plane": plane._asdict(), "rounds": options.rounds, "points": as_json(results)}


async def measure_points(
    target: Target, seconds: float, name: str, tell: Callable[[str], None]
) -> dict[Point, Run]:
    """Measure a server at all POINTS, after a warm-up at each."""
    with contextlib.closing(Client(Address(target.url))) as client:
        model = target.model or (await model_of(client)).name
    for point in POINTS:
        await Hammer(Address(target.url), model, point).run(min(WARM_UP_S, seconds))
    runs = {}
    for point in POINTS:
        tell(f"{name}: {point.name}")
        before_s = target.cpu_s()
        run = await Hammer(Address(target.url), model, point).run(seconds)
        runs[point] = run._replace(cpu_s=target.cpu_s() - before_s)
    return runs


def cpu_rows(results: Results) -> list[Row]:
    """Return the CPU time a request at each point, with and without traces, over that of the checkout before.

    Without a checkout before, that with traces is compared with that without. The value is the median of the
    rounds' ratios. The note has the mean of the ratios and its standard error.
    """
    names = {name for name, _ in results}
    base = BEFORE if BEFORE in names else BATON
    rows = []
    for name, point in results:
        if name not in (BATON, TRACED) or name == base:
            continue
        rounds = zip(results[name, point], results[base, point], strict=True)
        pairs_us = [
            (_cpu_us(ours), _cpu_us(other)) for ours, other in rounds if ours.samples and other.samples
        ]
        if not pairs_us:
            continue  # the row of the answers that do not count says why
        ratios = [ours_us / base_us for ours_us, base_us in pairs_us]
        ours_us, base_us = (median(each) for each in zip(*pairs_us, strict=True))
        note = f"{format_number(ours_us)} us a request, {base} {format_number(base_us)}"
        note += f"; {mean_with_error(ratios)}"
        traces = ", traced" if name == TRACED else ""
        rows.append(at_most(f"CPU time{traces}: {point.name}", median(ratios), "times", CPU_BAR, note))
    return rows


def _cpu_us(run: Run) -> float:
    return 1e6 * run.cpu_s / len(run.samples)


def path_row(plane: Plane, results: Results, num_prefilled: int) -> Row:
    """Return the share of prompts that prefill workers computed.

    There is no limit for the policy `cost`, which leaves some prompts to the decode worker.
    """
    num_answers = sum(
        len(each.samples) for (name, _), runs in results.items() if name == BATON for each in runs
    )
    share = min(1.0, num_prefilled / num_answers) if num_answers else 0.0  # prompts of the warm-up count too
    bar = None if plane.policy == "cost" else PREFILLED_BAR
    return at_least("prompts by way of prefill workers", share, "of 1", bar)


def overhead_rows(results: Results, servers: Sequence[str]) -> list[Row]:
    """Return latency without load and rates at every point, beside those of the other servers."""
    rows = [_ttft(results, percent) for percent in TTFT_BARS_MS]
    for points, unit, bar in ((UNARY, "requests/s", UNARY_BAR), (SSE, "tokens/s", SSE_BAR)):
        for point in points:
            if (BATON, point) not in results:
                continue
            rate = _rate(results[BATON, point])
            note = _beside(results, servers, point, rate)
            rows.append(at_least(point.name, rate, unit, bar if point is points[-1] else None, note))
    failures = [failure for runs in results.values() for each in runs for failure in each.failures]
    why = "; ".join(sorted(set(failures)))[:200]
    rows.append(at_most("answers that do not count", len(failures), "", 0, why))
    return rows


def _ttft(results: Results, percent: int) -> Row:
    value_ms = _ttft_ms(results[BATON, IDLE], percent)
    others = [
        f"{name} {format_number(_ttft_ms(runs, percent))}"
        for (name, point), runs in results.items()
        if point == IDLE and name != BATON
    ]
    name = f"TTFT p{percent}, idle, of a model that takes no time"
    return at_most(name, value_ms, "ms", TTFT_BARS_MS[percent], ", ".join(others))


def _ttft_ms(runs: Sequence[Run], percent: int) -> float:
    values = [sample.ttft_s for each in runs for sample in each.samples]
    return 1e3 * percentile(values, percent) if values else float("inf")


def _rate(runs: Sequence[Run]) -> float:
    is_sse = any(sample.gaps_s for each in runs for sample in each.samples[:1])
    return median(each.tokens_per_s if is_sse else each.requests_per_s for each in runs)


def _beside(results: Results, servers: Sequence[str], point: Point, rate: float) -> str:
    samples = [sample for each in results[BATON, point] for sample in each.samples]
    notes = []
    if samples:
        notes.append(f"p50 {format_number(1e3 * percentile([sample.e2el_s for sample in samples], 50))} ms")
    if point.stream and samples:
        num_events = sum(len(sample.gaps_s) + 1 for sample in samples)
        notes.append(f"{sum(sample.num_tokens for sample in samples) / num_events:.2f} tokens an event")
    for name in servers:
        if name != BATON:
            other = _rate(results[name, point])
            notes.append(f"{name} {format_number(other)} ({rate / other:.0%})" if other else f"{name}: none")
    return ", ".join(notes)


def as_json(results: Results) -> list[dict[str, object]]:
    """Return what the JSON keeps of every point."""
    return [
        {
            "server": name,
            "point": point.name,
            "requests_per_s": [each.requests_per_s for each in runs],
            "cpu_s": [each.cpu_s for each in runs],
            "num_answers": [len(each.samples) for each in runs],
            "tokens_per_s": [each.tokens_per_s for each in runs],
            "num_failures": sum(len(each.failures) for each in runs),
        }
        for (name, point), runs in results.items()
    ]
