"""A cluster under mixed load, and a random fault every few seconds, for as long as you like.

python -m baton.bench.soak [--minutes 30] [--seed 1] [--runtime ray] [--json FILE]

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
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Final

from baton.bench.machine import machine_description, one_line
from baton.bench.report import RESULTS, Row, at_least, at_most, print_table, write_json
from baton.bench.soak_clients import Clients, make_questions
from baton.bench.soak_faults import Faults
from baton.bench.soak_memory import Memory
from baton.bench.soak_world import World, open_world

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
