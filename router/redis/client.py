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

# What Redis keeps of the prefix index, and the functions that run inside it.
#
# Of one namespace (a model), all under one prefix:
#
# workers  id -> what the worker says of itself      names    name -> id of its newest life
# numbers  id -> a small number of ours              owners   number -> id, of the living alone
# next     id -> number of its next change           leases   id -> milliseconds at which it counts as dead
# pages    key -> its holders, 4 bytes each: twice the number, plus 1 in the host tier
# fenced   ids that may not come back                events   the stream that routers follow
#
# A number that is in no `owners` holds nothing, so a dead life's pages vanish in one step; what is left of
# it in `pages` goes by and by, in `SWEEP`. Keys are first halves of page keys, as in the routers. `MATCH`
# answers for a whole prompt in one round trip: one HMGET, then a step for each page where the holders change.
#
# A namespace that no router has renewed for a day goes by itself.
#
# Each script is one atomic step and uses what Redis 6.2 knows: EVALSHA, not functions.

KEEP_MS: Final = 86_400_000  # after which all goes that no router has renewed


class Names(NamedTuple):
    """The keys of a namespace, in the order in which every script gets them."""

    workers: str
    names: str
    numbers: str
    owners: str
    next: str
    leases: str
    pages: str
    fenced: str
    events: str
    counter: str

    @classmethod
    def of(cls, namespace: str) -> "Names":
        return cls(*(f"baton:{{{namespace}}}:{name}" for name in cls._fields))


# Between these and the body: the keys by their names.
_HEAD: Final = "".join(
    f"local {name} = KEYS[{index}]\n" for index, name in enumerate(Names._fields, 1)
).replace("local next ", "local next_of ") + (
    """
local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end
local function bury(id)
  local number = redis.call('HGET', numbers, id)
  if number then redis.call('HDEL', owners, number) end
  for _, key in ipairs({workers, numbers, next_of, leases}) do redis.call('HDEL', key, id) end
end
"""
)

# id, name, description, milliseconds of the lease -> number of its next change; -1: unknown, -2: fenced
JOIN: Final = (
    _HEAD
    + """
local id, name = ARGV[1], ARGV[2]
if redis.call('ZSCORE', fenced, id) then return -2 end
local former = redis.call('HGET', names, name)
if former and former ~= id then
  bury(former)
  redis.call('ZADD', fenced, now_ms(), former)
  redis.call('ZREMRANGEBYRANK', fenced, 0, -4097)
end
redis.call('HSET', names, name, id)
redis.call('HSET', workers, id, ARGV[3])
redis.call('HSET', leases, id, now_ms() + tonumber(ARGV[4]))
if redis.call('HEXISTS', numbers, id) == 0 then
  local number = redis.call('INCR', counter)
  redis.call('HSET', numbers, id, number)
  redis.call('HSET', owners, number, id)
end
return tonumber(redis.call('HGET', next_of, id) or '-1') or -1
"""
)

# id -> nothing
LEAVE: Final = (
    _HEAD
    + """
local name
local said = redis.call('HGETALL', names)
for i = 1, #said, 2 do if said[i + 1] == ARGV[1] then name = said[i] end end
if name then redis.call('HDEL', names, name) end
bury(ARGV[1])
return 0
"""
)

# milliseconds, ids ... -> ids that have been dead for all to see, and are buried now
RENEW: Final = (
    _HEAD
    + """
local now = now_ms()
for i = 2, #ARGV do
  if redis.call('HEXISTS', workers, ARGV[i]) == 1 then
    redis.call('HSET', leases, ARGV[i], now + tonumber(ARGV[1]))
  end
end
for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, """
    + str(KEEP_MS)
    + """) end
local dead = {}
local all = redis.call('HGETALL', leases)
for i = 1, #all, 2 do
  if (tonumber(all[i + 1]) or 0) < now then dead[#dead + 1] = all[i]; bury(all[i]) end
end
return dead
"""
)

# id, router, first, is_afresh, tier, keys (8 bytes each), is_stored (a byte each), message, most entries of
# the stream, most pages -> 1 done, 0 known before, -1 no such worker, -2 some are missing before these
APPLY: Final = (
    _HEAD
    + """
local id, first, tier = ARGV[1], tonumber(ARGV[3]), tonumber(ARGV[5])
local blob, is_stored = ARGV[6], ARGV[7]
local count = #is_stored
local number = redis.call('HGET', numbers, id)
if not number then return -1 end
if ARGV[4] == '1' then
  redis.call('HDEL', owners, number)
  number = redis.call('INCR', counter)
  redis.call('HSET', numbers, id, number)
  redis.call('HSET', owners, number, id)
else
  local expected = tonumber(redis.call('HGET', next_of, id) or '0') or 0
  if first + count <= expected and count > 0 then return 0 end
  if first ~= expected then return -2 end
end
local mark = struct.pack('>I4', 2 * number + tier)
local room = tonumber(ARGV[10]) - redis.call('HLEN', pages)
for start = 1, count, 1000 do
  local fields = {}
  for i = start, math.min(count, start + 999) do fields[#fields + 1] = string.sub(blob, 8 * i - 7, 8 * i) end
  local values = redis.call('HMGET', pages, unpack(fields))
  local now_held, gone, latest = {}, {}, {}
  for i, field in ipairs(fields) do
    local old = latest[field]
    if old == nil then old = values[i] or '' end
    local new = old
    local at = 1
    while at <= #old and string.sub(old, at, at + 3) ~= mark do at = at + 4 end
    if string.byte(is_stored, start + i - 1) == 1 then
      if at > #old and (#old > 0 or room > 0) then
        if #old == 0 then room = room - 1 end
        new = old .. mark
      end
    elseif at <= #old then
      new = string.sub(old, 1, at - 1) .. string.sub(old, at + 4)
    end
    latest[field] = new
  end
  for field, value in pairs(latest) do
    if value == '' then gone[#gone + 1] = field
    else now_held[#now_held + 1] = field; now_held[#now_held + 1] = value end
  end
  if #now_held > 0 then redis.call('HSET', pages, unpack(now_held)) end
  if #gone > 0 then redis.call('HDEL', pages, unpack(gone)) end
end
redis.call('HSET', next_of, id, first + count)
redis.call('XADD', events, 'MAXLEN', '~', ARGV[9], '*', 'r', ARGV[2], 'w', id, 'p', ARGV[8])
return 1
"""
)

# keys (8 bytes each) -> id, number of first pages, id, number of first pages ... As in
# router/index/prefix_index.py, one page in 16 is read, then what lies between two with different holders.
MATCH: Final = (
    _HEAD
    + """
local blob = ARGV[1]
local count = #blob / 8
local values = {}
local function read(positions)
  for start = 1, #positions, 1000 do
    local fields, stop = {}, math.min(#positions, start + 999)
    for i = start, stop do
      local position = positions[i]
      fields[#fields + 1] = string.sub(blob, 8 * position - 7, 8 * position)
    end
    if #fields > 0 then
      local found = redis.call('HMGET', pages, unpack(fields))
      for i = start, stop do values[positions[i]] = found[i - start + 1] end
    end
  end
end
local some, between = {}, {}
for position = 1, count, 16 do some[#some + 1] = position end
if count > 0 and some[#some] ~= count then some[#some + 1] = count end
read(some)
for i = 2, #some do
  if values[some[i - 1]] ~= values[some[i]] then
    for position = some[i - 1] + 1, some[i] - 1 do between[#between + 1] = position end
    if not values[some[i]] then break end
  end
end
read(between)
local holding, num_holding, found = nil, 0, {}
local before, depth = false, 0
local function holders(value)
  local set = {}
  for at = 1, #value, 4 do
    local a, b, c, d = string.byte(value, at, at + 3)
    set[math.floor((((a * 256 + b) * 256 + c) * 256 + d) / 2)] = true
  end
  return set
end
for position = 1, count do
  local value = values[position]
  if value == nil then value = before end
  if value ~= before or holding == nil then
    local set = value and holders(value) or {}
    if holding == nil then
      holding = set
      for _ in pairs(set) do num_holding = num_holding + 1 end
    else
      for number in pairs(holding) do
        if not set[number] then
          found[number] = depth
          holding[number] = nil
          num_holding = num_holding - 1
        end
      end
    end
    before = value
  end
  if num_holding == 0 then break end
  depth = position
end
for number in pairs(holding or {}) do found[number] = depth end
local result = {}
for number, length in pairs(found) do
  local id = redis.call('HGET', owners, number)
  if id and length > 0 then result[#result + 1] = id; result[#result + 1] = length end
end
return result
"""
)

# cursor, how many pages to look at -> cursor
SWEEP: Final = (
    _HEAD
    + """
local seen = redis.call('HSCAN', pages, ARGV[1], 'COUNT', ARGV[2])
local is_alive = {}
for i = 1, #seen[2], 2 do
  local value, kept = seen[2][i + 1], {}
  for at = 1, #value, 4 do
    local number = math.floor(struct.unpack('>I4', value, at) / 2)
    if is_alive[number] == nil then is_alive[number] = redis.call('HEXISTS', owners, number) == 1 end
    if is_alive[number] then kept[#kept + 1] = string.sub(value, at, at + 3) end
  end
  local left = table.concat(kept)
  if left == '' then redis.call('HDEL', pages, seen[2][i])
  elseif #left < #value then redis.call('HSET', pages, seen[2][i], left) end
end
return seen[1]
"""
)

# 1: all that is here, 0: half of the stream; keys of snapshots ... -> nothing. None of it needs memory.
# Who is the newest of a name, and who is fenced, stays. Routers find that their workers are unknown, and
# tell all afresh.
RELIEVE: Final = (
    _HEAD
    + """
for i = 2, #ARGV do redis.call('UNLINK', ARGV[i]) end
if ARGV[1] == '0' then
  redis.call('XTRIM', events, 'MAXLEN', math.floor(redis.call('XLEN', events) / 2))
else
  redis.call('UNLINK', workers, numbers, owners, next_of, leases, pages, events)
end
return 0
"""
)
SCRIPTS: Final = {
    "join": JOIN,
    "leave": LEAVE,
    "renew": RENEW,
    "apply": APPLY,
    "match": MATCH,
    "sweep": SWEEP,
    "relieve": RELIEVE,
}

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


class RedisConnection:
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
