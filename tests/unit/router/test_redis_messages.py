import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import WireError
from baton.router.redis_messages import (
    AnyShared,
    SharedDispatch,
    SharedEnded,
    SharedJoined,
    SharedLeft,
    SharedStarted,
    Snapshot,
    decode_shared,
    decode_snapshot,
    decode_worker,
    encode,
)
from tests.node_peers import a_worker, id_of

W0 = a_worker("w0")
ATTEMPTS = ((id_of("r"), 1),)
MESSAGES: list[AnyShared] = [
    SharedDispatch(
        request_id=id_of("r"), attempt=0, decode=W0.id, num_prompt_tokens=1, num_tokens=2, num_output_tokens=1
    ),
    SharedStarted(attempts=ATTEMPTS),
    SharedEnded(attempts=ATTEMPTS),
    SharedJoined(worker=W0),
    SharedLeft(worker=W0.id),
]


def test_what_is_written_is_read() -> None:
    assert [decode_shared(encode(message)) for message in MESSAGES] == MESSAGES
    snapshot = Snapshot(3, "1-0", bytes(8), bytes(8))
    assert decode_snapshot(encode(snapshot)) == snapshot
    assert decode_worker(encode(W0)) == W0


@given(st.binary(max_size=200))
def test_anything_else_is_refused(body: bytes) -> None:
    for read in (decode_shared, decode_snapshot, decode_worker):
        with pytest.raises(WireError):
            read(body)


@given(st.sampled_from(MESSAGES), st.integers(0, 200), st.integers(0, 255))
def test_a_damaged_message_is_read_as_a_message_or_refused(message: AnyShared, at: int, byte: int) -> None:
    body = bytearray(encode(message))
    body[at % len(body)] = byte
    try:
        assert type(decode_shared(bytes(body))) in {type(each) for each in MESSAGES}
    except WireError as error:
        assert error.reason == "message"


def test_a_snapshot_whose_parts_do_not_fit_is_refused() -> None:
    whole = encode(Snapshot(3, "1-0", bytes(8), bytes(8)))
    broken = whole.replace(b"\xc4\x08" + bytes(8), b"\xc4\x07" + bytes(7), 1)
    with pytest.raises(WireError, match="7 bytes of keys"):
        decode_snapshot(broken)
