"""Headers and answers: the records that go between two ranks beside the page bytes.

A header goes before each part and an answer comes back. Both have a fixed size and are sealed under a key of
the stream, with a number counted per direction, so a record that is changed, repeated, left out or moved to
another stream is found before anything is done about it. A header names units of a transfer, never a page or
an offset; the bytes of the units come in plan order.
"""

import hmac
import struct
from enum import IntEnum
from typing import Final

import msgspec

from baton.errors import WireError

MAX_PART_BYTES: Final = 64 * 2**20  # a larger part would hold its stream up for too long
SEAL_BYTES: Final = 16
_HEADER: Final = struct.Struct(">4sQ16sIIIQ")  # magic, number, transfer, epoch, first, stop, bytes
_ANSWER: Final = struct.Struct(">4sQB")  # magic, number, outcome
_HEADER_MAGIC: Final = b"BKV1"
_ANSWER_MAGIC: Final = b"BKA1"
HEADER_BYTES: Final = _HEADER.size + SEAL_BYTES
ANSWER_BYTES: Final = _ANSWER.size + SEAL_BYTES


class WriteOutcome(IntEnum):
    """The receiver's answer to a part."""

    WRITTEN = 0
    REFUSED = 1  # the part's transfer has ended at the destination, or never began


_OUTCOMES: Final = frozenset(WriteOutcome)


class PartHeader(msgspec.Struct, frozen=True):
    """Units [first, stop) of a transfer, in num_bytes bytes."""

    transfer: bytes
    epoch: int
    first: int
    stop: int
    num_bytes: int


def stream_key(session_key: bytes) -> bytes:
    """The key that seals a stream's records: used for nothing else that the session's key seals."""
    return hmac.digest(session_key, b"baton data stream 1", "sha256")


def encode_header(key: bytes, number: int, header: PartHeader) -> bytes:
    """HEADER_BYTES bytes. number: of headers that went before on this stream."""
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


def encode_answer(key: bytes, number: int, outcome: WriteOutcome) -> bytes:
    """ANSWER_BYTES bytes. number: of the part that is answered."""
    plain = _ANSWER.pack(_ANSWER_MAGIC, number, outcome)
    return plain + _seal(key, plain)


def decode_answer(key: bytes, number: int, record: bytes | bytearray) -> WriteOutcome:
    """WireError for anything but the answer to part `number` of the stream."""
    magic, sent_number, outcome = _ANSWER.unpack(_unsealed(key, record, ANSWER_BYTES))
    _check(magic == _ANSWER_MAGIC and sent_number == number, "answer")
    _check(outcome in _OUTCOMES, "answer")
    return WriteOutcome(outcome)


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
