"""Damaged answers of a receiver: its source takes the one that is due, and nothing else for it."""

import random
from collections import Counter

import pytest

from baton.errors import WireError
from baton.kvtransfer.transports.records import WriteOutcome, decode_answer
from tests.unit.kvtransfer.record_mutations import ANSWER, sealed

KEY = b"k" * 32


def answers(rng: random.Random) -> tuple[bytes, bool]:
    """What may come as the answer to part 5, and whether it is one."""
    magic, number, outcome = b"BKA1", 5, rng.randrange(2)
    key = KEY
    match rng.randrange(8):
        case 0:
            magic = rng.choice((b"BKV1", rng.randbytes(4)))
        case 1:
            number = rng.choice((0, 4, 6, 2**64 - 1))
        case 2:
            outcome = rng.randrange(2, 256)
        case 3:
            key = rng.randbytes(32)
    record = bytearray(sealed(key, ANSWER.pack(magic, number, outcome)))
    match rng.randrange(4):
        case 0:
            record[rng.randrange(len(record))] ^= 1 << rng.randrange(8)
        case 1:
            record = record[: rng.randrange(len(record))]
    is_answer = bytes(record) in (sealed(KEY, ANSWER.pack(b"BKA1", 5, good)) for good in WriteOutcome)
    return bytes(record), is_answer


def judge_answers(seed: int, num_answers: int) -> None:
    rng, seen = random.Random(seed), Counter[bool]()
    for _ in range(num_answers):
        record, is_answer = answers(rng)
        try:
            assert decode_answer(KEY, 5, record) in WriteOutcome
            was_taken = True
        except WireError:
            was_taken = False
        assert was_taken == is_answer
        seen[was_taken] += 1
    assert min(seen[True], seen[False]) > num_answers // 10


def test_twenty_thousand_damaged_answers_are_told_from_sound_ones() -> None:
    judge_answers(1, 20_000)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_million_damaged_answers_are_told_from_sound_ones() -> None:
    judge_answers(2, 1_000_000)
