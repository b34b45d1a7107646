"""A link through Sentinel: to the master that it names, and to the next one when that dies."""

import asyncio
import contextlib
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from baton.bench.processes import free_ports
from baton.cluster.redis_server import find_program
from baton.router.redis.client import REDIS_FAILURES, Names, RedisConnection
from tests.event_loop import on_loop
from tests.needs import needs_redis
from tests.node_peers import a_worker
from tests.unit.router.redis_routers import CHAIN, RouterStandIn, known_from, running
from tests.waiting import until

pytestmark = needs_redis

SERVICE = "pages"
W0 = a_worker("w0", num_pages=5000)


class Server:
    """A redis-server at a port of its own, with these lines of configuration."""

    def __init__(self, folder: Path, name: str, port: int, *lines: str, sentinel: bool = False) -> None:
        program = find_program()
        assert program is not None
        self.port = port
        config = folder / f"{name}.conf"
        common = (f"port {port}", "bind 127.0.0.1", f"dir {folder}", 'save ""', "daemonize no")
        config.write_text("\n".join((*(common if not sentinel else (*common[:3], common[4])), *lines)) + "\n")
        command = [program, str(config), *(["--sentinel"] if sentinel else [])]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


async def answer_of(port: int, *words: str) -> object:
    connection = RedisConnection(f"redis://127.0.0.1:{port}", Names.of("none"))
    try:
        return await connection.call(*words)
    except REDIS_FAILURES:
        return None
    finally:
        await connection.aclose()


@contextlib.asynccontextmanager
async def guarded(folder: Path, ports: list[int]) -> AsyncIterator[tuple[Server, str]]:
    """A master, a replica, and a sentinel; the master, and the url."""
    first, second, third = ports
    watch = f"sentinel monitor {SERVICE} 127.0.0.1 {first} 1"
    patience = (
        f"sentinel down-after-milliseconds {SERVICE} 300",
        f"sentinel failover-timeout {SERVICE} 2000",
    )
    servers = [
        Server(folder, "master", first),
        Server(folder, "replica", second, f"replicaof 127.0.0.1 {first}", "repl-diskless-sync-delay 0"),
        Server(folder, "sentinel", third, watch, *patience, sentinel=True),
    ]
    try:
        async with asyncio.timeout(20):
            while not await knows_replica(third):
                await asyncio.sleep(0.05)
        yield servers[0], f"sentinel://127.0.0.1:{third}/{SERVICE}"
    finally:
        for server in servers:
            server.kill()


async def knows_replica(port: int) -> bool:
    replicas = await answer_of(port, "SENTINEL", "replicas", SERVICE)
    return "ok" in repr(replicas)


@pytest.mark.slow
@on_loop
async def test_the_next_master_is_told_all(tmp_path: Path) -> None:
    ports = free_ports(3)
    async with guarded(tmp_path, ports) as (master, url):
        router = RouterStandIn(url, "first")
        async with running(router):
            await until(lambda: router.link.is_up)
            router.join(W0)
            router.report(W0, CHAIN)
            await until(lambda: router.link.num_unsent == 0)
            assert await known_from(url) == {W0.id: 40}
            master.kill()
            await until(lambda: not router.link.is_up)
            router.report(W0, CHAIN[:32])  # while no Redis listens
            await until(lambda: router.link.is_up and not router.link.num_unsent)
            assert await known_from(url) == {W0.id: 40}
            assert await answer_of(ports[1], "HGETALL", "baton:{f}:names")
