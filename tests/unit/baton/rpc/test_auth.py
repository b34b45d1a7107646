import pytest

from baton.errors import ConfigError, WireError
from baton.messages.bounds import Kind
from baton.rpc.auth import (
    EVENT_IDS,
    OPENING_BYTES,
    PAGES,
    Challenge,
    KeyRing,
    LinkKeys,
    LinkSecret,
    Role,
    derive,
    generation,
)

KEY, OTHER_KEY = b"k" * 16, b"o" * 16


def challenge_pair(connecting_key: bytes, accepting_key: bytes) -> tuple[Challenge, Challenge]:
    return Challenge(connecting_key, Role.CONNECTING), Challenge(accepting_key, Role.ACCEPTING)


def test_every_session_has_its_own_key() -> None:
    keys = set()
    for _ in range(3):
        connecting, accepting = challenge_pair(KEY, KEY)
        connecting.receive(accepting.receive(connecting.first()) or b"")
        keys.add(connecting.session_key)
    assert len(keys) == 3


def test_accepting_end_finds_a_wrong_key() -> None:
    connecting, accepting = challenge_pair(KEY, KEY)
    accepting.receive(connecting.first())
    with pytest.raises(WireError, match="does not hold"):
        accepting.receive(b"p" * 32)
    assert accepting.session_key is None


def test_nonce_sent_back_is_refused() -> None:
    connecting = Challenge(KEY, Role.CONNECTING)
    with pytest.raises(WireError, match="our own nonce back"):
        connecting.receive(connecting.first() + b"p" * 32)


def test_proof_of_one_role_is_none_of_the_other() -> None:
    # Without the key, an attacker who accepted our connection lets us answer a challenge in its place.
    victim = Challenge(KEY, Role.ACCEPTING)
    answer = victim.receive(Challenge(KEY, Role.CONNECTING).first())
    assert answer is not None
    with pytest.raises(WireError, match="does not hold"):
        victim.receive(answer[OPENING_BYTES:])


@pytest.mark.parametrize("message", [b"", b"x", b"x" * 31, b"x" * 33, b"x" * 1000])
def test_wrong_lengths_are_refused(message: bytes) -> None:
    for role in Role:
        with pytest.raises(WireError, match="expected a challenge"):
            Challenge(KEY, role).receive(message)


def test_message_after_the_handshake_is_refused() -> None:
    connecting, accepting = challenge_pair(KEY, KEY)
    connecting.receive(accepting.receive(connecting.first()) or b"")
    with pytest.raises(WireError, match="after its end"):
        connecting.receive(b"x" * 64)


def test_short_key_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="16 bytes or more, it has 15"):
        Challenge(b"k" * 15, Role.CONNECTING)


def run(connecting: Challenge, accepting: Challenge) -> None:
    """Run the handshake. Raises WireError at the end that refuses first."""
    proof = connecting.receive(accepting.receive(connecting.first()) or b"")
    assert proof is not None and accepting.receive(proof) is None


def ends(connecting: LinkSecret, accepting: LinkSecret) -> tuple[Challenge, Challenge]:
    return Challenge(connecting, Role.CONNECTING), Challenge(accepting, Role.ACCEPTING)


def keys_of(kind: Kind, *cluster_keys: bytes) -> LinkKeys:
    return LinkKeys(KeyRing.of(cluster_keys or (KEY,), kind))


DIALLED = (
    (Kind.GATEWAY, Kind.ROUTER),
    (Kind.WORKER, Kind.ROUTER),
    (Kind.OPERATOR, Kind.ROUTER),
    (Kind.GATEWAY, Kind.WORKER),
    (Kind.WORKER, Kind.WORKER),
)


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("other", Kind)
def test_processes_prove_which_they_are_where_one_connects_to_the_other(kind: Kind, other: Kind) -> None:
    connecting, accepting = ends(keys_of(kind), keys_of(other))
    if (kind, other) not in DIALLED:
        with pytest.raises(WireError, match="does not hold"):
            run(connecting, accepting)
        return
    run(connecting, accepting)
    assert connecting.session_key == accepting.session_key is not None
    assert connecting.peer is not None and accepting.peer is not None
    assert (accepting.peer.kind, connecting.peer.kind) == (kind, other)


class Liar(LinkKeys):
    """Claims to be of one kind, with the keys of another."""

    claimed = Kind.WORKER

    @property
    def kind(self) -> Kind:
        return self.claimed


def test_worker_is_no_router_to_another_worker_although_both_hold_the_key_of_the_pair() -> None:
    lie = Liar(KeyRing.of(KEY, Kind.WORKER))
    lie.claimed = Kind.ROUTER
    with pytest.raises(WireError, match="does not hold"):
        run(*ends(lie, keys_of(Kind.WORKER)))


@pytest.mark.parametrize("kind", [Kind.GATEWAY, Kind.ROUTER, Kind.OPERATOR])
def test_keys_of_a_gateway_do_not_make_it_a_worker(kind: Kind) -> None:
    for target in (Kind.ROUTER, Kind.WORKER, Kind.GATEWAY):
        if target is kind:
            continue  # the pair's key is then one that both hold, whatever else they say
        connecting, accepting = ends(Liar(KeyRing.of(KEY, kind)), keys_of(target))
        with pytest.raises(WireError, match="does not hold"):
            run(connecting, accepting)
        connecting, accepting = ends(keys_of(target), Liar(KeyRing.of(KEY, kind)))
        with pytest.raises(WireError, match="does not hold"):
            run(connecting, accepting)


def test_gateway_gets_no_key_of_page_links_and_no_cluster_key() -> None:
    held = generation(KEY, Kind.GATEWAY).secrets
    assert KEY not in held.values() and derive(KEY, PAGES) not in held.values()
    assert not any("worker" in purpose for purpose in held if "gateway" not in purpose)
    with pytest.raises(ConfigError, match="a gateway has no key for 'pages'"):
        LinkKeys(KeyRing.of(KEY, Kind.GATEWAY), PAGES)


def test_keys_of_different_purposes_and_clusters_differ() -> None:
    secrets = [
        *generation(KEY, Kind.GATEWAY).secrets.values(),
        *generation(OTHER_KEY, Kind.GATEWAY).secrets.values(),
    ]
    assert len(set(secrets)) == len(secrets)
    assert KeyRing.of(KEY, Kind.GATEWAY).derived(EVENT_IDS) == derive(KEY, EVENT_IDS)


def test_both_generations_are_accepted_while_keys_are_exchanged() -> None:
    for own in ((KEY,), (KEY, OTHER_KEY), (OTHER_KEY, KEY), (OTHER_KEY,)):
        for peers in ((KEY, OTHER_KEY), (OTHER_KEY, KEY)):
            run(*ends(keys_of(Kind.WORKER, *own), keys_of(Kind.ROUTER, *peers)))


def test_old_key_is_refused_once_it_is_retired() -> None:
    ring = KeyRing.of((OTHER_KEY, KEY), Kind.ROUTER)
    accepting = LinkKeys(ring)
    run(*ends(keys_of(Kind.WORKER, KEY), accepting))
    ring.replace((generation(OTHER_KEY, Kind.ROUTER),))
    with pytest.raises(WireError, match="does not hold"):
        run(*ends(keys_of(Kind.WORKER, KEY), accepting))
    run(*ends(keys_of(Kind.WORKER, OTHER_KEY), accepting))


def test_changed_preface_proves_nothing() -> None:
    connecting, accepting = challenge_pair(KEY, KEY)
    opening = bytearray(connecting.first())
    opening[-50] ^= 1  # in the schema
    with pytest.raises(WireError, match="does not hold"):
        connecting.receive(accepting.receive(bytes(opening)) or b"")
