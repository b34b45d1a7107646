"""What goes over a data stream besides page bytes: a header before each part, an answer after it.

Both are of fixed size and sealed under the stream's session key, counted per direction: one that is
changed, repeated, left out or moved to another stream is found before anything is done about it. A header
names units of a transfer, never a page or an offset; its bytes follow in plan order.
"""

import hmac
import struct
from enum import IntEnum
from typing import Final

import msgspec

from baton.errors import WireError

MAX_PART_BYTES: Final = 64 * 2**20  # a larger one would hold its stream up for too long
SEAL_BYTES: Final = 16

_HEADER: Final = struct.Struct(">4sQ16sIIIQ")  # magic, number, transfer, epoch, first, stop, bytes
_ANSWER: Final = struct.Struct(">4sQB")  # magic, number, outcome
_HEADER_MAGIC: Final = b"BKV1"
_ANSWER_MAGIC: Final = b"BKA1"
HEADER_BYTES: Final = _HEADER.size + SEAL_BYTES
ANSWER_BYTES: Final = _ANSWER.size + SEAL_BYTES


class Outcome(IntEnum):
    """What became of a part, as its receiver says."""

    WRITTEN = 0
    REFUSED = 1  # its transfer has ended here, or never was


_OUTCOMES: Final = frozenset(Outcome)


class PartHeader(msgspec.Struct, frozen=True):
    transfer: bytes
    epoch: int
    first: int
    stop: int
    num_bytes: int


def stream_key(session_key: bytes) -> bytes:
    """The key of a stream's records, so that no other use of the session's key can be taken for one."""
    return hmac.digest(session_key, b"baton data stream 1", "sha256")


def encode_header(key: bytes, number: int, header: PartHeader) -> bytes:
    """number: how many headers went before it on this stream."""
    plain = _HEADER.pack(
        _HEADER_MAGIC,
        number,
        header.transfer,
        header.epoch,
        header.first,
        header.stop,
        header.num_bytes,
    )
    return plain + _seal(key, plain)


def decode_header(key: bytes, number: int, record: bytes | bytearray) -> PartHeader:
    """WireError for anything but the header that is due. At most MAX_PART_BYTES follow it."""
    magic, sent_number, transfer, epoch, first, stop, num_bytes = _HEADER.unpack(
        _unsealed(key, record, HEADER_BYTES)
    )
    _check(magic == _HEADER_MAGIC and sent_number == number, "header")
    _check(0 < num_bytes <= MAX_PART_BYTES, "length")
    return PartHeader(transfer, epoch, first, stop, num_bytes)


def encode_answer(key: bytes, number: int, outcome: Outcome) -> bytes:
    plain = _ANSWER.pack(_ANSWER_MAGIC, number, outcome)
    return plain + _seal(key, plain)


def decode_answer(key: bytes, number: int, record: bytes | bytearray) -> Outcome:
    """WireError for anything but the answer to part `number` of the stream."""
    magic, sent_number, outcome = _ANSWER.unpack(_unsealed(key, record, ANSWER_BYTES))
    _check(magic == _ANSWER_MAGIC and sent_number == number, "answer")
    _check(outcome in _OUTCOMES, "answer")
    return Outcome(outcome)


def _seal(key: bytes, plain: bytes | bytearray) -> bytes:
    return hmac.digest(key, plain, "sha256")[:SEAL_BYTES]


def _unsealed(key: bytes, record: bytes | bytearray, expected: int) -> bytes | bytearray:
    _check(len(record) == expected, "length")
    plain, seal = record[:-SEAL_BYTES], record[-SEAL_BYTES:]
    _check(hmac.compare_digest(seal, _seal(key, plain)), "seal")
    return plain


def _check(is_right: bool, reason: str) -> None:
    if not is_right:
        raise WireError(f"a record of a data stream has a wrong {reason}", reason=reason)
