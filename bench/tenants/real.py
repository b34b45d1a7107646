"""Tenants of real processes: the cost of a noisy tenant to the others, and goodput under overload.

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
import time
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager, nullcontext, suppress
from pathlib import Path
from random import Random
from statistics import median
from typing import Final, NamedTuple

import msgspec

from baton.bench.clusters import MODEL, served_cluster, tenants_yaml
from baton.bench.processes import Child
from baton.bench.report import Report, Row
from baton.bench.serve.client import Address, Client, sleep_until
from baton.bench.serve.figures import Bad, streamed
from baton.bench.serve.load import FIRST_TOKEN, Job
from baton.bench.tenants.calls import (
    NOISY,
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
from baton.cluster.runtimes.base import descendants
from baton.errors import PeerGone
from baton.sim.timed.fast import MAX_RETRIES
from baton.sim.timed.fleet import CallOutcome, ClientCall
from baton.tenants import Sla

STEP_TOKENS: Final = 256  # between two steps a worker chooses the tenant that is due
OPTIONS: Final = (
    *("--runtime", "local", "--kv-cache-memory", "256MiB"),
    *("--max-num-batched-tokens", str(STEP_TOKENS), "--drain-timeout", "1"),
)
MAX_HONOURED_S: Final = 60.0  # a longer retry-after is not believed
BACK_OFF_S: Final = 0.5
MOST_TOLD_S: Final = 600.0
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
VOCAB_SIZE: Final = 1024
# Lengths are about half of the simulation's: the model's context is short. No two prompts begin alike.
WORKLOAD: Final = TenantWorkload(
    prompt=lambda random, num_tokens: tuple(random.choices(range(FIRST_TOKEN, VOCAB_SIZE), k=num_tokens)),
    sla=Sla(ttft_ms=2000.0, tpot_ms=200.0),
    victim_mean=850,
    victim_lognormal=(6.45, 0.8),
    victim_answers=(4, 16),
    longest=3900,
    noisy_answer=8,
    service_prompts=(120, 1680),
    service_answers=(4, 32),
)
STOPPED: Final = "stopped"  # like the noisy tenant, but over its quota with the first request
SLAS: Final = (
    {f"victim-{number}": WORKLOAD.sla for number in range(NUM_VICTIMS)}
    | {f"tenant-{number}": WORKLOAD.sla for number in range(4)}
    | {NOISY: Sla(), STOPPED: Sla()}
)
VICTIM_LOAD: Final = 0.5  # of the capacity
TIMES_SHARE: Final = 50.0
LOADS: Final = (0.7, 1.0, 1.3, 1.6)  # one of which is the peak
OVERLOAD: Final = 3.0
AFTER: Final = 0.5
AT_ONCE: Final = 8
MOST_TOKENS: Final = 60_000  # of prompts, to find the capacity
WARM_S: Final = 2.0  # of each load, in which nothing counts
GRACE_S: Final = 5.0  # after a load, for its last answers
MOMENT_S: Final = 2.0
LOAD_NAMES: Final = ("alone", "beside", "apart")


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

    async def load(self, calls: Sequence[ClientCall], until_s: float) -> list[CallOutcome]:
        """Make every call when it is due; give up calls that have not ended `until_s` after the begin."""
        found: list[CallOutcome] = []
        begin_s = time.perf_counter()
        with suppress(TimeoutError):
            async with asyncio.timeout(until_s), asyncio.TaskGroup() as group:
                for call, body in [(call, _body(call)) for call in calls]:
                    group.create_task(self._call(call, body, begin_s, found))
        return found

    async def capacity(self, calls: Sequence[ClientCall]) -> float:
        """Return the prompt tokens a second that a closed loop of AT_ONCE of these calls reaches."""
        left, begin_s = iter(calls), time.perf_counter()

        async def work() -> int:
            return sum([call.num_tokens for call in left if (await self._ask_now(call)).ended_s >= 0])

        num_tokens = sum(await asyncio.gather(*(work() for _ in range(AT_ONCE))))
        return num_tokens / (time.perf_counter() - begin_s)

    async def settle(self, call: ClientCall) -> None:
        """Wait until calls that were given up are out of the way: this call is answered at once."""
        while not ((outcome := await self._ask_now(call)).ended_s >= 0 and outcome.ttft_s < IDLE_S):
            await asyncio.sleep(IDLE_S)

    async def _ask_now(self, call: ClientCall) -> CallOutcome:
        outcome = CallOutcome(call=call, asked_s=0.0)
        await self._ask(outcome, _body(call), time.perf_counter())
        return outcome

    async def _call(self, call: ClientCall, body: bytes, begin_s: float, found: list[CallOutcome]) -> None:
        due_s = begin_s + call.at_s
        for retry in range(MAX_RETRIES + 1):
            await sleep_until(due_s)
            outcome = CallOutcome(call=call, asked_s=due_s - begin_s, retry=retry)
            found.append(outcome)  # also where the load is over before the answer
            should_retry = await self._ask(outcome, body, due_s)
            if not outcome.refusal or not should_retry:
                return
            is_believed = 0 < outcome.retry_after_s <= MAX_HONOURED_S
            wait_s = outcome.retry_after_s if is_believed else BACK_OFF_S * 2**retry
            due_s = time.perf_counter() + wait_s

    async def _ask(self, outcome: CallOutcome, body: bytes, due_s: float) -> bool:
        """Ask, and complete the outcome; return whether a refused call may come again."""
        call, should_retry = outcome.call, True
        try:
            answer = await self._clients[call.tenant].post("/v1/completions", body)
            if answer.is_refusal:
                outcome.refusal, should_retry = str(answer.status), answer.should_retry != "false"
                outcome.retry_after_s = answer.retry_after_s
            sample = streamed(answer, due_s, call.num_answered)
            outcome.first_token_s = outcome.asked_s + sample.ttft_s
            outcome.ended_s = outcome.asked_s + sample.e2el_s
        except (Bad, PeerGone):
            pass
        return should_retry


def _body(call: ClientCall) -> bytes:
    return Job(tuple(call.token_ids), call.num_answered).body(MODEL, stream=True)


@asynccontextmanager
async def serving(slas: Mapping[str, Sla], stopped: Collection[str] = ()) -> AsyncIterator[TenantServer]:
    """Run a cluster for these tenants and objectives. WorkerLost: it does not come up."""
    keys = {tenant: secrets.token_hex(16) for tenant in slas}
    tenants = tenants_yaml(keys, slas, stopped)
    async with served_cluster(OPTIONS, prefill=1, decode=1, tenants=tenants) as cluster:
        with closing(TenantServer(cluster.url, keys, cluster.serve_pid)) as server:
            yield server


class Size(NamedTuple):
    """The number of rounds, and the lengths of the loads."""

    rounds: int = 9  # the p99 of a round is of two or three requests
    round_s: float = 16.0
    point_s: float = 12.0  # of a load that may be the peak
    overload_s: float = 60.0
    after_s: float = 20.0


class Pair(NamedTuple):
    """The first requests of the victims in one round, by load."""

    alone: list[CallOutcome]
    beside: list[CallOutcome]  # beside the noisy tenant
    apart: list[CallOutcome]  # beside the same requests, refused, and busy cores
    stretches: Mapping[str, float]  # by load: how much longer work took for want of a core


async def measure_real(size: Size, seed: int, report: Report) -> None:
    """Measure both cases. WorkerLost: `baton serve` does not come up."""
    async with serving(SLAS, [STOPPED]) as server:
        report.tell("warming up")
        await server.capacity(_victims(Random(seed)))  # the first prompts of each length are slow
        pairs = []
        for number in range(size.rounds):
            report.tell(f"noisy tenant, round {number + 1} of {size.rounds}", number / (size.rounds + 5))
            pairs.append(await _pair(server, size, Random(f"{seed} {number}")))
        report.rows += pair_rows(pairs)
        report.tell("overload", size.rounds / (size.rounds + 5))
        await _overload(server, size, Random(seed), report)
    report.extra |= {
        **{f"ttft_p99_{name}_s": [ttft_s(getattr(pair, name), 99) for pair in pairs] for name in LOAD_NAMES},
        "stretches": [dict(pair.stretches) for pair in pairs],
    }


async def _pair(server: TenantServer, size: Size, random: Random) -> Pair:
    capacity, until_s = await server.capacity(_victims(random)), WARM_S + size.round_s
    calls = WORKLOAD.victims(VICTIM_LOAD * capacity, until_s, random)
    noise = WORKLOAD.noisy(TIMES_SHARE * capacity / (NUM_VICTIMS + 1), until_s, random)
    stopped = [msgspec.structs.replace(call, tenant=STOPPED) for call in noise]
    loads = dict(zip(LOAD_NAMES, (calls, calls + noise, calls + stopped), strict=True))
    found, stretches = {}, {}
    for name in random.sample(sorted(loads), len(loads)):
        load = WORKLOAD.renewed(loads[name], random)
        with busy_cores() if name == "apart" else nullcontext():
            before = CoreTimes.of(server.pid)
            outcomes = await server.load(load, until_s + GRACE_S)
            stretches[name] = CoreTimes.of(server.pid).stretch_since(before)
        found[name] = victims_among(outcomes, WARM_S, until_s)
        await server.settle(calls[0])
    return Pair(**found, stretches=stretches)


async def _overload(server: TenantServer, size: Size, random: Random, report: Report) -> None:
    capacity = await server.capacity(WORKLOAD.service([(1.0, MOST_TOKENS)], random))

    async def points() -> list[float]:
        """Return the goodput at loads one of which is the peak."""
        found = []
        for load in LOADS:
            until_s = WARM_S + size.point_s
            calls = WORKLOAD.service([(until_s, load * capacity)], random)
            found.append(goodput(await server.load(calls, until_s + GRACE_S), WARM_S, until_s))
        return found

    found = await points()
    loads = [(size.overload_s, OVERLOAD * capacity), (size.after_s, AFTER * capacity)]
    calls, until_s = WORKLOAD.service(loads, random), size.overload_s + size.after_s
    outcomes = await server.load(calls, until_s + GRACE_S)
    await server.settle(calls[0])
    found += await points()
    span = OverloadSpan(0.0, size.overload_s, until_s)
    report.rows += overload_rows(
        outcomes, max(found), span, moment_s=MOMENT_S, most_told_s=MOST_TOLD_S, most_calls=None
    )
    report.extra |= {"goodput_of_points": found, "goodput_every_10_s": goodputs(outcomes, 0.0, until_s)}


def _victims(random: Random) -> list[ClientCall]:
    """Return calls of the victims to find the capacity with."""
    return WORKLOAD.victims(MOST_TOKENS, 1.0, random)


def pair_rows(pairs: Sequence[Pair]) -> list[Row]:
    """Return medians over the rounds of the ratios to the victims alone."""

    def ratio(name: str, percent: float) -> float:
        return median(ttft_s(getattr(pair, name), percent) / ttft_s(pair.alone, percent) for pair in pairs)

    alone, beside, apart = ([each for pair in pairs for each in getattr(pair, name)] for name in LOAD_NAMES)
    p99s = f"all: {ttft_s(beside, 99):.3f} s, alone {ttft_s(alone, 99):.3f} s; {len(alone)} requests"
    refused = f"{ttft_s(apart, 99):.3f} s; its requests refused by the gateway, all cores busy"
    halves = f"{ttft_s(beside, 50):.3f} s, alone {ttft_s(alone, 50):.3f} s"
    shares = f"{share_good(beside):.3f} of all, alone {share_good(alone):.3f}"
    stretch = median(pair.stretches["beside"] / pair.stretches["alone"] for pair in pairs)
    attainment = median(share_good(pair.beside) / share_good(pair.alone) for pair in pairs)
    return [
        *noisy_rows(ratio("beside", 99), attainment, p99s, shares),
        Row("noisy tenant: the machine's part of that", ratio("apart", 99), "x", note=refused),
        Row("noisy tenant: all it runs takes longer / alone", stretch, "x", note="for want of a core"),
        Row("noisy tenant: victims' TTFT p50 / alone", ratio("beside", 50), "x", note=halves),
    ]
