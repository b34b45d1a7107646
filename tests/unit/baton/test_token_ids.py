import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import InvalidRequest
from baton.request import TokenIds

ids = st.lists(st.integers(0, 2**32 - 1), max_size=40)
bounds = st.none() | st.integers(-50, 50)


@given(ids, ids)
def test_token_ids_are_the_sequence_that_they_were_made_of(before: list[int], after: list[int]) -> None:
    token_ids = TokenIds.of(before)
    assert list(token_ids) == before and len(token_ids) == len(before)
    assert [token_ids[at] for at in range(-len(before), len(before))] == 2 * before
    assert tuple(token_ids + after) == (*before, *after)
    assert (token_ids == TokenIds.of(after)) == (before == after)
    assert hash(token_ids) == hash(TokenIds.of(tuple(before))) and TokenIds.of(token_ids) is token_ids


@given(ids, bounds, bounds, st.none() | st.sampled_from((-3, -1, 1, 2)))
def test_slice_has_the_ids_of_a_tuples_slice(
    unpacked: list[int], start: int | None, stop: int | None, step: int | None
) -> None:
    assert tuple(TokenIds.of(unpacked)[start:stop:step]) == tuple(unpacked)[start:stop:step]


@pytest.mark.parametrize("bad", [-1, 2**32, 1.5, "7"])
def test_id_of_more_than_32_bits_is_refused(bad: int) -> None:
    with pytest.raises(InvalidRequest, match=f"token id {bad!r}: expected an integer from 0 to 4294967295"):
        TokenIds.of((1, bad))


@pytest.mark.parametrize("at", [-3, 2])
def test_index_outside_the_sequence_is_an_error(at: int) -> None:
    with pytest.raises(IndexError, match="is out of range for 2 token ids"):
        TokenIds.of((1, 2))[at]


@given(ids)
def test_message_carries_token_ids(unpacked: list[int]) -> None:
    data = msgspec.msgpack.encode(TokenIds.of(unpacked))
    assert msgspec.msgpack.decode(data, type=TokenIds) == TokenIds.of(unpacked)


@pytest.mark.parametrize(
    "sent", [[b"12345"], [b"1234", 1], [[{}]], ["1234"], [1, 2], [], b"1234", None, {"packed": b""}]
)
def test_message_with_other_values_for_token_ids_is_refused(sent: object) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=TokenIds)
