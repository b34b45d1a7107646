"""How messages are cut out of a stream of bytes, sans-io.

A frame is: u32 length | u8 version | body, big-endian; the length counts what follows it. A body is one
msgpack value, so anything that speaks plain msgpack can read a frame.
"""

import struct
from typing import Final

from baton.errors import WireError

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
