import base64
import secrets
from random import Random

import pytest

from baton.errors import ConfigError
from baton.gateway.api.errors import ApiError
from baton.gateway.streams.resume import (
    MAX_ID_CHARS,
    MAX_RESUMABLE_CHOICES,
    DeliveredChoice,
    EventIds,
    ResumePoint,
)
from baton.messages.bounds import Kind
from baton.rpc.auth import KeyRing

KEY, OTHER_KEY = b"k" * 32, b"o" * 32
NOW_S = 1_700_000_000.0
POINT = ResumePoint(
    answer=b"a" * 16,
    digest=b"d" * 16,
    seed=2**63 - 1,
    created_s=int(NOW_S),
    expires_s=int(NOW_S) + 600,
    has_shown_usage=False,
    choices=(DeliveredChoice(True, True, 10, 4, 7, 1, 16), DeliveredChoice()),
)


def refusal(ids: EventIds, text: str, tenant: str = "acme", now_s: float = NOW_S) -> tuple[str, str]:
    with pytest.raises(ApiError, match="^Last-Event-ID: ") as raised:
        ids.open(text, tenant, now_s)
    assert (raised.value.status, raised.value.param) == (400, "Last-Event-ID")
    return raised.value.code or "", str(raised.value)


def test_gateway_with_the_same_key_opens_an_id() -> None:
    text = EventIds([KEY]).seal(POINT, "acme").decode()
    assert EventIds([KEY]).open(text, "acme", NOW_S) == POINT


def test_largest_id_fits_a_header() -> None:
    shown = DeliveredChoice(True, True, 2**24, 2**24, 2**32 - 1, 2**10, 2**24)
    largest = POINT.__class__(
        b"a" * 16, b"d" * 16, 2**63 - 1, 2**32, 2**32, True, (shown,) * MAX_RESUMABLE_CHOICES
    )
    text = EventIds([KEY]).seal(largest, "t" * 256)
    assert len(text) < MAX_ID_CHARS / 2
    assert EventIds([KEY]).open(text.decode(), "t" * 256, NOW_S) == largest


def test_id_shows_nothing_of_the_stream() -> None:
    sealed = base64.urlsafe_b64decode(EventIds([KEY]).seal(POINT, "acme") + b"==")
    assert POINT.answer not in sealed and POINT.digest not in sealed and b"acme" not in sealed


def test_foreign_ids_are_refused_with_one_error() -> None:
    ids = EventIds([KEY])
    text = ids.seal(POINT, "acme").decode()
    unknown = refusal(ids, "made up")
    assert unknown[0] == "unknown_event_id"
    assert refusal(ids, text, tenant="other") == unknown
    assert refusal(ids, text, tenant="") == unknown
    assert refusal(EventIds([OTHER_KEY]), text) == unknown
    # The error of an expired id does not tell its tenant either.
    assert refusal(ids, text, tenant="other", now_s=NOW_S + 10_000) == unknown


def test_each_changed_bit_makes_an_id_unknown() -> None:
    ids = EventIds([KEY])
    sealed = base64.urlsafe_b64decode(ids.seal(POINT, "acme") + b"==")
    for bit in range(len(sealed) * 8):
        changed = bytearray(sealed)
        changed[bit // 8] ^= 1 << bit % 8
        text = base64.urlsafe_b64encode(bytes(changed)).rstrip(b"=").decode()
        assert refusal(ids, text)[0] == "unknown_event_id"


def test_garbage_is_unknown() -> None:
    ids, random = EventIds([KEY]), Random(7)
    texts = ["", "=", "====", "\u00e9" * 8, "a" * 10_000_000, "%00", "A" * MAX_ID_CHARS, " ", "-_" * 20]
    texts += [random.randbytes(random.randrange(1, 200)).decode("latin-1") for _ in range(300)]
    texts += [secrets.token_urlsafe(random.randrange(1, 300)) for _ in range(300)]
    for text in texts:
        assert refusal(ids, text)[0] == "unknown_event_id"


def test_id_expires() -> None:
    ids = EventIds([KEY])
    text = ids.seal(POINT, "acme").decode()
    assert ids.open(text, "acme", POINT.expires_s - 0.5) == POINT
    assert refusal(ids, text, now_s=POINT.expires_s)[0] == "expired_event_id"


def test_ids_of_both_keys_are_opened_during_a_rotation() -> None:
    before, between = EventIds([KEY]), EventIds([OTHER_KEY, KEY])
    text = before.seal(POINT, "acme").decode()
    assert between.open(text, "acme", NOW_S) == POINT
    anew = between.seal(POINT, "acme").decode()
    assert EventIds([OTHER_KEY]).open(anew, "acme", NOW_S) == POINT
    refusal(before, anew)


def test_running_gateway_follows_a_rotation() -> None:
    ring = KeyRing.of(KEY, Kind.GATEWAY)
    ids = EventIds(ring)
    text = ids.seal(POINT, "acme").decode()
    ring.replace(KeyRing.of((OTHER_KEY, KEY), Kind.GATEWAY).generations)
    assert ids.open(text, "acme", NOW_S) == POINT
    assert EventIds([OTHER_KEY]).open(ids.seal(POINT, "acme").decode(), "acme", NOW_S) == POINT
    ring.replace(KeyRing.of(OTHER_KEY, Kind.GATEWAY).generations)
    assert refusal(ids, text)[0] == "unknown_event_id"


def test_without_a_key_no_id_is_sealed() -> None:
    with pytest.raises(ConfigError):
        EventIds([])
