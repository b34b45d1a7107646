"""Tenants of real processes: whether a noisy tenant slows the others, and goodput under overload.

One prefill and one decode worker of `tiny`, a router, a gateway and the client share this machine's cores.
So every load is a part of what they could do together in the same run. A noisy tenant costs the others some
time in any order of work: its requests must be read, and the other core is never idle. The third load of
each round measures that cost: the same requests, all refused at the gateway, with all cores busy. Processes
also wait for a core, more so where both workers are busy; the kernel says by how much that stretches each
load.

Clients behave as openai-python does: a refused call comes again after the time that it was told, or after
half a second and then one, twice at most, and not if it is told not to. The times of a call count from when
it was due: a call that a full server delays is late all the same.
"""

import asyncio
import os
import secrets
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, nullcontext
from hashlib import sha256
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Final, NamedTuple

import yaml

from baton.bench.processes import MODEL, Child, serve
from baton.bench.report import Report, Row, at_least, at_most
from baton.bench.serve.client import Address, Client, sleep_until
from baton.bench.serve.figures import Bad, Sample, Slo, quantile, streamed
from baton.bench.serve.load import FIRST_TOKEN, Job
from baton.bench.tenants.cases import arrivals
from baton.cluster.runtimes.base import descendants
from baton.errors import PeerGone

STEP_TOKENS: Final = 256  # between two steps a worker chooses the tenant that is due
OPTIONS: Final = (
    *("--runtime", "local", "--prefill", "1", "--decode", "1", "--kv-cache-memory", "256MiB"),
    *("--max-num-batched-tokens", str(STEP_TOKENS), "--drain-timeout", "1"),
)
REFUSALS: Final = (429, 503)
MAX_RETRIES: Final = 2  # openai-python's
MAX_HONOURED_S: Final = 60.0  # a longer retry-after is not believed
BACK_OFF_S: Final = 0.5
MAX_TOLD_S: Final = 600
IDLE_S: Final = 0.3
# Multiplies as a step of a small model does, but only while nothing else wants the core (SCHED_IDLE).
BUSY: Final = """
import os, select, sys
import torch
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0)) if hasattr(os, "SCHED_IDLE") else os.nice(19)
torch.set_num_threads(1)
rows, weight = torch.ones(256, 512, dtype=torch.bfloat16), torch.ones(512, 2048, dtype=torch.bfloat16)
print("ready", flush=True)
while not select.select([sys.stdin], [], [], 0)[0]:
    rows @ weight
"""

# The loads. Lengths are about half of the simulator's (bench/tenants/cases.py), as far as the model's context
# allows. Rates are in prompt tokens a second. No two prompts begin alike.
VOCAB_SIZE: Final = 1024
SLO: Final = Slo(ttft_s=2.0, tpot_s=0.2)
VICTIMS: Final = tuple(f"victim-{number}" for number in range(9))
VICTIM_TOKENS: Final = 850  # a prompt, on average
NOISY: Final = "noisy"
NOISY_TOKENS: Final = 3900
STOPPED: Final = "stopped"  # like the noisy tenant, but over its quota with the first request
SERVICE: Final = tuple(f"tenant-{number}" for number in range(4))
SERVICE_TOKENS: Final = 900
SLOS: Final = dict.fromkeys((*VICTIMS, *SERVICE), SLO) | {NOISY: Slo(), STOPPED: Slo()}


class Call(NamedTuple):
    """A job of one tenant."""

    tenant: str
    job: Job


def victims(tokens_per_s: float, until_s: float, random: Random) -> list[Call]:
    """Return the calls of several equal tenants together."""
    at_s = arrivals(tokens_per_s / VICTIM_TOKENS, 0.0, until_s, random)
    return [
        _call(random.choice(VICTIMS), each_s, _length(random), random.randint(4, 16), random)
        for each_s in at_s
    ]


def noisy(tokens_per_s: float, until_s: float, random: Random) -> list[Call]:
    """Return the calls of one more tenant, in long prompts."""
    at_s = arrivals(tokens_per_s / NOISY_TOKENS, 0.0, until_s, random)
    return [_call(NOISY, each_s, NOISY_TOKENS, 8, random) for each_s in at_s]


def renewed(calls: Sequence[Call], random: Random) -> list[Call]:
    """Return the same calls with other prompts, as long, so that no prefix is cached."""
    return [_call(tenant, job.arrival_s, len(job.prompt), job.num_tokens, random) for tenant, job in calls]


def service(loads: Sequence[tuple[float, float]], random: Random) -> list[Call]:
    """Return calls of four tenants with objectives. loads: seconds, and tokens a second."""
    calls, since_s = list[Call](), 0.0
    for span_s, tokens_per_s in loads:
        for at_s in arrivals(tokens_per_s / SERVICE_TOKENS, since_s, since_s + span_s, random):
            num_tokens, num_answered = random.randint(120, 1680), random.randint(4, 32)
            calls.append(_call(random.choice(SERVICE), at_s, num_tokens, num_answered, random))
        since_s += span_s
    return calls


def _length(random: Random) -> int:
    return max(16, min(NOISY_TOKENS, round(random.lognormvariate(6.45, 0.8))))


def _call(tenant: str, at_s: float, num_tokens: int, num_answered: int, random: Random) -> Call:
    prompt = tuple(random.choices(range(FIRST_TOKEN, VOCAB_SIZE), k=num_tokens))
    return Call(tenant, Job(prompt, num_answered, at_s))


VICTIM_LOAD: Final = 0.5  # of the capacity
TIMES_SHARE: Final = 50.0
LOADS: Final = (0.7, 1.0, 1.3, 1.6)  # one of which is the peak
OVERLOAD: Final = 3.0
AFTER: Final = 0.5
AT_ONCE: Final = 8
MOST_TOKENS: Final = 60_000  # of prompts, to find the capacity
WARM_S: Final = 2.0  # of each load, in which nothing counts
GRACE_S: Final = 5.0  # after a load, for its last answers
BIN_S: Final = 10.0
LOAD_NAMES: Final = ("alone", "beside", "apart")
MOMENT_S: Final = 2.0


class Outcome(NamedTuple):
    """The result of one HTTP request."""

    call: Call
    asked_s: float  # when the call was due, after the load began
    retry: int
    status: int = 0  # 0: no whole answer came before the load was over
    retry_after: str = ""  # the header
    may_return: bool = True
    sample: Sample | None = None  # None: no answer that counts

    @property
    def is_refused(self) -> bool:
        return self.status in REFUSALS

    @property
    def is_told(self) -> bool:
        """Whether the refusal says, in whole seconds, when to come again."""
        return self.retry_after.isdecimal() and 0 < int(self.retry_after) <= MAX_TOLD_S

    @property
    def is_good(self) -> bool:
        """Whether the answer met the objectives."""
        return self.sample is not None and SLO.is_met(self.sample)


class CoreTimes(NamedTuple):
    """Seconds that the threads of a process and its descendants ran, and waited for a core, by the kernel."""

    ran_s: float
    waited_s: float

    @classmethod
    def of(cls, pid: int) -> "CoreTimes":
        """Read the threads that live; zero for a process that has ended, and elsewhere than on Linux."""
        ran_ns = waited_ns = 0
        for each in (pid, *descendants(pid)):
            for file in Path(f"/proc/{each}/task").glob("*/schedstat"):
                try:
                    ran, waited, _ = map(int, file.read_text().split())
                except (OSError, ValueError):  # the thread has just ended, or this kernel does not count
                    continue
                ran_ns, waited_ns = ran_ns + ran, waited_ns + waited
        return cls(ran_ns / 1e9, waited_ns / 1e9)

    def stretch_since(self, before: "CoreTimes") -> float:
        """Return how many times longer work took than on a core of its own; 1.0: not known."""
        ran_s, waited_s = self.ran_s - before.ran_s, self.waited_s - before.waited_s
        return 1.0 + waited_s / ran_s if ran_s > 0.0 else 1.0


@contextmanager
def busy_cores() -> Iterator[list[int]]:
    """Keep every core busy with work of the scheduler's idle class; yield the process ids."""
    with ExitStack() as stack:
        children = [stack.enter_context(Child("-c", BUSY)) for _ in range(os.cpu_count() or 1)]
        for child in children:
            child.read()
        yield [child.pid for child in children]


class TenantServer:
    """A running `baton serve`, asked with the keys of its tenants."""

    def __init__(self, url: str, keys: Mapping[str, str], pid: int = 0) -> None:
        self.pid = pid
        self._clients = {tenant: Client(Address(url, key)) for tenant, key in keys.items()}

    def close(self) -> None:
        """Close all connections."""
        for client in self._clients.values():
            client.close()

    async def load(self, calls: Sequence[Call], until_s: float) -> list[Outcome]:
        """Make every call when it is due;

        calls that have not ended `until_s` after the begin are given up.
        """
        found: list[Outcome] = []
        begin_s = time.perf_counter()
        bodies = [call.job.body(MODEL, stream=True) for call in calls]
        asking = [
            asyncio.create_task(self._call(call, body, begin_s, found))
            for call, body in zip(calls, bodies, strict=True)
        ]
        _, late = await asyncio.wait(asking, timeout=until_s - (time.perf_counter() - begin_s))
        for task in late:
            task.cancel()
        for ended in await asyncio.gather(*asking, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended
        return found

    async def capacity(self, calls: Sequence[Call]) -> float:
        """Return the prompt tokens a second that a closed loop of AT_ONCE of these calls reaches."""
        left, found = iter(calls), list[Outcome]()
        begin_s = time.perf_counter()

        async def work() -> None:
            for call in left:
                await self._ask(call, call.job.body(MODEL, stream=True), time.perf_counter(), 0, found)

        await asyncio.gather(*(work() for _ in range(AT_ONCE)))
        num_tokens = sum(len(each.call.job.prompt) for each in found if each.sample is not None)
        return num_tokens / (time.perf_counter() - begin_s)

    async def settle(self, call: Call) -> None:
        """Wait until calls that were given up are out of the way: this call is answered at once."""
        while True:
            begin_s = time.perf_counter()
            outcome = await self._ask(call, call.job.body(MODEL, stream=True), begin_s, 0, [])
            if outcome.sample is not None and outcome.sample.ttft_s < IDLE_S:
                return
            await asyncio.sleep(IDLE_S)

    async def _call(self, call: Call, body: bytes, begin_s: float, found: list[Outcome]) -> None:
        due_s = begin_s + call.job.arrival_s
        for retry in range(MAX_RETRIES + 1):
            await sleep_until(due_s)
            outcome = await self._ask(call, body, due_s, retry, found, begin_s)
            if not (outcome.is_refused and outcome.may_return):
                return
            told_s = int(outcome.retry_after) if outcome.is_told else 0
            is_believed = 0 < told_s <= MAX_HONOURED_S
            due_s = time.perf_counter() + (told_s if is_believed else BACK_OFF_S * 2**retry)

    async def _ask(
        self, call: Call, body: bytes, due_s: float, retry: int, found: list[Outcome], begin_s: float = 0.0
    ) -> Outcome:
        """Return the outcome; it is in `found` too, even where the load is over before."""
        outcome = Outcome(call, due_s - begin_s, retry)
        try:
            answer = await self._clients[call.tenant].post("/v1/completions", body)
            outcome = outcome._replace(
                status=answer.status,
                retry_after=answer.retry_after,
                may_return=answer.should_retry != "false",
            )
            outcome = outcome._replace(sample=streamed(answer, due_s, call.job.num_tokens))
        except (Bad, PeerGone):
            pass
        finally:
            found.append(outcome)
        return outcome


def tenants_yaml(keys: Mapping[str, str], slos: Mapping[str, Slo], stopped: Collection[str] = ()) -> str:
    """Return a tenants file: equal weights, and no quota except a token a second for `stopped`."""
    tenants: dict[str, object] = {}
    for name, key in keys.items():
        slo = slos.get(name, Slo())
        limits = {"ttft_ms": slo.ttft_s, "tpot_ms": slo.tpot_s}
        sla = {limit: 1e3 * limit_s for limit, limit_s in limits.items() if limit_s is not None}
        digest = sha256(key.encode()).hexdigest()
        quotas = {"tokens_per_s": 1, "burst_tokens": 1} if name in stopped else {}
        tenants[name] = {"keys": [f"sha256:{digest}"], "sla": sla, "quotas": quotas}
    return yaml.safe_dump({"tenants": tenants}, sort_keys=False)


@asynccontextmanager
async def serving(
    slos: Mapping[str, Slo], folder: Path, stopped: Collection[str] = ()
) -> AsyncIterator[TenantServer]:
    """Run a cluster for these tenants and objectives. WorkerLost: it does not come up."""
    keys = {tenant: secrets.token_hex(16) for tenant in slos}
    file = folder / "tenants.yaml"
    file.write_text(tenants_yaml(keys, slos, stopped))
    async with serve(folder, [*OPTIONS, "--tenants", str(file)]) as served:
        server = TenantServer(served.url, keys, served.pid)
        try:
            yield server
        finally:
            server.close()


class Size(NamedTuple):
    """The number of rounds, and the lengths of the loads."""

    rounds: int = 9  # the p99 of a round is of two or three requests
    round_s: float = 16.0
    point_s: float = 12.0  # of a load that may be the peak
    overload_s: float = 60.0
    after_s: float = 20.0


class Pair(NamedTuple):
    """The first requests of the victims in one round, by load."""

    alone: list[Outcome]
    beside: list[Outcome]  # beside the noisy tenant
    apart: list[Outcome]  # beside the same requests, refused, and busy cores
    stretches: Mapping[str, float] = {}  # by load: how much longer work took for want of a core

    @property
    def stretch_ratio(self) -> float:
        return self.stretches.get("beside", 1.0) / self.stretches.get("alone", 1.0)


class Overload(NamedTuple):
    """The outcomes of the overload, and of loads before and after it, one of which is the peak."""

    points: list[list[Outcome]]
    outcomes: list[Outcome]
    size: Size


async def measure_real(size: Size, seed: int, report: Report) -> None:
    """Measure both cases. WorkerLost: `baton serve` does not come up."""
    with tempfile.TemporaryDirectory() as folder:
        async with serving(SLOS, Path(folder), [STOPPED]) as server:
            report.tell("warming up")
            await _capacity(server, "victims", Random(seed))  # the first prompts of each length are slow
            pairs = []
            for number in range(size.rounds):
                report.tell(f"noisy tenant, round {number + 1} of {size.rounds}", number / (size.rounds + 5))
                pairs.append(await _pair(server, size, Random(f"{seed} {number}")))
            report.tell("overload", size.rounds / (size.rounds + 5))
            overload = await _overload(server, size, Random(seed))
    report.rows += noisy_rows(pairs) + overload_rows(overload)
    end_s = size.overload_s + size.after_s
    report.extra = {
        "seed": seed,
        **{f"ttft_p99_{name}_s": [_ttft_s(getattr(pair, name), 99) for pair in pairs] for name in LOAD_NAMES},
        "stretches": [dict(pair.stretches) for pair in pairs],
        "goodput_of_points": [_num_good(point) / size.point_s for point in overload.points],
        "goodput_every_10_s": goodputs(overload.outcomes, 0.0, end_s),
    }


async def _pair(server: TenantServer, size: Size, random: Random) -> Pair:
    capacity, until_s = await _capacity(server, "victims", random), WARM_S + size.round_s
    calls = victims(VICTIM_LOAD * capacity, until_s, random)
    flood = noisy(TIMES_SHARE * capacity / (len(VICTIMS) + 1), until_s, random)
    stopped = [call._replace(tenant=STOPPED) for call in flood]
    loads = dict(zip(LOAD_NAMES, (calls, calls + flood, calls + stopped), strict=True))
    found, stretches = {}, {}
    for name in random.sample(sorted(loads), len(loads)):
        load = renewed(sorted(loads[name], key=lambda call: call.job.arrival_s), random)
        with busy_cores() if name == "apart" else nullcontext():
            before = CoreTimes.of(server.pid)
            outcomes = await server.load(load, until_s + GRACE_S)
            stretches[name] = CoreTimes.of(server.pid).stretch_since(before)
        firsts = [each for each in outcomes if each.call.tenant in VICTIMS and not each.retry]
        found[name] = [each for each in firsts if each.asked_s >= WARM_S]
        await server.settle(calls[0])
    return Pair(**found, stretches=stretches)


async def _overload(server: TenantServer, size: Size, random: Random) -> Overload:
    capacity = await _capacity(server, "service", random)

    async def points() -> list[list[Outcome]]:
        found = []
        for load in LOADS:
            span_s = WARM_S + size.point_s
            outcomes = await server.load(service([(span_s, load * capacity)], random), span_s + GRACE_S)
            found.append([each for each in outcomes if each.asked_s >= WARM_S])
        return found

    before = await points()
    calls = service([(size.overload_s, OVERLOAD * capacity), (size.after_s, AFTER * capacity)], random)
    outcomes = await server.load(calls, size.overload_s + size.after_s + GRACE_S)
    await server.settle(calls[0])
    return Overload(before + await points(), outcomes, size)


async def _capacity(server: TenantServer, kind: str, random: Random) -> float:
    """Return the prompt tokens a second that the server reaches now."""
    calls: list[Call]
    calls = victims(MOST_TOKENS, 1.0, random) if kind == "victims" else service([(1.0, MOST_TOKENS)], random)
    return await server.capacity(calls)


def noisy_rows(pairs: Sequence[Pair]) -> list[Row]:
    """Return medians over the rounds of the ratios beside / alone."""

    def ratio(name: str, percent: float) -> float:
        return median(_ttft_s(getattr(pair, name), percent) / _ttft_s(pair.alone, percent) for pair in pairs)

    alone, beside, apart = ([each for pair in pairs for each in getattr(pair, name)] for name in LOAD_NAMES)
    p99s = f"all: {_ttft_s(beside, 99):.3f} s, alone {_ttft_s(alone, 99):.3f} s; {len(alone)} requests"
    refused = f"{_ttft_s(apart, 99):.3f} s; its requests refused by the gateway, all cores busy"
    halves = f"{_ttft_s(beside, 50):.3f} s, alone {_ttft_s(alone, 50):.3f} s"
    shares = f"{share_good(beside):.3f} of all, alone {share_good(alone):.3f}"
    stretch = median(pair.stretch_ratio for pair in pairs)
    attainment = median(share_good(pair.beside) / share_good(pair.alone) for pair in pairs)
    return [
        at_most("noisy tenant: victims' TTFT p99 / alone", ratio("beside", 99), "x", 1.15, p99s),
        Row("noisy tenant: the machine's part of that", ratio("apart", 99), "x", note=refused),
        Row("noisy tenant: all it runs takes longer / alone", stretch, "x", note="for want of a core"),
        Row("noisy tenant: victims' TTFT p50 / alone", ratio("beside", 50), "x", note=halves),
        at_least("noisy tenant: victims' SLO attainment / alone", attainment, "x", 0.95, shares),
    ]


def overload_rows(overload: Overload) -> list[Row]:
    """Return goodput during the overload and after it, and what refused calls were told."""
    outcomes, size = overload.outcomes, overload.size
    end_s = size.overload_s
    peak = max(_num_good(point) / size.point_s for point in overload.points)
    during = goodputs(outcomes, min(BIN_S, end_s / 2), end_s)
    good_again_s = recovery_s(outcomes, end_s, end_s + size.after_s)
    refused = [each for each in outcomes if each.is_refused]
    told = sum(each.is_told for each in refused) / max(1, len(refused))
    num_calls = sum(not each.retry for each in outcomes)
    returned = [each for each in outcomes if each.retry and each.asked_s < end_s]
    statuses = Counter(each.status for each in outcomes if not each.is_good)
    others = "not good: " + ", ".join(f"{num} x {status}" for status, num in sorted(statuses.items()))
    name, note = "overload: returned during it, and good", f"{len(returned)} returned"
    return [
        Row("overload: peak goodput", peak, "req/s", note=f"of loads {LOADS[0]:g} to {LOADS[-1]:g}"),
        at_least("overload: least goodput of any 10 s / peak", min(during) / peak, "x", 0.9, others),
        at_most("overload: until 95 % are good again", good_again_s, "s", 10.0),
        at_least("overload: refused with a time", 100 * told, "%", 100.0, f"{len(refused)} refused"),
        Row("overload: HTTP requests a call", len(outcomes) / max(1, num_calls), "", note="3 if all retried"),
        Row(name, 100 * share_good(returned), "%", note=note),
    ]


def goodputs(outcomes: Sequence[Outcome], since_s: float, until_s: float) -> list[float]:
    """Return good requests a second in each whole span of BIN_S, by when they were asked."""
    num_bins = max(1, int((until_s - since_s) / BIN_S))
    width_s = min(BIN_S, until_s - since_s)
    counts = Counter(int((each.asked_s - since_s) // width_s) for each in outcomes if each.is_good)
    return [counts[number] / width_s for number in range(num_bins)]


def recovery_s(outcomes: Sequence[Outcome], end_s: float, until_s: float) -> float:
    """Return the seconds from `end_s` until 95 % of the requests of every later MOMENT_S are good."""
    recovered_s = 0.0
    for number in range(int((until_s - end_s) / MOMENT_S)):
        since_s = end_s + number * MOMENT_S
        span = [each for each in outcomes if since_s <= each.asked_s < since_s + MOMENT_S]
        if span and share_good(span) < 0.95:
            recovered_s = (number + 1) * MOMENT_S
    return recovered_s


def share_good(outcomes: Sequence[Outcome]) -> float:
    """Return the share that met the objectives; 1.0 of none."""
    return fmean(each.is_good for each in outcomes) if outcomes else 1.0


def _ttft_s(outcomes: Sequence[Outcome], percent: float) -> float:
    """Return a percentile over the answers; inf where there is none."""
    found = [each.sample.ttft_s for each in outcomes if each.sample is not None]
    return quantile(found, percent) if found else float("inf")


def _num_good(outcomes: Sequence[Outcome]) -> int:
    return sum(each.is_good for each in outcomes)
