"""Headers and answers, as written and as damaged."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import WireError
from baton.kvtransfer.transports.records import (
    ANSWER_BYTES,
    BATCH_ANSWER_BYTES,
    BATCH_BYTES,
    MAX_BATCH,
    PartHeader,
    WriteOutcome,
    decode_answers,
    decode_headers,
    encode_answers,
    encode_headers,
    stream_key,
)
from tests.unit.kvtransfer.record_mutations import ANSWER, sealed

KEY = stream_key(b"session")


@pytest.mark.parametrize("number", [4, 6])
def test_repeated_or_missing_record_is_found(number: int) -> None:
    header = PartHeader(b"a" * 16, 1, 0, 1, 8)
    with pytest.raises(WireError):
        decode_headers(KEY, number, encode_headers(KEY, 5, [header]))
    with pytest.raises(WireError):
        decode_answers(KEY, number, encode_answers(KEY, 5, [WriteOutcome.WRITTEN]), 1)


@given(outcome=st.sampled_from(WriteOutcome), place=st.integers(0, ANSWER_BYTES * 8 - 1))
def test_one_flipped_bit_of_an_answer_is_found(outcome: WriteOutcome, place: int) -> None:
    record = bytearray(encode_answers(KEY, 5, [outcome]))
    record[place // 8] ^= 1 << place % 8
    with pytest.raises(WireError):
        decode_answers(KEY, 5, record, 1)


@given(
    magic=st.sampled_from([b"BKA2", b"BKV2", b"BKA1"]), number=st.integers(0, 9), outcome=st.integers(0, 255)
)
def test_only_the_answer_that_is_due_is_taken_though_others_have_the_key(
    magic: bytes, number: int, outcome: int
) -> None:
    record = sealed(KEY, ANSWER.pack(magic, number, 1, outcome))
    if (magic, number) == (b"BKA2", 5) and outcome < len(WriteOutcome):
        assert decode_answers(KEY, 5, record, 1) == (outcome,)
    else:
        with pytest.raises(WireError, match="wrong answer"):
            decode_answers(KEY, 5, record, 1)


@pytest.mark.parametrize("num_parts", range(1, MAX_BATCH + 1))
def test_batch_is_read_from_a_message_of_any_size_that_holds_it(num_parts: int) -> None:
    headers = tuple(PartHeader(bytes([index]) * 16, index, 0, 1 + index, 8) for index in range(num_parts))
    outcomes = tuple(WriteOutcome(index % 2) for index in range(num_parts))
    record, answer = encode_headers(KEY, 5, headers), encode_answers(KEY, 5, outcomes)
    assert (len(record) == BATCH_BYTES) == (len(answer) == BATCH_ANSWER_BYTES) == (num_parts == MAX_BATCH)
    assert decode_headers(KEY, 5, record.ljust(BATCH_BYTES, b"?")) == headers
    assert decode_answers(KEY, 5, answer.ljust(BATCH_ANSWER_BYTES, b"?"), num_parts) == outcomes


@given(place=st.integers(0, BATCH_BYTES * 8 - 1))
def test_one_flipped_bit_of_a_batch_is_found(place: int) -> None:
    record = bytearray(encode_headers(KEY, 5, [PartHeader(b"a" * 16, 1, 0, 1, 8)] * MAX_BATCH))
    record[place // 8] ^= 1 << place % 8
    with pytest.raises(WireError):
        decode_headers(KEY, 5, record)


def test_batch_with_a_part_of_no_bytes_or_too_many_is_refused() -> None:
    for num_bytes in (0, 2**26 + 1):
        parts = [PartHeader(b"a" * 16, 1, 0, 1, 8), PartHeader(b"a" * 16, 1, 1, 2, num_bytes)]
        with pytest.raises(WireError, match="length"):
            decode_headers(KEY, 5, encode_headers(KEY, 5, parts))


@pytest.mark.parametrize("num_answers", [1, 3])
def test_every_part_of_a_batch_is_answered_at_once(num_answers: int) -> None:
    answer = encode_answers(KEY, 5, [WriteOutcome.WRITTEN] * num_answers)
    with pytest.raises(WireError, match="wrong answer"):
        decode_answers(KEY, 5, answer, 2)


def test_record_of_no_parts_is_refused() -> None:
    with pytest.raises(WireError, match="wrong header"):
        decode_headers(KEY, 5, encode_headers(KEY, 5, []))
    with pytest.raises(WireError, match="length"):
        decode_headers(KEY, 5, b"BKV2")
