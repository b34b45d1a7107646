import asyncio
import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from baton.cluster import redis_server
from baton.cluster.redis_server import PROGRAMS, RedisServer
from baton.errors import ConfigError
from baton.router.redis.client import REDIS_FAILURES, Names, RedisConnection
from tests.event_loop import on_loop
from tests.needs import needs_redis


@needs_redis
@on_loop
async def test_only_this_user_reaches_the_server_and_stop_removes_its_folder() -> None:
    async with RedisServer() as redis:
        socket = Path(redis.url.removeprefix("unix://"))
        assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o700
        assert stat.S_IMODE(socket.stat().st_mode) == 0o700
        connection = RedisConnection(redis.url, Names.of("f"))
        assert await connection.call("SET", "a", "b")
        await connection.aclose()
    assert not socket.parent.exists()


@needs_redis
@on_loop
async def test_server_starts_again_at_the_same_url() -> None:
    async with RedisServer() as redis:
        url, pid = redis.url, redis.pid
        os.kill(pid, signal.SIGKILL)
        await redis.ended()
        await redis.start()
        assert redis.url == url
        assert redis.pid != pid
        assert await answers(redis.url)


async def answers(url: str) -> bool:
    connection = RedisConnection(url, Names.of("f"))
    try:
        return bool(await connection.call("PING"))
    except REDIS_FAILURES:
        return False
    finally:
        await connection.aclose()


@needs_redis
@on_loop
async def test_kept_server_that_is_killed_is_started_again_at_the_same_url() -> None:
    async with RedisServer() as redis:
        url, first = redis.url, redis.pid
        keeping = asyncio.create_task(redis.keep())
        os.kill(first, signal.SIGKILL)
        async with asyncio.timeout(20):
            while redis.pid == first or not await answers(url):
                await asyncio.sleep(0.02)
        keeping.cancel()
    assert not await answers(url)


def test_missing_program_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_server, "PROGRAMS", ("no-such-server",))
    with pytest.raises(ConfigError, match="install one, or set redis to none"):
        asyncio.run(RedisServer().start())


def test_program_that_ends_at_once_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_server, "PROGRAMS", ("false",))
    with pytest.raises(ConfigError, match="ended at once"):
        asyncio.run(RedisServer().start())


STARTS_ONE = """
import asyncio
from baton.cluster.redis_server import RedisServer

async def run():
    redis = RedisServer()
    await redis.start()
    print(redis.pid, redis.url, flush=True)
    await asyncio.sleep(60)

asyncio.run(run())
"""


@pytest.fixture
def own_tmp(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A short temporary folder of the test's own, where servers of other tests remove nothing."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield


@needs_redis
@on_loop
async def test_server_ends_with_its_killed_owner_and_the_next_removes_its_folder(own_tmp: None) -> None:
    with subprocess.Popen([sys.executable, "-c", STARTS_ONE], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pid, url = owner.stdout.readline().split()
        server = psutil.Process(int(pid))
        assert server.name() in PROGRAMS
        owner.kill()
    server.wait(10)
    folder = Path(url.removeprefix("unix://")).parent
    assert folder.exists()
    async with RedisServer():
        assert not folder.exists()


@needs_redis
@on_loop
async def test_folder_in_use_is_kept_whatever_process_ids_say() -> None:
    """In another container with the same /tmp, the owner has a process id that does not exist here."""
    async with RedisServer() as here:
        folder = Path(here.url.removeprefix("unix://")).parent
        no_pid = next(number for number in range(2, 2**22) if not psutil.pid_exists(number))
        there = folder.rename(folder.with_name(f"{redis_server.PREFIX}{no_pid}-there"))
        async with RedisServer():
            assert (there / "redis.sock").exists()
        there.rename(folder)


def test_other_folders_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    unlocked, dead = tmp_path / f"{redis_server.PREFIX}a", tmp_path / f"{redis_server.PREFIX}b"
    for folder in (unlocked, dead):
        folder.mkdir()
    (dead / redis_server.LOCK).touch()
    (tmp_path / f"{redis_server.PREFIX}c").symlink_to(unlocked)
    (tmp_path / f"{redis_server.PREFIX}d").touch()
    redis_server._remove_abandoned_folders()
    assert {path.name[-1] for path in tmp_path.iterdir()} == {"a", "c", "d"}
