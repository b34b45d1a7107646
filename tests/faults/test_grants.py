"""Transfers are granted under the id that both workers know, from any token on that starts a page of both."""

import secrets
from collections.abc import Callable
from typing import Any

import pytest

from baton.errors import PeerGone
from baton.kvtransfer.protocol.messages import Abort, Grant
from tests.endpoint_host import NUM_PAGES, EndpointHost
from tests.rogue_peer import RoguePeer
from tests.waiting import wait_for

NUM_UNITS = 4


@pytest.fixture
def source(make_host: Callable[..., EndpointHost]) -> EndpointHost:
    return make_host(is_shared=False)


@pytest.fixture
def destination(make_host: Callable[..., EndpointHost]) -> EndpointHost:
    return make_host(page_size=64, num_pages=NUM_PAGES // 4)


def grant(source: EndpointHost, destination: EndpointHost, transfer: bytes, **options: Any) -> None:
    destination.grant(source.address(), transfer.hex(), NUM_UNITS, **options)


def test_source_knows_a_transfer_by_the_callers_id(source: EndpointHost, destination: EndpointHost) -> None:
    transfer = secrets.token_bytes(16)
    grant(source, destination, transfer, position=128)
    wait_for(lambda: transfer in source.granted)
    granted = source.granted[transfer]
    assert (granted.position, granted.num_units, granted.unit_tokens) == (128, NUM_UNITS, 16)
    for taken in (transfer, transfer[:15], transfer + b"x"):
        with pytest.raises(ValueError, match="started before|16 bytes"):
            grant(source, destination, taken)


@pytest.mark.parametrize(
    ("position", "message"),
    [
        *((position, f"token {position} .*starts no page") for position in (1, 16, 48, 65)),
        *((position, "the position is a token") for position in (-64, 2**31)),
    ],
)
def test_position_inside_a_page_or_beyond_all_sequences_is_refused(
    source: EndpointHost, destination: EndpointHost, position: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        grant(source, destination, secrets.token_bytes(16), position=position)
    assert destination.counts()["open"] == 0


CHANGES: list[Callable[[EndpointHost], dict[str, Any]]] = [
    lambda host: {"position": host.endpoint.settings.layout.page_size // 2},
    lambda _: {"pages": (0, 1), "generations": (1, 1)},
    lambda _: {"num_layer_groups": 3},
]


@pytest.mark.parametrize("changes", CHANGES)
def test_peer_whose_grant_does_not_fit_the_layouts_is_dropped(
    destination: EndpointHost, changes: Callable[[EndpointHost], dict[str, Any]]
) -> None:
    fields: dict[str, Any] = {"pages": (0,), "generations": (1,), **changes(destination)}
    with RoguePeer(destination.address()) as peer:
        peer.say(Grant(transfer=b"t" * 16, epoch=1, num_units=1, deadline_ms=1000, **fields))
        with pytest.raises(PeerGone):
            peer.hear(Abort)
    counts = destination.counts()
    assert counts["protocol"] == 1 and counts["open"] == 0
