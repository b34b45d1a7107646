"""Whose request it is: keys of tenants, hashed at rest, from `tenants.yaml`.

    tenants:
      acme:
        keys: ["sha256:f64e871c..."]   # of the key that clients send, in hexadecimal
        models: [tiny]                 # left out: every model
        admin: true                    # left out: its keys do not open /metrics and /load

`printf %s KEY | sha256sum` prints the digits. A tenant's name decides which cached prompts its requests may
share: its salt is derived here, from the cluster's key, and no client can name one.
"""

import difflib
import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import msgspec
import yaml

from baton.errors import ConfigError

KEY_FORM: Final = re.compile(r"sha256:([0-9a-f]{64})")
NAME_FORM: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
SALT_BYTES: Final = 16
MAX_FILE_BYTES: Final = 16 * 2**20


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    cache_salt: bytes
    models: frozenset[str] | None = None  # None: every one
    is_admin: bool = False

    def may_use(self, model: str) -> bool:
        return self.models is None or model in self.models


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keys: list[str]
    models: list[str] | None = None
    admin: bool = False


class Tenants:
    """Who may come in. Without any tenant everybody is the one that has no name."""

    def __init__(self, cluster_key: bytes, entries: Mapping[str, tuple[Iterable[bytes], Tenant]]) -> None:
        """`entries`: for each name the SHA-256 digests of its keys, and the tenant."""
        self._anyone = Tenant(name="", cache_salt=cache_salt(cluster_key, ""))
        self._keys = [(digest, tenant) for digests, tenant in entries.values() for digest in digests]

    @classmethod
    def from_file(cls, path: Path | None, cluster_key: bytes) -> "Tenants":
        """Raises ConfigError, which names the tenant and the key, on anything that is not as above."""
        if path is None:
            return cls(cluster_key, {})
        entries = _read(path)
        digests = [digest for found in entries.values() for digest in found.keys]
        if not digests:
            raise ConfigError(f"{path}: expected at least one tenant with a key, got none")
        if len(set(digests)) < len(digests):
            raise ConfigError(f"{path}: one key belongs to two tenants, or stands twice")
        return cls(
            cluster_key,
            {name: (_digests(entry), _tenant(name, entry, cluster_key)) for name, entry in entries.items()},
        )

    @property
    def need_keys(self) -> bool:
        return bool(self._keys)

    def find(self, key: str) -> Tenant | None:
        """The tenant of the key that a client sent; None when it is nobody's.

        Every digest is compared, each in constant time, so that time tells nothing about how near a guess is.
        """
        if not self._keys:
            return self._anyone
        given = key_digest(key)
        found = None
        for digest, tenant in self._keys:
            if hmac.compare_digest(digest, given):
                found = tenant
        return found


def key_digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def cache_salt(cluster_key: bytes, tenant: str) -> bytes:
    """Pages are shared by requests of one salt only."""
    return hmac.digest(cluster_key, b"baton cache salt 1:" + tenant.encode(), "sha256")[:SALT_BYTES]


def _tenant(name: str, entry: _Entry, cluster_key: bytes) -> Tenant:
    models = None if entry.models is None else frozenset(entry.models)
    salt = cache_salt(cluster_key, name)
    return Tenant(name=name, cache_salt=salt, models=models, is_admin=entry.admin)


def _digests(entry: _Entry) -> list[bytes]:
    return [bytes.fromhex(key.removeprefix("sha256:")) for key in entry.keys]


def _read(path: Path) -> dict[str, _Entry]:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path}: expected at most {MAX_FILE_BYTES} bytes, got {path.stat().st_size}")
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a mapping with the key 'tenants', got {type(content).__name__}")
    _check_keys(path, "", content, ("tenants",))
    tenants = content.get("tenants")
    if not isinstance(tenants, dict):
        raise ConfigError(f"{path}: tenants: expected a mapping, got {type(tenants).__name__}")
    return {name: _entry(path, name, entry) for name, entry in tenants.items()}


def _entry(path: Path, name: object, entry: object) -> _Entry:
    if not isinstance(name, str) or not NAME_FORM.fullmatch(name):
        raise ConfigError(f"{path}: tenants: a name matches {NAME_FORM.pattern}, got {name!r}")
    if not isinstance(entry, dict):
        raise ConfigError(f"{path}: tenants.{name}: expected a mapping, got {type(entry).__name__}")
    _check_keys(path, f"tenants.{name}.", entry, _Entry.__struct_fields__)
    try:
        read = msgspec.convert(entry, _Entry)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: tenants.{name}: {error}") from None
    for index, key in enumerate(read.keys):
        if not KEY_FORM.fullmatch(key):  # it may be the key itself: it is not shown
            raise ConfigError(
                f"{path}: tenants.{name}.keys[{index}]: expected 'sha256:' and 64 hexadecimal digits"
            )
    return read


def _check_keys(path: Path, prefix: str, given: Mapping[object, object], known: Iterable[str]) -> None:
    names = list(known)
    for key in given:
        if key not in names:
            nearest = difflib.get_close_matches(str(key), names, n=1)
            hint = f"did you mean {nearest[0]!r}?" if nearest else f"known are {', '.join(names)}"
            raise ConfigError(f"{path}: unknown key {prefix + str(key)!r}; {hint}")
