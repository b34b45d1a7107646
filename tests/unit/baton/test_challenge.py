import pytest

from baton.challenge import NONCE_BYTES, Challenge, Role
from baton.errors import ConfigError, WireError

KEY, OTHER_KEY = b"k" * 16, b"o" * 16


def challenge_pair(connecting_key: bytes, accepting_key: bytes) -> tuple[Challenge, Challenge]:
    return Challenge(connecting_key, Role.CONNECTING), Challenge(accepting_key, Role.ACCEPTING)


def test_ends_with_one_key_agree_on_a_session_key() -> None:
    connecting, accepting = challenge_pair(KEY, KEY)
    answer = accepting.receive(connecting.first())
    assert answer is not None and accepting.session_key is None
    proof = connecting.receive(answer)
    assert proof is not None
    assert accepting.receive(proof) is None
    assert connecting.session_key == accepting.session_key is not None


def test_every_session_has_its_own_key() -> None:
    keys = set()
    for _ in range(3):
        connecting, accepting = challenge_pair(KEY, KEY)
        connecting.receive(accepting.receive(connecting.first()) or b"")
        keys.add(connecting.session_key)
    assert len(keys) == 3


def test_connecting_end_finds_a_wrong_key_first() -> None:
    connecting, accepting = challenge_pair(KEY, OTHER_KEY)
    with pytest.raises(WireError, match="does not hold this cluster's key") as caught:
        connecting.receive(accepting.receive(connecting.first()) or b"")
    assert caught.value.reason == "key"
    assert connecting.session_key is None


def test_accepting_end_finds_a_wrong_key() -> None:
    connecting, accepting = challenge_pair(KEY, KEY)
    accepting.receive(connecting.first())
    with pytest.raises(WireError, match="does not hold"):
        accepting.receive(b"p" * 32)
    assert accepting.session_key is None


def test_recorded_handshake_proves_nothing_later() -> None:
    connecting, accepting = challenge_pair(KEY, KEY)
    nonce = connecting.first()
    proof = connecting.receive(accepting.receive(nonce) or b"")
    assert proof is not None
    later = Challenge(KEY, Role.ACCEPTING)
    later.receive(nonce)
    with pytest.raises(WireError, match="does not hold"):
        later.receive(proof)


def test_recorded_answer_proves_nothing_later() -> None:
    connecting, accepting = challenge_pair(KEY, KEY)
    answer = accepting.receive(connecting.first())
    assert answer is not None
    with pytest.raises(WireError, match="does not hold"):
        Challenge(KEY, Role.CONNECTING).receive(answer)


def test_nonce_sent_back_is_refused() -> None:
    connecting = Challenge(KEY, Role.CONNECTING)
    with pytest.raises(WireError, match="our own nonce back"):
        connecting.receive(connecting.first() + b"p" * 32)


def test_proof_of_one_role_is_none_of_the_other() -> None:
    # Without the key, an attacker who accepted our connection lets us answer a challenge in its place.
    victim = Challenge(KEY, Role.ACCEPTING)
    answer = victim.receive(b"n" * NONCE_BYTES)
    assert answer is not None
    with pytest.raises(WireError, match="does not hold"):
        victim.receive(answer[NONCE_BYTES:])


@pytest.mark.parametrize("message", [b"", b"x", b"x" * 31, b"x" * 33, b"x" * 1000])
def test_wrong_lengths_are_refused(message: bytes) -> None:
    for role in Role:
        with pytest.raises(WireError, match="was due"):
            Challenge(KEY, role).receive(message)


def test_nothing_is_taken_after_the_end() -> None:
    connecting, accepting = challenge_pair(KEY, KEY)
    connecting.receive(accepting.receive(connecting.first()) or b"")
    with pytest.raises(WireError, match="after its end"):
        connecting.receive(b"x" * 64)


def test_short_key_is_the_operators_mistake() -> None:
    with pytest.raises(ConfigError, match="16 bytes or more, it has 15"):
        Challenge(b"k" * 15, Role.CONNECTING)
