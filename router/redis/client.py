"""Connections to Redis that fail at a deadline, and the scripts that run inside Redis.

The keys of one namespace, all under one prefix:

workers  id -> description of the worker           names   name -> incarnation and id of its newest life
numbers  id -> number of the worker's next event   leases  id -> milliseconds at which the worker is dead
fenced   ids that may not return                   events  the stream that routers follow
workers:ID  the snapshot of a worker's pages

A namespace that no router has renewed for a day expires.

Each script of scripts/ is one atomic step and uses commands of Redis 6.2: EVALSHA, not functions.
"""

import asyncio
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias
from urllib.parse import parse_qs, unquote, urlsplit

from redis.asyncio import from_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from baton.errors import ConfigError, WireError

KEEP_MS: Final = 86_400_000  # a namespace that no router renews expires then


class Names(NamedTuple):
    """The keys of a namespace, in the order of every script's KEYS."""

    workers: str
    names: str
    numbers: str
    leases: str
    fenced: str
    events: str

    @classmethod
    def of(cls, namespace: str) -> "Names":
        """The keys of this namespace."""
        return cls(*(f"baton:{{{namespace}}}:{name}" for name in cls._fields))

    def snapshot(self, worker_id: str) -> str:
        """The key of a worker's snapshot."""
        return f"{self.workers}:{worker_id}"


_SCRIPTS: Final = ("join", "leave", "renew", "publish", "relieve")


def _source(script: str) -> str:
    """The source of a script: a local for each key, common.lua, and the body."""
    keys = [f"local {name} = KEYS[{i}]" for i, name in enumerate(Names._fields, 1)]
    folder = Path(__file__).with_name("scripts")
    return "\n".join((*keys, (folder / "common.lua").read_text(), (folder / f"{script}.lua").read_text()))


DEADLINE_S: Final = 1.0  # of one round trip
# The errors that a link may fail with; the next try makes a new link.
REDIS_FAILURES: Final = (RedisError, OSError, TimeoutError, WireError)
Argument: TypeAlias = bytes | str | int
Reply: TypeAlias = Any  # int, bytes or a list of them, by the script


class Command(NamedTuple):
    """A script with the arguments after its keys; without a script, the words of a plain command of Redis."""

    script: str
    arguments: tuple[Argument, ...]
    worker_id: str = ""  # the worker that the command is about


def _clients(url: str) -> list[Any]:
    """The client, and others that must be closed with it."""
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
    """True when Redis refused a command for want of memory; a script's message has another beginning."""
    return isinstance(error, ResponseError) and "used memory > 'maxmemory'" in str(error)


class RedisConnection:
    """A connection that is made at its first use.

    Calls fail with REDIS_FAILURES within DEADLINE_S. Replies have the types that redis-py documents for
    RESP2, with bytes.
    """

    def __init__(self, url: str, names: Names) -> None:
        """url: redis://, rediss://, unix:// or sentinel://[:password@]host:port,host:port/service.

        Raises ConfigError for another url.
        """
        self._client, *self._guards = _clients(url)
        self._names = names
        self._digests: dict[str, str] = {}

    async def load(self) -> None:
        """Load the scripts. Call before the first `run_all`."""
        for name in _SCRIPTS:
            self._digests[name] = await self.call("SCRIPT LOAD", _source(name))

    async def call(self, *words: Argument, **options: object) -> Reply:
        """Run a plain command."""
        return await self._client.execute_command(*words, **options)

    async def max_memory_bytes(self) -> int:
        """The memory limit of Redis; 0 when there is none, or Redis does not tell."""
        try:
            found: dict[str, Reply] = await self.call("INFO", "memory")
        except ResponseError:
            return 0
        return int(found.get("maxmemory", 0))

    async def run_all(self, commands: Iterable[Command]) -> Sequence[Reply]:
        """Run commands in one round trip. The reply of a command that Redis refuses is its ResponseError."""
        pipeline = self._client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*self._words(command))
        replies: Sequence[Reply] = await pipeline.execute(raise_on_error=False)
        for reply in replies:
            if isinstance(reply, Exception) and not isinstance(reply, ResponseError):
                raise reply
        return replies

    async def aclose(self) -> None:
        """Close the connection, and raise a cancellation only after that.

        The clients close their sockets in tasks, which a cancellation would end before they begin.
        """
        closing = [asyncio.ensure_future(client.aclose()) for client in (self._client, *self._guards)]
        cancelled: asyncio.CancelledError | None = None
        while pending := [each for each in closing if not each.done()]:
            try:
                await asyncio.wait(pending)
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled
        for each in closing:
            each.result()

    def _words(self, command: Command) -> tuple[Argument, ...]:
        if not command.script:
            return command.arguments
        digest = self._digests[command.script]
        return ("EVALSHA", digest, len(self._names), *self._names, *command.arguments)
