"""Valid streams of parts as a source sends them, and ways to damage them.

A peer without the cluster key can damage bytes; one with it can also seal whatever it likes. Both are here:
a field is changed and the record sealed again, or bytes are changed, moved, left out and put in.
"""

import hmac
import itertools
import random
import struct
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from baton.kvtransfer.transports.records import MAX_PART_BYTES

# Written down once more, so that the format does not change unseen.
OPENING: Final = struct.Struct(">4sQB")  # of a record of headers, and of one of answers
PART: Final = struct.Struct(">16sIIIQ")
ANSWER: Final = struct.Struct(">4sQBB")  # to one part
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
    sizes: tuple[int, ...] = ()  # bytes of each message that the body goes in; (): one message

    def messages(self) -> list[bytes]:
        """The messages that carry the body, one for each size; the last message carries the rest."""
        bounds = (0, *itertools.accumulate(self.sizes[:-1]), len(self.body))
        return [self.body[first:stop] for first, stop in itertools.pairwise(bounds)]


def sealed(key: bytes, plain: bytes) -> bytes:
    return plain + hmac.digest(key, plain, "sha256")[:SEAL_BYTES]


def valid_parts(
    rng: random.Random, key: bytes, targets: Sequence[Target], max_batch: int = 1
) -> list[SentPart]:
    """Valid records of a source, for transfers that are open, ended or unknown.

    max_batch: the most parts that one record announces.
    """
    sent = []
    number = 0
    for _ in range(rng.randint(1, 8)):
        num_parts = rng.randint(1, max_batch)
        plain, body, sizes = OPENING.pack(b"BKV2", number, num_parts), b"", []
        for _ in range(num_parts):
            target = rng.choice(targets)
            first = rng.randrange(target.num_units)
            stop = rng.randint(first + 1, target.num_units)
            sizes.append((stop - first) * target.unit_bytes)
            plain += PART.pack(target.transfer, target.epoch, first, stop, sizes[-1])
            body += bytes([1 + rng.randrange(255)]) * sizes[-1]
        sent.append(SentPart(sealed(key, plain), body, tuple(sizes)))
        number += num_parts
    return sent


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
    num_announced, odd = divmod(len(part.record) - OPENING.size - SEAL_BYTES, PART.size)
    if num_announced < 1 or odd:
        return _flip_bits(rng, key, parts, index)
    magic, number, num_parts = OPENING.unpack_from(part.record)
    place = OPENING.size + rng.randrange(num_announced) * PART.size
    transfer, epoch, first, stop, num_bytes = PART.unpack_from(part.record, place)
    match rng.randrange(9):
        case 0:
            magic = rng.choice((b"BKA2", b"BKV1", rng.randbytes(4)))
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
        case 8:
            num_parts = rng.choice((0, 2, 3, 255))
    plain = bytearray(part.record[:-SEAL_BYTES])
    OPENING.pack_into(plain, 0, magic, number & U64, num_parts)
    values = (transfer, epoch & U32, first & U32, stop & U32, num_bytes & U64)
    PART.pack_into(plain, place, *values)
    return _replaced(parts, index, part._replace(record=sealed(key, bytes(plain))))


def _flip_bits(rng: random.Random, key: bytes, parts: list[SentPart], index: int) -> list[SentPart]:
    record = bytearray(parts[index].record or b"x")
    for _ in range(rng.randint(1, 8)):
        record[rng.randrange(len(record))] ^= 1 << rng.randrange(8)
    return _replaced(parts, index, parts[index]._replace(record=bytes(record)))


def _seal_with_another_key(
    rng: random.Random, key: bytes, parts: list[SentPart], index: int
) -> list[SentPart]:
    record = sealed(rng.randbytes(32), parts[index].record[:-SEAL_BYTES])
    return _replaced(parts, index, parts[index]._replace(record=record))


def _cut_record(rng: random.Random, key: bytes, parts: list[SentPart], index: int) -> list[SentPart]:
    record = parts[index].record
    return _replaced(parts, index, parts[index]._replace(record=record[: rng.randrange(len(record) + 1)]))


def _cut_body(rng: random.Random, key: bytes, parts: list[SentPart], index: int) -> list[SentPart]:
    body = parts[index].body
    return _replaced(parts, index, parts[index]._replace(body=body[: rng.randrange(len(body) + 1)]))


def _add_noise(rng: random.Random, key: bytes, parts: list[SentPart], index: int) -> list[SentPart]:
    record, body, _ = parts[index]
    noise = rng.randbytes(rng.randint(1, 100))
    record, body = rng.choice(((noise + record, body), (record, body + noise)))
    return _replaced(parts, index, parts[index]._replace(record=record, body=body))


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
