from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import WireError
from baton.messages.control import Ended, KvEventBatch, Started
from baton.messages.workers import Tier
from baton.router.redis.messages import (
    MESSAGE,
    SEAL_BYTES,
    WORKER,
    AnyShared,
    Codec,
    Place,
    SharedDispatch,
    Snapshot,
    pages_of,
    snapshot_of,
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
    Started(attempts=ATTEMPTS),
    Ended(attempts=ATTEMPTS),
]
SNAPSHOT = Snapshot(3, "1-0", {Tier.DEVICE: bytes(16), Tier.DISK: bytes(8)})
PLACES: tuple[Place[Any], ...] = (MESSAGE, WORKER, snapshot_of(W0.id), pages_of(W0.id))
PAGES = KvEventBatch(first=0, keys=bytes(8), tier=None)


def test_written_values_are_read() -> None:
    assert [CODEC.decode(MESSAGE, CODEC.encode(MESSAGE, message)) for message in MESSAGES] == MESSAGES
    assert CODEC.decode(snapshot_of(W0.id), CODEC.encode(snapshot_of(W0.id), SNAPSHOT)) == SNAPSHOT
    assert CODEC.decode(WORKER, CODEC.encode(WORKER, W0)) == W0
    assert CODEC.decode(pages_of(W0.id), CODEC.encode(pages_of(W0.id), PAGES)) == PAGES


@given(st.binary(max_size=200))
def test_other_bytes_are_refused(body: bytes) -> None:
    for place in PLACES:
        with pytest.raises(WireError):
            CODEC.decode(place, body)


@given(st.sampled_from(MESSAGES), st.integers(0, 200), st.integers(1, 255))
def test_changed_message_is_refused(message: AnyShared, at: int, change: int) -> None:
    sealed = bytearray(CODEC.encode(MESSAGE, message))
    sealed[at % len(sealed)] ^= change
    with pytest.raises(WireError, match="no router of this cluster"):
        CODEC.decode(MESSAGE, bytes(sealed))


def test_value_of_another_cluster_or_place_is_refused() -> None:
    cases: tuple[tuple[Place[Any], bytes], ...] = (
        (WORKER, OTHER.encode(WORKER, W0)),
        (MESSAGE, CODEC.encode(WORKER, W0)),
        (WORKER, CODEC.encode(MESSAGE, MESSAGES[0])),
        (snapshot_of(id_of("w1")), CODEC.encode(snapshot_of(W0.id), SNAPSHOT)),
        (pages_of(id_of("w1")), CODEC.encode(pages_of(W0.id), PAGES)),
    )
    for place, sealed in cases:
        with pytest.raises(WireError, match="no router of this cluster"):
            CODEC.decode(place, sealed)


@pytest.mark.parametrize(
    ("snapshot", "complaint"),
    [
        ({"next_number": -1, "stream_id": "1-0", "pages": {}}, "next_number"),
        ({"next_number": 1, "stream_id": "here", "pages": {}}, "stream_id"),
        ({"next_number": 1, "stream_id": "1-0", "pages": {"tape": b""}}, "tape"),
        ({"next_number": 1, "stream_id": "1-0", "pages": {"host": bytes(7)}}, "8 bytes each"),
        ({"next_number": 1, "stream_id": "1-0", "keys": b"", "values": b""}, "unknown field `keys`"),
    ],
)
def test_sealed_but_invalid_snapshot_is_refused(snapshot: dict[str, object], complaint: str) -> None:
    """A router of another version may write such a snapshot."""
    place: Place[Any] = snapshot_of(W0.id)
    with pytest.raises(WireError, match=complaint):
        CODEC.decode(place, CODEC.encode(place, snapshot))


def test_seal_has_sixteen_bytes() -> None:
    assert len(CODEC.encode(WORKER, W0)) - len(msgspec.msgpack.encode(W0)) == SEAL_BYTES == 16
