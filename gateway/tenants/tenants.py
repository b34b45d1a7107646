"""The tenants of one gateway, by the keys that clients send.

A tenant's name decides which cached prompts its requests may share: its salt is derived here from the cluster
key, and no client can choose one. gateway/tenants/file.py reads the tenants file.

`TenantsWatch` follows that file:

1. A file that has changed is left alone until it has not changed for SETTLE_S: it may be half written.
2. Then the file is read. If all of it is right, its tenants are the gateway's from now on.
3. If anything is wrong, or the file is gone, the tenants stay, and one warning says so.

Running requests are not affected: a revoked key opens nothing new.
"""

import asyncio
import hashlib
import hmac
import logging
import threading
from collections import Counter
from pathlib import Path
from typing import Final

import msgspec

from baton.clock import Clock
from baton.errors import ConfigError
from baton.gateway.tenants.file import TenantsFile, read_tenants
from baton.messages.bounds import Kind
from baton.rpc.auth import CACHE_SALTS, ClusterKeys, KeyRing
from baton.tenants import ONLY_CLASS, TenantPolicy

SALT_BYTES: Final = 16
LOOK_EVERY_S: Final = 0.2
SETTLE_S: Final = 0.2
logger = logging.getLogger(__name__)


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant as requests need it."""

    name: str
    cache_salt: bytes
    policy: TenantPolicy = TenantPolicy()
    classes: tuple[str, ...] = (ONLY_CLASS,)  # of the file, highest first
    rank: int = 0  # of its own class
    public_texts: tuple[str, ...] = ()  # prefixes that other tenants use too; all of them share the pages
    is_admin: bool = False

    def may_use(self, model: str) -> bool:
        """Return whether the tenant's policy allows the model."""
        return self.policy.models is None or model in self.policy.models


class Tenants:
    """The tenants by their keys. Without a file every client is the one tenant without a name."""

    def __init__(self, keys: ClusterKeys, file: TenantsFile | None = None) -> None:
        """keys: a gateway's."""
        self._ring = KeyRing.of(keys, Kind.GATEWAY)
        self._lock = threading.Lock()  # held while the tenants are made
        self._file = file
        self._of_key: dict[bytes, Tenant] = {}  # by the digest of the key
        self.need_keys = file is not None
        self._ring.follow(self._make)
        self._make()

    @classmethod
    def from_file(cls, path: Path, keys: ClusterKeys) -> "Tenants":
        """Read a tenants file. Raises ConfigError for a wrong file and for a file without keys."""
        file = read_tenants(path)
        if not any(entry.keys for entry in file.tenants.values()):
            raise ConfigError(f"{path}: expected at least one tenant with a key, got none")
        return cls(keys, file)

    def replace(self, file: TenantsFile) -> None:
        """Replace the tenants; a key that is gone opens nothing new."""
        self._file = file
        self._make()

    def _make(self) -> None:
        """Make the tenants of the file and the current key.

        After a rotation new requests have other salts and find no page of earlier requests.
        """
        with self._lock:
            file = self._file
            key = self._ring.derived(CACHE_SALTS)
            self._anyone = Tenant(name="", cache_salt=cache_salt(key, ""))
            if file is None:
                return
            tenants = {name: _tenant(name, file, key) for name in file.tenants}
            self._of_key = {
                digest: tenants[name] for name, entry in file.tenants.items() for digest in entry.digests
            }

    def find(self, key: str) -> Tenant | None:
        """Return the tenant of a client's key; None for an unknown key.

        The look-up leaks no timing: the table holds digests, and Python hashes bytes with a random key.
        """
        return self._of_key.get(key_digest(key)) if self.need_keys else self._anyone


def key_digest(key: str) -> bytes:
    """Return the SHA-256 digest of a client's key, as the tenants file has it."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def cache_salt(key: bytes, tenant: str) -> bytes:
    """Return a tenant's salt: only requests of one salt share pages."""
    return hmac.digest(key, b"baton cache salt 1:" + tenant.encode(), "sha256")[:SALT_BYTES]


def _tenant(name: str, file: TenantsFile, key: bytes) -> Tenant:
    entry = file.tenants[name]
    return Tenant(
        name=name,
        cache_salt=cache_salt(key, name),
        policy=entry,
        classes=file.classes,
        rank=file.rank(entry),
        public_texts=tuple(file.public_prefixes[prefix] for prefix in entry.public_prefixes),
        is_admin=entry.admin,
    )


def _signature(path: Path) -> tuple[int, ...] | None:
    """Return values of which one differs after any change of the file; None for an absent file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


class TenantsWatch:
    """Follows a tenants file. `look` works on the thread that calls it; other threads may use `tenants`."""

    def __init__(self, path: Path, keys: ClusterKeys, clock: Clock) -> None:
        """keys: a gateway's. Raises ConfigError for a wrong file."""
        self.counters: Counter[str] = Counter()  # changes that were "taken", and "refused"
        self._path = path
        self._clock = clock
        # The signature of the file that was read last, right or wrong; taken before reading.
        self._known = _signature(path)
        self._seen = self._known  # by the last look
        self._seen_s = clock.now_s()  # since when the file has had this signature
        self.tenants = Tenants.from_file(path, keys)

    def look(self) -> bool:
        """Check the file once. Returns True when the tenants have changed."""
        signature, now_s = _signature(self._path), self._clock.now_s()
        if signature != self._seen or now_s < self._seen_s:
            self._seen, self._seen_s = signature, now_s
        if signature == self._known or now_s - self._seen_s < SETTLE_S:
            return False
        self._known = signature
        return self._take()

    async def keep_looking(self) -> None:
        """Check the file again and again until cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            try:
                await asyncio.to_thread(self.look)
            except Exception:  # a bug must not leave revoked keys in force
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
