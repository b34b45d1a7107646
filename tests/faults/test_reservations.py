"""What a transfer may be asked for: by a name of the caller's, and from any token on that starts a page."""

import secrets
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from baton.errors import PeerGone
from baton.kvtransfer.protocol.handoff import Owner
from baton.kvtransfer.protocol.messages import Refuse, Reserve
from tests.endpoint_host import NUM_PAGES, Host
from tests.rogue_peer import RoguePeer
from tests.transfer_ends import wait_for

NUM_UNITS = 4


class AskedHost(Host):
    """Keeps what it was asked for."""

    def __init__(self, **options: Any) -> None:
        self.asked: list[Reserve] = []
        self.refuses = False
        super().__init__(**options)

    def _admit(self, request: Reserve, num_pages: int) -> Owner | None:
        self.asked.append(request)
        return None if self.refuses else super()._admit(request, num_pages)


@pytest.fixture
def source() -> Iterator[Host]:
    made = Host(is_shared=False)
    yield made
    made.close()


@pytest.fixture
def destination() -> Iterator[AskedHost]:
    made = AskedHost(page_size=64, num_pages=NUM_PAGES // 4)
    yield made
    made.close()


def start(source: Host, destination: Host, **options: Any) -> bytes:
    """The transfer's id; ValueError as of the endpoint."""

    def call() -> bytes:
        link = source._link(destination.address())
        return source.endpoint.start(link, NUM_UNITS, deadline_s=10, **options)

    transfer: bytes = source._call(call)
    return transfer


def granted(source: Host) -> list[bytes]:
    taken: list[bytes] = source._call(source.endpoint.take_granted)
    return taken


def test_the_destination_knows_a_transfer_by_the_callers_name(source: Host, destination: AskedHost) -> None:
    name = secrets.token_bytes(16)
    assert start(source, destination, transfer=name, position=128) == name
    wait_for(lambda: granted(source) == [name])
    assert [(each.transfer, each.position) for each in destination.asked] == [(name, 128)]
    assert granted(source) == []
    for taken in (name, name[:15], name + b"x"):
        with pytest.raises(ValueError, match="started before|16 bytes"):
            start(source, destination, transfer=taken)
    assert start(source, destination) != name
    wait_for(lambda: len(granted(source)) == 1)


def test_a_transfer_that_is_refused_was_never_granted(source: Host, destination: AskedHost) -> None:
    destination.refuses = True
    transfer = start(source, destination)
    assert source.outcome(transfer.hex()) == "failed"
    assert source.ended()[-1][1] == "refused: no room"
    assert granted(source) == []


@pytest.mark.parametrize("position", [1, 16, 48, 65])
def test_what_starts_no_page_of_both_sides_is_our_mistake(
    source: Host, destination: AskedHost, position: int
) -> None:
    with pytest.raises(ValueError, match=f"token {position} .*starts no page"):
        start(source, destination, position=position)
    assert not destination.asked and source.counts()["open"] == 0


@pytest.mark.parametrize("position", [-64, 2**31])
def test_there_is_no_such_token(source: Host, destination: AskedHost, position: int) -> None:
    with pytest.raises(ValueError, match="no sequence has a token"):
        start(source, destination, position=position)


CHANGES: list[Callable[[Host], dict[str, int]]] = [
    lambda _: {"num_parts": 2},
    lambda host: {"position": host.endpoint.settings.layout.page_size // 2},
]


@pytest.mark.parametrize("changes", CHANGES)
def test_a_peer_that_counts_otherwise_is_dropped(
    destination: AskedHost, changes: Callable[[Host], dict[str, int]]
) -> None:
    with RoguePeer(destination.address()) as peer:
        request = Reserve(transfer=b"t" * 16, num_units=1, deadline_ms=1000, **changes(destination))
        peer.say(request)
        with pytest.raises(PeerGone):
            peer.hear(Refuse)
    assert destination.counts()["protocol"] == 1 and not destination.asked
