"""Headers and answers: the records that go between two ranks beside the page bytes.

A header goes before each part and an answer comes back. Transports that send records and page bytes as
separate messages announce up to MAX_BATCH parts in one record, and answer them in one. The size of a record
follows from its number of parts. Records are sealed under a key of the stream, with the number of their first
part on the stream. A record that is changed, repeated, left out or moved to another stream is therefore
refused before it has any effect. A header names units of a transfer, never a page or an offset; the bytes of
the units come in plan order.
"""

import hmac
import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Final, NamedTuple

from baton.errors import WireError

MAX_PART_BYTES: Final = 64 * 2**20  # a larger part would hold its stream up for too long
SEAL_BYTES: Final = 16
MAX_BATCH: Final = 4  # parts of one record
_OPENING: Final = struct.Struct(">4sQB")  # magic, number of the first part, number of parts
_PART: Final = struct.Struct(">16sIIIQ")  # transfer, epoch, first, stop, bytes
_HEADER_MAGIC: Final = b"BKV2"
_ANSWER_MAGIC: Final = b"BKA2"
HEADER_BYTES: Final = _OPENING.size + _PART.size + SEAL_BYTES  # of one part
ANSWER_BYTES: Final = _OPENING.size + 1 + SEAL_BYTES
BATCH_BYTES: Final = _OPENING.size + MAX_BATCH * _PART.size + SEAL_BYTES  # the largest record of headers
BATCH_ANSWER_BYTES: Final = _OPENING.size + MAX_BATCH + SEAL_BYTES


class WriteOutcome(IntEnum):
    """The receiver's answer to a part."""

    WRITTEN = 0
    REFUSED = 1  # the part's transfer has ended at the destination, or never began


_OUTCOMES: Final = frozenset(WriteOutcome)


class PartHeader(NamedTuple):
    """Units [first, stop) of a transfer, in num_bytes bytes."""

    transfer: bytes
    epoch: int
    first: int
    stop: int
    num_bytes: int


def stream_key(session_key: bytes) -> bytes:
    """Return the key that seals a stream's records and nothing else."""
    return hmac.digest(session_key, b"baton data stream 1", "sha256")


def encode_headers(key: bytes, number: int, headers: Sequence[PartHeader]) -> bytes:
    """Return one record of 1 to MAX_BATCH parts. number: of parts that went before on this stream."""
    plain = _OPENING.pack(_HEADER_MAGIC, number, len(headers))
    for each in headers:
        plain += _PART.pack(*each)
    return plain + _seal(key, plain)


def decode_headers(key: bytes, number: int, record: bytes | bytearray) -> tuple[PartHeader, ...]:
    """Return the parts of the record that is due. Bytes behind the record are ignored.

    At most MAX_PART_BYTES follow for each part. Raises WireError for any other record.
    """
    plain, num_parts = _opened(key, number, record, _HEADER_MAGIC, _PART.size, "header")
    fields = (_PART.unpack_from(plain, index * _PART.size) for index in range(num_parts))
    headers = tuple(PartHeader(*each) for each in fields)
    _check(all(0 < each.num_bytes <= MAX_PART_BYTES for each in headers), "length")
    return headers


def encode_answers(key: bytes, number: int, outcomes: Sequence[WriteOutcome]) -> bytes:
    """Return one record of 1 to MAX_BATCH answers. number: of the first part that is answered."""
    plain = _OPENING.pack(_ANSWER_MAGIC, number, len(outcomes)) + bytes(outcomes)
    return plain + _seal(key, plain)


def decode_answers(
    key: bytes, number: int, record: bytes | bytearray, num_parts: int
) -> tuple[WriteOutcome, ...]:
    """Return the answers to parts [number, number + num_parts) of the stream, or raise WireError."""
    plain, num_answers = _opened(key, number, record, _ANSWER_MAGIC, 1, "answer")
    _check(num_answers == num_parts and all(each in _OUTCOMES for each in plain), "answer")
    return tuple(WriteOutcome(each) for each in plain)


def _opened(
    key: bytes, number: int, record: bytes | bytearray, magic: bytes, part_bytes: int, name: str
) -> tuple[bytes | bytearray, int]:
    """Check a record's length, seal, kind and number; return the bytes of its parts, and their number."""
    _check(len(record) >= _OPENING.size, "length")
    sent_magic, sent_number, num_parts = _OPENING.unpack_from(record)
    stop = _OPENING.size + num_parts * part_bytes
    _check(len(record) >= stop + SEAL_BYTES, "length")
    _check(hmac.compare_digest(record[stop : stop + SEAL_BYTES], _seal(key, record[:stop])), "seal")
    _check(sent_magic == magic and sent_number == number and 0 < num_parts <= MAX_BATCH, name)
    return record[_OPENING.size : stop], num_parts


def _seal(key: bytes, plain: bytes | bytearray) -> bytes:
    return hmac.digest(key, plain, "sha256")[:SEAL_BYTES]


def _check(is_right: bool, reason: str) -> None:
    if not is_right:
        raise WireError(f"a record of a data stream has a wrong {reason}", reason=reason)
