import asyncio

import pytest

from baton.cluster.redis_server import RedisServer
from baton.errors import ConfigError
from baton.router.redis.client import Names, RedisConnection
from tests.event_loop import on_loop
from tests.unit.router.redis_routers import connected


@pytest.mark.parametrize("url", ["", "http://a", "sentinel://a:1", "sentinel://a/service", "redis://a:b"])
def test_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="redis"):
        RedisConnection(url, Names.of("f"))


@pytest.mark.parametrize(
    "url", ["redis://h:1/0", "unix:///tmp/s", "sentinel://:word@a:26379,b:26379/mymaster?db=1"]
)
def test_all_kinds_of_urls_are_accepted(url: str) -> None:
    RedisConnection(url, Names.of("f"))


@pytest.mark.parametrize("num_turns", range(1, 5))
@on_loop
async def test_cancelled_close_still_closes_the_socket(num_turns: int) -> None:
    async with RedisServer() as redis, connected(redis.url) as observer:
        other = RedisConnection(redis.url, Names.of("f"))
        await other.call("PING")
        assert len((await observer.call("CLIENT", "LIST")).splitlines()) == 2
        closing = asyncio.create_task(other.aclose())
        for _ in range(num_turns):
            await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait((closing,))
        async with asyncio.timeout(5):
            while len((await observer.call("CLIENT", "LIST")).splitlines()) > 1:
                await asyncio.sleep(0.01)
