"""What a Redis says of itself, before a cluster relies on it."""

import asyncio
from typing import Final, NamedTuple

from baton.router.redis.client import REDIS_FAILURES, Names, RedisConnection

MIN_VERSION: Final = (6, 2)
KEEPS_ALL: Final = "noeviction"


class RedisFacts(NamedTuple):
    version: str
    is_too_old: bool
    eviction: str  # what it does when its memory is full; "": it does not say


def look_at(url: str) -> RedisFacts | None:
    """None: it does not answer. ConfigError: that is no url of a Redis."""
    connection = RedisConnection(url, Names.of("none"))
    return asyncio.run(_ask(connection))


async def _ask(connection: RedisConnection) -> RedisFacts | None:
    try:
        said = await connection.call("INFO")
    except REDIS_FAILURES:
        return None
    finally:
        await connection.aclose()
    return facts_of(said)


def facts_of(said: object) -> RedisFacts:
    """Of what INFO answers."""
    facts = dict(_fields(said))
    version = facts.get("valkey_version") or facts.get("redis_version", "0")
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    return RedisFacts(version, numbers < MIN_VERSION, facts.get("maxmemory_policy", ""))


def _fields(said: object) -> list[tuple[str, str]]:
    """The library has read it already, or has not: that depends on its version."""
    if isinstance(said, dict):
        return [(str(name), str(value)) for name, value in said.items()]
    lines = said.decode(errors="replace").splitlines() if isinstance(said, bytes) else []
    return [(name, value) for name, colon, value in (line.partition(":") for line in lines) if colon]
