"""Valid streams of parts as a source sends them, and ways to damage them.

A peer without the cluster key can damage bytes; one with it can also seal whatever it likes. Both are here:
a field is changed and the record sealed again, or bytes are changed, moved, left out and put in.
"""

import hmac
import random
import struct
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from baton.kvtransfer.transports.records import MAX_PART_BYTES

# Written down once more, so that the format does not change unseen.
HEADER: Final = struct.Struct(">4sQ16sIIIQ")
ANSWER: Final = struct.Struct(">4sQB")
SEAL_BYTES: Final = 16
U32, U64 = 2**32 - 1, 2**64 - 1


class Target(NamedTuple):
    """A transfer that a header may name, as its destination knows it."""

    transfer: bytes
    epoch: int
    num_units: int
    unit_bytes: int


class SentPart(NamedTuple):
    """A record as it goes over the stream, and what follows it."""

    record: bytes
    body: bytes


def sealed(key: bytes, plain: bytes) -> bytes:
    return plain + hmac.digest(key, plain, "sha256")[:SEAL_BYTES]


def valid_parts(rng: random.Random, key: bytes, targets: Sequence[Target]) -> list[SentPart]:
    """What a source that keeps all rules sends, of transfers that are open, ended or unknown."""
    parts = []
    for number in range(rng.randint(1, 8)):
        target = rng.choice(targets)
        first = rng.randrange(target.num_units)
        stop = rng.randint(first + 1, target.num_units)
        num_bytes = (stop - first) * target.unit_bytes
        plain = HEADER.pack(b"BKV1", number, target.transfer, target.epoch, first, stop, num_bytes)
        parts.append(SentPart(sealed(key, plain), bytes([1 + rng.randrange(255)]) * num_bytes))
    return parts


def damaged(rng: random.Random, key: bytes, parts: list[SentPart]) -> list[SentPart]:
    """The parts, damaged in one way, or in two; one stream in ten is as it was."""
    for _ in range(rng.choice((0, 1, 1, 1, 1, 1, 1, 2, 2, 2))):
        parts = rng.choice(MUTATIONS)(rng, key, parts, rng.randrange(len(parts)))
    return parts


def _replaced(parts: list[SentPart], index: int, *others: SentPart) -> list[SentPart]:
    return [*parts[:index], *others, *parts[index + 1 :]]


def _change_a_field(rng: random.Random, key: bytes, parts: list[SentPart], index: int) -> list[SentPart]:
    """By someone who has the key. Every field, at and beyond its bounds."""
    part = parts[index]
    if len(part.record) != HEADER.size + SEAL_BYTES:
        return _flip_bits(rng, key, parts, index)
    magic, number, transfer, epoch, first, stop, num_bytes = HEADER.unpack(part.record[:-SEAL_BYTES])
    match rng.randrange(8):
        case 0:
            magic = rng.choice((b"BKA1", b"BKV2", rng.randbytes(4)))
        case 1:
            number = rng.choice((number + 1, number - 1, U64, rng.randrange(2**40)))
        case 2:
            transfer = rng.choice((bytes(16), rng.randbytes(16)))
        case 3:
            epoch = rng.choice((0, epoch + 1, U32))
        case 4:
            first = rng.choice((0, stop, stop + 1, U32, rng.randrange(16)))
        case 5:
            stop = rng.choice((0, first, stop + 1, U32, rng.randrange(16)))
        case 6:
            num_bytes = rng.choice(
                (0, 1, num_bytes - 1, num_bytes + 1, MAX_PART_BYTES, MAX_PART_BYTES + 1, U64)
            )
        case 7:  # units and bytes that belong together, and to no transfer
            first, stop = rng.randrange(64), rng.randrange(64)
            num_bytes = (stop - first) * 1024
    values = (number & U64, transfer, epoch & U32, first & U32, stop & U32, num_bytes & U64)
    plain = HEADER.pack(magic, *values)
    return _replaced(parts, index, SentPart(sealed(key, plain), part.body))


def _flip_bits(rng: random.Random, key: bytes, parts: list[SentPart], index: int) -> list[SentPart]:
    record = bytearray(parts[index].record or b"x")
    for _ in range(rng.randint(1, 8)):
        record[rng.randrange(len(record))] ^= 1 << rng.randrange(8)
    return _replaced(parts, index, SentPart(bytes(record), parts[index].body))


def _seal_with_another_key(
    rng: random.Random, key: bytes, parts: list[SentPart], index: int
) -> list[SentPart]:
    record, body = parts[index]
    return _replaced(parts, index, SentPart(sealed(rng.randbytes(32), record[:-SEAL_BYTES]), body))


def _cut_record(rng: random.Random, key: bytes, parts: list[SentPart], index: int) -> list[SentPart]:
    record, body = parts[index]
    return _replaced(parts, index, SentPart(record[: rng.randrange(len(record) + 1)], body))


def _cut_body(rng: random.Random, key: bytes, parts: list[SentPart], index: int) -> list[SentPart]:
    record, body = parts[index]
    return _replaced(parts, index, SentPart(record, body[: rng.randrange(len(body) + 1)]))


def _add_noise(rng: random.Random, key: bytes, parts: list[SentPart], index: int) -> list[SentPart]:
    record, body = parts[index]
    noise = rng.randbytes(rng.randint(1, 100))
    return _replaced(
        parts, index, rng.choice((SentPart(noise + record, body), SentPart(record, body + noise)))
    )


def _hang_up(rng: random.Random, key: bytes, parts: list[SentPart], index: int) -> list[SentPart]:
    return _cut_body(rng, key, parts, index)[: index + 1]


def _repeat(rng: random.Random, key: bytes, parts: list[SentPart], index: int) -> list[SentPart]:
    return _replaced(parts, index, parts[index], parts[index])


def _leave_out(rng: random.Random, key: bytes, parts: list[SentPart], index: int) -> list[SentPart]:
    return _replaced(parts, index) or parts


def _shuffle(rng: random.Random, key: bytes, parts: list[SentPart], index: int) -> list[SentPart]:
    return rng.sample(parts, len(parts))


def _be_noise(rng: random.Random, key: bytes, parts: list[SentPart], index: int) -> list[SentPart]:
    return [SentPart(rng.randbytes(rng.randint(1, 400)), b"")]


Mutation = Callable[[random.Random, bytes, list[SentPart], int], list[SentPart]]
MUTATIONS: Final[Sequence[Mutation]] = (
    *(_change_a_field,) * 12,
    _flip_bits,
    _seal_with_another_key,
    _cut_record,
    _cut_body,
    _add_noise,
    _hang_up,
    _repeat,
    _leave_out,
    _shuffle,
    _be_noise,
)
