"""Headers and answers, as written and as damaged."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import WireError
from baton.kvtransfer.transports.records import (
    ANSWER_BYTES,
    HEADER_BYTES,
    MAX_PART_BYTES,
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
U32 = st.integers(0, 2**32 - 1)
HEADERS = st.builds(
    PartHeader, st.binary(min_size=16, max_size=16), U32, U32, U32, st.integers(1, MAX_PART_BYTES)
)


@given(header=HEADERS, number=st.integers(0, 2**40))
def test_header_survives_the_wire(header: PartHeader, number: int) -> None:
    record = encode_header(KEY, number, header)
    assert len(record) == HEADER_BYTES and decode_header(KEY, number, record) == header


@given(header=HEADERS, place=st.integers(0, HEADER_BYTES * 8 - 1))
def test_one_flipped_bit_of_a_header_is_found(header: PartHeader, place: int) -> None:
    record = bytearray(encode_header(KEY, 5, header))
    record[place // 8] ^= 1 << place % 8
    with pytest.raises(WireError):
        decode_header(KEY, 5, record)


@pytest.mark.parametrize("number", [4, 6])
def test_repeated_or_missing_record_is_found(number: int) -> None:
    header = PartHeader(b"a" * 16, 1, 0, 1, 8)
    with pytest.raises(WireError):
        decode_header(KEY, number, encode_header(KEY, 5, header))
    with pytest.raises(WireError):
        decode_answer(KEY, number, encode_answer(KEY, 5, WriteOutcome.WRITTEN))


def test_record_of_another_stream_is_found() -> None:
    record = encode_header(stream_key(b"other"), 0, PartHeader(b"a" * 16, 1, 0, 1, 8))
    with pytest.raises(WireError, match="seal"):
        decode_header(KEY, 0, record)


@pytest.mark.parametrize("num_bytes", [0, MAX_PART_BYTES + 1, 2**63])
def test_no_part_is_empty_or_larger_than_a_stream_takes(num_bytes: int) -> None:
    record = encode_header(KEY, 0, PartHeader(b"a" * 16, 1, 0, 1, num_bytes))
    with pytest.raises(WireError, match="length"):
        decode_header(KEY, 0, record)


@pytest.mark.parametrize("outcome", WriteOutcome)
def test_answer_survives_the_wire(outcome: WriteOutcome) -> None:
    record = encode_answer(KEY, 9, outcome)
    assert len(record) == ANSWER_BYTES and decode_answer(KEY, 9, record) is outcome


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


@given(record=st.binary(max_size=80))
def test_noise_is_no_record(record: bytes) -> None:
    with pytest.raises(WireError):
        decode_header(KEY, 0, record)
    with pytest.raises(WireError):
        decode_answer(KEY, 0, record)
