"""Connections to Redis that give up at a deadline, and scripts run by their digest."""

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias
from urllib.parse import parse_qs, unquote, urlsplit

from redis.asyncio import from_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from baton.errors import ConfigError, WireError
from baton.router.redis_scripts import SCRIPTS, Names

DEADLINE_S: Final = 1.0  # of one round trip
# Whatever a link may fail with; the next try makes it new.
REDIS_FAILURES: Final = (RedisError, OSError, TimeoutError, WireError)

Argument: TypeAlias = bytes | str | int
Reply: TypeAlias = Any  # int, bytes or a list of them, by the script


class Command(NamedTuple):
    """A script of redis_scripts.py with what follows its keys, or, without one, a command of Redis itself."""

    script: str
    arguments: tuple[Argument, ...]
    worker_id: str = ""  # that it is about


def _clients(url: str) -> list[Any]:
    """The one to talk to, and others that have to be closed with it."""
    settings: dict[str, Any] = {
        "socket_timeout": DEADLINE_S,
        "socket_connect_timeout": DEADLINE_S,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
    }
    try:
        if url.startswith("sentinel://"):
            return _through_sentinels(url, settings)
        return [from_url(url, **settings)]
    except ValueError as error:
        raise ConfigError(f"redis: {error}") from error


def _through_sentinels(url: str, settings: dict[str, Any]) -> list[Any]:
    parts = urlsplit(url)
    password, _, hosts = parts.netloc.rpartition("@")
    addresses = [host.rsplit(":", 1) for host in hosts.split(",")]
    if not parts.path.strip("/") or any(len(each) != 2 for each in addresses):
        raise ValueError("expected sentinel://host:port,host:port/service")
    settings["db"] = int(parse_qs(parts.query).get("db", ["0"])[0])
    if password:
        settings["password"] = unquote(password.rpartition(":")[2])
    sentinels: Any = Sentinel([(host, int(port)) for host, port in addresses], **settings)  # type: ignore[no-untyped-call]
    return [sentinels.master_for(parts.path.strip("/")), *sentinels.sentinels]


def is_full(error: BaseException) -> bool:
    """Whether Redis has refused it for want of memory; in a script its message has another beginning."""
    return isinstance(error, ResponseError) and "used memory > 'maxmemory'" in str(error)


class Connection:
    """Connects when first used; `load` comes before the first script.

    All calls fail as REDIS_FAILURES has it, a second late at most. Replies are typed by the command alone, as
    the library documents it for RESP2, in bytes.
    """

    def __init__(self, url: str, names: Names) -> None:
        """ConfigError: not a url of Redis. redis://, rediss:// and unix:// as everywhere;
        sentinel://[:password@]host:port,host:port/service."""
        self._client, *self._guards = _clients(url)
        self._names = names
        self._digests: dict[str, str] = {}

    async def load(self) -> None:
        for name, source in SCRIPTS.items():
            self._digests[name] = await self.call("SCRIPT LOAD", source)

    async def call(self, *words: Argument, **options: object) -> Reply:
        return await self._client.execute_command(*words, **options)

    async def max_memory_bytes(self) -> int:
        """0 where there is no limit, or it is kept a secret."""
        try:
            found: dict[str, Reply] = await self.call("INFO", "memory")
        except ResponseError:
            return 0
        return int(found.get("maxmemory", 0))

    async def run(self, script: str, *arguments: Argument) -> Reply:
        return await self.call(*self._words(Command(script, arguments)))

    async def run_all(self, commands: Iterable[Command]) -> Sequence[Reply]:
        """In one round trip. A command that Redis refuses has its ResponseError in the place of a reply."""
        pipeline = self._client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*self._words(command))
        replies: Sequence[Reply] = await pipeline.execute(raise_on_error=False)
        for reply in replies:
            if isinstance(reply, Exception) and not isinstance(reply, ResponseError):
                raise reply
        return replies

    async def aclose(self) -> None:
        for client in (self._client, *self._guards):
            await client.aclose()

    def _words(self, command: Command) -> tuple[Argument, ...]:
        if not command.script:
            return command.arguments
        digest = self._digests[command.script]
        return ("EVALSHA", digest, len(self._names), *self._names, *command.arguments)
