import pytest

from baton.errors import ConfigError
from baton.router.redis.client import Names, RedisConnection


@pytest.mark.parametrize("url", ["", "http://a", "sentinel://a:1", "sentinel://a/service", "redis://a:b"])
def test_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="redis"):
        RedisConnection(url, Names.of("f"))


@pytest.mark.parametrize(
    "url", ["redis://h:1/0", "unix:///tmp/s", "sentinel://:word@a:26379,b:26379/mymaster?db=1"]
)
def test_all_kinds_of_urls_are_accepted(url: str) -> None:
    RedisConnection(url, Names.of("f"))
