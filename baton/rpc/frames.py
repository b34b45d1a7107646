"""How messages are cut out of a stream of bytes, sans-io.

A frame is: u32 length | u8 version | body, big-endian; the length counts what follows it. A body is one
msgpack value, so anything that speaks plain msgpack can read a frame.
"""

import hmac
import struct
from hashlib import blake2b
from typing import Final

from baton.errors import WireError
from baton.rpc.auth import Role

MAX_CONTROL_BYTES: Final = 1 << 20
VERSION: Final = 1
_HEADER: Final = struct.Struct(">IB")


def encode_frame(body: bytes) -> bytes:
    """A whole frame. WireError, before anything is sent, when the peer would have to refuse it."""
    if len(body) + 1 > MAX_CONTROL_BYTES:
        raise WireError(f"{len(body)} bytes do not fit a frame of {MAX_CONTROL_BYTES}", reason="length")
    return _HEADER.pack(len(body) + 1, VERSION) + body


class FrameReader:
    """Cuts a stream of bytes into bodies; holds one unfinished frame at most.

    The header is judged as soon as it is there, before room is made for what it announces. After a
    WireError the stream has no next frame: every later call raises it again.
    """

    def __init__(self, max_bytes: int = MAX_CONTROL_BYTES) -> None:
        self._max_bytes = max_bytes
        self._buffer = bytearray()
        self._frame_bytes = 0  # of the frame that has begun, header included; 0 until its header is there
        self._error: WireError | None = None

    @property
    def has_begun(self) -> bool:
        return bool(self._buffer)

    @property
    def num_wanted(self) -> int:
        """Bytes that finish the header, or else the frame: who reads no more stops between two frames."""
        return (self._frame_bytes or _HEADER.size) - len(self._buffer)

    def feed(self, received: bytes | memoryview) -> list[bytes]:
        """The bodies that are complete now, in order; those before an offence are lost with the peer."""
        bodies = []
        view = memoryview(received)
        while view:
            if self._error is not None:
                raise self._error
            taken = min(self.num_wanted, len(view))
            self._buffer += view[:taken]
            view = view[taken:]
            if len(self._buffer) == _HEADER.size and not self._frame_bytes:
                self._judge_header()
            if len(self._buffer) == self._frame_bytes:
                bodies.append(bytes(memoryview(self._buffer)[_HEADER.size :]))
                self._buffer = bytearray()
                self._frame_bytes = 0
        return bodies

    def _judge_header(self) -> None:
        length, version = _HEADER.unpack(self._buffer)
        if not 1 <= length <= self._max_bytes:
            message = f"a frame of {length} bytes was announced, 1 to {self._max_bytes} are allowed"
            self._error = WireError(message, reason="length")
        elif version != VERSION:
            message = f"the peer speaks version {version} of the wire, we speak {VERSION}"
            self._error = WireError(message, reason="version")
        if self._error is not None:
            raise self._error
        self._frame_bytes = _HEADER.size - 1 + length


# Seals of the frames of one connection: what was changed, repeated, left out or moved is found.

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
