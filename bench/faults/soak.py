"""A cluster under mixed load and a random fault every few seconds, for as long as you like.

Two prefill and two decode workers of the tiny model, two gateways, two routers and Redis, as `baton serve`
starts them. Clients of three tenants stream, ask for whole answers and hang up in the middle; every answer is
compared with the answer of one engine. Meanwhile processes are killed, or stopped and continued, in an order
that the seed draws. At the end no answer may be lost or wrong, no page held, and no process grown.

1. An accepted request has one terminal event. When a gateway is killed, its streams are resumed at the other
   gateway with the id of its last event; a call without a stream is asked again. Both are counted apart.
2. A refusal (429, or 503 with Retry-After) is asked again, as openai-python does, and counted.
3. One process of each kind is stopped now and then but never killed, so its memory can be watched. RSS counts
   from the fifth minute of a process on; the slope is a least-squares one.
"""

import asyncio
import contextlib
import math
import os
import random
import secrets
import signal
import statistics
import time
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

from baton.bench.clusters import WatchedCluster, served_cluster, tenants_yaml
from baton.bench.faults.clients import Clients, make_questions
from baton.bench.processes import resident_mib
from baton.bench.report import Report, Row, at_least, at_most, option, suite

STOPPED_S: Final = (1.0, 4.0, 12.0)
ENDED_BY_S: Final = 2.0  # a worker that is silent for 3 s is given up and replaced
TENANTS: Final = ("red", "green", "blue")
FAULT_EVERY_S: Final = 10.0
SAMPLE_EVERY_S: Final = 5.0
WARM_UP_S: Final = 300.0  # of each process: caches and pools fill
MIN_SAMPLES: Final = 36  # past the warm-up, for a slope to mean something: three minutes
MAX_MIB_PER_MIN: Final = 1.0
WHOLE_S: Final = 90.0  # after the last fault, for every process to be back
PAGES_BACK_S: Final = 30.0


class Kind(NamedTuple):
    """A signal, and the first part of the names of the processes that it may hit."""

    signal: signal.Signals
    prefix: str

    @property
    def name(self) -> str:
        return f"{self.signal.name} {self.prefix}"


KILL, STOP = signal.SIGKILL, signal.SIGSTOP
ROLES: Final = ("prefill", "decode", "router", "gateway", "redis")
KINDS: Final[Sequence[Kind]] = tuple(Kind(number, role) for number in (KILL, STOP) for role in ROLES)


class FaultInjector:
    """Kills and stops processes of a cluster; `done` lists the faults."""

    def __init__(self, cluster: WatchedCluster, rng: random.Random, lasting: Collection[int]) -> None:
        """lasting: ids of the processes that no fault may end."""
        self.done: list[dict[str, object]] = []
        self._cluster = cluster
        self._rng = rng
        self._lasting = frozenset(lasting)
        self._begin_s = time.perf_counter()

    async def run(self, every_s: float, end_s: float) -> None:
        """Inject a fault every so often; the last stopped process goes on again before `end_s`."""
        async with asyncio.TaskGroup() as group:
            while time.perf_counter() + every_s + STOPPED_S[-1] < end_s:
                await asyncio.sleep(every_s)
                kind, choice = self._rng.choice(KINDS), self._rng.random()
                seconds = self._rng.choice(STOPPED_S)
                is_ended = kind.signal is KILL or seconds > ENDED_BY_S
                victims = [
                    (name, pid)
                    for name, pid in sorted((await self._cluster.pids()).items())
                    if name.startswith(kind.prefix) and not (is_ended and pid in self._lasting)
                ]
                if victims:  # none: the only one is being started
                    name, pid = victims[int(choice * len(victims))]
                    group.create_task(self._strike(kind, name, pid, seconds if kind.signal is STOP else 0.0))

    async def _strike(self, kind: Kind, name: str, pid: int, seconds: float) -> None:
        """Send the signal; a process that it stops continues after so many seconds, or at a cancellation."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, kind.signal)
            at_s = round(time.perf_counter() - self._begin_s, 1)
            self.done.append({"at_s": at_s, "kind": kind.name, "process": name, "seconds": seconds})
            try:
                await asyncio.sleep(seconds)
            finally:
                os.kill(pid, signal.SIGCONT)


class Memory:
    """Resident set sizes of each process, and the slopes of processes that lived long enough."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}  # process id -> the name under which it was first seen
        self._samples: dict[int, list[tuple[float, float]]] = defaultdict(list)  # (s since the first, MiB)
        self._begin_s = time.perf_counter()

    async def run(self, cluster: WatchedCluster) -> None:
        """Sample until cancelled."""
        while True:
            await self.sample(cluster)
            await asyncio.sleep(SAMPLE_EVERY_S)

    async def sample(self, cluster: WatchedCluster) -> None:
        """Note the size of each process."""
        now_s = time.perf_counter() - self._begin_s
        for name, pid in (await cluster.pids()).items():
            size_mib = resident_mib(pid)
            if size_mib is not None:
                self._names.setdefault(pid, name)
                self._samples[pid].append((round(now_s, 1), round(size_mib, 2)))

    def slopes(self) -> dict[str, float]:
        """Return MiB a minute by name; of several processes with one name, the steepest."""
        slopes: dict[str, float] = {}
        for pid, samples in self._samples.items():
            warm = [(at_s, mib) for at_s, mib in samples if at_s - samples[0][0] >= WARM_UP_S]
            if len(warm) >= MIN_SAMPLES:
                slope, _ = statistics.linear_regression(*zip(*warm, strict=True))
                name = self._names[pid]
                slopes[name] = max(60 * slope, slopes.get(name, -math.inf))
        return dict(sorted(slopes.items()))

    def curves(self) -> list[dict[str, object]]:
        """Return a sample a minute of each process: seconds since the load began, and MiB."""
        every = round(60 / SAMPLE_EVERY_S)
        return [
            {"process": name, "rss_mib": self._samples[pid][::every]} for pid, name in self._names.items()
        ]

    def row(self) -> Row:
        """Return the steepest slope."""
        slopes = self.slopes()
        if not slopes:
            return Row("steepest RSS", None, "MiB/min", note="no process lived long enough")
        name = max(slopes, key=lambda each: slopes[each])
        return at_most("steepest RSS", slopes[name], "MiB/min", MAX_MIB_PER_MIN, name)


@suite(
    "soak",
    "Mixed load with a fault every few seconds",
    option("--minutes", 30.0, "of load"),
    option("--seed", 1, "of questions, clients and faults"),
    option("--runtime", "ray", "of the processes", choices=("ray", "local")),
    option("--clients", 8, "at once"),
    fails_on_miss=True,
)
async def measure(options: Namespace, report: Report) -> None:
    """Run the cluster, the clients and the faults."""
    report.tell("questions")
    questions = make_questions(options.seed)
    keys = {tenant: secrets.token_hex(16) for tenant in TENANTS}
    words = ["--runtime", options.runtime, "--router-policy", "cost", "--kv-cache-memory", "16MiB"]
    async with served_cluster(words, routers=2, gateways=2, tenants=tenants_yaml(keys)) as cluster:
        clients = Clients(cluster.url, questions, options.seed, options.clients, list(keys.values()))
        firsts = [pid for name, pid in (await cluster.pids()).items() if name.endswith("-0")]
        faults = FaultInjector(cluster, random.Random(f"{options.seed} faults"), firsts)
        memory = Memory()
        await _run(cluster, clients, faults, memory, options, report)
        whole_s = await cluster.seconds_until(cluster.is_whole, WHOLE_S)
        pages_s = await cluster.seconds_until(cluster.is_at_rest, PAGES_BACK_S)
        await memory.sample(cluster)
    report.rows += [
        *_rows(clients, faults),
        at_most("every process back after", whole_s, "s", WHOLE_S),
        at_most("all pages back after", pages_s, "s", PAGES_BACK_S),
        memory.row(),
    ]
    report.extra = {
        "seed": options.seed,
        "minutes": options.minutes,
        "outcomes": dict(clients.outcomes),
        "complaints": clients.complaints[:100],
        "faults": faults.done,
        "slopes_mib_per_min": memory.slopes(),
        "memory": memory.curves(),
        "longest_gaps_s": sorted(clients.gaps_s, reverse=True)[:20],
    }


async def _run(
    cluster: WatchedCluster,
    clients: Clients,
    faults: FaultInjector,
    memory: Memory,
    options: Namespace,
    report: Report,
) -> None:
    """Load, inject and sample until the time is over and every call has an end."""
    seconds = 60 * options.minutes
    end_s = time.perf_counter() + seconds

    async def tell() -> None:
        while True:
            share = min(1.0, 1 - (end_s - time.perf_counter()) / seconds)
            report.tell(f"{clients.tally}; {len(faults.done)} faults", share)
            await asyncio.sleep(1.0)

    async with asyncio.TaskGroup() as watching:
        watchers = [watching.create_task(memory.run(cluster)), watching.create_task(tell())]
        async with asyncio.TaskGroup() as group:
            group.create_task(clients.run(seconds))
            group.create_task(faults.run(FAULT_EVERY_S, end_s))
        for task in watchers:
            task.cancel()


def _rows(clients: Clients, faults: FaultInjector) -> list[Row]:
    counts: Counter[str] = clients.outcomes
    kinds = Counter(str(each["kind"]) for each in faults.done)
    return [
        at_least("answered", counts["answered"], "requests", 1),
        at_most("lost", counts["lost"], "requests", 0, "; ".join(clients.complaints[:3])),
        at_most("wrong", counts["wrong"], "requests", 0),
        Row("hung up by clients", counts["cancelled"], "requests"),
        Row("refused, and asked again", counts["refused"], "times"),
        Row("resumed after their gateway was killed", counts["resumed"], "times"),
        Row("asked again after their gateway was killed", counts["asked again"], "times"),
        Row("longest gap within a stream", max(clients.gaps_s, default=0.0), "s"),
        at_least("faults", len(faults.done), "", 1, ", ".join(f"{n} {k}" for k, n in sorted(kinds.items()))),
    ]
