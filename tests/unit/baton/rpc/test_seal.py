import pytest

from baton.errors import WireError
from baton.messages.bounds import MAX_BODY_BYTES, SEAL_BYTES
from baton.rpc.auth import Role
from baton.rpc.session import Seals

KEY = b"s" * 32


def ends() -> tuple[Seals, Seals]:
    return Seals(KEY, Role.CONNECTING), Seals(KEY, Role.ACCEPTING)


@pytest.mark.parametrize("body", [b"", b"x", b"y" * 10_000, bytes(MAX_BODY_BYTES)])
def test_sealed_bodies_open_in_order(body: bytes) -> None:
    one, other = ends()
    for _ in range(3):
        assert other.open(one.seal(body)) == body
        assert one.open(other.seal(body[:5])) == body[:5]


def test_every_byte_counts() -> None:
    sealed = ends()[0].seal(b"body")
    for index in range(len(sealed)):
        changed = bytearray(sealed)
        changed[index] ^= 0x80
        with pytest.raises(WireError) as caught:
            ends()[1].open(bytes(changed))
        assert caught.value.reason == "seal"


@pytest.mark.parametrize("length", range(SEAL_BYTES + 1))
def test_body_too_short_for_a_seal_is_refused(length: int) -> None:
    with pytest.raises(WireError):
        ends()[1].open(bytes(length))


def test_repeated_omitted_swapped_and_reflected_bodies_are_refused() -> None:
    one, other = ends()
    first, second = one.seal(b"first"), one.seal(b"second")
    with pytest.raises(WireError):
        other.open(second)
    with pytest.raises(WireError):
        one.open(first)
    assert other.open(first) == b"first"
    with pytest.raises(WireError):
        other.open(first)
    assert other.open(second) == b"second"


def test_body_that_is_too_long_is_not_counted() -> None:
    one, other = ends()
    with pytest.raises(WireError, match="do not fit"):
        one.seal(bytes(MAX_BODY_BYTES + 1))
    assert other.open(one.seal(b"next")) == b"next"


def test_another_session_opens_nothing() -> None:
    with pytest.raises(WireError):
        Seals(b"t" * 32, Role.ACCEPTING).open(ends()[0].seal(b"body"))
