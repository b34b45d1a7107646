"""Headers and answers, as written and as damaged."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import WireError
from baton.kvtransfer.transports.records import (
    ANSWER_BYTES,
    PartHeader,
    WriteOutcome,
    decode_answer,
    decode_header,
    encode_answer,
    encode_header,
    stream_key,
)
from tests.unit.kvtransfer.record_mutations import ANSWER, sealed

KEY = stream_key(b"session")


@pytest.mark.parametrize("number", [4, 6])
def test_repeated_or_missing_record_is_found(number: int) -> None:
    header = PartHeader(b"a" * 16, 1, 0, 1, 8)
    with pytest.raises(WireError):
        decode_header(KEY, number, encode_header(KEY, 5, header))
    with pytest.raises(WireError):
        decode_answer(KEY, number, encode_answer(KEY, 5, WriteOutcome.WRITTEN))


@given(outcome=st.sampled_from(WriteOutcome), place=st.integers(0, ANSWER_BYTES * 8 - 1))
def test_one_flipped_bit_of_an_answer_is_found(outcome: WriteOutcome, place: int) -> None:
    record = bytearray(encode_answer(KEY, 5, outcome))
    record[place // 8] ^= 1 << place % 8
    with pytest.raises(WireError):
        decode_answer(KEY, 5, record)


@given(
    magic=st.sampled_from([b"BKA1", b"BKV1", b"BKA2"]), number=st.integers(0, 9), outcome=st.integers(0, 255)
)
def test_only_the_answer_that_is_due_is_taken_though_others_have_the_key(
    magic: bytes, number: int, outcome: int
) -> None:
    record = sealed(KEY, ANSWER.pack(magic, number, outcome))
    if (magic, number) == (b"BKA1", 5) and outcome < len(WriteOutcome):
        assert decode_answer(KEY, 5, record) == outcome
    else:
        with pytest.raises(WireError, match="wrong answer"):
            decode_answer(KEY, 5, record)
