"""Keys of processes, and the handshake in which both ends of a connection prove their keys.

Keys, one for each purpose and for each pair of process kinds, are derived from the cluster key:

1. The launcher of a process derives the keys of its kind: a `KeyRing`. The process gets the ring and never
   the cluster key, so a gateway can neither pose as a worker nor read page links.
2. A link between a process of kind A and one of kind B is proved with the key of the pair (A, B). Both kinds
   hold it, so an end accepts only the kinds that connect to it (`_DIALLERS`): no worker can pose as a router
   to another worker.
3. A ring may hold several generations, the current one first. The connecting end proves itself with its
   current generation; the accepting end takes every generation that it holds.
4. `replace` changes the generations of a running process, for `baton cluster-key rotate` and `retire`.
   Existing connections are kept.

The handshake (`Challenge`), sans-io; each step is one small message:

1. The connecting end sends 32 random bytes, its nonce, and its preface.
2. The accepting end answers with a nonce and a preface of its own and HMAC(key, "accepting" || both nonces ||
   both prefaces).
3. The connecting end checks that and answers with HMAC(key, "connecting" || the same).
4. The accepting end checks that. Both derive the session key: HMAC(key, "session" || the same).
5. Both compare the prefaces (`check_version`): ends of different schemas part here, and each can say why.

Every proof covers the nonces, so a recorded proof is worthless. It covers the role, so an end cannot be
answered with its own proof. It covers the prefaces, so a process cannot claim another kind or build. The
session key seals all later frames: a relay cannot change, repeat or reorder them.

FROZEN: the sizes of the messages and the layout of the preface stay as they are in all later builds, so that
any two builds can name each other. The preface, 64 bytes:

    magic      4 bytes  b"BTN2"
    kind       1 byte   the process kind, see `_KINDS`; 0 where both ends are of one kind that a key is for
    key        8 bytes  id of the key generation that the connecting end proves itself with
    schema     8 bytes  hash of the message types that follow (baton/messages/bounds.py); zeros: none
    build     43 bytes  version of the build, UTF-8, padded with zeros
"""

import hmac
import secrets
import struct
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Annotated, Final, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta

import baton
from baton.errors import ConfigError, WireError
from baton.messages.bounds import Kind

MIN_KEY_BYTES: Final = 16
ID_BYTES: Final = 8
_KEY_CONTEXT: Final = b"baton key 1 "
CACHE_SALTS: Final = "cache salts"  # salts of tenants, on which the names of their pages depend
EVENT_IDS: Final = "event ids"  # of streams that another gateway can continue
GATEWAYS: Final = "gateways"  # queries between gateways of one port
REDIS_NAMES: Final = "redis names"
REDIS_VALUES: Final = "redis values"  # seals of the values that routers keep in Redis
PAGES: Final = "pages"  # links that carry pages and the messages about pages
RANKS: Final = "ranks"  # links between the ranks of one worker on several nodes
_SHARED: Final = "shared"  # of `LinkKeys.shared`
_PURPOSES: Final[Mapping[Kind, tuple[str, ...]]] = {
    Kind.GATEWAY: (CACHE_SALTS, EVENT_IDS, GATEWAYS),
    Kind.ROUTER: (REDIS_NAMES, REDIS_VALUES),
    Kind.WORKER: (PAGES, RANKS),
    Kind.OPERATOR: (),
}
# The kinds that open control links to a process of a kind. Other kinds accept none.
_DIALLERS: Final[Mapping[Kind | None, tuple[Kind, ...]]] = {
    Kind.WORKER: (Kind.GATEWAY, Kind.WORKER),
    Kind.ROUTER: (Kind.GATEWAY, Kind.WORKER, Kind.OPERATOR),
}


def derive(key: bytes, purpose: str) -> bytes:
    """Return the 32-byte key for one purpose. It reveals neither `key` nor the keys of other purposes."""
    return hmac.digest(key, _KEY_CONTEXT + purpose.encode(), "sha256")


def _check_key(key: bytes) -> None:
    if len(key) < MIN_KEY_BYTES:
        raise ConfigError(f"the cluster key needs {MIN_KEY_BYTES} bytes or more, it has {len(key)}")


def _link_purpose(one: Kind, other: Kind) -> str:
    """Name the key of control links between processes of two kinds; the order does not matter."""
    return "link " + " ".join(sorted((one.value, other.value)))


class KeyGeneration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of one process kind, derived from one cluster key."""

    id: Annotated[bytes, Meta(min_length=ID_BYTES, max_length=ID_BYTES)]  # public
    secrets: dict[str, bytes]  # purpose -> key


Generations: TypeAlias = tuple[KeyGeneration, ...]


def generation(cluster_key: bytes, kind: Kind) -> KeyGeneration:
    """Derive the keys of a process of this kind. ConfigError for a cluster key that is too short."""
    _check_key(cluster_key)
    purposes = (*_PURPOSES[kind], *(_link_purpose(kind, other) for other in Kind))
    return KeyGeneration(
        id=derive(cluster_key, "id")[:ID_BYTES],
        secrets={purpose: derive(cluster_key, purpose) for purpose in purposes},
    )


class KeyRing:
    """The keys of one process. Threads may share a ring."""

    def __init__(self, kind: Kind, generations: Generations) -> None:
        """generations: the current one first."""
        self.kind = kind
        self.generations: Generations = ()
        self._followers: list[Callable[[], None]] = []
        self.replace(generations)

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
        """Return the current generation's key for a purpose. ConfigError: this process kind has none."""
        return self.all_derived(purpose)[0]

    def all_derived(self, purpose: str) -> tuple[bytes, ...]:
        """Return the key for a purpose of each generation, the current one first."""
        try:
            return tuple(each.secrets[purpose] for each in self.generations)
        except KeyError:
            raise ConfigError(f"a {self.kind.value} has no key for {purpose!r}") from None

    def replace(self, generations: Generations) -> None:
        """Use these generations from now on. Connections that were proved before are kept."""
        if not generations:
            raise ConfigError("expected a cluster key, got none")
        self.generations = generations
        for follow in self._followers:
            follow()

    def follow(self, call: Callable[[], None]) -> None:
        """Call this function after each `replace`, on the thread that replaces, until `unfollow`."""
        self._followers.append(call)

    def unfollow(self, call: Callable[[], None]) -> None:
        """End `follow`, so that a ring that lives longer does not keep the function's owner alive."""
        self._followers = [each for each in self._followers if each != call]


# A ring of one process kind, or the cluster key itself, or several cluster keys, the current one first.
ClusterKeys: TypeAlias = bytes | Sequence[bytes] | KeyRing


class LinkKeys:
    """The keys that one end of a link may use, and the process kind that this end proves to be."""

    def __init__(self, ring: KeyRing, purpose: str | None = None) -> None:
        """purpose: of links between processes of one kind; None: control links, with a key for each pair of
        kinds. ConfigError: processes of the ring's kind have no key for the purpose.
        """
        if purpose is not None:
            ring.derived(purpose)
        self._ring = ring
        self._purpose = purpose

    @classmethod
    def shared(cls, key: bytes) -> "LinkKeys":
        """Return the keys of links between ends that share one secret.

        ConfigError: the secret is too short.
        """
        _check_key(key)
        only = KeyGeneration(id=derive(key, "id")[:ID_BYTES], secrets={_SHARED: key})
        return cls(KeyRing(Kind.OPERATOR, (only,)), _SHARED)

    @property
    def kind(self) -> Kind | None:
        """The process kind that this end proves to be; None: both ends are of one kind."""
        return self._ring.kind if self._purpose is None else None

    @property
    def current_id(self) -> bytes:
        """Id of the generation that a connecting end uses."""
        return self._ring.generations[0].id

    def find(self, key_id: bytes, peer: Kind | None) -> bytes | None:
        """Return the key of a generation for a peer of that kind, or None where this end has none."""
        if self._purpose is not None:
            purpose = self._purpose if peer is None else ""
        else:
            purpose = "" if peer is None else _link_purpose(self._ring.kind, peer)
        for each in self._ring.generations:
            if each.id == key_id:
                return each.secrets.get(purpose)
        return None


LinkSecret: TypeAlias = bytes | LinkKeys  # bytes: see LinkKeys.shared

NONCE_BYTES: Final = 32
PROOF_BYTES: Final = 32
PREFACE_BYTES: Final = 64
OPENING_BYTES: Final = NONCE_BYTES + PREFACE_BYTES
ANSWER_BYTES: Final = OPENING_BYTES + PROOF_BYTES
MAX_CHALLENGE_BYTES: Final = ANSWER_BYTES
NO_SCHEMA: Final = bytes(8)
_CONTEXT: Final = b"baton wire 2 "
_MAGIC: Final = b"BTN2"
_PREFACE: Final = struct.Struct(f">4sB{ID_BYTES}s8s43s")
_KINDS: Final[dict[Kind | None, int]] = {
    None: 0,
    Kind.GATEWAY: 1,
    Kind.ROUTER: 2,
    Kind.WORKER: 3,
    Kind.OPERATOR: 4,
}
_KIND_OF: Final = {number: kind for kind, number in _KINDS.items()}


class Role(Enum):
    """The part of one end in the handshake."""

    CONNECTING = b"connecting"
    ACCEPTING = b"accepting "  # as long as the other value: no two inputs of the HMAC run into each other


class Preface(NamedTuple):
    """The kind, key, schema and build that an end claims; its proof covers them."""

    kind: Kind | None
    key_id: bytes
    schema: bytes
    build: str

    def encode(self) -> bytes:
        """Return the preface as PREFACE_BYTES bytes."""
        build = self.build.encode()[:43].decode(errors="ignore").encode()
        return _PREFACE.pack(_MAGIC, _KINDS[self.kind], self.key_id, self.schema, build)

    @classmethod
    def decode(cls, body: bytes) -> "Preface":
        """Return the preface in PREFACE_BYTES bytes. WireError: the bytes are no preface."""
        magic, kind, key_id, schema, build = _PREFACE.unpack(body)
        if magic != _MAGIC or kind not in _KIND_OF:
            raise WireError("the peer is no process of Baton that we understand", reason="version")
        return cls(_KIND_OF[kind], key_id, schema, build.rstrip(b"\0").decode(errors="replace"))

    def describe(self) -> str:
        """Name the build and the schema, for error messages."""
        return f"build {self.build!r} with message schema {self.schema.hex()}"


class Challenge:
    """One end of the handshake. `session_key` is None until the peer has proved itself."""

    def __init__(self, secret: LinkSecret, role: Role, *, schema: bytes = NO_SCHEMA) -> None:
        """schema: hash of the messages that will follow. ConfigError for a key that is too short."""
        self._keys = LinkKeys.shared(secret) if isinstance(secret, bytes) else secret
        self._key = b""  # once the peer's preface is known
        self._role = role
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._own = Preface(self._keys.kind, self._keys.current_id, schema, baton.__version__)
        self._transcript = b""  # nonce and preface of the connecting end, then of the accepting end
        self.peer: Preface | None = None
        self.session_key: bytes | None = None

    def first(self) -> bytes:
        """Return the first message of the connecting end."""
        return self._nonce + self._own.encode()

    def receive(self, message: bytes) -> bytes | None:
        """Return the answer to a message, if there is one. WireError: the peer must be dropped."""
        if self.session_key is not None:
            raise WireError("a message of the challenge came after its end", reason="handshake")
        if self._role is Role.CONNECTING:
            return self._finish_connecting(message)
        if not self._transcript:
            return self._answer(message)
        self._check_proof(message, Role.CONNECTING)
        return None

    def check_version(self) -> None:
        """Raise WireError when the proven peer's messages have another schema."""
        assert self.peer is not None and self.session_key is not None
        if self.peer.schema != self._own.schema:
            raise WireError(
                f"mixed builds: the peer is {self.peer.describe()}, we are {self._own.describe()}; "
                "run one build in a cluster (docs/operations.md, Rolling upgrade)",
                reason="version",
            )

    def _answer(self, opening: bytes) -> bytes:
        _check_length(opening, OPENING_BYTES)
        self.peer = Preface.decode(opening[NONCE_BYTES:])
        key_id, kind = self.peer.key_id, self.peer.kind
        may_dial = kind is None or kind in _DIALLERS.get(self._keys.kind, ())
        # A random key makes a proof that fails, which tells the peer that its key is refused.
        found = self._keys.find(key_id, kind) if may_dial else None
        self._key = found or secrets.token_bytes(PROOF_BYTES)
        self._own = self._own._replace(key_id=key_id)
        answer = self.first()
        self._transcript = opening + answer
        return answer + self._digest(Role.ACCEPTING.value)

    def _finish_connecting(self, message: bytes) -> bytes:
        _check_length(message, ANSWER_BYTES)
        opening, proof = message[:OPENING_BYTES], message[OPENING_BYTES:]
        if hmac.compare_digest(opening[:NONCE_BYTES], self._nonce):
            raise WireError("the peer sent our own nonce back", reason="handshake")
        self.peer = Preface.decode(opening[NONCE_BYTES:])
        key = self._keys.find(self._own.key_id, self.peer.kind)
        if key is None:
            raise _stranger(self.peer)
        self._key = key
        self._transcript = self.first() + opening
        self._check_proof(proof, Role.ACCEPTING)
        return self._digest(Role.CONNECTING.value)

    def _check_proof(self, proof: bytes, role: Role) -> None:
        _check_length(proof, PROOF_BYTES)
        if not hmac.compare_digest(proof, self._digest(role.value)):
            assert self.peer is not None
            raise _stranger(self.peer)
        self.session_key = self._digest(b"session   ")

    def _digest(self, purpose: bytes) -> bytes:
        return hmac.digest(self._key, _CONTEXT + purpose + self._transcript, "sha256")


def _stranger(peer: Preface) -> WireError:
    kind = f" of a {peer.kind.value}" if peer.kind is not None else ""
    return WireError(
        f"the peer does not hold this cluster's key{kind}: one end has a key that is retired, or another's",
        reason="key",
    )


def _check_length(message: bytes, expected: int) -> None:
    if len(message) != expected:
        raise WireError(
            f"expected a challenge of {expected} bytes, got {len(message)}: the peer may be another program, "
            "or an earlier build",
            reason="handshake",
        )
