"""The latency that clients see when one link of a cluster swallows everything or is slow.

Two prefill and two decode workers of the tiny model, two gateways, two routers, a Redis that is reached over
TCP, and a proxy on every link (bench/faults/link_proxy.py). One kind of link after the other lets nothing
pass for a while, in neither direction, without an end of the stream; then the link has a round trip of half
a second, then 1 Mbit/s a connection, each for a third of that while. Six clients stream meanwhile, ask for
whole answers and hang up; every answer is compared with the answer of one engine.
"""

import asyncio
import sys
import tempfile
from argparse import Namespace
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import product
from pathlib import Path
from typing import Final, NamedTuple

import psutil

from baton.bench.clusters import WatchedCluster, local_cluster
from baton.bench.faults.clients import Clients, make_questions
from baton.bench.faults.link_proxy import LinkProxy, Switchboard
from baton.bench.processes import redis_on_tcp
from baton.bench.report import Report, at_most, option, suite
from baton.config.cluster import ServeConfig, WorkersConfig
from baton.config.engine import CacheConfig, EngineSettings
from baton.config.router import RouterConfig
from baton.messages.workers import REMOTE_PREFILLS

NUM_CLIENTS: Final = 6
BEFORE_S: Final = 3.0
AFTER_S: Final = 8.0
MAX_GAP_S: Final = 12.0
WHOLE_S: Final = 90.0
REDIS: Final = "routers - Redis"
WORKERS: Final = WorkersConfig(num_workers=2)
# Pages for six long answers: most prompts that come again have been evicted, so their pages are sent again.
ENGINE: Final = EngineSettings(cache=CacheConfig(kv_cache_memory_bytes=6 << 20), max_model_len=1024)


class Trouble(NamedTuple):
    """A change of a link, until its proxy restores the link; `share` is its part of --seconds."""

    name: str
    begin: Callable[[LinkProxy], None]
    share: float


TROUBLES: Final = (
    Trouble("swallowed", lambda proxy: proxy.swallow(), 1.0),
    Trouble("delayed", lambda proxy: proxy.slow(delay_s=0.25), 1 / 3),
    Trouble("throttled", lambda proxy: proxy.slow(bytes_per_s=125_000), 1 / 3),
)


class ProxiedCluster(NamedTuple):
    """A cluster, the proxies of its links, and the proxy of its Redis."""

    watched: WatchedCluster
    board: Switchboard
    redis: LinkProxy

    async def links(self) -> dict[str, LinkProxy]:
        """Return one link of each kind between living processes: the one with most connections so far."""
        names = {pid: name for name, pid in (await self.watched.pids()).items()}
        sockets = psutil.net_connections("tcp")
        listening = [each for each in sockets if each.status == psutil.CONN_LISTEN]
        owners = {tuple(each.laddr): names.get(each.pid or 0, "") for each in listening}
        found: dict[str, LinkProxy] = {}
        for link, proxy in self.board.links.items():
            target = owners.get(link.target, "")
            if not target or not proxy.num_connections:
                continue
            name = f"{_role(link.dialer)} - {_role(target)}, {link.kind}"
            if name not in found or proxy.num_connections > found[name].num_connections:
                found[name] = proxy
        return dict(sorted(found.items())) | {REDIS: self.redis}

    async def num_transferred(self) -> int:
        """Return how many prompts' pages went from prefill workers to decode workers so far."""
        status = await self.watched.status()
        assert status is not None, "no router answers"
        return sum(each.load.counters.get(REMOTE_PREFILLS, 0) for each in status.workers)


@suite(
    "black_holes",
    "One link swallows everything, or is slow",
    option("--seconds", 60.0, "that a link swallows"),
    option("--links", "", "only links with this in their name"),
    option("--troubles", "", "only troubles with this in their name"),
    fails_on_miss=True,
)
async def measure(options: Namespace, report: Report) -> None:
    """Trouble one kind of link after the other."""
    report.extra = {"seconds": options.seconds}
    questions = make_questions(seed=1)
    async with _open_cluster() as cluster:
        url = cluster.watched.url
        await Clients(url, questions, 0, NUM_CLIENTS).run(BEFORE_S)  # until every kind of link is there
        links = [link for link in (await cluster.links()).items() if options.links in link[0]]
        troubles = [each for each in TROUBLES if options.troubles in each.name]
        pairs = list(product(links, troubles))
        for number, ((link, proxy), trouble) in enumerate(pairs):
            name = f"{link}, {trouble.name}"
            report.tell(name, number / len(pairs))
            clients = Clients(url, questions, number + 1, NUM_CLIENTS)
            num_before = await cluster.num_transferred()
            async with clients.asking():
                await asyncio.sleep(BEFORE_S)
                trouble.begin(proxy)
                await asyncio.sleep(options.seconds * trouble.share)
                proxy.restore()
                await asyncio.sleep(AFTER_S)
            whole_s = await cluster.watched.seconds_until(cluster.watched.is_whole, WHOLE_S)
            num_transferred = await cluster.num_transferred() - num_before
            gap_s, wait_s = max(clients.gaps_s, default=0.0), max(clients.waits_s, default=0.0)
            report.rows += [
                *clients.answer_rows(name, f"{clients.tally}; {num_transferred} prompts transferred"),
                at_most(f"{name}: longest gap", gap_s, "s", MAX_GAP_S),
                at_most(f"{name}: longest first token", wait_s, "s", MAX_GAP_S),
                at_most(f"{name}: whole again after", whole_s, "s", WHOLE_S),
            ]


@asynccontextmanager
async def _open_cluster() -> AsyncIterator[ProxiedCluster]:
    async with AsyncExitStack() as stack:
        board = await stack.enter_async_context(Switchboard())
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        redis = stack.enter_context(LinkProxy(await stack.enter_async_context(redis_on_tcp(Path(folder)))))
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
        command = (sys.executable, "-m", "baton.bench.faults.link_proxy", str(board.port))
        watched = await stack.enter_async_context(local_cluster(config, command))
        yield ProxiedCluster(watched, board, redis)


def _role(name: str) -> str:
    return name.partition("-")[0]
