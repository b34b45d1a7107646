import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import WireError
from baton.messages.control import KvEventBatch
from baton.router.redis.messages import (
    SEAL_BYTES,
    AnyShared,
    Codec,
    SharedDispatch,
    SharedEnded,
    SharedStarted,
    Snapshot,
)
from tests.node_peers import a_worker, id_of

W0 = a_worker("w0")
CODEC = Codec(b"k" * 32)
OTHER = Codec(b"l" * 32)
ATTEMPTS = ((id_of("r"), 1),)
MESSAGES: list[AnyShared] = [
    SharedDispatch(
        request_id=id_of("r"), attempt=0, decode=W0.id, num_prompt_tokens=1, num_tokens=2, num_output_tokens=1
    ),
    SharedStarted(attempts=ATTEMPTS),
    SharedEnded(attempts=ATTEMPTS),
]
SNAPSHOT = Snapshot(3, "1-0", bytes(8), bytes(8))
PAGES = KvEventBatch(first=0, keys=bytes(16), pages=(1,), generations=(1,))


def test_written_values_are_read() -> None:
    assert [CODEC.decode_shared(CODEC.encode_shared(message)) for message in MESSAGES] == MESSAGES
    assert CODEC.decode_snapshot(W0.id, CODEC.encode_snapshot(W0.id, SNAPSHOT)) == SNAPSHOT
    assert CODEC.decode_worker(CODEC.encode_worker(W0)) == W0
    assert CODEC.decode_pages(W0.id, CODEC.encode_pages(W0.id, PAGES)) == PAGES


@given(st.binary(max_size=200))
def test_other_bytes_are_refused(body: bytes) -> None:
    for read in (
        CODEC.decode_shared,
        CODEC.decode_worker,
        lambda sealed: CODEC.decode_snapshot(W0.id, sealed),
        lambda sealed: CODEC.decode_pages(W0.id, sealed),
    ):
        with pytest.raises(WireError):
            read(body)


@given(st.sampled_from(MESSAGES), st.integers(0, 200), st.integers(1, 255))
def test_changed_message_is_refused(message: AnyShared, at: int, change: int) -> None:
    sealed = bytearray(CODEC.encode_shared(message))
    sealed[at % len(sealed)] ^= change
    with pytest.raises(WireError, match="no router of this cluster"):
        CODEC.decode_shared(bytes(sealed))


def test_value_of_another_cluster_or_place_is_refused() -> None:
    for read, sealed in (
        (CODEC.decode_worker, OTHER.encode_worker(W0)),
        (CODEC.decode_shared, CODEC.encode_worker(W0)),
        (CODEC.decode_worker, CODEC.encode_shared(MESSAGES[0])),
    ):
        with pytest.raises(WireError, match="no router of this cluster"):
            read(sealed)
    with pytest.raises(WireError, match="no router of this cluster"):
        CODEC.decode_snapshot(id_of("w1"), CODEC.encode_snapshot(W0.id, SNAPSHOT))
    with pytest.raises(WireError, match="no router of this cluster"):
        CODEC.decode_pages(id_of("w1"), CODEC.encode_pages(W0.id, PAGES))


@pytest.mark.parametrize(
    ("snapshot", "complaint"),
    [
        ({"next_number": -1, "stream_id": "1-0", "keys": b"", "values": b""}, "next_number"),
        ({"next_number": 1, "stream_id": "here", "keys": b"", "values": b""}, "stream_id"),
        ({"next_number": 1, "stream_id": "1-0", "keys": bytes(7), "values": bytes(8)}, "7 bytes of keys"),
    ],
)
def test_sealed_but_invalid_snapshot_is_refused(
    snapshot: dict[str, int | str | bytes], complaint: str
) -> None:
    """A router of another version may write such a snapshot."""
    place = f"snapshot {W0.id}"
    with pytest.raises(WireError, match=complaint):
        CODEC.decode_snapshot(W0.id, CODEC._seal(place, msgspec.msgpack.encode(snapshot)))


def test_seal_has_sixteen_bytes() -> None:
    assert len(CODEC.encode_worker(W0)) - len(msgspec.msgpack.encode(W0)) == SEAL_BYTES == 16
