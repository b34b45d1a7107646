"""Two ends of a connection without sockets: the handshake, frames, and seals."""

from collections.abc import Callable

import pytest

from baton.errors import WireError
from baton.messages.bounds import MAX_BODY_BYTES, MAX_FRAME_BYTES
from baton.rpc.auth import ANSWER_BYTES, LinkSecret, Role
from baton.rpc.session import FRAME_TIMEOUT_S, VERSION, Session, encode_frame

KEY, OTHER_KEY = b"k" * 16, b"o" * 16


class End:
    """One end; `written` has its frames of the handshake."""

    def __init__(self, role: Role, key: LinkSecret = KEY, schema: bytes = bytes(8)) -> None:
        self.written: list[bytes] = []
        self.session = Session(key, role, self.written.append, schema=schema)
        self.session.open()

    def take(self, stream: bytes, now_s: float = 0.0) -> list[bytes]:
        return list(self.session.receive(stream, now_s))


def ends(key: LinkSecret = KEY, other_key: LinkSecret = KEY) -> tuple[End, End]:
    return End(Role.CONNECTING, key), End(Role.ACCEPTING, other_key)


def shake(connecting: End, accepting: End) -> None:
    """Carry the frames of the handshake. WireError at the end that refuses first."""
    accepting.take(connecting.written[0])
    connecting.take(accepting.written[0])
    accepting.take(connecting.written[1])


@pytest.fixture
def proven() -> tuple[End, End]:
    connecting, accepting = ends()
    shake(connecting, accepting)
    assert connecting.session.session_key == accepting.session.session_key
    return connecting, accepting


@pytest.mark.parametrize("size", [1, 4, 7, 1000, 10**6])
def test_bodies_come_out_in_order_however_the_stream_is_cut(proven: tuple[End, End], size: int) -> None:
    for sender, receiver in (proven, proven[::-1]):
        bodies = [b"", b"a", b"b" * 1000, b""]
        stream = b"".join(map(sender.session.frame, bodies))
        parts = [stream[start : start + size] for start in range(0, len(stream), size)]
        assert [body for part in parts for body in receiver.take(part)] == bodies
        assert not receiver.session.has_begun


def test_handshake_and_first_frame_may_come_in_one_piece() -> None:
    connecting, accepting = ends()
    accepting.take(connecting.written[0])
    connecting.take(accepting.written[0])
    assert accepting.take(connecting.written[1] + connecting.session.frame(b"hello")) == [b"hello"]


def test_nothing_is_sealed_before_the_handshake() -> None:
    connecting, _ = ends()
    with pytest.raises(WireError, match="has not shown yet"):
        connecting.session.frame(b"secret")
    with pytest.raises(WireError, match="has not shown yet"):
        assert connecting.session.session_key


def test_connecting_end_refuses_another_key() -> None:
    connecting, accepting = ends(KEY, OTHER_KEY)
    with pytest.raises(WireError, match="does not hold this cluster's key") as caught:
        shake(connecting, accepting)
    assert caught.value.reason == "key" and not connecting.session.is_proven


def test_recorded_handshake_is_refused_later() -> None:
    connecting, accepting = ends()
    shake(connecting, accepting)
    later = End(Role.ACCEPTING)
    with pytest.raises(WireError, match="does not hold"):
        later.take(b"".join(connecting.written))


def test_other_schema_is_refused_at_both_ends_after_the_proof() -> None:
    connecting, accepting = End(Role.CONNECTING, schema=b"schema-1"), End(Role.ACCEPTING, schema=b"schema-2")
    accepting.take(connecting.written[0])
    for end, frame in ((connecting, 0), (accepting, 1)):
        with pytest.raises(WireError, match="mixed builds") as caught:
            end.take((accepting if end is connecting else connecting).written[frame])
        assert caught.value.reason == "version" and not end.session.is_proven


def test_stranger_cannot_announce_more_than_a_challenge() -> None:
    with pytest.raises(WireError, match=f"1 to {ANSWER_BYTES + 1} are allowed") as caught:
        End(Role.ACCEPTING).take(encode_frame(bytes(ANSWER_BYTES + 1))[:5])
    assert caught.value.reason == "length"


@pytest.mark.parametrize("length", [0, MAX_FRAME_BYTES + 1, 2**32 - 1])
def test_impossible_length_is_refused_by_its_header(proven: tuple[End, End], length: int) -> None:
    header = length.to_bytes(4, "big") + bytes([VERSION])
    for _ in range(2):  # the stream stays broken
        with pytest.raises(WireError, match=f"{length} bytes was announced") as caught:
            proven[0].take(header)
        assert caught.value.reason == "length"


def test_other_wire_version_is_refused(proven: tuple[End, End]) -> None:
    with pytest.raises(WireError, match=f"version 9 of the wire, we speak {VERSION}") as caught:
        proven[0].take((2).to_bytes(4, "big") + b"\x09x")
    assert caught.value.reason == "version"


def test_largest_body_passes_and_a_larger_one_is_not_counted(proven: tuple[End, End]) -> None:
    sender, receiver = proven
    assert receiver.take(sender.session.frame(bytes(MAX_BODY_BYTES))) == [bytes(MAX_BODY_BYTES)]
    with pytest.raises(WireError, match="do not fit"):
        sender.session.frame(bytes(MAX_BODY_BYTES + 1))
    assert receiver.take(sender.session.frame(b"next")) == [b"next"]


@pytest.mark.parametrize(
    "tamper",
    [
        lambda first, second, own: first + first,
        lambda first, second, own: second,
        lambda first, second, own: second + first,
        lambda first, second, own: own,
        lambda first, second, own: encode_frame(first[5:9]),
    ],
    ids=["repeat", "omit", "swap", "reflect", "shorten"],
)
def test_relay_cannot_change_the_stream(
    proven: tuple[End, End], tamper: Callable[[bytes, bytes, bytes], bytes]
) -> None:
    sender, receiver = proven
    first, second = sender.session.frame(b"first"), sender.session.frame(b"other")
    with pytest.raises(WireError, match="changed, repeated or left out") as caught:
        receiver.take(tamper(first, second, receiver.session.frame(b"first")))
    assert caught.value.reason == "seal"


def test_every_byte_of_a_frame_is_sealed() -> None:
    connecting, accepting = ends()
    shake(connecting, accepting)
    frame = connecting.session.frame(b"body")
    for index in range(5, len(frame)):
        changed = bytearray(frame)
        changed[index] ^= 0x80
        with pytest.raises(WireError, match="was changed") as caught:
            accepting.take(bytes(changed))
        assert caught.value.reason == "seal"


def test_frame_must_end_in_time_and_each_frame_has_its_own_time(proven: tuple[End, End]) -> None:
    sender, receiver = proven
    stream = sender.session.frame(b"1") + sender.session.frame(b"2")
    size, now_s = len(stream) // 2, 100.0
    receiver.take(stream[:7], now_s)
    receiver.session.check_deadline(now_s + FRAME_TIMEOUT_S - 0.1)
    assert receiver.take(stream[7 : size + 7], now_s + 9.0) == [b"1"]
    receiver.session.check_deadline(now_s + 9.0 + FRAME_TIMEOUT_S - 0.1)
    with pytest.raises(WireError, match="took longer than 10 s") as caught:
        receiver.session.check_deadline(now_s + 9.0 + FRAME_TIMEOUT_S)
    assert caught.value.reason == "slow"
    receiver.take(stream[size + 7 :], now_s + 9.0)
    receiver.session.check_deadline(1e9)
