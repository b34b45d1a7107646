import pytest

from baton.errors import WireError
from baton.messages.bounds import MAX_FRAME_BYTES
from baton.rpc.session import VERSION, FrameReader, encode_frame


def test_bodies_come_out_however_the_stream_is_cut() -> None:
    bodies = [b"", b"a", b"b" * 1000, b""]
    stream = b"".join(encode_frame(body) for body in bodies)
    for size in (1, 2, 5, 6, 7, 1000, len(stream)):
        reader = FrameReader()
        cut = [stream[start : start + size] for start in range(0, len(stream), size)]
        assert [body for part in cut for body in reader.feed(part)] == bodies
        assert not reader.has_begun


def test_reader_wants_the_header_then_the_rest_of_its_frame() -> None:
    frame, reader = encode_frame(b"body"), FrameReader()
    assert reader.num_wanted == 5
    assert list(reader.feed(frame[:3])) == []
    assert (reader.num_wanted, reader.has_begun) == (2, True)
    assert list(reader.feed(frame[3:5])) == []
    assert reader.num_wanted == 4
    assert list(reader.feed(frame[5:])) == [b"body"]
    assert (reader.num_wanted, reader.has_begun) == (5, False)


@pytest.mark.parametrize("length", [0, MAX_FRAME_BYTES + 1, 2**32 - 1])
def test_impossible_length_is_refused_by_its_header_alone(length: int) -> None:
    reader = FrameReader()
    with pytest.raises(WireError, match=f"{length} bytes was announced") as caught:
        next(reader.feed(length.to_bytes(4, "big") + bytes([VERSION])))
    assert caught.value.reason == "length"


def test_another_version_is_refused_with_both_named() -> None:
    with pytest.raises(WireError, match=f"version 9 of the wire, we speak {VERSION}") as caught:
        next(FrameReader().feed((2).to_bytes(4, "big") + b"\x09x"))
    assert caught.value.reason == "version"


def test_reader_stays_broken() -> None:
    reader = FrameReader()
    for _ in range(2):
        with pytest.raises(WireError):
            next(reader.feed(b"\xff" * 5))


def test_largest_frame_is_the_bound_exactly() -> None:
    body = bytes(MAX_FRAME_BYTES - 1)
    assert list(FrameReader().feed(encode_frame(body))) == [body]
    with pytest.raises(WireError, match="do not fit"):
        encode_frame(body + b"x")
