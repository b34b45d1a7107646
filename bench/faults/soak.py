"""A cluster under mixed load, and a random fault every few seconds, for as long as you like.

python -m baton.bench.faults.soak [--minutes 30] [--seed 1] [--runtime ray] [--json FILE]

Two prefill and two decode workers of the tiny model, two gateways, two routers and Redis, as `baton serve`
starts them. Clients of three tenants stream, ask for whole answers and hang up in the middle; every answer is
compared with what one engine says. Meanwhile processes are killed, or stopped and continued, by a list that
the seed draws. At the end nothing may be lost, wrong or held, and no process may have grown.

1. An accepted request has one terminal event. A stream whose gateway is killed is resumed at another, with
   the id of its last event; a call without a stream is asked again. Both are counted apart.
2. A refusal (429, or 503 with Retry-After) is asked again, as openai-python does, and counted.
3. One process of each kind is stopped now and then, never killed. RSS counts from the fifth minute of a
   process on; the slope is the least-squares one of a process.
"""

import argparse
import asyncio
import contextlib
import math
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from baton.bench.faults.soak_world import Clients, World, make_questions, open_world, resident_mib
from baton.bench.machine import machine_description, one_line
from baton.bench.report import RESULTS, Row, at_least, at_most, print_table, write_json

# The faults of bench/faults/soak.py: processes are killed, or stopped and continued, as a seed draws it.
#
# One process of each kind lives as long as the load, so that its memory can be watched: faults stop it for a
# short while and never end it.

STOPPED_S: Final = (1.0, 4.0, 12.0)
ENDED_BY_S: Final = 2.0  # a worker that is silent for 3 s is given up and replaced


class Kind(NamedTuple):
    """What is done to a process whose name begins so."""

    signal: signal.Signals
    prefix: str

    @property
    def name(self) -> str:
        return f"{self.signal.name} {self.prefix}"


KILL, STOP = signal.SIGKILL, signal.SIGSTOP
FAULTS: Final[Sequence[Kind]] = (
    Kind(KILL, "prefill"),
    Kind(KILL, "decode"),
    Kind(KILL, "router"),
    Kind(KILL, "gateway"),
    Kind(KILL, "redis"),
    Kind(STOP, "prefill"),
    Kind(STOP, "decode"),
    Kind(STOP, "router"),
    Kind(STOP, "gateway"),
    Kind(STOP, "redis"),
)


class Faults:
    def __init__(self, world: World, rng: random.Random, lasting: Collection[int]) -> None:
        """lasting: ids of the processes that no fault may end."""
        self.done: list[dict[str, object]] = []
        self._world = world
        self._rng = rng
        self._lasting = frozenset(lasting)
        self._stopped: set[int] = set()
        self._begin_s = time.perf_counter()

    async def run(self, every_s: float, end_s: float) -> None:
        """One every so often; the last is early enough for what it stops to go on again."""
        continuing: list[asyncio.Task[None]] = []
        while time.perf_counter() + every_s + STOPPED_S[-1] < end_s:
            await asyncio.sleep(every_s)
            kind, choice, seconds = (
                self._rng.choice(FAULTS),
                self._rng.random(),
                self._rng.choice(STOPPED_S),
            )
            found = sorted((await self._world.pids()).items())
            is_ended = kind.signal is KILL or seconds > ENDED_BY_S
            victims = [
                (name, pid)
                for name, pid in found
                if name.startswith(kind.prefix) and not (is_ended and pid in self._lasting)
            ]
            if not victims:  # it is being started
                continue
            name, pid = victims[int(choice * len(victims))]
            self._strike(kind, name, pid, seconds)
            if kind.signal is STOP:
                continuing.append(asyncio.create_task(self._continue(pid, seconds)))
        await asyncio.gather(*continuing)

    def undo(self) -> None:
        """Let whatever is stopped go on."""
        for pid in self._stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def _strike(self, kind: Kind, name: str, pid: int, seconds: float) -> None:
        with contextlib.suppress(ProcessLookupError):
            if kind.signal is STOP:
                self._stopped.add(pid)
            os.kill(pid, kind.signal)
            at_s = round(time.perf_counter() - self._begin_s, 1)
            lasts_s = seconds if kind.signal is STOP else 0.0
            self.done.append({"at_s": at_s, "kind": kind.name, "process": name, "seconds": lasts_s})

    async def _continue(self, pid: int, seconds: float) -> None:
        await asyncio.sleep(seconds)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        self._stopped.discard(pid)


# The growth of a cluster's processes: resident set sizes by process id, judged once a process is warm.

SAMPLE_EVERY_S: Final = 5.0
WARM_UP_S: Final = 300.0  # of each process: caches and pools fill
MIN_SAMPLES: Final = 36  # of a process, past its warm-up, for a slope to mean something: three minutes


class Memory:
    """Samples of each process, and the slope of those that lived long enough."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}  # process id -> the name under which it was first seen
        self._samples: dict[int, list[tuple[float, float]]] = defaultdict(list)  # (s since the first, MiB)
        self._begin_s = time.perf_counter()

    async def run(self, world: World) -> None:
        """Sample until cancelled."""
        while True:
            await self.sample(world)
            await asyncio.sleep(SAMPLE_EVERY_S)

    async def sample(self, world: World) -> None:
        """Note the size of each process that is known."""
        now_s = time.perf_counter() - self._begin_s
        for name, pid in (await world.pids()).items():
            size_mib = resident_mib(pid)
            if size_mib is not None:
                self._names.setdefault(pid, name)
                self._samples[pid].append((round(now_s, 1), round(size_mib, 2)))

    def slopes(self) -> dict[str, float]:
        """Name -> MiB a minute, by least squares; the steepest, where several processes had the name."""
        slopes: dict[str, float] = {}
        for pid, samples in self._samples.items():
            warm = [(at_s, mib) for at_s, mib in samples if at_s - samples[0][0] >= WARM_UP_S]
            if len(warm) >= MIN_SAMPLES:
                slope, _ = statistics.linear_regression(*zip(*warm, strict=True))
                name = self._names[pid]
                slopes[name] = max(60 * slope, slopes.get(name, -math.inf))
        return dict(sorted(slopes.items()))

    def curves(self) -> list[dict[str, object]]:
        """Each process with a sample a minute: seconds since the load began, and MiB."""
        every = round(60 / SAMPLE_EVERY_S)
        return [
            {"process": name, "rss_mib": self._samples[pid][::every]} for pid, name in self._names.items()
        ]

    def steepest(self) -> str:
        """The process that grows fastest, in words."""
        slopes = self.slopes()
        if not slopes:
            return "not known yet"
        name = max(slopes, key=lambda each: slopes[each])
        return f"{name} {slopes[name]:+.2f} MiB/min"


TITLE: Final = "Mixed load with a fault every few seconds"
FAULT_EVERY_S: Final = 10.0
SAY_EVERY_S: Final = 30.0
MAX_MIB_PER_MIN: Final = 1.0
WHOLE_S: Final = 90.0  # after the last fault, for every process to be back
PAGES_BACK_S: Final = 30.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="of load (30)")
    parser.add_argument("--seed", type=int, default=1, help="of questions, clients and faults (1)")
    parser.add_argument("--runtime", choices=("ray", "local"), default="ray", help="of the processes (ray)")
    parser.add_argument("--clients", type=int, default=8, help="at once (8)")
    parser.add_argument("--fault-every", type=float, default=FAULT_EVERY_S, metavar="S", help="seconds (10)")
    parser.add_argument("--json", type=Path, default=RESULTS / "soak.json", metavar="FILE")
    options = parser.parse_args()
    print(one_line(machine_description()), flush=True)
    rows, extra = asyncio.run(_soak(options))
    print_table(TITLE, rows)
    write_json(options.json, TITLE, rows, extra)
    return 1 if any(row.met is False for row in rows) else 0


async def _soak(options: argparse.Namespace) -> tuple[list[Row], dict[str, object]]:
    questions = make_questions(options.seed)
    with tempfile.TemporaryDirectory(prefix="baton-soak-") as folder:
        async with open_world(Path(folder), options.runtime) as world:
            clients = Clients(world.url, world.keys, questions, options.seed, options.clients)
            firsts = [pid for name, pid in (await world.pids()).items() if name.endswith("-0")]
            faults = Faults(world, random.Random(f"{options.seed} faults"), firsts)
            memory = Memory()
            await _run(world, clients, faults, memory, options)
            is_whole = await world.is_whole_within(WHOLE_S)
            pages_s = await world.pages_back_within(PAGES_BACK_S)
            await memory.sample(world)
    return _rows(clients, faults, memory, is_whole, pages_s), {
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
    world: World, clients: Clients, faults: Faults, memory: Memory, options: argparse.Namespace
) -> None:
    """Load, faults and samples, until the time is over and everything that was asked for has an end."""
    end_s = time.perf_counter() + 60 * options.minutes
    loads = asyncio.create_task(clients.run(end_s))
    others = [
        asyncio.create_task(faults.run(options.fault_every, end_s)),
        asyncio.create_task(memory.run(world)),
        asyncio.create_task(_say(clients, faults, memory)),
    ]
    try:
        await loads
        await others[0]
    finally:
        for task in others:
            task.cancel()
        ended = await asyncio.gather(*others, return_exceptions=True)
        faults.undo()
    for error in ended:
        if isinstance(error, Exception):
            raise error


async def _say(clients: Clients, faults: Faults, memory: Memory) -> None:
    begin_s = time.perf_counter()
    while True:
        await asyncio.sleep(SAY_EVERY_S)
        minutes = (time.perf_counter() - begin_s) / 60
        counts = ", ".join(f"{number} {name}" for name, number in sorted(clients.outcomes.items()))
        print(
            f"{minutes:5.1f} min: {counts}; {len(faults.done)} faults; worst gap "
            f"{max(clients.gaps_s, default=0.0):.1f} s; steepest {memory.steepest()}",
            file=sys.stderr,
            flush=True,
        )


def _rows(
    clients: Clients, faults: Faults, memory: Memory, is_whole: bool, pages_s: float | None
) -> list[Row]:
    counts: Counter[str] = clients.outcomes
    slopes = memory.slopes()
    name = max(slopes, key=lambda each: slopes[each], default="")
    kinds = Counter(str(each["kind"]) for each in faults.done)
    rows = [
        at_least("answered", counts["answered"], "requests", 1),
        at_most("lost", counts["lost"], "requests", 0, "; ".join(clients.complaints[:3])),
        at_most("wrong", counts["wrong"], "requests", 0),
        Row("hung up by clients", counts["cancelled"], "requests"),
        Row("refused, and asked again", counts["refused"], "times"),
        Row("resumed after their gateway was killed", counts["resumed"], "times"),
        Row("asked again after their gateway was killed", counts["asked again"], "times"),
        Row("longest gap within a stream", max(clients.gaps_s, default=0.0), "s"),
        at_least("faults", len(faults.done), "", 1, ", ".join(f"{n} {k}" for k, n in sorted(kinds.items()))),
        Row("every process back", float(is_whole), "", "1", is_whole),
        Row("all pages back after", pages_s, "s", f"<= {PAGES_BACK_S:g}", pages_s is not None),
    ]
    if name:
        rows.append(at_most("steepest RSS", slopes[name], "MiB/min", MAX_MIB_PER_MIN, name))
    else:
        rows.append(Row("steepest RSS", None, "MiB/min", note="no process lived long enough"))
    return rows


if __name__ == "__main__":
    sys.exit(main())
