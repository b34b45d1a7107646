"""What clients notice when one link of a cluster swallows everything, or is slow: real processes here.

python -m baton.bench.faults.black_holes [--seconds 60] [--links TEXT] [--troubles TEXT] [--json FILE]

Two prefill and two decode workers of the tiny model, two gateways, two routers, a Redis that is reached over
TCP, and a proxy of its own on every link (bench/faults/link_proxy.py). One link after the other lets nothing
pass for a while, in neither direction, and no end is told; then it has a round trip of half a second, then 1
Mbit/s a connection, each for a third of that while. Six clients stream meanwhile, ask for whole answers and
hang up; every answer is compared with what one engine says.
"""

import argparse
import asyncio
import secrets
import shutil
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import product
from pathlib import Path
from typing import Final, NamedTuple

from baton.bench.faults.link_proxy import LinkProxy, Switchboard
from baton.bench.faults.soak_world import Clients, Question, make_questions
from baton.bench.machine import machine_description, one_line
from baton.bench.report import RESULTS, Row, at_most, print_table, write_json
from baton.bench.router.faults import WORKERS
from baton.cluster.operator_node import Operator, connected
from baton.cluster.ports import processes
from baton.cluster.runtimes.local import LocalRuntime
from baton.cluster.serve import Cluster
from baton.config.cluster import ServeConfig
from baton.config.engine import CacheConfig, EngineSettings
from baton.config.router import RouterConfig
from baton.errors import ConfigError, PeerGone
from baton.messages.operations import Status
from baton.messages.workers import REMOTE_PREFILLS

TITLE: Final = "One link swallows everything, or is slow"
HOST: Final = "127.0.0.1"
NUM_CLIENTS: Final = 6
BEFORE_S: Final = 3.0
AFTER_S: Final = 8.0
MAX_GAP_S: Final = 12.0
WHOLE_S: Final = 90.0
REDIS: Final = "routers - Redis"
# Pages for six long answers: most prompts that come again have been evicted, so their pages are sent again.
ENGINE: Final = EngineSettings(cache=CacheConfig(kv_cache_memory_bytes=6 << 20), max_model_len=1024)


class Trouble(NamedTuple):
    """Whatever a link does to its connections, until its proxy restores them."""

    name: str
    begin: Callable[[LinkProxy], None]
    share: float  # of --seconds


TROUBLES: Final = (
    Trouble("swallowed", lambda proxy: proxy.swallow(), 1.0),
    Trouble("delayed", lambda proxy: proxy.slow(delay_s=0.25), 1 / 3),
    Trouble("throttled", lambda proxy: proxy.slow(bytes_per_s=125_000), 1 / 3),
)


class Hole(NamedTuple):
    """A link, by the roles of its ends, and its proxy."""

    name: str
    proxy: LinkProxy


class World:
    def __init__(
        self, url: str, operator: Operator, board: Switchboard, redis: LinkProxy, num_processes: int
    ) -> None:
        self.url = url
        self._operator = operator
        self._board = board
        self._redis = redis
        self._num_processes = num_processes

    async def holes(self) -> list[Hole]:
        """One of each kind of link: the one that has had most connections, of processes that live."""
        names = _names_by_pid(await self._operator.status())
        owners = {tuple(where): names.get(pid, "") for where, pid in processes().items()}
        found: dict[str, LinkProxy] = {}
        for link, proxy in self._board.links.items():
            target = owners.get(link.target, "")
            if not target or not proxy.num_connections:
                continue
            name = f"{_role(link.dialer)} - {_role(target)}, {link.kind}"
            if name not in found or proxy.num_connections > found[name].num_connections:
                found[name] = proxy
        return [Hole(name, proxy) for name, proxy in sorted(found.items())] + [Hole(REDIS, self._redis)]

    async def num_transferred(self) -> int:
        """Prompts so far whose pages decode workers had from prefill workers."""
        workers = (await self._operator.status()).workers
        return sum(each.load.counters.get(REMOTE_PREFILLS, 0) for each in workers)

    async def until_whole(self) -> bool:
        until_s = time.perf_counter() + WHOLE_S
        while time.perf_counter() < until_s:
            try:
                status = await self._operator.status()
            except (PeerGone, TimeoutError):
                continue
            num = len(status.workers) + len(status.routers) + len(status.gateways)
            if num == self._num_processes and status.num_met == len(status.workers):
                return True
            await asyncio.sleep(0.2)
        return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="that a link swallows (60)")
    parser.add_argument("--links", default="", metavar="TEXT", help="only links whose name has this")
    parser.add_argument("--troubles", default="", metavar="TEXT", help="only those whose name has this")
    parser.add_argument("--json", type=Path, default=RESULTS / "black_holes.json", metavar="FILE")
    options = parser.parse_args()
    print(one_line(machine_description()), flush=True)
    troubles = [each for each in TROUBLES if options.troubles in each.name]
    rows = asyncio.run(_measure(make_questions(seed=1), options.seconds, options.links, troubles))
    print_table(f"{TITLE} for {options.seconds:g} s", rows)
    write_json(options.json, TITLE, rows, {"seconds": options.seconds})
    return 1 if any(row.met is False for row in rows) else 0


async def _measure(
    questions: Sequence[Question], seconds: float, only: str, troubles: Sequence[Trouble]
) -> list[Row]:
    rows: list[Row] = []
    async with _open_world() as world:
        clients = Clients(world.url, {"": ""}, questions, 0, NUM_CLIENTS)
        await clients.run(time.perf_counter() + BEFORE_S)  # until every kind of link is there
        holes = [hole for hole in await world.holes() if only in hole.name]
        for number, (hole, trouble) in enumerate(product(holes, troubles)):
            name = f"{hole.name}, {trouble.name}"
            print(f"{name} ...", file=sys.stderr, flush=True)
            clients = Clients(world.url, {"": ""}, questions, number + 1, NUM_CLIENTS)
            num_before = await world.num_transferred()
            end_s = time.perf_counter() + BEFORE_S + seconds * trouble.share + AFTER_S
            load = asyncio.create_task(clients.run(end_s))
            await asyncio.sleep(BEFORE_S)
            trouble.begin(hole.proxy)
            await asyncio.sleep(seconds * trouble.share)
            hole.proxy.restore()
            await load
            is_whole = await world.until_whole()
            num_transferred = await world.num_transferred() - num_before
            rows += _rows(name, clients, num_transferred, is_whole=is_whole)
    return rows


def _rows(name: str, clients: Clients, num_transferred: int, *, is_whole: bool) -> list[Row]:
    counts = clients.outcomes
    said = f"{counts['answered']} answered, {num_transferred} prompts transferred"
    if counts["refused"]:
        said += f", {counts['refused']} refusals asked again"
    num_broken = counts["resumed"] + counts["asked again"]
    return [
        at_most(f"{name}: failed", counts["lost"] + num_broken, "", 0, "; ".join(clients.complaints[:2])),
        at_most(f"{name}: wrong", counts["wrong"], "", 0, said),
        at_most(f"{name}: longest gap", max(clients.gaps_s, default=0.0), "s", MAX_GAP_S),
        at_most(f"{name}: longest first token", max(clients.waits_s, default=0.0), "s", MAX_GAP_S),
        Row(f"{name}: whole again", float(is_whole), "", "1", is_whole),
    ]


@asynccontextmanager
async def _open_world() -> AsyncIterator[World]:
    key = secrets.token_bytes(32)
    async with AsyncExitStack() as ends:
        board = ends.enter_context(Switchboard())
        redis = ends.enter_context(LinkProxy(await ends.enter_async_context(_redis())))
        config = ServeConfig(
            model="tiny",
            runtime="local",
            port=0,
            routers=2,
            gateways=2,
            transport="tcp",
            router=RouterConfig(policy="prefix", redis=f"redis://{redis.address[0]}:{redis.address[1]}"),
            prefill=WORKERS,
            decode=WORKERS,
            engine=ENGINE,
        )
        command = (sys.executable, "-m", "baton.bench.faults.switched_process", str(board.port))
        cluster = Cluster(config, LocalRuntime(key, command=command), key, say=lambda text: None)
        ends.push_async_callback(cluster.close)
        serving = await cluster.start()
        operator = await ends.enter_async_context(connected(serving.routers, key))
        num_processes = 2 * WORKERS.num_workers + config.routers + config.gateways
        world = World(serving.url, operator, board, redis, num_processes)
        if not await world.until_whole():
            raise TimeoutError("the cluster has not come together")
        yield world


@asynccontextmanager
async def _redis() -> AsyncIterator[tuple[str, int]]:
    """A Redis of our own on a TCP port of loopback. ConfigError where there is no redis-server."""
    program = shutil.which("redis-server")
    if program is None:
        raise ConfigError("redis-server is not installed")
    with socket.create_server((HOST, 0)) as kept:
        port = int(kept.getsockname()[1])
    options = ("--port", str(port), "--bind", HOST, "--save", "", "--appendonly", "no")
    process = await asyncio.create_subprocess_exec(
        program, *options, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        yield HOST, port
    finally:
        process.kill()
        await process.wait()


def _names_by_pid(status: Status) -> dict[int, str]:
    names = {each.worker.pid: each.worker.name for each in status.workers}
    names |= {each.pid: "router" for each in status.routers}
    return names | {each.pid: "gateway" for each in status.gateways}


def _role(name: str) -> str:
    return name.partition("-")[0]


if __name__ == "__main__":
    sys.exit(main())
