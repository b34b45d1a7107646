import asyncio
import os
import signal

import pytest

from baton.clock import SystemClock
from baton.cluster.private_redis import KeptRedis
from baton.errors import ConfigError
from baton.router.redis import server
from baton.router.redis.client import REDIS_FAILURES, Names, RedisConnection
from baton.router.redis.server import find_program

needs_redis = pytest.mark.skipif(find_program() is None, reason="there is no redis-server on PATH")


async def answers(url: str) -> bool:
    connection = RedisConnection(url, Names.of("f"))
    try:
        return bool(await connection.call("PING"))
    except REDIS_FAILURES:
        return False
    finally:
        await connection.aclose()


@needs_redis
def test_killed_redis_is_started_again_at_the_same_url() -> None:
    async def scene() -> None:
        kept = KeptRedis(SystemClock())
        url = await kept.start()
        try:
            first = kept.pid
            os.kill(first, signal.SIGKILL)
            async with asyncio.timeout(20):
                while not await answers(url) or kept.pid == first:
                    await asyncio.sleep(0.02)
        finally:
            await kept.close()
        assert not await answers(url)

    asyncio.run(scene())


def test_missing_redis_server_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        kept = KeptRedis(SystemClock())
        try:
            with pytest.raises(ConfigError, match="set redis to none"):
                await kept.start()
        finally:
            await kept.close()

    monkeypatch.setattr(server, "PROGRAMS", ("no-such-server",))
    asyncio.run(scene())
