"""Seals of the frames of one connection: what was changed, repeated, left out or moved is found."""

import hmac
from hashlib import blake2b
from typing import Final

from baton.challenge import Role
from baton.errors import WireError
from baton.frames import MAX_CONTROL_BYTES

SEAL_BYTES: Final = 16
MAX_BODY_BYTES: Final = MAX_CONTROL_BYTES - 1 - SEAL_BYTES

_PEER: Final = {Role.CONNECTING: Role.ACCEPTING, Role.ACCEPTING: Role.CONNECTING}


class Seals:
    """One end's: both count the frames each way. `session_key` is what the challenge ended with.

    A seal is keyed BLAKE2b of the number of the frame and its body. Each direction has a hash of its own.
    """

    def __init__(self, session_key: bytes, role: Role) -> None:
        self._sending, self._receiving = (
            blake2b(key=session_key, digest_size=SEAL_BYTES, person=sender.value)
            for sender in (role, _PEER[role])
        )
        self._num_sent = self._num_received = 0

    def seal(self, body: bytes) -> bytes:
        """The body and its seal: they must be sent before the next that is sealed.

        WireError, before anything is counted, when no frame holds them.
        """
        if len(body) > MAX_BODY_BYTES:
            raise WireError(f"{len(body)} bytes do not fit a frame's {MAX_BODY_BYTES}", reason="length")
        sealed = body + _seal(self._sending, self._num_sent, body)
        self._num_sent += 1
        return sealed

    def open(self, sealed: bytes) -> bytes:
        """The body. WireError: the stream of frames is not the one that the peer has sent."""
        body, seal = sealed[:-SEAL_BYTES], sealed[-SEAL_BYTES:]
        if not hmac.compare_digest(seal, _seal(self._receiving, self._num_received, body)):
            raise WireError("a frame was changed, repeated or left out", reason="seal")
        self._num_received += 1
        return body


def _seal(keyed: blake2b, number: int, body: bytes) -> bytes:
    """number: of frames that came before it in its direction."""
    seal = keyed.copy()
    seal.update(number.to_bytes(8, "big"))
    seal.update(body)
    return seal.digest()
