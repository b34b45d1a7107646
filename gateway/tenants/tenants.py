"""Whose request it is: the tenants of one gateway, by the keys that clients send.

A tenant's name decides which cached prompts its requests may share: its salt is derived here, from the
cluster's key, and no client can name one. What the file says is in gateway/tenants/file.py.
"""

import asyncio
import difflib
import hashlib
import hmac
import logging
import math
import secrets
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import msgspec
from starlette.types import Scope

from baton.clock import Clock
from baton.errors import ConfigError
from baton.gateway.api.errors import Headers, invalid
from baton.gateway.tenants.file import TenantsFile, read_tenants
from baton.messages.bounds import Kind
from baton.rpc.auth import CACHE_SALTS, ClusterKeys, KeyRing
from baton.tenants import ONLY_CLASS, SchedulingKey, Sla, TenantPolicy

SALT_BYTES: Final = 16


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    cache_salt: bytes
    policy: TenantPolicy = TenantPolicy()
    classes: tuple[str, ...] = (ONLY_CLASS,)  # of the file, the one that is served first first
    rank: int = 0  # of its own class
    public_texts: tuple[str, ...] = ()  # its prompts share the pages of these with other tenants'
    is_admin: bool = False

    def may_use(self, model: str) -> bool:
        return self.policy.models is None or model in self.policy.models


class Tenants:
    """Who may come in. Without a file everybody is the one that has no name."""

    def __init__(self, keys: ClusterKeys, file: TenantsFile | None = None) -> None:
        """keys: a gateway's."""
        self._ring = KeyRing.of(keys, Kind.GATEWAY)
        self._lock = threading.Lock()  # one makes the tenants at a time
        self._file = file
        self._secret = secrets.token_bytes(32)  # nobody can tell which keys lie near each other in the table
        self._of_key: dict[bytes, tuple[bytes, Tenant]] = {}  # by _place -> the key's digest, its tenant
        self.need_keys = file is not None
        self._ring.follow(self._make)
        self._make()

    @classmethod
    def from_file(cls, path: Path | None, keys: ClusterKeys) -> "Tenants":
        """Raises ConfigError, which names the tenant and the key, on a file that is wrong or has no key."""
        if path is None:
            return cls(keys)
        file = read_tenants(path)
        if not any(entry.keys for entry in file.tenants.values()):
            raise ConfigError(f"{path}: expected at least one tenant with a key, got none")
        return cls(keys, file)

    def replace(self, file: TenantsFile) -> None:
        """These from now on: a key that is not there any more opens nothing. What runs is not touched."""
        self._file = file
        self._make()

    def _make(self) -> None:
        """Make the tenants of the file and the current key.

        After a rotation new requests have other salts, and find no page of earlier ones.
        """
        with self._lock:
            file = self._file
            key = self._ring.derived(CACHE_SALTS)
            self._anyone = Tenant(name="", cache_salt=cache_salt(key, ""))
            if file is None:
                return
            tenants = {name: _tenant(name, file, key) for name in file.tenants}
            self._of_key = {
                self._place(digest): (digest, tenants[name])
                for name, entry in file.tenants.items()
                for digest in entry.digests
            }

    def find(self, key: str) -> Tenant | None:
        """The tenant of the key that a client sent; None when it is nobody's.

        The time it takes does not tell how near a guess is: where it is looked up depends on a secret.
        """
        if not self.need_keys:
            return self._anyone
        given = key_digest(key)
        digest, tenant = self._of_key.get(self._place(given), (b"", None))
        return tenant if hmac.compare_digest(digest, given) else None

    def _place(self, digest: bytes) -> bytes:
        return hashlib.blake2b(digest, key=self._secret, digest_size=16).digest()


def key_digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def cache_salt(key: bytes, tenant: str) -> bytes:
    """Pages are shared by requests of one salt only."""
    return hmac.digest(key, b"baton cache salt 1:" + tenant.encode(), "sha256")[:SALT_BYTES]


def _tenant(name: str, file: TenantsFile, key: bytes) -> Tenant:
    entry = file.tenants[name]
    policy = {field: getattr(entry, field) for field in TenantPolicy.__struct_fields__}
    return Tenant(
        name=name,
        cache_salt=cache_salt(key, name),
        policy=TenantPolicy(**policy),
        classes=file.classes,
        rank=file.rank(entry),
        public_texts=tuple(file.public_prefixes[prefix] for prefix in entry.public_prefixes),
        is_admin=entry.admin,
    )


# What a request may ask for beside its body, by headers; never more than its tenant's policy gives.
#
# x-slo-ttft-ms, x-slo-tpot-ms    what it should keep (llm-d's x-llm-d-slo-* mean the same)
# x-baton-priority                the class that it is served in: its tenant's own, or a lower one

TTFT_HEADERS: Final = (b"x-slo-ttft-ms", b"x-llm-d-slo-ttft-ms")  # the first that is there counts
TPOT_HEADERS: Final = (b"x-slo-tpot-ms", b"x-llm-d-slo-tpot-ms")
PRIORITY_HEADER: Final = b"x-baton-priority"
MAX_SLO_MS: Final = 86_400_000.0
_HEADERS: Final = frozenset({*TTFT_HEADERS, *TPOT_HEADERS, PRIORITY_HEADER})
AskedFor: TypeAlias = Mapping[bytes, str]  # name of a header above -> its value


def asked_for(scope: Scope) -> AskedFor:
    """The headers above; where one is there twice, the first counts."""
    headers: Headers = scope["headers"]
    return {name: value.decode("latin-1") for name, value in reversed(headers) if name in _HEADERS}


def sla_of(asked: AskedFor, tenant: Tenant) -> Sla:
    """The tenant's own, as far as the headers do not ask for less. Raises ApiError 400."""
    promised = tenant.policy.sla
    if not asked:
        return promised
    ttft_ms, tpot_ms = _milliseconds(asked, TTFT_HEADERS), _milliseconds(asked, TPOT_HEADERS)
    return Sla(
        ttft_ms=_looser(promised.ttft_ms, ttft_ms),
        tpot_ms=_looser(promised.tpot_ms, tpot_ms),
        deadline_ms=promised.deadline_ms,
    )


def scheduling_key_of(asked: AskedFor, tenant: Tenant) -> SchedulingKey:
    """In the class that is asked for, if it is not above the tenant's own. Raises ApiError 400."""
    scheduling_key = tenant.policy.scheduling_key(_rank_of(asked, tenant))
    return (
        msgspec.structs.replace(scheduling_key, has_unpromised_sla=True)
        if _wishes(asked, tenant.policy.sla)
        else scheduling_key
    )


def _rank_of(asked: AskedFor, tenant: Tenant) -> int:
    name = asked.get(PRIORITY_HEADER)
    if name is None:
        return tenant.rank
    if name not in tenant.classes:
        nearest = difflib.get_close_matches(name[:64], tenant.classes, n=1)
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"known are {', '.join(tenant.classes)}"
        param = PRIORITY_HEADER.decode()
        raise invalid(f"the header {param}: there is no class {name[:64]!r}; {hint}", param=param)
    return max(tenant.rank, tenant.classes.index(name))


def _wishes(asked: AskedFor, promised: Sla) -> bool:
    """Whether an objective is asked for of a kind that the tenant is not promised."""
    kinds = ((promised.ttft_ms, TTFT_HEADERS), (promised.tpot_ms, TPOT_HEADERS))
    return bool(asked) and any(own is None and not asked.keys().isdisjoint(names) for own, names in kinds)


def _looser(promised: float | None, asked_for: float | None) -> float | None:
    if promised is None or asked_for is None:
        return promised if asked_for is None else asked_for
    return max(promised, asked_for)


def _milliseconds(asked: AskedFor, names: tuple[bytes, ...]) -> float | None:
    name = next((name for name in names if name in asked), None)
    if name is None:
        return None
    text = asked[name]
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= MAX_SLO_MS:
        raise invalid(
            f"the header {name.decode()}: expected milliseconds, got {text[:32]!r}", param=name.decode()
        )
    return value


# The tenants file as it is now: it is looked at again and again, and taken when it is well.
#
# 1. A file that looks other than the one that was read last is left alone until it has not changed for
# SETTLE_S: it may be half written.
# 2. Then it is read. If all of it is well, its tenants are those of the gateway from now on.
# 3. If anything is wrong in it, or it is gone, the tenants stay what they were, and a warning says so, once.
#
# What runs is not touched by any of this: a key that is revoked opens nothing new.

LOOK_EVERY_S: Final = 0.2
SETTLE_S: Final = 0.2
logger = logging.getLogger(__name__)


class Signature(NamedTuple):
    """What changes whenever a file does."""

    device: int
    inode: int
    num_bytes: int
    written_ns: int
    changed_ns: int

    @classmethod
    def of(cls, path: Path) -> "Signature | None":
        """None of a file that is not there."""
        try:
            status = path.stat()
        except OSError:
            return None
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


class TenantsWatch:
    """`look` does all its work on the thread that calls it; `tenants` may be asked on another meanwhile."""

    def __init__(self, path: Path, keys: ClusterKeys, clock: Clock) -> None:
        """keys: a gateway's. Raises ConfigError for a file that is wrong: there is no earlier one."""
        self.counters: Counter[str] = Counter()  # changes that were "taken", and "refused"
        self._path = path
        self._clock = clock
        self._known = Signature.of(path)  # of what was read last, for better or worse; taken before reading
        self._seen = self._known  # by the last look
        self._seen_s = clock.now_s()  # since when it has looked like that
        self.tenants = Tenants.from_file(path, keys)

    def look(self) -> bool:
        """Whether the tenants are others now."""
        signature, now_s = Signature.of(self._path), self._clock.now_s()
        if signature != self._seen or now_s < self._seen_s:
            self._seen, self._seen_s = signature, now_s
        if signature == self._known or now_s - self._seen_s < SETTLE_S:
            return False
        self._known = signature
        return self._take()

    async def keep_looking(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            try:
                await asyncio.to_thread(self.look)
            except Exception:  # a bug of ours must not leave revoked keys in force for ever
                logger.exception("%s could not be looked at", self._path)

    def _take(self) -> bool:
        try:
            file = read_tenants(self._path)
        except ConfigError as error:
            self.counters["refused"] += 1
            logger.warning("the tenants stay what they were: %s", error)
            return False
        self.tenants.replace(file)
        self.counters["taken"] += 1
        num_keys = sum(len(entry.keys) for entry in file.tenants.values())
        logger.info("%s: %d tenants with %d keys are in force", self._path, len(file.tenants), num_keys)
        return True
