"""Hand-offs of a pool that sockets and digests reach by way of staging memory, as they do a GPU's.

A CPU's packing stands in for the GPU's; pools in place and staged ones hand over to each other.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from baton.kvtransfer.ranks import executor
from baton.kvtransfer.transports.base import LocalRank
from tests.endpoint_host import NUM_PAGES, Host

NUM_UNITS = 24


class StagedRank(LocalRank):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.memory = None


@pytest.fixture(params=["staged to staged", "staged to in place", "in place to staged"])
def kinds(request: pytest.FixtureRequest) -> list[str]:
    return str(request.param).split(" to ")


@pytest.fixture
def source(kinds: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    yield from host(kinds[0], 16, monkeypatch)


@pytest.fixture(params=[16, 32])
def destination(
    kinds: list[str], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Host]:
    yield from host(kinds[1], request.param, monkeypatch)


def host(kind: str, page_size: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.setattr(executor, "LocalRank", StagedRank if kind == "staged" else LocalRank)
    made = Host(page_size, is_shared=False)
    made.fill(page_size)
    yield made
    made.close()


def test_pages_arrive_exactly_over_tcp(source: Host, destination: Host) -> None:
    for _ in range(3):
        assert source.send(destination.address(), NUM_UNITS) == "handed_over"
        outcome, _, digest = destination.ended()[-1]
        assert (outcome, digest) == ("adopted", source.sent)
    assert source.transports()["tcp"] == 1
    assert source.counts()["FREE"] == destination.counts()["FREE"] == NUM_PAGES


@pytest.mark.parametrize("destination", [16], indirect=True)
def test_a_flipped_bit_is_found_and_the_page_fetched_again(source: Host, destination: Host) -> None:
    destination.flip_bits(1)
    assert source.send(destination.address(), NUM_UNITS) == "handed_over"
    assert destination.ended()[-1][2] == source.sent


def test_an_abort_gives_all_pages_back(source: Host, destination: Host) -> None:
    address = destination.address()
    for _ in range(5):
        assert source.send(address, NUM_UNITS, abort_at="after Grant") in ("cancelled", "handed_over")
    assert source.send(address, NUM_UNITS) == "handed_over"
    assert destination.ended()[-1][2] == source.sent
