"""Whose request it is: the tenants of one gateway, by the keys that clients send.

A tenant's name decides which cached prompts its requests may share: its salt is derived here, from the
cluster's key, and no client can name one. What the file says is in tenants_file.py.
"""

import hashlib
import hmac
import secrets
import threading
from pathlib import Path
from typing import Final

import msgspec

from baton.errors import ConfigError
from baton.gateway.tenants_file import TenantsFile, read_tenants
from baton.keys import CACHE_SALTS, ClusterKeys, KeyRing
from baton.tenancy import ONLY_CLASS, TenantPolicy
from baton.wire_types import Kind

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
