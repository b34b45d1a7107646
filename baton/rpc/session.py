"""One end of a connection without I/O: the handshake, then sealed frames.

1. The owner of the socket makes a `Session`, which writes the frames of the handshake through `write`.
2. The owner feeds every received byte to `receive`, which yields the bodies once the peer has proved itself.
3. `frame` seals one body. Frames must be written whole, in the order in which they were made.

A frame is: u32 length | u8 version | body | seal, big-endian; the length counts all that follows it. Frames
of the handshake have no seal. A body is one msgpack value. A seal is a keyed BLAKE2b of the number of the
frame in its direction and the body, so that a changed, repeated, omitted or moved frame is found.

baton/rpc/connection.py drives sessions from threads, baton/rpc/server.py from an event loop.
"""

import hmac
import math
import struct
from collections.abc import Callable, Iterator
from hashlib import blake2b
from typing import Final

from baton.errors import WireError
from baton.messages.bounds import MAX_BODY_BYTES, MAX_FRAME_BYTES, SEAL_BYTES
from baton.rpc.auth import MAX_CHALLENGE_BYTES, NO_SCHEMA, Challenge, LinkSecret, Preface, Role

HANDSHAKE_TIMEOUT_S: Final = 5.0
FRAME_TIMEOUT_S: Final = 10.0  # from a frame's first byte to its last
VERSION: Final = 1
_HEADER: Final = struct.Struct(">IB")
_PEER: Final = {Role.CONNECTING: Role.ACCEPTING, Role.ACCEPTING: Role.CONNECTING}


def encode_frame(body: bytes) -> bytes:
    """Return a whole frame. WireError when the peer would have to refuse the frame."""
    if len(body) + 1 > MAX_FRAME_BYTES:
        raise WireError(f"{len(body)} bytes do not fit a frame of {MAX_FRAME_BYTES}", reason="length")
    return _HEADER.pack(len(body) + 1, VERSION) + body


class FrameReader:
    """Cuts a stream of bytes into bodies; holds at most one unfinished frame.

    The header is judged as soon as it is complete, before memory is reserved for the frame. After a WireError
    the stream has no next frame: every later call raises it again.
    """

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self.max_bytes = max_bytes  # of a frame's length; may change between two frames
        self._buffer = bytearray()
        self._frame_bytes = 0  # of the unfinished frame, header included; 0 until its header is complete
        self._error: WireError | None = None

    @property
    def has_begun(self) -> bool:
        """Part of a frame has come."""
        return bool(self._buffer)

    @property
    def num_wanted(self) -> int:
        """Bytes that complete the header, or else the frame. Reading no more stops between two frames."""
        return (self._frame_bytes or _HEADER.size) - len(self._buffer)

    def feed(self, received: bytes | memoryview) -> Iterator[bytes]:
        """Yield the bodies that are complete now, in order."""
        view = memoryview(received)
        while view:
            if self._error is not None:
                raise self._error
            if not self._buffer and len(view) >= _HEADER.size:
                frame_bytes = self._judge_header(view)
                if frame_bytes <= len(view):  # a whole frame needs no buffer
                    body, view = bytes(view[_HEADER.size : frame_bytes]), view[frame_bytes:]
                    yield body
                    continue
            taken = min(self.num_wanted, len(view))
            self._buffer += view[:taken]
            view = view[taken:]
            if len(self._buffer) == _HEADER.size and not self._frame_bytes:
                self._frame_bytes = self._judge_header(self._buffer)
            if len(self._buffer) == self._frame_bytes:
                body = bytes(memoryview(self._buffer)[_HEADER.size :])
                self._buffer = bytearray()
                self._frame_bytes = 0
                yield body

    def _judge_header(self, header: bytearray | memoryview) -> int:
        """Return the bytes of the whole frame with this header. Raises WireError for an illegal header."""
        length, version = _HEADER.unpack_from(header)
        if not 1 <= length <= self.max_bytes:
            message = f"a frame of {length} bytes was announced, 1 to {self.max_bytes} are allowed"
            self._error = WireError(message, reason="length")
        elif version != VERSION:
            message = f"the peer speaks version {version} of the wire, we speak {VERSION}"
            self._error = WireError(message, reason="version")
        if self._error is not None:
            raise self._error
        return _HEADER.size - 1 + int(length)


class Seals:
    """Seals and opens the bodies of one end, and counts them in each direction."""

    def __init__(self, session_key: bytes, role: Role) -> None:
        """session_key: the result of the handshake. Each direction has a hash of its own."""
        self._sending, self._receiving = (
            blake2b(key=session_key, digest_size=SEAL_BYTES, person=sender.value)
            for sender in (role, _PEER[role])
        )
        self._num_sent = self._num_received = 0

    def seal(self, body: bytes) -> bytes:
        """Return the body and its seal. WireError, and nothing is counted, when no frame holds them."""
        if len(body) > MAX_BODY_BYTES:
            raise WireError(f"{len(body)} bytes do not fit a frame's {MAX_BODY_BYTES}", reason="length")
        sealed = body + _seal(self._sending, self._num_sent, body)
        self._num_sent += 1
        return sealed

    def open(self, sealed: bytes) -> bytes:
        """Return the body. WireError: the frame is not the next one that the peer has sent."""
        body, seal = sealed[:-SEAL_BYTES], sealed[-SEAL_BYTES:]
        if not hmac.compare_digest(seal, _seal(self._receiving, self._num_received, body)):
            raise WireError("a frame was changed, repeated or left out", reason="seal")
        self._num_received += 1
        return body


def _seal(keyed: blake2b, number: int, body: bytes) -> bytes:
    """number: of the frame in its direction, from 0."""
    seal = keyed.copy()
    seal.update(number.to_bytes(8, "big"))
    seal.update(body)
    return seal.digest()


class Session:
    """One end of one connection. Its owner may call it from one thread at a time for each direction."""

    def __init__(
        self, secret: LinkSecret, role: Role, write: Callable[[bytes], object], *, schema: bytes = NO_SCHEMA
    ) -> None:
        """write: sends a frame of the handshake at once; the peer learns from it why it is refused.

        schema: see Challenge. ConfigError for a key that is too short.
        """
        self._challenge = Challenge(secret, role, schema=schema)
        self._role = role
        self._write = write
        self._reader = FrameReader(MAX_CHALLENGE_BYTES + 1)
        self._frame_began_s = math.inf
        self._seals: Seals | None = None

    @property
    def is_proven(self) -> bool:
        """The handshake is over: both ends hold the key and speak one schema."""
        return self._seals is not None

    @property
    def peer(self) -> Preface:
        """The peer's preface, after the handshake."""
        assert self._challenge.peer is not None
        return self._challenge.peer

    @property
    def session_key(self) -> bytes:
        """32 bytes that only the two ends of this connection know. WireError before the handshake."""
        if self._seals is None or self._challenge.session_key is None:
            raise _unproven()
        return self._challenge.session_key

    @property
    def has_begun(self) -> bool:
        """Part of a frame has come."""
        return self._reader.has_begun

    @property
    def num_wanted(self) -> int:
        """See FrameReader."""
        return self._reader.num_wanted

    @property
    def frame_deadline_s(self) -> float:
        """The time by which the unfinished frame must be complete, by the clock of `receive`."""
        return self._frame_began_s + FRAME_TIMEOUT_S if self._reader.has_begun else math.inf

    def open(self) -> None:
        """Begin the handshake; call it once at either end."""
        if self._role is Role.CONNECTING:
            self._write(encode_frame(self._challenge.first()))

    def frame(self, body: bytes) -> bytes:
        """Return the next frame, which must be sent whole and before the one after it.

        WireError before the handshake, or for a body that no frame holds.
        """
        if self._seals is None:
            raise _unproven()
        return encode_frame(self._seals.seal(body))

    def receive(self, received: bytes | memoryview, now_s: float) -> Iterator[bytes]:
        """Yield the bodies that are complete now, in order. WireError: the peer must be dropped."""
        if not self._reader.has_begun:
            self._frame_began_s = now_s
        for body in self._reader.feed(received):
            self._frame_began_s = now_s
            if self._seals is not None:
                yield self._seals.open(body)
            else:
                self._prove(body)

    def check_deadline(self, now_s: float) -> None:
        """Raise WireError when the unfinished frame is late."""
        if now_s >= self.frame_deadline_s:
            raise WireError(f"a frame took longer than {FRAME_TIMEOUT_S:g} s to arrive", reason="slow")

    def _prove(self, message: bytes) -> None:
        answer = self._challenge.receive(message)
        if answer is not None:
            self._write(encode_frame(answer))
        if self._challenge.session_key is not None:
            self._challenge.check_version()
            self._reader.max_bytes = MAX_FRAME_BYTES
            self._seals = Seals(self._challenge.session_key, self._role)


def _unproven() -> WireError:
    return WireError("the peer has not shown yet that it holds the cluster's key", reason="handshake")
