"""Seals of the frames of one connection: what was changed, repeated, left out or moved is found."""

import hmac
import struct
from typing import Final

from baton.challenge import Role
from baton.errors import WireError
from baton.frames import MAX_CONTROL_BYTES

SEAL_BYTES: Final = 16
MAX_BODY_BYTES: Final = MAX_CONTROL_BYTES - 1 - SEAL_BYTES

_PEER: Final = {Role.CONNECTING: Role.ACCEPTING, Role.ACCEPTING: Role.CONNECTING}
_SEALED: Final = struct.Struct(">10sQ")  # who sends, how many frames it sent before


class Seals:
    """One end's: both count the frames each way. `session_key` is what the challenge ended with."""

    def __init__(self, session_key: bytes, role: Role) -> None:
        self._key = session_key
        self._role = role
        self._num_sent = self._num_received = 0

    def seal(self, body: bytes) -> bytes:
        """The body and its seal: they must be sent before the next that is sealed.

        WireError, before anything is counted, when no frame holds them.
        """
        if len(body) > MAX_BODY_BYTES:
            raise WireError(f"{len(body)} bytes do not fit a frame's {MAX_BODY_BYTES}", reason="length")
        sealed = body + self._digest(self._role, self._num_sent, body)
        self._num_sent += 1
        return sealed

    def open(self, sealed: bytes) -> bytes:
        """The body. WireError: the stream of frames is not the one that the peer has sent."""
        body, seal = sealed[:-SEAL_BYTES], sealed[-SEAL_BYTES:]
        if not hmac.compare_digest(seal, self._digest(_PEER[self._role], self._num_received, body)):
            raise WireError("a frame was changed, repeated or left out", reason="seal")
        self._num_received += 1
        return body

    def _digest(self, sender: Role, number: int, body: bytes) -> bytes:
        return hmac.digest(self._key, _SEALED.pack(sender.value, number) + body, "sha256")[:SEAL_BYTES]
