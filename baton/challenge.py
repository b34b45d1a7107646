"""How two processes show each other that they hold the cluster's key, without sending it.

The life of a challenge, sans-io; each step is one small message:

1. The connecting end sends 32 random bytes, its nonce.
2. The accepting end answers with a nonce of its own and HMAC(key, "accepting" || both nonces).
3. The connecting end checks that and answers with HMAC(key, "connecting" || both nonces).
4. The accepting end checks that. Both derive the session key: HMAC(key, "session" || both nonces).

Both nonces are under every proof, so nothing can be replayed; the role is too, so a proof sent back to its
author proves nothing. The session key seals what follows: a relay can't change, repeat or reorder it.
"""

import hmac
import secrets
from collections.abc import Callable
from enum import Enum
from typing import Final

from baton.errors import ConfigError, WireError

NONCE_BYTES: Final = 32
PROOF_BYTES: Final = 32
MIN_KEY_BYTES: Final = 16
MAX_CHALLENGE_BYTES: Final = NONCE_BYTES + PROOF_BYTES
_CONTEXT: Final = b"baton wire 1 "


class Role(Enum):
    CONNECTING = b"connecting"
    ACCEPTING = b"accepting "  # as long as the other: no two inputs of the HMAC run into each other


class Challenge:
    """One end of the exchange. `session_key` is None until the peer has proved itself."""

    def __init__(
        self, key: bytes, role: Role, random_bytes: Callable[[int], bytes] = secrets.token_bytes
    ) -> None:
        if len(key) < MIN_KEY_BYTES:
            raise ConfigError(f"the cluster key needs {MIN_KEY_BYTES} bytes or more, it has {len(key)}")
        self._key = key
        self._role = role
        self._nonce = random_bytes(NONCE_BYTES)
        self._nonces = b""  # the connecting end's, then the accepting end's
        self.session_key: bytes | None = None

    def first(self) -> bytes:
        """What the connecting end opens with."""
        return self._nonce

    def receive(self, message: bytes) -> bytes | None:
        """The answer to send, None when there is none. WireError: the peer must be dropped."""
        if self.session_key is not None:
            raise WireError("a message of the challenge came after its end", reason="handshake")
        if self._role is Role.CONNECTING:
            return self._finish_connecting(message)
        if not self._nonces:
            return self._answer(message)
        self._check_proof(message, Role.CONNECTING)
        return None

    def _answer(self, nonce: bytes) -> bytes:
        _check_length(nonce, NONCE_BYTES)
        self._nonces = nonce + self._nonce
        return self._nonce + self._prove(Role.ACCEPTING)

    def _finish_connecting(self, message: bytes) -> bytes:
        _check_length(message, NONCE_BYTES + PROOF_BYTES)
        nonce, proof = message[:NONCE_BYTES], message[NONCE_BYTES:]
        if hmac.compare_digest(nonce, self._nonce):
            raise WireError("the peer sent our own nonce back", reason="handshake")
        self._nonces = self._nonce + nonce
        self._check_proof(proof, Role.ACCEPTING)
        return self._prove(Role.CONNECTING)

    def _prove(self, role: Role) -> bytes:
        return self._digest(role.value)

    def _check_proof(self, proof: bytes, role: Role) -> None:
        _check_length(proof, PROOF_BYTES)
        if not hmac.compare_digest(proof, self._prove(role)):
            raise WireError("the peer does not hold this cluster's key", reason="key")
        self.session_key = self._digest(b"session   ")

    def _digest(self, purpose: bytes) -> bytes:
        return hmac.digest(self._key, _CONTEXT + purpose + self._nonces, "sha256")


def _check_length(message: bytes, expected: int) -> None:
    if len(message) != expected:
        raise WireError(f"a challenge of {expected} bytes was due, {len(message)} came", reason="handshake")
