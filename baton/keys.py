"""Keys derived from the cluster key, one for each purpose and for each pair of process kinds.

1. The launcher of a process derives the keys of its kind from the cluster key: a `KeyRing`. The process gets
   the ring and never the cluster key, so a gateway can neither pose as a worker nor read page links.
2. A link between a process of kind A and one of kind B is proved with the key of the pair (A, B).
3. A ring may hold several generations, the current one first. The connecting end names its generation, which
   is the current one; the accepting end takes every generation that it holds.
4. `replace` changes the generations of a running process, as `baton cluster-key rotate` and `retire` have it
   done; existing connections are kept.
"""

import hmac
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta

from baton.errors import ConfigError
from baton.wire_types import Kind

MIN_KEY_BYTES: Final = 16
ID_BYTES: Final = 8
_CONTEXT: Final = b"baton key 1 "

CACHE_SALTS: Final = "cache salts"  # of tenants, and with them the names of pages
EVENT_IDS: Final = "event ids"  # of streams that another gateway can continue
GATEWAYS: Final = "gateways"  # what gateways of one port ask each other
REDIS_NAMES: Final = "redis names"
REDIS_VALUES: Final = "redis values"  # the seals of what routers keep there
PAGES: Final = "pages"  # links that pages are agreed on and travel over

_PURPOSES: Final[Mapping[Kind, tuple[str, ...]]] = {
    Kind.GATEWAY: (CACHE_SALTS, EVENT_IDS, GATEWAYS),
    Kind.ROUTER: (REDIS_NAMES, REDIS_VALUES),
    Kind.WORKER: (PAGES,),
    Kind.OPERATOR: (),
}


def derive(key: bytes, purpose: str) -> bytes:
    """Return the 32-byte key for one purpose; it tells nothing about `key`, nor of other purposes' keys."""
    return hmac.digest(key, _CONTEXT + purpose.encode(), "sha256")


def check_cluster_key(key: bytes) -> None:
    """Raise ConfigError for a cluster key that is too short."""
    if len(key) < MIN_KEY_BYTES:
        raise ConfigError(f"the cluster key needs {MIN_KEY_BYTES} bytes or more, it has {len(key)}")


def link_purpose(one: Kind, other: Kind) -> str:
    """Name the key of control links between processes of two kinds; the order does not matter."""
    return "link " + " ".join(sorted((one.value, other.value)))


class KeyGeneration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of one process kind, derived from one cluster key."""

    id: Annotated[bytes, Meta(min_length=ID_BYTES, max_length=ID_BYTES)]  # public
    secrets: dict[str, bytes]  # purpose -> key


Generations: TypeAlias = tuple[KeyGeneration, ...]


def generation(cluster_key: bytes, kind: Kind) -> KeyGeneration:
    """Derive what a process of this kind needs. ConfigError for a cluster key that is too short."""
    check_cluster_key(cluster_key)
    purposes = (*_PURPOSES[kind], *(link_purpose(kind, other) for other in Kind))
    return KeyGeneration(
        id=derive(cluster_key, "id")[:ID_BYTES],
        secrets={purpose: derive(cluster_key, purpose) for purpose in purposes},
    )


class KeyRing:
    """The keys of one process. Threads may share it."""

    def __init__(self, kind: Kind, generations: Generations) -> None:
        """generations: the current one first."""
        if not generations:
            raise ConfigError("expected a cluster key, got none")
        self.kind = kind
        self.generations = generations
        self._followers: list[Callable[[], None]] = []

    @classmethod
    def of(cls, keys: "ClusterKeys", kind: Kind) -> "KeyRing":
        """Return `keys` itself where it is a ring of this kind, or a ring derived from cluster keys."""
        if isinstance(keys, KeyRing):
            if keys.kind is not kind:
                raise ConfigError(f"expected the keys of a {kind.value}, got those of a {keys.kind.value}")
            return keys
        each = (keys,) if isinstance(keys, bytes) else keys
        return cls(kind, tuple(generation(key, kind) for key in each))

    def derived(self, purpose: str) -> bytes:
        """Return the current generation's key for this purpose. ConfigError: this process kind has none."""
        return self.all_derived(purpose)[0]

    def all_derived(self, purpose: str) -> tuple[bytes, ...]:
        """Return the key for this purpose of each generation, the current one first."""
        try:
            return tuple(each.secrets[purpose] for each in self.generations)
        except KeyError:
            raise ConfigError(f"a {self.kind.value} has no key for {purpose!r}") from None

    def replace(self, generations: Generations) -> None:
        """Use these from now on. Connections that were proved before are kept."""
        if not generations:
            raise ConfigError("expected a cluster key, got none")
        self.generations = generations
        for follow in self._followers:
            follow()

    def follow(self, call: Callable[[], None]) -> None:
        """Have this called after each `replace`, by the thread that replaces."""
        self._followers.append(call)


# A ring of one process kind, or the cluster key itself, or several of them, the current one first.
ClusterKeys: TypeAlias = bytes | Sequence[bytes] | KeyRing
